"""Damaged JPEGs: found by the scan, or when they are first decoded if only decoding reveals the damage; always reported
by name.
"""

from __future__ import annotations

import os
import stat
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cv2
import numpy as np
import pytest

import train
from data.image_io.decode import read_image
from data.image_io.verify import HiddenDamageError, check_image, coded_data_defect, plain_jpeg
from data.index import scan
from data.loading.damaged_images import DamagedImages
from tests.data.index.test_index import lines, load, told  # noqa: F401
from tests.helpers.damaged_jpegs import photo, with_middle
from tests.helpers.hostile_files import TAKEN, take_name
from tests.helpers.messages import refused
from tests.helpers.preloaded import python
from tests.helpers.scripts import SMALL, error_of
from tests.helpers.tiny import write_model
from utils.errors import UserError
from utils.files.safe_io import open_own


def write_set(root: Path, images: int = 24, *, damaged: int = 0, kind: str = "zeros") -> Path:
    for split in ("train", "val"):
        for folder in ("images", "labels"):
            (root / folder / split).mkdir(parents=True)
        for i in range(images if split == "train" else 2):
            data = photo(i)
            if split == "train" and i < damaged:
                data = with_middle(data, kind)
            (root / "images" / split / f"{i:03}.jpg").write_bytes(data)
            (root / "labels" / split / f"{i:03}.txt").write_text("0 0.5 0.5 0.2 0.2\n")
    path = root / "d.yaml"
    path.write_text("train: images/train\nval: images/val\nnames: [a, b]\n")
    return path


@pytest.mark.parametrize("kind", ["zeros", "ones", "pattern", "text", "random"])
def test_a_damaged_middle_is_detected_from_the_bytes(kind):
    for seed in range(8):
        data = photo(seed, 1024)
        assert coded_data_defect(data, plain_jpeg(data)) == ""
        data = with_middle(data, kind)
        assert coded_data_defect(data, plain_jpeg(data))


def test_files_with_zeros_in_the_middle_are_bad(tmp_path, lines, capfd):  # noqa: F811
    root = tmp_path / "set"
    write_set(root, damaged=20)
    with refused():
        load(root, tmp_path / "cache")
    index = load(root, tmp_path / "cache", max_bad=0.9)
    assert [os.path.basename(p) for p in index.paths] == ["020.jpg", "021.jpg", "022.jpg", "023.jpg"]
    assert capfd.readouterr().err == ""


def test_a_uniform_image_is_not_damaged(tmp_path):
    """Its coded data repeat, so it is decoded, and found to be undamaged."""
    for name, value in (("white", 255), ("gray", 90)):
        data = cv2.imencode(".jpg", np.full((600, 600, 3), value, np.uint8))[1].tobytes()
        assert coded_data_defect(data, plain_jpeg(data))
        (tmp_path / name).write_bytes(data)
        assert check_image(tmp_path / name) == (600, 600)


def test_damage_in_the_sample_causes_all_images_to_be_decoded(tmp_path, lines, monkeypatch):  # noqa: F811
    """Parts of other JPEGs look like valid coded data."""
    root = tmp_path / "set"
    write_set(root, damaged=12, kind="other")
    monkeypatch.setattr(scan, "SAMPLED", 0)
    assert len(load(root, tmp_path / "c0", max_bad=0)) == 24
    full = load(root, tmp_path / "c1", max_bad=0.9, verify="full")
    assert len(full) == 12
    monkeypatch.setattr(scan, "SAMPLED", 8)
    told(lines)
    sampled = load(root, tmp_path / "c2", max_bad=0.9)
    assert list(sampled.paths) == list(full.paths)
    assert "of 8 sampled images are damaged; decoding all images" in "".join(told(lines))


def test_each_kind_of_verification_has_its_own_index(tmp_path):
    root = tmp_path / "set"
    write_set(root, 4)
    sampled, full = load(root, tmp_path / "c"), load(root, tmp_path / "c", verify="full")
    assert sampled.fingerprint != full.fingerprint


