"""The folder of a search or a cross-validation: with which settings the same command continues there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.messages import refused
from tests.helpers.tiny import write_dataset, write_weights
from tools.experiment.experiment import KFOLD_YAML, Experiment, open_experiment
from utils.address import as_address
from utils.config.tool_settings import KfoldConfig
from utils.errors import UserError


@pytest.fixture
def started(tmp_path) -> Path:
    """A data set and a cross-validation on it, which has trained."""
    write_dataset(tmp_path / "set", train=4, val=2)
    write_weights(tmp_path / "start.pt", ["light", "dark"])
    continued(tmp_path, weights=str(tmp_path / "start.pt"), epochs=3, device="0")
    (tmp_path / "a" / "fold1").mkdir()
    (tmp_path / "a" / "fold1" / "last.pt").touch()
    return tmp_path


def continued(root: Path, values=(("hyper-parameter lr0", 0.01),), **settings) -> Experiment:
    settings = {"data": str(root / "set" / "data.yaml"), "cache_dir": str(root), **settings}
    experiment = open_experiment(KfoldConfig(project=str(root), name="a", **settings), KFOLD_YAML, dict(values))
    experiment.store_or_verify_settings()
    return experiment


def test_the_address_of_weights_is_stored_without_its_login_and_continues(tmp_path):
    write_dataset(tmp_path / "set", train=4, val=2)
    for query in ("token=a", "token=b"):
        continued(tmp_path, weights=as_address(f"https://me:secret@host/w.pt?{query}"))
    text = (tmp_path / "a" / KFOLD_YAML).read_text()
    assert "--weights: https://host/w.pt\n" in text


def test_files_may_move_and_what_does_not_affect_results_may_change(started):
    (started / "start.pt").rename(started / "moved.pt")
    continued(started, weights=str(started / "moved.pt"), epochs=3, device="cpu", workers=2, cache="ram")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"epochs": 4},
            "was started with --epochs 3, not 4; continue with the same settings, or choose another --name",
        ),
        (
            {"epochs": 3, "values": [("hyper-parameter lr0", 0.02)]},
            "was started with hyper-parameter lr0 0.01, not 0.02",
        ),
        ({"epochs": 3, "single_cls": True}, "was started with classes "),
    ],
)
def test_a_difference_is_named(started, settings, message):
    with pytest.raises(UserError, match=message):
        continued(started, weights=str(started / "start.pt"), **settings)


@pytest.mark.parametrize("changed", ["start.pt", "labels/train", "data.yaml"])
def test_changed_content_is_named(started, changed):
    if changed == "start.pt":
        write_weights(started / changed, ["light", "dark", "other"])
    elif changed == "data.yaml":
        (started / "set" / changed).write_text((started / "set" / changed).read_text().replace("light", "lamp"))
    else:
        next((started / "set" / changed).iterdir()).write_text("0 0.5 0.5 0.1 0.1\n")
    with pytest.raises(UserError, match=r"was started with (--weights of digest|the digest of|classes)"):
        continued(started, weights=str(started / "start.pt"), epochs=3)


def test_a_folder_in_which_nothing_was_trained_may_start_with_other_settings(started):
    (started / "a" / "fold1" / "last.pt").unlink()
    continued(started, epochs=4)
    assert [path.name for path in (started / "a").iterdir()] == [KFOLD_YAML]


@pytest.mark.parametrize(("name", "work"), [("search.yaml", "a search"), ("settings.yaml", "a training")])
def test_a_folder_with_other_work_is_refused_before_the_data_is_read(tmp_path, name, work):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / name).touch()
    with refused(f".../a: contains {work}; choose another --name"):
        continued(tmp_path)
