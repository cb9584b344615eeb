from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml

from data.dataset.spec import DataSource
from data.dataset.yaml_file import load_dataset_spec
from data.image_io import shards
from data.image_io.content import read_bytes
from data.image_io.shards import SPAN
from data.index.index import DatasetIndex
from data.index.index_settings import IndexSettings
from data.index.load import load_index
from data.open import open_data
from data.samples.dataset import AugmentedImages
from data.samples.readers import ImageReader
from tests.helpers.editable_set import EditableSet
from tests.helpers.messages import refused
from tests.helpers.scripts import call
from tests.helpers.three_formats import write_three_formats
from tests.helpers.tiny import write_dataset
from tools.check.checks.scan import scan_issues
from tools.check.scan_splits import scan_dataset
from tools.shard.__main__ import main
from tools.shard.write_shards import write_set
from utils.config.tool_settings import MAX_SHARD_MEGABYTES
from utils.distributed.context import DistributedContext
from utils.errors import UserError
from utils.files.array_file import open_arrays, write_arrays

ARRAYS = ("image_hw", "offsets", "boxes_xywh_px", "classes", "crowd", "area_px")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_dataset(tmp_path / "set")


def written(source: Path, out: Path, most: int = 10**9) -> Path:
    write_set(load_dataset_spec(source), out, most, IndexSettings(cache_dir=str(out.parent / "cache")))
    return out


def index_of(data: Path, split: str = "train", **options: object) -> DatasetIndex:
    return load_index(
        load_dataset_spec(data), split, IndexSettings(cache_dir=str(data.parent / "cache"), progress=False, **options)
    )


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), "train: python train.py --data {out}"),
        (
            ("--split", "train", "--max-bad", "0.2"),
            "train: python train.py --data {out} --val-fraction 0.2 --max-bad 0.2",
        ),
        (("--split", "val"), "training needs a 'train' split, but {out} has only val"),
    ],
)
def test_the_last_line_is_a_command_that_training_accepts(source: Path, tmp_path: Path, capsys, flags, expected):
    out = tmp_path / "out"
    call(main, source, out, "--cache-dir", tmp_path / "cache", *flags)
    assert capsys.readouterr().out.splitlines()[-1] == expected.format(out=out)


@pytest.mark.parametrize("most", [10**9, 30_000])
def test_shards_have_the_images_and_labels_of_the_files(source: Path, tmp_path: Path, most: int):
    out = written(source, tmp_path / "out", most)
    assert (len(list(out.glob("train-*.tar"))) > 1) == (most < 10**9)
    for split in ("train", "val"):
        files = index_of(source, split)
        shards = index_of(out, split)
        assert list(files.paths) == list(shards.paths)
        for name in ARRAYS:
            assert getattr(files, name).tobytes() == getattr(shards, name).tobytes()
        assert files.ground_truth().image_ids == shards.ground_truth().image_ids
        assert all(read_bytes(files.path(i)) == read_bytes(shards.path(i)) for i in range(len(files)))
        assert files.report.summary() == shards.report.summary()


def test_the_same_data_set_gives_the_same_bytes(source: Path, tmp_path: Path):
    first = written(source, tmp_path / "a")
    for path in source.parent.rglob("*"):
        os.utime(path, (1e9, 1e9))
    assert digests(first) == digests(written(source, tmp_path / "b"))


def test_tar_files_have_the_layout_of_webdataset(source: Path, tmp_path: Path):
    index = index_of(source)
    with tarfile.open(written(source, tmp_path / "out") / "train-00000.tar") as tar:
        names = tar.getnames()
        assert names[:4] == ["000000000.png", "000000000.json", "000000001.png", "000000001.json"]
        for i in range(len(index)):
            label = json.loads(tar.extractfile(f"{i:09d}.json").read())
            assert label["path"] == index.paths[i]
            assert label["boxes_xywh_px"] == index.boxes_xywh_px[index.offsets[i] : index.offsets[i + 1]].tolist()
            assert tar.extractfile(f"{i:09d}.png").read() == read_bytes(index.path(i))


