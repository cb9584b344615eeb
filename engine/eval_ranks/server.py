"""The evaluating processes' side of the communication with the training processes (``--eval-ranks``)."""

from __future__ import annotations

import itertools
import os
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

import torch.distributed as dist

from engine.eval_ranks.messages import (
    ENDED,
    FAILED,
    LEFT,
    POLL_S,
    READY,
    SCORES,
    SETUP,
    WEIGHTS,
    SetupMessage,
    WeightsMessage,
    post_message,
    read_message,
)
from engine.evaluation.result import Evaluation
from utils.distributed.context import DistributedContext
from utils.errors import ExplainedError, first_line

Scorer = Callable[[WeightsMessage], Evaluation | None]  # the evaluation on rank 0 of the evaluating processes


def serve(ctx: DistributedContext, build_scorer: Callable[[SetupMessage], Scorer]) -> NoReturn:
    """Scores the weights that the training processes send until the run ends, then ends this process.

    It reports errors to rank 0 and always exits with status 0, because launchers end all processes when one fails.
    ``ctx``: with the store of the run.
    """
    if ctx.store is None:
        raise ValueError("evaluating processes need the store of a distributed run")
    threading.Thread(target=_end_with_run, args=(ctx.store,), name="end", daemon=True).start()
    try:
        score = build_scorer(_wait_for(ctx.store, SETUP))
        ctx.store.set(READY.format(rank=ctx.rank), "")
        for number in itertools.count(1):
            evaluation = score(_wait_for(ctx.store, WEIGHTS.format(number=number)))
            if evaluation is not None:
                post_message(ctx.store, SCORES.format(number=number), evaluation)
    except dist.DistError:  # the store is gone, so the run has ended
        pass
    except Exception as error:
        if not isinstance(error, ExplainedError):
            traceback.print_exc()
        with suppress(dist.DistError):
            ctx.store.set(FAILED, f"rank {ctx.first_rank + ctx.rank}: {first_line(error)}")
    finally:
        _leave(ctx.store)


def _end_with_run(store: dist.Store) -> None:
    """Waits for the end of the run, and ends this process. Runs in a thread."""
    with suppress(dist.DistError):
        while not store.check([ENDED]):
            time.sleep(POLL_S)
    _leave(store)


def _leave(store: dist.Store) -> NoReturn:
    """Ends this process without waiting for the other evaluating ones, which may hang."""
    with suppress(dist.DistError):
        store.add(LEFT, 1)
    os._exit(0)


def _wait_for(store: dist.Store, key: str) -> Any:
    """Polls for a message and returns it. Unlike a collective, this has no timeout."""
    message = read_message(store, key)
    while message is None:
        time.sleep(POLL_S)
        message = read_message(store, key)
    return message
