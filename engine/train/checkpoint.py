"""The checkpoint of a run: what it contains, how it is captured, read and put in place.

last.pt is the one record of a run: weights, averaged weights, optimizer, position, settings, and the rows of
results.csv, which is written from it. settings.yaml is written when the run begins, for people.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
from torch import Tensor, nn

from engine.optim.model_tensors import copy_from_flat, flatten, float_buffers
from models.modules import is_parallel, unwrap
from utils.address import Address
from utils.config.epochs import validates_after
from utils.config.settings import Hyperparameters, RunSettings, TrainConfig
from utils.distributed.context import DistributedContext, gather_on_main
from utils.errors import UserError
from utils.files.results_csv import ResultsTable
from utils.files.torch_file import VERSION, read_checkpoint
from utils.logger import log_when_configured
from utils.schema import Bounds, Count, build, check
from utils.strings import counted

if TYPE_CHECKING:
    from engine.train.step import TrainStep

_STATE_KEYS = ("model", "ema", "optimizer", "scaler")  # without one of these, a run cannot resume


@dataclass
class Progress:
    """Counts epochs, steps and losses, and stores the best epoch. All random numbers are keyed by these counts, so no
    RNG state is saved."""

    epoch: Count = 0  # epochs completed
    batch: Count = 0  # micro-batches of the next epoch taken
    updates: Count = 0  # optimizer steps taken
    loss_sums: list[float] = field(default_factory=list)  # sums over the finite steps of the epoch; empty: none yet
    finite_steps: Count = 0  # finite steps of the epoch so far
    bad_steps: Count = 0  # non-finite ones in a row
    best_fitness: float = -1.0  # see `engine.evaluation.fitness.Fitness`
    best_ap: float = -1.0  # of this epoch
    best_epoch: Annotated[int, Bounds(-1)] = -1
    confidence: float | None = None  # threshold chosen by F1 in the newest validation; None: not known
    class_weights: list[float] = field(default_factory=list)  # for --image-weights; empty: uniform

    def describe(self, epoch_batches: int) -> str:
        """Returns the position as the end of a sentence: ``after 2 epochs``, ``in epoch 3, after batch 5 of 10``,
        ``after the steps of epoch 3``."""
        if not self.batch:
            return f"after {counted(self.epoch, 'epoch')}"
        if self.batch == epoch_batches:
            return f"after the steps of epoch {self.epoch + 1}"
        return f"in epoch {self.epoch + 1}, after batch {self.batch} of {epoch_batches}"

    def record_fitness(self, epoch: int, fitness: float, *, ap: float) -> bool:
        """Records the scores of an epoch; they may be nan. Returns whether it is the best so far: its ``fitness`` is
        higher, or it is equal and its ``ap`` is higher."""
        is_best = fitness > self.best_fitness or (fitness == self.best_fitness and ap > self.best_ap)
        if is_best:
            self.best_fitness = fitness
            self.best_ap = ap
            self.best_epoch = epoch
        return is_best

    def reset_best(self) -> None:
        """Makes the next validated epoch the best one."""
        self.best_epoch = -1
        self.best_fitness = -1.0
        self.best_ap = -1.0

    def stops_early(self, config: TrainConfig, epochs: int) -> bool:
        """Returns True if a run of ``epochs`` ends here by its ``--patience``: it has a best epoch, and none of the
        following ones was better."""
        is_validated = self.batch == 0 and validates_after(self.epoch, epochs, config.val_every)
        has_stalled = self.best_epoch >= 0 and 0 < config.patience <= self.epoch - self.best_epoch
        return is_validated and self.epoch < epochs and has_stalled

    def count_step(self, micro_batches: int) -> None:
        """Counts a step of the optimizer over ``micro_batches``."""
        self.batch += micro_batches
        self.updates += 1

    def count_losses(self, losses: Sequence[float], *, is_finite: bool) -> None:
        """Adds the losses of a step, unless it is not finite."""
        self.bad_steps = 0 if is_finite else self.bad_steps + 1
        if is_finite:
            sums = self.loss_sums or [0.0] * len(losses)
            self.loss_sums = [total + loss for total, loss in zip(sums, losses)]
            self.finite_steps += 1

    def mean_losses(self, names: Sequence[str]) -> dict[str, float]:
        """Returns the mean losses by name over the finite steps of the epoch; nan if there are none."""
        sums = self.loss_sums or [math.nan] * len(names)
        return {name: value / max(self.finite_steps, 1) for name, value in zip(names, sums)}

    def complete_epoch(self) -> None:
        """Counts the epoch whose steps are done."""
        self.epoch += 1
        self.begin_epoch()

    def begin_epoch(self, batch: int = 0) -> None:
        """Begins to sum the losses of the next epoch, after its first ``batch`` micro-batches."""
        self.batch = batch
        self.loss_sums = []
        self.finite_steps = 0


@dataclass
class UnscoredEpoch:
    """A complete epoch whose scores are still missing."""

    number: int  # from 1
    row: dict[str, float] = field(default_factory=dict)  # its row of results.csv
    is_closing: bool = False  # see `models.losses.base.Criterion.set_no_mosaic`
    is_validated: bool = False  # it gets scores; otherwise ``--val-every`` leaves it out


@dataclass(frozen=True, kw_only=True)
class SaveContext:
    """The processes and the data of a run when it was saved, and how long it had trained."""

    world_size: int
    device: str  # its type
    seconds: float  # training time over all its starts
    epoch_batches: Count  # micro-batches of an epoch on each rank
    images: int  # number of training images, or of their tiles
    threads: Count = 0  # of torch in each process; 0: not known


@dataclass(frozen=True, kw_only=True)
class CheckpointHeader:
    """The moment at which a checkpoint was saved, a step boundary."""

    progress: Progress
    run: SaveContext
    metrics: dict[str, float] = field(default_factory=dict)  # scores of the averaged weights; empty: not validated
    # Complete epochs without scores, the oldest first: at most two, while training waits for those of the first one.
    unscored: list[UnscoredEpoch] = field(default_factory=list)
    ended_by_callback: bool = False  # a callback has ended the run here (``stop()``)


@dataclass(frozen=True, kw_only=True)
class DataFingerprint:
    """The fingerprint of a run's training and validation samples, which are tiles for data with tiles.

    It depends on the sizes and labels of the images in their order, so a copy of a data set has the same one. Other
    pixels in images of the same size are not noticed.
    """

    train_labels: str  # `data.index.DatasetIndex.label_digest` of the training samples
    val_labels: str


@dataclass(frozen=True, kw_only=True)
class RunDescription:
    """The model, the settings and the data of a run, as all of its checkpoints store them."""

    run_id: str  # random; trackers continue the run with this id
    model_spec: dict[str, Any]
    names: list[str]  # class names
    used_classes: list[str]  # names of the data set's classes that --classes chose
    imgsz: int
    bits: int  # per image channel; the number of channels is in ``model_spec``
    config: TrainConfig
    hyp: Hyperparameters
    data: dict[str, str]  # absolute paths: "source" is the YAML, "root" the folder of its entries ("": staged)
    identity: DataFingerprint
    val_images: list[str]  # held out by --val-fraction: names in the data set's folder
    tile: int  # side of the tiles of the data set's images, pixels; 0: whole images
    pretrained: dict[str, list[int]]  # parameters from weights, and their random rows
    new_lr_mult: float  # see `engine.optim.build.LoadedParameters`
    class_weights: list[float] = field(default_factory=list)  # in the loss; empty: all are equal
    origin: dict[str, str]  # see `models.weights.origin.Origin`
    command: TrainConfig  # settings that have begun the run, some of them open
    # Path of the model that teaches it, sha256 of its tensors; empty: none. best.pt leaves it out.
    teacher: dict[str, str] = field(default_factory=dict)

    @property
    def settings(self) -> RunSettings:
        return RunSettings(self.config, self.hyp)


@dataclass(frozen=True, kw_only=True)
class StoredState:
    """The state dicts of a `TrainStep`: what training changes."""

    model: dict[str, Tensor]
    ema: dict[str, Tensor]
    optimizer: dict[str, Any]
    scaler: dict[str, Any]
    # Batch-norm statistics of every rank, (ranks, values) by model. Under plain DDP they differ within an epoch. Then
    # `model` and `ema` store the means, from which another number of ranks continues.
    rank_buffers: dict[str, Tensor] | None = None


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The content of a checkpoint file from which a run can resume. The file has one level of keys: the fields of
    header, description and state, and ``rows``."""

    header: CheckpointHeader
    description: RunDescription
    state: StoredState
    rows: list[dict[str, float]]  # of results.csv
    path: Path = Path()  # file that it was read from

    def lacks_scores(self, epochs: int) -> bool:
        """Returns whether a run of ``epochs`` has to score epochs first: other processes were validating them, or
        ``--val-every`` has left the newest out, and it is now the last."""
        progress = self.header.progress
        is_between_epochs = progress.batch == 0  # otherwise its weights have been overwritten
        is_last = progress.epoch >= epochs
        return bool(self.header.unscored) or (is_between_epochs and is_last and not self.header.metrics)

    @classmethod
    def capture(
        cls, step: TrainStep, header: CheckpointHeader, description: RunDescription, rows: list[dict[str, float]]
    ) -> Checkpoint | None:
        """Returns the checkpoint of a run at a step boundary, with the tensors of the run itself, on rank 0; None on
        the others. Every rank must call this."""
        ctx = step.ctx
        models = {"model": step.model, "ema": step.ema.module}
        step.optimizer.consolidate()
        rank_buffers = None
        if header.progress.batch > 0:  # within an epoch
            rank_buffers = _gather_rank_buffers(ctx, models)
        if not ctx.is_main:
            return None
        states = {name: unwrap(module).state_dict() for name, module in models.items()}
        for name, values in (rank_buffers or {}).items():
            _put_means(values, models[name], states[name])
        stored = StoredState(
            model=states["model"],
            ema=states["ema"],
            optimizer=step.optimizer.state_dict(),
            scaler=step.scaler.state_dict(),
            rank_buffers=rank_buffers,
        )
        return cls(header=header, description=description, state=stored, rows=rows)

    def restore(self, step: TrainStep) -> None:
        """Loads the state that `capture` took into a run, on all ranks. Raises UserError if it does not fit."""
        stored = self.state
        models = {"model": step.model, "ema": step.ema.module}
        try:
            unwrap(step.model).load_state_dict(stored.model)
            step.ema.module.load_state_dict(stored.ema)
            for name, values in (stored.rank_buffers or {}).items():
                if len(values) == step.ctx.world_size:  # otherwise the means are kept
                    buffers = float_buffers(unwrap(models[name]))
                    copy_from_flat(values[step.ctx.rank].to(buffers[0].device), buffers)
            step.optimizer.load_state_dict(stored.optimizer)
            if stored.scaler and step.scaler.is_enabled():
                step.scaler.load_state_dict(stored.scaler)
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[-1].strip()
            raise UserError(f"{self.path}: does not fit this run: {reason}") from None

    def content(self) -> dict[str, Any]:
        """Returns the content of the file, without fields that are None."""
        parts = (self.header, self.description, self.state)
        content = {key: value for part in parts for key, value in as_plain(part).items()} | {"rows": self.rows}
        return {key: value for key, value in content.items() if value is not None}

    @classmethod
    def read(cls, path: Path) -> Checkpoint:
        """Reads a checkpoint file, with tensors mapped from the file. Raises UserError for any file from which a run
        cannot resume."""
        content = read_checkpoint(path)
        if "config" not in content:
            raise UserError(f"{path}: holds no run to resume; start a new one with --weights {shlex.quote(str(path))}")
        if any(key not in content for key in _STATE_KEYS):
            raise UserError(
                f"{path}: holds weights only (a best.pt?); resume from last.pt, or start with "
                f"--weights {shlex.quote(str(path))}"
            )
        if content.get("version", 0) < VERSION:
            raise UserError(
                f"{path}: written by an earlier version, whose runs cannot continue; start a new one with "
                f"--weights {shlex.quote(str(path))}"
            )
        for epoch in check(content.get("unscored", []), list[dict], f"{path}: unscored"):
            epoch.pop("has_own_file", None)  # written by an earlier version; the file itself tells it
        left_out: dict[str, Any] = {}  # settings that only another version of this program has
        for name, settings in (("config", TrainConfig), ("hyp", Hyperparameters), ("command", TrainConfig)):
            if name in content:
                stored = check(content[name], dict, f"{path}: {name}")
                known = {key: stored[key] for key in stored if key in settings.__dataclass_fields__}
                left_out |= {key: stored[key] for key in stored if key not in known}
                content[name] = build(settings, known, f"{path}: {name}")
        if left_out:
            listed = ", ".join(f"{key} ({value})" for key, value in left_out.items())
            log_when_configured(f"{path}: left out, because they are no settings any more: {listed}")
        parts: dict[str, Any] = {}
        for part, kind in (("header", CheckpointHeader), ("description", RunDescription), ("state", StoredState)):
            values = {item.name: content[item.name] for item in fields(kind) if item.name in content}
            parts[part] = build(kind, values, f"{path}: damaged checkpoint")
        return cls(**parts, rows=ResultsTable.of(content["rows"], str(path)).as_rows(), path=path)


