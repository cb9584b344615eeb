"""Trains a detector: ``python train.py --data DATA.yaml --model yolov8n``, or under torchrun on several devices."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

from utils.config.parser import errors_name_typed_flags, given_flags, parse_config
from utils.config.settings import TrainConfig
from utils.distributed.launch import evaluates, is_launched
from utils.distributed.spawn import spawn, work_in_child
from utils.entrypoint import run_main
from utils.machine.limits import explained, memory_advice


@errors_name_typed_flags(TrainConfig)
def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else list(argv)
    config = parse_config(TrainConfig, argv, "Trains a detector.")
    from engine.input_files import check_training_files  # it and what follows take longer to import than --help may

    check_training_files(config)
    if config.spawn > 1 and not is_launched():
        spawn(main, config.spawn, (argv,), run=run_main, optional=config.eval_ranks)
        return
    if evaluates(config.eval_ranks, config.local_rank, config.local_world_size):
        if (pulse := work_in_child()) is not None:
            from engine.tools.evaluating_process import evaluate_for_others

            evaluate_for_others(config, given_flags(TrainConfig, argv), pulse)
        return
    # What imports torch is imported once the flags and files are known to be valid.
    from engine.parallel.watchdog import Watchdog
    from utils.distributed.context import DistributedContext, report_errors_once
    from utils.machine.stop_signals import StopSignals

    with StopSignals() as signals, Watchdog(signals) as watchdog:
        place = config.device, config.local_rank, config.local_world_size
        ctx = DistributedContext.from_environment(*place, eval_ranks=config.eval_ranks)
        with ctx.closing(), report_errors_once(ctx):
            from engine.checkpoint.run import open_run
            from engine.train.build import build_run  # in here, so that only one process reports a failing import
            from engine.train.process import check_same_start

            watchdog.watch_peers(ctx)
            check_same_start(ctx, config)
            with open_run(ctx, config, given_flags(TrainConfig, argv)) as run:
                size = run.config.batch_size, run.config.imgsz
                advice = partial(memory_advice, *size, least_batch=ctx.world_size, device=ctx.device.type)
                with explained(advice), build_run(ctx, run, watchdog) as trainer:
                    trainer.fit()
    if ctx.is_main and trainer.run.config.export:  # signals end it as they end export.py
        from engine.export.run import export_best

        export_best(trainer.run.folder / "best.pt", trainer.run.config)


if __name__ == "__main__":
    run_main(main)
