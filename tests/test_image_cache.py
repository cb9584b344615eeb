"""One file a node, the same pixels as without it, and no trace of an in-memory one."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data import image_cache
from data.image_cache import open_image_cache
from data.source_images import read_source, reduced_sizes
from tests.synthetic_index import write_dataset
from utils.errors import UserError

SIZES = [(60, 80), (200, 100), (33, 47), (64, 64), (90, 300)]


@pytest.fixture
def index(tmp_path):
    return write_dataset(tmp_path / "images", SIZES)


def options(kind: str, tmp_path: Path) -> dict:
    memory = tmp_path / "shm"
    memory.mkdir(exist_ok=True)
    return {"kind": kind, "cache_dir": str(tmp_path / "disk"), "shared_memory": memory, "show_progress": False}


def files(tmp_path: Path) -> list[Path]:
    return [*(tmp_path / "shm").glob("*"), *(tmp_path / "disk").glob("*")]


@pytest.mark.parametrize(
    ("size", "imgsz", "expected"),
    [
        ((480, 640), 320, (240, 320)),
        ((427, 640), 320, (214, 320)),
        ((1000, 750), 640, (640, 480)),
        ((100, 200), 640, (100, 200)),
        ((3, 4000), 64, (1, 64)),
        ((640, 640), 640, (640, 640)),
    ],
)
def test_reduced_sizes(size, imgsz, expected):
    assert tuple(reduced_sizes(np.array([size]), imgsz)[0]) == expected


@pytest.mark.parametrize("kind", ["ram", "disk"])
def test_same_pixels_as_the_files(kind, index, tmp_path):
    cache = open_image_cache(index, imgsz=64, **options(kind, tmp_path))
    assert len(cache) == len(index)
    sizes = reduced_sizes(index.image_hw, 64)
    for i in range(len(index)):
        direct = read_source(index.path(i), index.image_hw[i], sizes[i])
        assert np.array_equal(cache[i], direct)
        assert not cache[i].flags.writeable
    copy = pickle.loads(pickle.dumps(cache))
    assert np.array_equal(copy[1], cache[1])
    assert len(pickle.dumps(cache)) < 3000
    copy.close()
    cache.close()


def test_memory_is_given_back_by_the_last_holder(index, tmp_path):
    first = open_image_cache(index, imgsz=64, **options("ram", tmp_path))
    second = open_image_cache(index, imgsz=64, **options("ram", tmp_path))
    assert first.path == second.path
    first.close()
    assert files(tmp_path) == [second.path]
    expected = second[0].copy()
    second.close()
    assert files(tmp_path) == []
    assert np.array_equal(second[0], expected)  # what is mapped stays mapped


def test_a_run_that_ends_leaves_nothing_in_memory(index, tmp_path):
    memory = tmp_path / "shm"
    memory.mkdir()
    script = (
        "import pickle, sys; from pathlib import Path; from data.image_cache import open_image_cache\n"
        "index = pickle.load(open(sys.argv[1], 'rb'))\n"
        "cache = open_image_cache(index, 'ram', imgsz=64, show_progress=False, shared_memory=Path(sys.argv[2]))\n"
        "print(cache.path.exists())\n"
    )
    (tmp_path / "index").write_bytes(pickle.dumps(index))
    run = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "index"), str(memory)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
        check=True,
    )
    assert run.stdout.strip() == "True"
    assert list(memory.iterdir()) == []


def test_what_a_killed_run_left_is_swept_by_another(index, tmp_path):
    memory = options("ram", tmp_path)["shared_memory"]
    stale = memory / f"lockstep-{os.getuid()}-other-64-v1.pixels"
    half = memory / f"lockstep-{os.getuid()}-other-64-v1.pixels.abcd"
    stranger = memory / "something-else.pixels"
    for path in (stale, half, stranger):
        path.write_bytes(b"x")
    cache = open_image_cache(index, imgsz=64, **options("ram", tmp_path))
    assert sorted(files(tmp_path)) == sorted([cache.path, stranger])
    cache.close()


def test_disk_cache_is_reused_and_keyed(index, tmp_path, monkeypatch):
    open_image_cache(index, imgsz=64, **options("disk", tmp_path)).close()
    (path,) = files(tmp_path)

    def fail(*args):
        raise AssertionError("decoded again")

    with monkeypatch.context() as patch:
        patch.setattr(image_cache, "read_source", fail)
        open_image_cache(index, imgsz=64, **options("disk", tmp_path)).close()
    open_image_cache(index, imgsz=48, **options("disk", tmp_path)).close()
    open_image_cache(replace(index, fingerprint="changed"), imgsz=64, **options("disk", tmp_path)).close()
    assert len(files(tmp_path)) == 3
    path.write_bytes(path.read_bytes()[:-1])  # of a wrong size: made anew
    cache = open_image_cache(index, imgsz=64, **options("disk", tmp_path))
    assert np.array_equal(cache[4], read_source(index.path(4), index.image_hw[4], cache.source_hw[4]))


def test_a_bad_image_stops_the_filling_and_leaves_no_file(index, tmp_path):
    Path(index.path(2)).write_bytes(b"not an image")
    for kind in ("ram", "disk"):
        with pytest.raises(UserError, match=r"002\.png"):
            open_image_cache(index, imgsz=64, **options(kind, tmp_path))
    assert files(tmp_path) == []


def test_an_image_that_changed_size_is_named(index, tmp_path):
    Path(index.path(0)).write_bytes(Path(index.path(1)).read_bytes())
    with pytest.raises(UserError, match=r"000\.png: is 100x200 pixels but was 80x60"):
        open_image_cache(index, imgsz=64, **options("disk", tmp_path))


def test_too_little_memory_is_one_line(index, tmp_path, monkeypatch):
    monkeypatch.setattr(image_cache, "_free_bytes", lambda folder, in_ram: 1000)
    with pytest.raises(UserError, match=r"--cache ram: needs .* free; use --cache disk") as caught:
        open_image_cache(index, imgsz=64, **options("ram", tmp_path))
    assert "\n" not in str(caught.value)
    assert files(tmp_path) == []


def test_none_is_no_cache(index):
    assert open_image_cache(index, "none", imgsz=64) is None
