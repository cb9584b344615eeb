"""Logs the end of a run that had ended before this command."""

from __future__ import annotations

from engine.eval_ranks.service import end_evaluating_processes
from engine.run.run import EndedRun, TrainingOutcome
from utils.distributed.context import DistributedContext
from utils.logger import configure_logging, get_logger
from utils.process.child import write_result


def log_ended_run(ctx: DistributedContext, ended: EndedRun) -> TrainingOutcome:
    """Logs why a run has ended, and returns its outcome. Ends the evaluating processes, if there are any. Every rank
    must call this."""
    configure_logging(ctx.is_main)
    if ctx.eval_ranks and ctx.is_main and ctx.store is not None:
        end_evaluating_processes(ctx.store, ctx.eval_ranks)
    write_result(folder=str(ended.folder))
    for message in ended.startup_messages:
        get_logger().info("%s", message)
    get_logger().info("%s: complete: %s", ended.folder, ended.end_reason)
    return TrainingOutcome(ended.folder, ended.settings.config, failure=None)
