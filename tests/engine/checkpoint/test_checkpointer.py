"""Checkpoints of a run: saved, restored, and kept when the disk is full."""

from __future__ import annotations

import errno
import io
import os
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import utils.files.safe_io as whole_file
from engine.checkpoint.checkpoint import Checkpoint, CheckpointFacts
from engine.checkpoint.checkpointer import Checkpointer
from engine.checkpoint.progress import CheckpointHeader, PendingEpoch, Progress, RunConditions
from engine.optim.build import OptimizerSettings, build_optimizer
from engine.optim.ema import ModelEma
from models.detector import build_detector
from tests.helpers.messages import refused
from tests.helpers.run_checkpoints import checkpoint_of, name_newest_run
from utils.config.settings import TrainConfig
from utils.distributed.context import DistributedContext
from utils.errors import UserError
from utils.files.torch_file import read_checkpoint, write_checkpoint
from utils.schema import build

SINGLE = DistributedContext.single()
DESCRIPTION = replace(checkpoint_of().description, names=["a", "b"], config=TrainConfig(epochs=3, batch_size=4))
CONDITIONS = RunConditions(world_size=1, device="cpu", seconds=1.0, epoch_batches=4, images=16)


def parts(wrap=lambda m: m, seed: int = 0) -> SimpleNamespace:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    optimizer = build_optimizer(model, "Muon", OptimizerSettings(lr=0.01, momentum=0.9, weight_decay=0.01))
    model(torch.randn(2, 3, 8, 8)).square().mean().backward()
    optimizer.step()
    ema = ModelEma(model, decay=0.9, tau=1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    return SimpleNamespace(model=wrap(model), ema=ema, optimizer=optimizer, scaler=scaler)


def save(folder: Path, state: SimpleNamespace, *, is_best: bool = True, **changes) -> Checkpointer:
    checkpointer = Checkpointer(folder, ctx=SINGLE, description=DESCRIPTION, save_period=2)
    values = {"progress": Progress(epoch=2, step=9, updates=9), "run": CONDITIONS, "metrics": {"AP": 0.5}} | changes
    checkpointer.save_epoch(state, CheckpointHeader(**values), is_best=is_best)
    checkpointer.flush()
    return checkpointer


@pytest.mark.parametrize("wrap", [lambda m: m, nn.DataParallel], ids=["plain", "parallel"])
def test_a_saved_checkpoint_is_restored(tmp_path, wrap):
    state = parts(wrap)
    save(tmp_path, state)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best.pt", "epoch2.pt", "last.pt"]
    content = read_checkpoint(tmp_path / "last.pt")
    assert not any(key.startswith("module.") for key in content["model"])
    assert "optimizer" not in read_checkpoint(tmp_path / "best.pt")
    with refused("best.pt: holds weights only (a best.pt?); resume from last.pt, or start with --weights .../best.pt"):
        Checkpoint.read(tmp_path / "best.pt")
    fresh = parts(seed=7)
    checkpoint = Checkpoint.read(tmp_path / "last.pt")
    checkpoint.restore(SINGLE, fresh)
    assert checkpoint.header.progress == Progress(epoch=2, step=9, updates=9)
    bare = state.model.module if hasattr(state.model, "module") else state.model
    for key, value in bare.state_dict().items():
        assert torch.equal(value, fresh.model.state_dict()[key])
    saved = state.optimizer.state_dict()["optimizers"]
    for ours, theirs in zip(fresh.optimizer.state_dict()["optimizers"], saved):
        for index, values in theirs["state"].items():
            for key, value in values.items():
                assert torch.equal(torch.as_tensor(ours["state"][index][key]), torch.as_tensor(value))
    with torch.no_grad():
        bare[0].weight.add_(1)  # training goes on
    assert torch.equal(read_checkpoint(tmp_path / "last.pt")["model"]["0.weight"], content["model"]["0.weight"])


def test_a_position_is_saved_in_last_pt_alone(tmp_path):
    """This also holds at the end of an epoch with an epochN.pt, which a run that resumes from it must not change."""
    checkpointer = save(tmp_path, parts())
    kept = {name: (tmp_path / name).read_bytes() for name in ("best.pt", "epoch2.pt")}
    for epoch in (0, 2):
        progress = Progress(epoch=epoch, step=9, updates=9)
        checkpointer.save_last(parts(seed=3), CheckpointHeader(progress=progress, run=CONDITIONS, metrics={"AP": 0.25}))
    checkpointer.flush()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.pt", "epoch2.pt", "last.pt"]
    assert {name: (tmp_path / name).read_bytes() for name in kept} == kept
    assert Checkpoint.read(tmp_path / "last.pt").header.metrics == {"AP": 0.25}


def test_a_checkpoint_is_read_as_it_was_described(tmp_path):
    save(tmp_path, parts())
    checkpoint = Checkpoint.read(tmp_path / "last.pt")
    assert checkpoint.description == DESCRIPTION
    assert checkpoint.header.run == CONDITIONS
    stored = read_checkpoint(tmp_path / "last.pt")
    content = checkpoint.content()
    assert content.keys() == stored.keys() - {"format", "version", "program"}
    for name in ("config", "hyp", "run", "progress"):
        assert type(stored[name]) is dict  # plain data, which later programs can read
        assert content[name] == stored[name]


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("config", {"nonsense": 1}, "last.pt: config: unknown key 'nonsense'"),
        ("hyp", {"lr0": "x"}, "last.pt: hyp: lr0: must be a number"),
        ("run", {"seconds": None}, "last.pt: damaged checkpoint: run: seconds: must be a number, got None"),
        ("data", {"source": 3}, "last.pt: damaged checkpoint: data: source: must be text, got 3"),
        ("identity", {"val_labels": None}, "last.pt: damaged checkpoint: identity: val_labels: must be text, got None"),
    ],
)
def test_settings_of_another_version_are_no_damage(tmp_path, part, changes, message):
    save(tmp_path, parts())
    content = read_checkpoint(tmp_path / "last.pt")
    write_checkpoint(content | {part: content[part] | changes}, tmp_path / "last.pt")
    with pytest.raises(UserError, match=message):
        Checkpoint.read(tmp_path / "last.pt")


