"""A data set that is given by its content."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

import lockstep
from tests.helpers.messages import refused
from tests.helpers.tiny import write_dataset, write_model
from tests.lockstep.hooks import SMALL, on_end


def written(calls: list) -> dict:
    """Returns the content of the YAML that the newest call names."""
    return yaml.safe_load(Path(calls[-1]["data"]).read_text())


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
    assert lockstep.val(run.best, device="cpu", workers=0, plots=False).metrics["AP"] == run.metrics["AP"]
    with refused(
        "data: must be text, a number, or a list or mapping of these, got an object of type object", lockstep.Error
    ):
        lockstep.train({"train": object()})


def test_a_check_does_not_write_to_the_data_set(tmp_path, monkeypatch):
    """The working folder is the data set; the file with the content of its YAML lies elsewhere."""
    folder = write_dataset(tmp_path / "set", train=3, val=2).parent
    before = sorted(folder.rglob("*"))
    monkeypatch.chdir(folder)
    data = {"path": ".", "train": "images/train", "val": "images/val", "names": ["light", "dark"]}
    checked = lockstep.check(data, split=["val"], imgsz=None, plots=False)
    assert [issue["kind"] for issue in checked["issues"]] == ["unused classes"]
    assert checked["report"] is None
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(("path", "folder"), [(None, "."), ("~/set", "home/set")])
def test_the_folder_of_a_data_set_is_that_of_its_yaml(replaced, tmp_path, monkeypatch, path, folder):
    """A `path` of None is loaded from `path:` in a YAML."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    calls = replaced()
    lockstep.train({"path": path, "train": "images"})
    assert written(calls) == {"path": str(tmp_path / folder), "train": "images"}
    with refused("data: path: must be text, got 3", lockstep.Error):
        lockstep.train({"path": 3, "train": "images"})


def test_a_call_with_a_mistake_writes_nothing(tmp_path):
    with pytest.raises(lockstep.Error, match="epocs"):
        lockstep.train({"train": "images", "names": ["cat"]}, epocs=3)
    assert not list(tmp_path.iterdir())
