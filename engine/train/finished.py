"""A run that had ended before this command: nothing is left to do but exports."""

from __future__ import annotations

from engine.eval_ranks.service import end_evaluating_processes
from engine.run.run import EndedRun, TrainingRun
from engine.train.trainer import FinishedRun
from utils.distributed.context import DistributedContext
from utils.logger import configure_logging, get_logger
from utils.process.result_file import write_result
from utils.strings import counted


def open_finished(ctx: DistributedContext, ended: EndedRun) -> FinishedRun:
    """Returns the run of the plan ``ended``, and logs its end. Every rank must call this."""
    configure_logging(ctx.is_main)
    if ctx.eval_ranks and ctx.is_main and ctx.store is not None:
        end_evaluating_processes(ctx.store, ctx.eval_ranks)
    write_result(folder=str(ended.folder))
    for message in ended.startup_messages:
        get_logger().info("%s", message)
    get_logger().info("%s: complete after %s: %s", ended.folder, counted(ended.epochs, "epoch"), ended.end_reason)
    run = TrainingRun(folder=ended.folder, run_id=ended.run_id, settings=ended.settings)
    return FinishedRun(run, failure=None)
