"""Checkpoints of a run: written and read as they were captured, and the old ones kept when a write fails."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn

from engine.evaluation.fitness import Fitness
from engine.optim.build import OptimizerSettings, build_optimizer
from engine.optim.ema import ModelEma
from engine.train.checkpoint import Checkpoint, Progress
from engine.train.control import RunControl
from engine.train.ledger import Epoch, EpochLedger, LedgerState
from engine.train.saver import Saver
from tests.engine.train.watched_run import Scores
from tests.helpers.messages import refused
from tests.helpers.ranks import run_ranks
from tests.helpers.run_checkpoints import checkpoint_of
from tests.helpers.same_content import assert_same_content
from utils.config.settings import TrainConfig
from utils.distributed.context import DistributedContext, max_over_ranks
from utils.errors import UserError
from utils.files.torch_file import read_checkpoint, write_checkpoint
from utils.process.signals import StopSignals

SINGLE = DistributedContext.single()
DESCRIPTION = replace(
    checkpoint_of().description, names=["a", "b"], config=TrainConfig(epochs=3, batch_size=4, save_period=2)
)
LOADER = MagicMock(samples=range(16), __len__=lambda _: 4)
ROWS = [{"epoch": 1, "time": 1.0, "metrics/AP": float("nan")}, {"epoch": 2, "time": 2.0, "metrics/AP": 0.5}]


def parts(wrap=lambda m: m, seed: int = 0, ctx: DistributedContext = SINGLE) -> SimpleNamespace:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(memory_format=torch.channels_last)
    optimizer = build_optimizer(model, "Muon", OptimizerSettings(lr=0.01, momentum=0.9, weight_decay=0.01))
    model(torch.randn(2, 3, 8, 8)).square().mean().backward()
    optimizer.step()
    ema = ModelEma(model, decay=0.9, tau=1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    return SimpleNamespace(ctx=ctx, model=wrap(model), ema=ema, optimizer=optimizer, scaler=scaler)


def save(folder: Path, state: SimpleNamespace, *, batch: int = 0) -> tuple[Saver, EpochLedger]:
    ctx = state.ctx
    progress = Progress(epoch=2, batch=batch)
    saver = Saver(folder, step=state, loader=LOADER, progress=progress, description=DESCRIPTION)
    control = RunControl(ctx, StopSignals())
    ledger = EpochLedger(ctx, progress, Fitness.parse("AP", []), Scores(), control, LedgerState(ROWS, {"AP": 0.5}))
    saver.save(ledger, best=Epoch(2))
    saver.flush()
    return saver, ledger


@pytest.mark.parametrize("wrap", [lambda m: m, nn.DataParallel], ids=["plain", "parallel"])
def test_what_is_saved_is_restored(tmp_path, wrap):
    """Training goes on while the files are written. A parallel model is saved without its wrapper."""
    state = parts(wrap)
    save(tmp_path, state)
    names = ["best.pt", "epoch2.pt", "last.pt", "results.csv"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert (tmp_path / "results.csv").read_text() == "epoch,time,metrics/AP\n1,1,\n2,2,0.5\n"
    checkpoint = Checkpoint.read(tmp_path / "last.pt")
    assert (checkpoint.description, checkpoint.header.metrics) == (DESCRIPTION, {"AP": 0.5})
    assert (checkpoint.header.run.epoch_batches, checkpoint.header.run.images) == (4, 16)
    assert_same_content(checkpoint.rows, ROWS)
    fresh = parts(seed=7)
    checkpoint.restore(fresh)
    bare = state.model.module if hasattr(state.model, "module") else state.model
    assert_same_content(dict(bare.state_dict()), dict(fresh.model.state_dict()))
    assert_same_content(state.optimizer.state_dict(), fresh.optimizer.state_dict())
    before = bare.state_dict()["0.weight"].clone()
    with torch.no_grad():
        bare[0].weight.add_(1)
    assert torch.equal(read_checkpoint(tmp_path / "last.pt")["model"]["0.weight"], before)
    assert not {"optimizer", "rows"} & read_checkpoint(tmp_path / "best.pt").keys()


def _save_within_an_epoch(ctx: DistributedContext, folder: Path) -> list[float]:
    state = parts(nn.parallel.DistributedDataParallel, ctx=ctx)
    state.model.module[1].running_mean.fill_(ctx.rank)
    save(folder, state, batch=3)
    max_over_ranks(ctx, 0)  # rank 0 has written the file
    fresh = parts(ctx=ctx)
    Checkpoint.read(folder / "last.pt").restore(fresh)
    return fresh.model[1].running_mean.tolist()


def test_ranks_keep_their_batch_statistics_within_an_epoch(tmp_path):
    """Under DDP they differ. Another number of ranks continues from the means."""
    by_rank = run_ranks(2, _save_within_an_epoch, tmp_path)
    assert by_rank == [[0.0] * 4, [1.0] * 4]
    fresh = parts()
    Checkpoint.read(tmp_path / "last.pt").restore(fresh)
    assert fresh.model[1].running_mean.tolist() == [0.5] * 4


def test_a_changed_value_is_one_line(tmp_path):
    save(tmp_path, parts())
    content = read_checkpoint(tmp_path / "last.pt")
    content["progress"]["epoch"] = -1
    write_checkpoint(content, tmp_path / "last.pt")
    with refused("last.pt: damaged checkpoint: progress: epoch: must be at least 0, got -1"):
        Checkpoint.read(tmp_path / "last.pt")


def test_the_state_of_another_optimizer_is_one_line(tmp_path):
    save(tmp_path, parts())
    other = parts()
    other.optimizer = build_optimizer(other.model, "SGD", OptimizerSettings(lr=0.01, momentum=0.9, weight_decay=0.01))
    with pytest.raises(UserError, match=r"last\.pt: does not fit this run: "):
        Checkpoint.read(tmp_path / "last.pt").restore(other)


def test_a_failed_write_keeps_the_old_files_and_ends_the_run(tmp_path, monkeypatch):
    """The next save raises it."""
    state = parts()
    saver, ledger = save(tmp_path, state)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("utils.files.torch_file.torch.save", fail)
    saver.save(ledger)
    saver.wait()
    with pytest.raises(UserError, match=r"\.pt: could not be written \(the disk is full\); the checkpoints"):
        saver.save(ledger)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_non_finite_average_is_not_saved(tmp_path):
    state = parts()
    save(tmp_path, state)
    before = (tmp_path / "last.pt").read_bytes()
    state.ema.module[0].weight.data[0] = float("nan")
    with pytest.raises(UserError, match="the averaged weights are not finite; not saved"):
        save(tmp_path, state)
    assert (tmp_path / "last.pt").read_bytes() == before
