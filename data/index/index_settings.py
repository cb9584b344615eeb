"""Defines how the index of a split is made (`IndexSettings`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class IndexSettings:
    """Says how `data.index.load.load_index` reads a split, and which part of it a run uses."""

    cache_dir: str = ""  # folder of cache files and reports, see `cache_folder`
    workers: int = 2  # threads of a scan; 0: the calling thread only, else at least one thread per CPU
    max_bad: float = 0.1  # largest fraction of what was labeled that may be lost, see `data.labels.ledger`
    single_cls: bool = False  # treat all classes as one
    fraction: float = 1.0  # fraction of the usable images, chosen at random by ``seed``; smaller ones are subsets
    seed: int = 0
    repeats: bool = True  # keep boxes that equal an earlier one of their image: pycocotools scores them
    progress: bool = True
    is_check: bool = False  # decode all images, use no cache, and warn where a run would be refused
