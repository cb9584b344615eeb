"""Trains YOLO detectors."""

from utils.program import VERSION as __version__

__all__ = ["__version__"]
