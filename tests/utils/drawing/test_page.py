import base64
import hashlib
import itertools
import json
import re

import numpy as np
import pytest

from tests.helpers.html_page import HtmlPage, check_self_contained
from utils.drawing import page
from utils.drawing.charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Line, heat_map, histogram, line_chart

HOSTILE = '<script>alert("1")</script> & \' " onload=x </svg></style><img src=x onerror=alert(1)>'


def hostile_page() -> str:
    out = page.Page(HOSTILE, HOSTILE)
    x = np.arange(3.0)
    card = page.Card(page.paragraph(HOSTILE), HOSTILE, ((HOSTILE, "1"),))
    out.section(
        HOSTILE,
        HOSTILE,
        page.heading(HOSTILE),
        page.bullets([HOSTILE]),
        page.code(HOSTILE),
        page.facts([(HOSTILE, HOSTILE)]),
        page.fold(HOSTILE, HOSTILE),
        page.table([HOSTILE], [[HOSTILE]], HOSTILE),
        page.bars([(HOSTILE, 1.0, HOSTILE)], HOSTILE),
        page.matrix([[1]], [[0.5]], [HOSTILE], HOSTILE, HOSTILE, HOSTILE),
        page.gallery([card], [(HOSTILE, [(HOSTILE, HOSTILE)])], HOSTILE),
        line_chart([Line(HOSTILE, x, x), Line("b", x, x)], title=HOSTILE, x_label=HOSTILE, y_label=HOSTILE,
                   marks=[(1.0, HOSTILE)]),
        histogram(x, x[:2] + 1, title=HOSTILE, x_label=HOSTILE, y_label=HOSTILE),
        heat_map(np.ones((2, 2)), title=HOSTILE, x_label=HOSTILE, y_label=HOSTILE, unit=HOSTILE),
    )  # fmt: skip
    return out.render()


def test_text_is_escaped_everywhere():
    text = hostile_page()
    read = check_self_contained(text)
    assert not [tag for tag, _ in read.tags if tag == "img"]
    assert len(read.code) == 1
    assert "alert" not in read.code[0]
    assert read.sections[HOSTILE].count(HOSTILE) > 20  # it arrives as text, complete
    (card,) = (attributes for tag, attributes in read.tags if "data-tags" in attributes)
    assert json.loads(card["data-tags"]) == [[HOSTILE, "1"]]


def test_the_policy_admits_no_request_and_only_the_own_script():
    read = HtmlPage(hostile_page())
    (policy,) = (a["content"] for tag, a in read.tags if a.get("http-equiv") == "Content-Security-Policy")
    own = base64.b64encode(hashlib.sha256(read.code[0].encode()).digest()).decode()
    assert policy == f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{own}'"


def test_numbers_in_tables_are_those_given_and_unknown_ones_are_marked():
    out = page.Page("a")
    out.section(
        "b", page.table(["x", "y"], [["one", 0.12345], ["two", 12345], ["none", None], ["nan", float("nan")]], "c")
    )
    assert HtmlPage(out.render()).tables["c"] == [
        ["x", "y"], ["one", "0.123"], ["two", "12,345"], ["none", "–"], ["nan", "–"],
    ]  # fmt: skip


def test_a_line_is_where_its_values_are_and_has_gaps():
    x, y = np.array([0.0, 1, 2, 3, 4]), np.array([0.0, 1, np.nan, 0.5, 1])
    text = line_chart([Line("a", x, y)], title="t", x_label="epoch", y_label="loss", x_range=(0, 4), y_range=(0, 1))
    (path,) = re.findall(r'class="line" d="([^"]*)"', text)
    assert [c for c in path if c.isalpha()] == ["M", "L", "M", "L"]
    points = np.array(re.findall(r"[ML]([\d.]+) ([\d.]+)", path), float)
    known = np.isfinite(y)
    np.testing.assert_allclose(points[:, 0], LEFT + x[known] / 4 * (WIDTH - LEFT - RIGHT), atol=0.06)
    np.testing.assert_allclose(points[:, 1], HEIGHT - BOTTOM - y[known] * (HEIGHT - TOP - BOTTOM), atol=0.06)
    assert ">epoch<" in text
    assert ">loss<" in text


def test_long_lines_keep_few_points_and_their_ends():
    x = np.arange(20_000.0)
    text = line_chart([Line("a", x, x)], title="t", x_label="x", y_label="y")
    assert len(text) < 10_000
    assert f"{WIDTH - RIGHT:.1f} {TOP:.1f}" in text


@pytest.mark.parametrize(("low", "high"), [(0, 1e-7), (-3, 5), (1e5, 1e5), (0.1, 0.10001), (0, 0)])
def test_any_range_has_axes(low: float, high: float):
    text = line_chart([Line("a", np.array([0.0, 1]), np.array([low, high]))], title="t", x_label="x", y_label="y")
    assert "nan" not in text
    assert text.count("<text") >= 4


def test_nothing_to_draw_is_said():
    nothing = np.full(3, np.nan)
    assert "No values yet." in line_chart([Line("a", nothing, nothing)], title="t", x_label="x", y_label="y")
    assert "Nothing to count." in histogram(np.arange(3), np.zeros(2), title="t", x_label="x", y_label="y")
    assert "Nothing to count." in heat_map(np.zeros((2, 2)), title="t", x_label="x", y_label="y", unit="boxes")


def test_a_picture_is_stored_once_and_used_by_name(tmp_path):
    out = page.Page("a")
    uses = [out.picture("p1", b"\xff\xd8jpeg", 4, 3) for _ in range(2)]
    out.section("b", *uses)
    out.write(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    read = check_self_contained(text)
    assert [a["href"] for tag, a in read.tags if tag == "use"] == ["#p1", "#p1"]
    (image,) = (a for tag, a in read.tags if tag == "image")
    assert base64.b64decode(image["href"].removeprefix("data:image/jpeg;base64,")) == b"\xff\xd8jpeg"
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]


def test_undecodable_file_names_can_be_written(tmp_path):
    out = page.Page("a")
    out.section("b", page.code("image\udcff.png"))
    out.write(tmp_path / "page.html")
    assert "image\\udcff.png" in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("high", [256, 512, 724, 1024, 4096])
def test_texts_of_an_axis_do_not_touch(high):
    """Digits are at most 7 units wide in common fonts."""
    edges = 2.0 ** np.arange(1, np.log2(high) + 0.01, 0.5)
    text = histogram(edges, np.ones(edges.size - 1), title="t", x_label="x", y_label="y", log2=True)
    found = re.findall(r'<text x="([\d.]+)" y="([\d.]+)" text-anchor="middle">(\d+)</text>', text)
    spans = [(float(x) - 3.5 * len(digits), float(x) + 3.5 * len(digits)) for x, _, digits in found]
    assert len(spans) >= 5
    assert all(low > before for (_, before), (low, _) in itertools.pairwise(spans))
    assert spans[-1][1] <= WIDTH
