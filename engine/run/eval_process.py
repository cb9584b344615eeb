"""An evaluating process of a run (``--eval-ranks``): builds itself from last.pt, and scores the run's epochs. The
messages that it exchanges with the training processes are listed in engine/train/scoring.py."""

from __future__ import annotations

import itertools
import json
import platform
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from data.loading.build import open_run_val_reader
from data.open import open_data
from data.spec import DataSource
from engine.evaluation.result import Evaluation
from engine.evaluation.stored import write_evaluation
from engine.run.build import choose_kernels, open_evaluation
from engine.run.plan import resolve
from engine.train.checkpoint import Checkpoint
from engine.train.control import RunControl
from engine.train.saver import scores_path, weights_path
from engine.train.scoring import POLL_S
from models.detector import build_detector
from utils.config.settings import SCOPES, TrainConfig
from utils.distributed.agreement import program_facts
from utils.distributed.context import DistributedContext, broadcast_object, max_over_ranks
from utils.distributed.join import joined_run
from utils.errors import Stopped, UserError, first_line
from utils.files.torch_file import read_checkpoint
from utils.logger import configure_logging
from utils.machine.torch_threads import threads_of_process
from utils.process.launch import Launch
from utils.process.signals import StopSignals

FOLDER_PATIENCE_S = 60.0  # a network file system may show a new file late

# Scores the weights in a file; the second argument is whether their epoch is a closing one. Returns the evaluation on
# the first evaluating process; None on the others, and on all if a signal has ended it.
Score = Callable[[Path, bool], Evaluation | None]


def run_evaluating_process(
    launch: Launch | None, config: TrainConfig, explicit_flags: Collection[str], signals: StopSignals
) -> None:
    """Scores the epochs of a run until it ends. A signal also stops the training processes, and this process ends after
    them; before last.pt describes the run, it ends at once.

    Args:
        config: the settings of this process's command line.
        explicit_flags: names of the settings that the command line gives.

    Raises UserError if this process has other code, or cannot read the run's folder or its data, and `Stopped` after a
    signal.
    """
    configure_logging(False)
    with joined_run(launch, config.device, eval_ranks=config.eval_ranks) as ctx:
        store = ctx.store  # for messages of this kind only (`evaluation_store`)
        assert store is not None, "evaluating processes have been launched"
        with suppress(dist.DistError):  # the store is gone, so the run has ended
            while not store.check(["run"]):
                if store.check(["ended"]):
                    return
                time.sleep(POLL_S)
            folder, run_id, facts = json.loads(store.get("run"))
            control = RunControl(ctx, signals)
            try:
                for name, value in program_facts().items():  # other code would give other scores
                    if value != facts[name]:
                        raise UserError(f"{name} is {value} here, but {facts[name]} on the training processes")
                with signals.deferred():
                    # No name keeps the checkpoint, whose file can then be replaced and freed.
                    score = build_score(ctx, config, explicit_flags, read_record(Path(folder), run_id), control)
                serve(ctx, store, Path(folder), score, control)
            except (dist.DistError, Stopped):
                raise
            except Exception as error:
                store.set("failed", f"rank {ctx.first_rank + ctx.rank}: {first_line(error)}")
                raise
    if signals.received:
        raise Stopped(signals.code)


def read_record(folder: Path, run_id: str) -> Checkpoint:
    """Reads last.pt of a run. Raises UserError if this machine does not have the folder."""
    last = folder / "last.pt"
    deadline = time.monotonic() + FOLDER_PATIENCE_S
    while True:
        checkpoint = Checkpoint.read(last) if last.exists() else None
        if checkpoint is not None and checkpoint.description.run_id == run_id:
            return checkpoint
        if time.monotonic() > deadline:
            raise UserError(
                f"{folder}: {platform.node()} does not have this folder; with --eval-ranks, all machines share the "
                "run's folder (--project)"
            )
        time.sleep(1.0)


def build_score(
    ctx: DistributedContext,
    own: TrainConfig,
    explicit_flags: Collection[str],
    checkpoint: Checkpoint,
    control: RunControl,
) -> Score:
    """Builds what scores the weights of a run as its training processes would: from their record, but with the paths
    and the workers that ``own``, the settings of this process's command line, gives. Raises UserError if the data
    cannot be opened, or differ from theirs."""
    run = checkpoint.description
    names = (SCOPES["machine"] | {"data"}).intersection(explicit_flags)
    here = resolve(own)
    config = replace(run.config, **{name: getattr(here, name) for name in names})
    threads = checkpoint.header.run.threads  # on a CPU the rounding may depend on their number
    if ctx.device.type != checkpoint.header.run.device:  # the loaders of the GPUs need the other half of the cores
        threads = config.threads or threads_of_process(2 * ctx.local_world_size)
    torch.set_num_threads(threads)
    choose_kernels(config)
    stored_in = "" if "data" in names else str(checkpoint.path)
    source = replace(DataSource.of_training(config), val_images=tuple(run.val_images), stored_in=stored_in)
    spec = open_data(source, ctx)
    model = build_detector(run.model_spec, len(run.names), names=run.names, channels=spec.pixels.channels)
    model = model.to(ctx.device).to(memory_format=torch.channels_last)
    reader = open_run_val_reader(ctx, config, run.hyp, spec)
    if reader.sample_index.label_digest() != run.identity.val_labels:
        raise UserError(f"{spec.source}: the validation images or labels differ from those of the training processes")
    criterion, loader, evaluator = open_evaluation(ctx, replace(run, config=config), reader, model)

    def score(weights: Path, is_closing: bool) -> Evaluation | None:
        model.load_state_dict(read_checkpoint(weights)["ema"])
        criterion.set_no_mosaic(is_closing)
        return evaluator.run(model, loader, should_stop=control.should_stop)

    return score


def serve(ctx: DistributedContext, store: dist.Store, folder: Path, score: Score, control: RunControl) -> None:
    """Scores what the training processes submit, until the run ends. After a signal it only waits for that: if this
    process ended before they have saved the run, the launcher would kill them."""

    def wait_until(is_there: Callable[[], bool]) -> bool:
        """Waits. Returns False, on all evaluating processes, if the run ends or a signal comes before."""
        try:
            while True:
                is_over = store.check(["ended"]) or control.should_stop()
                if is_over or is_there():
                    break
                time.sleep(POLL_S)
        except dist.DistError:  # the store is gone
            is_over = True
        return not max_over_ranks(ctx, int(is_over))

    with control.training():
        for turn in itertools.count(1):
            if not wait_until(partial(store.check, [f"epoch/{turn}"])):
                break
            number, is_closing = json.loads(store.get(f"epoch/{turn}"))
            weights = weights_path(folder, number)
            scores = scores_path(folder, number)
            if not wait_until(weights.exists):
                break
            if not broadcast_object(ctx, scores.exists()):  # an earlier start may have scored it
                evaluation = score(weights, is_closing)
                if control.stops_after_validation():
                    break
                if evaluation is not None:
                    write_evaluation(evaluation, scores)
            if ctx.is_main:
                store.set(f"scored/{number}", "")
        while not store.check(["ended"]):
            control.should_stop()
            time.sleep(POLL_S)
