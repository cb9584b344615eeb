"""The settings of ``python -m tools.check``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """The flags of a check, named as on the command line."""

    data: str
    split: list[str]  # empty: all
    imgsz: int  # 0: the checkpoint's, or that of training
    weights: str  # "" for a check without a model
    trust: bool
    min_score: float  # minimum probability of the label errors that are reported
    device: str
    workers: int  # below 0: one per core
    json: bool
    out: Path | None  # folder of the page
    noplots: bool
