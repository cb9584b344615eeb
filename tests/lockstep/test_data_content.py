"""A data set that is given by its content."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

import lockstep
from tests.helpers.messages import refused
from tests.helpers.tiny import write_dataset, write_model
from tests.lockstep.script_command import PRINT_SETTINGS, SMALL, on_end


def test_the_data_of_a_check_is_not_written_to(command, tmp_path, capsys, monkeypatch):
    """The working folder is the data set; the file with the content of its YAML lies elsewhere."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path.parent / "cache"))
    command(f"{PRINT_SETTINGS}; write_result(issues=[])")
    data = {"path": ".", "train": "images", "names": ["cat"]}
    assert lockstep.check(data, split="val", out=Path("checked"), imgsz=None, plots=False) == {"issues": []}
    name, settings = json.loads(capsys.readouterr().out)
    assert name == "check"
    assert yaml.safe_load(Path(settings.pop("data")).read_text()) == data | {"path": str(tmp_path)}
    assert settings == {"split": ["val"], "out": "checked", "plots": False}
    assert not list(tmp_path.iterdir())
    lockstep.check("-x.yaml", split=["train", "val"])
    assert json.loads(capsys.readouterr().out)[1] == {"data": "-x.yaml", "split": ["train", "val"]}


@pytest.mark.parametrize(("path", "folder"), [(None, "."), ("~/set", "home/set")])
def test_the_folder_of_a_data_set_given_by_its_content_is_that_of_its_yaml(
    command, tmp_path, capsys, monkeypatch, path, folder
):
    """A `path` of None is loaded from `path:` in a YAML."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    command(f"{PRINT_SETTINGS}; write_result(issues=[])")
    lockstep.check({"path": path, "train": "images"})
    content = yaml.safe_load(Path(json.loads(capsys.readouterr().out)[1]["data"]).read_text())
    assert content == {"path": str(tmp_path / folder), "train": "images"}
    with refused("data: path: must be text, got 3", lockstep.Error):
        lockstep.check({"path": 3, "train": "images"})


def test_a_data_set_is_given_by_its_content(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_dataset(tmp_path / "set", train=5, val=2)
    data = {"path": "set", "train": Path("images/train"), "val": ["images/val"], "names": {0: "light", 1: "dark"}}
    run = lockstep.train(data, model=write_model(tmp_path / "tiny.yaml"), epochs=1, lr0=0.01, callbacks=on_end, **SMALL)
    assert run.folder == tmp_path / "runs" / "train" / "exp"
    assert run.best.is_file()
    assert run.last.is_file()
    assert (run.folder / "done.txt").is_file()
    assert run.history["epoch"].tolist() == [1.0]
    assert run.metrics["AP"] == run.history["metrics/AP"][0]
    assert run.load().names == {0: "light", 1: "dark"}
    with refused(
        "data: must be text, a number, or a list or mapping of these, got an object of type object", lockstep.Error
    ):
        lockstep.train({"train": object()})


def test_the_content_of_a_data_set_may_have_numbers_of_numpy(command, tmp_path, capsys):
    command(f"{PRINT_SETTINGS}; write_result(issues=[])")
    data = {"path": str(tmp_path), "train": (Path("a"), "b"), "names": {np.int64(0): np.str_("cat")}, "nc": np.int64(1)}
    lockstep.check(data)
    content = yaml.safe_load(Path(json.loads(capsys.readouterr().out)[1]["data"]).read_text())
    assert content == {"path": str(tmp_path), "train": ["a", "b"], "names": {0: "cat"}, "nc": 1}


@pytest.mark.parametrize(
    ("data", "settings", "left"),
    [
        ({}, {}, []),  # refused by the command
        ({"train": "images", "names": ["cat"]}, {"epocs": 3}, []),  # refused before it starts
        ({"train": "images", "names": ["cat"]}, {}, ["runs"]),  # another run may have started with the same data set
    ],
)
def test_a_refused_data_set_leaves_no_file(command, tmp_path, monkeypatch, data, settings, left):
    monkeypatch.chdir(tmp_path)
    command("write_result(error='refused'); sys.exit(2)")
    with pytest.raises(lockstep.Error):
        lockstep.train(data, **settings)
    assert [path.name for path in tmp_path.iterdir()] == left


@pytest.mark.parametrize("name", ["data", "os.path.abspath(data)"])
def test_a_refusal_of_the_content_names_the_parameter(command, tmp_path, monkeypatch, name):
    """The user has not written the file, which is removed."""
    monkeypatch.chdir(tmp_path)
    read = "import json; data = json.loads(pathlib.Path(sys.argv[2][1:]).read_text())['data']"
    command(f"{read}; write_result(error=f'{{{name}}}: has no images (see {{{name}}})'); sys.exit(2)")
    with pytest.raises(lockstep.Error) as caught:
        lockstep.train({})
    assert str(caught.value) == caught.value.result.reason == "data: has no images (see data)"


def test_a_refused_data_set_leaves_the_file_that_another_call_has_written(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command("write_result(folder='a')")
    lockstep.train({})
    (file,) = Path("runs", "train").iterdir()
    command("write_result(error='refused'); sys.exit(2)")
    with pytest.raises(lockstep.Error):
        lockstep.train({})
    assert file.exists()


def test_a_folder_that_cannot_be_made_for_the_content_of_a_data_set_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    for project in (tmp_path / "file", tmp_path / "file" / "runs", tmp_path / ("x" * 300)):
        with refused(f"{project}/data-....yaml: the content of data cannot be written (...); choose another project"):
            lockstep.train({"train": "a"}, project=project)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with refused("the content of data cannot be written (not a directory); set XDG_CACHE_HOME to another folder"):
        lockstep.check({"train": "a"})
