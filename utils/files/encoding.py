"""Decodes UTF-8, and XML that declares another encoding."""

from __future__ import annotations

import codecs
import re

_XML_ENCODING = re.compile(rb"""\s*<\?xml[^>]{1,100}?encoding\s*=\s*["']([\w.:-]{1,40})["']""")
# Multibyte encodings by Python's names, and the codec that reads them, which includes the extensions that such files
# often use. XML parsers support none of them.
_MULTIBYTE_CODECS = {
    **dict.fromkeys(("gb2312", "gbk", "gb18030"), "gb18030"),
    **dict.fromkeys(("big5", "cp950", "big5hkscs"), "big5hkscs"),
    **dict.fromkeys(("shift_jis", "cp932", "shift_jis_2004"), "cp932"),
    **dict.fromkeys(("euc_kr", "cp949"), "cp949"),
    "euc_jp": "euc_jp",
}


class EncodingError(ValueError):
    """Text is not in the expected encoding. The message names the first byte that does not fit."""


def decode_utf8(data: bytes) -> str:
    """Decodes UTF-8, with or without a byte order mark. Raises EncodingError for other encodings."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise EncodingError(f"not UTF-8 (byte {error.start}); save it as UTF-8") from None


def decode_xml(data: bytes) -> bytes | str:
    """Prepares XML for a parser: decodes it if it declares a multibyte encoding, else returns ``data`` itself. Raises
    EncodingError if the content is not in the declared encoding."""
    declared = _XML_ENCODING.match(data)
    if declared is None:
        return data
    name = declared[1].decode("ascii")
    try:
        codec = _MULTIBYTE_CODECS.get(codecs.lookup(name).name)
        return data.decode(codec) if codec else data
    except LookupError:
        return data
    except UnicodeDecodeError as error:
        raise EncodingError(f"it declares the encoding {name}, but byte {error.start} does not fit") from None
