"""Trains a detector: ``python train.py --data DATA.yaml --weights yolox_s``, or under torchrun on several devices."""

from __future__ import annotations

if __name__ == "__main__":
    from utils.process.signals import exit_on_interrupt

    exit_on_interrupt()  # while the following imports run

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from utils.config.parser import parse_command
from utils.config.settings import TrainConfig
from utils.errors import UserError
from utils.process.launch import is_eval_rank, read_launch
from utils.process.main import run_main
from utils.process.signals import StopSignals
from utils.process.spawn import check_processes

if TYPE_CHECKING:
    from engine.train.resume import TrainingOutcome


def main(argv: Sequence[str] | None = None) -> None:
    # Entered first, so that a signal while flags are parsed or torch is imported also requeues the job.
    with StopSignals() as signals:
        outcome = _start(sys.argv[1:] if argv is None else list(argv), signals)
        if outcome is not None and outcome.config.export:
            _export(outcome)
    if outcome is not None and outcome.failure is not None:
        raise outcome.failure


def _export(outcome: TrainingOutcome) -> None:
    """Exports the best checkpoint of a run. If a callback has failed before, that is the error of the command."""
    from engine.commands.export import export_best
    from utils.errors import ExplainedError
    from utils.logger import get_logger

    try:
        export_best(outcome.folder, outcome.config, failure=outcome.failure)
    except Exception as error:
        if outcome.failure is None:
            raise
        get_logger().warning("--export: %s", error, exc_info=not isinstance(error, ExplainedError))


def _start(argv: list[str], signals: StopSignals) -> TrainingOutcome | None:
    """Runs this process's part of the command: training, validation for the training processes (``--eval-ranks``), or
    starting the processes of ``--spawn``. Returns the outcome of a training on rank 0, else None."""
    command = parse_command(TrainConfig, argv)
    if not command.explicit_flags & {"data", "resume"}:
        raise UserError(
            "--data: name the data set to train on, as in --data DATA.yaml --weights yolox_s; the built-in one takes "
            "minutes with --data demo --hyp demo --epochs 13 --imgsz 128"
        )
    config = command.config
    launch = read_launch()
    if config.spawn > 1 and launch is None:
        check_processes(config.spawn, config.device, threads=config.threads)
        from utils.process.spawn import spawn

        spawn(main, config.spawn, (argv,))
        return None
    # Modules that import torch are loaded only after the flags have been checked.
    from utils.distributed.agreement import check_same_start
    from utils.distributed.join import joined_run

    if is_eval_rank(launch, config.eval_ranks):
        from engine.train.eval_process import run_evaluating_process

        run_evaluating_process(launch, config, command.explicit_flags, signals)
        return None
    with joined_run(launch, config.device, eval_ranks=config.eval_ranks) as ctx, ExitStack() as stack:
        # Imported here so that only one process reports an import that fails.
        from engine.train.resume import Remaining, log_ended_run, plan_run
        from engine.train.run import build_training

        check_same_start(ctx, config)
        plan = plan_run(ctx, config, command.explicit_flags, stack)
        if plan.remaining is Remaining.NOTHING:
            outcome = log_ended_run(ctx, plan)
        else:
            outcome = build_training(ctx, plan, signals, stack).fit()
    return outcome if ctx.is_main else None


if __name__ == "__main__":
    run_main(main)
