"""Keys to samples: training, letterboxing, caches, recent images."""

from __future__ import annotations

import pickle
import random

import cv2
import numpy as np
import pytest
import torch

from data.samples import readers
from data.samples.dataset import AugmentedImages, LoadImagesAndLabels
from data.samples.readers import ImageReader
from tests.helpers.synthetic_index import OBJECT, render_sample, write_rectangles
from utils.batches import SampleKey
from utils.boxes import cxcywh_to_xyxy, scale_boxes, xywh_to_xyxy
from utils.config.settings import Hyperparameters

SIZES = [(60, 80), (200, 100), (64, 64), (90, 300), (150, 150), (97, 131)]
BUSY = [
    {"name": "OneOf", "p": 0.9, "transforms": [{"name": "GaussNoise", "p": 1}, {"name": "Blur", "p": 1}]},
    {"name": "RandomCrop", "height": 50, "width": 60, "p": 0.5},
    {"name": "Rotate", "limit": 20, "p": 0.5},
]


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    return write_rectangles(tmp_path_factory.mktemp("images"), SIZES, objects=3)


def dataset_of(index, *, augment=True, imgsz=96, hyp=None, image_cache=None, **more):
    reader = ImageReader(index, imgsz=imgsz, image_cache=image_cache)
    if not augment:
        return LoadImagesAndLabels(reader)
    return AugmentedImages(reader, hyp=hyp or Hyperparameters(degrees=5, mixup=0.3), seed=2, **more)


def keys(count=12, canvas=(96, 96), epoch=0):
    return [SampleKey(p % len(SIZES), epoch, p, canvas) for p in range(count)]


def assert_same(a, b):
    assert np.array_equal(a.image, b.image)
    assert np.array_equal(a.labels, b.labels)
    names = ("index", "path", "original_hw", "gain_xy", "pad_xy")
    assert [getattr(a, name) for name in names] == [getattr(b, name) for name in names]


@pytest.mark.parametrize("albumentations", [[], BUSY])
def test_a_sample_depends_on_its_key_and_not_on_order_or_global_generators(index, albumentations):
    dataset = dataset_of(index, hyp=Hyperparameters(degrees=5, mixup=0.3, albumentations=albumentations))
    once = [render_sample(dataset, k) for k in keys()]
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002
    torch.manual_seed(5)
    states = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()  # noqa: NPY002
    again = pickle.loads(pickle.dumps(dataset))
    for key, sample in reversed(list(zip(keys(), once))):
        assert_same(render_sample(again, key), sample)
    assert random.getstate() == states[0]
    assert np.array_equal(np.random.get_state()[1], states[1])  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), states[2])


@pytest.mark.parametrize(("options", "expected"), [({}, 6), ({"rect": True}, 12)])
def test_each_image_of_a_block_is_decoded_once(index, monkeypatch, options, expected):
    """With ``--rect`` there is no mosaic, so no other sample needs an image again, and none are kept."""
    decoded = []
    plain = readers.read_source
    monkeypatch.setattr(readers, "read_source", lambda path, *sizes: decoded.append(path) or plain(path, *sizes))
    hyp = Hyperparameters(mosaic_block=6, mixup=0.5)
    shared = dataset_of(index, hyp=hyp, **options)
    block_keys = [key._replace(block=tuple(range(6))) for key in keys(6)] * 2
    samples = [render_sample(shared, key) for key in block_keys]
    assert len(decoded) == expected
    for key, sample in zip(block_keys, samples):
        assert_same(sample, render_sample(dataset_of(index, hyp=hyp, **options), key))


@pytest.mark.parametrize("canvas", [(96, 96), (128, 160), (64, 96)])
@pytest.mark.parametrize("imgsz", [48, 96, 128])
def test_letterboxed_boxes_match_the_objects(index, canvas, imgsz):
    dataset = dataset_of(index, augment=False, imgsz=imgsz)
    for key in keys(len(SIZES), canvas):
        sample = render_sample(dataset, key)
        height, width = sample.original_hw
        gain = min(imgsz / max(height, width), canvas[0] / height, canvas[1] / width)
        np.testing.assert_allclose(sample.gain_xy, gain, atol=1 / min(height, width))  # sides are whole pixels
        boxes = scale_boxes(cxcywh_to_xyxy(sample.labels[:, 1:].astype(np.float64)), canvas[1], canvas[0])
        rows = slice(index.offsets[key.index], index.offsets[key.index + 1])
        expected = xywh_to_xyxy(index.boxes_xywh_px[rows]) * np.tile(sample.gain_xy, 2) + np.tile(sample.pad_xy, 2)
        np.testing.assert_allclose(boxes, expected, atol=1e-4)
        drawn = np.abs(sample.image.astype(int) - OBJECT).max(2) < 60
        covered = np.zeros(canvas, bool)
        for x1, y1, x2, y2 in boxes:
            covered[int(np.floor(y1)) : int(np.ceil(y2)), int(np.floor(x1)) : int(np.ceil(x2))] = True
            assert drawn[int(np.ceil(y1)) + 1 : int(y2) - 1, int(np.ceil(x1)) + 1 : int(x2) - 1].all()
        assert not (drawn & ~covered).any()


def test_letterbox_is_one_bilinear_resize(index):
    dataset = LoadImagesAndLabels(ImageReader(index, imgsz=96, antialias=False))
    image = cv2.imread(index.path(3))[..., ::-1]  # 90 x 300
    picture = render_sample(dataset, SampleKey(3, 0, 3, (64, 96))).image
    assert np.array_equal(picture[17 : 17 + 29], cv2.resize(np.ascontiguousarray(image), (96, 29)))
    assert (picture[:17] == 114).all()
    assert (picture[46:] == 114).all()
