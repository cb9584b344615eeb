"""Files that may run code are opened with trust only."""

from __future__ import annotations

import contextlib
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

import detect
import hubconf
import val
from engine.export.formats import format_module
from engine.export.metadata import ExportMetadata
from engine.inference.model import open_model
from engine.inference.predict import load
from tests.helpers.hostile_files import write_hostile_programs
from tests.helpers.messages import refused
from tests.helpers.scripts import error_of
from tools.check import __main__ as check
from utils.config.export_formats import format_of
from utils.errors import UserError

CPU = torch.device("cpu")


def commands(path: Path, folder: Path, *out: object) -> list[tuple]:
    weights = ["--weights", path, "--device", "cpu"]
    scored = (val.main, *weights, "--data", "demo", *out)
    found = (detect.main, *weights, "--source", folder, *out)
    return [scored, found, (check.main, "demo", *weights)]


def test_a_hostile_file_is_refused_in_one_line_by_every_program(tmp_path: Path, capsys: pytest.CaptureFixture):
    marker = tmp_path / "ran"
    programs = write_hostile_programs(tmp_path, marker)
    (tmp_path / "a.png").touch()
    ran = set()
    for kind, path in programs.items():
        with pytest.raises(UserError):  # none has the metadata of a detector
            open_model(path, device=CPU, trust=True)
        assert not marker.exists()
        with contextlib.suppress(Exception):  # its runtime
            opened = format_module(format_of(path) or "").open_file(path, ExportMetadata(names=("a",)), CPU)
            opened.run(torch.zeros(1, 3, 64, 64))
        ran |= {kind} if marker.exists() else set()
        marker.unlink(missing_ok=True)
    assert ran == programs.keys()
    foreign = tmp_path / "foreign_openvino_model"
    foreign.mkdir()
    (foreign / "a.xml").write_text("<net/>")
    (foreign / "a.bin").touch()
    shutil.copytree(foreign, tmp_path / "disguised.onnx")
    ncnn_folder = tmp_path / "foreign_ncnn_model"
    ncnn_folder.mkdir()
    (ncnn_folder / "model.ncnn.param").write_text("7767517\n1 1\nInput in0 0 1 in0\n")
    out = ["--project", tmp_path / "out"]
    folders = [tmp_path / "disguised.onnx", foreign, ncnn_folder]
    for path in [*programs.values(), *folders, foreign / "a.xml", ncnn_folder / "model.ncnn.param"]:
        for call in (load, hubconf.custom, partial(open_model, device=CPU)):
            with pytest.raises(UserError, match=f"^{path}: opening .* use --trust .in Python: trust=True"):
                call(path)
        lines = [error_of(capsys, *command) for command in commands(path, tmp_path, *out)]
        assert all(f"error: {path}: opening" in line and "--trust" in line for line in lines), lines
    assert not marker.exists()
    assert not (tmp_path / "out").exists()


def test_trust_is_passed_on(tmp_path: Path, capsys: pytest.CaptureFixture):
    path = tmp_path / "a.torchscript"
    path.write_bytes(b"not TorchScript")
    (tmp_path / "a.png").touch()
    for call in (load, hubconf.custom):
        with refused("a.torchscript: not an archive ..."):
            call(path, trust=True)
    for command in commands(path, tmp_path):
        assert "a.torchscript: not an archive" in error_of(capsys, *command, "--trust")