@pytest.mark.parametrize("workers", ["0", "2"])
def test_training_names_images_that_the_decoder_reports_as_damaged(tmp_path, monkeypatch, capfd, workers):
    """After a scan that did not find the damage. More than ``--max-bad`` of them end the run."""
    data = write_set(tmp_path / "set", damaged=3, kind="other")
    monkeypatch.setattr(scan, "SAMPLED", 0)
    model = write_model(tmp_path / "tiny.yaml")
    flags = ["--data", str(data), "--model", str(model), "--project", str(tmp_path / "runs"), *SMALL]
    flags += ["--workers", workers, "--epochs", "2"]
    train.main([*flags, "--max-bad", "0.2"])
    out, err = capfd.readouterr()
    assert "24 images, 0 backgrounds" in out
    for i in range(3):
        assert out.count(f"{tmp_path}/set/images/train/{i:03}.jpg is damaged (Corrupt JPEG data: ") == 1, out
    assert "Corrupt" not in err
    error = error_of(capfd, train.main, *flags, "--max-bad", "0.1")
    assert "'train': 3 of 24 images are damaged or left out (--max-bad is 0.1" in error
    assert "--verify full leaves them out" in error


@pytest.mark.parametrize("kind", ["ram", "disk"])
def test_filling_a_cache_names_damaged_images(tmp_path, monkeypatch, capfd, kind):
    data = write_set(tmp_path / "set", damaged=3, kind="other")
    monkeypatch.setattr(scan, "SAMPLED", 0)
    flags = ["--data", data, "--model", write_model(tmp_path / "tiny.yaml"), "--project", tmp_path / "runs", *SMALL]
    error = error_of(capfd, train.main, *flags, "--epochs", "1", "--cache", kind)
    assert "'train': 3 of 24 images are damaged or left out" in error


def test_images_are_decoded_without_standard_error(tmp_path):
    (tmp_path / "a.jpg").write_bytes(photo(0))
    code = (
        "import os, sys; os.close(2); from data.image_io.decode import read_image; print(read_image(sys.argv[1]).shape)"
    )
    done = subprocess.run(
        [python(), "-c", code, str(tmp_path / "a.jpg")],
        cwd=Path(__file__).parents[3], capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "(320, 320, 3)\n"


def test_all_processes_together_count_each_damaged_file_once(tmp_path):
    root = tmp_path / "set"
    write_set(root, 4)
    index = load(root, tmp_path / "c")
    ours, theirs = (DamagedImages(index, "train", cache_dir=str(tmp_path / "c"), max_bad=0.5) for _ in range(2))
    for _ in range(2):
        theirs.add(index.path(0), "Corrupt")
        ours.add(index.path(0), "Corrupt")
        ours.add(index.path(1), "Corrupt")
    ours.check()
    theirs.check()
    theirs.add(index.path(2), "Corrupt")
    with refused():
        ours.check()


@pytest.mark.parametrize("by", ["folder", "list"])
def test_a_pipe_named_jpg_is_a_bad_file(tmp_path, by):
    root = tmp_path / "set"
    path = write_set(root, 4)
    os.mkfifo(root / "images/train/pipe.jpg")
    os.symlink("/dev/zero", root / "images/train/zero.jpg")
    if by == "list":
        names = sorted((root / "images/train").iterdir())
        (root / "list.txt").write_text("".join(f"images/train/{p.name}\n" for p in names))
        path.write_text(path.read_text().replace("train: images/train", "train: list.txt"))
    with refused():
        load(root, tmp_path / "cache")
    assert len(load(root, tmp_path / "cache", max_bad=0.5)) == 4
    with refused():
        read_image(root / "images/train/pipe.jpg")


def test_an_empty_folder_named_like_an_image_is_reported(tmp_path):
    root = tmp_path / "set"
    write_set(root, 4)
    (root / "images/train/extra.jpg").mkdir()
    (root / "images/train/more.gif").mkdir()
    (root / "images/train/pages.png").mkdir()
    (root / "images/train/003.jpg").rename(root / "images/train/pages.png/003.jpg")
    with refused():
        load(root, tmp_path / "cache")
    assert len(load(root, tmp_path / "cache", max_bad=0.5)) == 4


IRREGULAR = {
    "pipe": (os.mkfifo, "is a pipe or device"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "is a pipe or device"),
    "folder": (Path.mkdir, "is a folder"),
    "hole": (lambda path: path.touch() or os.truncate(path, 2**40), "has 1,024.00 GiB, more than such a file can need"),
}


@pytest.mark.parametrize(
    ("kind", "name"), [*((kind, "labels/train/001.txt") for kind in IRREGULAR), ("hole", "images/train/001.jpg")]
)
def test_a_file_that_is_not_regular_is_named_at_once(tmp_path, kind, name):
    """Reading a pipe would block forever; a sparse file of a terabyte would fill the memory."""
    root, (make, what) = tmp_path / "set", IRREGULAR[kind]
    write_set(root, 4)
    (root / name).unlink()
    make(root / name)
    index = load(root, tmp_path / "cache", max_bad=0.5)
    assert len(index) == 3
    assert any(name in line and what in line for line in index.report.lines)


@pytest.mark.parametrize("taken", [*TAKEN, "another user's folder"])
def test_without_a_cache_folder_the_list_is_in_a_folder_of_this_user(tmp_path, monkeypatch, taken):
    """Others may create files in the folder of temporary files."""
    index = load(write_set(tmp_path / "set", 4).parent, tmp_path / "cache")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "file").touch()
    images = DamagedImages(index, "train", cache_dir=str(tmp_path / "file" / "cache"), max_bad=0)
    folder = tmp_path / f"lockstep-{os.getuid()}"
    if taken == "folder":
        images.add(index.path(0), "damaged")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        with refused():
            images.check()
        return
    take_name(folder, taken.removesuffix(" folder"))
    if taken.endswith("folder"):
        folder.unlink()
        folder.mkdir()
        os.chown(folder, 65534, 65534)
    with refused():
        images.add(index.path(0), "damaged")


