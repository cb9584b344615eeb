"""Attributes that programs for YOLOv5 and Ultralytics expect, and that have other names here."""

from __future__ import annotations

from utils.config.other_programs.table import python_hint


def attribute_error(kind: str, owner: str, name: str) -> AttributeError:
    """Returns the error for a missing attribute, with its replacement if other programs have the attribute.

    ``kind``: see `python_hint`. ``owner``: the object without the attribute, with an article.
    """
    message = f"{owner} has no attribute {name!r}"
    hint = "" if name.startswith("_") else python_hint(kind, name)
    if hint:
        message += f": {hint}"
    return AttributeError(message, name=name)
