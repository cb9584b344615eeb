"""Shared fixtures."""

import pytest

from tests.data.index.small_set import NAMES, OBJECTS, SIZES, write_yaml
from tests.helpers.three_formats import write_three_formats


@pytest.fixture
def root(tmp_path):
    """A small data set with labels in all three formats."""
    root = tmp_path / "set"
    write_three_formats(root, NAMES, SIZES, OBJECTS)
    write_yaml(root)
    return root
