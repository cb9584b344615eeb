"""A tiny untrained model, pictures and a video."""

import cv2
import numpy as np
import pytest

from models.detector import build_detector
from tests.helpers.tiny import TINY_MODEL, write_detector
from tests.scripts.detect.detection import NAMES


@pytest.fixture(scope="module")
def model():
    return build_detector(TINY_MODEL, len(NAMES), names=NAMES, seed=1)


@pytest.fixture(scope="module")
def weights(tmp_path_factory, model):
    return write_detector(tmp_path_factory.mktemp("weights") / "best.pt", model)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """A square, a wide and a tall image; two have the same stem."""
    folder = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    for name, hw in (("a.png", (64, 64)), ("a.jpg", (37, 90)), ("schön 猫.bmp", (90, 50))):
        noise = cv2.resize(rng.integers(0, 255, (8, 8, 3)).astype(np.uint8), hw[::-1])
        (folder / name).write_bytes(cv2.imencode(name[-4:], noise)[1].tobytes())
    return folder


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    path = tmp_path_factory.mktemp("clip") / "clip.mp4"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"mp4v"), 12, (63, 48))
    if not writer.isOpened():
        pytest.skip("this OpenCV cannot write mp4v")
    for number in range(7):
        writer.write(np.full((48, 63, 3), number * 30, np.uint8))
    writer.release()
    return path
