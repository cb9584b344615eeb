"""Defines what is read of a split before a run chooses the part that it uses (`LoadedSplit`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from data.index.index import DatasetIndex, Scan, digest_of
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
    scans: tuple[Scan, ...] = ()  # for a check: see `DatasetIndex.origins`
    listing: Listing | None = None  # its files; None: shards, or data sets that are joined
    first_label: str = ""  # name of a label file or of the shards, for messages
    report_path: Path | None = None  # where the report of a scan may be
    has_lost_too_much: bool = False  # for a check: more than ``max_bad`` is lost, of which it has warned

    @property
    def has_labels(self) -> bool:
        """Whether any image has a label file, as far as is known."""
        return self.listing is None or any(file.stamp is not None for file in self.listing.labels)


def raise_or_warn(message: str, *, is_check: bool) -> None:
    """Raises UserError, or warns for a check; does nothing for ""."""
    if not message:
        return
    if not is_check:
        raise UserError(message)
    get_logger().warning("%s", message)


def source_name(spec: DatasetSpec, split: str, *settings: object) -> str:
    """Returns the value of `DatasetIndex.source`."""
    return f"{split}-{digest_of(str(normal_path(spec.source)), *settings)}"