def test_classes_fraction_and_one_class_are_those_of_the_files(source: Path, tmp_path: Path):
    content = yaml.safe_load(source.read_text())
    content["classes"] = {content["names"][0]: "thing"}
    source.write_text(yaml.safe_dump(content))
    out = written(source, tmp_path / "out")
    for options in ({}, {"single_cls": True}, {"fraction": 0.5, "seed": 3}):
        files = index_of(source, **options)
        shards = index_of(out, **options)
        assert files.names == shards.names
        assert list(files.paths) == list(shards.paths)
        assert np.array_equal(files.classes, shards.classes)
    held = frozenset(list(index_of(source).paths)[:3])
    specs = [load_dataset_spec(path).hold_out(held) for path in (source, out)]
    parts = [load_index(spec, "val", IndexSettings(cache_dir=str(tmp_path))) for spec in specs]
    assert list(parts[0].paths) == list(parts[1].paths) == sorted(held)


def test_samples_are_those_of_the_files(source: Path, tmp_path: Path):
    from data.loading.sampler import EpochOrder, KeyedDistributedSampler, TrainCanvases

    samples = []
    for path in (source, written(source, tmp_path / "out")):
        dataset = AugmentedImages(ImageReader(index_of(path), imgsz=64))
        order = EpochOrder(dataset.weights, seed=0, batch_size=4, canvases=TrainCanvases(64, 32), block=4)
        request = next(KeyedDistributedSampler(order, rank=0, world_size=1, run_epochs=2).requests(0, 0))
        samples.append([(s.image.tobytes(), s.labels.tobytes()) for s in dataset.render(request)])
    assert samples[0] == samples[1]


def test_joined_sets_may_be_in_shards(source: Path, tmp_path: Path):
    out = written(source, tmp_path / "out")
    (tmp_path / "joined.yaml").write_text(yaml.safe_dump({"train": [str(out / "data.yaml"), str(source)]}))
    joined = index_of(tmp_path / "joined.yaml")
    assert len(joined) == 2 * len(index_of(source))
    half = len(joined) // 2
    assert all(read_bytes(joined.path(i)) == read_bytes(joined.path(i + half)) for i in range(half))


def test_images_that_would_have_one_path_are_refused_with_the_reason(source: Path, tmp_path: Path):
    other = source.with_name("other.yaml")
    other.write_text(source.read_text())
    joined = tmp_path / "joined.yaml"
    joined.write_text(yaml.safe_dump({"train": [str(source), str(other)]}))
    with refused(
        "set/images/train/000.png: is in several of the joined data sets, with separate labels in each; shards contain "
        "each image once: leave it out of all but one"
    ):
        written(joined, tmp_path / "out")
    inside = tmp_path / "inside" / "set" / "images" / "train"
    inside.mkdir(parents=True)
    shutil.copy(source.parent / "images" / "train" / "001.png", inside)
    values = {"train": ["set/images/train", str(source.parent / "images" / "train")], "names": ["light", "dark"]}
    (tmp_path / "inside" / "data.yaml").write_text(yaml.safe_dump(values))
    with refused(
        "/inside: ../set/images/train/001.png and set/images/train/001.png would both be set/images/train/001.png in "
        "the shards; rename one"
    ):
        written(tmp_path / "inside" / "data.yaml", tmp_path / "out")


def test_a_check_reports_what_the_scan_of_the_files_found(tmp_path: Path):
    data = EditableSet(tmp_path / "set")
    data.image("train/0").write_bytes(b"not an image")
    settings = IndexSettings(cache_dir=str(tmp_path / "cache"), max_bad=0.5)
    write_set(load_dataset_spec(data.yaml), tmp_path / "out", 10**9, settings)
    checked = [
        scan_dataset(load_dataset_spec(path), ("train",), workers=0)[0] for path in (data.yaml, tmp_path / "out")
    ]
    files, shards = ([(issue.kind, issue.text, issue.where) for issue in scan_issues(split)] for split in checked)
    assert files == shards
    assert len(files) == 1


def test_the_index_of_shards_is_opened_once(source: Path, tmp_path: Path, monkeypatch):
    """Each opening verifies all of it."""
    out = written(source, tmp_path / "out")
    opened: list[Path] = []
    monkeypatch.setattr(shards, "open_arrays", lambda path: opened.append(path) or open_arrays(path))
    index_of(out)
    assert opened == [out / "train.shards"]


