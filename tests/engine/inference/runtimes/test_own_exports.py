"""Files that may run code are opened only if this user has exported them, or with trust."""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

import detect
import hubconf
import val
from engine.inference.predictor import load
from engine.inference.runtimes.open import open_model
from engine.inference.runtimes.own_exports import RECORD, is_own_export, record_export
from tests.helpers.hostile_files import write_hostile_programs
from tests.helpers.messages import refused
from tests.helpers.scripts import error_of
from tools.check import __main__ as check
from utils.errors import UserError
from utils.files.folders import cache_folder

CPU = torch.device("cpu")
PARTS = ("a.xml", "a.bin", "metadata.yaml")


def write_openvino(folder: Path) -> Path:
    folder.mkdir()
    for name in PARTS:
        (folder / name).write_text(name)
    return folder


def test_a_hostile_file_is_refused_in_one_line_by_every_program(tmp_path: Path, capsys: pytest.CaptureFixture):
    marker = tmp_path / "ran"
    programs = write_hostile_programs(tmp_path, marker)
    (tmp_path / "a.png").touch()
    ran = set()
    for kind, path in programs.items():
        with pytest.raises(UserError):  # none is a detector
            open_model(path, device=CPU, trust=True)
        ran |= {kind} if marker.exists() else set()
        marker.unlink(missing_ok=True)
    assert len(ran) > len(programs) / 2, ran  # versions of torch differ
    record_export(write_openvino(tmp_path / "own_openvino_model"), tmp_path)  # that there is a record changes nothing
    foreign = write_openvino(tmp_path / "foreign_openvino_model")
    (foreign / "a.xml").write_text("<net/>")
    shutil.copytree(foreign, tmp_path / "disguised.onnx")
    out = ["--project", tmp_path / "out"]
    with refused():
        load(tmp_path / "disguised.onnx")
    for path in [*programs.values(), foreign, foreign / "a.xml"]:
        for call in (load, hubconf.custom, partial(open_model, device=CPU)):
            with pytest.raises(UserError, match=f"^{path}: opening .* use --trust .in Python: trust=True"):
                call(path)
        lines = [
            error_of(capsys, val.main, "--weights", path, "--data", "demo", "--device", "cpu", *out),
            error_of(capsys, detect.main, "--weights", path, "--source", tmp_path, "--device", "cpu", *out),
            error_of(capsys, check.main, "demo", "--weights", path, "--device", "cpu"),
        ]
        assert all(f"error: {path}: opening" in line and "--trust" in line for line in lines), lines
    assert not marker.exists()
    assert not (tmp_path / "out").exists()


def test_trust_is_passed_on(tmp_path: Path, capsys: pytest.CaptureFixture):
    path = tmp_path / "a.torchscript"
    path.write_bytes(b"not TorchScript")
    (tmp_path / "a.png").touch()
    for call in (load, hubconf.custom):
        with refused():
            call(path, trust=True)
    for main, *given in (
        (val.main, "--weights", path, "--data", "demo", "--device", "cpu"),
        (detect.main, "--weights", path, "--source", tmp_path, "--device", "cpu"),
        (check.main, "demo", "--weights", path, "--device", "cpu"),
    ):
        assert "cannot be opened" in error_of(capsys, main, *given, "--trust")


def test_what_was_recorded_is_known_by_other_names_until_a_byte_changes(tmp_path: Path, monkeypatch):
    path, model = tmp_path / "a.pt2", write_openvino(tmp_path / "a_openvino_model")
    path.write_bytes(b"program")
    assert not is_own_export(path)
    cache_folder().mkdir(parents=True)
    usual = os.umask(0)
    try:
        record_export(path, path)
    finally:
        os.umask(usual)
    record = cache_folder() / RECORD
    assert (record.stat().st_mode & 0o777, len(record.read_text())) == (0o600, 66)
    record.write_text("torn")  # by a crash
    record_export(path, path)
    record_export(model, model)
    moved = path.rename(tmp_path / "b.torchscript")
    assert is_own_export(moved)
    moved.write_bytes(b"Program")
    assert not is_own_export(moved)

    copy = tmp_path / "renamed"
    for number, part in enumerate(PARTS):
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(model, copy)
        for name in PARTS[:2]:
            (copy / name).rename(copy / f"other{Path(name).suffix}")
        files = (copy / "other.xml", copy / "other.bin", copy / part)
        assert is_own_export(copy)
        assert is_own_export(files[0])
        files[number].write_text("changed")
        assert not is_own_export(copy)
    files[number].unlink()
    assert not is_own_export(copy)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another machine"))
    assert not is_own_export(model)


def test_a_record_that_others_may_write_to_is_not_used(tmp_path: Path, monkeypatch, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "a.pt2"
    path.write_bytes(b"program")
    record_export(path, path)
    record = cache_folder() / RECORD
    for changed, mode in ((record, 0o620), (record, 0o602), (record.parent, 0o777), (record.parent, 0o770)):
        usual = changed.stat().st_mode & 0o777
        assert is_own_export(path)
        changed.chmod(mode)
        assert not is_own_export(path)
        content = record.read_bytes()
        record_export(path, path)
        assert record.read_bytes() == content
        assert f"{path}: cannot be recorded as yours in {record}" in caplog.messages[-1]
        assert "--trust" in caplog.messages[-1]
        changed.chmod(usual)
    digest, copy = record.read_text().strip(), tmp_path / "copy"
    for content in (f"no{digest}", f"{digest[:-1]}\n{digest[-1]}"):
        record.write_text(content)
        assert not is_own_export(path)
    copy.write_text(f"{digest}\n")
    record.unlink()
    record.symlink_to(copy)
    assert not is_own_export(path)
    record.unlink()
    record_export(path, path)
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    assert not is_own_export(path)
    record.unlink()
    record_export(path, path)
    assert not record.exists()  # it would be in another user's folder


def test_files_that_cannot_be_read_are_one_line(tmp_path: Path):
    own = tmp_path / "own.pt2"
    own.write_bytes(b"program")
    record_export(own, own)
    os.mkfifo(tmp_path / "pipe.pt2")
    with refused():
        open_model(tmp_path / "pipe.pt2", device=CPU, trust=True)
    folder = write_openvino(tmp_path / "a_openvino_model")
    (folder / "a.xml").unlink()
    os.mkfifo(folder / "a.xml")
    with refused():
        open_model(folder, device=CPU)
