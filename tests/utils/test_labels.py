"""Labels of many images in flat arrays."""

import numpy as np

from utils.labels import LabelArrays


def test_boxes_know_their_images():
    labels = type("Labels", (LabelArrays,), {})()
    labels.offsets = np.array([0, 2, 2, 5])
    labels.classes = np.array([0, 0, 1, 0, 2])
    labels.crowd = np.array([False, False, False, False, True])
    assert labels.image_of_box.tolist() == [0, 0, 2, 2, 2]
    assert labels.images_per_class(4).tolist() == [2, 1, 0, 0]
