"""Labels for another size of their image, or for the photo before its EXIF rotation: converted if one cause explains
them, otherwise counted by --max-bad."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import cv2
import numpy as np
import pytest
import yaml
from PIL import Image

from data.images.decode import read_image
from data.images.verify import check_image
from data.index.index_settings import IndexSettings
from data.index.load import load_index, scan_for_check
from data.labels.findings import SCALED, SIZE, TURNED, UNKNOWN_CLASS
from data.labels.rows import row_table
from data.labels.sizes import fit_to_images, turned_boxes
from data.source.dataset_yaml import load_dataset_spec
from tests.helpers.open_counter import OpenCounter
from tests.helpers.three_formats import voc_text, yolo_text
from utils.errors import UserError

HEIGHT, WIDTH = 64, 96
BOX = (10, 6, 34, 48)  # x1, y1, x2, y2 in the photo as stored
PIXELS = pytest.mark.parametrize("reader", ["coco", "voc"])


def write_photo(path: Path, orientation: int = 1, *, scale: float = 1.0, quality: int = 95) -> None:
    """Writes a dark photo with a bright object in `BOX` and an EXIF rotation."""
    pixels = np.full((HEIGHT, WIDTH, 3), 30, np.uint8)
    x1, y1, x2, y2 = BOX
    pixels[y1:y2, x1:x2] = 230
    if scale != 1:
        pixels = cv2.resize(pixels, None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA)
    exif = Image.Exif()
    exif[0x0112] = orientation
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, exif=exif, quality=quality)


def bright_box(path: Path) -> np.ndarray:
    """The corners of the bright object in the upright image, found in its pixels."""
    ys, xs = np.nonzero(read_image(path)[..., 0] > 130)
    return np.array([xs.min(), ys.min(), xs.max() + 1, ys.max() + 1])


def write_labels(root: Path, boxes: dict[str, tuple], sizes_hw: dict[str, tuple[int, int]]) -> None:
    """Labels of one box an image in all formats, with the sizes that they state."""
    coco = {"images": [], "annotations": [], "categories": [{"id": 1, "name": "a"}]}
    for number, (name, (x1, y1, x2, y2)) in enumerate(boxes.items()):
        height, width = sizes_hw[name]
        coco["images"].append({"id": number, "file_name": name, "height": height, "width": width})
        coco["annotations"].append(
            {"id": number, "image_id": number, "category_id": 1, "bbox": [x1, y1, x2 - x1, y2 - y1]}
        )
        for folder, suffix, text in (
            ("voc", ".xml", voc_text([(0, x1, y1, x2, y2)], ["a"], height, width)),
            ("labels", ".txt", yolo_text([(0, x1, y1, x2, y2)], height, width)),
        ):
            (root / folder).mkdir(exist_ok=True)
            (root / folder / name).with_suffix(suffix).write_text(text)
    (root / "coco.json").write_text(json.dumps(coco))


def load(root: Path, reader: str, **options):
    annotations = {"coco": {"annotations": "coco.json"}, "voc": {"annotations": "voc"}, "yolo": {}}[reader]
    (root / "data.yaml").write_text(yaml.safe_dump({"train": "images", "names": ["a"], **annotations}))
    return load_index(
        load_dataset_spec(root / "data.yaml"), "train", IndexSettings(progress=False, workers=0, **options)
    )


def corners(index) -> np.ndarray:
    x, y, w, h = index.boxes_xywh_px.T
    return np.stack([x, y, x + w, y + h], 1)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_turned_boxes_are_where_the_decoder_turns_the_object(tmp_path, orientation):
    write_photo(tmp_path / "a.jpg", orientation)
    assert check_image(tmp_path / "a.jpg").orientation == orientation
    if orientation in (2, 3, 4):  # which the sides do not tell
        return
    upright_hw = read_image(tmp_path / "a.jpg").shape[:2]
    found = turned_boxes(np.array([BOX], np.float64), upright_hw, orientation)
    np.testing.assert_allclose(found[0], bright_box(tmp_path / "a.jpg"), atol=1)


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".webp", ".tif"])
def test_the_orientation_is_read_from_each_kind_of_file(tmp_path, suffix):
    write_photo(tmp_path / f"a{suffix}", 6)
    assert check_image(tmp_path / f"a{suffix}").orientation == 6
    assert read_image(tmp_path / f"a{suffix}").shape[:2] == (WIDTH, HEIGHT)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("reader", ["coco", "voc", "yolo"])
def test_labels_of_the_upright_photo_stay_as_they_are(tmp_path, orientation, reader):
    write_photo(tmp_path / "images/a.jpg", orientation)
    box = bright_box(tmp_path / "images/a.jpg")
    size = read_image(tmp_path / "images/a.jpg").shape[:2]
    write_labels(tmp_path, {"a.jpg": tuple(map(int, box))}, {"a.jpg": size})
    index = load(tmp_path, reader)
    np.testing.assert_allclose(corners(index)[0], box)
    assert list(index.report.lines) == []


@pytest.mark.parametrize(("orientation", "scale"), [(6, 1.0), (8, 0.5), (1, 0.5)])
def test_the_box_of_a_finding_is_also_turned_and_scaled(tmp_path, orientation, scale):
    names = [f"{i}.jpg" for i in range(4)]
    for name in names:
        write_photo(tmp_path / "images" / name, orientation, scale=scale)
    write_labels(tmp_path, dict.fromkeys(names, BOX), dict.fromkeys(names, (HEIGHT, WIDTH)))
    label = tmp_path / "voc" / "0.xml"
    label.write_text(label.read_text().replace("<name>a</name>", "<name>unknown</name>"))
    (tmp_path / "data.yaml").write_text("train: images\nnames: [a]\nannotations: voc\n")
    spec = load_dataset_spec(tmp_path / "data.yaml")
    (scan,) = scan_for_check(spec, "train", IndexSettings(progress=False)).scans
    (unknown,) = (finding for finding in scan.findings if finding.kind == UNKNOWN_CLASS)
    np.testing.assert_allclose(unknown.xyxy_px, bright_box(tmp_path / "images" / "0.jpg"), atol=1)


@PIXELS
@pytest.mark.parametrize("orientation", [5, 6, 7, 8])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_labels_of_the_unturned_photo_are_turned(tmp_path, caplog, reader, orientation, scale):
    caplog.set_level(logging.INFO, "lockstep")
    names = [f"{i:02}.jpg" for i in range(12)]
    for i, name in enumerate(names):
        write_photo(tmp_path / "images" / name, orientation if i < 8 else 1, scale=scale if i < 8 else 1.0)
    write_labels(tmp_path, dict.fromkeys(names, BOX), dict.fromkeys(names, (HEIGHT, WIDTH)))
    for _ in range(2):
        caplog.clear()
        with OpenCounter(tmp_path / "images") as counter:
            index = load(tmp_path, reader)
            assert set(counter.counts().values()) <= {1}
        kind, what = (TURNED, "turned") if scale == 1 else (SCALED, "scaled")
        (message,) = (text for text in caplog.messages if what in text and "train: images with labels" in text)
        assert "are turned: 8, first " in message or "are scaled: 8, first " in message
    assert index.report.totals[kind] == 8
    assert index.report.ledger.losses == ()
    for i, name in enumerate(names):
        np.testing.assert_allclose(corners(index)[i], bright_box(tmp_path / "images" / name), atol=1.01)


@PIXELS
@pytest.mark.parametrize("scale", [0.5, 2.0, 0.37])
def test_labels_for_one_multiple_of_the_size_are_scaled(tmp_path, reader, scale):
    names = [f"{i}.jpg" for i in range(6)]
    for i, name in enumerate(names):
        write_photo(tmp_path / "images" / name, scale=scale if i < 4 else 1)
    write_labels(tmp_path, dict.fromkeys(names, BOX), dict.fromkeys(names, (HEIGHT, WIDTH)))
    index = load(tmp_path, reader)
    assert index.report.totals[SCALED] == 4
    x1, y1, x2, y2 = BOX
    exact = [tuple(index.image_hw[i] / (HEIGHT, WIDTH)) for i in range(6)]
    expected = [(x1 * sx, y1 * sy, x2 * sx, y2 * sy) for sy, sx in exact]
    np.testing.assert_allclose(corners(index), expected)
    np.testing.assert_allclose(index.area_px, [(x2 - x1) * (y2 - y1) * sx * sy for sy, sx in exact])


MISMATCHES = {
    "two factors": ({"a": (HEIGHT * 2, WIDTH * 2), "b": (HEIGHT * 3, WIDTH * 3)}, 1),
    "another shape": ({"a": (100, 200)}, 1),
    "swapped sides of a photo that is not turned": ({"a": (WIDTH, HEIGHT)}, 1),
    "swapped sides of a mirrored photo": ({"a": (WIDTH, HEIGHT)}, 3),
}


@PIXELS
@pytest.mark.parametrize("case", MISMATCHES)
def test_sizes_that_one_cause_does_not_explain_are_held_against_max_bad(tmp_path, reader, case):
    sizes, orientation = MISMATCHES[case]
    names = [f"{chr(ord('a') + i)}.jpg" for i in range(8)]
    for name in names:
        write_photo(tmp_path / "images" / name, orientation)
    stated = {name: sizes.get(name[0], (HEIGHT, WIDTH)) for name in names}
    write_labels(tmp_path, dict.fromkeys(names, (10, 6, 34, 28)), stated)
    with pytest.raises(UserError, match=re.escape(f"{len(sizes)} of 8 images and {len(sizes)} of 8 labeled objects")):
        load(tmp_path, reader)
    index = load(tmp_path, reader, max_bad=0.3)
    assert len(index) == 8 - len(sizes)
    assert index.report.totals[SIZE] == len(sizes)
    assert np.diff(index.offsets).all()


@PIXELS
def test_boxes_that_contradict_the_stated_size_are_not_computed(tmp_path, reader):
    """The sizes of the labels are wrong, and so may be anything that is computed from them."""
    write_photo(tmp_path / "images/a.jpg")
    write_labels(tmp_path, {"a.jpg": BOX}, {"a.jpg": (HEIGHT // 2, WIDTH // 2)})
    with pytest.raises(UserError, match=r"size mismatch: .*labels are for 48x32, the image is 96x64 upright"):
        load(tmp_path, reader)


@PIXELS
def test_a_pixel_more_or_less_is_rounding(tmp_path, reader):
    write_photo(tmp_path / "images/a.jpg")
    write_labels(tmp_path, {"a.jpg": BOX}, {"a.jpg": (HEIGHT + 1, WIDTH - 1)})
    index = load(tmp_path, reader)
    assert list(index.report.lines) == []
    np.testing.assert_array_equal(corners(index), [BOX])


def test_sizes_as_whole_floats_and_text_are_read_and_others_ignored(tmp_path):
    write_photo(tmp_path / "images/a.jpg", scale=0.5)
    write_labels(tmp_path, {"a.jpg": BOX}, {"a.jpg": (HEIGHT, WIDTH)})
    content = json.loads((tmp_path / "coco.json").read_text())
    read = [(64.0, 96.0), ("64", "96")]
    ignored = [(0, 0), (None, None), (10**20, 96), (10**400, 96)]
    for stated, is_read in [*((size, True) for size in read), *((size, False) for size in ignored)]:
        content["images"][0] |= {"height": stated[0], "width": stated[1]}
        (tmp_path / "coco.json").write_text(json.dumps(content))
        index = load(tmp_path, "coco")
        assert index.report.totals.get(SCALED, 0) == is_read


@pytest.mark.parametrize("seed", range(5))
def test_random_sizes_and_factors(seed):
    """Sizes that differ by one rounded factor are explained; a single exception spoils all."""
    rng = np.random.default_rng(seed)
    labeled = rng.integers(50, 2000, (40, 2))
    factor = rng.uniform(0.2, 4)
    image_hw = np.where(rng.random((40, 2)) < 0.5, np.floor(labeled * factor), np.ceil(labeled * factor)).astype(int)
    boxes = [(0, 0, 0, w, h, w * h, 0, i, 0) for i, (h, w) in enumerate(labeled.tolist())]
    table = np.concatenate([row_table(i, [row]) for i, row in enumerate(boxes)])
    stated = {i: tuple(size) for i, size in enumerate(labeled.tolist())}
    fitted, problems, _ = fit_to_images(table, image_hw, stated, [1] * len(image_hw))
    assert [problem.kind for _, problem in problems] == [SCALED] * 40
    np.testing.assert_allclose(fitted[:, [5, 4]], image_hw)  # y2, x2
    image_hw[7, 1] = int(labeled[7, 1] * factor * 1.2) + 3
    fitted, problems, _ = fit_to_images(table, image_hw, stated, [1] * len(image_hw))
    assert [problem.kind for _, problem in problems] == [SIZE] * 40
    assert len(fitted) == 0
