"""The content of a run's checkpoint: captured from a run, written to a file, read from it, restored into a run."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch
from torch import Tensor, nn

from engine.checkpoint.description import RunDescription
from engine.checkpoint.progress import CheckpointHeader
from engine.checkpoint.rank_buffers import gather_rank_buffers, put_means, restore_rank_buffers
from models.modules import unwrap
from utils.config.settings import Hyperparameters, TrainConfig
from utils.distributed.context import DistributedContext
from utils.errors import UserError, all_mistakes
from utils.files.torch_file import read_checkpoint
from utils.schema import build

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from engine.optim.ema import ModelEma
    from engine.optim.optimizer_set import OptimizerSet
    from models.detector import Detector

_STATE_KEYS = ("model", "ema", "optimizer", "scaler")  # without one of these, a run cannot resume
# Keys that best.pt leaves out: it stores the averaged weights and their description.
_RUN_KEYS = ("model", "optimizer", "scaler", "run", "rank_buffers", "pending", "ended_by_callback", "teacher", "files")


class TrainState(Protocol):
    """The state that training changes: `engine.train.step.TrainStep`."""

    model: nn.Module
    ema: ModelEma[Detector]
    optimizer: OptimizerSet
    scaler: torch.amp.GradScaler


@dataclass(frozen=True, kw_only=True)
class StoredState:
    """The state dicts of a `TrainState`."""

    model: dict[str, Tensor]
    ema: dict[str, Tensor]
    optimizer: dict[str, Any]
    scaler: dict[str, Any]
    rank_buffers: dict[str, Tensor] | None = None  # (ranks, values) by model, where ranks differ


@dataclass(frozen=True, kw_only=True)
class CheckpointFacts:
    """The content of a checkpoint file from which a run can resume, without its state."""

    header: CheckpointHeader
    description: RunDescription
    path: Path = Path()  # file that it was read from

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads the facts of a checkpoint file, but no tensors, except those of a pending epoch. Raises UserError for
        any file from which no run can resume. Whether its tensors are complete and intact is left to
        `Checkpoint.read`."""
        names = [item.name for kind in (CheckpointHeader, RunDescription) for item in fields(kind)]
        stored = read_checkpoint(path, verify=False)
        content = {name: stored[name] for name in names if name in stored}
        _check_is_resumable(path, content, ("run",))
        return cls(**_build_parts(path, content, header=CheckpointHeader, description=RunDescription), path=path)


@dataclass(frozen=True, kw_only=True)
class Checkpoint(CheckpointFacts):
    """The content of a checkpoint file from which a run can resume. The file has one level of keys: the fields of all
    three parts."""

    state: StoredState

    @classmethod
    def capture(
        cls, ctx: DistributedContext, state: TrainState, header: CheckpointHeader, description: RunDescription
    ) -> Checkpoint | None:
        """Returns the checkpoint of a run at a step boundary, with the tensors of the run itself, on rank 0; None on
        the others. Every rank must call this."""
        models = {"model": state.model, "ema": state.ema.module}
        state.optimizer.consolidate()
        rank_buffers = None
        if header.progress.batch > 0 and not header.progress.buffers_averaged:  # within an epoch
            rank_buffers = gather_rank_buffers(ctx, models)
        if not ctx.is_main:
            return None
        states = {name: unwrap(module).state_dict() for name, module in models.items()}
        for name, values in (rank_buffers or {}).items():
            put_means(values, models[name], states[name])
        stored = StoredState(
            model=states["model"],
            ema=states["ema"],
            optimizer=state.optimizer.state_dict(),
            scaler=state.scaler.state_dict(),
            rank_buffers=rank_buffers,
        )
        return cls(header=header, description=description, state=stored)

    def restore(self, ctx: DistributedContext, state: TrainState) -> None:
        """Loads the state that `capture` took into a run, on all ranks. Raises UserError if it does not fit."""
        stored = self.state
        with _errors_of_fit(self.path):
            unwrap(state.model).load_state_dict(stored.model)
            state.ema.module.load_state_dict(stored.ema)
            restore_rank_buffers(stored.rank_buffers, ctx, {"model": state.model, "ema": state.ema.module})
            state.optimizer.load_state_dict(stored.optimizer)
        if stored.scaler and state.scaler.is_enabled():
            state.scaler.load_state_dict(stored.scaler)

    def content(self) -> dict[str, Any]:
        """Returns the content of the file; `rank_buffers` and `pending` only if there are any."""
        content: dict[str, Any] = {}
        for part in (self.header, self.description, self.state):
            content |= plain_content(part)
        for name in ("rank_buffers", "pending"):
            if content[name] is None:
                del content[name]
        return content

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads a checkpoint file, with tensors on the CPU. Raises UserError for any file from which a run cannot
        resume."""
        content = read_checkpoint(path)
        _check_is_resumable(path, content, _STATE_KEYS)
        parts = _build_parts(path, content, header=CheckpointHeader, description=RunDescription, state=StoredState)
        return cls(**parts, path=path)


def _check_is_resumable(path: Path, content: dict[str, Any], run_keys: Iterable[str]) -> None:
    """Raises UserError if a checkpoint was not written by a run, or lacks one of ``run_keys``, which best.pt leaves
    out."""
    if "config" not in content:
        raise UserError(f"{path}: holds no run to resume; start a new one with --weights {shlex.quote(str(path))}")
    if any(key not in content for key in run_keys):
        raise UserError(
            f"{path}: holds weights only (a best.pt?); resume from last.pt, or start with "
            f"--weights {shlex.quote(str(path))}"
        )


def _build_parts(path: Path, content: dict[str, Any], **kinds: type[DataclassInstance]) -> dict[str, Any]:
    """Builds the parts of a checkpoint of these kinds, by name. Raises UserError for wrong and missing values."""
    for name, settings in (("config", TrainConfig), ("hyp", Hyperparameters)):
        if name in content:  # a setting of another version of this program is not reported as damage
            content[name] = build(settings, content[name], f"{path}: {name}")
    parts: dict[str, Any] = {}
    with all_mistakes() as mistakes:
        for part, kind in kinds.items():
            values = {item.name: content[item.name] for item in fields(kind) if item.name in content}
            with mistakes.collecting():
                parts[part] = build(kind, values, f"{path}: damaged checkpoint")
    return parts


@contextmanager
def _errors_of_fit(path: Path) -> Iterator[None]:
    """Turns the errors that torch raises for state that does not fit the run into a UserError."""
    try:
        yield
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[-1].strip()
        raise UserError(f"{path}: does not fit this run: {reason}") from None


def plain_content(value: Any) -> Any:
    """Returns a dataclass as a dict of its fields, recursively: plain data and tensors, as stored in checkpoint files.
    Unlike `asdict`, does not copy tensors."""
    if not is_dataclass(value):
        return value
    return {item.name: plain_content(getattr(value, item.name)) for item in fields(value)}


def weights_part(content: dict[str, Any]) -> dict[str, Any]:
    """Returns the part of the content of a checkpoint that best.pt stores."""
    return {key: value for key, value in content.items() if key not in _RUN_KEYS}


def copy_to_cpu(value: Any) -> Any:
    """Copies plain data and tensors to the CPU, so that training does not change them. The host waits for the
    device."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True).contiguous()
    if isinstance(value, dict):
        return {key: copy_to_cpu(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [copy_to_cpu(item) for item in value]
    return value
