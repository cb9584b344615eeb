"""Mistakes in the flags and files of the commands end with one line."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import formats, models
from benchmarks.accuracy import __main__ as accuracy
from benchmarks.entrypoint import run_benchmark
from benchmarks.speed import loader, step, validate

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


@pytest.mark.parametrize(
    ("module", "flags", "message"),
    [
        (step, ["--rounds", "0"], "argument --rounds: must be an integer, at least 1, got 0"),
        (step, ["--steps", "0"], "argument --steps: must be an integer, at least 1, got 0"),
        (step, ["--batch-size", "16", "0"], "argument --batch-size: must be an integer, at least 1, got 0"),
        (step, ["--imgsz", "65"], "argument --imgsz: must be a multiple of 32, got 65"),
        (step, ["--amp", "bogus"], "argument --amp: invalid choice: 'bogus'"),
        (step, ["--optimizer", "auto"], "argument --optimizer: invalid choice: 'auto'"),
        (loader, ["--data", "set", "--rounds", "x"], "argument --rounds: must be an integer, at least 1, got x"),
        (loader, ["--data", "set", "--seconds", "0"], "argument --seconds: must be a positive number of seconds"),
        (loader, ["--data", "set", "--seconds", "nan"], "argument --seconds: must be a positive number of seconds"),
        (loader, ["--data", "set", "--workers", "-1"], "argument --workers: must be an integer, at least 0, got -1"),
        (validate, ["--weights", "w.pt", "--data", "set", "--rounds", "0"], "argument --rounds: must be an integer"),
        (validate, ["--weights", "w.pt", "--data", "set", "--amp", "peer"], "argument --amp: invalid choice: 'peer'"),
    ],
)
def test_values_with_which_nothing_could_be_measured_are_refused(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    module: ModuleType,
    flags: list[str],
    message: str,
):
    monkeypatch.setattr(sys, "argv", ["command", *flags])
    with pytest.raises(SystemExit, match="2"):
        run_benchmark(module.main)
    assert f"error: {message}" in capsys.readouterr().err.splitlines()[-1]
