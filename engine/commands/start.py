"""Runs this process's part of train.py or val.py: alone, or as one of those that a launcher or ``--spawn`` starts.

Imports no torch until several processes run, so that mistakes are answered at once, and that the process which only
starts the others has all its memory for them.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from utils.config.parser import ParsedCommand
from utils.config.settings import TrainConfig, ValConfig
from utils.errors import UserError
from utils.logger import configure_logging
from utils.machine.limits import limits_as_user_errors, memory_advice
from utils.process.launch import is_eval_rank, read_launch
from utils.process.signals import StopSignals
from utils.process.spawn import spawn


class Outcome(NamedTuple):
    """The result of a training on rank 0."""

    folder: Path
    config: TrainConfig
    failure: UserError | None  # error of a callback's ``on_end``, to be raised once the processes have ended


def train(command: ParsedCommand[TrainConfig]) -> None:
    """Implements train.py. Raises `Stopped` after a signal, and UserError if a callback has failed at the end, before
    files are exported (``--export``): the run is then complete after ``--resume``."""
    # Entered first, so that a signal while torch is imported also requeues the job.
    with StopSignals() as signals:
        outcome = _train(command, signals)
        if outcome is not None and outcome.failure is not None:
            raise outcome.failure
        if outcome is not None and outcome.config.export:
            from engine.commands.export import export_best

            export_best(outcome.folder, outcome.config)


def _train(command: ParsedCommand[TrainConfig], signals: StopSignals) -> Outcome | None:
    """Trains, validates for the training processes (``--eval-ranks``), or starts the processes of ``--spawn``. Returns
    the outcome of a training on rank 0, else None."""
    config = command.config
    if not config.data and config.resume is None:
        raise UserError(
            "--data: name the data set to train on, as in --data DATA.yaml --weights yolox_s; the built-in one takes "
            "minutes with --data demo --hyp demo --epochs 13 --imgsz 128"
        )
    launch = read_launch()
    if config.spawn > 1 and launch is None:
        spawn(train, config.spawn, (command,))
        return None
    from utils.distributed.agreement import check_same_start
    from utils.distributed.join import joined_run

    if is_eval_rank(launch, config.eval_ranks):
        from engine.run.eval_process import run_evaluating_process

        run_evaluating_process(launch, config, command.explicit_flags, signals)
        return None
    with joined_run(launch, config.device, eval_ranks=config.eval_ranks) as ctx, ExitStack() as stack:
        # Imported here so that only one process reports an import that fails.
        from engine.run.build import run_training
        from engine.run.plan import log_ended_run, plan_run
        from engine.run.starts import ContinuedRun
        from engine.train.scoring import release_evaluators

        stack.callback(release_evaluators, ctx)
        check_same_start(ctx, config)
        planned = plan_run(ctx, config, command.explicit_flags, stack)
        used = planned.settings.config
        if isinstance(planned, ContinuedRun) and planned.is_complete:
            log_ended_run(ctx, planned)
            folder = planned.folder
            failure = None
        else:
            advice = memory_advice(used.batch_size, used.imgsz, min_batch=ctx.world_size, device=ctx.device.type)
            stack.enter_context(limits_as_user_errors(advice))
            folder, failure = run_training(ctx, planned, signals, stack)
    return Outcome(folder, used, failure) if ctx.is_main else None


def validate(config: ValConfig) -> None:
    """Implements val.py."""
    from models.weights.catalog import check_weights  # imports NumPy, slow for --help

    launch = read_launch()
    if launch is None:
        check_weights(config.weights)
    if config.spawn > 1 and launch is None:
        spawn(validate, config.spawn, (config,))
        return
    from utils.distributed.join import joined_run

    advice = memory_advice(config.batch_size, config.imgsz or 640, min_batch=1, device="")
    with joined_run(launch, config.device) as ctx, limits_as_user_errors(advice):
        configure_logging(ctx.is_main, quiet=config.quiet)
        from engine.commands.val import validate as validate_weights  # so that one process reports a failing import

        validate_weights(config, ctx)
