"""Image caches: one file per node, the same pixels as without a cache, and no memory left behind."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import resource
import shutil
import stat
import struct
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import cv2
import lmdb
import numpy as np
import pytest

from data.cache import decoding
from data.cache import disk as disk_cache
from data.cache.disk_writer import DiskCacheWriter
from data.cache.full_size import open_full_size_cache
from data.cache.mapped import MappedImages
from data.cache.named_files import CacheName
from data.cache.ram import open_ram_cache
from data.dataset.yaml_file import load_dataset_spec
from data.image_io.reduce import read_source, reduced_sizes
from data.index.index import DatasetIndex
from data.index.index_settings import IndexSettings
from data.index.load import load_index
from tests.helpers.hostile_files import OCCUPANTS, occupy
from tests.helpers.messages import refused
from tests.helpers.preloaded import python
from tests.helpers.ranks import run_ranks
from tests.helpers.repository import ROOT
from tests.helpers.synthetic_index import open_cache, write_rectangles
from tests.helpers.three_formats import write_three_formats
from utils.distributed.context import gather_arrays, torch_distributed_zero_first
from utils.distributed.groups import one_per_node_group
from utils.errors import UserError
from utils.files.locks import FileLock

SIZES = [(60, 80), (200, 100), (33, 47), (64, 64), (90, 300)]
KINDS = pytest.mark.parametrize("kind", ["ram", "disk"])


@pytest.fixture
def index(tmp_path):
    return write_rectangles(tmp_path / "images", SIZES)


@pytest.fixture
def cached(tmp_path):
    """Opens a cache whose files are in ``disk`` of the temporary folder. ``anew``: as if it had not been mapped."""

    def opened(
        kind: str, index: DatasetIndex, imgsz: int = 64, anew: bool = True
    ) -> MappedImages | disk_cache.DiskCache:
        if anew:
            disk_cache.unmap_disk_caches()
        if kind == "full":
            return open_full_size_cache(index, decoding.Decoding(), cache_dir=str(tmp_path / "disk"))
        return open_cache(kind, index, imgsz, tmp_path / "disk")

    return opened


@pytest.fixture
def decoded(monkeypatch) -> list[str]:
    """Names of the images that caches decode."""
    names: list[str] = []
    monkeypatch.setattr(
        decoding,
        "read_source",
        lambda path, *sizes, **options: names.append(Path(path).name) or read_source(path, *sizes, **options),
    )
    return names


def files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "disk").glob("*"))


def same_as_the_files(cache: MappedImages | disk_cache.DiskCache, index: DatasetIndex) -> bool:
    read = (read_source(index.path(i), index.image_hw[i], cache.source_hw[i]) for i in range(len(index)))
    return all(np.array_equal(cache[i], image) and not cache[i].flags.writeable for i, image in enumerate(read))


def test_reduced_sizes_equal_hand_computed_ones():
    for imgsz, sizes in {
        320: {(480, 640): (240, 320), (427, 640): (214, 320)},
        640: {(1000, 750): (640, 480), (100, 200): (100, 200), (640, 640): (640, 640)},
        64: {(3, 4000): (1, 64)},
    }.items():
        np.testing.assert_array_equal(reduced_sizes(np.array([*sizes]), imgsz), [*sizes.values()])


@KINDS
def test_a_cache_returns_the_pixels_of_the_files(kind, index, cached):
    cache = cached(kind, index)
    np.testing.assert_array_equal(cache.source_hw, reduced_sizes(index.image_hw, 64))
    assert same_as_the_files(cache, index)
    assert same_as_the_files(pickle.loads(pickle.dumps(cache)), index)
    assert len(pickle.dumps(cache)) < 3000


@pytest.mark.parametrize("kind", ["ram", "full"])
def test_no_more_images_are_decoded_at_once_than_there_is_memory_for(kind, tmp_path, cached, monkeypatch):
    index = write_rectangles(tmp_path / "images", [(60, 80)] * 8)
    lock = threading.Lock()
    now_and_most = [0, 0]

    def read_slowly(*args, **options):
        with lock:
            now_and_most[0] += 1
            now_and_most[1] = max(now_and_most)
        time.sleep(0.005)
        with lock:
            now_and_most[0] -= 1
        return read_source(*args, **options)

    monkeypatch.setattr(decoding, "read_source", read_slowly)
    monkeypatch.setattr(decoding, "available_memory", lambda: 4 * 2 * 3 * (60 * 80 * 3))  # a quarter is for two images
    assert same_as_the_files(cached(kind, index, 0), index)
    assert now_and_most == [0, 2]


def test_memory_is_freed_with_its_cache(index, cached):
    cache = cached("ram", index)
    assert os.stat(cache.path).st_size > 10_000
    view = cache[0]
    expected = cache[0].copy()
    path = cache.path
    del cache
    assert not path.exists()
    assert np.array_equal(view, expected)  # mapped memory stays valid


def _open_in_memory(ctx, index):
    for images in (index.take(np.array([1])), index):  # the second call shares its own memory
        with torch_distributed_zero_first(ctx):
            cache = open_ram_cache(ctx, images, 64, decoding.Decoding())
    return str(cache.path), same_as_the_files(cache, index)


def test_the_ranks_of_a_node_map_one_file(index):
    results = run_ranks(4, _open_in_memory, index, local_world=2)
    assert len({path for path, _ in results}) == 2
    assert [is_same for _, is_same in results] == [True] * 4
    assert not any(os.path.exists(path) for path, _ in results)


@pytest.mark.parametrize(
    ("kind", "imgsz", "message"), [("disk", 64, "not a file"), ("full", 0, "is a folder, not a file")]
)
@pytest.mark.parametrize("taken", OCCUPANTS)
def test_what_is_not_our_cache_but_has_its_name_is_replaced_or_refused(kind, imgsz, message, taken, index, cached):
    """Nothing in it is used, and opening does not block."""
    path = cached(kind, index, imgsz).path
    size = path.stat().st_size
    path.unlink()
    occupy(path, taken, size - 1)
    if taken == "folder":
        with refused(f"...: cannot be used ({message}), nor removed (Is a directory)"):
            cached(kind, index, imgsz)
        return
    cache = cached(kind, index, imgsz)
    assert same_as_the_files(cache, index)
    assert cache.path == path
    assert stat.S_ISREG(path.lstat().st_mode)
    if taken == "link":
        assert path.with_name("target").stat().st_size == size - 1


def test_images_at_full_size_that_were_cut_off_are_decoded_again(index, cached, caplog):
    path = cached("full", index).path
    size = path.stat().st_size
    os.truncate(path, size - 7)
    assert same_as_the_files(cached("full", index), index)
    assert f"{path} cannot be used (has {size - 7:,} bytes, expected {size:,}); it is created again" in caplog.text


@pytest.mark.parametrize(
    ("kind", "imgsz", "suffixes"),
    [("disk", 64, [".lmdb", ".complete"]), ("disk", 64, [".lmdb"]), ("full", 0, [".pixels"])],
)
def test_the_cache_of_another_data_set_under_the_name_of_this_one_is_not_read(kind, imgsz, suffixes, index, cached):
    """Its images have the same sizes, and a disk cache may be incomplete."""
    other = cached(kind, replace(index, cache_key="train-1"), imgsz).path
    image = Path(index.path(0))
    image.write_bytes(cv2.imencode(".png", 255 - cv2.imread(str(image)))[1].tobytes())
    index = replace(index, cache_key="train-2")
    path = cached(kind, index, imgsz).path
    path.with_suffix(".complete").unlink(missing_ok=True)
    for suffix in suffixes:
        shutil.copy2(other.with_suffix(suffix), path.with_suffix(suffix))
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


@pytest.mark.parametrize(("kind", "imgsz"), [("disk", 64), ("full", 0)])
def test_caches_of_a_changed_data_set_replace_the_older_ones(kind, imgsz, index, cached, tmp_path):
    """A process that reads an older cache keeps its images, and caches of other data sets stay."""
    index = replace(index, cache_key="train-0123")
    other = cached(kind, replace(index, cache_key="train-4567"), imgsz)
    before = cached(kind, index, imgsz)
    expected = before[3].tobytes()
    half = before.path.with_name(before.path.name.replace(CacheName.of(index).content, "half"))
    half.touch()
    with FileLock(half.with_suffix(".lock")) as lock:  # it is being filled
        assert not lock.acquire()
        changed = cached(kind, replace(index, image_files="changed"), imgsz, anew=False)
        assert {path for path in files(tmp_path) if path.suffix == changed.path.suffix} == {
            changed.path,
            other.path,
            half,
        }
    assert before[3].tobytes() == expected


def test_a_disk_cache_that_another_run_removes_at_once_is_one_line(index, cached, monkeypatch):
    fill = DiskCacheWriter.fill
    changed = replace(index, image_files="changed")

    def fill_and_replace(writer):
        fill(writer)
        CacheName.of(changed).remove_older(writer.path.parent)

    monkeypatch.setattr(DiskCacheWriter, "fill", fill_and_replace)
    with refused("another run, whose images differ, has just removed it; start again, or choose another --cache-dir"):
        cached("disk", index)


def test_images_at_full_size_are_mapped_before_another_run_may_remove_them(index, cached, monkeypatch):
    changed = CacheName.of(replace(index, image_files="changed"))
    release = FileLock.release

    def release_and_replace(lock):
        release(lock)
        monkeypatch.undo()
        changed.remove_older(lock.path.parent)

    monkeypatch.setattr(FileLock, "release", release_and_replace)
    assert same_as_the_files(cached("full", index), index)


@pytest.mark.parametrize(("kind", "suffix"), [("disk", "lmdb"), ("full", "pixels")])
def test_edited_labels_and_other_settings_keep_the_caches(kind, suffix, tmp_path, cached, decoded):
    """Runs with other classes or another held-out part have their own caches, which are kept until the images change. A
    cache of an earlier version is removed."""
    names = [f"{i}.png" for i in range(6)]
    write_three_formats(
        tmp_path, ["a", "b"], dict.fromkeys(names, (40, 60)), {name: [(0, 5, 5, 30, 30)] for name in names}
    )
    path = tmp_path / "data.yaml"
    path.write_text("{train: images/train, val: images/train, names: [a, b]}")

    def open_split(**settings: object) -> tuple[Path, int]:
        spec = replace(load_dataset_spec(path), **settings)
        index = load_index(spec, "train", IndexSettings(cache_dir=str(tmp_path / "index"), progress=False))
        decoded.clear()
        return cached(kind, index, 0 if kind == "full" else 64).path, len(decoded)

    whole, count = open_split()
    assert count == 6
    older = whole.with_name(f"{whole.name.rsplit('-', 4)[0]}-{'0' * 32}-64-v4.{suffix}")  # as earlier versions wrote it
    older.touch()
    assert open_split() == (whole, 0)
    assert not older.exists()
    held_out, count = open_split(held_out=frozenset(["images/train/0.png"]))
    assert (held_out != whole, count) == (True, 5)
    assert open_split() == (whole, 0)
    label = tmp_path / "labels/train/1.txt"
    label.write_text("1 0.5 0.5 0.5 0.5\n")
    os.utime(label, (0, 0))
    assert open_split() == (whole, 0)
    assert open_split(names=("c", "d")) == (whole, 0)
    assert open_split(classes=(1,)) == (whole, 0)
    assert open_split(held_out=frozenset(["images/train/0.png"])) == (held_out, 0)
    os.utime(tmp_path / "images/train/3.png", (0, 0))
    whole_again, count = open_split()
    assert count == 6
    assert list((tmp_path / "disk").glob(f"*.{suffix}")) == [whole_again]


@pytest.mark.parametrize("harm", ["truncated", "foreign", "empty", "touched", "marker"])
def test_a_changed_disk_cache_is_created_again(index, cached, harm):
    path = cached("disk", index).path
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[4096 + 20] ^= 1
    marker = path.with_suffix(".complete")
    if harm == "marker":
        marker.write_text("[" * 100_000)
    else:
        path.write_bytes({"truncated": whole[:-5000], "foreign": b"x" * 70000, "empty": b"", "touched": flipped}[harm])
    assert same_as_the_files(cached("disk", index), index)
    stamp = {"name": path.name, "bytes": path.stat().st_size, "mtime_ns": path.stat().st_mtime_ns}
    assert json.loads(marker.read_text()) == stamp


def test_a_flipped_bit_in_the_pixels_of_a_disk_cache_is_an_error_that_names_the_image(index, cached):
    """A disk that loses bits changes neither size nor time of the file."""
    cache = cached("disk", index)
    before = cache.path.stat()
    whole = bytearray(cache.path.read_bytes())
    whole[whole.index(cache[3].tobytes()) + 100] ^= 1  # all of it: LMDB leaves parts of images in unused ends of pages
    cache.path.write_bytes(whole)
    os.utime(cache.path, ns=(before.st_atime_ns, before.st_mtime_ns))
    damaged = cached("disk", index)
    assert damaged[2].any()
    with refused("disk/lockstep-...-64.lmdb: damaged at image 3; remove it and start again"):
        damaged[3]


def test_images_cached_before_a_kill_are_kept(index, cached, decoded, tmp_path):
    """A decoder sends SIGKILL while the cache is filled; the next run only decodes the rest."""
    script = (
        "import os, pickle, sys, time, types, zlib; from pathlib import Path\n"
        "from data.cache import decoding, disk, disk_writer\n"
        "from utils.distributed.context import DistributedContext\n"
        "disk_writer._BATCH_BYTES, plain = 1, decoding.read_source\n"
        "stored = []\n"
        "disk_writer.zlib = types.SimpleNamespace(crc32=lambda pixels: stored.append(0) or zlib.crc32(pixels))\n"
        "def read(path, *sizes, **options):\n"
        "    if path.endswith('004.png'):\n"
        "        while len(stored) < 4:  # at the fourth image, three have been committed\n"
        "            time.sleep(0.01)\n"
        "        os.kill(os.getpid(), 9)\n"
        "    return plain(path, *sizes, **options)\n"
        "decoding.read_source, index = read, pickle.loads(Path(sys.argv[1]).read_bytes())\n"
        "disk.open_disk_cache(DistributedContext.single(), index, 64, decoding.Decoding(1), cache_dir=sys.argv[2])\n"
    )
    (tmp_path / "index").write_bytes(pickle.dumps(index))
    command = [python(), "-c", script, str(tmp_path / "index"), str(tmp_path / "disk")]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == -9
    assert same_as_the_files(cached("disk", index), index)
    assert decoded in (["003.png", "004.png"], ["004.png"])


def test_an_unfinished_disk_cache_with_a_flipped_bit_in_a_key_is_created_again(index, cached):
    """Such as a kill leaves: not marked as complete."""
    path = cached("disk", index).path
    path.with_suffix(".complete").unlink()
    disk_cache.unmap_disk_caches()
    with lmdb.open(os.fspath(path), subdir=False, lock=False) as environment, environment.begin(write=True) as written:
        written.put(struct.pack(">Q", 3 | 1 << 40), written.pop(struct.pack(">Q", 3)))
    assert same_as_the_files(cached("disk", index), index)


def _first_pixels(cache, i):
    return cache[i].tobytes()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_other_processes_read_the_same_pixels(index, cached, method):
    cache = cached("disk", index)
    expected = cache[3].tobytes()
    with multiprocessing.get_context(method).Pool(2) as pool:
        assert pool.starmap(_first_pixels, [(cache, 3), (cache, 3)]) == [expected, expected]


def test_an_unreadable_or_changed_image_stops_filling_the_cache(index, cached):
    good = Path(index.path(2)).read_bytes()
    Path(index.path(2)).write_bytes(b"not an image")
    for kind in ("ram", "disk"):
        with refused(
            "images/002.png: cannot be decoded (damaged, or not an image); restore or remove it, and start again"
        ):
            cached(kind, index)
    Path(index.path(2)).write_bytes(good)
    assert same_as_the_files(cached("disk", index), index)
    Path(index.path(0)).write_bytes(Path(index.path(1)).read_bytes())  # a file of another size
    with refused(
        "images/000.png: is 100x200 pixels but was 80x60 when the data set was indexed; it changed during "
        "the run; start again"
    ):
        cached("disk", replace(index, image_files="changed"))


def _fill_together(ctx, index, folder):
    """Two nodes with two ranks each: every image is decoded once in the run, and once more after node 1 has lost its
    file."""
    decoded = []
    plain = decoding.read_source
    decoding.read_source = lambda path, *sizes, **options: (
        decoded.append(Path(path).name) or plain(path, *sizes, **options)
    )
    place = f"{folder}/{ctx.node_rank}"
    for start in range(2):
        leaders = one_per_node_group(ctx)
        with torch_distributed_zero_first(ctx):
            cache = disk_cache.open_disk_cache(ctx, index, 64, decoding.Decoding(), cache_dir=place, leaders=leaders)
        gathered = gather_arrays(ctx, {"decoded": np.array(decoded, str)})
        if start == 0:
            first = gathered
            decoded.clear()
            if ctx.rank == 2:
                cache.path.unlink()
    return first, gathered, same_as_the_files(cache, index), str(cache.path)


def test_nodes_with_the_same_data_fill_their_caches_together(index, tmp_path):
    results = run_ranks(4, _fill_together, index, str(tmp_path), local_world=2)
    first, second, _, _ = results[0]
    names = [Path(index.path(i)).name for i in range(len(index))]
    assert sorted(np.concatenate([g["decoded"] for g in first])) == names
    assert all(0 < len(first[rank]["decoded"]) < len(names) for rank in (0, 2))
    assert [len(g["decoded"]) for g in second] == [len(names), 0, 0, 0]  # by the node that has the images
    for rank, (_, _, is_same, path) in enumerate(results):
        assert is_same
        assert f"/{rank // 2}/" in path


def _fill_beside_others(ctx, index, folder):
    """Node 1 has a complete file whose lock cannot be taken. Then another run is filling the file of node 0."""
    leaders = one_per_node_group(ctx)
    place = f"{folder}/{ctx.node_rank}"
    path = disk_cache.open_disk_cache(ctx, index, 64, decoding.Decoding(), cache_dir=place, leaders=leaders).path
    lock = path.with_suffix(".lock")
    if ctx.rank == 1:
        lock.unlink()
        lock.mkdir()
    else:
        path.unlink()
    cache = disk_cache.open_disk_cache(ctx, index, 64, decoding.Decoding(), cache_dir=place, leaders=leaders)
    is_same = same_as_the_files(cache, index)
    if ctx.rank == 0:
        path.write_bytes(b"the pages that another run is writing")
    writer = DiskCacheWriter(path, index, cache.source_hw, decoding.Decoding())
    with FileLock(lock) as held:
        assert ctx.rank == 1 or not held.acquire()
        return is_same, writer.fill_with_other_nodes(ctx, leaders), path.read_bytes()[:9]


def test_a_complete_file_is_not_locked_and_one_without_its_lock_not_removed(index, tmp_path):
    (same, together, pages), (other_same, other_together, _) = run_ranks(
        2, _fill_beside_others, index, str(tmp_path), local_world=1
    )
    assert same
    assert other_same
    assert not together
    assert not other_together
    assert pages == b"the pages"


def _fill_apart(ctx, index, folder):
    """The nodes' data sets differ, so each node decodes its own."""
    index = replace(index, image_files=f"of node {ctx.node_rank}")
    leaders = one_per_node_group(ctx)
    own = f"{folder}/{ctx.rank}"
    return same_as_the_files(
        disk_cache.open_disk_cache(ctx, index, 64, decoding.Decoding(), cache_dir=own, leaders=leaders), index
    )


def test_nodes_with_different_data_fill_their_caches_separately(index, tmp_path):
    assert run_ranks(2, _fill_apart, index, str(tmp_path), local_world=1) == [True, True]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("ram", "--cache ram: needs 36 kB in memory, but may use only 98% of the 1 kB free; use --cache disk or none"),
        (
            "disk",
            "--cache disk: needs 4.2 MB in .../disk, but may use only 98% of the 1 kB free; choose another "
            "--cache-dir or --cache none",
        ),
    ],
)
def test_too_little_space_is_one_line(kind, message, index, cached, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    monkeypatch.setattr("data.cache.ram.available_memory", lambda: 1000)
    with refused(message):
        cached(kind, index)
    assert not [path for path in files(tmp_path) if path.suffix != ".lock"]


@pytest.mark.parametrize(("kind", "title"), [("ram", "--cache ram"), ("full", "tile")])
def test_a_file_that_may_not_become_so_large_is_one_line(kind, title, index, cached, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)  # as ``ulimit -f``
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(UserError) as caught:
            cached(kind, index, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    start, _, end = str(caught.value).partition(": ")
    assert start == title
    assert end.endswith("cannot be allocated (file too large)")
    assert not [path for path in files(tmp_path) if path.suffix != ".lock"]
