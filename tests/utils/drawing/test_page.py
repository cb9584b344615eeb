import unicodedata

import numpy as np

from tests.helpers.html_page import check_self_contained
from utils.drawing import page
from utils.drawing.figures import Picture

PICTURE = Picture(np.zeros((4, 5, 3), np.uint8))
EVERY_PART = "tests/utils/drawing/every_part.html"
HOSTILE = '<script>alert("1")</script> & \' " onload=x </svg></style><img src=x onerror=alert(1)> {{ 7 * 7 }}'


def page_of(text: str, table: page.HtmlTable) -> str:
    picture = page.CardPicture("", page.embed_image(b"\xff\xd8jpeg", "jpeg", text, "photo", 4.0))
    return page.render(
        EVERY_PART,
        text,
        text,
        text=text,
        code=page.code(text),
        picture=PICTURE,
        table=table,
        cards=[page.Card([picture], text, text, text)],
    )


def test_text_is_escaped_everywhere_and_the_policy_admits_no_request():
    read = check_self_contained(page_of(HOSTILE, page.HtmlTable([HOSTILE], [[HOSTILE]], HOSTILE)))
    images = [attributes for tag, attributes in read.tags if tag == "img"]
    assert [(image["class"], image["alt"]) for image in images] == [("figure", HOSTILE), ("photo", HOSTILE)]
    assert images[1]["src"] == "data:image/jpeg;base64,/9hqcGVn"
    assert read.sections[HOSTILE].count(HOSTILE) == 14  # it arrives as text, complete
    (policy,) = (a["content"] for tag, a in read.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy == "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def test_pages_replace_control_characters_in_names():
    name = "a\x1b[2Jb\x07c\x9bd\u202ee\u2066f\tg\nh"
    text = page_of(name, page.HtmlTable([name], [[name]], name))
    assert not [
        character
        for character in text
        if unicodedata.category(character) in ("Cc", "Cf") and character != "\n" and character != "\t"
    ]
    assert text.count("a\ufffd[2Jb\ufffdc\ufffdd\ufffde\ufffdf\tg\nh") > 10
