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

from data.loading.build import build_val_loader
from data.render.letterbox import CanvasRule
from data.source.dataset_spec import DataSource
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


def evaluate_for_others(config: TrainConfig, given: Collection[str]) -> NoReturn:
    """The work of an evaluating process, until the run ends. It reports errors to rank 0 and succeeds in any case, as
    launchers end all processes when one fails; a signal ends this process alone. ``given``: names of the settings on
    the command line."""
    configure_logging(False)
    get_logger().setLevel(logging.ERROR)  # the training processes read the same files, and warn
    ctx = DistributedContext.from_environment(config.device, eval_ranks=config.eval_ranks)
    assert ctx.store is not None
    threading.Thread(target=_end_with_run, args=(ctx.store,), name="end", daemon=True).start()
    try:
        score = _Scorer(ctx, config, given, _wait_for(ctx.store, "setup"))
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
    """The message, whenever it comes. Nobody waits in a collective, so no timeout of a group expires."""
    while (message := read_message(store, key)) is None:
        time.sleep(POLL_S)
    return message


class _Scorer:
    """Scores weights as the training processes do. Raises UserError if the data cannot be opened, or is not theirs."""

    def __init__(
        self, ctx: DistributedContext, config: TrainConfig, given: Collection[str], setup: dict[str, Any]
    ) -> None:
        config = replace(setup["config"], **{name: getattr(config, name) for name in MAY_DIFFER if name in given})
        hyp = setup["hyp"]
        self._details = not config.noplots
        if ctx.device.type == setup["device"]:
            torch.set_num_threads(setup["threads"])  # on a CPU the rounding may depend on their number
        choose_kernels(config)
        where = {"known_root": setup["data_root"], "stored_in": setup["stored_in"]}
        spec = open_data(DataSource.of_training(config, **where), ctx)
        spec = spec.hold_out(setup["val_images"]) if setup["val_images"] else spec
        self._model = rebuild_model(ctx, config, setup["names"], spec.pixels.channels, setup["model_spec"])
        canvases = CanvasRule(config.imgsz, self._model.stride, self._model.head.squares)
        self._loader = build_val_loader(ctx, config, spec, canvases, tile=spec.tile, hyp=hyp)
        for name, value in common_facts(self._loader.index).items():
            if setup["facts"].get(name) != value:
                raise UserError(f"{name} differs from that of the training processes")
        self._model.load_state_dict(setup["ema"])
        weights = setup["class_weights"]
        loss = self._model.head.build_loss(hyp, label_smoothing=config.label_smoothing, class_weights=weights)
        self._criterion = loss.to(ctx.device)
        self._evaluator = training_evaluator(ctx, self._model, self._criterion, self._loader)

    def __call__(self, message: dict[str, Any]) -> dict[str, Any] | None:
        """The message with the scores, on rank 0."""
        self._model.load_state_dict(message["ema"])
        evaluator = self._evaluator
        self._criterion.set_closing(message["closing"])
        result = evaluator.run(self._model, self._loader)
        preview = None
        if self._details and evaluator.preview is not None:
            batch, detections = evaluator.preview
            batch = map_tensors(replace(batch, images=batch.images[:_PICTURED]), _sent)
            preview = batch, Detections(*map(_sent, detections))
        scored, shown = (evaluator.detections, evaluator.shown) if self._details else (None, None)
        return result and {"result": result, "detections": scored, "shown": shown, "preview": preview}


def _sent(tensor: Tensor) -> Tensor:
    """On the CPU, without the rest of the memory that it is a view of, which would be sent, too."""
    return tensor.to("cpu", copy=True)