def test_mistakes_end_in_one_line(source: Path, tmp_path: Path):
    out = written(source, tmp_path / "out")
    dangling = tmp_path / "dangling"
    dangling.symlink_to("nowhere")
    for given, message in (
        ([str(out), "--cache-dir", str(tmp_path / "cache")], "out: exists; remove it, or choose another name"),
        ([str(dangling)], "dangling: exists; remove it, or choose another name"),
        ([str(tmp_path / "set/images/train/o")], "searches for images; name another folder"),
        ([str(tmp_path / "o"), "--megabytes", "0"], "--megabytes: must be at least 1, got 0"),
        (["--data"], "unrecognized arguments: --data (has no flag here: python -m tools.shard DATA OUT); ..."),
        ([str(tmp_path / "o"), "--workers", "0"], "--workers: must be at least 1, got 0"),
    ):
        with refused(message):
            main([str(source), *given])
    with refused("out/train.shards: shards can be neither listed nor copied; name a folder of images"):
        open_data(DataSource(str(out), ("train",), stage=str(tmp_path / "s")), DistributedContext.single())
    for text, message in (
        (
            "{train: [train.shards, val.shards], val: val.shards, names: [light, dark]}",
            "out/data.yaml: train: .../out/train.shards must be the only entry; join data sets by their YAMLs",
        ),
        (
            "{train: train.shards, names: [light, dark], annotations: {train: a.json}}",
            "out/data.yaml: train: .../out/train.shards has labels of its own; remove the 'annotations' of this split",
        ),
        (
            "{train: train.shards, val: val.shards, names: [a, b]}",
            "out/data.yaml: names: differ from train.shards: class 0 is 'a' against 'light'",
        ),
    ):
        (out / "data.yaml").write_text(text)
        with refused(message):
            index_of(out)
    (out / "train.shards").unlink()
    with refused("out/train.shards: no such file"):
        index_of(out)


@pytest.mark.parametrize("harm", [Path.unlink, lambda path: os.truncate(path, 1000)])
def test_a_tar_file_that_was_not_copied_whole_is_named_at_once(source: Path, tmp_path: Path, harm: Callable):
    out = written(source, tmp_path / "out")
    harm(out / "train-00000.tar")
    with pytest.raises(UserError, match=r"train-00000.tar: (not found|has 1,000 bytes, but train.shards says)"):
        index_of(out)
    assert len(index_of(out, "val"))


def test_a_worker_reads_with_the_index_of_its_labels(source: Path, tmp_path: Path):
    """It does so even after another index has replaced this one."""
    out = written(source, tmp_path / "out")
    other = write_dataset(tmp_path / "other", size=96)
    index = index_of(out)
    before = [read_bytes(index.path(i)) for i in range(len(index))]
    os.replace(written(other, tmp_path / "new") / "train.shards", out / "train.shards")
    assert [read_bytes(index.path(i)) for i in range(len(index))] == before


def test_a_failing_disk_is_no_damage_of_an_image(source: Path, tmp_path: Path, monkeypatch):
    out = written(source, tmp_path / "out")
    path = index_of(out).path(0)

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", fail)
        with pytest.raises(OSError, match=f"Input/output error.*{out}/train-00000.tar"):
            read_bytes(path)
    assert read_bytes(path)


@pytest.mark.parametrize("is_empty", [False, True])
def test_a_split_without_images_may_be_left_out(source: Path, tmp_path: Path, is_empty: bool):
    values = yaml.safe_load(source.read_text())
    source.write_text(yaml.safe_dump(values | {"test": "images/test"}))
    reason = "images/test: not found (named by ...); ..."
    if is_empty:
        (source.parent / "images" / "test").mkdir()
        reason = "images/test: no images found for 'test' (looked for ...)"
    out = tmp_path / "out"
    with refused(f"{reason}; or write the other splits alone: --split train val"):
        main([str(source), str(out), "--cache-dir", str(tmp_path / "cache")])
    with refused("has no 'tset' split, only train, val, test (did you mean 'test'?)"):
        main([str(source), str(out), "--split", "val", "tset"])
    main([str(source), str(out), "--split", "val", "val", "--cache-dir", str(tmp_path / "cache")])
    assert list(load_dataset_spec(out).splits) == ["val"]
    assert len(index_of(out, "val")) == len(index_of(source, "val"))


