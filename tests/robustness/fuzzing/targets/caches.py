"""Changed caches return the same as their sources."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from data.cache.disk import mapped_environment
from data.index.index import DatasetIndex
from tests.robustness.fuzzing.targets.case import Case, must_work
from tests.robustness.fuzzing.world import cached_pixels, scan
from utils.files.array_file import open_arrays, write_arrays


def same_index(a: DatasetIndex, b: DatasetIndex) -> None:
    assert list(a.paths) == list(b.paths)
    assert list(a.report.findings) == list(b.report.findings)
    for name in ("image_hw", "offsets", "boxes_xywh_px", "classes", "crowd", "area_px"):
        assert np.array_equal(getattr(a, name), getattr(b, name)), name


def index_cache(case: Case) -> str:
    """Whatever the cache files contain, the index equals that of a scan."""
    root, source, expected = case.world.index_cache
    cache = case.copy(source, "cache")
    path = case.rng.choice(sorted(cache.iterdir()))
    if path.suffix == ".index" and case.rng.random() < 0.3:  # as another version could write it
        meta, arrays = open_arrays(path)
        write_arrays(path, meta | {"version": case.rng.choice(([1, 1], [3, 2], None, "x", 2))}, arrays)
        case.messages.append("another version")
    else:
        case.change(path, 1.0, [p.read_bytes() for p in cache.iterdir()])
    with must_work():
        same_index(scan(root, "yolo", cache), expected)
    return "the index of a scan"


def image_cache(case: Case) -> str:
    """A damaged disk cache gives the pixels of the files, is created again, or is refused by name."""
    index, files, pixels = case.world.image_cache
    copies = [Path(shutil.copy2(file, case.folder)) for file in files]  # with the times, by which a cache is known
    case.files += copies
    case.change(case.rng.choice(copies), 1.0)
    mapped_environment.cache_clear()
    for i, (a, b) in enumerate(zip(cached_pixels(index, case.folder), pixels)):
        assert np.array_equal(a, b), f"image {i}: other pixels"
    return "the pixels of the files"
