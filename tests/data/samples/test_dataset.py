"""Keys to samples: training, letterboxing, albumentations, caches."""

from __future__ import annotations

import pickle
import random
import weakref

import cv2
import numpy as np
import pytest
import torch

from data.render.user_transforms import UserTransforms
from data.samples import readers
from data.samples.dataset import AugmentedImages, LoadImagesAndLabels
from data.samples.readers import ImageReader
from tests.helpers.messages import refused
from tests.helpers.scripts import run_python
from tests.helpers.synthetic_index import OBJECT, open_cache, render_sample, write_rectangles
from utils.batches import SampleKey
from utils.boxes import cxcywh_to_xyxy, scale_boxes, xywh_to_xyxy
from utils.config.settings import Hyperparameters

SIZES = [(60, 80), (200, 100), (64, 64), (90, 300), (150, 150), (97, 131)]
BUSY = [
    {"name": "OneOf", "p": 0.9, "transforms": [{"name": "GaussNoise", "p": 1}, {"name": "Blur", "p": 1}]},
    {"name": "RandomCrop", "height": 50, "width": 60, "p": 0.5},
    {"name": "CoarseDropout", "p": 0.5},
    {"name": "Rotate", "limit": 20, "p": 0.5},
]


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    return write_rectangles(tmp_path_factory.mktemp("images"), SIZES, objects=3)


def dataset_of(index, *, augment=True, imgsz=96, hyp=None, image_cache=None, **more):
    reader = ImageReader(index, imgsz=imgsz, image_cache=image_cache)
    if not augment:
        return LoadImagesAndLabels(reader)
    hyp = hyp or Hyperparameters(degrees=5, mixup=0.3)
    return AugmentedImages(reader, hyp=hyp, seed=2, **more)


def keys(count=12, canvas=(96, 96), epoch=0):
    return [SampleKey(p % len(SIZES), epoch, p, canvas) for p in range(count)]


def assert_same(a, b):
    assert np.array_equal(a.image, b.image)
    assert np.array_equal(a.labels, b.labels)
    names = ("index", "path", "original_hw", "gain_xy", "pad_xy")
    assert [getattr(a, name) for name in names] == [getattr(b, name) for name in names]


@pytest.mark.parametrize("albumentations", [[], BUSY])
def test_a_sample_depends_on_its_key_and_not_on_order_or_global_generators(index, albumentations):
    hyp = Hyperparameters(degrees=5, mixup=0.3, albumentations=albumentations)
    dataset = dataset_of(index, hyp=hyp)
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


@pytest.mark.parametrize("augment", [True, False])
@pytest.mark.parametrize("kind", ["ram", "disk"])
def test_a_cache_does_not_change_pixels(index, tmp_path, kind, augment):
    cache = open_cache(kind, index, 96, tmp_path)
    plain = dataset_of(index, augment=augment)
    cached = dataset_of(index, augment=augment, image_cache=cache)
    for key in keys():
        assert_same(render_sample(plain, key), render_sample(cached, key))


def test_each_image_of_a_block_is_decoded_once(index, monkeypatch):
    """Images of a block share decoded images, and equal those of a newly opened data set."""
    decoded = []
    plain = readers.read_source
    monkeypatch.setattr(readers, "read_source", lambda path, *sizes: decoded.append(path) or plain(path, *sizes))
    hyp = Hyperparameters(mosaic_block=6, mixup=0.5)
    block = tuple(range(len(SIZES)))
    of_block = [key._replace(block=block) for key in keys(6)]
    shared = dataset_of(index, hyp=hyp)
    samples = [render_sample(shared, key) for key in of_block]
    assert len(decoded) == len(SIZES)
    for key, sample in zip(of_block, samples):
        assert_same(sample, render_sample(dataset_of(index, hyp=hyp), key))


def test_no_images_are_kept_for_rectangular_batches(index, monkeypatch):
    """They have no mosaic, so no other sample needs an image again."""
    decoded = []
    plain = readers.read_source
    monkeypatch.setattr(readers, "read_source", lambda path, *sizes: decoded.append(path) or plain(path, *sizes))
    samples = dataset_of(index, rect=True)
    for _ in range(2):
        assert render_sample(samples, keys(1)[0]).index == 0
    assert len(decoded) == 2


@pytest.mark.parametrize("max_images", [0, 1, 2.5])
def test_recent_images_are_bounded_in_bytes(index, monkeypatch, max_images):
    reader = readers.ImageReader(index, imgsz=64)
    read = reader.read
    expected = [read(i, 0) for i in range(3)]
    max_bytes = int(max_images * max(image.nbytes for image in expected))
    decoded: list[weakref.ref[np.ndarray]] = []

    def read_and_watch(i: int, epoch: int) -> np.ndarray:
        image = read(i, epoch)
        decoded.append(weakref.ref(image))
        return image

    def kept_bytes() -> int:
        images = [ref() for ref in decoded]
        return sum(image.nbytes for image in images if image is not None)

    monkeypatch.setattr(reader, "read", read_and_watch)
    monkeypatch.setattr(readers, "MAX_RECENT_BYTES", max_bytes)
    recent = readers.RecentImages(reader, max_images=32)
    for i in (0, 1, 2, 2, 0, 1, 1):
        np.testing.assert_array_equal(recent.read(i, 0), expected[i])
        assert kept_bytes() <= max_bytes


