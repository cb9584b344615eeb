"""The trainer of a run, from its settings and from what models and data have built."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from engine.checkpoint.checkpointer import Checkpointer, Progress, SaveCadence, restore
from engine.checkpoint.resume import resumed_position
from engine.checkpoint.run import Run
from engine.evaluation.evaluator import Evaluator, Postprocess
from engine.optim.build import choose_optimizer
from engine.optim.schedule import Pace, build_schedule, pace_of
from engine.reporting.trackers import CompositeTracker, CsvTracker, TensorBoardTracker, Tracker
from engine.step_setup import build_step
from engine.train_step import TrainStep
from engine.trainer import Trainer
from engine.watchdog import Watchdog
from utils.config.parser import to_dict
from utils.distributed.collectives import broadcast_object
from utils.distributed.context import DistributedContext
from utils.distributed.stop_signals import StopSignals
from utils.files.folders import describe_location
from utils.logger import get_logger


def build_trainer(
    ctx: DistributedContext,
    run: Run,
    *,
    signals: StopSignals,
    watchdog: Watchdog,
    model: nn.Module,
    criterion: nn.Module,
    pretrained: Collection[str],
    postprocess: Postprocess,
    data_source: str,
    data_root: str,
    train_loader: Any,
    val_loader: Any,
) -> Trainer:
    """The trainer, where the run stands.

    Args:
        signals, watchdog: entered.
        model: a detector on its device, with the weights that its next step is to find.
        criterion: its loss, made for those.
        pretrained: names of the parameters that came from weights when the run began.
        postprocess: raw maps to the detections that validation scores.
        data_source, data_root: the data set's YAML and folder, for the checkpoint; "": a folder of this node alone.
        train_loader, val_loader: see `Trainer`; their ``index`` knows the labels.
    """
    config = run.config
    pace = pace_of(config, len(train_loader))
    rule = choose_optimizer(config.optimizer, pace.total)
    pictures = train_loader.global_pictures(0)
    take_step = build_step(ctx, run, model, criterion, rule=rule, pretrained=pretrained, pace=pace, pictures=pictures)
    get_logger().info(
        "%s, %d steps (%d an epoch, %d batch(es) each), autocast %s",
        rule, pace.total, pace.steps, pace.accumulate, take_step.amp_dtype or "off",
    )  # fmt: skip
    # File stamps may differ where machines have copies of their own; what follows from them must not.
    fingerprint = broadcast_object(ctx, train_loader.index.fingerprint)
    progress = _restore_progress(ctx, run, model, take_step, pace, train_loader, fingerprint)
    data = describe_location(data_source, data_root, run.folder) | {"fingerprint": fingerprint}
    return Trainer(
        ctx=ctx,
        take_step=take_step,
        schedule=build_schedule(run.hyp, pace, cosine=config.cos_lr),
        optimizer=take_step.optimizer,
        ema=take_step.ema,
        train_loader=train_loader,
        val_loader=val_loader,
        tracker=_open_tracker(ctx, run, progress),
        evaluator=_build_evaluator(ctx, model, take_step, val_loader, postprocess),
        checkpointer=Checkpointer(
            run.folder,
            ctx=ctx,
            description=_describe(run, model, rule, pretrained, data),
            period=config.save_period,
            enabled=ctx.is_main,
        ),
        saving=_save_cadence(ctx, run),
        signals=signals,
        watchdog=watchdog,
        stall_s=config.stall_minutes * 60,
        progress=progress,
        run_dir=run.folder,
        loss_names=criterion.names,
        epochs=config.epochs,
        accumulate=pace.accumulate,
        val_every=config.val_every,
        patience=config.patience,
        max_bad_steps=config.max_bad_steps,
        refining_epochs=run.hyp.close_mosaic,
        image_weights=config.image_weights,
        seconds=run.content.get("run", {}).get("seconds", 0.0) if run.content else 0.0,
    )


def _restore_progress(
    ctx: DistributedContext,
    run: Run,
    model: nn.Module,
    take_step: TrainStep,
    pace: Pace,
    train_loader: Any,
    fingerprint: str,
) -> Progress:
    """Where the run stands, with the checkpoint's state put into its parts; the start of it without a checkpoint."""
    if run.content is None:
        return Progress()
    parts = {"model": model, "ema": take_step.ema, "optimizer": take_step.optimizer, "scaler": take_step.scaler}
    progress, lines = resumed_position(
        restore(run.content, ctx=ctx, **parts, path=run.path),
        run.content,
        fingerprint=fingerprint,
        batch_size=run.config.batch_size,
        epoch_batches=len(train_loader),
        accumulate=pace.accumulate,
        epochs=run.config.epochs,
    )
    for line in lines:
        get_logger().info("%s", line)
    return progress


def _open_tracker(ctx: DistributedContext, run: Run, progress: Progress) -> Tracker:
    """The trackers of the main process; other processes track nothing."""
    tracker = Tracker()
    if ctx.is_main:
        tracker = CompositeTracker([CsvTracker(run.folder / "results.csv"), TensorBoardTracker(run.folder)])
    tracker.start(to_dict(run.config), progress.epoch + 1)
    return tracker


def _describe(
    run: Run, model: nn.Module, rule: str, pretrained: Collection[str], data: dict[str, str]
) -> dict[str, Any]:
    """What every checkpoint of the run says of it."""
    config = to_dict(run.config) | {"optimizer": rule}  # a longer run must not choose another when it resumes
    if config["data"] != "demo":
        config["data"] = data["source"]  # which holds in any working folder
    return {
        "model_spec": model.spec,
        "names": list(model.names),
        "pretrained": list(pretrained),
        "imgsz": run.config.imgsz,
        "hyp": to_dict(run.hyp),
        "config": config,
        "data": data,
    }


def _build_evaluator(
    ctx: DistributedContext, model: nn.Module, take_step: TrainStep, val_loader: Any, postprocess: Postprocess
) -> Evaluator:
    return Evaluator(
        ground_truth=val_loader.index.ground_truth(),
        num_classes=model.num_classes,
        postprocess=postprocess,
        ctx=ctx,
        amp_dtype=take_step.amp_dtype,
        for_inference=lambda model: model.fuse(one_to_one=None),
        criterion=take_step.criterion,
    )


def _save_cadence(ctx: DistributedContext, run: Run) -> SaveCadence:
    """A run that goes on from another file than its last.pt saves at once."""
    return SaveCadence(
        minutes=run.config.save_minutes,
        steps=run.config.save_steps,
        has_clock=ctx.is_main,
        at_start=run.content is not None and run.path.resolve() != (run.folder / "last.pt").resolve(),
    )
