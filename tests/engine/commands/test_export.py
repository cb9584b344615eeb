"""When a run exports its best checkpoint."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.checkpoint.progress import Progress
from engine.commands import export
from tests.helpers.run_checkpoints import claim, saved
from utils.config.export_formats import EXPORT_FORMATS
from utils.config.settings import ExportConfig, TrainConfig
from utils.errors import UserError

CONFIG = TrainConfig(export=["onnx", "torchscript"])


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The formats that were exported, by a stand-in which writes empty files, and fails where one is named failing."""
    names: list[str] = []

    def open_exporter(config: ExportConfig) -> SimpleNamespace:
        best = Path(config.weights)

        def write(name: str) -> Path:
            if best.with_name("failing").exists():
                raise UserError(f"{name}: failed")
            names.append(name)
            path = best.with_name(best.stem + EXPORT_FORMATS[name].suffix)
            path.touch()
            return path

        return SimpleNamespace(export=write)

    monkeypatch.setattr(export, "_open_exporter", open_exporter)
    return names


def exports_of(folder: Path, exported: list[str]) -> list[str]:
    exported.clear()
    export.export_best(folder, CONFIG)
    return list(exported)


def test_files_of_the_same_checkpoint_stay_whatever_the_times_of_the_files(tmp_path: Path, exported: list[str]):
    folder = tmp_path / "exp"
    folder.mkdir()
    claim(folder, "a")
    saved(folder / "best.pt", Progress(), run_id="a")
    assert exports_of(folder, exported) == CONFIG.export
    copy = shutil.copytree(folder, tmp_path / "copy")
    os.utime(copy / "best.pt")  # a copy may give it any time
    assert exports_of(copy, exported) == []
    (copy / "best.onnx").unlink()
    assert exports_of(copy, exported) == ["onnx"]
    saved(folder / "best.pt", Progress(epoch=7), run_id="a")
    os.utime(folder / "best.pt", (0, 0))
    assert exports_of(folder, exported) == CONFIG.export
    (folder / export.EXPORT_RECORD).write_text("[")
    assert exports_of(folder, exported) == CONFIG.export


def test_what_has_failed_is_exported_again(tmp_path: Path, exported: list[str]):
    claim(tmp_path, "a")
    saved(tmp_path / "best.pt", Progress(), run_id="a")
    (tmp_path / "failing").touch()
    with pytest.raises(UserError, match="2 of 2 formats failed"):
        exports_of(tmp_path, exported)
    (tmp_path / "failing").unlink()
    assert exports_of(tmp_path, exported) == CONFIG.export
