from __future__ import annotations

import pytest

from tests.helpers.messages import refused
from utils.config.recipes import read_recipe
from utils.config.yaml_files import load_yaml

LINE_BREAKS = ("\n", "\r\n", "\r", "\x85", "\u2028", "\u2029")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "x.yaml:1: expected ',' or ']', but got '<stream end>'"),
        ("a: 1\nb: : 2\n", "x.yaml:2: mapping values are not allowed here"),
        ("a: 1\nb: 2\na: 3\n", "x.yaml:3: key 'a' appears twice (first in line 1); remove one"),
        ("names:\n  0: a\n  0: b\n", "x.yaml:3: key '0' appears twice (first in line 2); remove one"),
        ("{1: a, 01: b}\n", "x.yaml:1: key '01' means the same as '1' in line 1; remove one"),
        ("1: a\n1.0: b\n", "x.yaml:2: key '1.0' means the same as '1' in line 1; remove one"),
        ("yes: a\ntrue: b\n", "x.yaml:2: key 'true' means the same as 'yes' in line 1; remove one"),
        ("~: a\nnull: b\n", "x.yaml:2: key 'null' means the same as '~' in line 1; remove one"),
        ("lr0: {&a x: 1, *a : 2}\n", "x.yaml:1: key 'x' appears twice (first in line 1); remove one"),
        ("a: " + "[" * 100_000, "x.yaml: nested too deeply"),
        ("{a: " * 3000 + "1" + "}" * 3000, "x.yaml: nested too deeply"),  # which would crash libyaml
        ("- " * 2000 + "1", "x.yaml: nested too deeply"),
        *(
            (line_break.join(" " * level + "a:" for level in range(150)), "x.yaml: nested too deeply")
            for line_break in LINE_BREAKS
        ),
        (
            "lr0: &a [*a]\n",
            "x.yaml: more than 200,000 values after expanding aliases, or an alias that contains itself",
        ),
        (
            "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9)),
            "x.yaml: more than 200,000 values after expanding aliases, or an alias that contains itself",
        ),
        ("lr0: {<<: 3}\n", "x.yaml:1: << merges mappings, which is not supported; write the keys out"),
        ("lr0: !!int x\n", "x.yaml:1: 'x' is not a valid int; put it in quotes if it is text"),
        ("lr0: 2020-13-45\n", "x.yaml:1: '2020-13-45' is not a valid timestamp; put it in quotes if it is text"),
        (
            f"lr0: {'5' * 5000}\n",
            "x.yaml:1: '555555555555555555555555555555555555555555555555555555555555' is not a valid int; put "
            "it in quotes if it is text",
        ),
        (f"lr0: 0x{'f' * 500}\n", "x.yaml: the number does not fit in 64 bits"),
        ('lr0: "\\0"\n', "x.yaml: contains a NUL or an unpaired surrogate"),
        ("lr0: " + "x" * 100_000 + "\n", "x.yaml: lr0: must be a number or null, got 'x..."),
    ],
)
def test_wrong_and_hostile_yaml_is_one_short_line(tmp_path, text, message):
    path = tmp_path / "x.yaml"
    path.write_bytes(text.encode())
    with refused(message) as caught:
        read_recipe(str(path), pretrained=False)
    assert len(str(caught.value)) < 1300


def test_what_is_too_large_is_read_once_by_the_fast_reader(tmp_path, monkeypatch):
    monkeypatch.setattr("utils.config.yaml_files.MAX_VALUES", 100)
    monkeypatch.setattr("yaml.SafeLoader", None)  # ten times slower; it tells the lines of other mistakes
    path = tmp_path / "x.yaml"
    path.write_text("names:\n" + "- a\n" * 200)
    with refused("x.yaml: more than 100 values after expanding aliases, or an alias that contains itself"):
        load_yaml(path)
