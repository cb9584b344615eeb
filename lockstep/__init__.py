"""Trains YOLO detectors from Python.

import lockstep

run = lockstep.train("bccd.yaml", weights="yolov8n.pt", epochs=20, imgsz=320)
print(run.metrics["AP"], run.report)
(result,) = run.load()("a.jpg")
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.api import check, export, resume, train, val
from lockstep.run import Run
from utils.errors import UserError as Error
from utils.program import VERSION as __version__

if TYPE_CHECKING:
    from engine.inference.predictor import load
    from models.postprocess.tiling import Tiles

__all__ = ["Error", "Run", "Tiles", "__version__", "check", "export", "load", "resume", "train", "val"]


def __getattr__(name: str) -> Any:
    """What imports torch."""
    if name == "load":
        from engine.inference.predictor import load

        return load
    if name == "Tiles":
        from models.postprocess.tiling import Tiles

        return Tiles
    raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
