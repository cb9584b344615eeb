"""When a run exports its best checkpoint."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.commands import export
from engine.commands.export_record import EXPORT_RECORD, ExportRecord
from engine.train.checkpoint import Progress
from engine.train.folder import LOCK_NAME, lock_folder
from tests.helpers.messages import refused
from tests.helpers.run_checkpoints import save_checkpoint
from utils.config.export_formats import EXPORT_FORMATS
from utils.config.settings import ExportConfig, TrainConfig
from utils.errors import UserError
from utils.files.checksum import sha256_of, sha256_of_tree
from utils.files.locks import FileLock

CONFIG = TrainConfig(export=["onnx", "torchscript"])


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The formats that were exported, by a stand-in which writes short files, and fails where one is named failing."""
    names: list[str] = []

    def open_exporter(config: ExportConfig) -> SimpleNamespace:
        best = Path(config.weights)

        def write(name: str, before_publish: Callable[[Path], None]) -> Path:
            if best.with_name("failing").exists():
                raise UserError(f"{name}: failed")
            names.append(name)
            path = best.with_name(best.stem + EXPORT_FORMATS[name].suffix)
            complete = path.with_name(f".{path.name}")
            same = best.with_name("same").exists()
            complete.write_text(name if same else f"{name} of {sha256_of(best)}")
            before_publish(complete)
            if best.with_name("killed").exists():
                raise KeyboardInterrupt
            return complete.rename(path)

        return SimpleNamespace(export=write)

    monkeypatch.setattr(export, "open_exporter", open_exporter)
    return names


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a run with a best.pt."""
    folder = tmp_path / "exp"
    folder.mkdir()
    save_checkpoint(folder / "best.pt", Progress(), run_id="a")
    return folder


def exports_of(folder: Path, exported: list[str]) -> list[str]:
    exported.clear()
    export.export_best(folder, CONFIG)
    return list(exported)


def test_files_of_the_same_checkpoint_stay_whatever_the_times_of_the_files(folder: Path, exported: list[str]):
    assert exports_of(folder, exported) == CONFIG.export
    copy = shutil.copytree(folder, folder.with_name("copy"))
    os.utime(copy / "best.pt")  # a copy may give it any time
    assert exports_of(copy, exported) == []
    (copy / "best.onnx").unlink()
    assert exports_of(copy, exported) == ["onnx"]
    save_checkpoint(folder / "best.pt", Progress(epoch=7), run_id="a")
    os.utime(folder / "best.pt", (0, 0))
    assert exports_of(folder, exported) == CONFIG.export


def test_a_failure_of_the_training_is_logged_only_before_an_export(folder: Path, exported: list[str], caplog):
    failure = UserError("on_end failed")
    export.export_best(folder, CONFIG, failure=failure)
    assert caplog.messages[:1] == ["on_end failed"]
    caplog.clear()
    export.export_best(folder, CONFIG, failure=failure)
    assert exported == CONFIG.export
    assert caplog.messages == []


@pytest.mark.parametrize("case", ["never exported", "exported again by hand", "record damaged"])
def test_a_file_of_the_user_stays(folder: Path, exported: list[str], caplog, capsys, case: str):
    """For example, export.py may have written a file with --half under the name of the run's own export."""
    if case != "never exported":
        exports_of(folder, exported)
    if case == "record damaged":
        (folder / EXPORT_RECORD).write_text("[")
        (folder / "best.torchscript").unlink()
    (folder / "best.onnx").write_text("mine")
    exports_of(folder, exported)
    assert exported == ([] if case == "exported again by hand" else ["torchscript"])
    assert (folder / "best.onnx").read_text() == "mine"
    log = capsys.readouterr().out + caplog.text  # the first export has set up logging
    assert log.count("best.onnx is not an export of this run, and stays") == 1


