import base64
import hashlib
import json

import numpy as np
from markupsafe import Markup

from tests.helpers.html_page import HtmlPage, check_self_contained
from utils.drawing import page
from utils.drawing.figures import Chart, Line, chart_svg

EVERY_PART, TABLE = "tests/utils/drawing/every_part.html", "tools/kfold/page.html"
HOSTILE = '<script>alert("1")</script> & \' " onload=x </svg></style><img src=x onerror=alert(1)> {{ 7 * 7 }}'


def hostile_page() -> str:
    x = np.arange(3.0)
    lines = [Line(HOSTILE, x, x), Line("b", x, x)]
    figures = [
        chart_svg(Chart(HOSTILE, lines, HOSTILE, HOSTILE, mark=(1.0, HOSTILE))),
        chart_svg(Chart(HOSTILE, [], HOSTILE, HOSTILE)),
    ]
    picture = (HOSTILE, Markup("<p>{}</p>").format(HOSTILE))
    return page.render(
        EVERY_PART,
        HOSTILE,
        HOSTILE,
        text=HOSTILE,
        code=page.code(HOSTILE),
        figures=figures,
        table=page.Table([HOSTILE], [[HOSTILE]], HOSTILE),
        bars=page.Bars([(HOSTILE, [1.0], HOSTILE), (HOSTILE, [1.0, 2.0], HOSTILE)], HOSTILE),
        gallery=page.Gallery(
            [page.Card([picture], HOSTILE, HOSTILE, [(HOSTILE, "1")])], [(HOSTILE, [(HOSTILE, HOSTILE)])], HOSTILE
        ),
    )


def test_text_is_escaped_everywhere():
    read = check_self_contained(hostile_page())
    assert not [tag for tag, _ in read.tags if tag == "img"]
    assert len(read.code) == 1
    assert "alert" not in read.code[0]
    assert read.sections[HOSTILE].count(HOSTILE) > 25  # it arrives as text, complete
    (card,) = (attributes for tag, attributes in read.tags if "data-tags" in attributes)
    assert json.loads(card["data-tags"]) == [[HOSTILE, "1"]]


def test_the_policy_admits_no_request_and_only_the_own_script():
    read = HtmlPage(hostile_page())
    (policy,) = (a["content"] for tag, a in read.tags if a.get("http-equiv") == "Content-Security-Policy")
    own = base64.b64encode(hashlib.sha256(read.code[0].encode()).digest()).decode()
    assert policy == f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{own}'"


def table_page(rows) -> str:
    return page.render(TABLE, "a", folds=page.Table(["x", "y"], rows, "c"), classes=page.Table([], [], "d"))


def test_numbers_in_tables_are_those_given_and_unknown_ones_are_marked():
    read = HtmlPage(table_page([["one", 0.12345], ["two", 12345], ["none", None], ["nan", float("nan")]]))
    assert read.tables["c"] == [
        ["x", "y"], ["one", "0.123"], ["two", "12,345"], ["none", "–"], ["nan", "–"],
    ]  # fmt: skip
    assert [a["data-value"] for tag, a in read.tags if "data-value" in a] == ["0.12345", "12345.0", "", ""]


def test_a_picture_is_stored_once_and_used_by_name(tmp_path):
    use, path = Markup('<use href="#p1"/>'), tmp_path / "page.html"
    table, pictures = page.Table(["x"], [[use], [use]], "c"), {"p1": (b"\xff\xd8jpeg", 4, 3)}
    page.write_page(path, TABLE, "a", pictures=pictures, folds=table, classes=table)
    read = check_self_contained(path.read_text(encoding="utf-8"))
    assert {a["href"] for tag, a in read.tags if tag == "use"} == {"#p1"}
    (image,) = (a for tag, a in read.tags if tag == "image")
    assert base64.b64decode(image["href"].removeprefix("data:image/jpeg;base64,")) == b"\xff\xd8jpeg"
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]


def test_undecodable_file_names_can_be_written(tmp_path):
    table = page.Table([page.code("image\udcff.png")], [], "c")
    page.write_page(tmp_path / "page.html", TABLE, "a", folds=table, classes=table)
    assert "image\\udcff.png" in (tmp_path / "page.html").read_text(encoding="utf-8")
