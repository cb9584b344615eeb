"""The folder of a search or a cross-validation: with which settings the same command continues there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.messages import refused
from tools.experiment.experiment import open_experiment
from tools.experiment.folder import ContinuedFolder
from utils.config.tool_settings import KfoldConfig
from utils.errors import UserError


def store_or_verify_settings(
    project: Path, values: dict | None = None, data_digests: dict | None = None, **settings
) -> None:
    config = KfoldConfig(project=str(project), name="a", **settings)
    ContinuedFolder(config, "kfold.yaml", []).store_or_verify_settings(values or {}, data_digests or {})


@pytest.mark.parametrize("name", ["data", "model", "weights", "teacher", "groups"])
def test_a_folder_continues_from_another_working_folder(tmp_path, monkeypatch, name):
    (tmp_path / "below").mkdir()
    (tmp_path / "file.x").touch()
    monkeypatch.chdir(tmp_path)
    store_or_verify_settings(tmp_path, **{name: "file.x"})
    monkeypatch.chdir(tmp_path / "below")
    store_or_verify_settings(tmp_path, **{name: "../file.x"})
    with pytest.raises(UserError, match=f"was started with --{name} .*/file.x, not "):
        store_or_verify_settings(tmp_path, **{name: "other"})


def test_a_folder_is_a_path_as_the_data_set_but_no_model(tmp_path, monkeypatch):
    """`--model yolov8m` beside a folder of this name, such as that of a run, is no path."""
    folder = tmp_path / "yolov8m"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    store_or_verify_settings(tmp_path, model="yolov8m", data="yolov8m")
    monkeypatch.chdir(folder)
    store_or_verify_settings(tmp_path, model="yolov8m", data=".")
    folder.rmdir()
    store_or_verify_settings(tmp_path, model="yolov8m", data=str(folder))


def test_settings_of_a_machine_or_of_a_run_may_change_and_others_may_not(tmp_path):
    store_or_verify_settings(tmp_path, device="0", epochs=3)
    store_or_verify_settings(
        tmp_path, device="cpu", epochs=3, workers=2, cache="ram", save_minutes=1.0, tracker=["wandb"]
    )
    with refused(
        ".../a: was started with --epochs 3, not 4; continue with the same settings, or choose another --name"
    ):
        store_or_verify_settings(tmp_path, epochs=4)


@pytest.mark.parametrize("name", ["model", "weights", "teacher", "groups"])
def test_a_file_whose_content_has_changed_is_named(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("1")
    store_or_verify_settings(tmp_path, **{name: "file"})
    Path("file").write_text("2")
    with refused(
        f".../a: the content of --{name} file has changed since the start; restore it, or choose another --name"
    ):
        store_or_verify_settings(tmp_path, **{name: "file"})
    Path("file").write_text("1")
    store_or_verify_settings(tmp_path, **{name: "file"})


@pytest.mark.parametrize("file", ["hooks.py", "hooks/__init__.py"])
def test_callbacks_whose_file_has_changed_are_named(tmp_path, monkeypatch, file):
    monkeypatch.chdir(tmp_path)
    Path(file).parent.mkdir(exist_ok=True)
    Path(file).write_text("raise SystemExit  # it is not imported\n")
    store_or_verify_settings(tmp_path, callbacks="hooks:on_end")
    store_or_verify_settings(tmp_path, callbacks="hooks:on_end")
    Path(file).write_text("def on_end(run): pass\n")
    with pytest.raises(UserError, match="the content of --callbacks hooks:on_end has changed"):
        store_or_verify_settings(tmp_path, callbacks="hooks:on_end")


def test_values_and_digests_are_compared_by_name(tmp_path):
    store_or_verify_settings(tmp_path, {"hyper-parameter lr0": 0.01}, {"the split 'train'": "1"})
    with pytest.raises(UserError, match=r"was started with hyper-parameter lr0 0\.01, not 0\.02; "):
        store_or_verify_settings(tmp_path, {"hyper-parameter lr0": 0.02}, {"the split 'train'": "1"})
    with pytest.raises(UserError, match="the content of the split 'train' has changed"):
        store_or_verify_settings(tmp_path, {"hyper-parameter lr0": 0.01}, {"the split 'train'": "2"})


def test_a_split_that_comes_or_goes_is_named(tmp_path):
    store_or_verify_settings(tmp_path, {}, {"the split 'train'": "1"})
    message = ".../a: the split 'val' was not there at the start; remove it, or choose another --name"
    with refused(message):
        store_or_verify_settings(tmp_path, {}, {"the split 'train'": "1", "the split 'val'": "2"})
    with pytest.raises(UserError, match="the content of the split 'train' is missing, but was there at the start; "):
        store_or_verify_settings(tmp_path, {}, {})


def test_callbacks_that_are_found_later_only_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    digests = {"the split 'train'": "1"}
    store_or_verify_settings(tmp_path, {}, digests, callbacks="later_hooks:on_end")
    Path("later_hooks.py").write_text("def on_end(run): pass\n")
    with pytest.raises(UserError, match="--callbacks later_hooks:on_end was not there at the start"):
        store_or_verify_settings(tmp_path, {}, digests, callbacks="later_hooks:on_end")


def test_a_file_that_appears_later_is_named_even_if_there_were_none_before(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store_or_verify_settings(tmp_path, callbacks="later_hooks:on_end")
    Path("later_hooks.py").write_text("def on_end(run): pass\n")
    with pytest.raises(UserError, match="--callbacks later_hooks:on_end was not there at the start"):
        store_or_verify_settings(tmp_path, callbacks="later_hooks:on_end")


def test_settings_with_keys_that_are_no_names_differ(tmp_path):
    """They cannot be sorted: numbers are among them."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "kfold.yaml").write_text("digests: {1: x, the split: y}\n")
    with refused(".../a: the content of 1 is missing, but was there at the start; restore it, or choose ..."):
        store_or_verify_settings(tmp_path, {}, {"the split": "y"})


@pytest.mark.parametrize(
    ("name", "work"), [("search.yaml", "a search"), ("settings.yaml", "a training"), ("kfold.yaml", "")]
)
def test_a_folder_with_other_work_is_refused_before_the_data_is_read(tmp_path, name, work):
    """The results of a training were overwritten, and the folds of a search with another seed were used."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / name).touch()
    message = f".../a: contains {work}; choose another --name" if work else "data set none.yaml: no such file..."
    with refused(message):
        open_experiment(KfoldConfig(project=str(tmp_path), name="a", data="none.yaml"), "kfold.yaml", [])


def test_a_folder_that_cannot_be_created_is_refused_before_the_data_is_read(tmp_path):
    """Scanning the images may take an hour."""
    (tmp_path / "file").touch()
    with refused(".../file/a: a file with this name exists; choose another --project or --name"):
        open_experiment(KfoldConfig(project=str(tmp_path / "file"), name="a", data="none.yaml"), "kfold.yaml", [])


@pytest.mark.parametrize("content", ["- epochs\n", "epochs: 3\n", "digests: 1\n"])
def test_damaged_settings_are_refused(tmp_path, content):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "kfold.yaml").write_text(content)
    with refused(".../a/kfold.yaml: damaged; start again with another --name"):
        store_or_verify_settings(tmp_path)
