"""Trains a detector: ``python train.py --data DATA.yaml --model yolov8n``, or under torchrun on several devices."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from utils.config.parser import given_flags, parse_config
from utils.config.settings import TrainConfig
from utils.distributed.launch import check_processes, evaluates, read_launch
from utils.entrypoint import run_main
from utils.errors import REQUEUE
from utils.machine.limits import explained, memory_advice
from utils.machine.stop_signals import StopSignals

if TYPE_CHECKING:
    from engine.run import Run


def main(argv: Sequence[str] | None = None) -> None:
    with StopSignals() as signals:  # from the first moment on, so that the exit code says that the run can be resumed
        run = _train(sys.argv[1:] if argv is None else list(argv), signals)
    if run and run.config.export:  # signals end it as they end export.py
        from engine.export.run import export_best

        export_best(run.folder / "best.pt", run.config)


def _train(argv: list[str], signals: StopSignals) -> Run | None:
    """The run that this process has trained; None on all but the main one."""
    config = parse_config(TrainConfig, argv, "Trains a detector.")
    from engine.input_files import check_training_files  # after parsing, or its imports would slow down --help

    check_processes(config.spawn, config.device, threads=config.threads)
    check_training_files(config)
    if config.spawn > 1 and read_launch() is None:
        from utils.distributed.spawn import spawn

        spawn(main, config.spawn, (argv,), optional=config.eval_ranks, stop_code=REQUEUE)
        return None
    given = given_flags(TrainConfig, argv)
    if evaluates(config.eval_ranks):
        from engine.evaluators.evaluating_process import evaluate_for_others

        evaluate_for_others(config, given)  # does not return
    # What imports torch is imported once the flags and files are known to be valid.
    from engine.parallel.control import Watchdog
    from utils.distributed.context import DistributedContext, report_errors_once

    with Watchdog(signals) as watchdog:
        ctx = DistributedContext.from_environment(config.device, eval_ranks=config.eval_ranks)
        with ctx.closing(), report_errors_once(ctx):
            from engine.run import open_run
            from engine.train.build import build_run  # in here, so that only one process reports a failing import
            from utils.distributed.agreement import check_same_start

            watchdog.watch_peers(ctx)
            check_same_start(ctx, config)
            with open_run(ctx, config, given) as run:
                batch_size, imgsz = run.config.batch_size, run.config.imgsz
                advice = memory_advice(batch_size, imgsz, least_batch=ctx.world_size, device=ctx.device.type)
                with explained(advice), build_run(ctx, run, watchdog) as trainer:
                    trainer.fit()
    return trainer.run if ctx.is_main else None  # with the folder and the batch size that the run has chosen


if __name__ == "__main__":
    run_main(main)
