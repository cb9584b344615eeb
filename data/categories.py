"""Category ids of COCO, which identify classes in results in its format."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Category(NamedTuple):
    """A category of a COCO JSON."""

    id: int
    name: str
    is_used: bool  # whether annotations have its id


def ids_of_classes(categories: Sequence[Category], names: Sequence[str]) -> tuple[int, ...]:
    """Returns the category id of each class.

    Of several categories with the same name, a used one is preferred, because Roboflow's root may be named like a
    class. A class without a category gets an id above all ids of the file.
    """
    id_of: dict[str, int] = {}
    for category in sorted(categories, key=lambda category: (not category.is_used, category.id)):
        id_of.setdefault(category.name, category.id)
    first_free = max((category.id for category in categories), default=-1) + 1
    return tuple(id_of.get(name, first_free + number) for number, name in enumerate(names))


def id_of_merged_class(categories: Sequence[Category], ids: Iterable[int]) -> int:
    """Returns the category id of a class that merges those with ``ids``: the smallest of them that annotations have, or
    else that the file contains, or else the smallest."""
    merged_ids = set(ids)
    in_file = {category.id for category in categories if category.id in merged_ids}
    used = {category.id for category in categories if category.is_used and category.id in merged_ids}
    return min(used or in_file or merged_ids)
