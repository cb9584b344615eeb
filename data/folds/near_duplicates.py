"""Finds near-duplicate images: copies that were encoded again, resized, or made brighter or darker.

Each image gets a perceptual hash: 64 bits, one for each low frequency of its gray thumbnail (a discrete cosine
transform), set if the coefficient is above the median. Images whose hashes differ in few bits are compared by the
correlation of their thumbnails, which tells images with the same coarse layout apart. Images without contrast have
random hashes and are not compared. Mirrored, rotated and strongly cropped copies are not found.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import cv2
import numpy as np

from data.images.decode import read_reduced
from data.layouts import split_of
from utils.errors import UserError
from utils.logger import progress
from utils.machine.threads import map_ahead
from utils.pixels import RGB8, PixelFormat, as_rgb8

SIDE = 32  # side of a thumbnail, pixels
MAX_DISTANCE = 7  # bits in which the hashes of near-duplicates may differ
MIN_CORRELATION = 0.95
MIN_CONTRAST = 2.0  # standard deviation of a thumbnail, gray levels
_CHUNK_THUMBNAILS = 4096  # thumbnails hashed at a time
_CHUNK_ROWS = 256  # hashes compared with all others at a time
_CHUNK_PAIRS = 1 << 14  # pairs of thumbnails correlated at a time


class Signatures(NamedTuple):
    """Features by which N images are compared."""

    hashes: np.ndarray  # uint64 (N,)
    thumbnails: np.ndarray  # uint8 (N, 32, 32) gray
    comparable: np.ndarray  # bool (N,) readable and with enough contrast


def thumbnail(image: np.ndarray) -> np.ndarray:
    """Reduces an image, uint8 (H, W, 3) RGB of any aspect ratio, to a gray thumbnail, uint8 (32, 32)."""
    small = cv2.resize(image, (SIDE, SIDE), interpolation=cv2.INTER_AREA)
    return cv2.cvtColor(small, cv2.COLOR_RGB2GRAY)


def perceptual_hashes(thumbnails: np.ndarray) -> np.ndarray:
    """Returns the hashes, uint64 (N,), of thumbnails, uint8 (N, 32, 32)."""
    frequency = np.arange(SIDE)[:, None]
    position = np.arange(SIDE)[None]
    basis = np.cos(np.pi * frequency * (2 * position + 1) / (2 * SIDE))  # DCT-II
    rows, columns = np.indices((SIDE, SIDE)).reshape(2, -1)
    lowest = np.argsort(rows + columns, kind="stable")[1:65]  # the 64 lowest after the mean
    hashes = np.zeros(len(thumbnails), np.uint64)
    for start in range(0, len(thumbnails), _CHUNK_THUMBNAILS):
        block = thumbnails[start : start + _CHUNK_THUMBNAILS].astype(np.float64)
        spectrum = (basis @ block @ basis.T).reshape(len(block), -1)[:, lowest]
        bits = spectrum > np.median(spectrum, axis=1, keepdims=True)
        packed = np.ascontiguousarray(np.packbits(bits, axis=1))
        hashes[start : start + _CHUNK_THUMBNAILS] = packed.view(">u8")[:, 0]
    return hashes


def close_pairs(hashes: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields all pairs of hashes, uint64 (N,), that differ in at most `MAX_DISTANCE` bits: 5 s for 118,000 hashes."""
    for start in range(0, len(hashes), _CHUNK_ROWS):
        rows = range(start, min(start + _CHUNK_ROWS, len(hashes)))
        near = [np.flatnonzero(np.bitwise_count(hashes[i:] ^ hashes[i]) <= MAX_DISTANCE)[1:] + i for i in rows]
        yield np.repeat(rows, list(map(len, near))), np.concatenate(near)