def test_the_facts_of_a_checkpoint_are_read_without_its_tensors(tmp_path):
    """Plans need nothing else, and a damaged tensor is detected when the run reads the whole file."""
    state = parts()
    save(tmp_path, state)
    last = tmp_path / "last.pt"
    whole = Checkpoint.read(last)
    assert CheckpointFacts.read(last) == CheckpointFacts(header=whole.header, description=whole.description, path=last)
    with refused("best.pt: holds weights only (a best.pt?); resume from last.pt, or start with --weights .../best.pt"):
        CheckpointFacts.read(tmp_path / "best.pt")
    weight = state.model[0].weight.detach().numpy().tobytes()
    last.write_bytes(last.read_bytes().replace(weight, bytes(len(weight))))
    assert CheckpointFacts.read(last).header == whole.header
    with pytest.raises(UserError, match="damaged"):
        Checkpoint.read(last)


PENDING = {"row": {"time": 1.0}, "is_closing": False, "ema": {"w": torch.ones(2)}, "progress": {"epoch": 3}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, ""),
        ({"row": {"time": "x"}}, "pending: row: time: must be a number, got 'x'"),
        ({"is_closing": 1}, "pending: is_closing: must be true or false"),
        ({"ema": None}, "pending: ema: "),
        ({"progress": {"epoch": -1}}, "pending: progress: epoch: must be at least 0"),
    ],
)
def test_a_pending_epoch_is_read_or_refused(tmp_path, changes, message):
    save(tmp_path, parts())
    content = read_checkpoint(tmp_path / "last.pt")
    assert Checkpoint.read(tmp_path / "last.pt").header.pending is None
    write_checkpoint(content | {"pending": PENDING | changes}, tmp_path / "last.pt")
    if message:
        with pytest.raises(UserError, match=f"last.pt: damaged checkpoint: {message}"):
            Checkpoint.read(tmp_path / "last.pt")
    else:
        pending = Checkpoint.read(tmp_path / "last.pt").header.pending
        assert (pending.row, pending.progress.epoch, pending.ema["w"].tolist()) == ({"time": 1.0}, 3, [1, 1])


