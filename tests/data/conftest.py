"""Records the messages that data/ logs."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """The logged messages from INFO on, cleared by `lines.clear()`."""
    with caplog.at_level(logging.INFO, "lockstep"):
        yield caplog
