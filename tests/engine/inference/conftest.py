"""A model of two classes, and pictures."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest

from tests.helpers.tiny import write_weights


@pytest.fixture(scope="package")
def weights(tmp_path_factory) -> Path:
    return write_weights(tmp_path_factory.mktemp("detection", numbered=False) / "best.pt", ("disc", "ring"))


def picture(height: int = 48, width: int = 64, seed: int = 0) -> np.ndarray:
    """RGB."""
    noise = np.random.default_rng(seed).integers(0, 255, (8, 8, 3)).astype(np.uint8)
    return cv2.resize(noise, (width, height))
