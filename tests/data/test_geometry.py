"""Rule D7: boxes in pixels are fractions of the size that their label file states."""

from __future__ import annotations

import cv2
import numpy as np
import pytest

from data.findings import BAD_LABEL, FITTED
from tests.data.data_set import DataSet, boxes, coco, places, told, voc
from tests.helpers.exif import jpeg_with_exif

BOX_PX = (8, 6, 32, 24)  # x, y, w, h
FORMS = pytest.mark.parametrize("form", ["voc", "coco"])


def write(data: DataSet, form: str, hw: tuple[int, int] | None, factor: float, image: str) -> None:
    """Writes labels of `BOX_PX` times ``factor`` that state the size ``hw`` for the image, and another pair."""
    data.images("images/train/other.png")
    x, y, w, h = (int(factor * v) for v in BOX_PX)
    if form == "voc":
        data.file(f"voc/{image.rpartition('.')[0]}.xml", voc(("a", x, y, x + w, y + h), hw=hw))
        data.file("voc/other.xml", voc(("a", 1, 1, 9, 9)))
    else:
        content = coco([(image, [(1, x, y, w, h)]), ("other.png", [(1, 1, 1, 8, 8)])])
        content["images"][0] |= {"height": hw[0], "width": hw[1]}
        data.file("a.json", content)
    data.yaml(train="images/train", annotations={"train": "voc" if form == "voc" else "a.json"})


@FORMS
@pytest.mark.parametrize(
    ("hw", "factor", "is_fitting"),
    [((60, 80), 1, True), ((30, 40), 0.5, True), ((240, 320), 4, True), ((80, 60), 1, False), ((60, 100), 1, False)],
)
def test_labels_for_another_size_are_scaled_if_one_factor_explains_it_or_their_image_is_left_out(
    data, form, hw, factor, is_fitting
):
    data.images("images/train/x.png")
    write(data, form, hw, factor, "x.png")
    index = data.index()
    if is_fitting:
        assert boxes(index)["x"] == [("a", *BOX_PX)]
        assert told(index) == "images/train/other.png:1 images/train/x.png:1"
        assert len(places(index, FITTED)) == (factor != 1)
    else:
        (place,) = places(index, BAD_LABEL)
        assert told(index) == f"images/train/other.png:1 lost 1+1 {place}"


def test_a_background_has_no_labels_to_scale_and_without_a_size_they_are_in_pixels_of_the_image(data):
    data.write("images/train/x.png images/train/y.png")
    write(data, "voc", None, 1, "x.png")
    data.file("voc/y.xml", voc(hw=(30, 40)))
    index = data.index()
    assert boxes(index)["x"] == [("a", *BOX_PX)]
    assert index.report.num_findings == 0


@FORMS
@pytest.mark.parametrize("orientation", [5, 6, 7, 8])
@pytest.mark.parametrize("factor", [1, 2])
def test_labels_of_a_photo_before_its_rotation_are_turned(data, form, orientation, factor):
    """OpenCV turns the pixels, and a bright box among them, independently. Labels of the upright photo stay."""
    stored = np.zeros((60, 80, 3), np.uint8)
    x, y, w, h = BOX_PX
    stored[y : y + h, x : x + w] = 255
    path = data.file("images/train/photo.jpg", jpeg_with_exif(stored, orientation))
    upright = cv2.imread(str(path), cv2.IMREAD_COLOR)
    assert upright.shape[:2] == (80, 60)
    bright = np.argwhere(upright[..., 0] > 127)
    (top, left), (bottom, right) = bright.min(0), bright.max(0) + 1
    write(data, form, (60 * factor, 80 * factor), factor, "photo.jpg")
    index = data.index()
    np.testing.assert_allclose(boxes(index)["photo"][0][1:], (left, top, right - left, bottom - top), atol=1)
    assert told(index) == "images/train/other.png:1 images/train/photo.jpg:1"
    assert len(places(index, FITTED)) == 1
    write(data, form, (80, 60), 1, "photo.jpg")
    index = data.index()
    assert boxes(index)["photo"] == [("a", *BOX_PX)]
    assert index.report.num_findings == 0
