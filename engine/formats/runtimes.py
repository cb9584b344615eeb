"""Functions that file formats share: metadata files, suppressed notes, errors of runtimes, and input shapes."""

from __future__ import annotations

import contextlib
import logging
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import yaml

from engine.formats.metadata import ExportMetadata
from utils.config.yaml_files import load_yaml
from utils.errors import UserError
from utils.files.safe_io import write_whole
from utils.logger import get_logger
from utils.machine.packages import require_package

MAX_INPUT_VALUES = 2**30  # values in a batch of images, 4 GB: a small file may state any size
METADATA_FILE = "metadata.yaml"  # in the folders of formats that have several files


def import_onnxruntime(user: str) -> ModuleType:
    """Imports the package onnxruntime. Raises UserError, naming the flag or file ``user`` that needs it."""
    return require_package("onnxruntime", user, "use the checkpoint")


def write_metadata_file(folder: Path, metadata: ExportMetadata) -> None:
    """Writes the metadata of a format that has several files, with a boolean ``end2end``, as readers of YOLO exports
    expect."""
    content = metadata.as_data() | {"end2end": metadata.end2end}
    write_whole(folder / METADATA_FILE, yaml.safe_dump(content, sort_keys=False, allow_unicode=True))


def read_metadata_file(folder: Path) -> dict[str, Any] | None:
    """Reads the file of `write_metadata_file`, unchecked; None if there is no such file. Raises UserError for a
    file that is not YAML."""
    file = folder / METADATA_FILE
    if not file.is_file():
        return None
    content = load_yaml(file)
    return content if isinstance(content, dict) else {}


@contextlib.contextmanager
def quiet(*logger_names: str) -> Iterator[None]:
    """Suppresses warnings, and the notes and tracebacks of exporters and readers. ``logger_names``: further loggers; ""
    is the root logger."""
    names = ("torch.onnx", "torch.export", "onnxscript", "onnx_ir", "onnx", *logger_names)
    loggers = {logging.getLogger(name): logging.getLogger(name).level for name in names}
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in loggers.items():
            logger.setLevel(level)


@contextlib.contextmanager
def errors_of_runtime(path: Path) -> Iterator[None]:
    """Turns any error of a runtime that reads ``path`` into UserError: each has exception types of its own."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{path}: cannot be opened ({reason[:300]})") from None


def check_ports(path: Path, inputs: int, outputs: int) -> None:
    """Raises UserError unless there is one input and one output."""
    if (inputs, outputs) != (1, 1):
        raise UserError(f"{path}: has {inputs} inputs and {outputs} outputs; a detector has one of each")


def checked_shape(path: Path, shape: list[Any]) -> tuple[int | None, ...]:
    """Returns an input shape with None for dimensions that vary: those that a runtime names or leaves open. Raises
    UserError unless there are four dimensions."""
    if len(shape) != 4:
        raise UserError(f"{path}: its input has {len(shape)} dimensions; images have 4")
    return tuple(side if isinstance(side, int) and side > 0 else None for side in shape)


def check_input_size(path: Path, shape: tuple[int, int, int, int]) -> None:
    """Raises UserError for an input shape (B, C, H, W) that is far larger than any detector's."""
    values = math.prod(shape)
    if values > MAX_INPUT_VALUES:
        sides = " x ".join(map(str, shape))
        raise UserError(f"{path}: refused: its input has {values:,} values ({sides}), more than any detector needs")


def log_cpu_only(path: Path, device: torch.device) -> None:
    """Logs that a model requested on another device runs on the CPU."""
    get_logger().info("%s: its runtime has no support for %s here and computes on the CPU", path, device)
