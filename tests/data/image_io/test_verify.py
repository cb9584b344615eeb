"""`plain_jpeg` only accepts files that can be decoded, and accepts what common encoders write."""

from __future__ import annotations

import io

import cv2
import numpy as np
import pytest
from PIL import Image

from data.image_io.decode import read_header
from data.image_io.verify import check_image, plain_jpeg


def picture(seed: int = 0, height: int = 37, width: int = 52) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def by_opencv(image: np.ndarray, *options: int) -> bytes:
    return cv2.imencode(".jpg", image, options)[1].tobytes()


def by_pillow(image: np.ndarray, mode: str = "RGB", **options) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).convert(mode).save(file, "JPEG", **options)
    return file.getvalue()


USUAL = {
    "opencv": by_opencv(picture()),
    "opencv, best": by_opencv(picture(), cv2.IMWRITE_JPEG_QUALITY, 100),
    "opencv, gray": by_opencv(picture()[..., 0]),
    "restarts": by_opencv(picture(), cv2.IMWRITE_JPEG_RST_INTERVAL, 2),
    "optimized": by_pillow(picture(), optimize=True),
    "4:4:4": by_pillow(picture(), subsampling=0),
    "4:2:2": by_pillow(picture(), subsampling=1),
    "turned": by_pillow(picture(), exif=b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0\0\0\0\0"),
}
UNUSUAL = {
    "progressive": by_opencv(picture(), cv2.IMWRITE_JPEG_PROGRESSIVE, 1),
    "four colors": by_pillow(picture(), "CMYK"),
    "not a JPEG": cv2.imencode(".png", picture())[1].tobytes(),
    "cut": by_opencv(picture())[:-40],
    "more behind the end": by_opencv(picture()) + b"more",
    "header cut": by_opencv(picture())[:200] + b"\xff\xd9",
    "nothing": b"",
}


@pytest.mark.parametrize("name", USUAL)
def test_jpegs_of_common_encoders_are_accepted_without_decoding(name: str) -> None:
    assert plain_jpeg(USUAL[name]).header == read_header(USUAL[name], name)


@pytest.mark.parametrize("name", UNUSUAL)
def test_other_files_are_left_to_the_decoder(name: str) -> None:
    assert plain_jpeg(UNUSUAL[name]) is None


def test_accepted_files_can_be_decoded() -> None:
    """Random bytes of the header are changed, one or a few at a time; OpenCV is the reference."""
    rng = np.random.default_rng(1)
    vouched = 0
    for data in USUAL.values():
        header = data.index(b"\xff\xda") + 14
        for _ in range(400):
            changed = bytearray(data)
            for at in rng.integers(2, header, rng.integers(1, 4)):
                changed[at] = rng.integers(0, 256)
            found = plain_jpeg(bytes(changed))
            if found is None or found.header.size[0] * found.header.size[1] > 1 << 22:
                continue
            vouched += 1
            decoded = cv2.imdecode(np.frombuffer(changed, np.uint8), cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)
            assert decoded is not None
            assert decoded.shape[:2] == found.header.size
    assert vouched > 200


def test_a_long_header_makes_the_whole_file_be_read(tmp_path) -> None:
    path = tmp_path / "long.jpg"
    path.write_bytes(by_pillow(picture(), comment=b"x" * 40_000))
    assert check_image(path) == (37, 52)
