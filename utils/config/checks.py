"""Checks of settings against what a model or a data set has: image sizes and classes."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping

from utils.config.settings import MOST_IMGSZ
from utils.errors import UserError
from utils.files.schema import suggestion


def class_numbers(classes: Iterable[int | str], names: Mapping[int, str], owner: str) -> tuple[int, ...]:
    """The numbers of ``classes``, given by number or name, among ``names`` of ``owner`` ("the model").

    Raises TypeError for what is neither a number nor a name, UserError for a class that is not among ``names``.
    """
    numbers = {name: number for number, name in names.items()}
    found = []
    for c in classes:
        if isinstance(c, str) and c not in numbers:
            hint = suggestion(c, numbers) or f"; its classes: {', '.join(numbers)}"
            raise UserError(f"--classes {c}: {owner} has no class of this name{hint}")
        number = numbers[c] if isinstance(c, str) else operator.index(c)
        if number not in names:
            raise UserError(f"--classes {number}: {owner} has classes 0 to {len(names) - 1}")
        found.append(number)
    return tuple(found)


def typed_classes(words: Iterable[str]) -> list[int | str]:
    """The numbers and names that the words after ``--classes`` mean."""
    return [int(word) if re.fullmatch("-?[0-9]{1,9}", word) else word for word in words]


def check_image_size(imgsz: int, stride: int, *, least_cells: int = 1, flag: str = "--imgsz") -> None:
    """Raises UserError unless ``imgsz``, the value of ``flag``, is a multiple of the model's largest ``stride``, at
    least ``least_cells`` times as large, and at most `MOST_IMGSZ`."""
    least = least_cells * stride
    below = max(imgsz // stride * stride, least)
    if imgsz < least:
        raise UserError(f"{flag} {imgsz}: too small for the model's stride {stride}; use {least} or more")
    if imgsz > MOST_IMGSZ:
        raise UserError(f"{flag} {imgsz}: too large; use {MOST_IMGSZ // stride * stride} or less")
    if imgsz % stride:
        raise UserError(
            f"{flag} {imgsz}: not a multiple of the model's stride {stride}; use {below} or {below + stride}"
        )
