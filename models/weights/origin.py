"""The origin of weights and their license: stored in checkpoints and exported files, or looked up in the catalog of
public weights."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from models.weights.catalog import UNKNOWN, catalog_name, known_weights
from utils.files.safe_io import sha256_of

if TYPE_CHECKING:
    from models.weights.read import StoredWeights


class Origin(NamedTuple):
    """The weights from which others were trained, and the license; `UNKNOWN` where that was not recorded."""

    weights: str  # weights that training started from, and the teacher
    license: str  # of the trained weights


RANDOM = Origin("random weights", "yours to choose (trained from random weights)")


def origin_of(info: Mapping[str, Any], path: Path) -> Origin:
    """Returns the origin of a checkpoint with the content ``info``."""
    stored = info.get("origin")
    if stored and isinstance(stored, dict):
        return Origin(*(str(stored.get(name, UNKNOWN)) for name in Origin._fields))
    return public_origin(path)


def origin_of_run(start: StoredWeights) -> Origin:
    """Returns the origin of the checkpoints of a run that starts from these weights."""
    if not start.is_ours:
        return public_origin(start.path)
    start_origin = origin_of(start.content, start.path)
    return start_origin._replace(weights=f"{start.path.name}, trained from {start_origin.weights}")


def taught_by(origin: Origin, teacher: Origin) -> Origin:
    """Returns the origin of a run from ``origin`` that also learns from a teacher's outputs: both licenses apply."""
    licenses = dict.fromkeys((origin.license, teacher.license))
    demanding = [license for license in licenses if license != RANDOM.license]  # one's own weights demand nothing
    return Origin(f"{origin.weights}, taught by {teacher.weights}", " and ".join(demanding) or RANDOM.license)


def public_origin(path: Path) -> Origin:
    """Looks up a file in the catalog by its checksum; by its name if the checksum is not known or the file missing."""
    catalog = known_weights()
    digest = ""
    if path.is_file():
        status = path.stat()
        digest = _sha256_of(path, status.st_size, status.st_mtime_ns)
    for name, entry in catalog.items():
        if digest and entry.sha256.lower() == digest:
            return Origin(f"{name} (public file)", entry.license)
    namesake = catalog.get(catalog_name(path.name))
    if namesake is None or (digest and namesake.sha256):  # not in the catalog, or another file of the same name
        return Origin(f"{path.name} (unknown origin)", UNKNOWN)
    return Origin(path.name, f"{namesake.license}, if it was the public file of this name")


@functools.cache  # a command may ask for the origin of its weights several times
def _sha256_of(path: Path, _size: int, _modified_ns: int) -> str:
    return sha256_of(path)
