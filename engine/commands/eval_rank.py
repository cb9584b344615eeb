"""The process that ``--eval-ranks`` takes from training: it scores the weights that it gets until the run ends."""

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
from data.loading.build import build_val_loader
from data.render.letterbox import CanvasRule
from data.source.dataset_spec import DatasetSpec
from data.source.open import open_data
from engine.eval_ranks.evaluators import POLL_S, common_facts
from engine.eval_ranks.messages import post_message, read_message
from engine.evaluation.evaluator import training_evaluator
from engine.run.process import choose_kernels
from engine.train.starting_model import rebuild_model
from utils.config.settings import TrainConfig
from utils.distributed.agreement import MAY_DIFFER
from utils.distributed.context import DistributedContext
from utils.errors import UserError, first_line
from utils.logger import configure_logging, get_logger
from utils.structures import Detections, map_tensors

_PICTURED = 8  # images of the preview


def evaluate_for_others(config: TrainConfig, explicit: Collection[str]) -> NoReturn:
    """Runs an evaluating process until the run ends.

    It reports errors to rank 0 and exits with success in any case, as launchers end all processes when one fails; a
    signal ends this process alone. ``explicit``: names of the settings on the command line.
    """
    configure_logging(False)
    get_logger().setLevel(logging.ERROR)  # the training processes read the same files, and warn
    ctx = DistributedContext.from_environment(config.device, eval_ranks=config.eval_ranks)
    assert ctx.store is not None
    threading.Thread(target=_end_with_run, args=(ctx.store,), name="end", daemon=True).start()
    try:
        score = _Scorer(ctx, config, explicit, _wait_for(ctx.store, "setup"))
        ctx.store.set(f"ready/{ctx.rank}", "")
        for number in itertools.count(1):
            scores = score(_wait_for(ctx.store, f"weights/{number}"))
            if ctx.is_main:
                post_message(ctx.store, f"scores/{number}", scores)
    except dist.DistError:  # the store has ended, and with it the run
        pass
    except Exception as error:
        if not isinstance(error, UserError):
            traceback.print_exc()
        with suppress(dist.DistError):
            ctx.store.set("failed", f"rank {ctx.rank} of the evaluating processes: {first_line(error)}")
    finally:
        _leave(ctx.store)


def _end_with_run(store: dist.Store) -> None:
    with suppress(dist.DistError):
        while not store.check(["ended"]):
            time.sleep(POLL_S)
    _leave(store)


def _leave(store: dist.Store) -> NoReturn:
    """Ends this process without waiting for the other evaluating ones, which may hang."""
    with suppress(dist.DistError):
        store.add("left", 1)
    os._exit(0)


def _wait_for(store: dist.Store, key: str) -> Any:
    """Waits for a message and returns it. Nobody waits in a collective, so no timeout of a group expires."""
    message = read_message(store, key)
    while message is None:
        time.sleep(POLL_S)
        message = read_message(store, key)
    return message


class _Scorer:
    """Scores weights as the training processes do. Raises UserError if the data cannot be opened, or is not theirs."""

    def __init__(
        self, ctx: DistributedContext, config: TrainConfig, explicit: Collection[str], setup: dict[str, Any]
    ) -> None:
        """``setup``: the first message of rank 0. ``explicit``: names of the settings on this command line."""
        own_settings = {name: getattr(config, name) for name in MAY_DIFFER if name in explicit}
        config = replace(setup["config"], **own_settings)
        self._details = not config.noplots
        if ctx.device.type == setup["device"]:
            torch.set_num_threads(setup["threads"])  # on a CPU the rounding may depend on their number
        choose_kernels(config)
        spec = _open_training_data(ctx, config, setup)
        self._model = rebuild_model(ctx, config, setup["names"], spec.pixels.channels, setup["model_spec"])
        self._model.load_state_dict(setup["ema"])
        canvases = CanvasRule(config.imgsz, self._model.stride, self._model.head.squares)
        self._loader = build_val_loader(ctx, config, spec, canvases, tile=spec.tile, hyp=setup["hyp"])
        _check_facts(self._loader.index, setup["facts"])
        self._criterion = self._model.head.build_loss(
            setup["hyp"], label_smoothing=config.label_smoothing, class_weights=setup["class_weights"]
        ).to(ctx.device)
        self._evaluator = training_evaluator(ctx, self._model, self._criterion, self._loader)

    def __call__(self, message: dict[str, Any]) -> dict[str, Any] | None:
        """Scores the weights in ``message``. Returns the message with the scores on rank 0, None elsewhere."""
        self._model.load_state_dict(message["ema"])
        evaluator = self._evaluator
        self._criterion.set_closing(message["closing"])
        result = evaluator.run(self._model, self._loader)
        preview = None
        if self._details and evaluator.preview is not None:
            batch, detections = evaluator.preview
            batch = map_tensors(replace(batch, images=batch.images[:_PICTURED]), _sent)
            preview = batch, Detections(*map(_sent, detections))
        if result is None:
            return None
        return {
            "result": result,
            "detections": evaluator.detections if self._details else None,
            "shown": evaluator.shown if self._details else None,
            "preview": preview,
        }


def _open_training_data(ctx: DistributedContext, config: TrainConfig, setup: dict[str, Any]) -> DatasetSpec:
    spec = open_data(replace(setup["source"], stage=config.stage, cache_dir=config.cache_dir), ctx)
    if setup["val_images"]:
        spec = spec.hold_out(setup["val_images"])
    return spec


def _check_facts(index: DatasetIndex, facts: dict[str, Any]) -> None:
    """Raises UserError unless the data have the same facts as those of the training processes."""
    for name, value in common_facts(index).items():
        if facts.get(name) != value:
            raise UserError(f"{name} differs from that of the training processes")


def _sent(tensor: Tensor) -> Tensor:
    """Copies a tensor to the CPU, as sending a view would send all of its memory."""
    return tensor.to("cpu", copy=True)