def test_training_samples_are_well_formed(index):
    dataset = dataset_of(index, hyp=Hyperparameters(degrees=10, shear=5, perspective=0.001, mixup=0.5, flipud=0.5))
    total = 0
    for key in keys(40, canvas=(96, 128)):
        sample = render_sample(dataset, key)
        assert sample.image.shape == (96, 128, 3)
        assert sample.image.dtype == np.uint8
        assert sample.image.flags.c_contiguous
        assert sample.labels.dtype == np.float32
        corners = cxcywh_to_xyxy(sample.labels[:, 1:])
        assert (corners >= -1e-6).all()
        assert (corners <= 1 + 1e-6).all()
        total += len(sample.labels)
    assert total > 40


def test_mosaic_ends_by_the_epoch_of_the_key(index):
    still = {"scale": 0, "translate": 0, "fliplr": 0, "hsv_h": 0, "hsv_s": 0, "hsv_v": 0}
    dataset = dataset_of(index, hyp=Hyperparameters(close_mosaic=10, **still))
    letterboxed = dataset_of(index, augment=False)
    for key in keys(6):
        late = render_sample(dataset, key._replace(epoch=40))
        difference = np.abs(late.image.astype(int) - render_sample(letterboxed, key).image)
        assert np.median(difference) <= 1  # the whole image alone (its size may round differently)
        assert not np.array_equal(render_sample(dataset, key._replace(epoch=39)).image, late.image)


@pytest.mark.parametrize("canvas", [(96, 96), (128, 160), (64, 96)])
@pytest.mark.parametrize("imgsz", [48, 96, 128])
def test_letterboxed_boxes_match_the_objects(index, canvas, imgsz):
    dataset = dataset_of(index, augment=False, imgsz=imgsz)
    for key in keys(len(SIZES), canvas):
        sample = render_sample(dataset, key)
        assert sample.image.shape == (*canvas, 3)
        height, width = sample.original_hw
        gain = min(imgsz / max(height, width), canvas[0] / height, canvas[1] / width)
        np.testing.assert_allclose(sample.gain_xy, gain, atol=1 / min(height, width))  # sides are whole pixels
        boxes = scale_boxes(cxcywh_to_xyxy(sample.labels[:, 1:].astype(np.float64)), canvas[1], canvas[0])
        own = slice(index.offsets[key.index], index.offsets[key.index + 1])
        expected = xywh_to_xyxy(index.boxes_xywh_px[own]) * np.tile(sample.gain_xy, 2) + np.tile(sample.pad_xy, 2)
        np.testing.assert_allclose(boxes, expected, atol=1e-4)
        drawn = np.abs(sample.image.astype(int) - OBJECT).max(2) < 60
        covered = np.zeros(canvas, bool)
        for x1, y1, x2, y2 in boxes:
            covered[int(np.floor(y1)) : int(np.ceil(y2)), int(np.floor(x1)) : int(np.ceil(x2))] = True
            assert drawn[int(np.ceil(y1)) + 1 : int(y2) - 1, int(np.ceil(x1)) + 1 : int(x2) - 1].all()
        assert not (drawn & ~covered).any()


def test_letterbox_is_one_bilinear_resize(index):
    dataset = LoadImagesAndLabels(ImageReader(index, imgsz=96, reduces=False))
    image = cv2.imread(index.path(3))[..., ::-1]  # 90 x 300
    picture = render_sample(dataset, SampleKey(3, 0, 3, (64, 96))).image
    assert np.array_equal(picture[17 : 17 + 29], cv2.resize(np.ascontiguousarray(image), (96, 29)))
    assert (picture[:17] == 114).all()
    assert (picture[46:] == 114).all()


def transformed(entries, *, labels=((2, 0.5, 35 / 80, 0.4, 30 / 80),)):
    image = np.full((80, 100, 3), 114, np.uint8)
    image[20:50, 30:70] = OBJECT
    return UserTransforms(entries, seed=0)(image, np.array(labels, np.float32), SampleKey(0, 0, 0, (80, 100)))


