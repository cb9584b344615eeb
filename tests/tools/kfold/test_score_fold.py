"""The scoring of a fold as a process of its own: what it writes, and how its failures are told apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.messages import refused
from tests.helpers.scripts import SMALL
from tests.helpers.tiny import write_dataset, write_weights
from tools.experiment.training import TrainingResult
from tools.kfold import score_fold
from tools.kfold.cross_validate import CrossValidation, cross_validate
from tools.kfold.score_fold import validation_of
from utils.config.parser import parse_config
from utils.config.search_settings import KfoldConfig
from utils.config.settings import ValConfig
from utils.config.settings_file import settings_file
from utils.process.child import RunFailed
from utils.process.signals import StopSignals


@pytest.fixture(scope="module")
def folds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the YAML of the first fold, and its training, which is done."""
    folder = tmp_path_factory.mktemp("folds")
    write_dataset(folder / "set", train=4, val=4).rename(folder / "fold1.yaml")
    content = (folder / "fold1.yaml").read_text()
    (folder / "fold1.yaml").write_text(f"path: {folder / 'set'}\n{content}")
    (folder / "fold1").mkdir()
    write_weights(folder / "fold1" / "best.pt", ["light", "dark"])
    return folder


def config_of(folder: Path, *more: str) -> KfoldConfig:
    flags = ["--data", "unused", *SMALL, "--cache-dir", str(folder), "--folds", "2"]
    return parse_config(KfoldConfig, [*flags, *more])


def validation_in(folder: Path, *more: str) -> ValConfig:
    return validation_of(config_of(folder, *more), folder / "fold1" / "best.pt", folder / "fold1.yaml")


def score_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> CrossValidation:
    """Returns the scores of the first fold, scored now or before."""
    monkeypatch.setattr("tools.kfold.cross_validate.train", lambda *_: TrainingResult())
    with StopSignals() as signals:
        return next(cross_validate(config_of(folder), signals, data_folder=folder, folder=folder))


def test_a_fold_that_cannot_be_scored_is_named(folds, monkeypatch):
    """If its process is killed because memory runs out, the trial has not failed, either."""
    monkeypatch.setattr(score_fold, "command_prefix", lambda _: ["sh", "-c", "kill -9 $$"])
    (folds / "fold1" / "detections.npz").unlink(missing_ok=True)
    message = (
        "fold1 could not be scored: killed by SIGKILL; is there enough memory? (it is trained; the same command scores "
        "it)"
    )
    with refused(message, RunFailed) as caught:
        score_first(folds, monkeypatch)
    assert caught.value.result.code == -9


@pytest.mark.parametrize("more", [[], ["--batch-size", "-1", "--classes", "light", "--single-cls", "--device", "0,1"]])
def test_the_process_gets_the_settings(folds, more):
    validation = validation_in(folds, *more)
    with settings_file(validation) as words:
        assert parse_config(ValConfig, [words]) == validation
