"""`python -m tools.convert`: writes what ``--data`` reads, and data sets of Hugging Face, as COCO."""

from __future__ import annotations

import hashlib
import json
import shlex
from pathlib import Path

import cv2
import numpy as np
import pytest

from tests.data.data_set import BOX, DataSet, boxes, load, open_set, refusal, voc
from tools.convert.write_coco import convert

NAMES = ("cat", "wild dog")


def digests(folder: Path) -> dict[Path, str]:
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def source(tmp_path) -> DataSet:
    """A data set with an ignored class, a background and a class that two names share."""
    data = DataSet(tmp_path / "my sét")
    data.pairs("train/x", "val/x", rows=f"{BOX}1 0.2 0.2 0.1 0.1\n2 0.7 0.7 0.2 0.2\n")
    data.pairs("train/empty", rows="")
    data.yaml(names=["a", "b", "c"], classes={"a": "first"}, ignore=["b"])
    return data


@pytest.mark.parametrize("place", ["beside", "elsewhere", "inside"])
def test_what_is_written_has_the_boxes_of_what_is_read(source, place, tmp_path):
    before = digests(source.root)
    out = {"beside": tmp_path, "elsewhere": tmp_path / "a" / "b", "inside": source.root}[place] / "out.json"
    line = convert(str(source.data), out)
    assert line == f"train: python train.py --data {shlex.quote(str(out.with_suffix('.yaml')))}"
    assert before.items() <= digests(source.root).items()
    new = [path for path in digests(tmp_path).keys() - before.keys() if "cache" not in path.parts]
    assert all(path.relative_to(out.parent).parts[0].startswith("out") for path in new)
    spec = open_set(out.with_suffix(".yaml"))
    assert spec.names == ("first", "c")
    for split in ("train", "val"):
        read, written = load(source.data, split), load(spec, split)
        assert [Path(written.path(i)).resolve() for i in range(len(written))] == [
            Path(read.path(i)).resolve() for i in range(len(read))
        ]
        objects = ~written.crowd
        np.testing.assert_allclose(written.boxes_xywh_px[objects], read.boxes_xywh_px[~read.crowd])
        assert written.classes[objects].tolist() == read.classes[~read.crowd].tolist()
        assert written.crowd.sum() == 2 * read.crowd.sum()  # one region for each class


def test_a_folder_of_another_format_is_written(tmp_path):
    export = DataSet(tmp_path / "export")
    for split, stem in (("train", "x"), ("valid", "y")):
        export.images(f"{split}/{stem}.png")
        export.file(f"{split}/{stem}.xml", voc(("cat", 5, 5, 20, 20)))
    convert(str(export.root), tmp_path / "out.json")
    assert boxes(load(tmp_path / "out.yaml", "val")) == {"y": [("cat", 5, 5, 15, 15)]}


def test_too_much_that_is_lost_is_refused_and_nothing_is_written(source, tmp_path):
    source.file("labels/train/gone.txt", BOX * 5)
    assert "labels/train/gone.txt" in refusal(lambda: convert(str(source.data), tmp_path / "out.json"))
    assert list(tmp_path.glob("out*")) == []
    convert(str(source.data), tmp_path / "out.json", max_bad=1.0)


def hugging_face(folder: Path) -> dict[str, dict]:
    for name, (width, height) in {"one é.png": (64, 48), "two.png": (80, 60), "three.png": (40, 40)}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(cv2.imencode(".png", np.full((height, width, 3), 90, np.uint8))[1].tobytes())
    return {
        "one é.png": {"bbox": [[4, 6, 26, 34], [20, 10, 30, 34]], "category": [0, 1], "iscrowd": [0, 0]},
        "two.png": {"bbox": [[0, 0, 80, 60]], "category": [0], "iscrowd": [1]},
        "three.png": {"bbox": [], "category": [], "iscrowd": []},
    }


def image_folder(folder: Path) -> None:
    rows = []
    for name, objects in hugging_face(folder).items():
        named = objects | {"category": [NAMES[number] for number in objects["category"]]}
        rows.append(json.dumps({"file_name": name, "objects": named}))
    (folder / "metadata.jsonl").write_text("\n".join(rows))


def parquet_file(folder: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = []
    for name, objects in hugging_face(folder).items():
        rows.append({"image": {"bytes": (folder / name).read_bytes(), "path": name}, "objects": objects})
        (folder / name).unlink()
    rows.append(rows[0] | {"objects": None})  # an image that nobody has labeled
    features = {"objects": {"feature": {"category": {"names": list(NAMES), "_type": "ClassLabel"}}}}
    table = pyarrow.Table.from_pylist(rows)
    table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    parquet.write_table(table, folder / "validation-00000-of-00001.parquet")


@pytest.mark.parametrize(("write", "split"), [(image_folder, "train"), (parquet_file, "val")])
def test_data_sets_of_hugging_face_are_written(write, split, tmp_path):
    write(tmp_path / "set")
    convert(str(tmp_path / "set"), tmp_path / "out.json")
    index = load(tmp_path / "out.yaml", split)
    found = [("cat", 4, 6, 26, 34), ("wild dog", 20, 10, 30, 34)]
    assert sorted(boxes(index).values()) == [[], [("cat", 0, 0, 80, 60)], found]
    assert index.crowd.sum() == 1


def test_objects_of_hugging_face_without_a_category_are_of_one_class_and_one_without_is_lost(tmp_path):
    image_folder(tmp_path / "set")
    table = tmp_path / "set/metadata.jsonl"
    text = table.read_text()
    table.write_text(text.replace('"category"', '"other"'))
    convert(str(tmp_path / "set"), tmp_path / "out.json")
    assert load(tmp_path / "out.yaml").names == ("object",)
    table.write_text(text.replace('["cat", "wild dog"]', '["cat", null]'))
    convert(str(tmp_path / "set"), tmp_path / "more.json", max_bad=0.5)
    index = load(tmp_path / "more.yaml")
    assert (index.names, index.report.lost_objects) == (("cat",), 1)


def test_a_box_of_hugging_face_that_is_none_is_lost_and_too_many_leave_nothing(tmp_path):
    image_folder(tmp_path / "set")
    table = tmp_path / "set/metadata.jsonl"
    table.write_text(table.read_text().replace("[20, 10, 30, 34]", "[20, 10, -30, 34]"))
    assert "bad box" in refusal(lambda: convert(str(tmp_path / "set"), tmp_path / "out.json"))
    assert list(tmp_path.glob("out*")) == []
    convert(str(tmp_path / "set"), tmp_path / "out.json", max_bad=0.5)
    assert load(tmp_path / "out.yaml").report.lost_objects == 1
    table.write_text("no JSON")
    assert f"{table}:1" in refusal(lambda: convert(str(tmp_path / "set"), tmp_path / "more.json"))
