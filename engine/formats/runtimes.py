"""What the implementations of file formats share about runtimes: their notes, errors and shapes."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
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

MAX_INPUT_VALUES = 2**30  # of a batch of images, 4 GB: a small file may state any size
METADATA_FILE = "metadata.yaml"  # in the folders of formats that have several files
TRIAL_TIMEOUT_S = 120.0
TRIAL_MEMORY_BYTES = 16 * 2**30  # of addresses, besides what the system allows
# Precedes the program of a trial.
_TRIAL_LIMITS = f"""
import resource
soft, hard = resource.getrlimit(resource.RLIMIT_AS)
allowed = [limit for limit in (soft, hard, {TRIAL_MEMORY_BYTES}) if limit != resource.RLIM_INFINITY]
resource.setrlimit(resource.RLIMIT_AS, (min(allowed), hard))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
"""


def import_onnxruntime(user: str) -> ModuleType:
    """The package onnxruntime. Raises UserError, which says that ``user``, a flag or file, needs it."""
    return require_package("onnxruntime", user, "use the checkpoint")


def write_metadata_file(folder: Path, metadata: ExportMetadata) -> None:
    """Writes the metadata of a format that has several files, with a boolean ``end2end``, as readers of YOLO exports
    expect."""
    content = metadata.as_data() | {"end2end": metadata.end2end}
    write_whole(folder / METADATA_FILE, yaml.safe_dump(content, sort_keys=False, allow_unicode=True))


def read_metadata_file(folder: Path) -> dict[str, Any] | None:
    """What `write_metadata_file` wrote, unchecked; None if there is no such file. Raises UserError for a file that is
    not YAML."""
    file = folder / METADATA_FILE
    if not file.is_file():
        return None
    content = load_yaml(file)
    return content if isinstance(content, dict) else {}


@contextlib.contextmanager
def quiet(*others: str) -> Iterator[None]:
    """Suppresses warnings, and the notes and tracebacks of exporters and readers. ``others``: more names of loggers, ""
    that of the root."""
    names = ("torch.onnx", "torch.export", "onnxscript", "onnx_ir", "onnx", *others)
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


def try_in_process(path: Path, program: str, arguments: Sequence[object], runtime: str) -> None:
    """Runs a Python ``program`` that opens the model ``path``, and runs it once, in a process of its own: for runtimes
    that crash on some damaged files.

    The program gets ``arguments`` in ``sys.argv``, and reports a mistake by ``sys.exit(REASON)``. Raises UserError if
    it does, crashes, needs more memory than any detector or does not end.
    """
    # -P: modules are not looked up in the working folder.
    command = [sys.executable, "-P", "-c", _TRIAL_LIMITS + program, *map(str, arguments)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=TRIAL_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"{path}: cannot be opened (it takes longer than {TRIAL_TIMEOUT_S:.0f} s)") from None
    if done.returncode < 0:
        raise UserError(f"{path}: cannot be opened (it is damaged: {runtime} crashed)")
    if done.returncode != 0:
        reason = "; ".join(done.stderr.strip().splitlines()) or "it is damaged"
        raise UserError(f"{path}: cannot be opened ({reason[-300:]})")  # what the runtime prints comes first


def run_converter(
    program: str,
    command: Sequence[object],
    output: Path,
    *,
    user: str,
    timeout_s: float,
    folder: Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> None:
    """Runs a program that converts a model, in a process of its own.

    Args:
        program: its name in messages.
        command: the program and its arguments.
        output: the file that it writes.
        user: the flag that needs it, for messages.
        timeout_s: how long it may take.
        folder: its working folder; None: that of this process.
        variables: what its environment has besides that of this process.

    Raises UserError if it fails, does not end, or does not write ``output``.
    """
    try:
        done = subprocess.run(
            list(map(str, command)),
            cwd=folder,
            env=os.environ | dict(variables or {}),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"{user}: {program} did not end within {timeout_s:.0f} s") from None
    if done.returncode != 0 or not output.is_file():
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise UserError(f"{user}: {program} failed ({lines[-1][:300] if lines else done.returncode})")


def check_ports(path: Path, inputs: int, outputs: int) -> None:
    """Raises UserError unless there is one of each."""
    if (inputs, outputs) != (1, 1):
        raise UserError(f"{path}: has {inputs} inputs and {outputs} outputs; a detector has one of each")


def checked_shape(path: Path, shape: list[Any]) -> tuple[int | None, ...]:
    """An input shape with None for what varies: dimensions that a runtime names or does not know. Raises UserError for
    a shape that is not one of images."""
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
    """Logs that a model that was asked for on another device runs on the CPU."""
    get_logger().info("%s: its runtime has no support for %s here and computes on the CPU", path, device)
