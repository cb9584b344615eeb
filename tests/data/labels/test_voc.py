"""Objects of Pascal VOC XML, and files that are unusable or contain something else."""

from __future__ import annotations

import pytest

from data.labels.findings import BAD_ROW, NOT_FINITE, UNKNOWN_CLASS
from data.labels.label_format import LabelRequest
from data.labels.rows import ROW_NUMBER, LabelFileError
from data.labels.voc import VOC, object_names, parse_voc
from data.split_files import FileStamp, ImageFile, LabelFile
from tests.helpers.label_files import label_row, problem_kinds, voc_file
from tests.helpers.messages import refused


def test_voc_objects_are_parsed():
    raw = parse_voc(voc_file(("b", 10, 20, 30, 60), ("a", "1.5", 2, 3, 4)), {"a": 0, "b": 1})
    assert raw.size_hw == (100, 200)
    assert raw.rows == [label_row(10, 20, 30, 60, class_id=1, number=3), label_row(1.5, 2, 3, 4, number=6)]
    assert parse_voc(voc_file(size=("100.0", "200.")), {}).size_hw == (100, 200)
    for size in [(0, 0), (100, 0), (-100, 200), ("100.5", 200), (10**20, 200), ("100,0", 200), ("", "")]:
        assert parse_voc(voc_file(size=size), {}).size_hw is None
    assert parse_voc(voc_file(("zebra", 1, 1, 2, 2)), None).rows[0][0] == 0


@pytest.mark.parametrize("tags", [("<objects>", "</objects>"), ("<list><group>", "</group></list>")])
def test_voc_objects_inside_other_elements_are_read(tags):
    data = voc_file(("b", 10, 20, 30, 60)).decode()
    start, end = data.index("<object>"), data.rindex("</object>") + len("</object>")
    wrapped = (data[:start] + tags[0] + data[start:end] + tags[1] + data[end:]).encode()
    assert parse_voc(wrapped, {"b": 1}) == parse_voc(data.encode(), {"b": 1})
    assert object_names(wrapped) == {"b"}


CORNERS_OF_B = "<xmin>1</xmin><ymin>2</ymin><xmax>30</xmax><ymax>40</ymax>"


@pytest.mark.parametrize(
    "element",
    [
        f"<Item><name>b</name><bndbox>{CORNERS_OF_B}</bndbox></Item>",
        f"<Item><name>b</name><box>{CORNERS_OF_B}</box></Item>",
        f"<objects><Item><name>b</name>{CORNERS_OF_B}</Item></objects>",
        f"<bndbox>{CORNERS_OF_B}</bndbox>",
    ],
)
def test_voc_boxes_of_no_object_are_reported(element):
    """Without them the image would be a background."""
    raw = parse_voc(f"<annotation>\n{element}</annotation>".encode(), {"b": 1})
    assert raw.rows == []
    assert problem_kinds(raw.problems) == [(2, BAD_ROW)]
    assert "with a box where VOC has <object>" in raw.problems[0].text


def test_malformed_voc_objects_are_reported():
    first = [("A", 1), *(("a", value) for value in ("x", "", "1_0", "٣", "nan"))]
    raw = parse_voc(voc_file(*((name, value, 1, 2, 2) for name, value in first)), {"a": 0})
    assert raw.rows == []
    expected = [UNKNOWN_CLASS, *[BAD_ROW] * 4, NOT_FINITE]
    assert problem_kinds(raw.problems) == list(zip(range(3, 21, 3), expected))
    assert "xmin" in raw.problems[2].text


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("<xmin>1</xmin>", "<xmin>1</xmin><xmin>9</xmin>", "two <xmin>"),
        ("<name>a</name>", "<name>a</name><name>b</name>", "two <name>"),
        ("<xmin>1</xmin>", "<xmin>1<b/>2</xmin>", "<b> inside <xmin>"),
        ("<bndbox>", "<bndbox></bndbox><bndbox>", "two <bndbox>"),
    ],
)
def test_ambiguous_voc_objects_are_bad_rows(old, new, what):
    data = voc_file(("a", 1, 2, 30, 40)).decode().replace(old, new, 1).encode()
    labels = parse_voc(data, {"a": 0, "b": 1})
    assert labels.rows == []
    assert what in labels.problems[0].text


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("", "1: malformed XML (no element found)"),
        ("<annotation>\n<object>", "2: malformed XML (no element found)"),
        ("<svg></svg>", "1: <svg> where VOC has <annotation>"),
        ("not xml", "1: malformed XML (syntax error)"),
        ('<!DOCTYPE annotation [<!ENTITY e "5">]>VOC', "1: declares the entity 'e'"),
        ('<!DOCTYPE annotation [<!ENTITY e SYSTEM "file:///etc/passwd">]>VOC', "1: declares the entity 'e'"),
        ('<?xml version="1.0" encoding="utf-7"?>VOC', "1: malformed XML (in an encoding that cannot be read)"),
        ('<?xml version="1.0" encoding="nonsense"?>VOC', "1: malformed XML (in an encoding that cannot be read)"),
    ],
)
def test_files_that_are_not_voc_or_have_entities_are_refused(data, message):
    """VOC stands for a valid file."""
    data = data.encode().replace(b"VOC", voc_file(("a", 1, 2, 30, 40)))
    with refused(message, LabelFileError):
        parse_voc(data, {"a": 0})


