"""Damage of JPEGs that decoders do not report, found in their coded data."""

from __future__ import annotations

import cv2
import numpy as np
import pytest

from data.image_io.decode import read_image
from data.image_io.header import read_header
from data.image_io.verify import HiddenDamageError, check_image, coded_data_defect
from tests.helpers.damaged_jpegs import make_jpeg, replace_middle
from tests.helpers.messages import refused


@pytest.mark.parametrize("kind", ["zeros", "ones", "pattern", "text", "random"])
def test_a_damaged_middle_is_detected_from_the_bytes(kind):
    for seed in range(8):
        data = make_jpeg(seed, 1024)
        start = read_header(data, "").coded_at
        assert coded_data_defect(data, start) == ""
        assert coded_data_defect(replace_middle(data, kind), start)


def test_a_uniform_image_is_not_damaged(tmp_path):
    """Its coded data repeats, so the image is decoded, and found to be undamaged."""
    for name, value in (("white", 255), ("gray", 90)):
        data = cv2.imencode(".jpg", np.full((600, 600, 3), value, np.uint8))[1].tobytes()
        assert coded_data_defect(data, read_header(data, "").coded_at)
        (tmp_path / name).write_bytes(data)
        assert check_image(tmp_path / name).size_hw == (600, 600)


def test_a_stray_marker_at_the_end_is_reported_as_damage(tmp_path):
    """OpenCV does not report it: it invents the blocks that are lost after the marker."""
    data = make_jpeg(0)
    path = tmp_path / "x.jpg"
    path.write_bytes(data[:-2] + b"\xff\xa9" + data[-2:])
    read_image(path, lambda *_: pytest.fail("the decoder complains"))
    with refused("x.jpg: damaged image (marker 0xffa9 among the coded data, at byte 46164)", HiddenDamageError):
        check_image(path, decode=True)
    path.write_bytes(data)
    assert check_image(path, decode=True).size_hw == (320, 320)
