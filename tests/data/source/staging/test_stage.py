"""Staging: shared files are opened once in total, every node gets the whole data set, and interrupted copies are
resumed.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch.distributed as dist
import yaml

from data.index.index_settings import IndexSettings
from data.index.load import load_index
from data.source.dataset_spec import DataSource
from data.source.dataset_yaml import load_dataset_spec
from data.source.files import list_split
from data.source.open import open_data
from data.source.staging.copy import StageCopy
from tests.helpers.index_fingerprint import index_fingerprint
from tests.helpers.messages import refused
from tests.helpers.open_counter import OpenCounter
from tests.helpers.preloaded import python
from tests.helpers.ranks import run_ranks
from tests.helpers.repository import ROOT
from tests.helpers.three_formats import write_three_formats
from tests.helpers.tiny import write_dataset, write_model
from utils.distributed import file_exchange
from utils.distributed.context import DistributedContext
from utils.distributed.file_exchange import assign_readers
from utils.errors import PeerFailure, PeerLost, UserError

BOTH = ("train", "val")


def before_each_file(patch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Calls ``act`` before each file that a copy reads."""
    plain = StageCopy.loader

    def loader(copy: StageCopy, complete: np.ndarray) -> Callable[[int], bytes]:
        load = plain(copy, complete)

        def acting(item: int) -> bytes:
            act()
            return load(item)

        return acting

    patch.setattr(StageCopy, "loader", loader)


def raise_disk_full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def stage(source: Path, folder: Path | str, splits=BOTH):
    return open_data(DataSource(str(source), splits, stage=str(folder)), DistributedContext.single())


def contents(root: Path) -> dict[str, tuple[bytes, int]]:
    """Bytes and times of the images and labels below a data set's folder."""
    files = [p for p in root.rglob("*") if p.is_file() and p.suffix in (".png", ".txt")]
    return {str(p.relative_to(root)): (p.read_bytes(), p.stat().st_mtime_ns) for p in files}


def every_file_once(source: Path) -> Counter[str]:
    return Counter(str(p.relative_to(source)) for p in source.rglob("*") if p.is_file())


