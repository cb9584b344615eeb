"""Damaged JPEGs: found by the scan, or when they are first decoded if only decoding reveals the damage; always reported
by name.
"""

from __future__ import annotations

import os
from pathlib import Path

import cv2
import numpy as np
import pytest

import train
from data.image_io.decode import read_image
from data.image_io.header import read_header
from data.image_io.verify import HiddenDamageError, check_image, coded_data_defect
from data.index import read_images
from data.source.dataset_yaml import load_dataset_spec
from tests.data.index.small_set import load, take_messages
from tests.helpers.damaged_jpegs import make_jpeg, replace_middle
from tests.helpers.messages import refused
from tests.helpers.scripts import SMALL, error_of
from tests.helpers.tiny import write_model
from tools.check.checks.scan import scan_dataset


def write_set(root: Path, images: int = 24, *, damaged: int = 0, kind: str = "zeros") -> Path:
    for split in ("train", "val"):
        for folder in ("images", "labels"):
            (root / folder / split).mkdir(parents=True)
        for i in range(images if split == "train" else 2):
            data = make_jpeg(i)
            if split == "train" and i < damaged:
                data = replace_middle(data, kind)
            (root / "images" / split / f"{i:03}.jpg").write_bytes(data)
            (root / "labels" / split / f"{i:03}.txt").write_text("0 0.5 0.5 0.2 0.2\n")
    path = root / "d.yaml"
    path.write_text("train: images/train\nval: images/val\nnames: [a, b]\n")
    return path


@pytest.mark.parametrize("kind", ["zeros", "ones", "pattern", "text", "random"])
def test_a_damaged_middle_is_detected_from_the_bytes(kind):
    for seed in range(8):
        data = make_jpeg(seed, 1024)
        start = read_header(data, "").coded_at
        assert coded_data_defect(data, start) == ""
        assert coded_data_defect(replace_middle(data, kind), start)


def test_files_with_zeros_in_the_middle_are_bad(tmp_path, lines, capfd):
    root = tmp_path / "set"
    write_set(root, damaged=20)
    with refused(
        "set/d.yaml: 'train': 20 of 24 images and 20 of 24 labeled objects can't be used (--max-bad is "
        "0.1): unreadable image: 20 images with 20 objects, first images/train/000.jpg: damaged image "
        "(Corrupt JPEG data: 3131 extraneous bytes before marker 0xd9); report: ..."
    ):
        load(root, tmp_path / "cache")
    index = load(root, tmp_path / "cache", max_bad=0.9)
    assert [os.path.basename(p) for p in index.paths] == ["020.jpg", "021.jpg", "022.jpg", "023.jpg"]
    assert capfd.readouterr().err == ""


def test_a_uniform_image_is_not_damaged(tmp_path):
    """Its coded data repeats, so the image is decoded, and found to be undamaged."""
    for name, value in (("white", 255), ("gray", 90)):
        data = cv2.imencode(".jpg", np.full((600, 600, 3), value, np.uint8))[1].tobytes()
        assert coded_data_defect(data, read_header(data, "").coded_at)
        (tmp_path / name).write_bytes(data)
        assert check_image(tmp_path / name).size_hw == (600, 600)


def test_damage_in_the_sample_causes_all_images_to_be_decoded(tmp_path, lines, monkeypatch):
    """Parts of other JPEGs look like valid coded data."""
    root = tmp_path / "set"
    data = write_set(root, damaged=12, kind="other")
    monkeypatch.setattr(read_images, "SAMPLED", 0)
    assert len(load(root, tmp_path / "c0", max_bad=0)) == 24
    (full,) = scan_dataset(load_dataset_spec(data), ("train",), workers=0)  # a check
    assert len(full.index) == 12
    monkeypatch.setattr(read_images, "SAMPLED", 8)
    take_messages(lines)
    sampled = load(root, tmp_path / "c2", max_bad=0.9)
    assert list(sampled.paths) == list(full.index.paths)
    assert "of 8 sampled images are damaged; decoding all images" in "".join(take_messages(lines))


