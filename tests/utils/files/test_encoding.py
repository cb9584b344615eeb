"""Text is UTF-8, and XML what it declares; anything else is refused."""

import pytest

from utils.errors import UserError
from utils.files.encoding import EncodingError, decode_utf8
from utils.files.safe_io import read_text
from utils.files.xml_files import parse_xml


@pytest.mark.parametrize("encoding", ["gbk", "latin-1", "utf-16"])
def test_text_in_another_encoding_is_refused_with_its_first_byte(encoding, tmp_path):
    """The encoding is not guessed: many bytes are text in several."""
    data = "a: \u00d7".encode(encoding)
    first = next(i for i in range(len(data)) if data[i] >= 0x80)
    with pytest.raises(EncodingError, match=f"byte {first}"):
        decode_utf8(data)
    assert decode_utf8("\ufeffa: \u00d7".encode()) == "a: \u00d7"
    (tmp_path / "a.txt").write_bytes(data)
    with pytest.raises(UserError, match=f"a.txt: .*byte {first}.*UTF-8$"):
        read_text(tmp_path / "a.txt")


@pytest.mark.parametrize(
    ("encoding", "word"), [("GB2312", "行人"), ("Shift_JIS", "ねこ"), ("UTF-16", "行人"), ("ISO-8859-1", "café")]
)
def test_xml_is_read_in_the_encoding_that_it_declares(encoding, word):
    text = f'<?xml version="1.0" encoding="{encoding}"?>\n<a>\n<b c="{word}">{word}</b></a>'
    root = parse_xml(text.encode(encoding))
    (child,) = root
    assert (child.text, child.attrib) == (word, {"c": word, "line": "3"})