def test_the_scores_of_a_pending_epoch_are_added_to_its_files(tmp_path):
    """Nothing fails if the user has removed the file."""
    progress = Progress(epoch=2, step=9, updates=9)
    pending = PendingEpoch(row={}, is_closing=False, progress=progress, ema={"w": torch.ones(2)})
    checkpointer = save(tmp_path, parts(), is_best=False, metrics={}, pending=pending)
    newest = Progress(epoch=2, batch=3, step=12, updates=12, best_epoch=2, best_fitness=0.5)
    for is_there in (True, False):
        if not is_there:
            (tmp_path / "epoch2.pt").unlink()
        checkpointer.save_scored(pending, newest, is_best=True, metrics={"AP": 0.5})
        checkpointer.flush()
        assert (tmp_path / "epoch2.pt").exists() == is_there
        if is_there:
            periodic = Checkpoint.read(tmp_path / "epoch2.pt").header
            assert (periodic.pending, periodic.metrics) == (None, {"AP": 0.5})
            assert periodic.progress == Progress(epoch=2, step=9, updates=9, best_epoch=2, best_fitness=0.5)
        best = read_checkpoint(tmp_path / "best.pt")
        assert (best["ema"]["w"].tolist(), best["progress"]["epoch"], best["metrics"]) == ([1, 1], 2, {"AP": 0.5})
    assert Checkpoint.read(tmp_path / "last.pt").header.pending.progress == progress


def test_the_scores_of_a_pending_epoch_are_not_added_to_a_file_of_an_earlier_run(tmp_path):
    """The run kept no epochN.pt when the epoch ended, and does so since it has continued."""
    save(tmp_path, parts(), is_best=False)
    earlier = (tmp_path / "epoch2.pt").read_bytes()
    checkpointer = Checkpointer(tmp_path, ctx=SINGLE, description=replace(DESCRIPTION, run_id="new"), save_period=2)
    progress = Progress(epoch=2, best_epoch=2, best_fitness=0.5)
    pending = PendingEpoch(row={}, is_closing=False, progress=progress, ema={"w": torch.ones(2)})
    checkpointer.save_scored(pending, progress, is_best=False, metrics={"AP": 0.5})
    checkpointer.flush()
    assert (tmp_path / "epoch2.pt").read_bytes() == earlier


def test_the_state_of_another_optimizer_is_one_line(tmp_path):
    save(tmp_path, parts())
    other = parts()
    other.optimizer = build_optimizer(other.model, "SGD", OptimizerSettings(lr=0.1, momentum=0.9, weight_decay=0))
    with refused("last.pt: does not fit this run: the checkpoint was written with another optimizer"):
        Checkpoint.read(tmp_path / "last.pt").restore(SINGLE, other)


def test_other_ranks_write_nothing(tmp_path):
    ctx = replace(DistributedContext.single(), rank=1, local_rank=1, world_size=2, local_world_size=2, backend="gloo")
    checkpointer = Checkpointer(tmp_path, ctx=ctx, description=DESCRIPTION)
    header = CheckpointHeader(progress=Progress(), run=CONDITIONS)
    checkpointer.save_epoch(parts(), header, is_best=True)
    checkpointer.save_last(parts(), header)
    checkpointer.flush()
    assert not list(tmp_path.iterdir())


