"""What a checkpoint of a run holds, and how a run is restored from it.

Plain DDP keeps batch-norm statistics apart within an epoch and averages them at its end. A checkpoint from inside one
holds the mean in ``model`` and ``ema``, which makes it a usable model, and those of every rank in ``rank_buffers``. The
same number of ranks resumes with these, bit for bit; any other number starts from the mean.
"""

from __future__ import annotations

import contextlib
import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from engine.optim.model_tensors import copy_from_flat, flatten, float_buffers
from utils.config.settings import Hyperparameters, TrainConfig, validates_after
from utils.distributed.agreement import MAY_DIFFER
from utils.distributed.context import DistributedContext, gather_arrays, is_parallel, unwrap
from utils.errors import UserError
from utils.files.checkpoint_file import read_checkpoint
from utils.files.schema import Bounds, Count, build
from utils.strings import counted

if TYPE_CHECKING:
    from engine.optim.build import OptimizerSet
    from engine.optim.ema import ModelEma
    from models.detector import Detector


# Settings that do not change how a run trains, or whose meaning is compared elsewhere: the fingerprint of the data, the
# values of the recipe.
_WITHOUT_RESULT = frozenset(
    ("resume", "eval_ranks", "tracker", "noplots", "export", "save_minutes", "save_period", "patience")
)
_COMPARED_BY_CONTENT = frozenset(("data", "hyp", "override"))


@dataclass
class Progress:
    """Where a run stands, at a step boundary. Everything random is keyed by these numbers, so no RNG is saved."""

    epoch: Count = 0  # epochs completed
    batch: Count = 0  # micro-batches of the next epoch taken
    step: Count = 0  # micro-batches taken by each rank
    updates: Count = 0  # optimizer steps taken
    loss_sums: list[float] = field(default_factory=list)  # over the finite steps of the epoch; empty: none yet
    finite_steps: Count = 0  # of the epoch
    bad_steps: Count = 0  # non-finite ones in a row
    buffers_averaged: bool = False  # over the ranks: the epoch's steps are done
    best_fitness: float = -1.0  # of `engine.evaluation.metrics`
    best_epoch: Annotated[int, Bounds(-1)] = -1
    # Thresholds with the best F1 in the newest validation, see `EvalResult`; None: not known.
    confidence: float | None = None
    plain_confidence: float | None = None
    scored_confidence: float | None = None
    class_weights: list[float] = field(default_factory=list)  # for --image-weights; empty: uniform

    def has_trained(self, epoch_batches: int) -> bool:
        """Whether all ``epoch_batches`` of the next epoch are taken, and only its validation is missing."""
        return 0 < self.batch == epoch_batches

    def describe(self, epoch_batches: int) -> str:
        """Returns the progress text: ``2 epochs``, ``epoch 3, batch 5 of 10``, ``the steps of epoch 3``."""
        if not self.batch:
            return counted(self.epoch, "epoch")
        if self.has_trained(epoch_batches):
            return f"the steps of epoch {self.epoch + 1}"
        return f"epoch {self.epoch + 1}, batch {self.batch} of {epoch_batches}"

    def record_fitness(self, fitness: float) -> bool:
        """Notes the ``fitness`` after the epochs completed; it may be nan. Returns whether it is the best so far."""
        is_best = fitness > self.best_fitness
        if is_best:
            self.best_fitness = fitness
            self.best_epoch = self.epoch
        return is_best

    def has_stalled(self, patience: int, *, epoch: int | None = None) -> bool:
        """Whether ``epoch``, or the newest completed one, is the last for which ``patience`` waits, unless it is
        better. A ``patience`` of 0 waits for ever."""
        newest = self.epoch if epoch is None else epoch
        epochs_without_best = newest - self.best_epoch
        return patience > 0 and epochs_without_best >= patience

    def stops_early(self, patience: int, *, epochs: int, val_every: int) -> bool:
        """Whether a run of ``epochs`` that validates every ``val_every`` ends here for want of a better epoch."""
        is_validated = self.batch == 0 and validates_after(self.epoch, epochs, val_every)
        return is_validated and self.best_epoch >= 0 and self.epoch < epochs and self.has_stalled(patience)

    def count_step(self, micro_batches: int) -> None:
        """Counts a step of the optimizer over ``micro_batches``."""
        self.batch += micro_batches
        self.step += micro_batches
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

    def begin_epoch(self) -> None:
        """Resets what belongs to a position inside an epoch."""
        self.batch = 0
        self.loss_sums = []
        self.finite_steps = 0
        self.buffers_averaged = False


# Fields of `Progress` that follow from a validation.
_RESULT_FIELDS = ("best_fitness", "best_epoch", "confidence", "plain_confidence", "scored_confidence")


