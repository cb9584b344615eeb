"""``--eval-ranks``: the last processes of a job validate the averaged weights while the others train.

Both groups have process groups of their own, so the loss of an evaluating process cannot break a collective of the
training ones. They exchange messages in the run's store: rank 0 posts what an evaluating process needs to know, then
the weights of an epoch whenever the evaluating processes are free, and finds their scores there an epoch later.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields, replace
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from data.index.index import DatasetIndex
from data.loading.build import build_val_loader, data_facts
from data.open_dataset import open_dataset
from engine.checkpoint.checkpoint import RunDescription, Unscored
from engine.checkpoint.run import Run
from engine.evaluation.evaluator import Evaluator, training_evaluator
from engine.train.process import MAY_DIFFER, choose_kernels
from models.build import build_starting_model
from utils.config.parser import from_mapping
from utils.config.settings import Hyperparameters, TrainConfig
from utils.distributed.agreement import product_version
from utils.distributed.collectives import broadcast_object
from utils.distributed.context import DistributedContext, evaluators
from utils.distributed.messages import discard, post, read
from utils.distributed.rendezvous import rank_list
from utils.distributed.store_barrier import has_died
from utils.distributed.supervised import BEAT_S, Pulse
from utils.errors import UserError, first_line
from utils.logger import configure_logging, get_logger
from utils.machine.amp import resolve_amp
from utils.structures import Batch, Detections, DetectionTable, EvalResult

POLL_S = 0.05
# How long rank 0 waits for scores that are late: seconds, or a fraction of the time since it has sent the weights.
LATE_S, LATE_FRACTION = 5.0, 0.1
_PICTURED = 8  # images of the preview


class RemoteValidation:
    """The training processes' side. Each of them has one and makes the same calls.

    Args:
        evaluator: of this process; gets the detections and the preview, as if it had validated itself.
        setup: for the evaluating processes, see `setup_of`.
    """

    def __init__(self, ctx: DistributedContext, evaluator: Evaluator, setup: dict[str, Any]) -> None:
        self._ctx, self._evaluator, self._store = ctx, evaluator, evaluators(ctx.store)
        self._number = self._epoch = 0  # of the newest message with weights, from 1, and of its epoch
        self._sent_at, self._is_busy = 0.0, False
        self._failure = ""  # why there will be no more scores
        self._ranks = range(ctx.world_size, ctx.world_size + ctx.eval_ranks)
        if ctx.is_main:
            post(self._store, "setup", setup)
            get_logger().info("--eval-ranks: validation by %s while the others train", rank_list(self._ranks))

    def is_free(self) -> bool:
        """Whether the evaluating processes take the weights of an epoch now."""
        return broadcast_object(self._ctx, self._ctx.is_main and self._is_free())

    def _is_free(self) -> bool:
        if self._is_busy and self._store.check([f"scores/{self._number}"]):
            self._receive()  # too late
        self._find_failure()
        are_ready = self._store.check([f"ready/{rank}" for rank in range(self._ctx.eval_ranks)])
        return are_ready and not self._is_busy and not self._failure

    def send(self, epoch: int, unscored: Unscored) -> None:
        """Sends the averaged weights of an epoch, in the background."""
        if not self._ctx.is_main:
            return
        self._number, self._epoch, self._is_busy, self._sent_at = self._number + 1, epoch, True, time.monotonic()
        message = {"ema": unscored.content["ema"], "refining": unscored.refining}
        arguments = (self._store, f"weights/{self._number}", message)
        threading.Thread(target=_post_if_possible, args=arguments, name="weights", daemon=True).start()

    def collect(self, should_stop: Callable[[], bool]) -> EvalResult | None:
        """On rank 0, the scores of the epoch that was sent last, or None after a warning if there are none in time, or
        if there was none; None elsewhere."""
        if not self._is_busy:
            return None
        patience_s = max(LATE_S, LATE_FRACTION * (time.monotonic() - self._sent_at))
        deadline = time.monotonic() + patience_s
        while not self._store.check([f"scores/{self._number}"]):
            self._find_failure()
            if self._failure or should_stop():
                return None
            if time.monotonic() > deadline:
                get_logger().warning(
                    "--eval-ranks: no scores of epoch %d in time; the training processes validate it, and others until "
                    "the evaluating ones have caught up", self._epoch,
                )  # fmt: skip
                return None
            time.sleep(POLL_S)
        scores = self._receive()
        preview, found = scores["preview"], scores["detections"]
        self._evaluator.preview = preview and (Batch(**preview[0]), Detections(*preview[1]))
        self._evaluator.detections = found and DetectionTable(**_to_arrays(found))
        return EvalResult(**_to_arrays(scores["result"]))

    def _receive(self) -> dict[str, Any]:
        scores = read(self._store, f"scores/{self._number}")
        discard(self._store, f"scores/{self._number}")
        discard(self._store, f"weights/{self._number}")
        self._is_busy = False
        return scores

    def _find_failure(self) -> None:
        """Notes and logs, once, that an evaluating process has ended."""
        if self._failure:
            return
        dead = [rank for rank in self._ranks if has_died(self._ctx.store.get(f"process/{rank}").decode())]
        if self._store.check(["failed"]):
            self._failure = self._store.get("failed").decode()
        elif dead:
            self._failure = f"{rank_list(dead)} has ended"
        if self._failure:
            text = "--eval-ranks: %s; the training processes validate from now on"
            get_logger().warning(text, self._failure)

    def close(self) -> None:
        """Ends the evaluating processes."""
        if self._ctx.is_main:
            with suppress(dist.DistError):
                self._store.set("ended", "")


def _post_if_possible(store: dist.Store, key: str, message: Any) -> None:
    with suppress(dist.DistError):  # the run has ended meanwhile
        post(store, key, message)


@contextmanager
def remote_validation(
    ctx: DistributedContext,
    run: Run,
    description: RunDescription,
    evaluator: Evaluator,
    index: DatasetIndex,
    amp_dtype: torch.dtype | None,
) -> Iterator[RemoteValidation | None]:
    """Yields the training processes' side, None without evaluating processes, which end with the block.

    Args:
        evaluator: of this process, for the validation split ``index``, in the type ``amp_dtype``.
    """
    if not ctx.eval_ranks:
        yield None
        return
    config = asdict(run.config)
    setup = {
        "config": config,
        "hyp": description.hyp,
        "names": description.names,
        "model_spec": description.model_spec,
        "val_images": description.val_images,
        "data_root": run.data_root,
        "stored_in": str(run.checkpoint.path) if run.checkpoint and run.data_root else "",
        "details": not config["noplots"],
        "device": ctx.device.type,
        "threads": torch.get_num_threads(),
        "amp": str(amp_dtype or "").removeprefix("torch."),
        "facts": _facts(index),
    }
    remote = RemoteValidation(ctx, evaluator, setup)
    try:
        yield remote
    finally:
        remote.close()


def check_remote_validation(ctx: DistributedContext, config: TrainConfig) -> None:
    """Raises UserError for settings that need the scores of an epoch before the next one begins."""
    if ctx.eval_ranks and config.image_weights:
        raise UserError("--image-weights chooses images by the scores of the epoch before; leave out --eval-ranks")


def _facts(index: DatasetIndex) -> dict[str, str]:
    """What must be equal in both groups."""
    facts = {"the code": product_version(), "torch": torch.__version__} | data_facts("val", index)
    return {name: str(value) for name, value in facts.items()}


def evaluate_for_others(config: TrainConfig, given: Collection[str], pulse: Pulse) -> NoReturn:
    """The work of an evaluating process, until the run ends. It reports errors to rank 0 and succeeds in any case.

    Args:
        config, given: the command line, and which settings it gives.
    """
    configure_logging(False)
    get_logger().setLevel(logging.ERROR)  # the training processes read the same files, and warn
    ctx = DistributedContext.from_environment(
        config.device, config.local_rank, config.local_world_size, eval_ranks=config.eval_ranks
    )
    assert ctx.store is not None
    pulse.beat()
    threading.Thread(target=_end_with_run, args=(ctx.store, pulse), name="pulse", daemon=True).start()
    try:
        score = _Scorer(ctx, config, given, _wait_for(ctx.store, "setup"))
        ctx.store.set(f"ready/{ctx.rank}", "")
        for number in itertools.count(1):
            scores = score(_wait_for(ctx.store, f"weights/{number}"))
            if ctx.is_main:
                post(ctx.store, f"scores/{number}", scores)
    except dist.DistError:  # the store has ended, and with it the run
        pass
    except Exception as error:
        if not isinstance(error, UserError):
            traceback.print_exc()
        with suppress(dist.DistError):
            ctx.store.set("failed", f"rank {ctx.rank} of the evaluating processes: {first_line(error)}")
    finally:
        os._exit(0)  # without waiting for the other evaluating processes, which may hang


def _end_with_run(store: dist.Store, pulse: Pulse) -> None:
    with suppress(dist.DistError, OSError):
        while not store.check(["ended"]):
            pulse.beat()
            time.sleep(BEAT_S)
    os._exit(0)


def _wait_for(store: dist.Store, key: str) -> Any:
    """The message, whenever it comes. Nobody waits in a collective, so no timeout of a group expires."""
    while (message := read(store, key)) is None:
        time.sleep(POLL_S)
    return message


class _Scorer:
    """Scores weights as the training processes do.

    Raises UserError when the data cannot be opened, or is not theirs.
    """

    def __init__(
        self, ctx: DistributedContext, config: TrainConfig, given: Collection[str], setup: dict[str, Any]
    ) -> None:
        theirs = from_mapping(TrainConfig, setup["config"], "the run")
        own = {name: getattr(config, name) for name in MAY_DIFFER if name in given}
        self._ctx, self._details, config = ctx, setup["details"], replace(theirs, **own)
        self._hyp = from_mapping(Hyperparameters, setup["hyp"], "the run")
        self._amp_dtype = getattr(torch, setup["amp"]) if setup["amp"] else None
        if ctx.device.type == setup["device"]:
            torch.set_num_threads(setup["threads"])  # on a CPU the rounding may depend on their number
        else:
            self._amp_dtype = resolve_amp(config.amp, ctx.device)
        choose_kernels(ctx, config)
        spec = open_dataset(
            config.data,
            ("train",) if config.val_fraction else ("train", "val"),
            optional=("val",) if config.val_fraction else (),
            classes=config.classes,
            stage=config.stage,
            cache_dir=config.cache_dir,
            ctx=ctx,
            known_root=setup["data_root"],
            stored_in=setup["stored_in"],
        )
        spec = spec.hold_out(setup["val_images"]) if setup["val_images"] else spec
        self._model, _, _ = build_starting_model(ctx, config, setup["names"], resumed=setup["model_spec"])
        self._loader = build_val_loader(ctx, config, spec, stride=self._model.stride)
        different = [name for name, value in _facts(self._loader.index).items() if setup["facts"].get(name) != value]
        if different:
            raise UserError(f"{different[0]} differs from that of the training processes")
        self._smoothing = config.label_smoothing
        self._evaluator: Evaluator | None = None

    def __call__(self, message: dict[str, Any]) -> dict[str, Any] | None:
        """The message with the scores, on rank 0."""
        self._model.load_state_dict(message["ema"])
        if self._evaluator is None:  # the loss copies anchors, which are the same in all epochs
            loss = self._model.head.build_loss(self._hyp, label_smoothing=self._smoothing)
            self._criterion, truth = loss.to(self._ctx.device), self._loader.index.ground_truth()
            self._evaluator = training_evaluator(self._ctx, self._model, self._criterion, self._amp_dtype, truth)
        evaluator = self._evaluator
        self._criterion.set_refining(message["refining"])
        result = evaluator.run(self._model, self._loader)
        preview = None
        if self._details and evaluator.preview is not None:
            batch, detections = evaluator.preview
            batch = replace(batch, images=batch.images[:_PICTURED])
            preview = [{f.name: getattr(batch, f.name) for f in fields(batch)}, list(detections)]
        return result and _to_tensors(
            {
                "result": {f.name: getattr(result, f.name) for f in fields(result)},
                "detections": asdict(evaluator.detections) if self._details else None,
                "preview": preview,
            }
        )


def _to_tensors(value: Any) -> Any:
    """Plain data and arrays as plain data and tensors."""
    if isinstance(value, dict):
        return {key: _to_tensors(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_to_tensors, value))
    if isinstance(value, np.generic):
        return value.item()
    return torch.from_numpy(np.array(value)) if isinstance(value, np.ndarray) else value


def _to_arrays(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _to_arrays(item) for key, item in value.items()}
    return value.numpy() if isinstance(value, torch.Tensor) else value
