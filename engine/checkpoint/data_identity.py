"""Identifies the images and labels of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from data.index.index import DatasetIndex


@dataclass(frozen=True, kw_only=True)
class DataIdentity:
    """Identifies the training and validation samples of a run, as its checkpoints store it; "" is not known."""

    fingerprint: str = ""  # depends on names and modification times of files, which differ between copies
    train_labels: str = ""  # `DatasetIndex.label_digest` of the training samples
    val_labels: str = ""

    @classmethod
    def of(cls, train: DatasetIndex, val: DatasetIndex) -> DataIdentity:
        """Identifies two indexes of samples, which are tiles for data with tiles."""
        return cls(
            fingerprint=f"{train.fingerprint_as_used()}-{val.fingerprint_as_used()}",
            train_labels=train.label_digest(),
            val_labels=val.label_digest(),
        )

    @classmethod
    def stored_in(cls, data: Mapping[str, Any]) -> DataIdentity:
        """Returns the identity in `RunDescription.data`."""
        return cls(**{item.name: str(data.get(item.name, "")) for item in fields(cls)})

    @property
    def has_label_digests(self) -> bool:
        """False for a checkpoint of an earlier version."""
        return self.train_labels != "" and self.val_labels != ""

    def is_same(self, other: DataIdentity) -> bool:
        """Returns True if both have images of the same sizes with the same labels, in the same order, so that a copy of
        a data set is the same. Without label digests, the fingerprints decide."""
        if self.has_label_digests and other.has_label_digests:
            return (self.train_labels, self.val_labels) == (other.train_labels, other.val_labels)
        return self.fingerprint == other.fingerprint

    def may_validate_alike(self, other: DataIdentity) -> bool:
        """Returns True unless the validation images are known to have other sizes or labels."""
        are_known = self.val_labels != "" and other.val_labels != ""
        return not are_known or self.val_labels == other.val_labels
