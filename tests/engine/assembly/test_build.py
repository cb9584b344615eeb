"""Assembling a run: hooks in their order, loaders, loss, the position of a resumed run; and what is
refused before anything is built."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import yaml
from torch.utils._pytree import tree_leaves

from data.samples.dataset import AugmentedImages
from engine.assembly import choices, run_checks
from engine.assembly.build import build_training
from engine.assembly.build_step import loaded_parameters
from engine.checkpoint.checkpoint import Checkpoint
from engine.hooks.hook import Action, Hook, Hooks, Training
from engine.hooks.nonfinite import NonFiniteSteps
from engine.optim.schedule import StepPlan
from engine.run.plan import plan_run
from engine.run.run import EndedRun, RunSettings
from engine.train.trainer import Trainer
from models.losses.base import class_weights
from tests.helpers.messages import refused
from tests.helpers.run_checkpoints import checkpoint_of
from tests.helpers.scripts import SMALL
from tests.helpers.tiny import TINY_ANCHOR_MODEL, write_dataset, write_model, write_weights
from utils.config.parser import parse_command
from utils.config.settings import Hyperparameters, TrainConfig
from utils.distributed.context import DistributedContext
from utils.errors import UserError
from utils.process.signals import StopSignals

FIRST = ["Checkpoints", "NonFiniteSteps", "ProgressBar"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_dataset(tmp_path / "set", train=10, val=5)
    write_model(tmp_path / "tiny.yaml")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@contextmanager
def built(*flags: str) -> Iterator[Trainer]:
    new = [*SMALL, "--data", "set/data.yaml", "--model", "tiny.yaml"]
    argv = [*(() if "--resume" in flags else new), "--project", "runs", *flags]
    command = parse_command(TrainConfig, argv)
    ctx = DistributedContext.single("cpu")
    with ExitStack() as stack:
        # No name keeps the plan, and with it the state of a checkpoint.
        yield build_training(ctx, plan_run(ctx, command.config, command.explicit_flags, stack), StopSignals(), stack)


def names(trainer: Trainer) -> list[str]:
    return [type(hook).__name__ for hook in trainer.hooks]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], [*FIRST, "ResultsCsv", "TensorBoard", "ClassScores", "Summary"]),
        (
            ["--image-weights", "--time", "2"],
            [*FIRST, "ClassWeights", "TimeLimit", "ResultsCsv", "TensorBoard", "ClassScores", "Summary"],
        ),
        (
            ["--callbacks", "user_build_hooks:on_step", "--patience", "3", "--no-noplots"],
            [*FIRST, "ResultsCsv", "TensorBoard", "ClassScores", "Plots", "UserCallbacks", "EarlyStopping", "Summary"],
        ),
    ],
)
def test_the_hooks_are_those_that_the_settings_ask_for(folder, flags, expected):
    (folder / "user_build_hooks.py").write_text("def on_step(run): pass\n")
    with built(*flags) as trainer:
        assert names(trainer) == expected


def test_hooks_are_closed_and_the_folder_of_a_run_that_fails_is_removed(folder, monkeypatch):
    closed = []
    monkeypatch.setattr(NonFiniteSteps, "close", lambda hook: closed.append(type(hook).__name__))

    def break_in_a_run() -> None:
        with built() as trainer:
            settings = yaml.safe_load((trainer.run.folder / "settings.yaml").read_text())
            assert (trainer.run.folder, settings["config"]["batch_size"]) == (Path("runs/exp"), 4)
            raise UserError("stop here")

    with refused("stop here"):
        break_in_a_run()
    assert closed == ["NonFiniteSteps"]
    assert not (folder / "runs" / "exp").exists()


def test_the_loaders_and_the_step_are_those_of_the_settings():
    with built("--epochs", "3", "--nominal-batch", "8", "--optimizer", "AdamW") as trainer:
        assert (len(trainer.loader), len(trainer.loader.index)) == (3, 10)
        assert isinstance(trainer.loader.samples, AugmentedImages)
        assert [trainer.loader.global_images(batch) for batch in range(3)] == [4, 4, 2]
        val_loader = trainer.validator.validation.loader
        assert sorted(i for batch in val_loader for i in batch.indices.tolist()) == [0, 1, 2, 3, 4]
        assert (trainer.steps.accumulate, trainer.steps.per_epoch, trainer.steps.total) == (2, 2, 6)
        assert (trainer.step.optimizer.name, trainer.step.amp_dtype) == ("AdamW", None)
        assert trainer.progress.updates == trainer.progress.epoch == 0
        assert trainer.step.model.names == ("light", "dark")


def test_the_loss_has_the_weights_of_the_training_classes_and_the_final_anchors(folder):
    far_too_large = [[300.0] * 6] * 3
    write_model(folder / "tiny.yaml", {**TINY_ANCHOR_MODEL, "anchors": far_too_large})
    with built("--cls-pw", "0.5") as trainer:
        counts = trainer.loader.index.boxes_per_class(2)
        torch.testing.assert_close(trainer.step.criterion.class_weights, class_weights(counts, 0.5))
        assert torch.equal(trainer.step.criterion.anchors, trainer.step.model.head.anchors)
        sides = trainer.step.criterion.anchors * torch.tensor(trainer.step.model.strides).view(3, 1, 1)
        assert sides.max() <= 64  # fitted to the boxes


def check_told_settings(trainer: Trainer, data: Path) -> None:
    """Checks that settings.yaml, checkpoints, and what trackers and callbacks get name what the run has chosen."""
    stored = yaml.safe_load((trainer.run.folder / "settings.yaml").read_text())
    described = trainer.checkpointer.description
    assert (stored["config"]["optimizer"], stored["hyp"]["lr_mult"]) == ("Muon", 1.0)
    assert stored["config"]["data"] == str(data)
    parts = {name: asdict(getattr(described, name)) for name in ("config", "hyp", "files")}
    assert stored == {"run_id": described.run_id, **parts}
    assert trainer.run.settings.by_name() == stored["config"] | stored["hyp"]


def test_all_that_tell_the_settings_of_a_run_tell_the_same(folder):
    with built() as trainer:
        check_told_settings(trainer, folder / "set" / "data.yaml")
        run_id = trainer.run.run_id
        trainer.control.request_stop()
        trainer.fit()
    with built("--resume", "runs/exp/last.pt", "--optimizer", "auto") as trainer:
        check_told_settings(trainer, folder / "set" / "data.yaml")
        assert trainer.run.run_id == run_id != ""


def state_of(trainer: Trainer) -> list[torch.Tensor]:
    """Returns weights, averaged weights and momenta."""
    parts = [part.state_dict() for part in (trainer.step.model, trainer.step.ema.module, trainer.step.optimizer)]
    return [leaf for leaf in tree_leaves(parts) if isinstance(leaf, torch.Tensor)]


def test_a_resumed_run_stands_where_it_was_saved(monkeypatch):
    """The run was saved between two batches of an epoch. Weights, momenta, averages and settings are restored."""
    checkpoints = []
    read = Checkpoint.read

    def noted(path: Path) -> Checkpoint:
        checkpoint = read(path)
        checkpoints.append(weakref.ref(checkpoint.state))
        return checkpoint

    class Stops(Hook):
        def after_step(self, trainer: Training) -> Action:
            if trainer.progress.updates == 1:
                trainer.control.request_stop()

    with built("--epochs", "2", "--optimizer", "SGD", "--batch-size", "2") as trainer:
        trainer.hooks = Hooks([*trainer.hooks, Stops()])
        trainer.fit()
        position = (trainer.progress.epoch, trainer.progress.batch, trainer.progress.updates)
        assert 0 < trainer.progress.batch < len(trainer.loader)
        state = state_of(trainer)
    monkeypatch.setattr(Checkpoint, "read", noted)
    with built("--resume", "runs/exp/last.pt") as resumed:
        assert (resumed.progress.epoch, resumed.progress.batch, resumed.progress.updates) == position
        assert (resumed.epochs, resumed.step.optimizer.name, resumed.run.folder) == (2, "SGD", Path("runs/exp"))
        assert len(state) > 100
        assert all(map(torch.equal, state, state_of(resumed)))
        gc.collect()
        assert checkpoints
        assert not any(reference() for reference in checkpoints)  # their memory is free once they are loaded


@pytest.mark.parametrize("change", ["best.pt is missing", "other validation labels", "fewer training images"])
def test_a_start_that_only_writes_the_report_changes_no_checkpoint(folder, capsys, change):
    """It also reports no position at which it would continue."""
    with built("--epochs", "1") as trainer:
        trainer.fit()
    run = folder / "runs" / "exp"
    (run / ".complete").unlink()
    if change == "best.pt is missing":
        (run / "best.pt").unlink()
    elif change == "fewer training images":
        for path in [*(folder / "set").rglob("train/000.*"), *(folder / "set").rglob("train/001.*")]:
            path.unlink()
    else:
        labels = next((folder / "set" / "labels" / "val").glob("*.txt"))
        labels.write_text("0 0.4 0.4 0.3 0.3\n")
    before = {path.name: path.read_bytes() for path in run.glob("*.pt")}
    capsys.readouterr()
    with built("--resume", "auto") as trainer:
        trainer.fit()
    messages = [message for message in capsys.readouterr().out.splitlines() if message.startswith("resume: ")]
    assert len(messages) == (change != "best.pt is missing")
    assert all("have changed since the run began" in message for message in messages)
    assert {path.name: path.read_bytes() for path in run.glob("*.pt")} == before
    with ExitStack() as stack:
        config = TrainConfig(project="runs", resume="auto")
        plan = plan_run(DistributedContext.single("cpu"), config, {"project", "resume"}, stack)
    assert isinstance(plan, EndedRun)


def test_the_advice_on_memory_names_the_batch_size_that_was_found(monkeypatch):
    monkeypatch.setattr(run_checks, "check_batch_search", lambda *_: None)
    monkeypatch.setattr(choices, "batch_that_fits", lambda *_, **__: 4)
    message = "--batch-size 4 with --imgsz 64 is too much here: try --batch-size 2"
    with pytest.raises(UserError, match=message), built("--batch-size", "-1"):
        raise MemoryError


def fail(*_, **__):
    raise AssertionError("was called")


@pytest.mark.parametrize(
    ("flags", "not_called", "message"),
    [
        (
            ["--virtual-ranks", "3"],
            "run_data.open_data",
            "--virtual-ranks 3: must be a power of two and a multiple of the number of processes (1)",
        ),
        (
            ["--batch-size", "-1"],
            "run_data.open_data",
            "--batch-size -1: searches on a GPU only, and this run is on cpu; use a number",
        ),
        (
            ["--callbacks", "user_absent:x"],
            "run_data.open_data",
            "--callbacks user_absent:x: ModuleNotFoundError: No module named 'user_absent'",
        ),
        (
            ["--keep-old", "--weights", "weights.pt", "--rect", "--pipeline", "2"],
            "run_data.open_data",
            "--pipeline 2: needs an even number of training processes, this run has 1; start 2, 4, ... with "
            "torchrun or --spawn, or use --pipeline 1",
        ),
        (
            ["--fitness", "AP:lihgt"],
            "build.build_run_model",
            "--fitness lihgt: the data set has no class of this name (did you mean 'light'?)",
        ),
        (
            ["--data", "set/empty.yaml"],
            "build.build_run_model",
            ".../set/nothing: not found (named by .../set/empty.yaml); ...",
        ),
        (["--freeze", "6"], "build.open_train_samples", "--freeze 6: leaves no layer to train"),
        (
            ["--fitness", "AP:other", "--data", "set/three.yaml"],
            "build.build_step",
            "--fitness AP:other: the validation images have no object of this class to score",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_more_is_built_and_leaves_no_folder(
    folder, monkeypatch, flags, not_called, message
):
    splits = {"train": "images/train", "val": "images/val"}
    (folder / "set" / "empty.yaml").write_text(yaml.safe_dump({**splits, "train": "nothing", "names": ["a", "b"]}))
    (folder / "set" / "three.yaml").write_text(yaml.safe_dump({**splits, "names": ["light", "dark", "other"]}))
    write_weights(folder / "weights.pt", ["light", "dark"])
    monkeypatch.setattr(f"engine.assembly.{not_called}", fail)
    with refused(message), built(*flags):
        pass
    assert not (folder / "runs").exists()


def test_a_foreign_results_file_is_refused_while_the_earlier_run_is_untouched(folder, monkeypatch):
    """YOLOv5 writes a header with spaces."""
    used = folder / "runs" / "exp"
    used.mkdir(parents=True)
    contents = {"results.csv": "   epoch,  train/box_loss\n  0,  0.1\n", "settings.yaml": "{}\n", "last.pt": ""}
    for name, content in contents.items():
        (used / name).write_text(content)
    monkeypatch.setattr("engine.assembly.run_data.open_data", fail)
    with refused("results.csv: not a results file of this program; move it away"), built("--exist-ok"):
        pass
    assert {path.name: path.read_text() for path in used.iterdir()} == contents


@pytest.mark.parametrize(("stored", "factor"), [(1.5, 1.5), (None, 2.0)])
def test_more_epochs_do_not_change_the_rate_of_new_layers(stored, factor):
    """A run of 40 steps has raised it."""
    checkpoint = checkpoint_of(new_lr_mult=stored) if stored else None
    settings = RunSettings(TrainConfig(epochs=10), Hyperparameters(lr_mult=0.5))
    steps = StepPlan(accumulate=1, per_epoch=4, epochs=10)
    loaded = loaded_parameters({}, settings, steps, checkpoint)
    assert loaded.new_lr_mult == factor
