"""Defines how the index of a split is made (`IndexSettings`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

from utils.config.settings import TrainConfig, ValConfig
from utils.errors import UserError
from utils.logger import get_logger


@dataclass(frozen=True, slots=True)
class IndexSettings:
    """Says how `data.index.load.load_index` reads a split, and which part of it a run uses."""

    cache_dir: str = ""  # folder of cache files and reports, see `cache_folder`
    workers: int = 2  # threads of a scan, if there are more than CPUs: it has at least one per CPU; 0: one thread
    max_bad: float = 0.1  # largest fraction of what was labeled that may be lost, see `data.labels.ledger`
    single_cls: bool = False  # treat all classes as one
    fraction: float = 1.0  # fraction of the usable images, chosen at random by ``seed``; smaller ones are subsets
    seed: int = 0
    repeats: bool = True  # keep boxes that equal an earlier one of their image: pycocotools scores them
    progress: bool = True
    decode_all: bool = False  # decode all images, not only a sample
    use_cache: bool = True  # read and write cache files
    refuse: bool = True  # raise UserError for a split that a run must not use; False: log a warning

    @classmethod
    def of_run(cls, config: TrainConfig | ValConfig, *, workers: int, progress: bool = True) -> IndexSettings:
        """Returns how the splits of a run are read: whole, for validation."""
        return cls(
            cache_dir=config.cache_dir,
            workers=max(workers, 1),
            max_bad=config.max_bad,
            single_cls=config.single_cls,
            progress=progress,
        )

    def for_check(self) -> IndexSettings:
        """Returns how a check reads a split, which reports everything that is wrong with it."""
        return replace(self, decode_all=True, use_cache=False, refuse=False)

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """Lets a UserError in the block pass, or logs it as a warning instead, as ``refuse`` says."""
        try:
            yield
        except UserError as error:
            if self.refuse:
                raise
            get_logger().warning("%s", error)