@pytest.mark.parametrize("was_exported", [True, False])
def test_a_killed_export_is_repeated_unless_the_user_has_put_a_file_there(
    folder: Path, exported: list[str], capsys, was_exported: bool
):
    """It was complete and recorded, but did not have its name yet: an earlier export is still in place."""
    if was_exported:
        exports_of(folder, exported)
        save_checkpoint(folder / "best.pt", Progress(epoch=7), run_id="a")
    (folder / "killed").touch()
    with pytest.raises(KeyboardInterrupt):
        exports_of(folder, exported)
    (folder / "killed").unlink()
    mine = shutil.copytree(folder, folder.with_name("mine"))
    (mine / "best.onnx").write_text("mine")
    assert exports_of(folder, exported) == CONFIG.export
    assert exports_of(folder, exported) == []
    assert exports_of(mine, exported) == ["torchscript"]
    assert (mine / "best.onnx").read_text() == "mine"
    assert "best.onnx is not an export of this run, and stays" in capsys.readouterr().out


def test_a_file_whose_checksum_cannot_be_read_does_not_replace_the_earlier_one(
    folder: Path, exported: list[str], monkeypatch
):
    def fail(record: ExportRecord, name: str, path: Path) -> None:
        raise OSError(errno.EIO, "Input/output error", str(path))

    exports_of(folder, exported)
    before = (folder / "best.onnx").read_text()
    save_checkpoint(folder / "best.pt", Progress(epoch=7), run_id="a")
    with monkeypatch.context() as patch:
        patch.setattr(ExportRecord, "add", fail)
        with pytest.raises(UserError, match="2 of 2 formats failed"):
            exports_of(folder, exported)
    assert (folder / "best.onnx").read_text() == before
    assert exports_of(folder, exported) == CONFIG.export


def test_an_export_that_equals_the_earlier_one_is_made_once(folder: Path, exported: list[str]):
    """The weights are the same, but the checkpoint differs in other values."""
    (folder / "same").touch()
    exports_of(folder, exported)
    save_checkpoint(folder / "best.pt", Progress(epoch=7), run_id="a")
    assert exports_of(folder, exported) == CONFIG.export
    assert exports_of(folder, exported) == []


def test_a_hidden_file_changes_no_exported_folder(tmp_path: Path):
    (tmp_path / "best.xml").write_text("model")
    before = sha256_of_tree(tmp_path)
    (tmp_path / ".DS_Store").write_text("positions of icons")
    assert sha256_of_tree(tmp_path) == before


def test_a_record_that_cannot_be_written_keeps_no_format_from_being_exported(
    folder: Path, exported: list[str], monkeypatch, caplog, capsys
):
    def fail(path: Path, content: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr("engine.commands.export_record.write_whole", fail)
    assert exports_of(folder, exported) == CONFIG.export
    assert ".exports: cannot be written (No space left on device)" in capsys.readouterr().out + caplog.text


def test_one_process_exports_at_a_time(folder: Path, exported: list[str], monkeypatch):
    """Two that write best.onnx together might leave a mixture of it and of its record."""
    monkeypatch.setattr(export, "lock_folder", partial(lock_folder, patience_s=0.0))
    with FileLock(folder / LOCK_NAME) as lock:
        lock.acquire()
        with pytest.raises(UserError, match="another process"):
            exports_of(folder, exported)
    assert exports_of(folder, exported) == CONFIG.export


def test_what_has_failed_is_exported_again(folder: Path, exported: list[str]):
    (folder / "failing").touch()
    with pytest.raises(UserError, match="2 of 2 formats failed"):
        exports_of(folder, exported)
    (folder / "failing").unlink()
    assert exports_of(folder, exported) == CONFIG.export
    assert exports_of(folder, exported) == []


def test_a_failed_export_names_the_command_that_repeats_it_with_other_flags(folder: Path, exported: list[str]):
    """Advice such as --no-check is about export.py; train.py has no such flag."""
    (folder / "failing").touch()
    with refused(
        f"; to export with other flags: python export.py --weights {folder}/best.pt --format onnx torchscript"
    ):
        exports_of(folder, exported)


def test_an_earlier_export_is_replaced_after_a_new_one_has_failed(folder: Path, exported: list[str]):
    """The earlier export is still the run's own."""
    exports_of(folder, exported)
    save_checkpoint(folder / "best.pt", Progress(epoch=7), run_id="a")
    (folder / "failing").touch()
    with pytest.raises(UserError, match="2 of 2 formats failed"):
        exports_of(folder, exported)
    (folder / "failing").unlink()
    assert exports_of(folder, exported) == CONFIG.export