@dataclass(frozen=True, kw_only=True)
class PendingEpoch:
    """A completed epoch that other processes validate: what is saved with its scores, when these have come."""

    row: dict[str, float]  # of results.csv
    is_closing: bool  # see `models.losses.base.Criterion.set_closing`
    progress: Progress  # after the epoch
    ema: dict[str, Tensor]  # on the CPU of rank 0; empty on the other ranks

    def content(self) -> dict[str, Any]:
        """Returns plain data and tensors, as checkpoint files hold them."""
        return {**vars(self), "progress": asdict(self.progress)}

    def scored_progress(self, newest: Progress) -> Progress:
        """Returns the progress after the epoch with the result of its validation, which ``newest`` has."""
        return replace(self.progress, **{name: getattr(newest, name) for name in _RESULT_FIELDS})


class TrainState(Protocol):
    """What training changes: `engine.train.step.TrainStep`."""

    model: nn.Module
    ema: ModelEma[Detector]
    optimizer: OptimizerSet
    scaler: torch.amp.GradScaler


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """How long a run has trained, and on what."""

    world_size: int | None = None  # None: not known
    device: str | None = None  # its type; None: not known
    seconds: float  # in all its processes
    epoch_batches: Count  # micro-batches of an epoch on each rank
    images: int | None = None  # of the training split, or its tiles; None: an earlier version, unknown


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a run stands, and what is known of its weights there."""

    progress: Progress
    run: RunStatus
    metrics: dict[str, float] = field(default_factory=dict)  # scores of the averaged weights; empty: not validated
    pending: PendingEpoch | None = None  # the newest epoch, if it has not been scored yet


@dataclass(frozen=True, kw_only=True)
class RunDescription:
    """What describes a run in all of its checkpoints."""

    model_spec: dict[str, Any]
    names: list[str]  # of the classes
    imgsz: int = 0
    bits: int = 8  # of a channel of the images; their number is in ``model_spec``
    config: TrainConfig
    hyp: Hyperparameters
    # Location (`utils.files.folders.describe_location`) and fingerprint of the data set, and the label digest of its
    # validation images.
    data: dict[str, str]
    val_images: list[str] = field(default_factory=list)  # that --val-fraction holds out: names in the data set's folder
    tile: int = 0  # side of the tiles of the data set's images, pixels; 0: whole images
    pretrained: dict[str, list[int]] = field(default_factory=dict)  # parameters from weights, and their random rows
    new_lr_mult: float | None = None  # see `engine.optim.build.LoadedParameters`; None: an earlier version, unknown
    origin: dict[str, str] = field(default_factory=dict)  # see `utils.files.folders.Origin`
    teacher: dict[str, str] = field(default_factory=dict)  # path and sha256 of the model that teaches this one

    @property
    def fingerprint(self) -> str:
        """Identifies the images and labels; "" if the checkpoint does not say."""
        return self.data.get("fingerprint", "")

    def trains_like(self, other: RunDescription) -> bool:
        """Whether a run with this description computes the same steps as the run of ``other``."""
        ignored = MAY_DIFFER | _WITHOUT_RESULT | _COMPARED_BY_CONTENT
        other_config = asdict(other.config)
        same_config = all(
            value == other_config[name] for name, value in asdict(self.config).items() if name not in ignored
        )
        return same_config and self.hyp == other.hyp and self.fingerprint == other.fingerprint

    def validates_like(self, other: RunDescription) -> bool:
        """Whether the scores of both runs are comparable: on the same images, at the same size.

        Images are the same if their labels are. Files of the data set that are copied to another machine have other
        modification times, on which the fingerprint depends.
        """
        digests = {self.data.get("val_labels", ""), other.data.get("val_labels", "")}
        digests.discard("")  # an earlier version, which did not store it
        return len(digests) < 2 and self.imgsz == other.imgsz

    def content(self) -> dict[str, Any]:
        """Returns plain data and tensors, as checkpoint files hold them."""
        content = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, PendingEpoch):
                value = value.content()  # `asdict` would copy its tensors
            elif is_dataclass(value) and not isinstance(value, type):
                value = asdict(value)
            content[item.name] = value
        return content


@dataclass(frozen=True, kw_only=True)
class Checkpoint(RunDescription, Position):
    """What a checkpoint file stores: the description and the state of a run, which can resume from it.

    Tensors are on the CPU after `read`; in a checkpoint that is to be written they are those of the run.
    """

    model: dict[str, Tensor]
    ema: dict[str, Tensor]
    optimizer: dict[str, Any]
    scaler: dict[str, Any]
    rank_buffers: dict[str, Tensor] | None = None  # (ranks, values) by model, where ranks differ
    path: Path = Path()

    @classmethod
    def read(cls, path: Path) -> Checkpoint:
        """Reads a checkpoint file. Raises UserError for any file from which a run cannot resume."""
        content = read_checkpoint(path)
        if "config" not in content:
            raise UserError(f"{path}: holds no run to resume; start a new one with --weights {shlex.quote(str(path))}")
        if any(key not in content for key in _STATE_KEYS):
            raise UserError(
                f"{path}: holds weights only (a best.pt?); resume from last.pt, or start with "
                f"--weights {shlex.quote(str(path))}"
            )
        names = {item.name for item in fields(cls)} - {"path"}
        values = {key: value for key, value in content.items() if key in names}
        former_pending = _former_pending_epoch(content)
        if former_pending is not None:
            values["pending"] = former_pending
        for name, settings in (("config", TrainConfig), ("hyp", Hyperparameters)):
            if name in values:  # a setting of another version of this program is no damage
                values[name] = build(settings, values[name], f"{path}: {name}")
        return build(cls, values | {"path": path}, f"{path}: damaged checkpoint")

    def content(self) -> dict[str, Any]:
        """Returns what the file stores: everything but its path; `rank_buffers` and `pending` only if there are any."""
        content = super().content()
        del content["path"]
        for name in ("rank_buffers", "pending"):
            if content[name] is None:
                del content[name]
        return content

    def restore(self, ctx: DistributedContext, state: TrainState) -> None:
        """Loads the state of a run. Raises UserError when it does not fit."""
        with self.errors_of_fit():
            unwrap(state.model).load_state_dict(self.model)
            state.ema.module.load_state_dict(self.ema)
            restore_rank_buffers(self.rank_buffers, ctx, {"model": state.model, "ema": state.ema.module})
            state.optimizer.load_state_dict(self.optimizer)
        if self.scaler and state.scaler.is_enabled():
            state.scaler.load_state_dict(self.scaler)

    def free_tensors(self) -> None:
        """Frees the tensors of a checkpoint that has been restored."""
        self.model.clear()
        self.ema.clear()
        self.optimizer.clear()
        if self.rank_buffers is not None:
            self.rank_buffers.clear()

    @contextlib.contextmanager
    def errors_of_fit(self) -> Iterator[None]:
        """Turns what torch raises for state that does not fit the run into a UserError."""
        try:
            yield
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[-1].strip()
            raise UserError(f"{self.path}: does not fit this run: {reason}") from None


def weights_part(content: dict[str, Any]) -> dict[str, Any]:
    """Returns what best.pt stores of a checkpoint's content: the averaged weights, and what describes them."""
    return {key: value for key, value in content.items() if key not in _RUN_KEYS}


