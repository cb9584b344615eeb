"""``--eval-ranks``: the last processes of a job validate the weights of an epoch while the others train the next ones.

The two sides have process groups of their own, and meet in the run's store and folder. Rank 0 posts the epoch, and
writes its weights into ``unscoredN.pt``; the evaluating processes read the file and post the `Evaluation`. The training
processes read it at the end of a later epoch, and wait for it wherever no step can be taken without it. A process that
fails on either side ends the job, as any rank does.
"""

from __future__ import annotations

import io
import itertools
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from data.dataset.spec import DataSource
from engine.evaluation.matching import CocoAssignment, Matches, Objects, Ranked
from engine.evaluation.result import EvalResult, Evaluation, Preview, SizeScores
from utils.batches import Batch, Targets
from utils.config.settings import Hyperparameters, TrainConfig
from utils.detections import Detections, DetectionTable
from utils.distributed.context import MAX_WAIT_S, DistributedContext
from utils.distributed.join import evaluation_store
from utils.errors import UserError, first_line
from utils.files.torch_file import read_checkpoint
from utils.logger import get_logger
from utils.strings import rank_list

POLL_S = 0.05  # seconds between checks for a message
_PIECE_BYTES = 4 << 20  # the store takes at most 8 MiB at once


@dataclass(frozen=True, kw_only=True)
class EvalSetup:
    """What the evaluating processes need to know of a run."""

    config: TrainConfig
    hyp: Hyperparameters
    source: DataSource  # includes the images that --val-fraction holds out
    finds_own_data: bool  # each process resolves --data itself
    names: list[str]  # class names
    model_spec: dict[str, Any]
    anchors: Tensor | None  # of the head, on the CPU
    class_weights: Tensor | None  # (C,) in the loss, on the CPU
    device: str  # type of the training processes' devices
    threads: int  # number of torch's threads in each of them
    facts: dict[str, str]  # properties that both sides must have in common, by their names in messages


# Returns the evaluation of averaged weights on the first evaluating process, None on the others; takes whether their
# epoch is a closing one.
Scorer = Callable[[dict[str, Tensor], bool], Evaluation | None]


class EvalRanks:
    """The training processes' side. Every one of them has it and makes the same calls."""

    def __init__(self, ctx: DistributedContext, setup: EvalSetup) -> None:
        if ctx.store is None:
            raise ValueError("evaluating processes need the store of a distributed run")
        self._is_main = ctx.is_main
        self._store = evaluation_store(ctx.store)
        self._numbers: dict[int, int] = {}  # of the messages, from 1, by epoch
        if ctx.is_main:
            _post(self._store, "setup", setup)
            ranks = range(ctx.world_size, ctx.world_size + ctx.eval_ranks)
            get_logger().info("--eval-ranks: validation by %s while the others train", rank_list(ranks))

    def send(self, epoch: int, path: Path, *, is_closing: bool) -> None:
        """Lets the evaluating processes score an epoch, once its weights are in the file ``path``."""
        self._numbers[epoch] = len(self._numbers) + 1
        if self._is_main:
            _post(self._store, f"epoch/{self._numbers[epoch]}", (str(path), is_closing))

    def has_scores(self, epoch: int) -> bool:
        """Returns whether the scores of an epoch have come. Raises UserError if an evaluating process has failed."""
        if self._store.check(["failed"]):
            raise UserError(f"--eval-ranks: {self._store.get('failed').decode()}")
        return self._store.check([f"scores/{self._numbers[epoch]}"])

    def wait(self, epoch: int, should_stop: Callable[[], bool]) -> Evaluation | None:
        """Waits for the scores of an epoch that was sent. Returns them on rank 0; None on the others, and if
        ``should_stop`` says so. Raises UserError if an evaluating process has failed."""
        deadline = time.monotonic() + MAX_WAIT_S
        while not self.has_scores(epoch):
            if time.monotonic() > deadline:
                raise UserError(f"--eval-ranks: no scores of epoch {epoch} in {MAX_WAIT_S / 3600:g} hours")
            if should_stop():
                return None
            time.sleep(POLL_S)
        return _read(self._store, f"scores/{self._numbers[epoch]}", discard=True) if self._is_main else None

    def close(self) -> None:
        """Tells the evaluating processes that the run has ended, however it has."""
        if self._is_main:
            with suppress(dist.DistError):
                _post(self._store, f"epoch/{len(self._numbers) + 1}", None)