def test_spatial_transforms_move_the_boxes():
    image, labels = transformed([{"name": "HorizontalFlip", "p": 1}])
    np.testing.assert_allclose(labels, [[2, 0.5, 35 / 80, 0.4, 30 / 80]], atol=1e-5)
    image, labels = transformed([{"name": "Crop", "x_min": 20, "y_min": 10, "x_max": 70, "y_max": 60, "p": 1}])
    assert image.shape == (80, 100, 3)
    x1, y1, x2, y2 = cxcywh_to_xyxy(labels[0, 1:].astype(np.float64)) * (100, 80, 100, 80)
    ys, xs = np.nonzero(image[..., 0] > (114 + OBJECT[0]) / 2)
    np.testing.assert_allclose([x1, y1, x2, y2], [xs.min(), ys.min(), xs.max() + 1, ys.max() + 1], atol=0.75)
    image, labels = transformed([{"name": "RandomCrop", "height": 40, "width": 40, "p": 1}], labels=np.zeros((0, 5)))
    assert (image.shape, labels.shape, labels.dtype) == ((80, 100, 3), (0, 5), np.float32)


@pytest.mark.parametrize("copied", [False, True])  # as in workers that are spawned
def test_every_visible_piece_of_an_ignore_region_is_kept(copied):
    """A crop of 4 % of the image shows a part of a region, but no object."""
    crops = [{"name": "Crop", "x_min": 10, "y_min": 8, "x_max": 30, "y_max": 24, "p": 1}]
    sliver = (-1, 0.1005, 0.5, 0.003, 1)  # 0.2 pixels are in the crop
    labels = [(1, 0.5, 0.5, 1, 1), (-1, 0.5, 0.5, 1, 1), (0, 0.2, 0.2, 0.1, 0.1), sliver, (-2, 0.9, 0.9, 0.1, 0.1)]
    image = np.full((80, 100, 3), 114, np.uint8)
    transforms = UserTransforms([{"name": "Blur", "p": 1}, *crops], seed=0)
    if copied:
        transforms = pickle.loads(pickle.dumps(transforms))
    _, kept = transforms(image, np.array(labels, np.float32), SampleKey(0, 0, 0, (80, 100)))
    kept = kept[np.argsort(-kept[:, 3] * kept[:, 4])]
    np.testing.assert_allclose(kept[0], (-1, 0.5, 0.5, 1, 1), atol=1e-5)
    np.testing.assert_allclose(kept[1], (0, 0.5, 0.5, 0.5, 0.5), atol=1e-5)
    np.testing.assert_allclose(kept[2], (-1, 0.005, 0.5, 0.01, 1), atol=1e-4)
    assert len(kept) == 3


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([{"name": "Blurr"}], "no transform is called 'Blurr' (did you mean 'Blur'?)"),
        ([{"name": "Blur", "blur_limits": 3}], "Blur: Argument(s) 'blur_limits' are not valid for transform Blur"),
        (
            [{"name": "Blur", "p": 2}],
            "Blur: p: Input should be less than or equal to 1 [type=less_than_equal, input_value=2, input_type=int]",
        ),
        (
            [{"name": "RandomCrop"}],
            "RandomCrop: height: Field required [type=missing, input_value={'pad_if_needed': False, ...': "
            "1.0, 'strict': False}, input_type=dict]",
        ),
        ([{"name": "OneOf"}], "OneOf needs a list of transforms under 'transforms'"),
        ([{"name": "OneOf", "transforms": [{"name": "Blur", "p": 0}]}], "OneOf: float division by zero"),
        ([{"name": "DualTransform"}], "no transform is called 'DualTransform'..."),
        ([{"name": "BaseCompose", "transforms": [{"name": "Blur"}]}], "no transform is called 'BaseCompose'..."),
        (["Blur"], "needs mappings such as {name: Blur, p: 0.1}, got 'Blur'"),
        ([{"p": 1}], "needs mappings such as {name: Blur, p: 0.1}, got {'p': 1}"),
        (
            [{"name": "RandomCrop", "height": "tall", "width": 3}],
            "RandomCrop: height: Input should be a valid integer, unable to parse string as an integer "
            "[type=int_parsing, input_value='tall', input_type=str]",
        ),
        ([{"name": "OneOf", "transforms": [{"name": "Nope"}]}], "no transform is called 'Nope' (did you mean 'NoOp'?)"),
        (
            [{"name": "RandomCrop", "height": 4000, "width": 4000, "p": 1}],
            "Crop size (height, width) exceeds image dimensions (height, width): (4000, 4000) vs (80, 100)",
        ),  # cannot work on the image
        (
            [{"name": "ToFloat", "p": 1}],
            "the pipeline returns float32 (80, 100, 3); leave out transforms that change the type or the channels",
        ),
    ],
)
def test_mistakes_in_the_list_of_transforms_are_one_line(entries, message):
    with refused(f"hyper-parameter albumentations: {message}"):
        transformed(entries)


def test_importing_albumentations_opens_no_connection(monkeypatch):
    script = (
        "import socket, warnings\n"
        "warnings.simplefilter('error', UserWarning)\n"
        "def refuse(*a, **k): raise SystemExit('connection attempt')\n"
        "socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse\n"
        "from data.render.user_transforms import UserTransforms\n"
        "UserTransforms([{'name': 'Blur'}], 0)\n"
    )
    monkeypatch.delenv("NO_ALBUMENTATIONS_UPDATE", raising=False)
    run_python("-c", script)
