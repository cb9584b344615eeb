"""The file formats that export.py writes, as flags, messages and searches for files need them; does not import torch.

To add a format, write its module in engine/export and add its entry here.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.config.words import WORDS
from utils.errors import UserError


@dataclass(frozen=True, kw_only=True)
class ExportFormat:
    """One entry of `EXPORT_FORMATS`."""

    module: str  # in engine/export, with the functions that engine/export/formats.py lists
    suffix: str  # end of the exported file's name, or of the folder's name if the format has several files
    member: str = ""  # suffix of the file in such a folder that may be named in the folder's place
    packages: tuple[str, ...] = ()  # packages besides torch that write or run the format
    unsupported: tuple[str, ...] = ()  # flags of export.py
    runs_code: bool  # whether opening a file can run code in it, so that --trust is needed
    title: str  # in messages


EXPORT_FORMATS = {
    "onnx": ExportFormat(
        module="onnx", suffix=".onnx", packages=("onnx", "onnxscript", "onnxruntime"), runs_code=False, title="ONNX"
    ),
    "openvino": ExportFormat(
        module="openvino",
        suffix="_openvino_model",
        member=".xml",
        packages=("onnx", "onnxscript", "openvino"),
        runs_code=True,
        title="OpenVINO",
    ),
    "torchscript": ExportFormat(
        module="torchscript", suffix=".torchscript", unsupported=("--int8",), runs_code=True, title="TorchScript"
    ),
    "pt2": ExportFormat(module="pt2", suffix=".pt2", unsupported=("--int8",), runs_code=True, title=".pt2"),
    "ncnn": ExportFormat(
        module="ncnn",
        suffix="_ncnn_model",
        member=".ncnn.param",
        packages=("pnnx", "ncnn"),
        unsupported=("--int8", "--dynamic", "--batch", "--layout end2end"),
        runs_code=True,  # ncnn does not check all numbers that it reads, and a wrong one overwrites memory
        title="ncnn",
    ),
    "litert": ExportFormat(
        module="litert",
        suffix=".tflite",
        packages=("litert_torch", "ai_edge_quantizer", "ai_edge_litert"),
        unsupported=("--dynamic",),
        runs_code=True,  # LiteRT does not check all numbers that it reads
        title="TFLite",
    ),
}


def refuse_other_formats(value: Any, location: str) -> Any:
    """Returns the names of formats unchanged. Raises UserError for those of other programs, with what makes them."""
    for name in value if isinstance(value, list) else [value]:
        if isinstance(name, str) and name in WORDS["format"]:
            raise UserError(f"{location} {name}: {WORDS['format'][name]}")
    return value


def formats_with(flag: str) -> list[str]:
    """Returns the names of the formats that support a flag of export.py."""
    return [name for name, entry in EXPORT_FORMATS.items() if flag not in entry.unsupported]


def titles_of_programs() -> str:
    """Lists the formats whose files can run code: "OpenVINO, TorchScript and .pt2"."""
    *titles, last = [entry.title for entry in EXPORT_FORMATS.values() if entry.runs_code]
    return f"{', '.join(titles)} and {last}"


def format_of(path: str | Path) -> str | None:
    """Returns the format of an exported file or folder, by its name, or for a folder by the files in it; None for other
    paths, such as checkpoints."""
    path = Path(os.path.expanduser(path))
    is_folder = os.path.isdir(path)  # also False for a name that is too long for the system
    for name, entry in EXPORT_FORMATS.items():
        if is_folder:
            # Other programs also write .xml files, such as annotations: a model has weights beside it.
            models = path.glob(f"*{entry.member}") if entry.member else ()
            matches = any(file.with_suffix(".bin").is_file() for file in models)
        else:
            matches = path.name.lower().endswith(entry.member or entry.suffix)
        if matches or (entry.member and is_folder and path.name.endswith(entry.suffix)):
            return name
    return None
