"""Image caches: one file per node, the same pixels as without a cache, and no memory left behind."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import stat
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from data.cache import disk as disk_cache
from data.cache import ram as ram_cache
from data.cache.open import open_image_cache
from data.image_io.decode import read_source, reduced_sizes
from tests.helpers.hostile_files import TAKEN, take_name
from tests.helpers.messages import refused
from tests.helpers.preloaded import python
from tests.helpers.ranks import run_ranks
from tests.helpers.synthetic_index import write_dataset
from utils.distributed.collectives import gather_arrays, torch_distributed_zero_first
from utils.distributed.groups import one_per_node_group

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
def test_reduced_sizes_equal_hand_computed_ones(size, imgsz, expected):
    assert tuple(reduced_sizes(np.array([size]), imgsz)[0]) == expected


@pytest.mark.parametrize("kind", ["ram", "disk"])
def test_a_cache_returns_the_pixels_of_the_files(kind, index, tmp_path):
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


def test_memory_is_freed_when_its_last_user_ends(index, tmp_path):
    first = open_image_cache(index, imgsz=64, **options("ram", tmp_path))
    second = open_image_cache(index, imgsz=64, **options("ram", tmp_path))
    assert first.path == second.path
    del first
    assert files(tmp_path) == [second.path]
    view, expected = second[0], second[0].copy()
    del second
    assert files(tmp_path) == []
    assert np.array_equal(view, expected)  # mapped memory stays valid


def test_a_run_that_ends_leaves_nothing_in_memory(index, tmp_path):
    memory = tmp_path / "shm"
    memory.mkdir()
    script = (
        "import pickle, sys; from pathlib import Path; from data.cache.open import open_image_cache\n"
        "index = pickle.load(open(sys.argv[1], 'rb'))\n"
        "cache = open_image_cache(index, 'ram', imgsz=64, show_progress=False, shared_memory=Path(sys.argv[2]))\n"
        "print(cache.path.exists())\n"
    )
    (tmp_path / "index").write_bytes(pickle.dumps(index))
    run = subprocess.run(
        [python(), "-c", script, str(tmp_path / "index"), str(memory)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[3],
        check=True,
    )
    assert run.stdout.strip() == "True"
    assert list(memory.iterdir()) == []


def test_a_new_run_removes_the_memory_of_a_killed_run(index, tmp_path):
    memory = options("ram", tmp_path)["shared_memory"]
    stale = memory / f"lockstep-{os.getuid()}-other-64-v1.pixels"
    half = memory / f"lockstep-{os.getuid()}-other-64-v1.pixels.abcd"
    stranger = memory / "something-else.pixels"
    for path in (stale, half, stranger):
        path.write_bytes(b"x")
    cache = open_image_cache(index, imgsz=64, **options("ram", tmp_path))
    assert sorted(files(tmp_path)) == sorted([cache.path, stranger])


@pytest.mark.parametrize("kind", ["ram", "disk"])
@pytest.mark.parametrize("taken", TAKEN)
def test_what_is_not_our_cache_but_has_its_name_is_replaced_or_refused(kind, taken, index, tmp_path):
    """A file has the right size, too. Nothing of it is used, and nothing is waited for."""
    path = open_image_cache(index, imgsz=64, **options("disk", tmp_path)).path
    size = path.stat().st_size
    disk_cache._environment.cache_clear()
    if kind == "ram":
        cache = open_image_cache(index, imgsz=64, **options(kind, tmp_path))
        path, size = cache.path, cache.path.stat().st_size
        del cache
    take_name(path, taken, size)
    if taken == "folder":
        with refused():
            open_image_cache(index, imgsz=64, **options(kind, tmp_path))
        return
    cache = open_image_cache(index, imgsz=64, **options(kind, tmp_path))
    assert same_as_the_files(cache, index)
    assert cache.path == path
    assert stat.S_ISREG(path.lstat().st_mode)
    assert path.lstat().st_uid == os.geteuid()
    if taken == "link":
        assert path.with_name("target").stat().st_size == size


def test_a_cache_in_memory_that_stays_locked_is_replaced(index, tmp_path, monkeypatch):
    monkeypatch.setattr(ram_cache, "_PATIENCE_S", 0.3)
    path = open_image_cache(index, imgsz=64, **options("ram", tmp_path)).path
    take_name(path, "bytes", 9)
    hold = "import fcntl, sys, time; fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX); print(flush=True); time.sleep(60)"
    with subprocess.Popen([python(), "-c", hold, str(path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"\n"
        assert same_as_the_files(open_image_cache(index, imgsz=64, **options("ram", tmp_path)), index)
        holder.kill()


def test_a_lock_of_another_user_is_refused(index, tmp_path):
    path = open_image_cache(index, imgsz=64, **options("disk", tmp_path)).path
    path.unlink()
    take_name(path.with_suffix(".lock"), "another user's")
    with pytest.raises(PermissionError, match=r"belongs to another user \(uid 65534\): '.*\.lock'"):
        open_image_cache(index, imgsz=64, **options("disk", tmp_path))


def test_a_cache_of_a_killed_run_is_used_if_its_checksums_are_right(index, tmp_path, monkeypatch):
    given, decoded = options("ram", tmp_path), []
    monkeypatch.setattr(ram_cache, "read_source", lambda p, *sizes: decoded.append(p) or read_source(p, *sizes))
    cache = open_image_cache(index, imgsz=64, **given)
    path, content = cache.path, cache.path.read_bytes()
    del cache
    for harm in (None, 0, 5000, len(content) - 1):  # the last is in a checksum
        found = bytearray(content)
        if harm is not None:
            found[harm] ^= 1
        path.write_bytes(found)
        path.chmod(0o600)
        decoded.clear()
        cache = open_image_cache(index, imgsz=64, **given)
        assert same_as_the_files(cache, index)
        assert len(decoded) == (0 if harm is None else len(index))
        del cache
    path.write_bytes(content)
    path.chmod(0o666)  # anybody could change the pixels later
    assert open_image_cache(index, imgsz=64, **given).path.stat().st_mode & 0o777 == 0o600


def lmdbs(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "disk").glob("*.lmdb"))


def same_as_the_files(cache, index) -> bool:
    sizes = cache.source_hw
    return all(
        np.array_equal(cache[i], read_source(index.path(i), index.image_hw[i], sizes[i])) for i in range(len(index))
    )


def test_a_disk_cache_is_reused_only_for_equal_data_and_size(index, tmp_path, monkeypatch):
    open_image_cache(index, imgsz=64, **options("disk", tmp_path))

    def fail(*args):
        raise AssertionError("decoded again")

    with monkeypatch.context() as patch:
        patch.setattr(disk_cache, "read_source", fail)
        cache = open_image_cache(index, imgsz=64, **options("disk", tmp_path))
    assert same_as_the_files(cache, index)
    open_image_cache(index, imgsz=48, **options("disk", tmp_path))
    open_image_cache(replace(index, fingerprint="changed"), imgsz=64, **options("disk", tmp_path))
    paths = lmdbs(tmp_path)
    assert len(paths) == 3
    for path in paths:  # not a sparse file of a terabyte
        assert path.stat().st_size < 200_000


@pytest.mark.parametrize("harm", ["truncated", "foreign", "empty"])
def test_a_damaged_disk_cache_is_created_again(index, tmp_path, harm):
    open_image_cache(index, imgsz=64, **options("disk", tmp_path))
    (path,) = lmdbs(tmp_path)
    whole = path.read_bytes()
    path.write_bytes({"truncated": whole[:-5000], "foreign": b"x" * 70000, "empty": b""}[harm])
    assert same_as_the_files(open_image_cache(index, imgsz=64, **options("disk", tmp_path)), index)


def test_images_cached_before_a_kill_are_kept(index, tmp_path, monkeypatch):
    """A decoder sends SIGKILL while the cache is filled; the next run only decodes the rest."""
    script = (
        "import os, pickle, sys\n"
        "from data.cache import disk as disk_cache\n"
        "from data.cache.open import open_image_cache\n"
        "index = pickle.load(open(sys.argv[1], 'rb'))\n"
        "disk_cache._BATCH_BYTES = 1\n"
        "plain = disk_cache.read_source\n"
        "def read(path, *sizes):\n"
        "    if path.endswith('004.png'):\n"
        "        import time; time.sleep(1); os.kill(os.getpid(), 9)\n"
        "    return plain(path, *sizes)\n"
        "disk_cache.read_source = read\n"
        "open_image_cache(index, 'disk', imgsz=64, show_progress=False, cache_dir=sys.argv[2], threads=1)\n"
    )
    (tmp_path / "index").write_bytes(pickle.dumps(index))
    command = [python(), "-c", script, str(tmp_path / "index"), str(tmp_path / "disk")]
    assert subprocess.run(command, cwd=Path(__file__).parents[3], check=False).returncode == -9
    decoded = []

    def read(path, *sizes):
        decoded.append(Path(path).name)
        return read_source(path, *sizes)

    with monkeypatch.context() as patch:
        patch.setattr(disk_cache, "read_source", read)
        cache = open_image_cache(index, imgsz=64, **options("disk", tmp_path))
    assert decoded == ["003.png", "004.png"] or decoded == ["004.png"]
    assert same_as_the_files(cache, index)


def test_the_map_grows_if_the_images_need_more_space(index, tmp_path, monkeypatch):
    """The space is estimated beforehand; if the estimate is too small, nothing is lost."""
    monkeypatch.setattr(disk_cache, "_BATCH_BYTES", 1)
    plain = disk_cache._Writer._open

    def small(self):
        environment = plain(self)
        environment.set_mapsize(32768)
        return environment

    monkeypatch.setattr(disk_cache._Writer, "_open", small)
    assert same_as_the_files(open_image_cache(index, imgsz=64, **options("disk", tmp_path)), index)


def _first_pixels(cache, i):
    return cache[i].tobytes()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_other_processes_read_the_same_pixels(index, tmp_path, method):
    cache = open_image_cache(index, imgsz=64, **options("disk", tmp_path))
    expected = cache[3].tobytes()
    with multiprocessing.get_context(method).Pool(2) as pool:
        assert pool.starmap(_first_pixels, [(cache, 3), (cache, 3)]) == [expected, expected]


def test_an_unreadable_image_stops_filling_the_cache(index, tmp_path):
    good = Path(index.path(2)).read_bytes()
    Path(index.path(2)).write_bytes(b"not an image")
    for kind in ("ram", "disk"):
        with refused():
            open_image_cache(index, imgsz=64, **options(kind, tmp_path))
    assert not list((tmp_path / "shm").iterdir())
    Path(index.path(2)).write_bytes(good)
    assert same_as_the_files(open_image_cache(index, imgsz=64, **options("disk", tmp_path)), index)


def _fill_together(ctx, index, folder):
    """Two nodes with two ranks each: every image is decoded once in the run, and once more after node 1 has lost its
    file."""
    decoded = []
    plain = disk_cache.read_source
    disk_cache.read_source = lambda path, *sizes: decoded.append(Path(path).name) or plain(path, *sizes)
    place = f"{folder}/{ctx.node_rank}"
    for start in range(2):
        leaders = one_per_node_group(ctx)
        with torch_distributed_zero_first(ctx):
            cache = open_image_cache(
                index, "disk", imgsz=64, cache_dir=place, show_progress=False, ctx=ctx, leaders=leaders
            )
        gathered = gather_arrays(ctx, {"decoded": np.array(decoded, str)})
        if start == 0:
            first = gathered
            decoded.clear()
            if ctx.rank == 2:
                cache.path.unlink()
    return first, gathered, [cache[i].tobytes() for i in range(len(index))], str(cache.path)


def test_nodes_with_the_same_data_fill_their_caches_together(index, tmp_path):
    results = run_ranks(4, _fill_together, index, str(tmp_path), local_world=2)
    first, second, _, _ = results[0]
    names = [Path(index.path(i)).name for i in range(len(index))]
    assert sorted(np.concatenate([g["decoded"] for g in first])) == names
    assert all(0 < len(first[rank]["decoded"]) < len(names) for rank in (0, 2))
    assert [len(g["decoded"]) for g in second] == [len(names), 0, 0, 0]  # by the node that has the images
    expected = [
        read_source(index.path(i), index.image_hw[i], s) for i, s in enumerate(reduced_sizes(index.image_hw, 64))
    ]
    for rank, (_, _, pixels, path) in enumerate(results):
        assert pixels == [image.tobytes() for image in expected]
        assert f"/{rank // 2}/" in path


def _fill_apart(ctx, index, folder):
    """The nodes' data sets differ, so each node decodes its own."""
    index = replace(index, fingerprint=f"of node {ctx.node_rank}")
    leaders = one_per_node_group(ctx)
    cache = open_image_cache(
        index, "disk", imgsz=64, cache_dir=f"{folder}/{ctx.rank}", show_progress=False, ctx=ctx, leaders=leaders
    )
    return same_as_the_files(cache, index)


