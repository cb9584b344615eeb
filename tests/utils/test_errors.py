"""Errors, and their messages."""

from __future__ import annotations

import pytest

from utils.errors import FailedCheck, Mistakes, PeerFailure, UserError, errors_of, first_line


@pytest.mark.parametrize("error", [PeerFailure("rank 0 failed", 70), FailedCheck("a.onnx: differs")])
def test_only_mistakes_of_the_user_are_noted_and_get_the_name_of_a_file(error):
    mistakes = Mistakes()
    with pytest.raises(type(error)) as raised, mistakes.collecting(), errors_of("data.yaml"):
        raise error
    assert raised.value is error
    assert not mistakes
    with mistakes.collecting(), errors_of("data.yaml"):
        raise UserError("no such split")
    assert mistakes.messages == ["data.yaml: no such split"]


class Silent(Exception):
    """An error without a text, as a callback can raise."""

    def __str__(self) -> str:
        raise LookupError


@pytest.mark.parametrize(
    ("error", "line"), [(ValueError(" one\ntwo"), "one"), (ValueError(), "ValueError"), (Silent(), "Silent")]
)
def test_an_error_is_described_by_its_first_line_or_its_type(error, line):
    assert first_line(error) == line
