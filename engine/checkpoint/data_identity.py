"""Identifies the images and labels of a run."""

from __future__ import annotations

from dataclasses import dataclass

from data.index.index import DatasetIndex


@dataclass(frozen=True, kw_only=True)
class DataIdentity:
    """Identifies the training and validation samples of a run, which are tiles for data with tiles.

    Two runs have equal identities if their images have the same sizes and labels in the same order, so a copy of a data
    set has the same identity. Other pixels in images of the same size are not noticed.
    """

    train_labels: str  # `DatasetIndex.label_digest` of the training samples
    val_labels: str

    @classmethod
    def of(cls, train: DatasetIndex, val: DatasetIndex) -> DataIdentity:
        """Identifies the samples of two indexes; equal on all ranks, because `check_same_data` has compared them."""
        return cls(train_labels=train.label_digest(), val_labels=val.label_digest())
