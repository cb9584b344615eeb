"""The types of flags, for argparse: they refuse values with which nothing could be measured."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable

from utils.config.settings import TrainConfig

_SETTINGS = {field.name: field for field in dataclasses.fields(TrainConfig)}


def at_least(low: int) -> Callable[[str], int]:
    """Returns the type of a flag whose value is an integer from ``low`` on."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low:
            raise argparse.ArgumentTypeError(f"must be an integer, at least {low}, got {text}")
        return value

    return number


def seconds(text: str) -> float:
    """Returns a positive number of seconds."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a positive number of seconds, got {text}")
    return value


def image_size(text: str) -> int:
    """Returns the side of images in pixels, which suits models with a stride of 32."""
    value = at_least(32)(text)
    if value % 32:
        raise argparse.ArgumentTypeError(f"must be a multiple of 32, got {text}")
    return value


def choices_of(setting: str) -> tuple[str, ...]:
    """Returns the values from which train.py's flag of the same name chooses."""
    return tuple(_SETTINGS[setting].metadata["bounds"].choices)