def test_nodes_with_different_data_fill_their_caches_separately(index, tmp_path):
    assert run_ranks(2, _fill_apart, index, str(tmp_path), local_world=1) == [True, True]


def test_an_image_whose_size_changed_is_named(index, tmp_path):
    Path(index.path(0)).write_bytes(Path(index.path(1)).read_bytes())
    with refused():
        open_image_cache(index, imgsz=64, **options("disk", tmp_path))


@pytest.mark.parametrize("kind", ["ram", "disk"])
def test_too_little_disk_space_is_one_line(kind, index, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(total=10**12, used=0, free=1000))
    with refused():
        open_image_cache(index, imgsz=64, **options(kind, tmp_path))
    assert not [path for path in files(tmp_path) if path.suffix != ".lock"]


def test_a_flipped_bit_in_a_disk_cache_is_detected(index, tmp_path):
    """In the pixels it is an error that names the image; in the index of the file, the file is created again."""
    cache = open_image_cache(index, imgsz=64, **options("disk", tmp_path))
    assert same_as_the_files(cache, index)
    (path,) = lmdbs(tmp_path)
    whole = path.read_bytes()
    at = whole.index(cache[3].tobytes()) + 100  # all of it: LMDB leaves parts of images in unused ends of pages
    del cache
    disk_cache._environment.cache_clear()
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    damaged = open_image_cache(index, imgsz=64, **options("disk", tmp_path))
    assert damaged[2].any()
    with refused():
        damaged[3]
    del damaged
    disk_cache._environment.cache_clear()
    pages = disk_cache._tree_pages(path)
    at = int(pages[-1]) * 4096 + 20
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    assert same_as_the_files(open_image_cache(index, imgsz=64, **options("disk", tmp_path)), index)


@pytest.mark.parametrize("failures", [1, 2])
def test_a_failed_batch_is_written_again(tmp_path, failures):
    """LMDB reports a short write as an error."""
    import lmdb

    class Failing:
        left = failures

        def begin(self, **options):
            if self.left:
                self.left -= 1
                raise lmdb.Error("mdb_txn_commit: Input/output error")
            return environment.begin(**options)

    with lmdb.open(str(tmp_path / "a.lmdb"), subdir=False) as environment:
        if failures == 2:
            with pytest.raises(lmdb.Error, match="Input/output"):
                disk_cache._commit(Failing(), [(b"key", b"value")])
            return
        disk_cache._commit(Failing(), [(b"key", b"value")])
        with environment.begin() as transaction:
            assert transaction.get(b"key") == b"value"


def test_a_disk_error_while_a_cache_is_closed_is_ignored(tmp_path, capsys):
    from utils.files.caches import hold

    class Owner: ...

    owner = Owner()
    (tmp_path / "file").touch()
    hold(owner, tmp_path / "file")
    (handle,) = (link for link in Path("/proc/self/fd").iterdir() if link.resolve() == tmp_path / "file")
    os.close(int(handle.name))  # a second close is refused
    del owner
    assert capsys.readouterr().err == ""