def test_labels_of_splits_that_are_not_written_are_not_lost(tmp_path: Path):
    """One COCO JSON for the images of three lists; of the last list, two are missing."""
    objects = {f"{i}.png": [(0, 2, 3, 20, 30)] for i in range(9)}
    write_three_formats(tmp_path, ["light"], dict.fromkeys(objects, (48, 64)), objects)
    for split, numbers in {"train": range(4), "val": range(4, 6), "test": range(6, 9)}.items():
        (tmp_path / f"{split}.txt").write_text("".join(f"./images/train/{i}.png\n" for i in numbers))
    for i in range(7, 9):
        (tmp_path / f"images/train/{i}.png").unlink()
    data = tmp_path / "d.yaml"
    data.write_text("train: train.txt\nval: val.txt\ntest: test.txt\nnames: [light]\nannotations: instances.json\n")
    main([str(data), str(tmp_path / "out"), "--split", "train", "val", "--cache-dir", str(tmp_path / "cache")])
    for split, count in (("train", 4), ("val", 2)):
        index = index_of(tmp_path / "out", split)
        assert (len(index), index.report.ledger.losses) == (count, ())


def test_a_failure_leaves_nothing_behind(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device", "x.tar")

    monkeypatch.setattr("tools.shard.write_shards.write_arrays", fail)
    settings = IndexSettings(cache_dir=str(tmp_path / "cache"))
    with refused("x.tar: no space left on device"):
        write_set(load_dataset_spec(source), tmp_path / "new" / "out", 10**9, settings)
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_created_is_refused_before_the_scan(source: Path, tmp_path: Path):
    (tmp_path / "file").touch()
    shutil.rmtree(source.parent / "images")  # a scan would fail
    with refused(f"{tmp_path}/file: is not a folder; choose another folder"):
        written(source, tmp_path / "file" / "deep" / "out")


def test_a_disk_without_space_for_an_image_is_named_by_the_output(source: Path, tmp_path: Path, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tarfile.TarFile.addfile", fail)
    threads = threading.active_count()
    with pytest.raises(UserError) as caught:
        written(source, tmp_path / "out")
    assert str(caught.value).startswith(f"{tmp_path}/out: no space left on device")
    assert threading.active_count() == threads  # although ``caught`` still holds the frames that read the images


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (None, "not found (named by .../out/train.shards)"),
        (os.mkfifo, "cannot be read (is a pipe or device, not a file)"),
        (os.mkdir, "cannot be read (is a folder, not a file)"),
        (lambda path: path.symlink_to(path), "cannot be read (Too many levels of symbolic links)"),
    ],
)
def test_a_changed_or_missing_image_is_refused(source: Path, tmp_path: Path, make: Callable | None, message: str):
    tar = written(source, tmp_path / "out") / "train-00000.tar"
    index = index_of(tmp_path / "out")
    content = bytearray(tar.read_bytes())
    content[700] ^= 1
    tar.write_bytes(content)
    if make is None:
        with refused("out/train-00000.tar: bytes 512 to 11310 are not those of images/train/000.png; write it again"):
            read_bytes(index.path(0))
    tar.unlink()
    if make is not None:
        make(tar)
    with refused(f"out/train-00000.tar: {message}"):
        read_bytes(index.path(0))


def renamed(folder: bytes) -> Callable[[np.ndarray], np.ndarray]:
    """Returns a function that puts the images of an index in another folder, whose name is as long as images/."""
    return lambda v: np.frombuffer(v.tobytes().replace(b"images/", folder), np.uint8)