def correlation(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns the correlations, float64 (P,), of pairs of thumbnails, uint8 (P, 32, 32) each."""
    a = _centered(a)
    b = _centered(b)
    norm = np.sqrt((a * a).sum(1) * (b * b).sum(1))
    return np.divide((a * b).sum(1), norm, out=np.zeros_like(norm), where=norm > 0).astype(np.float64)


def _centered(thumbnails: np.ndarray) -> np.ndarray:
    """Returns thumbnails minus their means, float32 (P, 1024)."""
    flat = thumbnails.reshape(len(thumbnails), SIDE * SIDE).astype(np.float32)
    return flat - flat.mean(1, keepdims=True)


def duplicate_groups(signatures: Signatures) -> list[np.ndarray]:
    """Returns groups of two or more near-duplicates, each int64 ascending. A chain of near-duplicates is one group."""
    numbers = np.flatnonzero(signatures.comparable)
    parent = np.arange(len(signatures.hashes))
    # Images with equal hashes are each compared with the one before: a thousand copies need a thousand comparisons.
    order = numbers[np.argsort(signatures.hashes[numbers], kind="stable")]
    equal = np.flatnonzero(signatures.hashes[order[1:]] == signatures.hashes[order[:-1]])
    parent = _join_alike(parent, order[equal], order[equal + 1], signatures.thumbnails)
    representatives = numbers[parent[numbers] == numbers]
    for first, second in close_pairs(signatures.hashes[representatives]):
        parent = _join_alike(parent, representatives[first], representatives[second], signatures.thumbnails)
    by_root = np.argsort(parent, kind="stable")
    groups = np.split(by_root, np.flatnonzero(np.diff(parent[by_root])) + 1)
    return [group for group in groups if len(group) > 1]


def _join_alike(parent: np.ndarray, a: np.ndarray, b: np.ndarray, thumbnails: np.ndarray) -> np.ndarray:
    """Joins the groups of the pairs whose thumbnails correlate, as `join_groups` does."""
    for start in range(0, len(a), _CHUNK_PAIRS):
        i = a[start : start + _CHUNK_PAIRS]
        j = b[start : start + _CHUNK_PAIRS]
        apart = parent[i] != parent[j]
        i = i[apart]
        j = j[apart]
        alike = correlation(thumbnails[i], thumbnails[j]) >= MIN_CORRELATION
        parent = join_groups(parent, i[alike], j[alike])
    return parent


def join_groups(parent: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Joins the groups of ``a`` and ``b``, both int64 (P,), pair by pair.

    ``parent``: the smallest member of each item's group, int64 (N,). Returns the new ``parent``.
    """
    while (parent[a] != parent[b]).any():
        smaller = np.minimum(parent[a], parent[b])
        larger = np.maximum(parent[a], parent[b])
        a = smaller
        b = larger
        parent = parent.copy()
        np.minimum.at(parent, larger, smaller)
        while (parent[parent] != parent).any():
            parent = parent[parent]
    return parent


def read_signatures(
    paths: Sequence[str], workers: int, pixels: PixelFormat = RGB8
) -> tuple[Signatures, dict[int, str]]:
    """Reads the signatures in ``workers`` threads. Returns the signatures, and by number why images
    cannot be read."""
    thumbnails = np.zeros((len(paths), SIDE, SIDE), np.uint8)
    comparable = np.zeros(len(paths), bool)
    problems: dict[int, str] = {}

    def read(i: int) -> None:
        try:
            image, _ = read_reduced(paths[i], (2 * SIDE, 2 * SIDE), pixels)
        except UserError as error:
            problems[i] = str(error).removeprefix(f"{paths[i]}: ")
        else:
            thumbnails[i] = thumbnail(as_rgb8(image))
            comparable[i] = thumbnails[i].std() >= MIN_CONTRAST

    done = map_ahead(read, range(len(paths)), threads=workers)
    for _ in progress(done, desc="comparing images", total=len(paths)):
        pass
    return Signatures(perceptual_hashes(thumbnails), thumbnails, comparable), problems


def roboflow_copies(names: Sequence[str]) -> list[np.ndarray]:
    """Returns groups, int64, of two or more images that Roboflow has made from one image, by names such as
    ``a_jpg.rf.HASH.jpg``.

    The copies are in one folder, or in the folders of two splits of one export, such as ``train/images`` and
    ``valid/images``. An image of the same name in another folder may belong to another export.
    """
    groups: dict[tuple[str, ...], list[int]] = {}
    for i, name in enumerate(names):
        *folders, base = name.split("/")
        match = re.fullmatch(r"(.+)\.rf\.\w+\.\w+", base)
        if match:
            export = [folder for folder in folders if not split_of(folder)]
            groups.setdefault((*export, match[1]), []).append(i)
    return [np.array(group) for group in groups.values() if len(group) > 1]
