"""Trainings with damaged images that the scan has not found: they are named when they are decoded."""

from __future__ import annotations

import os

import pytest

import train
from data.index import scan
from tests.helpers.damaged_jpegs import write_jpegs
from tests.helpers.scripts import SMALL, error_of
from tests.helpers.tiny import write_model


@pytest.mark.parametrize(("workers", "cache"), [("0", "none"), ("2", "none"), ("0", "ram"), ("0", "disk")])
def test_training_names_images_that_the_decoder_reports_as_damaged(tmp_path, monkeypatch, capfd, workers, cache):
    """The scan did not find the damage. Each process names each image once."""
    data = write_jpegs(tmp_path / "set", 8, damaged=3, kind="other")
    monkeypatch.setattr(scan, "SAMPLED", 0)
    model = write_model(tmp_path / "tiny.yaml")
    flags = ["--data", data, "--model", model, "--project", tmp_path / "runs", *SMALL, "--workers", workers]
    train.main([*map(str, flags), "--epochs", "2", "--cache", cache])
    out, err = capfd.readouterr()
    assert "8 images, 0 backgrounds" in out
    for i in range(3):
        line = f"{tmp_path}/set/images/train/{i:03}.jpg: is damaged (Corrupt JPEG data: "
        assert 1 <= out.count(line) <= max(int(workers), 1), out
    assert "Corrupt" not in err


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
