"""Imports packages that log about the machine while they are imported."""

from __future__ import annotations

import importlib
import logging
from types import ModuleType


def import_quietly(name: str) -> ModuleType:
    """Imports a module without the warnings that its package logs meanwhile: Matplotlib's about a home folder that it
    cannot write to, and about its list of fonts. Raises what the import raises."""
    logger = logging.getLogger(name.partition(".")[0])
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        return importlib.import_module(name)
    finally:
        logger.setLevel(level)
