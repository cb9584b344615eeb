"""Builds a training run from its start, in phases that each return a record which does not change."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import torch

from data.loading.build import build_run_val_loader, build_train_loader
from data.loading.loader import ValidationLoader
from data.render.letterbox import CanvasRule
from data.samples.readers import SampleReader
from engine.evaluation.evaluator import Evaluator, tile_stitcher
from engine.evaluation.tables import protocol_text
from engine.export.parity import try_export
from engine.optim.build import LoadedParameters
from engine.optim.schedule import step_plan
from engine.parallel.virtual_ranks import resolve_virtual_ranks
from engine.report.advice import Subject, advise
from engine.run.check_settings import check_settings, unused_settings_of_run
from engine.run.choices import log_choices
from engine.run.folder import claim_folder
from engine.run.sources import build_model, open_inputs
from engine.run.starts import Inputs, RunStart
from engine.train.callbacks import UserCallbacks
from engine.train.checkpoint import RunDescription
from engine.train.control import RunControl
from engine.train.hooks import ClassWeights, EarlyStopping, EndLog, TensorBoard, TimeLimit
from engine.train.ledger import EpochLedger, Scorer
from engine.train.loop import Hook, Trainer
from engine.train.plots import Plots
from engine.train.progress_bar import ProgressBar
from engine.train.saver import Saver
from engine.train.scoring import LocalScorer, RemoteScorer
from engine.train.step import build_step
from engine.train.trackers import TRACKERS
from models.detector import Detector
from models.losses.base import Criterion
from models.losses.distillation import Teacher
from models.postprocess.detections import select_for_validation
from models.postprocess.nms import load_nms
from models.postprocess.selection import ValidationSettings
from utils.config.settings import RunSettings, TrainConfig
from utils.distributed.context import DistributedContext
from utils.errors import UserError
from utils.logger import configure_logging, get_logger
from utils.machine.torch_threads import threads_of_process
from utils.process.signals import StopSignals
from utils.strings import counted


def run_training(
    ctx: DistributedContext, start: RunStart, signals: StopSignals, stack: ExitStack
) -> tuple[Path, UserError | None]:
    """Builds the trainer of a run, and trains. Returns the folder of the run, and what `Trainer.fit` returns.

    Nothing else has the trainer: a model in DDP must be gone when the process group is left.
    """
    trainer = build_training(ctx, start, signals, stack)
    failure = trainer.fit()
    return trainer.saver.folder, failure


def build_training(ctx: DistributedContext, start: RunStart, signals: StopSignals, stack: ExitStack) -> Trainer:
    """Builds the trainer of a run, at the position of its checkpoint if it continues. All checks come before a new
    run's folder is made, and those that need no files before any file is opened.

    Args:
        stack: receives everything that is closed when the run ends, such as hooks and the lock on the run's folder.

    Raises UserError for settings, data, a model or weights that do not allow a run.
    """
    check_settings(ctx, start.settings, resumes=start.resumes)
    prepare_process(ctx, start)
    user_hooks: list[Hook] = []  # opened before any file is read
    if ctx.is_main:
        user_hooks += [TRACKERS[name]() for name in dict.fromkeys(start.settings.config.tracker)]
    if start.settings.config.callbacks:
        user_hooks.append(UserCallbacks(start.settings.config.callbacks))
    inputs = open_inputs(ctx, start)
    model, teacher = build_model(ctx, start.settings.config, inputs)
    choices = start.choose(ctx, inputs, model, teacher)
    description = choices.description
    settings = description.settings
    config = settings.config
    hyp = settings.hyp
    loader = build_train_loader(ctx, config, hyp, inputs.samples.with_hyp(hyp), stride=model.stride)
    steps = step_plan(config, len(loader))
    criterion, val_loader, evaluator = open_evaluation(ctx, description, inputs.val, model, teacher)
    step = build_step(
        ctx,
        settings,
        model,
        criterion,
        steps,
        full_batch=loader.global_images(0),
        # Crowd regions, and objects cut by the borders of moving tiles.
        has_regions=bool(loader.index.crowd.any()) or loader.samples.tiles is not None,
        loaded=LoadedParameters(
            new_rows=description.pretrained,
            lr_mult=1.0 if hyp.lr_mult is None else hyp.lr_mult,
            new_lr_mult=description.new_lr_mult,
        ),
    )
    try_export(ctx, config, model)
    progress, state = start.restore(step, len(loader), inputs.fingerprint)
    control = RunControl(ctx, signals, ended_by_callback=start.ended_by_callback)
    folder = claim_folder(  # the first thing that the run writes
        ctx, start.folder, description, stack, is_kept=lambda: progress.updates > 0 or control.has_stopped
    )
    saver = Saver(folder, step=step, loader=loader, progress=progress, description=description)
    scorer: Scorer = LocalScorer(saver, control, step, evaluator, val_loader)
    if ctx.eval_ranks:
        scorer = RemoteScorer(ctx, saver, control)
    subject = Subject(
        title=f"Training run {folder.name}",
        folder=folder,
        config=config,
        stride=model.stride,
        train=loader.index,
        validated=val_loader.index,
        split="val",
        is_held_out=bool(description.val_images),
        command=description.command,
        batches=len(loader),
    )
    if start.takes_steps:
        log_choices(choices, steps, step)
        log_start(ctx, start, inputs, settings, subject)
    return Trainer(
        ctx=ctx,
        settings=settings,
        steps=steps,
        step=step,
        loader=loader,
        progress=progress,
        ledger=EpochLedger(ctx, progress, inputs.fitness, scorer, control, state),
        saver=saver,
        control=control,
        hooks=build_hooks(ctx, subject, user_hooks, stack),
        takes_steps=start.takes_steps,
    )


def prepare_process(ctx: DistributedContext, start: RunStart) -> None:
    """Sets up logging, threads and determinism. Logs the messages of the start, and where the process runs."""
    config = start.settings.config
    configure_logging(ctx.is_main, quiet=config.quiet, file_follows=True)
    # The number of threads that share a sum affects its rounding: with virtual ranks, processes must not change it.
    is_exact = resolve_virtual_ranks(ctx, config) and ctx.device.type == "cpu"
    torch.set_num_threads(config.threads or (1 if is_exact else threads_of_process(ctx.local_world_size)))
    choose_kernels(config)
    log = get_logger()
    for message in start.messages:
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


def open_evaluation(
    ctx: DistributedContext,
    description: RunDescription,
    reader: SampleReader,
    model: Detector,
    teacher: Teacher | None = None,
) -> tuple[Criterion, ValidationLoader, Evaluator]:
    """Builds the loss of the model's head, and the loader and the evaluator of a run's validation split. Every process
    that trains or validates must call this.

    It validates as val.py does, and also computes the loss. It runs in float32 whatever the precision of training,
    because the threshold that it finds will be used in float32.
    """
    load_nms(ctx.device)  # a torchvision that does not fit ends the run before its folder is made
    config = description.config
    class_weights = torch.tensor(description.class_weights) if description.class_weights else None
    criterion = model.head.build_loss(
        description.hyp, teacher=teacher, label_smoothing=config.label_smoothing, class_weights=class_weights
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


def build_hooks(ctx: DistributedContext, subject: Subject, user_hooks: list[Hook], stack: ExitStack) -> list[Hook]:
    """Builds the hooks of a run on this rank, in the order in which they are called. ``stack`` closes them."""
    config = subject.config
    assert isinstance(config, TrainConfig)
    tensorboard = TensorBoard()
    hooks: list[Hook] = [ProgressBar()]
    if config.image_weights:
        hooks.append(ClassWeights())
    if config.time:
        hooks.append(TimeLimit())
    hooks.append(tensorboard)
    if config.plots:
        hooks.append(Plots(subject, tensorboard))
    hooks += user_hooks
    if config.patience:
        hooks.append(EarlyStopping())
    hooks.append(EndLog(subject.validated.ground_truth()))
    here = [hook for hook in hooks if ctx.is_main or not hook.on_rank_0]
    for hook in here:
        stack.callback(hook.close)
    return here


def log_start(
    ctx: DistributedContext, start: RunStart, inputs: Inputs, settings: RunSettings, subject: Subject
) -> None:
    """Logs which settings of a run have no effect, and advice for one that begins."""
    if not ctx.is_main:
        return
    log = get_logger()
    for line in unused_settings_of_run(ctx, settings, inputs.meta_model, tile=inputs.spec.tile):
        log.warning("%s", line)
    if not start.resumes:
        for advice in advise(subject):
            log.warning("%s", " ".join(filter(None, advice)))
