"""The requirements of an export are checked before anything is opened."""

from __future__ import annotations

import sys

import pytest

from engine.export.options import require_packages
from utils.errors import UserError


@pytest.mark.parametrize(
    ("formats", "absent", "message"),
    [
        (["onnx"], ["onnx", "onnxscript", "onnxruntime"],
         "export: the packages onnx, onnxscript, onnxruntime are not installed; pip install onnx onnxscript "
         "onnxruntime, or choose other formats"),
        (["onnx", "openvino"], ["openvino", "onnx"],
         "export: the packages onnx, openvino are not installed; pip install onnx openvino, or choose other "
         "formats"),
        (["openvino"], ["onnxscript"],
         "export: the package onnxscript is not installed; pip install onnxscript, or choose other formats"),
    ],
)  # fmt: skip
def test_all_missing_packages_are_named_at_once(monkeypatch, formats, absent, message):
    for package in ("onnx", "onnxscript", "onnxruntime", "openvino"):
        pytest.importorskip(package)
    for package in absent:
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError) as caught:
        require_packages(formats)
    assert str(caught.value) == message
    require_packages(["torchscript", "pt2"])
