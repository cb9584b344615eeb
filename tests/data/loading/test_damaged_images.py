"""Trainings with an image that was damaged after the scan: it is named when it is decoded."""

from __future__ import annotations

import os

import pytest

import train
from tests.helpers.damaged_jpegs import write_jpegs
from tests.helpers.scripts import SMALL, error_of
from tests.helpers.tiny import write_model


@pytest.mark.parametrize("workers", ["0", "2"])
def test_an_image_that_cannot_be_decoded_any_more_ends_a_run_in_a_line(tmp_path, capfd, workers):
    data = write_jpegs(tmp_path / "set", 4)
    image = tmp_path / "set" / "images" / "train" / "002.jpg"
    flags = ["--data", data, "--model", write_model(tmp_path / "tiny.yaml"), "--project", tmp_path / "runs", *SMALL]
    train.main([*map(str, flags), "--workers", workers, "--epochs", "1"])
    stamp = image.stat()
    image.write_bytes(bytes(stamp.st_size))  # as a disk that loses blocks: the cached scan is still valid
    os.utime(image, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    error = error_of(capfd, train.main, *flags, "--workers", workers, "--epochs", "1")
    assert f"{image}: cannot be decoded (damaged, or not an image); restore or remove it, and start again" in error
