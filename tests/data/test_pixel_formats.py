"""Images of other channels and bits pass through caches, rendering and loaders as RGB images of 8 bits do."""

from __future__ import annotations

from dataclasses import replace

import cv2
import numpy as np
import pytest

from data.samples.dataset import AugmentedImages
from data.samples.readers import ImageReader
from tests.data.data_set import refusal
from tests.helpers.synthetic_index import GEOMETRIES, render_samples, write_rectangles
from utils.batches import SampleKey
from utils.config.settings import Hyperparameters
from utils.pixels import PixelFormat

SIZES = [(60, 80), (200, 100), (64, 64), (90, 300), (150, 150), (97, 131)]
NO_COLOR = {"hsv_h": 0.0, "hsv_s": 0.0, "hsv_v": 0.0}
SEVEN16 = PixelFormat(7, 16)


@pytest.fixture(scope="module")
def rgb(tmp_path_factory):
    return write_rectangles(tmp_path_factory.mktemp("rgb"), SIZES, objects=3)


@pytest.fixture(scope="module")
def made(rgb, tmp_path_factory):
    """Yields an index per format of the same images, whose channels are red, green, blue, red, ..."""
    folder = tmp_path_factory.mktemp("made")
    found = {}
    for pixels in (PixelFormat(7), SEVEN16, PixelFormat(1), PixelFormat(2, 12), PixelFormat(3, 16)):
        paths = []
        for i in range(len(rgb)):
            image = cv2.imread(rgb.path(i))[..., [2, 1, 0, 2, 1, 0, 2][: pixels.channels]]
            paths.append(str(folder / f"{pixels.channels}-{pixels.bits}-{i:03d}.npy"))
            np.save(paths[-1], (image.astype(np.uint32) << pixels.bits - 8).astype(pixels.dtype))
        flat = type(rgb.paths).of(paths)
        found[pixels] = replace(rgb, paths=flat, pixels=pixels)
    return found


def rendered(index, keys, **options):
    hyp = options.pop("hyp", None) or Hyperparameters(degrees=5, mixup=0.5, **NO_COLOR)
    reader = ImageReader(index, imgsz=96, image_cache=options.pop("image_cache", None))
    return render_samples(AugmentedImages(reader, hyp=hyp, seed=2, **options), keys)


def keys(count=10, canvas=(96, 96)):
    return [SampleKey(p % len(SIZES), 0, p, canvas) for p in range(count)]


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_each_channel_is_rendered_as_in_an_rgb_image(rgb, made, geometry):
    hyp = Hyperparameters(mixup=0.5, **{**GEOMETRIES[geometry], **NO_COLOR})
    expected = rendered(rgb, keys(), hyp=hyp)
    for pixels, index in made.items():
        for sample, of_rgb in zip(rendered(index, keys(), hyp=hyp), expected):
            assert sample.image.shape == (96, 96, pixels.channels)
            assert sample.image.dtype == pixels.dtype
            np.testing.assert_array_equal(sample.labels, of_rgb.labels)
            wanted = of_rgb.image[..., [0, 1, 2, 0, 1, 2, 0][: pixels.channels]].astype(int)
            if pixels.bits == 8:
                difference = np.abs(sample.image - wanted)
            else:
                difference = np.abs(sample.image / 257 - wanted) - 1.6  # the files hold 255 / 256; 8 bits are rounded
            # OpenCV has kernels of its own for 3 channels; those of others warp to 1/32 pixel.
            assert difference.max() <= (1 if geometry in ("plain", "zoom", "flips") else 10)
            assert difference.mean() < 0.5


def test_16_bits_keep_contrasts_that_8_bits_lose(tmp_path):
    y, x = np.mgrid[:64, :64]
    dark = np.where((x // 16 + y // 16) % 2, 100, 60).astype(np.uint16)  # both are 0 in 8 bits
    cv2.imwrite(str(tmp_path / "a.png"), dark)
    index = write_rectangles(tmp_path / "one", [(64, 64)])
    index = replace(index, paths=type(index.paths).of([str(tmp_path / "a.png")]))
    hyp = Hyperparameters(mosaic=0.0, mixup=0.0, scale=0.3, degrees=8.0, fliplr=0.5, **NO_COLOR)
    wide = rendered(
        replace(index, pixels=PixelFormat(1, 16)), [SampleKey(0, 0, p, (64, 64)) for p in range(8)], hyp=hyp
    )
    for sample in wide:
        inside = sample.image[24:40, 24:40]
        assert 60 <= inside.min() < 70
        assert 90 < inside.max() <= 100
        assert set(np.unique(sample.image[sample.image > 100])) <= {29298}  # padding: 114 of 255
    (narrow,) = rendered(index, [SampleKey(0, 0, 0, (64, 64))], hyp=hyp)
    assert set(np.unique(narrow.image)) <= {0, 114}


def test_a_data_set_of_arrays_is_scanned_with_the_format_of_its_yaml(data):
    pytest.importorskip("tifffile")
    image = np.zeros((30, 40, 5), np.uint16)
    data.write("labels/train/0a.txt labels/train/1a.txt images/train/0a.txt:0")  # no image: 0a.npy is not a copy of it
    for number in range(2):
        np.save(data.root / f"images/train/{number}a.npy", image)
    cv2.imwritemulti(str(data.root / "images/train/1a.tif"), [image[..., 0]] * 5)  # of which 1a.npy is a copy
    data.yaml(train="images/train", channels=5, bits=16)
    for _ in range(2):  # scanned, then cached
        index = data.index()
        assert index.pixels == PixelFormat(5, 16)
        assert list(index.paths) == ["images/train/0a.npy", "images/train/1a.tif"]
    data.yaml(train="images/train", channels=4, bits=16)
    assert "images/train/0a.npy: 5 channels" in refusal(data.index)
