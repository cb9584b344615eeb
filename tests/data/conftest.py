"""Fixtures of the tests of data/."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.data.data_set import DataSet


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """The logged messages from INFO on, cleared by `lines.clear()`."""
    with caplog.at_level(logging.INFO, "lockstep"):
        yield caplog


@pytest.fixture
def data(tmp_path: Path) -> DataSet:
    """A data set without files."""
    return DataSet(tmp_path / "set")