def _gather_rank_buffers(ctx: DistributedContext, models: dict[str, nn.Module]) -> dict[str, Tensor] | None:
    """Gathers the float buffers of ``models`` by their names: (ranks, values) each. Every rank must call it.

    Returns None on all ranks but 0, and if all ranks hold the same values.
    """
    if not ctx.is_distributed or not any(is_parallel(model) for model in models.values()):
        return None
    local = {name: flatten(float_buffers(unwrap(model))).cpu().numpy() for name, model in models.items()}
    by_rank = gather_on_main(ctx, local)
    if by_rank is None:
        return None
    stacked = {name: torch.from_numpy(np.stack([arrays[name] for arrays in by_rank])) for name in models}
    are_equal = all(bool((values == values[0]).all()) for values in stacked.values())
    return None if are_equal else stacked


def _put_means(values: Tensor, model: nn.Module, state: dict[str, Any]) -> None:
    """Replaces the float buffers in ``state``, a state dict of ``model``, by the means of ``values`` over ranks
    (dimension 0), without rounding where all ranks have the same value."""
    same = (values == values[0]).all(0)
    means = torch.where(same, values[0], values.mean(0))
    buffers = {name: buffer for name, buffer in unwrap(model).named_buffers() if buffer.is_floating_point()}
    for (name, buffer), piece in zip(buffers.items(), means.split([buffer.numel() for buffer in buffers.values()])):
        if name in state:
            state[name] = piece.view(buffer.shape)


def as_plain(value: Any) -> Any:
    """Returns a dataclass as a dict of its fields, recursively. Unlike `asdict`, does not copy tensors."""
    if isinstance(value, Address):
        return str(value)
    if isinstance(value, list):
        return [as_plain(item) for item in value]
    if not is_dataclass(value):
        return value
    return {item.name: as_plain(getattr(value, item.name)) for item in fields(value)}
