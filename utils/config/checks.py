"""Checks of flags against a model or a data set: its classes, and the stride that image sizes are multiples of."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping

from utils.config.settings import MAX_IMGSZ
from utils.errors import UserError
from utils.schema import suggestion

_INDEX = "-?[0-9]{1,9}"
_SEVERAL_INDICES = rf"{_INDEX}(, ?{_INDEX})+"
_INDEX_LIST = re.compile(rf"{_SEVERAL_INDICES}|\[({_INDEX}|{_SEVERAL_INDICES})\]|\(({_INDEX},|{_SEVERAL_INDICES})\)")


def class_numbers(
    classes: Iterable[int | str], names: Mapping[int, str], owner: str, flag: str = "--classes"
) -> tuple[int, ...]:
    """Converts ``classes``, indices or names, to class indices of ``owner`` ("the model"), whose classes are ``names``.

    Raises TypeError for a value that is neither a number nor a name, UserError for a class that is not in ``names``.
    """
    number_by_name = {name: number for number, name in names.items()}
    numbers: list[int] = []
    for c in classes:
        if isinstance(c, str) and c not in number_by_name:
            hint = suggestion(c, number_by_name) or f"; its classes: {', '.join(number_by_name)}"
            raise UserError(f"{flag} {c}: {owner} has no class of this name{hint}")
        number = number_by_name[c] if isinstance(c, str) else operator.index(c)
        if number not in names:
            raise UserError(f"{flag} {number}: {owner} has classes 0 to {len(names) - 1}")
        numbers.append(number)
    return tuple(numbers)


def typed_classes(words: Iterable[str]) -> list[int | str]:
    """Converts the words after ``--classes`` to class indices and names. One word may be a list of indices."""
    classes: list[int | str] = []
    for word in words:
        if is_index_list(word):
            classes += map(int, re.findall(_INDEX, word))
        else:
            classes.append(typed_class(word))
    return classes


def typed_class(word: str) -> int | str:
    """Converts one word to a class index or name."""
    return int(word) if re.fullmatch(_INDEX, word) else word


def is_index_list(word: str) -> bool:
    """Returns whether one word is a list of class indices: ``0,2`` or ``[0, 2]``, as Ultralytics writes it."""
    return _INDEX_LIST.fullmatch(word) is not None


def check_image_size(imgsz: int, stride: int, *, min_cells: int = 1, flag: str = "--imgsz") -> None:
    """Raises UserError unless ``imgsz``, the value of ``flag``, is a multiple of the model's largest ``stride``, at
    least ``min_cells`` times as large, and at most `MAX_IMGSZ`."""
    min_size = min_cells * stride
    below = max(imgsz // stride * stride, min_size)
    if imgsz < min_size:
        raise UserError(f"{flag} {imgsz}: too small for the model's stride {stride}; use {min_size} or more")
    if imgsz > MAX_IMGSZ:
        raise UserError(f"{flag} {imgsz}: too large; use {MAX_IMGSZ // stride * stride} or less")
    if imgsz % stride:
        raise UserError(
            f"{flag} {imgsz}: not a multiple of the model's stride {stride}; use {below} or {below + stride}"
        )
