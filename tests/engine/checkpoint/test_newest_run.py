from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import lockstep
from engine.checkpoint.newest_run import (
    best_of_newest_run,
    checkpoint_of_newest_run,
    new_run_id,
    newest_run_id,
    run_id_of,
)
from engine.checkpoint.progress import Progress
from engine.commands.export import export_best
from tests.helpers.run_checkpoints import name_newest_run, replace_earlier_run, save_checkpoint
from utils.config.settings import TrainConfig
from utils.errors import UserError
from utils.files.torch_file import write_checkpoint


def test_checkpoints_are_those_of_the_newest_run_if_their_ids_are(tmp_path: Path):
    """`cp -r`, which gives files new times, changes nothing."""
    folder = tmp_path / "exp"
    folder.mkdir()
    assert checkpoint_of_newest_run(folder) is None
    save_checkpoint(folder / "best.pt", Progress(), run_id="a")
    save_checkpoint(folder / "last.pt", Progress(), run_id="b")
    for newest, last, best in (("a", False, True), ("b", True, False), ("c", False, False)):
        name_newest_run(folder, newest)
        copy = shutil.copytree(folder, tmp_path / newest, copy_function=shutil.copyfile)
        for place in (folder, copy):
            assert checkpoint_of_newest_run(place) == (place / "last.pt" if last else None)
            assert best_of_newest_run(place) == (place / "best.pt" if best else None)


@pytest.mark.parametrize("content", [None, "", "- a", "a: [", "config: {}", "run_id: 3", "run_id: [a]", "\ufffe"])
def test_a_folder_without_usable_settings_leaves_its_checkpoints_to_whoever_asks(tmp_path: Path, content):
    """No start of a run may fail or begin anew because a user has edited or removed a file."""
    save_checkpoint(tmp_path / "last.pt", Progress(), run_id="a")
    if content is not None:
        (tmp_path / "settings.yaml").write_text(content)
    assert newest_run_id(tmp_path) is None
    assert checkpoint_of_newest_run(tmp_path) == tmp_path / "last.pt"


def test_converted_weights_are_not_those_of_the_newest_run(tmp_path: Path):
    """They were not trained here, whatever their file is called."""
    name_newest_run(tmp_path, "a")
    write_checkpoint({"model": {}, "ema": {}}, tmp_path / "best.pt")
    assert best_of_newest_run(tmp_path) is None


def test_a_damaged_checkpoint_is_not_taken_for_an_earlier_runs(tmp_path: Path):
    """Otherwise a restart would begin anew and overwrite it silently."""
    name_newest_run(tmp_path, "a")
    (tmp_path / "last.pt").write_bytes(b"damaged")
    assert run_id_of(tmp_path / "last.pt") is None
    assert checkpoint_of_newest_run(tmp_path) == tmp_path / "last.pt"


def test_ids_survive_yaml(tmp_path: Path):
    """Some consist of digits, or look like a number otherwise."""
    for run_id in ("0123456789012345", "12345678901234e5", "0x12345678901234", new_run_id()):
        name_newest_run(tmp_path, repr(run_id))
        assert newest_run_id(tmp_path) == run_id


def test_a_best_pt_of_an_earlier_run_is_not_exported_as_the_newest_ones(tmp_path: Path, caplog):
    """`lockstep.Run` does not take it, either."""
    replace_earlier_run(tmp_path)
    save_checkpoint(tmp_path / "best.pt", Progress(), run_id="earlier")
    with pytest.raises(UserError, match=r"best\.pt: belongs to an earlier run in this folder"):
        _ = lockstep.Run(tmp_path).best
    with pytest.raises(
        UserError, match=r"last\.pt: belongs to an earlier run in this folder; this one has saved nothing yet"
    ):
        lockstep.Run(tmp_path).load()
    export_best(tmp_path, TrainConfig(export=["onnx"]))
    assert caplog.messages == ["--export: no best.pt to export: no epoch has a score, or it was moved"]
    name_newest_run(tmp_path, "earlier")  # which continues
    assert best_of_newest_run(tmp_path) == tmp_path / "best.pt" == lockstep.Run(tmp_path).best
