"""The data set of 18 images, as a fixture."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.folds.eighteen_images import write_eighteen_images
from utils.config.tool_settings import KfoldConfig


@pytest.fixture
def config(tmp_path: Path) -> KfoldConfig:
    return write_eighteen_images(tmp_path)
