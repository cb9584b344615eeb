"""Images at the sizes that samples need."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest

from data.images.decode import read_image, read_reduced, read_source
from tests.data.images.pictures import gradient
from tests.helpers.exif import jpeg_with_exif
from tests.helpers.messages import refused
from utils.pixels import PixelFormat


@pytest.mark.parametrize("orientation", [1, 3, 6])
def test_a_reduced_jpeg_is_the_image_divided_by_a_power_of_two(tmp_path: Path, orientation: int):
    path = tmp_path / "image.jpg"
    path.write_bytes(jpeg_with_exif(gradient(248, 400), orientation))
    whole = read_image(path)
    height, width = whole.shape[:2]
    for share, min_hw in ((1, (height // 2 + 1, 10)), (2, (height // 2, width // 2)), (2, (100, 100)), (8, (1, 1))):
        image, full_hw = read_reduced(path, min_hw)
        assert full_hw == (height, width)
        assert image.shape == (-(-height // share), -(-width // share), 3)
        expected = cv2.resize(whole, image.shape[1::-1], interpolation=cv2.INTER_AREA)
        assert np.abs(image.astype(int) - expected).mean() < 1.5
    assert read_reduced(path, (100, 100), PixelFormat(1))[0].shape[2] == 1
    path.write_bytes(jpeg_with_exif(gradient(250, 401), orientation))
    assert max(read_reduced(path, (1, 1))[0].shape) == 201  # 1/4 and 1/8 would pad by more than half a pixel


@pytest.mark.parametrize(("suffix", "side"), [(".png", 800), (".png", 801), (".jpg", 800)])
def test_training_sees_no_aliasing_in_large_images_of_any_format(tmp_path: Path, suffix: str, side: int):
    """Black and white pixels become gray; a bilinear reduction, as validation and published evaluations have it, keeps
    much of their contrast."""
    picture = np.random.default_rng(0).choice(np.array([0, 255], np.uint8), (side, side, 1)).repeat(3, 2)
    path = tmp_path / f"noise{suffix}"
    cv2.imwrite(str(path), picture)
    sizes = (str(path), np.array([side, side]), np.array([100, 100]))
    reduced = read_source(*sizes)
    assert reduced.shape == (100, 100, 3)
    assert reduced.std() < 25
    assert read_source(*sizes, antialias=False).std() > 50
    with refused("noise...: is ...x... pixels but was ..."):
        read_source(str(path), np.array([side, side + 1]), np.array([100, 100]))
