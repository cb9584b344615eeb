"""Builds a training run from its plan, in phases that each return a record which does not change."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch import Tensor

from data.loading.build import build_run_val_loader, build_train_loader
from data.loading.loader import ValidationLoader
from data.render.letterbox import CanvasRule
from data.samples.readers import SampleReader
from engine.evaluation.evaluator import Evaluator, tile_stitcher
from engine.evaluation.tables import protocol_text
from engine.export.parity import try_export
from engine.parallel.virtual_ranks import resolve_virtual_ranks
from engine.report.advice import advise
from engine.train.callbacks import UserCallbacks
from engine.train.check_settings import check_settings, unused_settings_of_run
from engine.train.checkpoint import Checkpointer, RunDescription
from engine.train.choices import Choices, decide, log_choices
from engine.train.control import RunControl
from engine.train.folder import claim_folder
from engine.train.hooks import ClassWeights, EarlyStopping, EndLog, TensorBoard, TimeLimit
from engine.train.plots import Plots, subject_of
from engine.train.progress_bar import ProgressBar
from engine.train.restore import restore_run
from engine.train.resume import RunPlan
from engine.train.scoring import LocalScorer, RemoteScorer, Scorer
from engine.train.sources import RunData, Sources, open_run_data, open_sources
from engine.train.starting_model import StartingModel, build_starting_model
from engine.train.step import build_step
from engine.train.trackers import Tracker, open_services
from engine.train.trainer import Feed, Hook, Trainer, TrainingRun
from models.detector import Detector
from models.losses.base import Criterion
from models.losses.distillation import Teacher
from models.postprocess.detections import select_for_validation
from models.postprocess.nms import load_nms
from models.postprocess.selection import ValidationSettings
from utils.config.settings import RunSettings, TrainConfig
from utils.distributed.context import DistributedContext
from utils.logger import configure_logging, get_logger
from utils.machine.torch_threads import threads_of_process
from utils.process.signals import StopSignals
from utils.strings import counted


def build_training(ctx: DistributedContext, plan: RunPlan, signals: StopSignals, stack: ExitStack) -> Trainer:
    """Builds the trainer of a run, at the position of its checkpoint if it continues. All checks come before a new
    run's folder is made, and those that need no files before any file is opened.

    Args:
        plan: its settings may leave the batch size, ``lr_mult`` and the optimizer open.
        stack: receives everything that is closed when the run ends, such as hooks and the lock on the run's folder.

    Raises UserError for settings, data, a model or weights that do not allow a run.
    """
    check_settings(ctx, plan.settings, resumes=plan.checkpoint is not None)
    prepare_process(ctx, plan)
    user_hooks = open_user_hooks(ctx, plan)
    sources = open_sources(ctx, plan)
    data = open_run_data(ctx, plan, sources)
    start = build_starting_model(ctx, plan, sources, data)
    choices = decide(ctx, plan, sources, data, start)
    feed = build_feed(ctx, choices, sources, data, start)
    settings = choices.settings
    step = build_step(
        ctx,
        settings,
        start.model,
        feed.criterion,
        choices.steps,
        amp_dtype=choices.amp_dtype,
        full_batch=feed.full_batch,
        has_regions=feed.has_regions,
        loaded=choices.loaded,
    )
    try_export(ctx, settings.config, start.model)
    progress, unscored = restore_run(ctx, plan, step, epoch_batches=len(feed.loader), fingerprint=data.fingerprint)
    control = RunControl(ctx, signals)
    folder, run_id = claim_folder(  # the first thing that the run writes
        ctx,
        plan.folder,
        settings,
        stack,
        stored=plan.stored,
        is_kept=lambda: progress.updates > 0 or control.has_stopped,
    )
    description = describe_run(plan, sources, data, start, choices, run_id=run_id)
    scorer: Scorer = LocalScorer(folder, step, feed.evaluator, feed.val_loader)
    if ctx.eval_ranks:
        scorer = RemoteScorer(ctx, folder, run_id, control)
    run = TrainingRun(
        ctx=ctx,
        folder=folder,
        started_from=plan.started_from,
        takes_steps=plan.takes_steps,
        description=description,
        choices=choices,
        feed=feed,
        step=step,
        progress=progress,
        unscored=unscored,
        control=control,
        checkpointer=Checkpointer(
            folder, ctx=ctx, description=description, save_period=settings.config.save_period, rows=plan.rows
        ),
        scorer=scorer,
    )
    if plan.takes_steps:
        log_start(run, sources)
    return Trainer(run, hooks=build_hooks(run, sources, user_hooks, stack))


def prepare_process(ctx: DistributedContext, plan: RunPlan) -> None:
    """Sets up logging, threads and determinism. Logs the messages of the plan, and where the process runs."""
    config = plan.settings.config
    configure_logging(ctx.is_main, quiet=config.quiet, file_follows=True)
    # The number of threads that share a sum affects its rounding: with virtual ranks, processes must not change it.
    is_exact = resolve_virtual_ranks(ctx, config) and ctx.device.type == "cpu"
    torch.set_num_threads(config.threads or (1 if is_exact else threads_of_process(ctx.local_world_size)))
    choose_kernels(config)
    log = get_logger()
    for message in plan.messages:
        log.info("%s", message)
    log.info("%s on %s, torch %s", counted(ctx.world_size + ctx.eval_ranks, "process"), ctx.device, torch.__version__)


def choose_kernels(config: TrainConfig) -> None:
    """Makes torch use deterministic kernels with ``--deterministic``."""
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it, torch refuses matrix products
        torch.use_deterministic_algorithms(True)
        # Nothing here reads uninitialized memory, and filling it takes time. torch makes the setting a property of its
        # module at run time, which a type checker cannot see.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


class UserHooks(NamedTuple):
    """The hooks that the settings name, opened before any file."""

    trackers: list[Tracker]
    callbacks: list[UserCallbacks]


def open_user_hooks(ctx: DistributedContext, plan: RunPlan) -> UserHooks:
    """Opens the services of ``--tracker``, on rank 0, and imports ``--callbacks``. Raises UserError if that fails."""
    config = plan.settings.config
    services = open_services(config.tracker) if ctx.is_main else []
    return UserHooks(
        trackers=[Tracker(service) for service in services],
        callbacks=[UserCallbacks(config.callbacks)] if config.callbacks else [],
    )


def build_feed(
    ctx: DistributedContext, choices: Choices, sources: Sources, data: RunData, start: StartingModel
) -> Feed:
    """Builds the loaders of both splits, the loss, and the evaluator of the averaged weights. The model gets the chosen
    anchors, which the loss reads."""
    config = choices.settings.config
    hyp = choices.settings.hyp
    model = start.model
    if choices.anchors is not None and model.head.anchors is not None:
        model.head.anchors.copy_(choices.anchors)
    loader = build_train_loader(ctx, config, hyp, data.samples.with_hyp(hyp), stride=model.stride)
    criterion, val_loader, evaluator = open_evaluation(
        ctx, choices.settings, data.val, model, class_weights=choices.class_weights, teacher=start.teacher
    )
    return Feed(
        loader=loader,
        val_loader=val_loader,
        criterion=criterion,
        evaluator=evaluator,
        fitness=sources.fitness,
        full_batch=loader.global_images(0),
        # Crowd regions, and objects cut by the borders of moving tiles.
        has_regions=bool(loader.index.crowd.any()) or loader.samples.tiles is not None,
    )


def open_evaluation(
    ctx: DistributedContext,
    settings: RunSettings,
    reader: SampleReader,
    model: Detector,
    *,
    class_weights: Tensor | None,
    teacher: Teacher | None = None,
) -> tuple[Criterion, ValidationLoader, Evaluator]:
    """Builds the loss of the model's head, and the loader and the evaluator of a run's validation split. Every process
    that trains or validates must call this.

    It validates as val.py does, and also computes the loss. It runs in float32 whatever the precision of training,
    because the threshold that it finds will be used in float32.

    ``class_weights``: (C,) in the loss.
    """
    load_nms(ctx.device)  # a torchvision that does not fit ends the run before its folder is made
    config = settings.config
    criterion = model.head.build_loss(
        settings.hyp, teacher=teacher, label_smoothing=config.label_smoothing, class_weights=class_weights
    ).to(ctx.device)
    canvases = CanvasRule(config.imgsz, model.stride, model.head.square_letterbox)
    loader = build_run_val_loader(ctx, config, reader, canvases)
    evaluator = Evaluator(
        ground_truth=loader.index.ground_truth(),
        num_classes=len(loader.index.names),
        postprocess=select_for_validation,
        ctx=ctx,
        tiles=tile_stitcher(loader, model.nms_iou, ValidationSettings()),
        criterion=criterion,
        fuses=True,
        protocol=protocol_text(canvases, box_voting=model.nms_iou is not None, tile=loader.index.tile),
    )
    return criterion, loader, evaluator


def describe_run(
    plan: RunPlan, sources: Sources, data: RunData, start: StartingModel, choices: Choices, *, run_id: str
) -> RunDescription:
    """Returns what all checkpoints of a run say of it."""
    spec = sources.spec
    config = choices.settings.config
    teacher = sources.teacher
    weights = choices.class_weights
    return RunDescription(
        run_id=run_id,
        model_spec=start.model.spec,
        names=list(start.model.names),
        used_classes=sources.used_classes,
        imgsz=config.imgsz,
        bits=spec.pixels.bits,
        config=config,
        hyp=choices.settings.hyp,
        data={"source": str(spec.source), "root": "" if config.stage else str(spec.root)},
        identity=data.fingerprint,
        val_images=sorted(spec.held_out),
        tile=spec.tile,
        pretrained={name: list(rows) for name, rows in start.pretrained.items()},
        new_lr_mult=choices.loaded.new_lr_mult,
        class_weights=[] if weights is None else weights.tolist(),
        command=plan.stored.command if plan.stored else plan.settings.config,
        origin=start.origin,
        teacher={"path": teacher.path, "sha256": teacher.sha256} if teacher else {},
    )


def build_hooks(run: TrainingRun, sources: Sources, user_hooks: UserHooks, stack: ExitStack) -> list[Hook]:
    """Builds the hooks of a run on this rank, in the order in which they are called. ``stack`` closes them."""
    config = run.config
    feed = run.feed
    tensorboard = TensorBoard(run.folder)
    hooks: list[Hook] = [ProgressBar()]
    if config.image_weights:
        hooks.append(ClassWeights(feed.loader))
    if config.time:
        hooks.append(TimeLimit(config.time))
    hooks.append(tensorboard)
    hooks += user_hooks.trackers
    if config.plots:
        hooks.append(Plots(tensorboard))
    hooks += user_hooks.callbacks
    if config.patience:
        hooks.append(EarlyStopping(feed.fitness.name))
    compared = config.weights if sources.is_complete else ""
    truth = feed.evaluator.ground_truth
    hooks.append(EndLog(feed.fitness.name, truth, run.description.names, compared_with=compared))
    here = [hook for hook in hooks if run.ctx.is_main or not hook.on_rank_0]
    for hook in here:
        stack.callback(hook.close)
    return here


def log_start(run: TrainingRun, sources: Sources) -> None:
    """Logs what the run has chosen, which of its settings have no effect, and what is advised."""
    log_choices(run.choices, run.step.optimizer)
    log = get_logger()
    if not run.ctx.is_main:
        return
    model = run.step.ema.module
    for line in unused_settings_of_run(run.ctx, run.choices.settings, model, tile=sources.spec.tile):
        log.warning("%s", line)
    if run.started_from is None:
        for advice in advise(subject_of(run)):
            log.warning("%s", " ".join(filter(None, advice)))