_STATE_KEYS = ("model", "ema", "optimizer", "scaler")  # without one of these, a run cannot resume
FORMER_HOOKS_KEY = "hooks"  # earlier versions stored states of hooks under it
_RUN_KEYS = ("model", "optimizer", "scaler", "run", "rank_buffers", FORMER_HOOKS_KEY, "pending", "teacher")
_FORMER_PENDING_KEYS = ("remote_validation", "RemoteValidation")  # of the hook whose state was the pending epoch


def _former_pending_epoch(content: dict[str, Any]) -> Any:
    """Returns the pending epoch where earlier versions stored it; None if it is not there."""
    hooks = content.get(FORMER_HOOKS_KEY)
    if not isinstance(hooks, dict):
        return None
    for key in _FORMER_PENDING_KEYS:
        if key in hooks:
            return hooks[key]
    return None


def gather_rank_buffers(ctx: DistributedContext, models: dict[str, nn.Module]) -> dict[str, Tensor] | None:
    """Gathers the float buffers of ``models`` by their names: (ranks, values) each. Every rank must call it.

    Returns None on all ranks but 0, and if all ranks hold the same values.
    """
    if not ctx.is_distributed or not any(is_parallel(model) for model in models.values()):
        return None
    local = {name: flatten(float_buffers(unwrap(model))).cpu().numpy() for name, model in models.items()}
    by_rank = gather_arrays(ctx, local)
    if by_rank is None:
        return None
    stacked = {name: torch.from_numpy(np.stack([arrays[name] for arrays in by_rank])) for name in models}
    are_equal = all(bool((values == values[0]).all()) for values in stacked.values())
    return None if are_equal else stacked


def put_means(values: Tensor, model: nn.Module, state: dict[str, Any]) -> None:
    """Replaces the float buffers in ``state``, a state dict of ``model``, by their means over ranks."""
    buffers = {name: buffer for name, buffer in unwrap(model).named_buffers() if buffer.is_floating_point()}
    pieces = _mean(values).split([buffer.numel() for buffer in buffers.values()])
    for (name, buffer), piece in zip(buffers.items(), pieces):
        if name in state:
            state[name] = piece.view(buffer.shape)


def restore_rank_buffers(
    stored: dict[str, Tensor] | None, ctx: DistributedContext, models: dict[str, nn.Module]
) -> None:
    """Restores this rank's own buffers if as many ranks wrote the checkpoint; otherwise the loaded means are kept."""
    for name, values in (stored or {}).items():
        if len(values) == ctx.world_size:
            buffers = float_buffers(unwrap(models[name]))
            copy_from_flat(values[ctx.rank].to(buffers[0].device), buffers)


def _mean(values: Tensor) -> Tensor:
    """Returns the mean over ranks (dimension 0), without rounding where all ranks have the same value."""
    same = (values == values[0]).all(0)
    return torch.where(same, values[0], values.mean(0))
