from __future__ import annotations

import hashlib
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data.flat_strings import FlatStrings
from data.images.decode import read_bytes
from data.index import DatasetIndex, IndexSettings
from data.load import load_index
from data.read_spec import load_dataset_spec
from tests.data.data_set import DataSet
from tests.helpers.messages import refused
from tests.helpers.tiny import write_dataset
from tools.shard.__main__ import main
from tools.shard.write_shards import write_set
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


@pytest.mark.parametrize("field", ["class", "nan", "far", "outside", "path", "file"])
def test_labels_that_no_scan_yields_are_refused(source: Path, tmp_path: Path, field: str):
    """Shards may be those of a stranger: their arrays are checked as label files are."""
    out = written(source, tmp_path / "out")
    meta, stored = open_arrays(out / "train.shards")
    arrays = {name: array.copy() for name, array in stored.items()}
    match field:
        case "class":
            arrays["classes"][0] = 57
        case "nan" | "far" | "outside":
            arrays["boxes_xywh_px"][0, 0] = {"nan": np.nan, "far": 1e30, "outside": -5}[field]
        case "path":
            names = ["../../" + name for name in FlatStrings(arrays["paths.data"], arrays["paths.offsets"])]
            flat = FlatStrings.of(names)
            arrays |= {"paths.data": flat.data, "paths.offsets": flat.offsets}
        case "file":
            meta["shards"][0][0] = "../out/" + meta["shards"][0][0]
    write_arrays(out / "train.shards", meta, arrays)
    with refused(f"{out / 'train.shards'}: ...; write it again"):
        index_of(out / "data.yaml")


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
        assert (files.report.kinds, files.report.findings) == (shards.report.kinds, shards.report.findings)


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


@pytest.mark.parametrize("harm", [Path.unlink, lambda path: os.truncate(path, 1000)])
def test_a_tar_file_that_was_not_copied_whole_is_named_at_once(source: Path, tmp_path: Path, harm: Callable):
    out = written(source, tmp_path / "out")
    harm(out / "train-00000.tar")
    with pytest.raises(UserError, match=r"train-00000\.tar"):
        index_of(out)
    assert len(index_of(out, "val"))


def test_labels_of_splits_that_are_not_written_are_not_lost(tmp_path: Path):
    """One COCO JSON for the images of three lists; those of the last list are missing."""
    DataSet(tmp_path).three_formats({str(i): [(0, 2, 3, 20, 30)] for i in range(9)})
    for split, numbers in {"train": range(4), "val": range(4, 6), "test": range(6, 9)}.items():
        (tmp_path / f"{split}.txt").write_text("".join(f"./images/train/{i}.png\n" for i in numbers))
    for i in range(6, 9):
        (tmp_path / f"images/train/{i}.png").unlink()
    data = tmp_path / "d.yaml"
    data.write_text("train: train.txt\nval: val.txt\ntest: test.txt\nnames: [a, b]\nannotations: all.json\n")
    main([str(data), str(tmp_path / "out"), "--split", "train", "val", "--cache-dir", str(tmp_path / "cache")])
    for split, count in (("train", 4), ("val", 2)):
        index = index_of(tmp_path / "out", split)
        assert (len(index), index.report.lost_images, index.report.lost_objects) == (count, 0, 0)


def test_a_changed_or_missing_image_is_one_line(source: Path, tmp_path: Path):
    tar = written(source, tmp_path / "out") / "train-00000.tar"
    path = index_of(tmp_path / "out").path(0)
    content = bytearray(tar.read_bytes())
    content[700] ^= 1
    tar.write_bytes(content)
    with refused("out/train-00000.tar: ...images/train/000.png; write it again"):
        read_bytes(path)
    tar.unlink()
    with refused("out/train-00000.tar: not found (named by .../out/train.shards)"):
        read_bytes(path)
