from __future__ import annotations

import pytest

from tests.helpers.messages import matches, refused
from utils.errors import UserError


@pytest.mark.parametrize(
    ("expected", "is_match"),
    [
        ("a.txt:3: two fields, expected 5", True),
        ("a.txt:3: two fields", False),  # without its end
        ("/tmp/...: two fields, expected 5", True),
        ("a.txt:...: two fields...", True),
        ("a.txt:4: ...", False),
        (".*", False),  # no regular expression
    ],
)
def test_a_message_is_expected_to_its_end_with_gaps(expected: str, is_match: bool):
    assert matches("/tmp/set/a.txt:3: two fields, expected 5", expected) is is_match


def test_any_message_is_no_expectation():
    with pytest.raises(AssertionError, match="write the end"), refused("..."):
        raise UserError("one")


def test_a_line_break_in_a_message_fails():
    with pytest.raises(AssertionError, match="one"), refused("two"):
        raise UserError("one\ntwo")


def test_another_message_fails_with_both():
    with pytest.raises(pytest.fail.Exception, match=r"- two\n(?s:.*)\+ one"), refused("two"):
        raise UserError("one")
