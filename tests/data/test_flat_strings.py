"""Strings in two arrays: a sequence like a list of them."""

from __future__ import annotations

import pickle

import pytest

from data.flat_strings import FlatStrings

STRINGS = ["", "a", "\u00e9\u4e2d\U0001f600", "\udcff.jpg", "a\nb"]  # the last but one is a file name that is not UTF-8


def test_strings_come_back():
    strings = FlatStrings.of(STRINGS)
    assert list(strings) == STRINGS
    assert [strings[-i] for i in range(1, 6)] == STRINGS[::-1]
    assert list(pickle.loads(pickle.dumps(strings))) == STRINGS
    assert len(FlatStrings.of([])) == 0
    with pytest.raises(IndexError):
        strings[5]


def test_half_a_surrogate_pair_is_escaped():
    assert list(FlatStrings.of(["a\ud800\udc80"])) == ["a\\ud800\\udc80"]


def test_strings_can_be_compared_and_hashed():
    strings = FlatStrings.of(STRINGS)
    assert strings == strings
    assert strings != FlatStrings.of(STRINGS[1:])
    assert strings in {strings}
