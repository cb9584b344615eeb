"""The checkpoint of a run: what it contains, how it is captured, written in the background, read and put in place.

last.pt is the one record of a run: weights, averaged weights, optimizer, position, settings, and the rows of
results.csv, which is written from it. settings.yaml is written when the run begins, for people.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from data.index import DatasetIndex
from engine.optim.model_tensors import copy_from_flat, flatten, float_buffers
from models.modules import is_parallel, unwrap
from utils.address import Address
from utils.config.epochs import validates_after
from utils.config.settings import Hyperparameters, TrainConfig
from utils.distributed.context import DistributedContext, gather_on_main
from utils.errors import UserError, all_mistakes, os_reason
from utils.files.results_csv import ResultsTable
from utils.files.torch_file import VERSION, read_checkpoint, write_checkpoint
from utils.logger import get_logger, log_when_configured
from utils.machine.limits import DISK_FULL
from utils.program import resume_flag
from utils.schema import Bounds, Count, build, check
from utils.strings import counted

if TYPE_CHECKING:
    from engine.optim.ema import ModelEma
    from engine.optim.optimizer_set import OptimizerSet
    from models.detector import Detector

RESULTS_CSV = "results.csv"
_STATE_KEYS = ("model", "ema", "optimizer", "scaler")  # without one of these, a run cannot resume
# Keys of best.pt: the averaged weights, their scores and description.
_BEST_KEYS = (
    "progress", "metrics", "run_id", "model_spec", "names", "used_classes", "imgsz", "bits", "config", "hyp", "data",
    "identity", "val_images", "tile", "pretrained", "new_lr_mult", "origin", "ema"
)  # fmt: skip


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

    def has_stalled(self, patience: int) -> bool:
        """Returns True if the newest completed epoch is at least ``patience`` epochs after the best one. Returns False
        for a ``patience`` of 0, and before any epoch has a score."""
        return patience > 0 and self.best_epoch >= 0 and self.epoch - self.best_epoch >= patience

    def stops_early(self, config: TrainConfig, epochs: int) -> bool:
        """Returns True if a run of ``epochs`` ends here by its ``--patience``, because no later epoch was better."""
        is_validated = self.batch == 0 and validates_after(self.epoch, epochs, config.val_every)
        return is_validated and self.epoch < epochs and self.has_stalled(config.patience)

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


# Fields of `Progress` that follow from a validation.
RESULT_FIELDS = ("best_fitness", "best_ap", "best_epoch", "confidence")


@dataclass
class UnscoredEpoch:
    """A complete epoch whose scores are still missing."""

    number: int  # from 1
    row: dict[str, float] = field(default_factory=dict)  # its row of results.csv
    is_closing: bool = False  # see `models.losses.base.Criterion.set_no_mosaic`
    is_validated: bool = False  # it gets scores; otherwise ``--val-every`` leaves it out
    has_own_file: bool = False  # steps have been taken since: its averaged weights are those in `weights_path`


def weights_path(folder: Path, epoch: int) -> Path:
    """Returns the file in a run's folder that holds the weights of an epoch until last.pt has its scores."""
    return folder / f"unscored{epoch}.pt"


def scores_path(folder: Path, epoch: int) -> Path:
    """Returns the file into which other processes write the scores of an epoch (``--eval-ranks``)."""
    return folder / f"unscored{epoch}.scores"


def remove_unscored(folder: Path, *, keep: Collection[int] = ()) -> None:
    """Removes the weights and scores of epochs that last.pt does not list as unscored. ``keep``: those that it does."""
    for path in folder.glob("unscored*"):
        number = path.stem.removeprefix("unscored")
        if number.isdecimal() and int(number) not in keep:
            path.unlink(missing_ok=True)


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
    unscored: list[UnscoredEpoch] = field(default_factory=list)  # complete epochs without scores, the oldest first
    ended_by_callback: bool = False  # a callback has ended the run here (``stop()``)


@dataclass(frozen=True, kw_only=True)
class DataFingerprint:
    """The fingerprint of a run's training and validation samples, which are tiles for data with tiles.

    It depends on the sizes and labels of the images in their order, so a copy of a data set has the same one. Other
    pixels in images of the same size are not noticed.
    """

    train_labels: str  # `DatasetIndex.label_digest` of the training samples
    val_labels: str

    @classmethod
    def of(cls, train: DatasetIndex, val: DatasetIndex) -> DataFingerprint:
        """Returns the fingerprint of two indexes; equal on all ranks, because `check_same_data` has compared them."""
        return cls(train_labels=train.label_digest(), val_labels=val.label_digest())


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
    command: TrainConfig | None = None  # settings that have begun the run, some of them open
    # Path of the model that teaches it, sha256 of its tensors; empty: none. best.pt leaves it out.
    teacher: dict[str, str] = field(default_factory=dict)


