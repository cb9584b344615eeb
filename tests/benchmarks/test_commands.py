"""Mistakes in the flags and files of the commands end with one line."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import formats, models
from benchmarks.accuracy import __main__ as accuracy
from benchmarks.command import run_benchmark
from benchmarks.speed import loader, validate

pytestmark = pytest.mark.benchmarks


@pytest.mark.parametrize(
    ("module", "flags", "message"),
    [
        (loader, ["--data", "no-such-set"], "no-such-set"),
        (validate, ["--weights", "w.pt", "--data", "no-such-set"], "no-such-set"),
        (models, ["--imgsz", "100"], "multiple of yolov5n's stride, 32"),
        (formats, ["--weights", "no-such.pt", "--data", "bccd.yaml"], "no-such.pt: no such file"),
        (formats, ["--weights", __file__, "--data", "bccd.yaml", "--python", "onnx"], "--python onnx: must be"),
        (accuracy, ["run", "v.yaml", "--out", "o", "--data", "no-such-set"], "no-such-set"),
    ],
)
def test_a_mistake_ends_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType, flags: list[str], message: str
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["command", *flags])
    with pytest.raises(SystemExit, match=rf"^error: .*{message}"):
        run_benchmark(module.main)