def _two_nodes(ctx, source, places):
    """The final content of each node, and the files opened in each of four starts: the first, the second, one after
    node 1 lost its disk, and one after both lost the same half."""
    opened = []
    place = Path(places.replace("{node_rank}", str(ctx.node_rank)))
    file_exchange._MIN_CHUNK_BYTES = file_exchange._MAX_CHUNK_BYTES = 1000
    for start in range(4):
        if start == 2 and ctx.rank == 2:
            shutil.rmtree(place)
        if start == 3 and ctx.is_node_leader:
            half = sorted((place / next(p.name for p in place.glob("data-*")) / "tree").rglob("*.png"))
            for path in half[: len(half) // 2]:
                path.unlink()
        dist.barrier()
        with OpenCounter(Path(source).parent) as counter:
            spec = open_data(DataSource(source, BOTH, stage=places), ctx)
            dist.barrier()
            opened.append(counter.counts())
    return opened, spec, contents(spec.root), index_fingerprint(spec)


def test_two_nodes_open_each_shared_file_once(tmp_path):
    source = write_dataset(tmp_path / "set", train=9, val=4)
    results = run_ranks(4, _two_nodes, str(source), str(tmp_path / "node{node_rank}"), local_world=2)
    whole = contents(source.parent)
    for rank, (_, spec, have, fingerprint) in enumerate(results):
        assert have == whole
        assert spec.root.is_relative_to(tmp_path / f"node{rank // 2}")
        assert spec.source == str(source)
        assert fingerprint == index_fingerprint(load_dataset_spec(source))
    first, second, replaced, halved = results[0][0]
    assert first == every_file_once(source.parent)
    assert second == Counter({"data.yaml": 1})
    assert replaced == second  # node 0 sent node 1 what it had
    images = sorted(name for name in whole if name.endswith(".png"))
    assert halved == Counter(["data.yaml", *images[: len(images) // 2]])


def _late(ctx, source, places, how):
    """Node 1 reads for longer than the group's timeout, or fails, or its process is killed."""
    started = time.monotonic()

    def act() -> None:
        if how == "raise":
            raise OSError(5, "the disk is on fire")
        if how == "kill":
            os._exit(9)
        time.sleep(4.5)

    if ctx.rank == 1:
        before_each_file(pytest.MonkeyPatch(), act)  # in a process that ends with this function
    try:
        spec = open_data(DataSource(source, ("val",), stage=places), ctx)
    except (UserError, PeerFailure, OSError) as error:
        return type(error), str(error), time.monotonic() - started
    return contents(spec.root), time.monotonic() - started


def test_a_slow_node_causes_no_timeout(tmp_path):
    source = write_dataset(tmp_path / "set", train=1, val=2)
    results = run_ranks(2, _late, str(source), str(tmp_path / "{node_rank}"), "slow", local_world=1, timeout_s=3)
    whole = {name: file for name, file in contents(source.parent).items() if "val" in name}
    assert [r[0] for r in results] == [whole, whole]
    assert results[0][1] > 4


@pytest.mark.parametrize("how", ["raise", "kill"])
def test_a_node_that_fails_stops_the_others_with_its_reason(tmp_path, how):
    source = write_dataset(tmp_path / "set", train=1, val=2)
    results = run_ranks(
        2, _late, str(source), str(tmp_path / "{node_rank}"), how, local_world=1, lost=1 if how == "kill" else None
    )
    kind, message, seconds = results[0]
    if how == "raise":
        assert kind is PeerFailure
        assert "node 1 failed" in message
        assert "the disk is on fire" in message
    else:
        assert kind is PeerLost
        assert re.match(r"node 1 .* died|lost contact", message)
    assert seconds < 10


def _same_place(ctx, source, place):
    with pytest.raises(
        (UserError, PeerFailure), match=r"another node or run is copying into .*; name a folder on a local disk"
    ):
        open_data(DataSource(source, BOTH, stage=place), ctx)
    return True


def test_a_staging_folder_that_nodes_share_is_refused(tmp_path):
    source = write_dataset(tmp_path / "set", train=2, val=1)
    assert run_ranks(2, _same_place, str(source), str(tmp_path / "shared"), local_world=1) == [True, True]


def test_an_interrupted_copy_is_resumed(tmp_path, monkeypatch):
    source = write_dataset(tmp_path / "set", train=9, val=4)
    count = itertools.count()

    def interrupt() -> None:
        if next(count) == 12:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        before_each_file(patch, interrupt)
        patch.setattr(file_exchange, "_MAX_CHUNK_BYTES", 100)
        patch.setattr(file_exchange, "_MIN_CHUNK_BYTES", 100)
        with pytest.raises(KeyboardInterrupt):
            stage(source, tmp_path / "stage")
    (folder,) = (tmp_path / "stage").iterdir()
    kept = [name for name in every_file_once(source.parent) if (folder / "tree" / name).exists()]
    assert 3 < len(kept) < 13
    (folder / "incoming" / "12").write_bytes(b"cut short")
    with OpenCounter(source.parent) as counter:
        spec = stage(source, tmp_path / "stage")
        opened = counter.counts()
    assert opened == every_file_once(source.parent) - Counter(kept)
    assert contents(spec.root) == contents(source.parent)
    assert not list((folder / "incoming").iterdir())


def test_only_files_that_are_on_the_disk_are_in_the_tree(tmp_path, monkeypatch):
    """After a power failure names and times may be right and bytes lost: a file gets its name when it is synced."""
    source = write_dataset(tmp_path / "set", train=9, val=4)
    lost = []

    def power_failure():
        lost.append(list((tmp_path / "stage").glob("*/tree/**/*.*")))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "sync", power_failure)
        with pytest.raises(KeyboardInterrupt):
            stage(source, tmp_path / "stage")
    assert lost[0] == []
    monkeypatch.setattr("data.source.staging.copy._SYNC_EVERY_S", 0)
    with OpenCounter(source.parent) as counter:
        spec = stage(source, tmp_path / "stage")
        assert counter.counts() == every_file_once(source.parent)
    assert contents(spec.root) == contents(source.parent)


def test_changes_of_the_original_are_copied(tmp_path):
    source = write_dataset(tmp_path / "set", train=4, val=2)
    stage(source, tmp_path / "stage")
    images = source.parent / "images" / "train"
    labels = source.parent / "labels" / "train"
    (images / "001.png").write_bytes((images / "002.png").read_bytes())
    (labels / "003.txt").unlink()
    (images / "000.png").unlink()
    (labels / "000.txt").unlink()
    shutil.copy(images / "002.png", images / "new.png")
    stage(source, tmp_path / "stage", ("val",))  # is not of the training images
    spec = stage(source, tmp_path / "stage")
    copied, original = (load_index(s, "train") for s in (spec, load_dataset_spec(source)))
    assert index_fingerprint(spec) == index_fingerprint(load_dataset_spec(source))
    assert not (spec.root / "images" / "train" / "000.png").exists()
    assert np.array_equal(copied.offsets, original.offsets)  # the deleted label is not read


@pytest.mark.parametrize("moved", ["labels/train/001.TXT", "images/train/001.txt", "labels/train/001.png.txt"])
def test_a_label_that_moves_to_an_unusual_place_replaces_the_old_one(tmp_path, moved):
    """The same holds when it moves back: the copy always has the labels of the original."""
    source = write_dataset(tmp_path / "set", train=4, val=2)
    usual = source.parent / "labels" / "train" / "001.txt"
    stage(source, tmp_path / "stage")
    for old, new, row in ((usual, source.parent / moved, "1 0.5 0.5 0.5 0.5"), (source.parent / moved, usual, "")):
        old.unlink()
        new.write_text(row)
        spec = stage(source, tmp_path / "stage")
        copied, original = (load_index(each, "train") for each in (spec, load_dataset_spec(source)))
        assert index_fingerprint(spec) == index_fingerprint(load_dataset_spec(source))
        assert np.array_equal(copied.boxes_xywh_px, original.boxes_xywh_px)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("coca.yaml", "data set coca.yaml: no such file (did you mean 'coco'?); known by name: demo, ..."),
        ("set.zip", "data set set.zip: an archive; unpack it and name the folder, or the YAML in it"),
        ("train.shards", "data set train.shards: an index of shards; name its folder, or the YAML in it"),
    ],
)
def test_a_data_set_that_is_not_there_is_named_as_without_a_copy(tmp_path, monkeypatch, data, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "set.zip").touch()
    (tmp_path / "train.shards").touch()
    with refused(message):
        stage(data, tmp_path / "stage")


def test_a_copy_of_a_list_has_the_losses_of_the_original(tmp_path):
    """Losses are missing or repeated rows, and an image that is left out because of its labels."""
    source = write_dataset(tmp_path / "set", train=4, val=2)
    rows = [f"./images/train/00{i}.png" for i in (0, 9, 1, 1, 2, 3)]
    label = source.parent / "labels" / "train" / "003.txt"
    label.unlink()
    label.symlink_to("gone")
    (source.parent / "train.txt").write_text("\n".join(rows))
    values = yaml.safe_load(source.read_text()) | {"train": "train.txt"}
    source.write_text(yaml.safe_dump(values))
    settings = IndexSettings(max_bad=0.5)
    spec = stage(source, tmp_path / "stage")
    copied, original = (load_index(each, "train", settings) for each in (spec, load_dataset_spec(source)))
    assert copied.report.lines == original.report.lines
    assert copied.report.ledger == original.report.ledger
    assert index_fingerprint(spec) == index_fingerprint(load_dataset_spec(source))
    assert {line.split(": ")[0] for line in copied.report.lines[:2]} == {"train.txt:2", "train.txt:4"}


def test_a_split_without_labels_is_refused_before_it_is_copied(tmp_path):
    """With the files that are in their place, which a copy would not have."""
    source = write_dataset(tmp_path / "set", train=2, val=2)
    for path in (source.parent / "labels" / "train").iterdir():
        path.rename(path.with_suffix(".csv"))
    with refused("set/labels/train/000.csv: CSV is not supported; export the data set as ...") as without_copy:
        load_index(load_dataset_spec(source), "train")
    with refused(str(without_copy.value)):
        stage(source, tmp_path / "stage")
    assert not (tmp_path / "stage").exists()


def test_a_copy_of_a_folder_has_the_caches_of_its_yaml(tmp_path):
    """A split that is not copied shares the folder, and has another label file."""
    folder = tmp_path / "set"
    write_three_formats(folder, ["a"], {"1.png": (40, 60)}, {"1.png": [(0, 5, 5, 20, 30)]})
    shutil.copy(folder / "instances.json", folder / "others.json")
    annotations = {"train": "instances.json", "val": "instances.json", "test": "others.json"}
    values = dict.fromkeys(annotations, "images/train") | {"annotations": annotations, "names": ["a"]}
    (folder / "data.yaml").write_text(yaml.safe_dump(values))
    spec = stage(folder, tmp_path / "stage")
    copied, original = (load_index(each, "train") for each in (spec, load_dataset_spec(folder)))
    assert copied.cache_key == original.cache_key
    assert index_fingerprint(spec) == index_fingerprint(load_dataset_spec(folder))


def test_a_missing_file_names_what_stores_the_path_once(tmp_path):
    """Also if it is missing only later, when the split is listed."""
    source = write_dataset(tmp_path / "set", train=2, val=2)
    sources = [
        DataSource(str(source), ("train", "val"), stage=folder, stored_in="last.pt")
        for folder in ("", str(tmp_path / "stage"))
    ]
    spec = open_data(sources[0], DistributedContext.single())
    shutil.rmtree(source.parent / "images" / "val")
    calls = [partial(list_split, spec, "val"), *(partial(open_data, s, DistributedContext.single()) for s in sources)]
    for call in calls:
        with pytest.raises(UserError) as caught:
            call()
        assert str(caught.value).count("last.pt stores the path of this data set") == 1


@pytest.mark.parametrize("year_s", [14_830_000_000, 0, -1_000_000_000])  # 2439, 1970, 1938
def test_files_of_a_clock_that_was_wrong_are_copied(tmp_path, year_s):
    source = write_dataset(tmp_path / "set", train=4, val=2)
    image = source.parent / "images" / "train" / "001.png"
    os.utime(image, (year_s, year_s))
    if image.stat().st_mtime != year_s:
        pytest.skip("the file system has no such times")
    for _ in range(2):  # the second only checks the copy
        spec = stage(source, tmp_path / "stage")
        assert index_fingerprint(spec) == index_fingerprint(load_dataset_spec(source))
        assert (spec.root / "images" / "train" / "001.png").stat().st_mtime == year_s


def test_lists_links_and_files_outside_the_folder_are_copied(tmp_path):
    """Rows with absolute paths, images outside the data set's folder and linked folders are all in the copy."""
    shared = tmp_path / "shared"
    names = ["light", "dark"]
    write_dataset(shared / "real", train=3, val=2)
    (shared / "pool" / "images").mkdir(parents=True)
    for number, image in enumerate(sorted((shared / "real" / "images" / "train").iterdir())):
        shutil.copy2(image, shared / "pool" / "images" / f"p{number}.png")
    (shared / "pool" / "labels").mkdir()
    (shared / "pool" / "labels" / "p0.txt").write_text("0 0.5 0.5 0.2 0.2\n")
    root = shared / "set"
    root.mkdir()
    (root / "images").symlink_to(shared / "real" / "images")
    (root / "labels").symlink_to("../real/labels")
    rows = [str(shared / "pool" / "images" / "p0.png"), "../pool/images/p2.png", "images/train/001.png"]
    (root / "some.txt").write_text("\n".join(rows))
    source = root / "own.yaml"
    source.write_text(yaml.safe_dump({"train": ["some.txt", "images/train"], "val": "images/val", "names": names}))
    before = {split: load_index(load_dataset_spec(source), split) for split in BOTH}
    fingerprints = {split: index_fingerprint(load_dataset_spec(source), split) for split in BOTH}
    with OpenCounter(shared) as counter:
        spec = stage(source, tmp_path / "stage")
        assert set(counter.counts().values()) == {1}
    shared.rename(tmp_path / "gone")
    for split in BOTH:
        index = load_index(spec, split, IndexSettings(cache_dir=str(tmp_path / "other")))
        assert index_fingerprint(spec, split) == fingerprints[split]
        assert list(index.paths) == list(before[split].paths)
        assert all(Path(index.path(i)).resolve().is_relative_to(tmp_path / "stage") for i in range(len(index)))
        assert np.array_equal(index.boxes_xywh_px, before[split].boxes_xywh_px)
        assert all(cv2.imread(index.path(i)) is not None for i in range(len(index)))
    assert len(before["train"]) == 5


def test_coco_and_voc_annotations_are_copied(tmp_path):
    sizes = dict.fromkeys(("0.png", "1.png"), (64, 64))
    write_three_formats(tmp_path / "set", ("light", "dark"), sizes, {"1.png": [(1, 5, 6, 20, 30)]})
    (tmp_path / "set" / "instances.json").rename(tmp_path / "outside.json")
    source = tmp_path / "set" / "mixed.yaml"
    annotations = {"train": "../outside.json", "val": "voc"}
    values = {"train": "images/train", "val": "images/train", "annotations": annotations}
    source.write_text(yaml.safe_dump(values))  # classes from the JSON
    spec = stage(source, tmp_path / "stage")
    assert spec.names == ("light", "dark")
    for split in BOTH:
        assert index_fingerprint(spec, split) == index_fingerprint(load_dataset_spec(source), split)
        assert len(load_index(spec, split).classes) == 1


def test_mistakes_are_one_line(tmp_path, monkeypatch):
    source = write_dataset(tmp_path / "set", train=2, val=1)
    lists = tmp_path / "set" / "lists.yaml"
    (tmp_path / "set" / "all.txt").write_text("".join(f"{image}\n" for image in source.parent.rglob("*.png")))
    lists.write_text(yaml.safe_dump({"train": "all.txt", "val": "all.txt", "names": ["light", "dark"]}))
    inside = source.parent / "images" / "train" / "copy"
    refusal = "--stage: .../set/images/train/copy is inside the data set; name a folder outside it"
    for given, place, message in (
        (source, inside, refusal),
        (lists, inside, refusal),
        (
            Path("demo"),
            tmp_path / "stage",
            "--stage: the demo set cannot be staged, since each node renders it; omit --stage",
        ),
    ):
        with refused(message):
            stage(given, place)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(1 << 30, 1 << 30, 9000))
        with refused(
            "--stage, 6 files to copy: needs 52 kB in .../small/data-..., but may use only 98% of the 9 kB free; free "
            "some space or name another disk"
        ):
            stage(source, tmp_path / "small")
    assert not list((tmp_path / "small").rglob("*.png"))
    with monkeypatch.context() as patch:  # another program fills the disk after the check
        patch.setattr(os, "utime", raise_disk_full)
        with pytest.raises(OSError, match=re.escape(f"{tmp_path}/full/data-")):
            stage(source, tmp_path / "full")
    changed = tmp_path / "set" / "images" / "train" / "000.png"
    before_each_file(monkeypatch, lambda: os.utime(changed))
    with refused("set/images/train/000.png: changed while the data set was being copied; start again"):
        stage(source, tmp_path / "stage")


