"""Near-duplicates: which copies are found, and which images are told apart."""

from __future__ import annotations

import cv2
import numpy as np
import pytest

from data.folds.near_duplicates import (
    Signatures,
    duplicate_groups,
    join_groups,
    perceptual_hashes,
    roboflow_copies,
    thumbnail,
)
from tests.helpers.synthetic_index import smooth_image


def signatures_of(images: list[np.ndarray]) -> Signatures:
    thumbnails = np.stack([thumbnail(image) for image in images])
    contrast = thumbnails.reshape(len(images), -1).std(1)
    return Signatures(perceptual_hashes(thumbnails), thumbnails, contrast >= 2)


def jpeg(image: np.ndarray, quality: int) -> np.ndarray:
    return cv2.imdecode(cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, quality])[1], cv2.IMREAD_COLOR)


COPIES = {
    "encoded again": lambda image: jpeg(image, 40),
    "half the size": lambda image: cv2.resize(image, None, fx=0.5, fy=0.5, interpolation=cv2.INTER_AREA),
    "enlarged": lambda image: cv2.resize(image, None, fx=1.7, fy=1.7, interpolation=cv2.INTER_CUBIC),
    "another aspect ratio": lambda image: cv2.resize(image, (200, 200), interpolation=cv2.INTER_LINEAR),
    "brighter": lambda image: cv2.convertScaleAbs(image, alpha=1, beta=25),
    "darker, less contrast": lambda image: cv2.convertScaleAbs(image, alpha=0.6, beta=10),
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_are_found_and_other_images_are_not(name: str):
    rng = np.random.default_rng(3)
    images = [smooth_image(rng, 240, 320) for _ in range(40)]
    copies = [COPIES[name](image) for image in images[:10]]
    groups = duplicate_groups(signatures_of(images + copies))
    assert [group.tolist() for group in groups] == [[i, 40 + i] for i in range(10)]


def test_images_without_contrast_are_not_compared():
    rng = np.random.default_rng(0)
    flat = [np.full((64, 64, 3), value, np.uint8) for value in (0, 0, 30, 200, 255)]
    noisy = [np.clip(rng.normal(128, 4, (256, 256, 3)), 0, 255).astype(np.uint8) for _ in range(5)]
    assert duplicate_groups(signatures_of(flat + noisy)) == []


def test_equal_hashes_of_different_images_are_told_apart():
    """The thumbnails decide, since the hashes are made equal."""
    rng = np.random.default_rng(1)
    signatures = signatures_of([smooth_image(rng, 96, 96) for _ in range(6)])
    assert duplicate_groups(signatures._replace(hashes=np.zeros(6, np.uint64))) == []


@pytest.mark.parametrize(("items", "pairs"), [(10, 8), (1000, 900), (1000, 3000)])
def test_joined_groups_are_those_of_a_union_find(items, pairs):
    a, b = np.random.default_rng(pairs).integers(0, items, (2, pairs))
    parent = list(range(items))

    def root(i: int) -> int:
        while parent[i] != i:
            i = parent[i]
        return i

    for x, y in zip(a.tolist(), b.tolist()):
        x, y = root(x), root(y)
        parent[max(x, y)] = min(x, y)
    half = join_groups(np.arange(items), a[::2], b[::2])
    np.testing.assert_array_equal(join_groups(half, a, b), [root(i) for i in range(items)])


def test_copies_of_roboflow_are_those_of_one_export():
    names = [
        "a/train/images/0001_jpg.rf.x.jpg",
        "a/train/images/0001_jpg.rf.y.jpg",
        "b/train/images/0001_jpg.rf.z.jpg",
        "a/valid/images/0001_jpg.rf.w.jpg",
        "b/train/images/0002_jpg.rf.x.jpg",
    ]
    assert [group.tolist() for group in roboflow_copies(names)] == [[0, 1, 3]]