class TrainState(Protocol):
    """The state that training changes: `engine.train.step.TrainStep`."""

    model: nn.Module
    ema: ModelEma[Detector]
    optimizer: OptimizerSet
    scaler: torch.amp.GradScaler


@dataclass(frozen=True, kw_only=True)
class StoredState:
    """The state dicts of a `TrainState`."""

    model: dict[str, Tensor] = field(default_factory=dict)
    ema: dict[str, Tensor] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    scaler: dict[str, Any] = field(default_factory=dict)
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

    @property
    def progress(self) -> Progress:
        return self.header.progress

    def lacks_scores(self, epochs: int) -> bool:
        """Returns whether a run of ``epochs`` has to score epochs first: other processes were validating them, or
        ``--val-every`` has left the newest out, and it is now the last."""
        is_between_epochs = self.progress.batch == 0  # otherwise its weights have been overwritten
        is_last = self.progress.epoch >= epochs
        return bool(self.header.unscored) or (is_between_epochs and is_last and not self.header.metrics)

    def record(self) -> Checkpoint:
        """Returns the checkpoint without its tensors, whose file can then be replaced and freed."""
        return replace(self, state=StoredState())

    @classmethod
    def capture(
        cls,
        ctx: DistributedContext,
        state: TrainState,
        header: CheckpointHeader,
        description: RunDescription,
        rows: list[dict[str, float]],
    ) -> Checkpoint | None:
        """Returns the checkpoint of a run at a step boundary, with the tensors of the run itself, on rank 0; None on
        the others. Every rank must call this."""
        models = {"model": state.model, "ema": state.ema.module}
        state.optimizer.consolidate()
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
            optimizer=state.optimizer.state_dict(),
            scaler=state.scaler.state_dict(),
            rank_buffers=rank_buffers,
        )
        return cls(header=header, description=description, state=stored, rows=rows)

    def restore(self, ctx: DistributedContext, state: TrainState) -> None:
        """Loads the state that `capture` took into a run, on all ranks. Raises UserError if it does not fit."""
        stored = self.state
        models = {"model": state.model, "ema": state.ema.module}
        try:
            unwrap(state.model).load_state_dict(stored.model)
            state.ema.module.load_state_dict(stored.ema)
            for name, values in (stored.rank_buffers or {}).items():
                if len(values) == ctx.world_size:  # otherwise the means are kept
                    buffers = float_buffers(unwrap(models[name]))
                    copy_from_flat(values[ctx.rank].to(buffers[0].device), buffers)
            state.optimizer.load_state_dict(stored.optimizer)
            if stored.scaler and state.scaler.is_enabled():
                state.scaler.load_state_dict(stored.scaler)
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[-1].strip()
            raise UserError(f"{self.path}: does not fit this run: {reason}") from None

    def content(self) -> dict[str, Any]:
        """Returns the content of the file; `rank_buffers` and `unscored` only if there are any."""
        parts = (self.header, self.description, self.state)
        content = {key: value for part in parts for key, value in _plain(part).items()} | {"rows": self.rows}
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
        with all_mistakes() as mistakes:
            parts: dict[str, Any] = {}
            for part, kind in (("header", CheckpointHeader), ("description", RunDescription), ("state", StoredState)):
                values = {item.name: content[item.name] for item in fields(kind) if item.name in content}
                with mistakes.collecting():
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


def _plain(value: Any) -> Any:
    """Returns a dataclass as a dict of its fields, recursively. Unlike `asdict`, does not copy tensors."""
    if isinstance(value, Address):
        return str(value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if not is_dataclass(value):
        return value
    return {item.name: _plain(getattr(value, item.name)) for item in fields(value)}


def _content_of_best(content: dict[str, Any]) -> dict[str, Any]:
    return {key: content[key] for key in _BEST_KEYS}


def copy_to_cpu(value: Any) -> Any:
    """Copies plain data and tensors to the CPU, so that training does not change them. The host waits for the device
    once: copies from CUDA are queued into pinned memory."""
    copied = _copy(value)
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()
    return copied


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        tensor = value.detach()
        if not tensor.is_cuda:
            return tensor.to("cpu", copy=True).contiguous()
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copy(item) for item in value]
    return value


