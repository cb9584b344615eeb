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
from dataclasses import asdict, fields, replace
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from data.loading.build import build_val_loader
from data.open import open_data
from data.spec.dataset_spec import DataSource
from engine.evaluation.evaluator import Evaluator, training_evaluator
from engine.evaluators.remote_validation import POLL_S, common_facts, post_message, read_message
from engine.run import choose_kernels
from models.build import build_starting_model
from utils.config.settings import Hyperparameters, TrainConfig
from utils.distributed.agreement import MAY_DIFFER
from utils.distributed.context import DistributedContext
from utils.errors import UserError, first_line
from utils.files.schema import build
from utils.logger import configure_logging, get_logger
from utils.machine.devices import resolve_amp

_PICTURED = 8  # images of the preview


def evaluate_for_others(config: TrainConfig, given: Collection[str]) -> NoReturn:
    """The work of an evaluating process, until the run ends. It reports errors to rank 0 and succeeds in any case, as
    launchers end all processes when one fails; a signal ends this process alone.

    Args:
        config, given: the command line, and which settings it gives.
    """
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
    """Scores weights as the training processes do.

    Raises UserError when the data cannot be opened, or is not theirs.
    """

    def __init__(
        self, ctx: DistributedContext, config: TrainConfig, given: Collection[str], setup: dict[str, Any]
    ) -> None:
        theirs = build(TrainConfig, setup["config"], "the run")
        own = {name: getattr(config, name) for name in MAY_DIFFER if name in given}
        config = replace(theirs, **own)
        self._ctx, self._details = ctx, not config.noplots
        self._hyp = build(Hyperparameters, setup["hyp"], "the run")
        self._amp_dtype = getattr(torch, setup["amp"]) if setup["amp"] else None
        if ctx.device.type == setup["device"]:
            torch.set_num_threads(setup["threads"])  # on a CPU the rounding may depend on their number
        else:
            self._amp_dtype = resolve_amp(config.amp, ctx.device)
        choose_kernels(config)
        where = {"known_root": setup["data_root"], "stored_in": setup["stored_in"]}
        spec = open_data(DataSource.of_training(config, **where), ctx)
        spec = spec.hold_out(setup["val_images"]) if setup["val_images"] else spec
        built = build_starting_model(ctx, config, setup["names"], spec.pixels.channels, resumed=setup["model_spec"])
        self._model = built[0]
        canvases = {"stride": self._model.stride, "tile": spec.tile, "squares": self._model.head.squares}
        self._loader = build_val_loader(ctx, config, spec, **canvases, hyp=self._hyp)
        for name, value in common_facts(self._loader.index).items():
            if setup["facts"].get(name) != value:
                raise UserError(f"{name} differs from that of the training processes")
        self._loss = {"label_smoothing": config.label_smoothing, "class_weights": setup["class_weights"]}
        self._evaluator: Evaluator | None = None

    def __call__(self, message: dict[str, Any]) -> dict[str, Any] | None:
        """The message with the scores, on rank 0."""
        self._model.load_state_dict(message["ema"])
        if self._evaluator is None:  # the loss copies anchors, which are the same in all epochs
            loss = self._model.head.build_loss(self._hyp, **self._loss)
            self._criterion = loss.to(self._ctx.device)
            self._evaluator = training_evaluator(self._ctx, self._model, self._criterion, self._amp_dtype, self._loader)
        evaluator = self._evaluator
        self._criterion.set_closing(message["closing"])
        result = evaluator.run(self._model, self._loader)
        preview = None
        if self._details and evaluator.preview is not None:
            batch, detections = evaluator.preview
            batch = replace(batch, images=batch.images[:_PICTURED])
            preview = [_by_field(batch) | {"targets": _by_field(batch.targets)}, list(detections)]
        return result and as_tensors(
            {
                "result": _by_field(result),
                "detections": asdict(evaluator.detections) if self._details else None,
                "preview": preview,
            }
        )


def _by_field(value: Any) -> dict[str, Any]:
    return {f.name: getattr(value, f.name) for f in fields(value)}


def as_tensors(value: Any) -> Any:
    """Plain data and arrays as plain data and tensors. Views are copied: `torch.save` stores the whole memory below."""
    if isinstance(value, dict):
        return {key: as_tensors(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(as_tensors, value))
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Tensor):
        return value.clone()
    return torch.from_numpy(np.array(value)) if isinstance(value, np.ndarray) else value
