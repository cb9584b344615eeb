"""A model of two classes, and pictures."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest

from engine.inference.predict import Predictor, load
from engine.inference.results import Results
from tests.helpers.tiny import write_weights


@pytest.fixture(scope="package")
def weights(tmp_path_factory) -> Path:
    return write_weights(tmp_path_factory.mktemp("detection", numbered=False) / "best.pt", ("disc", "ring"))


@pytest.fixture(scope="package")
def predictor(weights) -> Predictor:
    return load(weights, device="cpu", conf=0.0, max_det=5)


def picture(height: int = 48, width: int = 64, seed: int = 0) -> np.ndarray:
    """Draws smooth noise, uint8 RGB (height, width, 3)."""
    noise = np.random.default_rng(seed).integers(0, 255, (8, 8, 3)).astype(np.uint8)
    return cv2.resize(noise, (width, height))


def rows(results: list[Results]) -> list[list[list[float]]]:
    """Returns the boxes of each image: corners in pixels, confidence, class."""
    return [result.boxes.data.tolist() for result in results]