ENCODINGS = ["GB2312", "GBK", "Big5", "Shift_JIS", "EUC-KR", "UTF-16", "ISO-8859-1", "UTF-8"]


def word_in(encoding: str) -> str:
    """Returns a word with characters beyond ASCII that an encoding has."""
    if encoding == "ISO-8859-1":
        return "caf\u00e9"
    return "车" if encoding.startswith("GB") else "車"


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_voc_is_read_in_the_encoding_that_it_declares(encoding):
    word = word_in(encoding)
    text = f'<?xml version="1.0" encoding="{encoding}"?>' + voc_file((word, 1, 2, 30, 40)).decode()
    assert object_names(text.encode(encoding)) == {word}
    assert parse_voc(text.encode(encoding), {word: 0}).rows == [label_row(1, 2, 30, 40, number=3)]


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("end", ["<size>車车caf\u00e9", "\n</annotation>"])
def test_the_name_of_the_image_is_read_in_the_encoding_of_the_file(encoding, end):
    """Without it, a label file with another name than its image's would be of no image. ``end``: follows the name, and
    may be cut anywhere."""
    word = word_in(encoding)
    name = f"{word} &amp; {word}.jpg"
    text = f'<?xml version="1.0" encoding="{encoding}"?><annotation><filename>{name}</filename>{end}'
    data = text.encode(encoding, "ignore")
    expected = f"{word} & {word}.jpg"
    assert VOC.per_image.named_image(data) == expected
    assert {VOC.per_image.named_image(data[:length]) for length in range(len(data))} <= {"", expected}


@pytest.mark.parametrize(
    "declaration", ["", *(f'<?xml version="1.0" encoding="{name}"?>' for name in (*ENCODINGS, "latin-1"))]
)
@pytest.mark.parametrize("end", [b"", b"<size>", b"<source>\xe9</source>", b"<path>C:\\Jos\xe9\\x.png</path>"])
def test_the_name_of_the_image_is_read_even_if_the_rest_of_the_file_is_in_another_encoding(declaration, end):
    """Otherwise, the annotated image would be a background, without a message about its label file."""
    head = declaration.encode() + "<annotation><filename>日本.png</filename>".encode() + end
    assert VOC.per_image.named_image(head) == "日本.png"


@pytest.mark.parametrize(("separator", "location"), [("", "a.xml: object 2"), ("\n", "a.xml:3")])
def test_a_row_of_a_file_in_one_line_is_named_by_its_number(tmp_path, separator, location):
    box = "<bndbox><xmin>{}</xmin><ymin>2</ymin><xmax>20</xmax><ymax>30</ymax></bndbox>"
    objects = [f"<object><name>dog</name>{box.format(x1)}</object>" for x1 in (1, "x", 5)]
    (tmp_path / "a.xml").write_text(separator.join(["<annotation>", *objects, "</annotation>"]))
    image = ImageFile("a.png", name_in_split="a.png", stamp=None)
    files = [LabelFile("a.xml", FileStamp(size=1, mtime_ns=1))]
    source = VOC.read(LabelRequest(images=[image], files=files, root=tmp_path, names=("dog",)))
    labels = source.read(0)
    assert source.where(0, labels.problems[0].row_number) == location
    assert len({source.where(0, row[ROW_NUMBER - 1]) for row in labels.rows}) == 2
