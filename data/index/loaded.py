"""Defines what is read of a split before a run chooses the part that it uses (`LoadedSplit`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from data.index.index import DatasetIndex, Scan, digest_of
from data.index.selection import Selection
from data.source.dataset_spec import DatasetSpec
from data.source.files import Listing
from utils.errors import UserError
from utils.files.paths import normal_path
from utils.logger import get_logger


@dataclass(frozen=True, slots=True)
class LoadedSplit:
    """Holds a split as `from_files`, `from_shards` or `joined` returns it."""

    index: DatasetIndex  # all usable images, with the classes of the labels; then those that a run uses
    note: str = ""  # how it was read, for the log, such as " (cached)"
    scans: tuple[Scan, ...] = ()  # for a check: what has been scanned, in the order of the images
    listing: Listing | None = None  # its files; None: shards, or data sets that are joined
    first_label: str = ""  # name of a label file or of the shards, for messages
    report_path: Path | None = None  # where the report of a scan may be
    is_single_cls: bool = False  # its classes are merged into one already
    is_joined: bool = False  # its parts have been reported and checked against ``max_bad`` one by one
    too_much_lost: str = ""  # for a check: the message about more losses than ``max_bad``, of which it has warned

    def select(self, selection: Selection) -> LoadedSplit:
        """Returns the split with the images of ``selection``, which has been made from its index."""
        scans = []
        first = 0
        for scan in self.scans:
            last = first + len(scan.index)
            images = selection.images
            scans.append(scan.take(images[(images >= first) & (images < last)] - first))
            first = last
        return replace(self, index=selection.index, scans=tuple(scans))

    @property
    def has_labels(self) -> bool:
        """Whether any image has a label file, as far as is known."""
        return self.listing is None or any(file.stamp is not None for file in self.listing.labels)


def refuse(reason: str, *, is_check: bool) -> None:
    """Raises UserError, or warns for a check; does nothing for ""."""
    if not reason:
        return
    if not is_check:
        raise UserError(reason)
    get_logger().warning("%s", reason)


def source_name(spec: DatasetSpec, split: str, *settings: object) -> str:
    """Returns the value of `DatasetIndex.source`."""
    return f"{split}-{digest_of(str(normal_path(spec.source)), *settings)}"
