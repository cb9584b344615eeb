"""Trains YOLO detectors from Python.

import lockstep

run = lockstep.train("bccd.yaml", weights="yolov8n.pt", epochs=20, imgsz=320)
print(run.metrics["AP"], run.report)
(result,) = run.load()("a.jpg")
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from utils.errors import UserError as Error
from utils.program import VERSION as __version__

if TYPE_CHECKING:
    from engine.inference.predict import load
    from lockstep.api import check, export, resume, train, val
    from lockstep.run import Run
    from models.postprocess.tiles import Tiles

__all__ = ["Error", "Run", "Tiles", "__version__", "check", "export", "load", "resume", "train", "val"]


def __getattr__(name: str) -> Any:
    """Imports a function or class when it is first used: the command `lockstep` needs none of them, and `load` and
    `Tiles` import torch."""
    match name:
        case "check" | "export" | "resume" | "train" | "val":
            from lockstep import api

            return getattr(api, name)
        case "Run":
            from lockstep.run import Run

            return Run
        case "load":
            from engine.inference.predict import load

            return load
        case "Tiles":
            from models.postprocess.tiles import Tiles

            return Tiles
    from utils.config.words import WORDS, attribute_error

    error = attribute_error("package", "lockstep", name)
    # "from lockstep import ..." would hide the message of an AttributeError.
    is_import = sys._getframe(1).f_code.co_filename == "<frozen importlib._bootstrap>"
    raise ImportError(str(error), name=name) if is_import and name in WORDS["package"] else error


def __dir__() -> list[str]:
    return __all__
