"""Image caches: one file per node, the same pixels as without a cache, and no memory left behind."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
import shutil
import signal
import types
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest

from data.cache import disk, mapped
from data.cache.disk import DiskCache, mapped_environment, open_disk_cache, open_full_size_cache
from data.cache.mapped import Decoding, MappedImages, open_ram_cache
from data.images.decode import read_source, reduced_sizes
from data.index import DatasetIndex
from tests.helpers.messages import refused
from tests.helpers.ranks import run_ranks
from tests.helpers.synthetic_index import open_cache, write_rectangles
from utils.distributed.context import torch_distributed_zero_first

SIZES = [(60, 80), (200, 100), (33, 47), (64, 64), (90, 300)]
KINDS = pytest.mark.parametrize("kind", ["ram", "disk"])


@pytest.fixture
def index(tmp_path):
    return write_rectangles(tmp_path / "images", SIZES)


@pytest.fixture
def cached(tmp_path):
    """Opens a cache whose files are in ``disk`` of the temporary folder. ``anew``: as if it had not been mapped."""

    def opened(kind: str, index: DatasetIndex, imgsz: int = 64, anew: bool = True) -> MappedImages | DiskCache:
        if anew:
            mapped_environment.cache_clear()
        if kind == "full":
            return open_full_size_cache(index, Decoding(), cache_dir=str(tmp_path / "disk"))
        return open_cache(kind, index, imgsz, tmp_path / "disk")

    return opened


@pytest.fixture
def decoded(monkeypatch) -> list[str]:
    """Names of the images that caches decode."""
    names: list[str] = []
    monkeypatch.setattr(
        mapped,
        "read_source",
        lambda path, *sizes, **options: names.append(Path(path).name) or read_source(path, *sizes, **options),
    )
    return names


def files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "disk").glob("*"))


def same_as_the_files(cache: MappedImages | DiskCache, index: DatasetIndex) -> bool:
    read = (read_source(index.path(i), index.image_hw[i], cache.source_hw[i]) for i in range(len(index)))
    return all(np.array_equal(cache[i], image) and not cache[i].flags.writeable for i, image in enumerate(read))


@KINDS
def test_a_cache_returns_the_pixels_of_the_files(kind, index, cached):
    cache = cached(kind, index)
    np.testing.assert_array_equal(cache.source_hw, reduced_sizes(index.image_hw, 64))
    assert same_as_the_files(cache, index)
    assert same_as_the_files(pickle.loads(pickle.dumps(cache)), index)
    assert len(pickle.dumps(cache)) < 3000


def _open_in_memory(ctx, index):
    for images in (index.take(np.array([1])), index):  # the second call shares its own memory
        with torch_distributed_zero_first(ctx):
            cache = open_ram_cache(ctx, images, 64, Decoding())
    return str(cache.path), same_as_the_files(cache, index)


def test_the_ranks_of_a_node_map_one_file(index):
    results = run_ranks(4, _open_in_memory, index, local_world=2)
    assert len({path for path, _ in results}) == 2
    assert [is_same for _, is_same in results] == [True] * 4
    assert not any(os.path.exists(path) for path, _ in results)


@pytest.mark.parametrize(("kind", "imgsz"), [("disk", 64), ("full", 0)])
def test_the_cache_of_another_data_set_under_the_name_of_this_one_is_not_read(kind, imgsz, index, cached):
    """Its images have the same sizes."""
    other = cached(kind, replace(index, cache_key="train-1"), imgsz).path
    image = Path(index.path(0))
    image.write_bytes(cv2.imencode(".png", 255 - cv2.imread(str(image)))[1].tobytes())
    index = replace(index, cache_key="train-2")
    path = cached(kind, index, imgsz).path
    shutil.copy2(other, path)
    assert same_as_the_files(cached(kind, index, imgsz), index)


def test_a_disk_cache_is_reused_only_for_equal_data_and_size(index, cached, decoded, tmp_path):
    cached("disk", index)
    decoded.clear()
    assert same_as_the_files(cached("disk", index), index)
    assert decoded == []
    cached("disk", index, imgsz=48)
    paths = list((tmp_path / "disk").glob("*.lmdb"))
    assert len(paths) == 2
    assert max(path.stat().st_size for path in paths) < 200_000  # not a sparse file of a terabyte


@pytest.mark.parametrize("harm", ["truncated", "foreign", "empty", "header"])
def test_a_disk_cache_that_cannot_be_mapped_is_created_again(index, cached, harm):
    """A file that was cut off, or is of another program."""
    path = cached("disk", index).path
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[4096 + 20] ^= 1
    path.write_bytes({"truncated": whole[:-5000], "foreign": b"x" * 70000, "empty": b"", "header": flipped}[harm])
    assert same_as_the_files(cached("disk", index), index)


def test_a_flipped_bit_in_the_pixels_of_a_disk_cache_is_an_error_that_names_the_image(index, cached):
    cache = cached("disk", index)
    whole = bytearray(cache.path.read_bytes())
    whole[whole.index(cache[3].tobytes()) + 100] ^= 1  # all of it: LMDB leaves parts of images in unused ends of pages
    cache.path.write_bytes(whole)
    damaged = cached("disk", index)
    assert damaged[2].any()
    with refused("disk/lockstep-...-64.lmdb: damaged at image 3; remove it"):
        damaged[3]


def _fill_and_die(index, folder, kind, num_calls):
    """Fills a cache, and dies in the given call of what decodes an image or names a file."""
    calls = itertools.count()

    def dying(plain):
        def call(*args, **options):
            if next(calls) == num_calls:
                os.kill(os.getpid(), signal.SIGKILL)
            return plain(*args, **options)

        return call

    disk._BATCH_BYTES = 1
    mapped.read_source = dying(mapped.read_source)
    disk.os = types.SimpleNamespace(**vars(os) | {"replace": dying(os.replace)})
    if kind == "full":
        open_full_size_cache(index, Decoding(1), cache_dir=folder)
    else:
        open_disk_cache(index, 64, Decoding(1), cache_dir=folder)


@pytest.mark.parametrize("kind", ["disk", "full"])
def test_a_fill_that_is_killed_leaves_nothing_that_opens(kind, index, cached, decoded, tmp_path):
    folder = tmp_path / "disk"
    for num_calls in range(len(SIZES) + 1):
        child = multiprocessing.get_context("fork").Process(
            target=_fill_and_die, args=(index, str(folder), kind, num_calls)
        )
        child.start()
        child.join()
        assert child.exitcode == -signal.SIGKILL
        assert [path for path in folder.iterdir() if path.suffix in (".lmdb", ".pixels")] == []
    assert same_as_the_files(cached(kind, index, 0 if kind == "full" else 64), index)
    assert len(decoded) == len(SIZES)
    assert len([path for path in folder.iterdir() if path.suffix != ".lock"]) == 1


def _fill_on_node(ctx, index, folder):
    decoded = []
    plain = mapped.read_source
    mapped.read_source = lambda path, *sizes, **options: decoded.append(path) or plain(path, *sizes, **options)
    with torch_distributed_zero_first(ctx):
        cache = open_disk_cache(index, 64, Decoding(), cache_dir=f"{folder}/{ctx.node_rank}")
    return len(decoded), same_as_the_files(cache, index)


def test_the_first_process_of_each_node_fills_the_file_of_its_node(index, tmp_path):
    results = run_ranks(4, _fill_on_node, index, str(tmp_path), local_world=2)
    assert results == [(len(SIZES), True), (0, True)] * 2


def test_an_unreadable_or_changed_image_stops_filling_the_cache(index, cached):
    good = Path(index.path(2)).read_bytes()
    Path(index.path(2)).write_bytes(b"not an image")
    for kind in ("ram", "disk"):
        with refused("images/002.png: cannot be decoded (damaged, or not an image); restore or remove it"):
            cached(kind, index)
    Path(index.path(2)).write_bytes(good)
    assert same_as_the_files(cached("disk", index), index)
    Path(index.path(0)).write_bytes(Path(index.path(1)).read_bytes())  # a file of another size
    with refused(
        "images/000.png: is 100x200 pixels but was 80x60 when the data set was indexed; it changed during the run"
    ):
        cached("disk", replace(index, image_files="changed"))
