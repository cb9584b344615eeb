"""The user's albumentations: boxes move with the pixels, ignore regions stay, mistakes are one line."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from data.render.user_transforms import UserTransforms
from tests.helpers.synthetic_index import OBJECT
from utils.batches import SampleKey
from utils.boxes import cxcywh_to_xyxy


def transformed(entries, *, labels=((2, 0.5, 35 / 80, 0.4, 30 / 80),), epoch=0, position=0, seed=0):
    image = np.full((80, 100, 3), 114, np.uint8)
    image[20:50, 30:70] = OBJECT
    transforms = pickle.loads(pickle.dumps(UserTransforms(entries, seed=seed)))  # as workers that are spawned get them
    return transforms(image, np.array(labels, np.float32), SampleKey(0, epoch, position, (80, 100)))


@pytest.mark.parametrize(
    "entry",
    [
        {"name": "HorizontalFlip", "p": 1},
        {"name": "Crop", "x_min": 20, "y_min": 10, "x_max": 70, "y_max": 60, "p": 1},
        {"name": "Blur", "p": 1},
    ],
)
def test_boxes_move_with_the_pixels(entry):
    image, labels = transformed([entry])
    assert image.shape == (80, 100, 3)
    box = cxcywh_to_xyxy(labels[0, 1:].astype(np.float64)) * (100, 80, 100, 80)
    ys, xs = np.nonzero(image[..., 0] > (114 + OBJECT[0]) / 2)
    np.testing.assert_allclose(box, [xs.min(), ys.min(), xs.max() + 1, ys.max() + 1], atol=0.75)


def test_random_numbers_follow_from_seed_epoch_and_position():
    def crops(**changes):
        entry = {"name": "RandomCrop", "height": 40, "width": 40, "p": 1}
        where = {"labels": ((0, 0.5, 0.5, 1, 1),), **changes}
        return [transformed([entry], position=position, **where)[0].tobytes() for position in range(8)]

    assert crops() == crops()
    assert len({*crops(), *crops(epoch=1), *crops(seed=1)}) > 16  # a few crops show the same


def test_every_visible_piece_of_an_ignore_region_is_kept():
    """A crop of 4 % of the image shows a part of a region, but no object."""
    crop = {"name": "Crop", "x_min": 10, "y_min": 8, "x_max": 30, "y_max": 24, "p": 1}
    sliver = (-1, 0.1005, 0.5, 0.003, 1)  # 0.2 pixels are in the crop
    labels = [(1, 0.5, 0.5, 1, 1), (-1, 0.5, 0.5, 1, 1), (0, 0.2, 0.2, 0.1, 0.1), sliver, (-2, 0.9, 0.9, 0.1, 0.1)]
    _, kept = transformed([{"name": "Blur", "p": 1}, crop], labels=labels)
    kept = kept[np.argsort(-kept[:, 3] * kept[:, 4])]
    expected = [(-1, 0.5, 0.5, 1, 1), (0, 0.5, 0.5, 0.5, 0.5), (-1, 0.005, 0.5, 0.01, 1)]
    np.testing.assert_allclose(kept, expected, atol=1e-4)
    _, none = transformed([crop], labels=np.zeros((0, 5)))
    assert (none.shape, none.dtype) == ((0, 5), np.float32)
