"""The folder of a run: whose it is, and when it is removed."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from engine.run.folder import claim_folder, run_started_by
from tests.helpers.run_checkpoints import checkpoint_of
from utils.config.settings import TrainConfig
from utils.distributed.context import DistributedContext
from utils.errors import UserError


def claim(project: Path, launcher: str, stack: ExitStack, *, is_kept: bool = True, exist_ok: bool = False) -> Path:
    ctx = replace(DistributedContext.single(), launcher_identity=launcher)
    config = TrainConfig(project=str(project), exist_ok=exist_ok)
    description = checkpoint_of(run_id=f"of {launcher}", config=config, command=config).description
    folder = claim_folder(ctx, None, description, stack, is_kept=lambda: is_kept)
    stored = yaml.safe_load((folder / "settings.yaml").read_text())
    assert (stored["run_id"], stored["config"]["project"]) == (f"of {launcher}", str(project))
    return folder


def test_a_restart_by_torchrun_finds_the_newest_run_that_it_has_started(tmp_path):
    """Two jobs have the same command, and so the same --name."""
    launchers = ["none host 7 100", "none host 7 200"]
    folders = []
    for launcher in launchers:
        with ExitStack() as stack:
            folders.append(claim(tmp_path, launcher, stack))
    assert [folder.name for folder in folders] == ["exp", "exp2"]
    assert [run_started_by(tmp_path, [launcher, "another node"]) for launcher in launchers] == folders
    assert run_started_by(tmp_path, ["none host 7 1", ""]) is None
    assert run_started_by(tmp_path, launchers, "exp") == folders[1]
    assert run_started_by(tmp_path, launchers, "another run of the script") is None


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_new_folder_is_removed_if_the_run_fails_before_its_first_step(tmp_path, is_kept):
    stack = ExitStack()
    folder = claim(tmp_path, "", stack, is_kept=is_kept)
    (folder / "last.pt").touch()
    stack.__exit__(UserError, UserError("failed"), None)
    assert folder.exists() == is_kept


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_run_that_replaces_another_leaves_no_checkpoint_if_it_fails_before_its_first_step(tmp_path, is_kept):
    (tmp_path / "exp").mkdir()
    of_others = {"notes.txt", "epoch9_chosen.pt", "unscored images"}
    for name in (*of_others, "best.pt", "epoch9.pt"):
        (tmp_path / "exp" / name).touch()
    stack = ExitStack()
    folder = claim(tmp_path, "", stack, is_kept=is_kept, exist_ok=True)
    (folder / "last.pt").touch()
    stack.__exit__(UserError, UserError("failed"), None)
    stored = {path.name for path in folder.iterdir()}
    assert stored >= {*of_others, "train.log"}
    assert not stored & {"best.pt", "epoch9.pt", *(() if is_kept else ("last.pt", "settings.yaml"))}
    assert ("last.pt" in stored) == is_kept