def test_an_incomplete_line_of_the_damage_list_does_not_hide_the_next(tmp_path):
    """A killed process may have left an incomplete line, and other lines may contain anything."""
    root = tmp_path / "set"
    write_set(root, 4)
    index = load(root, tmp_path / "c")
    path = tmp_path / "c" / f"train-{index.fingerprint}.damaged"
    path.write_bytes(b'5\n[["a"], 1]\n[1, 2]\n\xff\n["images/tra')
    damaged = DamagedImages(index, "train", cache_dir=str(tmp_path / "c"), max_bad=0.2)
    damaged.add(index.path(1), "Corrupt")
    with refused():
        damaged.check()


def test_a_stray_marker_at_the_end_is_reported_as_damage(tmp_path):
    """OpenCV does not report it: it invents the blocks that are lost after the marker."""
    data = photo(0)
    path = tmp_path / "x.jpg"
    path.write_bytes(data[:-2] + b"\xff\xa9" + data[-2:])
    read_image(path, lambda *_: pytest.fail("the decoder complains"))
    with refused(HiddenDamageError):
        check_image(path, decode=True)
    path.write_bytes(data)
    assert check_image(path, decode=True) == (320, 320)


def test_decoder_warnings_of_many_threads_are_all_counted(tmp_path, monkeypatch):
    def slowly(path, flags):
        time.sleep(0.002)
        return open_own(path, flags)

    monkeypatch.setattr("data.loading.damaged_images.open_own", slowly)
    root = write_set(tmp_path / "set", damaged=0).parent
    index = load(root, tmp_path / "cache")
    images = DamagedImages(index, "train", cache_dir=str(tmp_path / "cache"), max_bad=0.5)
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda i: images.add(index.path(i), "damaged"), range(20)))
    with pytest.raises(UserError, match=r"'train': 20 of 24 images are damaged or left out"):  # any is the first
        images.check(log=False)
