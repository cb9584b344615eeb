"""Data sets of Hugging Face: image folders and parquet files."""

from __future__ import annotations

import errno
import json

import cv2
import numpy as np
import pytest

from tests.helpers.tool_exports import TRUTH, boxes_of, check_refusal, write_parquet
from tools.convert.to_coco import convert


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"file_name": "one.png", "objects": {"bbox": [[1, 2, 3, 4]]}}', "1 of 'bbox', but 0 of 'category'"),
        (
            '{"file_name": "one.png", "objects": {"bbox": [1], "label": ["a"]}}',
            "expected a bbox of four numbers, got 1",
        ),
        (
            '{"file_name": "one.png", "objects": {"bbox": [[1, 2, 3, 4]], "label": [-1]}}',
            "label: -1 is not the number of a class",
        ),
        (
            '{"file_name": "one.png", "objects": {"bbox": [[1, 2, 3, 4]], "label": ["a"], "iscrowd": ["x"]}}',
            "iscrowd: expected 0 or 1, got 'x'",
        ),
        ('{"file_name": "one.png", "objects": false}', "objects: must be 'key: value' lines, got False"),
        ('{"file_name": "one.png", "objects": 3}', "objects: must be 'key: value' lines, got 3"),
        ('{"file_name": "one.png"', "malformed JSON"),
        ('{"file_name": "one.jpg"}', "the image 'one.jpg': not found below .../set, but one.png is there"),
    ],
)
def test_wrong_rows_of_an_image_folder_are_named(row, message, images):
    (images / "metadata.jsonl").write_text(row)
    check_refusal(images, f"metadata.jsonl:1: {message}")


@pytest.mark.parametrize(("value", "is_crowd"), [(1, True), (True, True), (0, False), (None, False)])
def test_crowds_of_hugging_face_are_regions_to_ignore(value, is_crowd, images, tmp_path):
    rows = [
        {"file_name": name, "objects": {"bbox": [[1, 2, 30, 20]], "category": ["cat"], "iscrowd": [flag]}}
        for name, flag in (("one.png", value), ("two.png", 0))
    ]
    (images / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    convert(images, tmp_path / "out.json")
    annotations = json.loads((tmp_path / "out.json").read_text())["annotations"]
    assert [bool(each["iscrowd"]) for each in annotations] == [is_crowd, False]


def test_a_crowd_may_be_the_only_object_with_a_flag(images, tmp_path):
    objects = [{"bbox": [1, 2, 9, 9], "category": "cat"}, {"bbox": [20, 20, 9, 9], "category": "cat", "iscrowd": 1}]
    (images / "metadata.jsonl").write_text(json.dumps({"file_name": "one.png", "objects": objects}))
    convert(images, tmp_path / "out.json")
    annotations = json.loads((tmp_path / "out.json").read_text())["annotations"]
    assert [each["iscrowd"] for each in annotations] == [0, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"objects": 7}, "row 0: objects: must be 'key: value' lines, got 7"),
        ({"objects": [1.5]}, "row 0: must be 'key: value' lines, got 1.5"),
        ({"objects": {"bbox": 5, "category": 6}}, "row 0: bbox: must be a list, got 5"),
        ({"objects": {"bbox": [[1, 2, 3, 4]], "category": []}}, "row 0: 1 of 'bbox', but 0 of 'category'"),
        ({"objects": {"bbox": [[1, 2, 3]], "category": [0]}}, "row 0: expected a bbox of four numbers, got [1, 2, 3]"),
        (
            {"objects": {"bbox": [[1, 2, 3, 4]], "category": [2]}},
            "row 0: category: 2 is not the number of a class; there are 2 classes, numbered from 0",
        ),
        (
            {"objects": {"bbox": [[1, 2, 3, 4]], "category": [-1]}},
            "row 0: category: -1 is not the number of a class; there are 2 classes, numbered from 0",
        ),
        (
            {"objects": {"bbox": [[1, 2, 3, 4]], "category": [True]}},
            "row 0: category: expected the name or the number of a class, got True",
        ),
        (
            {"objects": {"bbox": [[1, 2, 3, 4]], "category": [0.5]}},
            "row 0: category: expected the name or the number of a class, got 0.5",
        ),
        ({"objects": None}, "1 file of Hugging Face parquet without objects"),
        ({"image": {"bytes": b"x" * 99, "path": "one.png"}}, "row 0): cannot be decoded (damaged, or not an image)"),
        ({"image": {"bytes": b"x" * 99, "path": None}}, "row 0: not an image of a known kind"),
        ({"image": {"bytes": None}}, "row 0: has no image bytes"),
        (b"{}{}", "its 'huggingface' metadata is not JSON"),
        (b"[" * 100_000, "its 'huggingface' metadata is not JSON"),
    ],
)
def test_odd_parquet_files_are_named(images, change, message):
    write_parquet(images)
    from pyarrow import Table, parquet

    path = images / "train-00000-of-00001.parquet"
    table = parquet.read_table(path)
    if isinstance(change, bytes):
        table = table.replace_schema_metadata({"huggingface": change})
    else:
        table = Table.from_pylist([row | change for row in table.to_pylist()], metadata=table.schema.metadata)
    parquet.write_table(table, path)
    check_refusal(images, f"...{message}")