def changed_index(source: Path, out: Path, name: str, change: object) -> Path:
    """Writes ``source`` as shards and changes an array or a value of the index."""
    written(source, out)
    meta, arrays = open_arrays(out / "train.shards")
    arrays = {key: value.copy() for key, value in arrays.items()}
    if name in arrays:
        arrays[name] = change(arrays[name])
    else:
        meta[name] = change
    write_arrays(out / "train.shards", meta, arrays)
    return out


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("position", lambda v: v + (1 << 40), "number of a shard"),  # of a shard that there is not
        ("position", lambda v: v[::-1], "position"),
        ("size", lambda v: v + 10**9, "beyond its shard"),
        ("size", lambda v: -v, "beyond its shard"),
        ("crc", lambda v: v.astype(np.int64), "crc"),
        ("by_path", lambda v: v * 0, "by_path"),
        ("paths.data", renamed(b"../../m"), "a path leads out of its folder"),
        ("paths.data", renamed(b"/mages/"), "a path leads out of its folder"),
        ("paths.offsets", lambda v: v[::-1], "paths"),
        ("image_hw", lambda v: v * 0, "wrong image_hw"),
        ("offsets", lambda v: v + 1, "wrong offsets"),
        ("classes", lambda v: v + 9, "wrong classes"),
        ("classes", lambda v: v * 0 - 1, "wrong classes"),  # -1 is a region of all classes, which only a crowd can be
        ("boxes_xywh_px", lambda v: v * np.nan, "wrong boxes_xywh_px"),
        ("boxes_xywh_px", lambda v: v * 50, "wrong boxes_xywh_px"),
        ("area_px", lambda v: v[:-1], "wrong array area_px"),
        ("crowd", lambda v: v.astype(np.float64), "wrong array crowd"),
        ("shards", [["../train-00000.tar", 10**6]], "name of a shard"),
        ("shards", [["/etc/passwd", 10**6]], "name of a shard"),
        ("shards", [["", 10**6]], "name of a shard"),
        ("shards", [[".", 10**6]], "name of a shard"),
        ("shards", [["a\0b", 10**6]], "name of a shard"),
        ("shards", [["\ud800", 10**6]], "name of a shard"),
        ("shards", [["a\n.tar", 10**6]], "name of a shard"),
        ("shards", [["train.shards", 10**6]], "name of a shard"),
        ("shards", 5, "metadata: shards: must be a list, got 5"),
        ("totals", {}, "'images'"),
        ("version", "9", "'<' not supported between instances of 'str' and 'int'"),
        ("repeated", lambda v: v[:-1], "wrong array repeated"),
        ("categories", [[1, "light", True], [1, "dark", True]], "wrong categories"),
        ("boxes_xywh_px", lambda v: v * [1, 1, 0, 0], "wrong boxes_xywh_px"),  # the report would divide by their sides
        ("boxes_xywh_px", lambda v: v * [1, 1, 1e-200, 1], "wrong boxes_xywh_px"),
    ],
)
def test_an_index_that_leads_elsewhere_is_refused(source: Path, tmp_path: Path, name: str, change: object, reason: str):
    with refused(f"train.shards: not an index of shards ({reason}); write it again"):
        index_of(changed_index(source, tmp_path / "out", name, change))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("names", "light", "names: must be a list, got 'light'"),
        ("category_ids", ["x", "y"], "category_ids: element 1: must be a whole number, got 'x'"),
        (
            "version",
            8,
            "was written by an earlier version of this program (index version 8; this program reads 9); write it again",
        ),
        (
            "version",
            99,
            "was written by a later version of this program (index version 99; this program reads 9); write it again",
        ),
    ],
)
def test_wrong_values_in_an_index_are_named(source: Path, tmp_path: Path, name: str, value: object, message: str):
    with refused(f"train.shards: {message}"):
        index_of(changed_index(source, tmp_path / "out", name, value))


def test_only_an_index_is_read_as_one(source: Path, tmp_path: Path):
    """A folder that is called like an index has files; a path below an image names nothing."""
    image = next((source.parent / "images" / "train").iterdir())
    folder = tmp_path / "photos.shards"
    folder.mkdir()
    shutil.copy(image, folder)
    assert read_bytes(folder / image.name) == image.read_bytes()
    with pytest.raises(UserError, match=r"cannot be read \(Not a directory\)"):
        read_bytes(image / "a.jpg")
    with pytest.raises(UserError, match="no such image"):
        read_bytes(tmp_path / "gone.shards" / "a.jpg")


def test_positions_of_images_fit_the_largest_tar_files():
    assert MAX_SHARD_MEGABYTES * 10**6 <= SPAN // 2
