"""The folder of a run: made, locked, written to, and removed when the run fails early."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

import engine.run
from engine.run import Run, claim_folder, prepare_process
from utils.config.settings import Hyperparameters, TrainConfig
from utils.distributed.context import DistributedContext
from utils.files.locks import FileLock

CPU = DistributedContext.single("cpu")


@pytest.fixture(autouse=True)
def _restored_kernels() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(before)


def test_a_failed_run_removes_its_folder_while_holding_the_lock(tmp_path, monkeypatch):
    """Otherwise another start could use the folder and lose it."""
    lock, remove = tmp_path / "exp" / engine.run.LOCK_NAME, shutil.rmtree
    locked = []
    monkeypatch.setattr(shutil, "rmtree", lambda *a, **k: (locked.append(FileLock(lock).acquire()), remove(*a, **k)))
    run = replace(run_with(tmp_path / "exp", project=str(tmp_path)), begun=False)
    with pytest.raises(RuntimeError), claim_folder(CPU, run):
        raise RuntimeError
    assert locked[0].startswith(f"process {os.getpid()} ")
    assert not any(tmp_path.iterdir())


def test_unfinished_files_of_a_killed_process_are_removed(tmp_path):
    (tmp_path / "exp").mkdir()
    for name in (".last.pt.0123abcd.tmp", ".settings.yaml.0123abcd.tmp", ".results.csv.0123abcd.tmp"):
        (tmp_path / "exp" / name).touch()
    run = replace(run_with(tmp_path / "exp", project=str(tmp_path), exist_ok=True), begun=False)
    with claim_folder(CPU, run):
        assert not list((tmp_path / "exp").glob(".*.tmp"))


def run_with(folder: Path, **settings) -> Run:
    return Run(folder, TrainConfig(**settings), Hyperparameters(), None, [])


@pytest.mark.parametrize("name", ["train.log", ".lock"])
def test_nothing_is_written_where_a_symbolic_link_leads(tmp_path, name):
    """With --exist-ok, the folder may contain what another user has put there."""
    (tmp_path / "target").write_text("precious")
    (tmp_path / name).symlink_to(tmp_path / "target")
    settings = {"project": str(tmp_path.parent), "name": tmp_path.name, "exist_ok": True}
    run = replace(run_with(tmp_path, **settings), begun=False)
    with pytest.raises(PermissionError, match="symbolic link"), claim_folder(CPU, run):
        pass
    assert (tmp_path / "target").read_text() == "precious"


@pytest.mark.parametrize(
    ("former", "data", "is_said"),
    [("old.yaml", "new.yaml", True), ("new.yaml", "./new.yaml", False), ("", "new.yaml", False)],
)
def test_a_run_over_one_on_other_data_says_so(tmp_path, capsys, former, data, is_said):
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump({"config": {"data": former}}))
    settings = {"project": str(tmp_path.parent), "name": tmp_path.name, "exist_ok": True, "data": data}
    run = replace(run_with(tmp_path, **settings), begun=False)
    prepare_process(CPU, run.config, run.hyp)
    with claim_folder(CPU, run):
        pass
    line = f"warning: {tmp_path}: has a run on other data, old.yaml, whose files stay until this run replaces them"
    assert (line in capsys.readouterr().out) == is_said


def test_settings_are_stored_with_the_run(tmp_path):
    run = run_with(tmp_path, exist_ok=True, rect=True)
    prepare_process(CPU, run.config, run.hyp)
    with claim_folder(CPU, run):
        pass
    stored = yaml.safe_load((tmp_path / "settings.yaml").read_text())
    assert (stored["config"]["rect"], stored["hyp"]["box"]) == (True, 7.5)
