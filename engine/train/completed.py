"""A run that has ended: nothing is left to do but exports."""

from __future__ import annotations

from engine.eval_ranks.messages import ENDED
from engine.run.run import RunPlan, TrainingRun
from engine.train.trainer import CompletedRun
from utils.distributed.context import DistributedContext
from utils.logger import configure_logging, get_logger
from utils.process.result_file import write_result
from utils.strings import counted


def open_completed(ctx: DistributedContext, plan: RunPlan) -> CompletedRun:
    """Returns the run of ``plan``, which has ended, and logs so. Every rank must call this."""
    configure_logging(ctx.is_main)
    assert plan.folder is not None
    assert plan.started_from is not None
    assert plan.checkpoint is not None
    if ctx.eval_ranks and ctx.is_main and ctx.store is not None:
        ctx.store.set(ENDED, "")  # the evaluating processes wait for a run
    write_result(folder=str(plan.folder))
    epochs = counted(plan.checkpoint.header.progress.epoch, "epoch")
    get_logger().info("%s: complete after %s; nothing is left to train", plan.folder, epochs)
    started_from = plan.started_from
    run_id = started_from.description.run_id
    run = TrainingRun(folder=plan.folder, run_id=run_id, settings=plan.settings, started_from=started_from)
    return CompletedRun(run, failure=None)
