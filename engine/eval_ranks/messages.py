"""Messages between training and evaluating processes (``--eval-ranks``), in the run's store.

The last processes of a job validate the averaged weights while the others train. The two sides have separate process
groups, so the loss of an evaluating process cannot break a collective of the training processes. Rank 0 posts a
`SetupMessage`, then a `WeightsMessage` with the weights of an epoch whenever the evaluating processes are free, and
collects the `Evaluation` an epoch later.

The writer of a message does not wait for its reader, which may have died or been stopped. A send, a collective or the
rendezvous of torch.distributed.rpc would wait.

service.py implements the training side, server.py the evaluating side.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from data.dataset.spec import DataSource
from data.index.index import DatasetIndex
from data.loading.build import data_facts
from engine.run.run import RunSettings
from utils.distributed.join import product_version

SETUP = "setup"  # key of the first message
READY = "ready/{rank}"  # set by an evaluating process that has opened model and data
WEIGHTS = "weights/{number}"  # number from 1
SCORES = "scores/{number}"  # `Evaluation` of the weights with this number
WAIT_ENDED = "wait_ended/{number}"  # set by rank 0 when its wait for scores with this number, from 1, ends
FAILED = "failed"  # error message of an evaluating process
ENDED = "ended"  # set when the run has ended
LEFT = "left"  # number of evaluating processes that have ended
POLL_S = 0.05  # seconds between checks for a message

_PIECE_BYTES = 4 << 20  # the store takes at most 8 MiB at once


@dataclass(frozen=True, kw_only=True)
class SetupMessage:
    """The properties of a run that the evaluating processes need. Tensors are on the CPU."""

    settings: RunSettings
    source: DataSource  # includes the images that --val-fraction holds out
    finds_own_data: bool  # each process resolves --data itself, see `engine.run.run.ContinuedRun.local_paths`
    names: list[str]  # class names
    model_spec: dict[str, Any]
    ema: dict[str, Tensor]  # the averaged weights
    class_weights: Tensor | None  # (C,) in the loss
    device: str  # type of the training processes' devices
    threads: int  # number of torch's threads in each of them
    facts: dict[str, str]  # see `common_facts`


@dataclass(frozen=True)
class WeightsMessage:
    """The averaged weights of an epoch, on the CPU."""

    ema: dict[str, Tensor]
    is_closing: bool  # see `models.losses.base.Criterion.set_closing`


def post_message(store: dist.Store, key: str, message: Any) -> None:
    """Stores ``message``, whose tensors are on the CPU, under ``key``, pickled, as torch.distributed does with
    objects."""
    content = memoryview(pickle.dumps(message))
    starts = range(0, len(content), _PIECE_BYTES)
    for number, start in enumerate(starts):
        piece = bytes(content[start : start + _PIECE_BYTES])
        store.set(f"{key}/{number}", cast(str, piece))  # torch also takes bytes, but its stubs omit them
    store.set(key, str(len(starts)))  # last: the message is complete


def read_message(store: dist.Store, key: str) -> Any:
    """Returns the message; None if it has not been posted. It stays in the store."""
    if not store.check([key]):
        return None
    pieces = [store.get(f"{key}/{number}") for number in range(int(store.get(key)))]
    return pickle.loads(b"".join(pieces))


def discard_message(store: dist.Store, key: str) -> None:
    """Frees the memory of a posted message."""
    pieces = int(store.get(key))
    store.delete_key(key)
    for number in range(pieces):
        store.delete_key(f"{key}/{number}")


def common_facts(index: DatasetIndex) -> dict[str, str]:
    """Returns properties that training and evaluating processes must have in common, by their names in messages."""
    facts = {"the code": product_version(), "torch": torch.__version__} | data_facts("val", index)
    return {name: str(value) for name, value in facts.items()}
