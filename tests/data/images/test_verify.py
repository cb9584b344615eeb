"""The scan's check of JPEGs: damage that decoders do not report is found, and good files of all encoders pass."""

from __future__ import annotations

import struct
from pathlib import Path

import cv2
import numpy as np
import pytest

from data.images import verify
from data.images.decode import read_image
from data.images.verify import HiddenDamageError, check_image
from tests.data.images.pictures import encoded, gradient, noise
from tests.helpers.damaged_jpegs import make_jpeg, replace_middle
from tests.helpers.exif import jpeg_with_exif
from tests.helpers.messages import refused
from utils.errors import UserError


def by_opencv(image: np.ndarray, *options: int) -> bytes:
    return cv2.imencode(".jpg", image, options)[1].tobytes()


PICTURE = noise(height=37, width=52)
USUAL = {
    "opencv": by_opencv(PICTURE),
    "opencv, best": by_opencv(PICTURE, cv2.IMWRITE_JPEG_QUALITY, 100),
    "opencv, gray": by_opencv(PICTURE[..., 0]),
    "restarts": by_opencv(PICTURE, cv2.IMWRITE_JPEG_RST_INTERVAL, 2),
    "optimized": encoded(PICTURE, "jpeg", optimize=True),
    "4:4:4": encoded(PICTURE, "jpeg", subsampling=0),
    "4:2:2": encoded(PICTURE, "jpeg", subsampling=1),
    "long header": encoded(PICTURE, "jpeg", comment=b"x" * 40_000),
    "turned": jpeg_with_exif(PICTURE, 6),
    "large": make_jpeg(0, 1024),
}
UNUSUAL = {
    "progressive": by_opencv(PICTURE, cv2.IMWRITE_JPEG_PROGRESSIVE, 1),
    "CMYK": encoded(PICTURE, "jpeg", "CMYK"),
    "white": by_opencv(np.full((600, 600, 3), 255, np.uint8)),  # its coded data repeats
    "white, optimized": encoded(np.full((1200, 1200, 3), 255, np.uint8), "jpeg", optimize=True),
}


@pytest.mark.parametrize("name", [*USUAL, *UNUSUAL])
def test_good_files_pass_and_usual_ones_are_not_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    path = tmp_path / "a.jpg"
    data = (USUAL | UNUSUAL)[name]
    path.write_bytes(data)
    image = read_image(path)
    for content in (data, data + bytes(100)):  # some cameras append bytes
        path.write_bytes(content)
        assert check_image(path, decode=True).size_hw == image.shape[:2]
    path.write_bytes(data)
    decoded = []
    for decoder in ("imdecode", "_decoding_defect"):
        monkeypatch.setattr(verify, decoder, lambda *_: decoded.append(path))
    assert check_image(path).size_hw == image.shape[:2]
    assert len(decoded) == (name in UNUSUAL)


@pytest.mark.parametrize("kind", ["zeros", "ones", "pattern", "text", "random"])
def test_a_damaged_middle_is_found_from_the_bytes(tmp_path: Path, kind: str):
    for seed in range(8):
        (tmp_path / "a.jpg").write_bytes(replace_middle(make_jpeg(seed, 1024), kind))
        with pytest.raises(UserError) as caught:
            check_image(tmp_path / "a.jpg")
        assert not isinstance(caught.value, HiddenDamageError)


@pytest.mark.parametrize("kind", ["part of another", "early end", "stray marker"])
def test_damage_that_looks_like_coded_data_is_found_by_decoding(tmp_path: Path, kind: str):
    data = make_jpeg(0)
    half = len(data) // 2
    damaged = {
        "part of another": replace_middle(data, "other"),
        "early end": data[:half] + data[-2:],
        "stray marker": data[:-2] + b"\xff\xa9" + data[-2:],
    }[kind]
    (tmp_path / "a.jpg").write_bytes(damaged)
    check_image(tmp_path / "a.jpg")
    with pytest.raises(HiddenDamageError):
        check_image(tmp_path / "a.jpg", decode=True)


def test_a_thumbnail_does_not_hide_truncation(tmp_path: Path):
    """It has an end marker of its own."""
    plain = jpeg_with_exif(gradient(), 1)
    thumbnail = by_opencv(np.zeros((8, 8, 3), np.uint8))
    shown = plain[:2] + b"\xff\xe2" + struct.pack(">H", len(thumbnail) + 2) + thumbnail + plain[2:]
    (tmp_path / "a.jpg").write_bytes(shown)
    assert check_image(tmp_path / "a.jpg").size_hw == (24, 40)
    (tmp_path / "a.jpg").write_bytes(shown[:-40])
    with refused("a.jpg: ...truncated..."):
        check_image(tmp_path / "a.jpg")