def test_parts_of_the_nodes_are_disjoint_and_even():
    rng = np.random.default_rng(0)
    sizes = rng.integers(0, 1 << 20, 1000)
    held = np.zeros((4, 1000), bool)
    shares = assign_readers(sizes, held)
    assert sorted(np.concatenate(shares)) == list(range(1000))
    amounts = [sizes[s].sum() for s in shares]
    assert max(amounts) < 1.05 * min(amounts)
    held[1, :500] = held[:, 900:] = True
    shares = assign_readers(sizes, held)
    assert sorted(np.concatenate(shares)) == list(range(900))
    assert set(range(500)) <= set(shares[1])  # from its own disk
    assert [len(s) for s in assign_readers(sizes, np.ones((4, 1000), bool))] == [0, 0, 0, 0]
    assert [len(s) for s in assign_readers(np.zeros(0, np.int64), np.zeros((2, 0), bool))] == [0, 0]


def _run_script(cwd: Path, *words: str) -> str:
    environment = dict(os.environ) | {"PYTHONPATH": str(ROOT)}
    command = [python(), str(ROOT / words[0]), *words[1:]]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_train_and_val_use_the_copy(tmp_path):
    """A disk cache changes nothing. val.py finds the original data of the checkpoint, not the copy."""
    source = write_dataset(tmp_path / "set", train=4, val=2)
    model = write_model(tmp_path / "tiny.yaml")
    own = ["--device", "cpu", "--workers", "0", "--noplots", "--project", str(tmp_path / "runs"), "--stage"]
    small = ["--imgsz", "64", "--batch-size", "2", "--epochs", "1", "--cache", "disk"]
    with OpenCounter(source.parent) as counter:
        _run_script(tmp_path, "train.py", "--data", "set/data.yaml", "--model", str(model), *small, *own, "disk")
        assert counter.counts() == every_file_once(source.parent)
    output = _run_script(tmp_path, "val.py", "--weights", "runs/exp/last.pt", *own, "disk", "--name", "val")
    assert "(4 files)" in output


