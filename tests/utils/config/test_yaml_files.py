from __future__ import annotations

import pytest

from tests.helpers.messages import refused
from utils.config.recipes import read_recipe
from utils.config.yaml_files import load_yaml


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: [1\n", 2),
        ("a: 1\nb: : 2\n", 2),
        ("a: 1\nb: 2\na: 3\n", 3),
        ("names:\n  0: a\n  0: b\n", 3),
        ("1: a\n01: b\n", 2),
        ("lr0: {&a x: 1, *a : 2}\n", 1),
        ("base: &a {x: 1}\nlr0: {<<: *a}\n", 2),
        ("lr0: 1\nlrf: 2020-13-45\n", 2),
        (f"lr0: {'5' * 5000}\n", 1),
    ],
)
def test_malformed_yaml_is_one_line_that_names_the_file_and_line(tmp_path, text, line):
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with refused(f"x.yaml:{line}: ...") as caught:
        read_recipe(str(path), pretrained=False)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["a: " + "[" * 100_000, "{a: " * 3000 + "1" + "}" * 3000, "- " * 2000 + "1"])
def test_deep_nesting_is_refused_by_the_reader(tmp_path, text):
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with refused("...nesting depth"):
        load_yaml(path)


def test_values_under_some_keys_stay_as_written(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("nc: &n 012\nnames: [012, 1e3, *n, cat, yes, ~]\nclass_of: {0x10: 1.50}\n")
    values = load_yaml(path, text_under=frozenset({"names", "class_of"}))
    assert values == {"nc": 10, "names": ["012", "1e3", "012", "cat", "yes", None], "class_of": {"0x10": "1.50"}}
