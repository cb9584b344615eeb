"""The images that the exports of `tests.helpers.tool_exports` label."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest

from tests.helpers.tool_exports import SIZES


@pytest.fixture
def images(tmp_path) -> Path:
    folder = tmp_path / "set"
    folder.mkdir()
    for name, (width, height) in SIZES.items():
        cv2.imwrite(str(folder / name), np.full((height, width, 3), 90, np.uint8))
    return folder
