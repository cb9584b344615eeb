import numpy as np

from tests.helpers.html_page import check_self_contained
from utils.drawing.page import Bullets, Card, Content, Facts, Gallery, Picture, Row, Section, Table, write_page

PIXELS = np.zeros((4, 5, 3), np.uint8)
HOSTILE = '<script>alert("1")</script> & \' " onload=x </svg></style><img src=x onerror=alert(1)> {{ 7 * 7 }}'


def page_of(path, text: str) -> str:
    """Returns a page with blocks of all kinds, each with ``text`` in all places."""
    blocks = [
        text,
        Facts([(text, text)]),
        Bullets(text, [(text, text)]),
        Table(text, [text], [[text]]),
        Row([[Picture(text, PIXELS)]]),
        Gallery(text, {text: "#20c05c"}, [Card([(text, Picture(text, PIXELS, is_photo=True))], text, text)]),
        Gallery(text, {}, [Card([("", text)], "", "")]),
    ]
    write_page(path, Content(text, text, [Section(text, blocks)], {}))
    return path.read_text(encoding="utf-8")


def test_text_is_escaped_everywhere_and_the_policy_admits_no_request(tmp_path):
    read = check_self_contained(page_of(tmp_path / "page.html", HOSTILE))
    images = [attributes for tag, attributes in read.tags if tag == "img"]
    assert [(image["class"], image["alt"]) for image in images] == [("figure", HOSTILE), ("photo", HOSTILE)]
    assert read.sections[HOSTILE].count(HOSTILE) == 16  # it arrives as text, complete
    (policy,) = (a["content"] for tag, a in read.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy == "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def test_pages_replace_control_characters_in_names(tmp_path):
    text = page_of(tmp_path / "page.html", "a\x1b[2Jb\x07c\x9bd\u202ee\u2066f\tg\nh")
    assert text.count("a\ufffd[2Jb\ufffdc\ufffdd\ufffde\ufffdf\tg\nh") > 10
