"""Text in encodings other than UTF-8: guesses the encoding, and decodes XML that declares its own."""

from __future__ import annotations

import codecs
import re

_SAMPLE_BYTES = 1 << 16
_BYTE_ORDER_MARKS = (  # UTF-32's begins with UTF-16's
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)
_KANA = re.compile("[\u3041-\u30ff]")
_BINARY = re.compile(rb"[\x00-\x08\x0e-\x1a]")
_PAIR = re.compile(rb"[\x81-\xfe][\xa1-\xfe]")  # a two-byte character
_BIG5_LAST_COMMON_LEAD = 0xC6  # lead byte of the last characters in common use
_HANGUL_ONLY = re.compile("[\x00-\x7f\uac00-\ud7a3]*")
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
    """The text is not UTF-8. The message names its probable encoding, and what to do."""


def decode_utf8(data: bytes) -> str:
    """Decodes UTF-8, with or without a byte order mark. Raises EncodingError for other encodings."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise EncodingError(_advice(data, error.start)) from None
    if "\0" in text and probable_encoding(data) == "UTF-16":  # ASCII text without a byte order mark
        raise EncodingError(_advice(data, text.index("\0")))
    return text


def encoding_advice(data: bytes) -> str:
    """Returns the message of `decode_utf8` about ``data``, or "" if it is UTF-8."""
    try:
        decode_utf8(data)
    except EncodingError as error:
        return str(error)
    return ""


def decode_loosely(data: bytes) -> str:
    """Decodes text in any encoding well enough to recognize the kind of file: its ASCII characters are right."""
    encoding = probable_encoding(data) if b"\0" in data else ""
    try:
        return data.decode(encoding or "utf-8-sig", "replace")
    except UnicodeError:  # UTF-16 without a byte order mark
        return data.replace(b"\0", b"").decode("utf-8", "replace")


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


def probable_encoding(data: bytes) -> str:
    """Guesses the encoding of text that is not UTF-8, for messages. Returns "" if the data does not look like text."""
    for mark, name in _BYTE_ORDER_MARKS:
        if data.startswith(mark):
            return name
    sample = data[:_SAMPLE_BYTES]
    if 0.4 < sample.count(0) / max(len(sample), 1) < 0.7:
        return "UTF-16"
    if _BINARY.search(sample):
        return ""
    if _KANA.search(_decoded(sample, "cp932")):
        return "Shift-JIS"
    if not _PAIR.search(sample):  # single accented letters among ASCII
        return "Windows-1252"
    if _decoded(sample, "gb2312"):
        korean = _decoded(sample, "euc_kr")
        return "GBK or EUC-KR" if korean and _HANGUL_ONLY.fullmatch(korean) else "GBK"
    if _decoded(sample, "big5") and all(lead <= _BIG5_LAST_COMMON_LEAD for lead in _leading_bytes(sample)):
        return "Big5"
    return "GBK" if _decoded(sample, "gb18030") else "Windows-1252"


def _decoded(sample: bytes, codec: str) -> str:
    """Decodes ``sample``, which may end within a character. Returns "" if it is not in this encoding."""
    try:
        return codecs.getincrementaldecoder(codec)().decode(sample)
    except UnicodeDecodeError:
        return ""


def _leading_bytes(sample: bytes) -> set[int]:
    """Returns the first bytes of all two-byte characters."""
    return {pair[0][0] for pair in re.finditer(rb"[\x81-\xfe].", sample, re.DOTALL)}


def _advice(data: bytes, position: int) -> str:
    name = probable_encoding(data)
    if not name:
        return f"not text (byte {position} is not UTF-8)"
    source = name.partition(" ")[0]
    return f"not UTF-8 but apparently {name}; save it as UTF-8, such as with iconv -f {source} -t UTF-8"
