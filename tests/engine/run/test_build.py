"""Assembling a run: hooks in their order, loaders, loss, the position of a resumed run; and what is
refused before anything is built."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import yaml

import export
import val
from engine.run.build import build_training
from engine.run.plan import plan_run
from engine.train.loop import Trainer
from models.detector import Detector, build_detector
from models.losses.base import class_weights
from models.weights.load import load_detector
from tests.helpers.messages import refused
from tests.helpers.repository import ROOT
from tests.helpers.same_content import assert_same_content
from tests.helpers.scripts import PLAIN, SMALL, call, run_python
from tests.helpers.tiny import TINY_ANCHOR_MODEL, TINY_MODEL, write_dataset, write_detector, write_model, write_weights
from utils.config.parser import parse_command
from utils.config.settings import TrainConfig
from utils.distributed.context import DistributedContext
from utils.process.signals import StopSignals


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_dataset(tmp_path / "set", train=10, val=5)
    write_model(tmp_path / "tiny.yaml")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@contextmanager
def built(*flags: str, model: str = "tiny.yaml") -> Iterator[Trainer]:
    new = [*SMALL, "--data", "set/data.yaml", *(("--model", model) if model else ())]
    argv = [*(() if "--resume" in flags else new), "--project", "runs", *flags]
    command = parse_command(TrainConfig, argv)
    ctx = DistributedContext.single("cpu")
    with ExitStack() as stack:
        # No name keeps the plan, and with it the state of a checkpoint.
        yield build_training(ctx, plan_run(ctx, command.config, command.explicit_flags, stack), StopSignals(), stack)


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
    stored = yaml.safe_load((trainer.saver.folder / "settings.yaml").read_text())
    described = trainer.saver.description
    assert (stored["config"]["optimizer"], stored["hyp"]["lr_mult"]) == ("Muon", 1.0)
    assert stored["config"]["data"] == str(data)
    parts = {name: asdict(getattr(described, name)) for name in ("config", "hyp")}
    assert stored == {"run_id": described.run_id, **parts}
    assert trainer.settings.by_name() == stored["config"] | stored["hyp"]


def test_all_that_tell_the_settings_of_a_run_tell_the_same(folder):
    with built("--epochs", "2") as trainer:
        check_told_settings(trainer, folder / "set" / "data.yaml")
        run_id = trainer.saver.description.run_id
        trainer.control.request_stop()
        trainer.fit()
    with built("--resume", "runs/exp/last.pt", "--optimizer", "auto") as trainer:
        check_told_settings(trainer, folder / "set" / "data.yaml")
        assert trainer.saver.description.run_id == run_id != ""
        assert trainer.saver.description.command.optimizer == "auto"  # advice does not repeat what the run has chosen
    with built("--resume", "runs/exp/last.pt", "--epochs", "20000") as trainer:  # so long a new run would have SGD
        check_told_settings(trainer, folder / "set" / "data.yaml")


@pytest.mark.parametrize(
    ("flags", "not_called", "message"),
    [
        (
            ["--batch-size", "-1"],
            "engine.run.build.open_inputs",
            "--batch-size -1: searches on a GPU only, and this run is on cpu; use a number",
        ),
        (
            ["--keep-old", "--weights", "weights.pt", "--rect", "--pipeline", "2"],
            "engine.run.build.open_inputs",
            "3 mistakes: (1) --pipeline 2 and --keep-old: ...; (2) --keep-old and --model: ...; (3) --pipeline 2: ...",
        ),
        (
            ["--fitness", "AP:lihgt"],
            "engine.run.sources.open_train_samples",
            "--fitness lihgt: the data set has no class of this name (did you mean 'light'?)",
        ),
        (["--freeze", "6"], "engine.run.sources.open_train_samples", "--freeze 6: leaves no layer to train"),
        (
            ["--weights", "other.pt"],
            "engine.run.sources.open_train_samples",
            ".../other.pt: no tensor matches this model; wrong family or size?",
        ),
        (
            ["--fitness", "AP:other", "--data", "set/three.yaml"],
            "engine.run.build.build_model",
            "--fitness AP:other: the validation images have no object of this class to score",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_more_is_built_and_leaves_no_folder(
    folder, monkeypatch, flags, not_called, message
):
    splits = {"train": "images/train", "val": "images/val"}
    (folder / "set" / "three.yaml").write_text(yaml.safe_dump({**splits, "names": ["light", "dark", "other"]}))
    write_weights(folder / "weights.pt", ["light", "dark"])
    torch.save({"model.77.weight": torch.zeros(3)}, folder / "other.pt")

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("was called")

    monkeypatch.setattr(not_called, fail)
    with refused(message), built(*flags):
        pass
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("more", "probability", "advice"), [([], 0, "--set fliplr=0.5 "), (["--set", "fliplr=0.5"], 0.5, "--set fliplr=0 ")]
)
def test_flips_that_exchange_two_classes_are_off_unless_asked_for(folder, more, probability, advice):
    data = folder / "set" / "data.yaml"
    data.write_text(yaml.safe_dump(yaml.safe_load(data.read_text()) | {"names": ["left light", "Right_light"]}))
    with built(*more) as trainer:
        assert trainer.settings.hyp.fliplr == probability
        trainer.control.request_stop()
        trainer.fit()
    assert advice in (folder / "runs" / "exp" / "train.log").read_text()
    with built("--resume", "runs/exp/last.pt") as trainer:
        assert trainer.settings.hyp.fliplr == probability


CLASSES = 40  # so that the class layers are wider than those of a model for two classes
SIMILAR = 7
DARK = 3


def write_wide_weights(path: Path) -> Detector:
    """Writes weights of 40 classes, Dark among them, that find some objects, all of them as class SIMILAR."""
    names = ["Dark" if number == DARK else f"old {number}" for number in range(CLASSES)]
    detector = build_detector(TINY_MODEL, CLASSES, names=names, seed=1)
    with torch.no_grad():
        for *_, boxes in detector.head.cv2:
            boxes.bias.view(4, -1)[:, 1] = 9.0  # sides at one stride from the center
        for *_, classes in detector.head.cv3:
            classes.bias[SIMILAR] = 3.0
    write_detector(path, detector)
    return detector


def starts_as_similar(model: Detector, weights: Detector) -> bool:
    """Whether "light" has the output rows of class SIMILAR, and "dark" those of Dark."""
    ours = model.head.state_dict()
    theirs = weights.head.state_dict()
    layers = [f"{layer}.{part}" for layer in model.head.class_rows() for part in ("weight", "bias")]
    if any(ours[layer].shape[1:] != theirs[layer].shape[1:] for layer in layers):
        return False
    return all(torch.equal(ours[layer], theirs[layer][[SIMILAR, DARK]]) for layer in layers)


@pytest.mark.parametrize(
    ("flags", "model", "is_similar"),
    [(["--epochs", "1"], "", True), (["--time", "1"], "", True), (["--epochs", "1"], "tiny.yaml", False)],
)
def test_new_classes_start_as_similar_ones_of_the_weights(folder, flags, model, is_similar):
    weights = write_wide_weights(folder / "weights.pt")
    with built("--weights", "weights.pt", *flags, model=model) as trainer:
        assert starts_as_similar(trainer.step.model, weights) == is_similar


def test_kept_classes_of_a_file_without_names_start_from_its_rows(folder):
    old = build_detector("yolov8n", 3, seed=1)
    torch.save(old.state_dict(), folder / "bare.pt")
    with built("--weights", "bare.pt", "--keep-old", model="") as trainer:
        rows = trainer.step.model.state_dict()["model.22.cv3.0.2.weight"]
    assert trainer.step.model.names == ("0", "1", "2", "light", "dark")
    assert torch.equal(rows[:3], old.state_dict()["model.22.cv3.0.2.weight"])


def test_the_weights_of_a_run_with_similar_classes_are_resumed_validated_and_exported(folder):
    write_wide_weights(folder / "weights.pt")
    flags = ["--weights", "weights.pt", "--epochs", "1", "--virtual-ranks", "2"]
    with built(*flags, model="") as trainer:
        trainer.fit()
    run_python(ROOT / "train.py", *SMALL, "--data", "set/data.yaml", "--project", "runs", *flags, "--spawn", "2",
               folder=folder)  # fmt: skip
    with built(*flags, "--name", "stopped", model="") as trainer:
        trainer.control.request_stop()
        trainer.fit()
    with built("--resume", "runs/stopped/last.pt") as trainer:
        trainer.fit()
    straight, spawned, resumed = (load_detector(f"runs/{name}/last.pt")[0] for name in ("exp", "exp2", "stopped"))
    for other in (spawned, resumed):
        assert_same_content(other.state_dict(), straight.state_dict())
    call(val.main, "--weights", "runs/exp/best.pt", "--project", "runs", *PLAIN)
    call(export.main, "--weights", "runs/exp/best.pt", "--format", "torchscript")
    with built("--weights", "runs/exp/best.pt", "--epochs", "17", model="") as trainer:  # its classes fit as they are
        assert trainer.step.model.spec == straight.spec