@pytest.mark.parametrize(("workers", "cache"), [("0", "none"), ("2", "none"), ("0", "ram"), ("0", "disk")])
def test_training_names_images_that_the_decoder_reports_as_damaged(tmp_path, monkeypatch, capfd, workers, cache):
    """The scan did not find the damage. Each process names each image once."""
    data = write_set(tmp_path / "set", 8, damaged=3, kind="other")
    monkeypatch.setattr(read_images, "SAMPLED", 0)
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
    data = write_set(tmp_path / "set", 4)
    image = tmp_path / "set" / "images" / "train" / "002.jpg"
    flags = ["--data", data, "--model", write_model(tmp_path / "tiny.yaml"), "--project", tmp_path / "runs", *SMALL]
    train.main([*map(str, flags), "--workers", workers, "--epochs", "1"])
    stamp = image.stat()
    image.write_bytes(bytes(stamp.st_size))  # as a disk that loses blocks: the cached scan is still valid
    os.utime(image, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    error = error_of(capfd, train.main, *flags, "--workers", workers, "--epochs", "1")
    assert f"{image}: cannot be decoded (damaged, or not an image); restore or remove it, and start again" in error


@pytest.mark.parametrize(
    ("by", "message"),
    [
        (
            "folder",
            "set/d.yaml: 'train': 3 of 7 images can't be used (--max-bad is 0.1): unreadable image: 2 images, "
            "first images/train/pipe.jpg: a pipe or device, not a file; unreadable image: "
            "images/train/extra.jpg: an empty folder, not a file; report: ...",
        ),
        (
            "list",
            "set/d.yaml: 'train': 2 of 6 images can't be used (--max-bad is 0.1): unreadable image: "
            "list.txt:5: images/train/pipe.jpg: a pipe or device, not a file; unreadable image: list.txt:6: "
            "images/train/zero.jpg: a pipe or device, not a file; report: ...",
        ),
    ],
)
def test_a_pipe_or_folder_named_jpg_is_a_bad_file(tmp_path, by, message):
    root = tmp_path / "set"
    path = write_set(root, 4)
    images = root / "images/train"
    os.mkfifo(images / "pipe.jpg")
    os.symlink("/dev/zero", images / "zero.jpg")
    if by == "list":
        (root / "list.txt").write_text("".join(f"images/train/{p.name}\n" for p in sorted(images.iterdir())))
        path.write_text(path.read_text().replace("train: images/train", "train: list.txt"))
    else:
        for name in ("extra.jpg", "more.gif", "pages.png"):
            (images / name).mkdir()
        for path in (images / "003.jpg", root / "labels/train/003.txt"):
            (path.parent / "pages.png").mkdir(exist_ok=True)
            path.rename(path.parent / "pages.png" / path.name)
    with refused(message):
        load(root, tmp_path / "cache")
    assert len(load(root, tmp_path / "cache", max_bad=0.5)) == 4
    with refused("set/images/train/pipe.jpg: cannot be read (is a pipe or device, not a file)"):
        read_image(images / "pipe.jpg")


IRREGULAR = {
    "pipe": (os.mkfifo, "a pipe or device"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "a pipe or device"),
    "folder": (Path.mkdir, "a folder"),
    "hole": (lambda path: path.touch() or os.truncate(path, 2**40), "has 1,099,511,627,776 bytes, more than such a"),
}


@pytest.mark.parametrize(
    ("kind", "name"), [*((kind, "labels/train/001.txt") for kind in IRREGULAR), ("hole", "images/train/001.jpg")]
)
def test_a_file_that_is_not_regular_is_named_at_once(tmp_path, kind, name):
    """Reading a pipe would block forever; a sparse file of a terabyte would fill the memory."""
    root = tmp_path / "set"
    make, what = IRREGULAR[kind]
    write_set(root, 4)
    (root / name).unlink()
    make(root / name)
    index = load(root, tmp_path / "cache", max_bad=0.5)
    assert len(index) == 3
    assert any(name in line and what in line for line in index.report.lines)


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
