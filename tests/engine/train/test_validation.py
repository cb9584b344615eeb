"""Choosing the epochs to validate, and training whose last processes validate: the same files as without them, whatever
happens to these processes."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from data.dataset.spec import DataSource
from data.loading.build import build_run_val_loader
from data.open import open_data
from data.render.letterbox import CanvasRule
from engine.assembly.build import build_training
from engine.assembly.evaluating_process import RunScorer
from engine.eval_ranks.messages import SetupMessage, WeightsMessage, common_facts
from engine.run.plan import plan_run
from engine.run.run import RunSettings
from engine.train.validation import LocalValidator, build_setup
from models.detector import build_detector
from tests.helpers.processes import Processes
from tests.helpers.same_content import assert_same_content, assert_same_run
from tests.helpers.scripts import SMALL
from tests.helpers.tiny import TINY_MODEL, write_dataset, write_model
from utils.config.epochs import validates_after
from utils.config.parser import parse_command
from utils.config.settings import Hyperparameters, TrainConfig
from utils.distributed.context import DistributedContext
from utils.files.torch_file import read_checkpoint
from utils.process.signals import StopSignals

EPOCHS = 4
FAULTS = "rated;ready;slow:0.05"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("inputs")
    write_dataset(root / "set", train=12)
    write_model(root / "tiny.yaml")
    return root


def flags(inputs: Path, project: Path, *more: str) -> list[str]:
    return ["--data", str(inputs / "set" / "data.yaml"), "--model", str(inputs / "tiny.yaml"),
            "--project", str(project), "--cache-dir", str(inputs / "cache"), *SMALL, "--epochs", str(EPOCHS),
            "--save-minutes", "0", "--cls-pw", "1", "--save-period", "2", *more]  # fmt: skip


@pytest.fixture(scope="module")
def alone(inputs, tmp_path_factory) -> Path:
    """The run of one process, which validates itself."""
    folder = tmp_path_factory.mktemp("alone")
    with Processes(folder / "log.txt", faults="rated") as run:
        run.ranks(1, *flags(inputs, folder))
        assert run.codes() == [0], run.output()
    return folder / "exp"


@pytest.mark.parametrize(("val_every", "expected"), [(1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (0, [5])])
def test_the_last_epoch_is_always_validated(val_every, expected):
    assert [epoch for epoch in range(1, 6) if validates_after(epoch, 5, val_every)] == expected


def scorers(file: Path) -> list[int]:
    """Returns the process of each validation."""
    return [int(line) for line in file.read_text().split()] if file.exists() else []


@pytest.mark.parametrize("evaluating", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_files_are_those_of_a_run_that_validates_itself(inputs, alone, tmp_path, evaluating):
    counts = tmp_path / "scored"
    with Processes(tmp_path / "log.txt", faults=f"{FAULTS};scored:{counts}") as run:
        run.ranks(1 + evaluating, *flags(inputs, tmp_path, "--eval-ranks", str(evaluating)))
        assert run.codes() == [0] * (1 + evaluating), run.output()
        run.wait_gone()
        assert "c10d" not in run.output()  # warnings about the store, which ends last
    assert_same_run(alone, tmp_path / "exp")
    found = scorers(counts)
    assert len(found) == 1 + evaluating * (EPOCHS - 1)  # the last epoch is validated at once
    assert len(set(found)) == 1 + evaluating


@pytest.mark.slow
def test_a_slow_evaluating_process_is_left_out_until_it_has_caught_up(inputs, alone, tmp_path):
    faults = f"{FAULTS};slowval:1;scored:{tmp_path / 'scored'};set:engine.eval_ranks.service:MIN_LATE_S:0"
    with Processes(tmp_path / "log.txt", faults=faults) as run:
        run.ranks(2, *flags(inputs, tmp_path, "--eval-ranks", "1"))
        assert run.codes() == [0, 0], run.output()
        assert "no scores for epoch 1 in time" in run.output()
    assert_same_run(alone, tmp_path / "exp")
    assert len(scorers(tmp_path / "scored")) > EPOCHS


@pytest.mark.parametrize("more", [(), pytest.param(("--eval-ranks", "1"), marks=pytest.mark.slow)])
def test_a_stopped_run_resumes_with_the_epoch_that_had_no_scores_yet(inputs, alone, tmp_path, more):
    faults = f"{FAULTS};save:1;hang:0:8:2;slowval:1;set:engine.eval_ranks.service:MIN_LATE_S:1000"
    with Processes(tmp_path / "log.txt", faults=faults) as run:
        run.ranks(2, *flags(inputs, tmp_path, "--eval-ranks", "1"))
        run.until(lambda: _position(tmp_path) == (2, 1))
        assert read_checkpoint(tmp_path / "exp" / "last.pt")["pending"]["ema"]
        number = signal.SIGKILL if more else signal.SIGTERM
        run.started[0].send_signal(number)
        assert run.codes()[0] in (75, -signal.SIGKILL), run.output()
        run.wait_gone()
    with Processes(tmp_path / "resumed.txt", faults="rated") as run:
        run.ranks(2 if more else 1, "--resume", str(tmp_path / "exp"), *more)
        assert set(run.codes()) == {0}, run.output()
    assert_same_run(alone, tmp_path / "exp")


def _position(project: Path) -> tuple[int, int] | None:
    path = project / "exp" / "last.pt"
    progress = read_checkpoint(path)["progress"] if path.exists() else {}
    return (progress["epoch"], progress["batch"]) if progress else None


@pytest.mark.slow
def test_a_run_that_a_callback_ends_counts_its_newest_epoch(inputs, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "hooks.py").write_text("def on_epoch(run):\n    if run.epoch == 3:\n        run.stop()\n")
    for name, world_size, faults, more in [("a", 1, "rated", ()), ("b", 2, FAULTS, ("--eval-ranks", "1"))]:
        with Processes(tmp_path / f"{name}.txt", faults=faults) as run:
            run.ranks(world_size, *flags(inputs, tmp_path / name, "--callbacks", "hooks:on_epoch", *more))
            assert set(run.codes()) == {0}, run.output()
    assert_same_run(tmp_path / "a" / "exp", tmp_path / "b" / "exp")


@pytest.mark.slow
@pytest.mark.parametrize("is_killed", [False, True])
def test_spawn_goes_on_without_an_evaluating_process(inputs, alone, tmp_path, is_killed):
    with Processes(tmp_path / "log.txt", real=is_killed) as run:
        given = flags(inputs, tmp_path, "--eval-ranks", "1", "--spawn", "2")
        process = run.start([run.python, "train.py", *given])
        if is_killed:
            run.until(lambda: "epoch 1/" in run.output())
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.kill(max(map(int, children)), signal.SIGKILL)  # the last rank was started last
        assert run.codes() == [0], run.output()
        run.wait_gone()
    one, two = (read_checkpoint(folder / "last.pt") for folder in (alone, tmp_path / "exp"))
    for name in ("model", "ema", "optimizer"):
        assert_same_content(one[name], two[name])


@pytest.mark.parametrize("amp", ["off", "auto", "bf16", "fp16"])
def test_a_cpu_scores_for_gpus_whatever_their_autocast_type(inputs, amp):
    """float16 does not exist there; validation computes in float32."""
    ctx = DistributedContext.single()
    files = {"data": str(inputs / "set" / "data.yaml"), "cache_dir": str(inputs / "cache")}
    config = TrainConfig(**files, amp=amp, imgsz=64, batch_size=4, workers=0, device="cpu")
    model = build_detector(TINY_MODEL, 2, names=["light", "dark"])
    source = DataSource.of_training(config)
    spec = open_data(source, ctx)
    canvases = CanvasRule(config.imgsz, model.stride, model.head.squares)
    facts = common_facts(build_run_val_loader(ctx, config, Hyperparameters(), spec, canvases).index)
    setup = SetupMessage(
        settings=RunSettings(config, Hyperparameters()),
        device="cuda",
        threads=torch.get_num_threads(),
        source=replace(source, data="/on/rank/0/data.yaml"),
        finds_own_data=True,  # in the place that this process's --data names
        names=["light", "dark"],
        model_spec=model.spec,
        facts=facts,
        ema=model.state_dict(),
        class_weights=None,
    )
    evaluation = RunScorer(ctx, config, (), setup)(WeightsMessage(model.state_dict(), is_closing=False))
    assert evaluation.result.num_images == 5


@pytest.mark.parametrize("has_two_branches", [False, True])
def test_an_evaluating_process_scores_as_the_training_one_does(inputs, tmp_path, has_two_branches):
    """The weights of the classes in the loss are sent, whatever the loss is made of."""
    model = write_model(tmp_path / "model.yaml", TINY_MODEL | {"end2end": has_two_branches})
    ctx = DistributedContext.single("cpu")
    argv = flags(inputs, tmp_path, "--model", str(model))
    command = parse_command(TrainConfig, argv)
    with ExitStack() as stack:
        plan = plan_run(ctx, command.config, command.explicit_flags, stack)
        trainer = build_training(ctx, plan, StopSignals(), stack)
        assert isinstance(trainer.validator, LocalValidator)
        own = trainer.validator.validation
        own_result = own.evaluator.run(trainer.step.ema.module, own.loader).result
        description = trainer.checkpointer.description
        setup = build_setup(
            trainer.run.settings, trainer.step, description=description, plan=plan, val=own.loader.index
        )
    assert setup.class_weights is not None
    assert setup.class_weights[0] != setup.class_weights[1]  # --cls-pw 1
    evaluation = RunScorer(ctx, command.config, (), setup)(WeightsMessage(setup.ema, is_closing=False))
    assert evaluation is not None
    own_losses = {name: value for name, value in own_result.extras.items() if name.startswith("val/")}
    assert len(own_losses) == 1 + len(trainer.step.criterion.names)
    assert own_losses.items() <= evaluation.result.extras.items()


@pytest.mark.parametrize(
    ("world_size", "more", "complaint"),
    [
        (1, ("--eval-ranks", "1"), "--eval-ranks 1: 1 started, and at least one must train"),
        (2, ("--eval-ranks", "1", "--image-weights"), "leave out --eval-ranks"),
    ],
)
def test_mistakes_end_in_one_line(inputs, tmp_path, world_size, more, complaint):
    with Processes(tmp_path / "log.txt") as run:
        run.ranks(world_size, *flags(inputs, tmp_path, *more))
        assert run.codes()[0] == 2
        run.kill_all()
        assert run.output().count("error: ") == 1
        assert complaint in run.output()
