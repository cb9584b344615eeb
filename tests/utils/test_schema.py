"""Plain data and type hints: what fits is converted, and what does not is named with its place."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, TypedDict

import pytest

from utils.errors import UserError
from utils.schema import Bounds, Count, build, check


class Facts(TypedDict):
    name: str


@dataclass
class Part:
    size: Count
    ratio: Annotated[float, Bounds(0, 1)] | None = None


@dataclass
class Whole:
    part: Part
    sides: tuple[int, str] = (0, "")
    names: dict[str, list[str]] = field(default_factory=dict)
    facts: Facts | None = None
    more: Any = None


def test_plain_data_becomes_dataclasses():
    values = {"part": {"size": 3, "ratio": "5e-1"}, "sides": [1, "2"], "names": {"a": ["b"]}, "more": {1: 2}}
    found = build(Whole, values | {"facts": {"name": "x", "other": 1}}, "x")
    assert found == Whole(Part(3, 0.5), (1, "2"), {"a": ["b"]}, {"name": "x", "other": 1}, {1: 2})
    assert check(None, Count | None, "x") is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "must be 'key: value' lines, got list"),
        ({}, "has no 'part'"),
        ({"parts": 1}, "unknown key 'parts' (did you mean 'part'?)"),
        ({"part": {"size": True}}, "part: size: must be a whole number, got True"),
        ({"part": {"size": -1}}, "part: size: must be at least 0, got -1"),
        ({"part": {"size": 1, "ratio": "x"}}, "part: ratio: must be a number or null, got 'x'"),
        ({"part": {"size": 1, "ratio": 2}}, "part: ratio: must be at most 1, got 2"),
        ({"part": {"size": 1}, "sides": [1, 2]}, "sides: element 2: must be text, got 2"),
        ({"part": {"size": 1}, "names": {"a": [None]}}, "names: a: element 1: must be text, got None"),
        ({"part": {"size": 1}, "facts": {"name": 1}}, "facts: name: must be text, got 1"),
    ],
)
def test_mistakes_are_named_with_their_place(values: object, message: str):
    with pytest.raises(UserError) as caught:
        build(Whole, values, "x.yaml")
    assert str(caught.value) == f"x.yaml: {message}"
