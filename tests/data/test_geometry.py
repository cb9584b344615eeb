"""Rule D7: boxes in pixels are fractions of the size that their label file states."""

from __future__ import annotations

import cv2
import numpy as np
import pytest

from data.findings import BAD_LABEL, FITTED
from tests.data.data_set import Counts, DataSet, boxes, coco, counts, places, voc
from tests.helpers.exif import jpeg_with_exif

BOX_PX = (8, 6, 32, 24)  # x, y, w, h


def write(data: DataSet, form: str, hw: tuple[int, int], box: tuple[int, ...], image: str) -> None:
    """Writes labels that state the size ``hw`` for the image, and another pair that is as it should be."""
    data.images("images/train/other.png")
    x, y, w, h = box
    stem = image.rpartition(".")[0]
    if form == "voc":
        data.file(f"voc/{stem}.xml", voc(("a", x, y, x + w, y + h), hw=hw))
        data.file("voc/other.xml", voc(("a", 1, 1, 9, 9)))
    else:
        content = coco([(image, [(1, *box)]), ("other.png", [(1, 1, 1, 8, 8)])])
        content["images"][0] |= {"height": hw[0], "width": hw[1]}
        data.file("a.json", content)
    data.yaml(train="images/train", annotations={"train": "voc" if form == "voc" else "a.json"})


FORMS = pytest.mark.parametrize("form", ["voc", "coco"])


@FORMS
@pytest.mark.parametrize("factor", [0.5, 1, 4])
def test_labels_for_another_size_are_scaled_by_one_factor(data, form, factor):
    data.images("images/train/x.png")
    hw = (int(60 * factor), int(80 * factor))
    write(data, form, hw, tuple(int(v * factor) for v in BOX_PX), "x.png")
    index = data.index()
    assert boxes(index)["x"] == [("a", *BOX_PX)]
    assert counts(index) == Counts(2, 2)
    assert len(places(index, FITTED)) == (factor != 1)


def test_a_background_has_no_labels_to_scale(data):
    data.images("images/train/x.png")
    write(data, "voc", (30, 40), BOX_PX, "x.png")
    data.file("voc/x.xml", voc(hw=(30, 40)))
    index = data.index()
    assert counts(index) == Counts(2, 1)
    assert places(index, FITTED) == []


@FORMS
@pytest.mark.parametrize("hw", [(80, 60), (60, 100), (120, 80)])
def test_an_image_that_no_factor_explains_is_left_out(data, form, hw):
    data.images("images/train/x.png")
    write(data, form, hw, BOX_PX, "x.png")
    index = data.index()
    assert set(boxes(index)) == {"other"}
    assert counts(index) == Counts(1, 1, 1, 1)
    assert len(places(index, BAD_LABEL)) == 1


@FORMS
@pytest.mark.parametrize("orientation", [5, 6, 7, 8])
@pytest.mark.parametrize("factor", [1, 2])
def test_labels_of_a_photo_before_its_rotation_are_turned(data, form, orientation, factor):
    """OpenCV turns the pixels, and a bright box among them, independently."""
    stored = np.zeros((60, 80, 3), np.uint8)
    x, y, w, h = BOX_PX
    stored[y : y + h, x : x + w] = 255
    path = data.file("images/train/photo.jpg", jpeg_with_exif(stored, orientation))
    upright = cv2.imread(str(path), cv2.IMREAD_COLOR)
    assert upright.shape[:2] == (80, 60)
    bright = np.argwhere(upright[..., 0] > 127)
    (top, left), (bottom, right) = bright.min(0), bright.max(0) + 1
    write(data, form, (60 * factor, 80 * factor), tuple(factor * v for v in BOX_PX), "photo.jpg")
    index = data.index()
    np.testing.assert_allclose(boxes(index)["photo"][0][1:], (left, top, right - left, bottom - top), atol=1)
    assert counts(index) == Counts(2, 2)
    assert len(places(index, FITTED)) == 1


@FORMS
def test_labels_of_the_upright_photo_stay(data, form):
    path = data.file("images/train/photo.jpg", jpeg_with_exif(np.zeros((60, 80, 3), np.uint8), 6))
    assert cv2.imread(str(path)).shape[:2] == (80, 60)
    write(data, form, (80, 60), BOX_PX, "photo.jpg")
    index = data.index()
    assert boxes(index)["photo"] == [("a", *BOX_PX)]
    assert len(index.report.findings) == 0


def test_labels_that_state_no_size_are_in_pixels_of_the_image(data):
    data.images("images/train/x.png")
    data.file("voc/x.xml", voc(("a", 8, 6, 40, 30), hw=None))
    data.yaml(train="images/train", annotations={"train": "voc"})
    assert boxes(data.index()) == {"x": [("a", *BOX_PX)]}
