"""Divides a data set into folds: images of a group stay together, and classes are spread evenly.

Legend: N images, G groups, C classes, K folds.
"""

from __future__ import annotations

import numpy as np

from data.index import DatasetIndex
from utils.errors import UserError
from utils.rng import keyed_generator, named_stream
from utils.strings import counted, listed

MAX_MOVES = 1000  # maximum number of moves of groups to even out the folds
_IMAGES = -1  # column of the image counts, after one column per class
_MIN_IMPROVEMENT = 1e-9  # minimum reduction of the minimized sum by a move


def class_counts(index: DatasetIndex) -> np.ndarray:
    """Counts the boxes of each class in each image, int64 (N, C), without crowd regions."""
    cell = (index.image_of_box * len(index.names) + index.classes)[~index.crowd]
    return np.bincount(cell, minlength=len(index) * len(index.names)).reshape(len(index), -1)


def assign_folds(group: np.ndarray, counts: np.ndarray, folds: int, seed: int) -> np.ndarray:
    """Returns the fold of each image, int64 (N,) from 0, by iterative stratification (Sechidis et al. 2011) of groups.

    The rarest remaining class is distributed first. Its groups, in descending order of boxes, go to the fold that lacks
    the most boxes of this class; ties go to the fold that lacks the most images. Groups without boxes go to the folds
    with the fewest images. Moves of single groups then even out the frequent classes.

    ``group``: int64 (N,), from 0; ``counts``: `class_counts`. Raises UserError if there are fewer groups than folds.
    """
    groups = int(group.max(initial=-1)) + 1
    if groups < folds:
        raise UserError(f"--folds {folds}: the images form only {counted(groups, 'group')}; use fewer folds")
    boxes = np.zeros((groups, counts.shape[1]), np.int64)
    np.add.at(boxes, group, counts)
    images = np.bincount(group, minlength=groups)
    shuffled = keyed_generator(seed, named_stream("folds")).permutation(groups)
    fold_of = _stratify(boxes, images, shuffled, folds)
    _even_out(fold_of, np.column_stack([boxes, images]).astype(np.float64), folds)
    _fill_empty_folds(fold_of, images, folds)
    return fold_of[group]


def _stratify(boxes: np.ndarray, images: np.ndarray, shuffled: np.ndarray, folds: int) -> np.ndarray:
    """Distributes groups to folds, class by class.

    Args:
        boxes: int64 (G, C), boxes of each class in each group.
        images: int64 (G,), images of each group.
        shuffled: int64 (G,), all groups, in the order that breaks ties.

    Returns the fold of each group, int64 (G,).
    """
    counts = np.column_stack([boxes, images])  # images count as one more class, distributed last
    fold_of = np.full(len(counts), -1)
    missing = np.tile(counts.sum(0) / folds, (folds, 1))  # float64 (K, C + 1)
    totals = boxes.sum(0)  # of the remaining groups
    remaining = shuffled
    while len(remaining):
        column = _rarest_class(totals)
        members = remaining[counts[remaining, column] > 0] if column != _IMAGES else remaining
        members = members[np.argsort(-counts[members, column], kind="stable")]
        for group in members.tolist():
            fold = _fold_lacking_most(missing, column)
            fold_of[group] = fold
            missing[fold] -= counts[group]
            totals -= boxes[group]
        remaining = shuffled[fold_of[shuffled] < 0]
    return fold_of


def _rarest_class(totals: np.ndarray) -> int:
    """Returns the class with the fewest boxes, at least one, by the boxes of each class, int64 (C,); `_IMAGES` if there
    is no box."""
    if not totals.any():
        return _IMAGES
    return int(np.flatnonzero(totals == totals[totals > 0].min())[0])


def _fold_lacking_most(missing: np.ndarray, column: int) -> int:
    """Returns the fold that lacks the most in a ``column`` of ``missing``, float64 (K, C + 1); ties go to the fold that
    lacks the most images."""
    lacks_most = np.flatnonzero(missing[:, column] == missing[:, column].max())
    return int(lacks_most[np.argmax(missing[lacks_most, _IMAGES])])


def _even_out(fold_of: np.ndarray, counts: np.ndarray, folds: int) -> None:
    """Moves single groups as long as that makes the folds more even: distributing the rarest class first leaves the
    other classes uneven. Minimizes the squared relative difference from the even share, summed over folds and columns.
    ``fold_of``: int64 (G,), changed in place; ``counts``: float64 (G, columns)."""
    counts = counts[:, counts.sum(0) > 0]
    relative = counts * folds / counts.sum(0)
    squared_norm = (relative**2).sum(1)
    totals = np.zeros((folds, relative.shape[1]))
    np.add.at(totals, fold_of, relative)
    rows = np.arange(len(counts))
    for _ in range(MAX_MOVES):
        towards = relative @ totals.T  # (G, K)
        change = towards - towards[rows, fold_of][:, None] + squared_norm[:, None]  # half of the change
        change[rows, fold_of] = 0.0
        group, fold = np.unravel_index(change.argmin(), change.shape)
        if change[group, fold] >= -_MIN_IMPROVEMENT:
            return
        totals[fold_of[group]] -= relative[group]
        totals[fold] += relative[group]
        fold_of[group] = fold


def _fill_empty_folds(fold_of: np.ndarray, images: np.ndarray, folds: int) -> None:
    """Moves the smallest group of the fold with the most groups to each empty fold. ``fold_of``: int64 (G,), changed in
    place; ``images``: int64 (G,), images of each group."""
    groups_in = np.bincount(fold_of, minlength=folds)
    while groups_in.min() == 0:
        members = np.flatnonzero(fold_of == groups_in.argmax())
        fold_of[members[images[members].argmin()]] = groups_in.argmin()
        groups_in = np.bincount(fold_of, minlength=folds)


def rare_classes(index: DatasetIndex, folds: int) -> str:
    """Returns a note about classes that cannot be in every fold; "" if there are none."""
    total = class_counts(index).sum(0)
    rare = [f"{name} ({count})" for name, count in zip(index.names, total.tolist()) if count < folds]
    if not rare:
        return ""
    count = counted(len(rare), "class")
    return f"{count} with fewer boxes than there are folds, so missing in some: {listed(rare, 10)}"
