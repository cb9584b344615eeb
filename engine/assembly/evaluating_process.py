"""An evaluating process of ``--eval-ranks``, which scores the weights that it receives until the run ends."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
import traceback
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from data.index.index import DatasetIndex
from data.source.open import open_data
from engine.assembly.loss_and_validation import build_criterion, build_validation
from engine.assembly.process_setup import choose_kernels
from engine.assembly.starting_model import rebuild_model
from engine.eval_ranks.messages import (
    ENDED,
    FAILED,
    LEFT,
    POLL_S,
    READY,
    SCORES,
    SETUP,
    WEIGHTS,
    ScoresMessage,
    SetupMessage,
    WeightsMessage,
    common_facts,
    post_message,
    read_message,
)
from engine.run.resolve_paths import resolve
from engine.run.run import RunSettings
from utils.batches import map_tensors
from utils.config.settings import TrainConfig, names_with
from utils.detections import Detections
from utils.distributed.context import DistributedContext
from utils.distributed.rendezvous import join_run
from utils.errors import ExplainedError, UserError, first_line
from utils.logger import configure_logging, get_logger
from utils.process.launch import Launch

PREVIEW_IMAGES = 8


def run_evaluation_process(launch: Launch | None, config: TrainConfig, explicit_flags: Collection[str]) -> NoReturn:
    """Runs an evaluating process until the run ends.

    It reports errors to rank 0 and always exits with status 0, because launchers end all processes when one fails. A
    signal ends only this process. ``explicit_flags``: names of the settings on the command line.
    """
    configure_logging(False)
    get_logger().setLevel(logging.ERROR)  # the training processes read the same files, and warn
    ctx = join_run(launch, config.device, eval_ranks=config.eval_ranks)
    assert ctx.store is not None
    threading.Thread(target=_end_with_run, args=(ctx.store,), name="end", daemon=True).start()
    try:
        score = Scorer(ctx, config, explicit_flags, _wait_for(ctx.store, SETUP))
        ctx.store.set(READY.format(rank=ctx.rank), "")
        for number in itertools.count(1):
            scores = score(_wait_for(ctx.store, WEIGHTS.format(number=number)))
            if scores is not None:  # rank 0 of the evaluating processes
                post_message(ctx.store, SCORES.format(number=number), scores)
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


class Scorer:
    """Scores weights as the training processes would. Raises UserError if the data cannot be opened or differ from
    theirs."""

    def __init__(
        self, ctx: DistributedContext, config: TrainConfig, explicit_flags: Collection[str], setup: SetupMessage
    ) -> None:
        """``explicit_flags``: names of the settings on this process's command line."""
        machine_settings = names_with(TrainConfig, scope="machine")
        local_settings = {name: getattr(config, name) for name in machine_settings if name in explicit_flags}
        source = setup.source
        if setup.finds_own_data:
            source = replace(source, data=resolve(config).data)
        config = replace(setup.settings.config, **local_settings)
        self._has_plots = not config.noplots
        if ctx.device.type == setup.device:
            torch.set_num_threads(setup.threads)  # on a CPU the rounding may depend on their number
        choose_kernels(config)
        # The run's data set, at the location that this process uses.
        spec = open_data(replace(source, stage=config.stage, cache_dir=config.cache_dir), ctx)
        self._model = rebuild_model(ctx, config, setup.names, spec.pixels.channels, setup.model_spec)
        self._model.load_state_dict(setup.ema)
        settings = RunSettings(config, setup.settings.hyp)
        self._criterion = build_criterion(ctx, settings, self._model, class_weights=setup.class_weights)
        self._validation = build_validation(ctx, settings, spec, self._model, self._criterion)
        _check_facts(self._validation.loader.index, setup.facts)

    def __call__(self, weights: WeightsMessage) -> ScoresMessage | None:
        """Returns the scores of ``weights`` on rank 0, None elsewhere."""
        self._model.load_state_dict(weights.ema)
        evaluator = self._validation.evaluator
        self._criterion.set_closing(weights.is_closing)
        result = evaluator.run(self._model, self._validation.loader)
        preview = None
        if self._has_plots and evaluator.preview is not None:
            batch, detections = evaluator.preview
            batch = map_tensors(replace(batch, images=batch.images[:PREVIEW_IMAGES]), _cpu_copy)
            preview = batch, Detections(*map(_cpu_copy, detections))
        if result is None:
            return None
        return ScoresMessage(
            result=result,
            scored=evaluator.scored if self._has_plots else None,
            shown=evaluator.shown if self._has_plots else None,
            preview=preview,
        )


def _check_facts(index: DatasetIndex, facts: dict[str, str]) -> None:
    """Raises UserError if the code or the data differ from those of the training processes."""
    for name, value in common_facts(index).items():
        if facts.get(name) != value:
            raise UserError(f"{name} differs from that of the training processes")


def _cpu_copy(tensor: Tensor) -> Tensor:
    """Copies a tensor to the CPU. Without the copy, pickling a view would store its whole base tensor."""
    return tensor.to("cpu", copy=True)
