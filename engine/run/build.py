"""Builds a training run from its start, in phases that each return a record which does not change."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from data.loading.build import build_run_val_loader, build_train_loader
from data.loading.loader import ValidationLoader
from data.render.letterbox import CanvasRule
from data.samples.readers import SampleReader
from engine.evaluation.evaluator import Evaluator, tile_stitcher
from engine.evaluation.tables import protocol_text
from engine.export.parity import try_export
from engine.optim.schedule import step_plan
from engine.parallel.virtual_ranks import resolve_virtual_ranks
from engine.report.advice import Subject, advise
from engine.run.check_settings import check_settings, unused_settings_of_run
from engine.run.choices import Choices, log_choices
from engine.run.folder import claim_folder
from engine.run.sources import build_starting_model, open_inputs
from engine.run.starts import Inputs, RunStart, StartingModel
from engine.train.callbacks import UserCallbacks
from engine.train.checkpoint import RunDescription, SaveContext
from engine.train.control import RunControl
from engine.train.hooks import ClassWeights, EarlyStopping, EndLog, TensorBoard, TimeLimit
from engine.train.ledger import EpochLedger, Scorer
from engine.train.loop import Hook, Trainer
from engine.train.plots import Plots
from engine.train.progress_bar import ProgressBar
from engine.train.saver import Saver
from engine.train.scoring import LocalScorer, RemoteScorer
from engine.train.step import build_step
from engine.train.trackers import Tracker, open_services
from models.detector import Detector
from models.losses.base import Criterion
from models.losses.distillation import Teacher
from models.postprocess.detections import select_for_validation
from models.postprocess.nms import load_nms
from models.postprocess.selection import ValidationSettings
from utils.config.settings import RunSettings, TrainConfig
from utils.distributed.context import DistributedContext, broadcast_object
from utils.errors import UserError
from utils.logger import configure_logging, get_logger
from utils.machine.devices import resolve_amp
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
        user_hooks += map(Tracker, open_services(start.settings.config.tracker))
    if start.settings.config.callbacks:
        user_hooks.append(UserCallbacks(start.settings.config.callbacks))
    inputs = open_inputs(ctx, start)
    starting = build_starting_model(ctx, start, inputs)
    choices = start.choices(ctx, inputs, starting)
    settings = choices.settings
    config = settings.config
    model = starting.model
    if choices.anchors is not None and model.head.anchors is not None:  # before the loss reads them
        model.head.anchors.copy_(choices.anchors)
    loader = build_train_loader(ctx, config, settings.hyp, inputs.samples.with_hyp(settings.hyp), stride=model.stride)
    steps = step_plan(config, len(loader))
    criterion, val_loader, evaluator = open_evaluation(
        ctx, settings, inputs.val, model, class_weights=choices.class_weights, teacher=starting.teacher
    )
    step = build_step(
        ctx,
        settings,
        model,
        criterion,
        steps,
        amp_dtype=broadcast_object(ctx, resolve_amp(config.amp, ctx.device)),
        full_batch=loader.global_images(0),
        # Crowd regions, and objects cut by the borders of moving tiles.
        has_regions=bool(loader.index.crowd.any()) or loader.samples.tiles is not None,
        loaded=choices.loaded,
    )
    try_export(ctx, config, model)
    progress, state = start.restore(ctx, step, len(loader), inputs.fingerprint)
    control = RunControl(ctx, signals, ended_by_callback=start.ended_by_callback)
    folder = claim_folder(  # the first thing that the run writes
        ctx,
        start.folder,
        settings,
        stack,
        run_id=start.run_id,
        asked_name=start.command.folder.name,
        is_kept=lambda: progress.updates > 0 or control.has_stopped,
    )
    description = describe_run(start, inputs, starting, choices)
    saver = Saver(
        folder,
        ctx=ctx,
        step=step,
        progress=progress,
        description=description,
        context=SaveContext(
            world_size=ctx.world_size,
            device=ctx.device.type,
            seconds=state.seconds,
            epoch_batches=len(loader),
            images=len(loader.samples),
            threads=torch.get_num_threads(),
        ),
    )
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
        hooks=build_hooks(ctx, subject, inputs, starting, user_hooks, stack),
        takes_steps=start.takes_steps,
        saves_first=start.saves_first or ctx.eval_ranks > 0,  # evaluating processes read last.pt
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


def describe_run(start: RunStart, inputs: Inputs, starting: StartingModel, choices: Choices) -> RunDescription:
    """Describes a run for all of its checkpoints."""
    spec = inputs.spec
    config = choices.settings.config
    teacher = inputs.teacher
    weights = choices.class_weights
    return RunDescription(
        run_id=start.run_id,
        model_spec=starting.model.spec,
        names=list(starting.model.names),
        used_classes=inputs.used_classes,
        imgsz=config.imgsz,
        bits=spec.pixels.bits,
        config=config,
        hyp=choices.settings.hyp,
        data={"source": str(spec.source), "root": "" if config.stage else str(spec.root)},
        identity=inputs.fingerprint,
        val_images=sorted(spec.held_out),
        tile=spec.tile,
        pretrained={name: list(rows) for name, rows in starting.weights.pretrained.items()},
        new_lr_mult=choices.loaded.new_lr_mult,
        class_weights=[] if weights is None else weights.tolist(),
        command=start.command,
        origin=starting.weights.origin,
        teacher={"path": teacher.path, "sha256": teacher.sha256} if teacher else {},
    )


def build_hooks(
    ctx: DistributedContext,
    subject: Subject,
    inputs: Inputs,
    starting: StartingModel,
    user_hooks: list[Hook],
    stack: ExitStack,
) -> list[Hook]:
    """Builds the hooks of a run on this rank, in the order in which they are called. ``stack`` closes them."""
    config = subject.config
    assert isinstance(config, TrainConfig)
    tensorboard = TensorBoard()
    hooks: list[Hook] = [ProgressBar()]
    if config.image_weights:
        hooks.append(ClassWeights())
    if config.time:
        hooks.append(TimeLimit(config.time))
    hooks.append(tensorboard)
    if config.plots:
        hooks.append(Plots(subject, tensorboard))
    hooks += user_hooks
    if config.patience:
        hooks.append(EarlyStopping(inputs.fitness.name))
    truth = subject.validated.ground_truth()
    compared = config.weights if starting.is_complete else ""
    hooks.append(EndLog(inputs.fitness.name, truth, inputs.names, compared_with=compared))
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