def dismiss(ctx: DistributedContext) -> None:
    """Tells the evaluating processes of a run that has ended before that there is nothing to do."""
    if ctx.eval_ranks and ctx.is_main and ctx.store is not None:
        _post(evaluation_store(ctx.store), "setup", None)


def serve(ctx: DistributedContext, build_scorer: Callable[[EvalSetup], Scorer]) -> None:
    """Scores, in an evaluating process, what the training processes send, until the run ends."""
    store = ctx.store  # for messages of this kind only (`evaluation_store`)
    if store is None:
        raise ValueError("evaluating processes need the store of a distributed run")
    with suppress(dist.DistError):  # the store is gone, so the run has ended
        setup = _wait_for(store, "setup")
        if setup is None:
            return
        try:
            score = build_scorer(setup)
            for number in itertools.count(1):
                message = _wait_for(store, f"epoch/{number}")
                if message is None:
                    return
                path, is_closing = message
                while not Path(path).exists():
                    store.check(["setup"])  # raises once the run is gone
                    time.sleep(POLL_S)
                evaluation = score(read_checkpoint(path)["ema"], is_closing)
                if evaluation is not None:
                    _post(store, f"scores/{number}", evaluation)
        except dist.DistError:
            raise
        except Exception as error:
            store.set("failed", f"rank {ctx.first_rank + ctx.rank}: {first_line(error)}")
            raise


# What a message consists of, besides tensors and plain data. `_read` makes no object of another class.
_CLASSES: list[Any] = [
    *(EvalSetup, TrainConfig, Hyperparameters, DataSource),
    *(Evaluation, EvalResult, SizeScores, Matches, Ranked, Objects, CocoAssignment, DetectionTable),
    *(Preview, Batch, Targets, Detections),
    *(bytes, np.ndarray, np.dtype, np.ndarray.__reduce__(np.zeros(0))[0], np.float64(0).__reduce__()[0]),
    *(type(np.dtype(name)) for name in ("bool", "uint8", "int64", "float32", "float64")),
]


def _post(store: dist.Store, key: str, message: Any) -> None:
    """Stores ``message`` under ``key``."""
    buffer = io.BytesIO()
    torch.save(message, buffer)
    content = buffer.getbuffer()
    starts = range(0, len(content), _PIECE_BYTES)
    for number, start in enumerate(starts):
        piece = bytes(content[start : start + _PIECE_BYTES])
        store.set(f"{key}/{number}", cast(str, piece))  # torch also takes bytes, but its stubs omit them
    store.set(key, str(len(starts)))  # last: the message is complete


def _read(store: dist.Store, key: str, *, discard: bool = False) -> Any:
    """Returns a message that has been posted. ``discard``: frees its memory in the store. Raises UnpicklingError for
    objects of other classes than `_CLASSES`."""
    names = [f"{key}/{number}" for number in range(int(store.get(key)))]
    content = b"".join(store.get(name) for name in names)
    for name in names if discard else []:
        store.delete_key(name)
    with torch.serialization.safe_globals(_CLASSES):
        return torch.load(io.BytesIO(content), weights_only=True)


def _wait_for(store: dist.Store, key: str) -> Any:
    """Polls for a message and returns it. Unlike a collective, this has no timeout."""
    while not store.check([key]):
        time.sleep(POLL_S)
    return _read(store, key)