def test_a_non_finite_average_is_not_saved(tmp_path):
    state = parts()
    save(tmp_path, state)
    kept = (tmp_path / "last.pt").read_bytes()
    with torch.no_grad():
        state.ema.module[0].weight.fill_(float("nan"))
    with refused("the averaged weights are not finite; not saved, .../last.pt holds the last good ones"):
        save(tmp_path, state)
    name_newest_run(tmp_path, "new")  # the folder is used again, and the new run has saved nothing
    with refused("the averaged weights are not finite; not saved, and there are no good ones yet"):
        save(tmp_path, state)
    assert (tmp_path / "last.pt").read_bytes() == kept


class _FullDisk(io.FileIO):
    """A file that only accepts some bytes."""

    room = 0

    def write(self, data) -> int:
        self.room -= len(memoryview(data).cast("B"))
        if self.room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data)


@pytest.mark.parametrize("room", [0, 100, 3000])
def test_a_full_disk_keeps_the_old_checkpoint(tmp_path, monkeypatch, room):
    state = parts()

    def full(path, mode):
        file = _FullDisk(path, mode)
        file.room = room
        return file

    with monkeypatch.context() as patch:
        patch.setattr(whole_file, "open", full, raising=False)
        with refused(
            "best.pt: could not be written (the disk is full); there is no earlier checkpoint to resume from: "
            "free some space and start again"
        ) as caught:
            save(tmp_path, state)
    assert "--resume" not in str(caught.value)  # there is nothing to resume from
    save(tmp_path, state)
    kept = (tmp_path / "last.pt").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(whole_file, "open", full, raising=False)
        with refused(
            "best.pt: could not be written (the disk is full); the checkpoints already there are intact: free "
            "some space and continue with --resume .../last.pt"
        ):
            save(tmp_path, state)
    assert (tmp_path / "last.pt").read_bytes() == kept
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best.pt", "epoch2.pt", "last.pt"]


def test_a_disk_error_is_reported_neither_as_a_full_disk_nor_as_damage(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    save(tmp_path, parts())
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with refused(
            "best.pt: could not be written (input/output error); the checkpoints already there are intact: "
            "check the disk and continue with --resume .../last.pt"
        ):
            save(tmp_path, parts())
    read_checkpoint(tmp_path / "last.pt")
    monkeypatch.setattr("zipfile._EndRecData", fail)
    with pytest.raises(OSError, match=r"Input/output error.*last.pt"):
        read_checkpoint(tmp_path / "last.pt")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"epoch": -1}, "epoch: must be at least 0, got -1"),
        ({"epoch": True}, "epoch: must be a whole number, got True"),
        ({"steps": 1}, "unknown key 'steps' (did you mean 'step'?)"),
        ({"loss_sums": ["x"]}, "loss_sums: element 1: must be a number, got 'x'"),
        ({5: 5}, "unknown key '5'"),
    ],
)
def test_an_impossible_progress_is_refused(value, message):
    with refused(f"last.pt: damaged checkpoint: progress: {message}"):
        build(Progress, value, "last.pt: damaged checkpoint: progress")


def test_a_counter_of_another_shape_is_one_line(tmp_path):
    """Counters are not among the weights, whose shapes are compared first."""
    model = build_detector("yolov8n", 2)
    tensors = model.state_dict()
    name = next(n for n in tensors if n.endswith("num_batches_tracked"))
    header = {"progress": {}, "run": asdict(CONDITIONS)}
    state = {"model": {**tensors, name: torch.zeros(8)}, "ema": {}, "optimizer": {}, "scaler": {}}
    write_checkpoint(asdict(DESCRIPTION) | header | state, tmp_path / "last.pt")
    with refused(
        "last.pt: does not fit this run: size mismatch for model.0.bn.num_batches_tracked: copying a "
        "param with shape torch.Size([8]) from checkpoint, the shape in current model is torch.Size([])."
    ):
        Checkpoint.read(tmp_path / "last.pt").restore(SINGLE, SimpleNamespace(model=model))
