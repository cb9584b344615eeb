"""The set of twenty images, as fixtures."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.max_bad.twenty_images import HEIGHT, IMAGES, NAMES, WIDTH
from tests.helpers.three_formats import write_three_formats


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Twenty images with two objects each, which all formats label: a cat on the left and a dog on the right."""
    root = tmp_path / "set"
    rows = {name: [(0, 5, 10, 30, 40), (1, 45, 20 + i, 70, 35 + i)] for i, name in enumerate(IMAGES)}
    write_three_formats(root, NAMES, dict.fromkeys(IMAGES, (HEIGHT, WIDTH)), rows)
    return root
