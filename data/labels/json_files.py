"""Reads annotation files in JSON. A damaged or hostile file leads to one line that names it."""

from __future__ import annotations

import codecs
import contextlib
import json
from pathlib import Path
from typing import Any

from utils.errors import UserError
from utils.files.safe_io import open_regular, read_text


def load_json(path: Path, expected: str) -> dict[str, Any] | list[Any]:
    """The content of a JSON file.

    Args:
        expected: what the file should be, for the message about a file of another kind.

    Raises UserError, with the line if it is known, unless the file contains a JSON object or list whose objects have no
    repeated keys.
    """
    text = read_json(path, expected)
    try:
        return json.loads(text, object_pairs_hook=_unique_keys)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: malformed JSON ({error.msg}, column {error.colno})") from None
    except ValueError as error:  # a repeated key, or a number of thousands of digits
        raise UserError(f"{path}: malformed JSON ({str(error).split(';')[0]})") from None
    except RecursionError:
        raise UserError(f"{path}: malformed JSON (nested too deeply)") from None


def read_json(path: Path, expected: str) -> str:
    """The text of a file that begins like a JSON object or list, for readers of a part of it. Raises UserError."""
    with contextlib.suppress(OSError), open_regular(path) as file:  # `read_text` reports such an error
        # Other files are not read to their end: one may be a sparse file of a terabyte.
        if not file.read(4096).removeprefix(codecs.BOM_UTF8).lstrip().startswith((b"{", b"[")):
            raise UserError(f"{path}: not {expected}")
    return read_text(path)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Raises ValueError for a repeated key, of which ``json`` would silently take the last."""
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for i, key in enumerate(keys) if key in keys[:i])
        raise ValueError(f"the key '{twice[:60]}' is used twice in one object")
    return content
