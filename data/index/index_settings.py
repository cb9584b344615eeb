"""Defines the settings for building the index of a split (`IndexSettings`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

from utils.config.settings import TrainConfig, ValConfig
from utils.errors import UserError


@dataclass(frozen=True, slots=True)
class IndexSettings:
    """Settings for reading a split with `data.index.load.load_index`, and for selecting the part that a run uses."""

    cache_dir: str = ""  # folder of cache files and reports, see `cache_folder`
    workers: int = 2  # threads of a scan, which uses more if there are more CPUs; 0 for a single thread
    max_bad: float = 0.1  # largest fraction of images or objects that may be lost, see `data.labels.ledger`
    single_cls: bool = False  # treat all classes as one
    fraction: float = 1.0  # random fraction of the usable images, for ``seed``; smaller fractions are subsets
    seed: int = 0
    repeats: bool = True  # keep boxes that equal an earlier one of their image, because pycocotools scores them
    progress: bool = True
    decode_all: bool = False  # decode all images, not only a sample
    use_cache: bool = True  # read and write cache files
    refusals: list[str] | None = None  # messages of refusals are appended here; None: they are raised as UserError

    @classmethod
    def of_run(cls, config: TrainConfig | ValConfig, *, workers: int, progress: bool = True) -> IndexSettings:
        """Returns the settings for reading all of a split, as for validation."""
        return cls(
            cache_dir=config.cache_dir,
            workers=max(workers, 1),
            max_bad=config.max_bad,
            single_cls=config.single_cls,
            progress=progress,
        )

    @property
    def is_check(self) -> bool:
        """Whether a check reads the split, which turns what it finds into issues."""
        return self.refusals is not None

    def for_check(self, refusals: list[str]) -> IndexSettings:
        """Returns the settings for a check, which reports all problems of a split, and collects ``refusals``."""
        return replace(self, decode_all=True, use_cache=False, refusals=refusals)

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """Lets a UserError in the block pass, or adds its message to ``refusals``."""
        try:
            yield
        except UserError as error:
            if self.refusals is None:
                raise
            self.refusals.append(str(error))
