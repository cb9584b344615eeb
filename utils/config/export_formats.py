"""The file formats that export.py writes, as flags, messages and searches for files need them; does not import torch.

To add a format, write its class in engine/formats and add its entry here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ExportFormat:
    """One entry of `EXPORT_FORMATS`."""

    implementation: str  # FILE.CLASS in engine/formats: a `ModelFormat`
    suffix: str  # end of the exported file's name, or of the folder's name if the format has several files
    member: str = ""  # suffix of the file in such a folder that may be named in the folder's place
    packages: tuple[str, ...] = ()  # packages besides torch that write or run the format
    unsupported: tuple[str, ...] = ()  # flags of export.py
    runs_code: bool  # whether opening a file can run code in it, so that --trust is needed
    title: str  # in messages


EXPORT_FORMATS = {
    "onnx": ExportFormat(
        implementation="onnx_format.OnnxFormat",
        suffix=".onnx",
        packages=("onnx", "onnxscript", "onnxruntime"),
        runs_code=False,
        title="ONNX",
    ),
    "openvino": ExportFormat(
        implementation="openvino_format.OpenVinoFormat",
        suffix="_openvino_model",
        member=".xml",
        packages=("onnx", "onnxscript", "openvino"),
        runs_code=True,
        title="OpenVINO",
    ),
    "torchscript": ExportFormat(
        implementation="torch_formats.TorchScriptFormat",
        suffix=".torchscript",
        unsupported=("--int8",),
        runs_code=True,
        title="TorchScript",
    ),
    "pt2": ExportFormat(
        implementation="torch_formats.Pt2Format", suffix=".pt2", unsupported=("--int8",), runs_code=True, title=".pt2"
    ),
    "ncnn": ExportFormat(
        implementation="ncnn_format.NcnnFormat",
        suffix="_ncnn_model",
        member=".ncnn.param",
        packages=("pnnx", "ncnn"),
        unsupported=("--int8", "--dynamic", "--batch", "--layout end2end"),
        runs_code=True,  # ncnn does not check all numbers that it reads, and a wrong one overwrites memory
        title="ncnn",
    ),
    "litert": ExportFormat(
        implementation="litert_format.LiteRtFormat",
        suffix=".tflite",
        packages=("litert_torch", "ai_edge_quantizer", "ai_edge_litert"),
        unsupported=("--dynamic",),
        runs_code=True,  # LiteRT does not check all numbers that it reads
        title="TFLite",
    ),
}


def formats_with(flag: str) -> list[str]:
    """Returns the names of the formats that support a flag of export.py."""
    return [name for name, entry in EXPORT_FORMATS.items() if flag not in entry.unsupported]


def titles_of_programs() -> str:
    """Lists the formats whose files can run code: "OpenVINO, TorchScript and .pt2"."""
    *titles, last = [entry.title for entry in EXPORT_FORMATS.values() if entry.runs_code]
    return f"{', '.join(titles)} and {last}"