def test_an_image_without_a_signature_keeps_the_suffix_of_its_name(images, tmp_path):
    """Training finds images by their suffixes."""
    write_parquet(images)
    from pyarrow import Table, parquet

    path = images / "train-00000-of-00001.parquet"
    table = parquet.read_table(path)
    (content,) = cv2.imencode(".ppm", np.full((48, 64, 3), 90, np.uint8))[1:]
    rows = [table.to_pylist()[0] | {"image": {"bytes": content.tobytes(), "path": "one.PPM"}}]
    parquet.write_table(Table.from_pylist(rows, metadata=table.schema.metadata), path)
    convert(images, tmp_path / "out.json")
    assert boxes_of(tmp_path / "out.yaml").total() == len(TRUTH["one.png"])


def test_a_full_disk_is_no_damage_of_the_parquet_file(images, tmp_path, monkeypatch):
    write_parquet(images)

    def fill(path, content):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr("tools.convert.extracted_images.write_whole", fill)
    with pytest.raises(OSError, match="No space left on device"):
        convert(images, tmp_path / "out.json")
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.parametrize("kind", ["zeros", "rows"])
def test_a_parquet_file_that_asks_for_far_more_than_it_has_is_refused(images, kind):
    """50 kB can stand for 1.5 GB in memory, and 18 kB for 200,000 images on the disk. The beginning of the first looks
    like UTF-16."""
    write_parquet(images)
    from pyarrow import Table, parquet

    path = images / "train-00000-of-00001.parquet"
    first = parquet.read_table(path).to_pylist()[0]
    image = {"bytes": bytes(10**7)} if kind == "zeros" else first["image"]
    rows = [first | {"image": image}] * (1 if kind == "zeros" else 5_000)
    parquet.write_table(Table.from_pylist(rows), path, compression="zstd")
    check_refusal(images, "parquet: refused: its images have more than 100 times the bytes of the file")


def _write_two_parquet_files(images, first_folder, second_folder):
    """Writes files of one name with an image each. Returns a file with both."""
    write_parquet(images)
    from pyarrow import parquet

    whole = images / "train-00000-of-00001.parquet"
    table = parquet.read_table(whole)
    for folder, rows in ((first_folder, table.slice(0, 1)), (second_folder, table.slice(1, 1))):
        (images / folder).mkdir(parents=True)
        parquet.write_table(rows, images / folder / "0000.parquet")
    return whole


def test_parquet_files_of_one_name_keep_their_own_images(images, tmp_path):
    contents = {(images / name).read_bytes() for name in ("one.png", "two.png")}
    whole = _write_two_parquet_files(images, "full/train/a", "full/train/b")
    whole.rename(images / "full/train/a/0000.PARQUET")
    check_refusal(images, "a/0000.parquet: row 0: the images of another file would have the same names; rename one")
    (images / "full/train/a/0000.PARQUET").unlink()
    convert(images, tmp_path / "out.json")
    coco = json.loads((tmp_path / "out.json").read_text())
    files = {tmp_path / "out/train/full" / image["file_name"] for image in coco["images"]}
    assert {path.read_bytes() for path in files} == contents
    assert {each["image_id"] for each in coco["annotations"]} == {1, 2}


@pytest.mark.parametrize(
    ("folders", "choice"),
    [
        (("full/train", "mini/train"), "one of .../set/full, .../set/mini"),
        (("full/test", "mini"), "one of .../set/full, .../set/mini"),
        (("mini", "train"), ".../set/mini"),  # the other file is in the folder itself, which contains this one
    ],
)
def test_several_configurations_of_a_data_set_are_refused(images, folders, choice):
    """Images of one may be in another, also in another split."""
    _write_two_parquet_files(images, *folders).unlink()
    check_refusal(
        images,
        "set: has parquet files in several folders, which may be configurations with the same images; convert "
        f"{choice}, or, if they are parts of one configuration, move all files to one folder, each with a name of its "
        "own",
    )


def test_one_configuration_is_converted_by_its_folder(images, tmp_path):
    _write_two_parquet_files(images, "full/train", "mini/train").unlink()
    convert(images / "mini", tmp_path / "out.json")
    (file,) = (tmp_path / "out").rglob("*.png")
    assert file == tmp_path / "out/train/0000-000000.png"
