"""Text is UTF-8, and XML what it declares; anything else is refused."""

import time

import pytest

from utils.errors import UserError
from utils.files.encoding import EncodingError, decode_utf8
from utils.files.safe_io import read_text
from utils.files.xml_files import XmlError, parse_xml


@pytest.mark.parametrize("encoding", ["gbk", "big5", "latin-1", "utf-16"])
def test_text_in_another_encoding_is_refused_with_its_first_byte(encoding, tmp_path):
    """The encoding is not guessed: many bytes are text in several."""
    data = "a: \u00d7".encode(encoding)
    first = next(i for i in range(len(data)) if data[i] >= 0x80)
    with pytest.raises(EncodingError, match=f"byte {first}"):
        decode_utf8(data)
    (tmp_path / "a.txt").write_bytes(data)
    with pytest.raises(UserError, match=f"a.txt: .*byte {first}.*UTF-8$"):
        read_text(tmp_path / "a.txt")


@pytest.mark.parametrize("text", ["", "a", "\ufeffa", "行人", "a\0b", "caf\u00e9 \U0001f408"])
def test_utf8_is_read(text):
    assert decode_utf8(text.encode()) == text.removeprefix("\ufeff")


OF_SEVERAL_BYTES = ["GB2312", "Big5", "Shift_JIS", "EUC-KR"]
WORDS = {"GB": "行人", "gb": "行人", "Bi": "行人", "Sh": "ねこ", "EU": "車"}


@pytest.mark.parametrize("encoding", [*OF_SEVERAL_BYTES, "UTF-8", "UTF-16", "ISO-8859-1", "windows-1251"])
def test_xml_is_read_in_the_encoding_that_it_declares(encoding):
    word = {"ISO-8859-1": "caf\u00e9", "windows-1251": "\u043a\u043e\u0448\u043a\u0430"}.get(encoding)
    word = word or WORDS.get(encoding[:2], "行人")
    text = f'<?xml version="1.0" encoding="{encoding}"?>\n<a>\n<b c="{word}">{word}</b></a>'
    root = parse_xml(text.encode(encoding))
    (child,) = root
    assert (child.text, child.attrib) == (word, {"c": word, "line": "3"})


def test_a_damaged_file_with_a_dtd_is_refused_at_once():
    """The search for entities took hours for a file of a megabyte."""
    started = time.process_time()
    with pytest.raises(XmlError, match="malformed XML"):
        parse_xml(b'<!DOCTYPE a SYSTEM "a.dtd"><a b="' + b"&" * 20_000)
    assert time.process_time() - started < 0.5
