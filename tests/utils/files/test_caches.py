"""Caches do not grow forever: the list of caches, which are removed first, and which are kept because a process uses
them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import train
from data.cache.open import open_image_cache
from data.index.index import DatasetIndex
from data.index.load import load_index
from data.spec.dataset_yaml import load_dataset_spec
from tests.helpers.scripts import SMALL, error_of
from tests.helpers.tiny import write_dataset, write_model
from tools import cache as command
from utils.entrypoint import run_main
from utils.files import caches as cache
from utils.files.caches import DAY_S, LIMIT_VARIABLE, cache_limit, list_caches, make_room

ROOT = Path(__file__).parents[3]


def load(data: Path, folder: Path) -> DatasetIndex:
    return load_index(load_dataset_spec(data), "train", cache_dir=str(folder), progress=False)


def images_of(index: DatasetIndex, folder: Path):
    return open_image_cache(index, "disk", imgsz=64, cache_dir=str(folder))


def change(data: Path) -> None:
    """Changes a label, which makes another version of the data set."""
    with open(data.parent / "labels" / "train" / "000.txt", "a") as file:
        file.write("0 0.5 0.5 0.25 0.25\n")


def age(folder: Path, days: float) -> None:
    """Makes all existing caches appear to be last used this long ago."""
    for path in folder.iterdir():
        os.utime(path, (time.time() - days * DAY_S,) * 2)


@pytest.fixture(autouse=True)
def _own_memory(tmp_path, monkeypatch) -> None:
    """Isolates the tests from memory caches of other trainings."""
    monkeypatch.setattr(command, "SHARED_MEMORY", tmp_path / "memory")
    (tmp_path / "memory").mkdir()


@pytest.fixture
def caches(tmp_path) -> tuple[Path, dict[str, Path]]:
    """A folder with two versions of set a, used 3 and 1 days ago, and set b, used 5 days ago; no process uses them."""
    folder = tmp_path / "caches"
    sets = {name: write_dataset(tmp_path / name, train=4, val=1) for name in ("a", "b")}
    for data, days in ((sets["b"], 2), (sets["a"], 2), (sets["a"], 1)):
        index = load(data, folder)
        images_of(index, folder)
        del index
        for path in folder.iterdir():
            used = path.stat().st_mtime - days * DAY_S
            os.utime(path, (used, used))
        change(data)
    return folder, sets


def words(folder: Path) -> list[str]:
    now = time.time()
    return [c.line(now) for c in list_caches(folder)]


def test_the_list_is_in_plain_words(caches, capsys):
    folder, sets = caches
    run_main(command.main, ["list", "--cache-dir", str(folder)])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 7
    assert sum(f"images on disk, 64 px, of {sets['a']}, train (4 images)" in line for line in lines) == 2
    assert sum(f"index of {sets['b']}, train (4 images)" in line and "5 days ago" in line for line in lines) == 1
    assert [line.endswith(", an older version") for line in lines[:-1]].count(True) == 2
    assert all("3 days ago" in line for line in lines[:-1] if line.endswith(", an older version"))
    assert lines[-1].startswith(f"6 caches in {folder} and memory: ")
    assert f"({LIMIT_VARIABLE} changes it)" in lines[-1]


@pytest.mark.parametrize(
    ("given", "left"),
    [
        (["--older-than", "4"], ["a", "a", "a", "a"]),
        (["--older-than", "2"], ["a", "a"]),
        (["--older-than", "9"], ["a", "a", "a", "a", "b", "b"]),
        (["--all"], []),
        (["--to", "0"], []),
        (["--to", "1"], ["a", "a", "a", "a", "b", "b"]),
    ],
)
def test_prune_removes_old_caches(caches, capsys, given, left):
    folder, _ = caches
    run_main(command.main, ["prune", *given, "--cache-dir", str(folder)])
    assert sorted(line.split("/data.yaml")[0][-1] for line in words(folder)) == left
    assert f"{6 - len(left)} removed, " in capsys.readouterr().out
    assert len([p for p in folder.iterdir() if p.suffix not in (".lock", ".tree")]) == len(left)


def test_prune_to_a_size_takes_older_versions_first(caches):
    """They are removed before the least recently used data set."""
    folder, _ = caches
    found = list_caches(folder)
    enough = sum(c.size for c in found if not c.is_old)
    run_main(command.main, ["prune", "--to", str(enough / 1e9), "--cache-dir", str(folder)])
    left = words(folder)
    assert len(left) == 4
    assert not any("older version" in line for line in left)


def test_prune_removes_an_indexs_files_and_day_old_unfinished_ones(caches):
    folder, _ = caches
    for path in list(folder.glob("*.index")):
        path.with_suffix(".damaged").write_text('["000.png", "torn"]\n')
        path.with_name(f"{path.name}.a1b2.tmp").write_bytes(bytes(10))
    run_main(command.main, ["prune", "--all", "--cache-dir", str(folder)])
    assert {p.suffix for p in folder.iterdir() if p.suffix != ".lock"} == {".tmp"}
    age(folder, 2)
    run_main(command.main, ["prune", "--all", "--cache-dir", str(folder)])
    assert not [p for p in folder.iterdir() if p.suffix != ".lock"]


def test_caches_in_use_are_kept(caches, capsys):
    """Its index and images are protected by locks, which end with the process in any case."""
    folder, sets = caches
    program = (
        "import sys; from pathlib import Path; from tests.utils.files.test_caches import *\n"
        "index = load(Path(sys.argv[1]), Path(sys.argv[2])); images = images_of(index, Path(sys.argv[2]))\n"
        "print('ready', flush=True); sys.stdin.read()"
    )
    path = f"{ROOT}:{ROOT / 'tests'}"
    user = subprocess.Popen(
        [sys.executable, "-c", program, str(sets["b"]), str(folder)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    try:
        assert user.stdout.readline() == "ready\n"
        age(folder, 50)
        run_main(command.main, ["prune", "--all", "--cache-dir", str(folder)])
        out = capsys.readouterr().out
        assert out.count("kept (in use): ") == 2
        assert sum(line.endswith(", in use") for line in words(folder)) == 2
    finally:
        user.kill()
        user.wait()
    run_main(command.main, ["prune", "--all", "--cache-dir", str(folder)])
    assert words(folder) == []


def test_a_new_cache_removes_old_ones_beyond_the_limit(caches, monkeypatch):
    """Beyond the limit, an old version is removed first, then the least recently used data set; its own cache is
    kept."""
    folder, sets = caches
    total = sum(c.size for c in list_caches(folder))
    monkeypatch.setenv(LIMIT_VARIABLE, str(total / 1e9))
    index = load(sets["b"], folder)  # a third version of all, and the second of b
    assert any(c.version == index.fingerprint for c in list_caches(folder))
    assert sum(c.size for c in list_caches(folder)) <= total
    assert sum("/a/data.yaml" in line for line in words(folder)) >= 2
    monkeypatch.setenv(LIMIT_VARIABLE, "0")
    images = images_of(index, folder)
    assert {c.version for c in list_caches(folder)} == {index.fingerprint}
    assert len(images) == 4


def test_a_full_disk_removes_old_caches(caches, monkeypatch):
    """Regardless of the limit: with the old caches, the new one would not fit."""
    folder, _ = caches
    usage = cache.shutil.disk_usage(folder)
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda _: usage._replace(free=10))
    make_room(folder, 1000, keep=folder / "none")
    assert words(folder) == []


def test_using_a_cache_makes_its_version_the_current_one(caches):
    """Returning to earlier labels uses their cache again; the other version then counts as the older one."""
    folder, sets = caches
    labels = sets["b"].parent / "labels" / "train" / "000.txt"
    stamp = labels.stat().st_mtime_ns
    index = load(sets["b"], folder)
    assert sum("older version" in line for line in words(folder)) == 4  # b's former index and images too
    del index
    age(folder, 7)
    assert labels.stat().st_mtime_ns == stamp
    load(sets["b"], folder)
    assert "just now" in words(folder)[0]


@pytest.mark.parametrize(("text", "bytes_"), [("0", 0), ("1.5", 1.5e9)])
def test_the_limit_comes_from_the_variable_or_the_disk(tmp_path, monkeypatch, text, bytes_):
    monkeypatch.setenv(LIMIT_VARIABLE, text)
    assert cache_limit(tmp_path) == bytes_
    monkeypatch.delenv(LIMIT_VARIABLE)
    assert 0 < cache_limit(tmp_path) <= 200e9


def test_mistakes_are_one_line(tmp_path, capsys, monkeypatch):
    assert "--to x: must be a number of gigabytes" in error_of(
        capsys, command.main, "prune", "--to", "x", "--cache-dir", tmp_path
    )
    assert "--older-than: invalid float value" in error_of(
        capsys, command.main, "prune", "--older-than", "x", "--cache-dir", tmp_path
    )
    monkeypatch.setenv(LIMIT_VARIABLE, "many")
    data, model = write_dataset(tmp_path / "set", train=4, val=1), write_model(tmp_path / "tiny.yaml")
    given = ["--data", data, "--model", model, *SMALL, "--project", tmp_path / "runs"]
    assert f"{LIMIT_VARIABLE} many: must be a number of gigabytes" in error_of(capsys, train.main, *given)


def test_other_files_are_neither_listed_nor_removed(tmp_path, capsys):
    """A folder of the user, or a missing one, is not changed."""
    (tmp_path / "train-notes.index").write_text("mine")
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "yolov8n.pt").write_bytes(bytes(2000))
    run_main(command.main, ["prune", "--all", "--cache-dir", str(tmp_path)])
    assert (tmp_path / "train-notes.index").exists()
    capsys.readouterr()
    run_main(command.main, ["list", "--cache-dir", str(tmp_path)])
    assert f"downloaded weights in {tmp_path / 'weights'}, not removed by prune: 2 kB" in capsys.readouterr().out
    run_main(command.main, ["list", "--cache-dir", str(tmp_path / "none")])