@pytest.mark.parametrize("planted", ["", "tree", "incoming", "tree/images", "tree/labels/train"])
def test_a_planted_link_leads_nothing_out_of_the_copy(tmp_path, planted):
    """Others may be able to write to the folder, and can guess the name of the copy in it."""
    source = write_dataset(tmp_path / "set", train=4, val=2)
    copy = stage(source, tmp_path / "disk").root.parent
    shutil.rmtree(tmp_path / "disk")
    outside = tmp_path / "outside"
    (outside / "images" / "train").mkdir(parents=True)
    (outside / "other.png").write_bytes(b"of somebody else")
    (outside / "images" / "train" / "other.png").write_bytes(b"of somebody else")
    before = sorted(outside.rglob("*"))
    link = copy / planted
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(outside)
    with pytest.raises(PermissionError, match="is a symbolic link") as caught:
        stage(source, tmp_path / "disk")
    assert caught.value.filename == str(link)
    assert sorted(outside.rglob("*")) == before


@pytest.mark.parametrize("name", ["*.png", "*.yaml"])
def test_a_folder_in_place_of_a_file_is_named(tmp_path, name):
    source = write_dataset(tmp_path / "set", train=2, val=1)
    stage(source, tmp_path / "disk")
    file = next((tmp_path / "disk").rglob(name))
    file.unlink()
    file.mkdir()
    with refused(f"--stage: {file}: a folder in place of a file of the copy; remove it"):
        stage(source, tmp_path / "disk")


def test_a_link_in_place_of_a_file_is_replaced(tmp_path):
    source = write_dataset(tmp_path / "set", train=4, val=2)
    copied = stage(source, tmp_path / "disk").root
    image = next(copied.rglob("*.png"))
    image.rename(tmp_path / "elsewhere.png")
    image.symlink_to(tmp_path / "elsewhere.png")
    content = (tmp_path / "elsewhere.png").read_bytes()
    assert stage(source, tmp_path / "disk").root == copied
    assert not image.is_symlink()
    assert image.read_bytes() == (tmp_path / "elsewhere.png").read_bytes() == content
