"""An `Evaluation` as a file of tensors and plain data, which runs no code when it is read."""

from __future__ import annotations

import typing
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.evaluation.result import Evaluation
from utils.files.torch_file import read_checkpoint, write_checkpoint
from utils.schema import hints_of, parse_hint


def write_evaluation(evaluation: Evaluation, path: Path) -> None:
    """Replaces ``path`` atomically. Raises OSError."""
    write_checkpoint({"evaluation": _as_tensors(evaluation)}, path)


def read_evaluation(path: Path) -> Evaluation:
    """Reads an evaluation. Its arrays are mapped from the file: what is not used is not read. Raises UserError."""
    return _from_tensors(Evaluation, read_checkpoint(path, verify=False).get("evaluation"))


def _as_tensors(value: Any) -> Any:
    """Replaces arrays by tensors, and objects by dicts of their fields."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, np.generic):
        return value.item()
    if is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    elif hasattr(value, "_asdict"):  # a NamedTuple
        value = value._asdict()
    return {key: _as_tensors(item) for key, item in value.items()} if isinstance(value, dict) else value


def _from_tensors(hint: Any, value: Any) -> Any:
    """Returns the object of type ``hint`` that `_as_tensors` has replaced."""
    kind = parse_hint(hint).type
    if value is None:
        return None
    if kind is np.ndarray:
        return value.numpy()
    if is_dataclass(kind) or hasattr(kind, "_fields"):
        hints = hints_of(kind)
        return kind(**{name: _from_tensors(hints[name], item) for name, item in value.items()})
    if typing.get_origin(kind) is dict:
        _, item_hint = typing.get_args(kind)
        return {key: _from_tensors(item_hint, item) for key, item in value.items()}
    return value
