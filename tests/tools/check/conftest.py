"""The data set that most of these tests check."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.editable_set import EditableSet


@pytest.fixture
def data(tmp_path: Path) -> EditableSet:
    return EditableSet(tmp_path / "set")