class Checkpointer:
    """Writes the checkpoints of a run in a thread: last.pt, best.pt and periodic ones. Every rank has one and makes the
    same calls; only rank 0 writes. A save waits until the files of the one before are written.

    Attributes:
        table: results.csv, which is written together with last.pt. Its newest rows are the trainer's.
        save_period: epochN.pt is kept every ``save_period`` epochs; 0: never.
    """

    def __init__(
        self,
        folder: Path,
        *,
        ctx: DistributedContext,
        description: RunDescription,
        save_period: int = 0,
        rows: Iterable[dict[str, float]] = (),
    ) -> None:
        self.folder = folder
        self.ctx = ctx
        self.description = description
        self.save_period = save_period
        self.table = ResultsTable.of(rows)
        self.last = folder / "last.pt"
        self.best = folder / "best.pt"
        self._pool = ThreadPoolExecutor(1, "checkpoint writer")
        self._writing: Future[None] | None = None

    @property
    def is_writing(self) -> bool:
        """True until all files are written. May be read from any thread."""
        writing = self._writing
        return writing is not None and not writing.done()

    def check(self) -> None:
        """Raises the error of an earlier write, if any."""
        if not self.is_writing:
            self.flush()

    def wait(self) -> None:
        """Waits until no file is being written, whether or not the writes succeeded."""
        if self._writing is not None:
            self._writing.exception()

    def flush(self) -> None:
        """Waits until all files are written. Raises the error of a write, if any."""
        writing = self._writing
        if writing is not None:
            self.wait()
            self._writing = None
            writing.result()

    def set_epochs(self, epochs: int) -> None:
        """Changes the number of epochs that checkpoints store."""
        config = replace(self.description.config, epochs=epochs)
        self.description = replace(self.description, config=config)

    def save(
        self,
        state: TrainState,
        header: CheckpointHeader,
        *,
        is_epoch_end: bool = False,
        is_best: bool = False,
        earlier_best: dict[str, Any] | None = None,
    ) -> None:
        """Saves the run in last.pt: copies its state, and writes in the background. Raises the error of an earlier
        write. Then removes the files of epochs that have their scores now (`remove_unscored`).

        Args:
            is_epoch_end: epochN.pt is also written, if it is due.
            is_best: best.pt is also written, with these weights.
            earlier_best: content of best.pt, if the best weights are those of an earlier epoch.
        """
        content = self._copy_content(state, header)
        if content is None:
            return
        files: dict[Path, dict[str, Any]] = {}
        # last.pt comes last: a run that resumes from an older one writes the others again.
        if is_best or earlier_best:
            files[self.best] = earlier_best or _content_of_best(content)
        epoch = header.progress.epoch
        if is_epoch_end and self.save_period > 0 and epoch % self.save_period == 0:
            files[self.folder / f"epoch{epoch}.pt"] = content
        files[self.last] = content
        self._submit(files)

    def save_weights(self, state: TrainState, header: CheckpointHeader, epoch: int) -> None:
        """Writes, on rank 0, what best.pt would contain if this ``epoch`` were the best, for the processes that score
        it, in the background. Raises the error of an earlier write."""
        if self.ctx.is_main:
            content = _plain(header) | _plain(self.description) | {"ema": state.ema.module.state_dict()}
            self._submit({weights_path(self.folder, epoch): copy_to_cpu(_content_of_best(content))})

    def _copy_content(self, state: TrainState, header: CheckpointHeader) -> dict[str, Any] | None:
        """Returns a copy of a checkpoint's content on the CPU of rank 0; None on other ranks. Every rank must call
        this."""
        checkpoint = Checkpoint.capture(self.ctx, state, header, self.description, self.table.as_rows())
        return None if checkpoint is None else copy_to_cpu(checkpoint.content())

    def _submit(self, files: dict[Path, dict[str, Any]]) -> None:
        self.flush()
        self._writing = self._pool.submit(self._write, files)

    def _write(self, files: dict[Path, dict[str, Any]]) -> None:
        for path, content in files.items():
            averages = [tensor for tensor in content["ema"].values() if tensor.is_floating_point()]
            if not all(bool(torch.isfinite(tensor).all()) for tensor in averages):
                kept = f"{self.last} holds the last good ones" if self.last.exists() else "there are no good ones yet"
                raise UserError(f"the averaged weights are not finite; not saved, and {kept}")
            try:
                write_checkpoint(content, path)
                if path == self.last:
                    remove_unscored(self.folder, keep={one["number"] for one in content["unscored"]})
            except OSError as error:
                raise self.write_failure(path, error) from None
            if path == self.last and content["rows"]:
                self._write_results(content["rows"])

    def _write_results(self, rows: list[dict[str, float]]) -> None:
        """Writes results.csv, whose rows last.pt has, too: without it the run goes on."""
        path = self.folder / RESULTS_CSV
        try:
            ResultsTable.of(rows).write(path)
        except OSError as error:
            message = "%s: cannot be written (%s; does another program have it open?); the next epoch tries again"
            get_logger().warning(message, path, os_reason(error))

    def write_failure(self, path: Path, error: OSError) -> UserError:
        """Returns the error about a file of the run that could not be written, which says how to continue."""
        is_full = error.errno in DISK_FULL
        reason = "the disk is full" if is_full else (error.strerror or str(error)).splitlines()[0].lower()
        remedy = "free some space" if is_full else "check the disk"
        advice = f"there is no earlier checkpoint to resume from: {remedy} and start again"
        if self.last.exists():
            advice = f"the checkpoints already there are intact: {remedy} and continue with {resume_flag(self.last)}"
        return UserError(f"{path}: could not be written ({reason}); {advice}")
