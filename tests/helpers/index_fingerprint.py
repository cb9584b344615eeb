"""Tells whether two data sets share the cache of their index."""

from __future__ import annotations

from data.index.cache_file import file_rows, fingerprint_of

from data.dataset.spec import DatasetSpec
from data.listing.listing import list_split


def index_fingerprint(spec: DatasetSpec, split: str = "train") -> str:
    """Returns the fingerprint by which the cache of a split's index is found."""
    labeled = spec.as_labeled()
    listing = list_split(labeled, split)
    return fingerprint_of(labeled, split, listing, file_rows(listing.images), single_cls=False)
