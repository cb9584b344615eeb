"""What the modules of file formats share. Each module named in `EXPORT_FORMATS` has three functions:

    write(graphs: ModelGraphs, path: Path, metadata: ExportMetadata) -> str
        Writes a file, or a folder that does not exist yet. The content names no path of this machine. Returns the
        requirements for reading it, for the log; "" if there are none.
    describe(path: Path) -> Any
        Reads the entries of the metadata, for `parse_metadata`, without running code in the file.
    open_file(path: Path, metadata: ExportMetadata, device: torch.device) -> Session
        Opens a file or folder with the format's runtime, on the CPU if the runtime does not support ``device``.

`write` raises UserError for a model that cannot be converted. The others raise UserError if a package is not installed;
their other errors are turned into UserError by `open_exported`.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import subprocess
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from engine.export.metadata import METADATA_FILE, ExportMetadata, parse_metadata
from utils.config.export_formats import EXPORT_FORMATS, format_of
from utils.errors import UserError, errors_of
from utils.logger import get_logger
from utils.machine.packages import require_installed

CONVERSION_TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class Session:
    """An exported file, opened by its runtime. It computes in float32 unless the file says otherwise, on as many
    threads as torch, so that results can be compared."""

    run: Callable[[Tensor], Tensor]  # float32 (B, C, H, W) to the output, on the same device; thread-safe
    input_shape: tuple[int | None, ...]  # B, C, H, W; None: any


def format_module(name: str) -> ModuleType:
    """Imports the module of the format ``name``, a key of `EXPORT_FORMATS`."""
    return importlib.import_module(f"{__package__}.{EXPORT_FORMATS[name].module}")


def require_packages(formats: Sequence[str], *, int8: bool = False) -> None:
    """Raises UserError, naming all of them, if packages that write or run the formats are missing."""
    packages = [package for name in formats for package in EXPORT_FORMATS[name].packages]
    if int8 and set(formats) != {"litert"}:
        packages.append("onnxruntime")  # has the quantizer
    require_installed(dict.fromkeys(packages), "export", "choose other formats")


def describe_exported(path: Path) -> ExportMetadata:
    """Reads the metadata of an exported file or folder. Raises UserError, which names ``path``."""
    with _errors_of(path):
        return parse_metadata(format_module(_known_format(path)).describe(path))


def open_exported(path: Path, device: torch.device) -> tuple[ExportMetadata, Session]:
    """Opens an exported file or folder, which may run code in it. Raises UserError, which names ``path``."""
    metadata = describe_exported(path)
    with _errors_of(path):
        return metadata, format_module(_known_format(path)).open_file(path, metadata, device)


def _known_format(path: Path) -> str:
    name = format_of(path)
    if name is None:
        raise UserError("is not an exported model")
    return name


def folder_of(path: Path) -> Path:
    """Returns the folder that export.py wrote if ``path`` is a file in it, otherwise ``path``."""
    name = format_of(path)
    is_member = name is not None and EXPORT_FORMATS[name].member and not path.is_dir()
    return path.parent if is_member and (path.parent / METADATA_FILE).is_file() else path


def model_file(path: Path, member: str) -> Path:
    """Returns the only file in a folder whose name ends with ``member``, or ``path`` itself if it is a file. Raises
    UserError for another number of such files."""
    files = sorted(path.glob(f"*{member}")) if path.is_dir() else [path]
    if len(files) != 1:
        raise UserError(f"holds {len(files)} {member} files, not one model")
    return files[0]


@contextlib.contextmanager
def quiet(*logger_names: str) -> Iterator[None]:
    """Suppresses warnings, and the notes and tracebacks of exporters and readers. ``logger_names``: further loggers; ""
    is the root logger."""
    names = ("torch.onnx", "torch.export", "onnxscript", "onnx_ir", "onnx", *logger_names)
    levels = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


@contextlib.contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    """Turns any error of a runtime that opens ``path`` into UserError, which names it: each has exception types of its
    own."""
    try:
        with errors_of(path):
            yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{path}: cannot be opened ({reason[:300]})") from None


def checked_shape(inputs: Sequence[Any], outputs: Sequence[Any], shape: Sequence[Any]) -> tuple[int | None, ...]:
    """Returns the shape of the only input, with None for dimensions that vary: those that a runtime names or leaves
    open. Raises UserError unless images, of four dimensions, are mapped to one output."""
    if (len(inputs), len(outputs), len(shape)) != (1, 1, 4):
        raise UserError(
            f"has {len(inputs)} inputs and {len(outputs)} outputs; expected one of each, and images of 4 dimensions"
        )
    return tuple(side if isinstance(side, int) and side > 0 else None for side in shape)


def log_cpu_only(device: torch.device, path: Path) -> None:
    """Logs that a model requested on another device than the CPU runs there."""
    if device.type != "cpu":
        get_logger().info("%s: its runtime has no support for %s here and computes on the CPU", path, device)


def run_converter(
    program: str, command: Sequence[object], output: Path, variables: Mapping[str, str] | None = None
) -> None:
    """Runs a program that converts a model to the file ``output``, whose folder is its working folder.

    ``program``: its name in messages. ``variables``: additions to the environment. Raises UserError if it fails.
    """
    done = subprocess.run(
        [str(word) for word in command],
        cwd=output.parent,
        env=os.environ | dict(variables or {}),
        capture_output=True,
        text=True,
        errors="replace",
        timeout=CONVERSION_TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0 or not output.is_file():
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise UserError(f"{program} failed ({lines[-1][:300] if lines else done.returncode}); use another format")
