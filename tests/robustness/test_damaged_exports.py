"""A damaged export opens, or is refused in one line that names it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.formats.exported import FORMATS, NAMES, write_all
from tests.helpers.exports import calibrated_detector, tiny_graph
from tests.helpers.tiny import TINY_MODEL
from tests.robustness.damaged_exports import open_damaged_copies


@pytest.mark.slow
@pytest.mark.parametrize("file", FORMATS)
def test_damaged_exports_open_or_are_refused_in_one_line(tmp_path: Path, file: str):
    for package in ("onnx", "onnxscript", "onnxruntime", "openvino"):
        pytest.importorskip(package)
    write_all(tmp_path, calibrated_detector(TINY_MODEL, NAMES), files=(file,), graph=tiny_graph(NAMES))
    outcomes, failures = open_damaged_copies(tmp_path / file, 20)
    assert not failures
    assert outcomes["refused"] > 0
