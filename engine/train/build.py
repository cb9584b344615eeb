"""Assembles a training run from its settings. `build_training` is the table of contents; the phases follow below it."""

from __future__ import annotations

import math
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import asdict, replace

from data.index.index import DatasetIndex
from data.loading.build import build_train_sampler, open_train_samples
from data.loading.check_settings import check_loader_settings
from data.loading.loader import InfiniteDataLoader
from data.samples.augmented import AugmentedImages
from data.source.dataset_spec import DatasetSpec, class_names
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.checkpointer import Checkpointer
from engine.checkpoint.description import RunDescription
from engine.checkpoint.progress import Progress
from engine.export.options import require_packages
from engine.export.trial import try_formats
from engine.optim.build import LoadedParameters
from engine.optim.schedule import StepPlan, few_steps_warning, new_layers_lr_mult, step_plan
from engine.parallel.control import RunControl
from engine.parallel.watchdog import Watchdog
from engine.run.folder import claim_folder
from engine.run.plan import plan_run
from engine.run.process import check_kernels, prepare_process
from engine.run.restore import check_classes, keep_best_epoch, restore_run
from engine.run.run import RunPlan, RunSettings, TrainingRun
from engine.run.starting_model import StartingModel, build_starting_model, rebuild_model
from engine.run.unused_settings import unused_settings
from engine.train.batch_size import batch_that_fits, check_batch_search
from engine.train.lr_probe import probe_lr_mult
from engine.train.run_data import Loaders, RunData, build_loaders, data_identity, epoch_data, open_run_data
from engine.train.run_hooks import build_hooks, build_optional_hooks
from engine.train.start_log import log_start, log_steps
from engine.train.step import FullBatch, TrainStep, build_step, check_step_settings
from engine.train.teacher import TeacherFile
from engine.train.trainer import Trainer
from models.autoanchor import check_anchors
from models.detector import Detector
from models.losses.base import Criterion, class_weights
from models.weights.load import check_shapes
from models.weights.read import shapes_of
from utils.config.settings import FIND_BATCH_SIZE, TrainConfig
from utils.distributed.agreement import check_same_model, check_same_run
from utils.distributed.context import DistributedContext, broadcast_object, torch_distributed_zero_first
from utils.errors import errors_of
from utils.files.folders import describe_location
from utils.logger import get_logger
from utils.machine.limits import explained, memory_advice
from utils.strings import listed


def build_training(
    ctx: DistributedContext, config: TrainConfig, explicit_flags: Collection[str], watchdog: Watchdog, stack: ExitStack
) -> Trainer:
    """Builds the trainer of the run that a command line describes, at the position of its checkpoint if it continues.

    Everything that can be refused is checked before the run has a folder, and what needs no files before any is opened.

    Args:
        explicit_flags: names of the settings that the command line gives.
        watchdog: entered by the caller.
        stack: what it holds is closed when the run ends: hooks, the run's folder and its lock.

    Raises UserError for settings, data, a model or weights with which no run is possible.
    """
    # What is to be trained, and what the settings and the processes alone rule out.
    plan = plan_run(ctx, config, explicit_flags, stack)
    # Evaluated when an error is raised, so that it sees the batch size chosen by then.
    stack.enter_context(explained(lambda: advice_on_memory(ctx, plan.config)))
    check_same_plan(ctx, plan)
    check_settings(ctx, plan.settings)
    optional_hooks = build_optional_hooks(ctx, plan)  # they may refuse settings, too
    prepare_process(ctx, plan.settings, plan.startup_messages)

    # Data, model and loaders, with the settings that follow from them.
    data = open_run_data(ctx, plan)
    starting_model = build_run_model(ctx, plan, data)
    model = starting_model.model
    samples = open_train_samples(ctx, plan.config, plan.hyp, data.spec, stride=model.stride)
    plan = choose_batch_size(ctx, plan, data, model, samples)
    warn_of_unused_settings(ctx, plan.settings, data, model)
    loaders = build_loaders(ctx, plan.settings, data, model, samples)
    steps = step_plan(plan.config, len(loaders.train))
    fit_anchors(ctx, plan, model, loaders.train.index)
    plan = choose_lr_mult(ctx, plan, loaders, model, steps)
    settings = plan.settings  # all are chosen
    try_export(ctx, settings.config, model)

    # The step, in the state of the checkpoint if there is one.
    criterion = build_criterion(ctx, settings, model, data.teacher, loaders.train.index)
    warn_of_short_run(ctx, settings.config, steps)
    loaded = loaded_parameters(plan, starting_model, steps)
    step = build_step(ctx, settings, model, criterion, steps=steps, batch=full_batch(loaders.train), loaded=loaded)
    log_steps(plan, step, steps)
    identity = data_identity(ctx, loaders)
    progress = Progress()
    if plan.checkpoint is not None:
        progress = restore_run(ctx, plan.checkpoint, step, settings.config, epoch_data(loaders.train, identity))

    # The folder, the first thing that is written, and what writes into it.
    run = claim_folder(ctx, plan, stack, progress)
    description = describe_run(run, data, starting_model, step=step, loaded=loaded, identity=identity)
    checkpointer = Checkpointer(run.folder, ctx=ctx, description=description, period=settings.config.save_period)
    if run.checkpoint is not None:
        keep_best_epoch(ctx, run.checkpoint, checkpointer, progress)
    hooks = build_hooks(ctx, run, step, loaders, fitness=data.fitness, optional_hooks=optional_hooks)
    for hook in hooks:
        stack.callback(hook.close)
    log_start(settings.config)
    return Trainer(
        run=run,
        step=step,
        loader=loaders.train,
        steps=steps,
        progress=progress,
        control=RunControl(ctx, watchdog),
        checkpointer=checkpointer,
        hooks=hooks,
    )


def advice_on_memory(ctx: DistributedContext, config: TrainConfig) -> str:
    """Says what to change if the memory of the machine or of its GPUs does not suffice for the run."""
    return memory_advice(config.batch_size, config.imgsz, min_batch=ctx.world_size, device=ctx.device.type)


def check_same_plan(ctx: DistributedContext, plan: RunPlan) -> None:
    """Raises UserError when the processes do not have the same settings, or not the same position of a checkpoint."""
    progress = None if plan.checkpoint is None else asdict(plan.checkpoint.progress)
    check_same_run(ctx, plan.config, plan.hyp, progress)


def check_settings(ctx: DistributedContext, settings: RunSettings) -> None:
    """Raises UserError for what the settings and the processes alone rule out: at once, not after hours of copying or
    scanning images."""
    config = settings.config
    if config.export and ctx.is_main:
        require_packages(config.export)
    if config.batch_size == FIND_BATCH_SIZE:
        check_batch_search(ctx, config)
    check_step_settings(ctx, config)
    check_loader_settings(ctx, config, settings.hyp)


def build_run_model(ctx: DistributedContext, plan: RunPlan, data: RunData) -> StartingModel:
    """Builds the model on its device: with starting weights, or, for a run that continues, as its checkpoint describes
    it (`restore_run` loads the weights). Raises UserError when the processes do not have the same, and for layers that
    other settings rule out."""
    config = plan.config
    spec = data.spec
    if plan.checkpoint is None:
        names = class_names(spec, config.single_cls)
        starting_model = build_starting_model(ctx, config, names, spec.pixels.channels)
        state = starting_model.model.state_dict()
        read_tensors = [state[name] for name in starting_model.pretrained]
    else:
        starting_model = rebuild_run_model(ctx, config, spec, plan.checkpoint)
        read_tensors = list(plan.checkpoint.model.values())
    model = starting_model.model
    check_same_model(ctx, model, read_tensors)
    check_kernels(config, model, ctx.device)
    if data.teacher is not None:
        data.teacher.check(spec, model)
    return starting_model


def rebuild_run_model(
    ctx: DistributedContext, config: TrainConfig, spec: DatasetSpec, checkpoint: Checkpoint
) -> StartingModel:
    """Builds the model that a checkpoint describes. Raises UserError if the data set has other classes, or if the
    weights are not those of the model."""
    names = class_names(spec, config.single_cls)
    check_classes(checkpoint, names, spec.source)
    check_shapes(checkpoint.path, checkpoint.model_spec, checkpoint.names, shapes_of(checkpoint.model))
    with errors_of(checkpoint.path):
        model = rebuild_model(ctx, config, names, spec.pixels.channels, checkpoint.model_spec)
    pretrained = {name: tuple(rows) for name, rows in checkpoint.pretrained.items()}
    return StartingModel(model, pretrained, checkpoint.origin)


def choose_batch_size(
    ctx: DistributedContext, plan: RunPlan, data: RunData, model: Detector, samples: AugmentedImages
) -> RunPlan:
    """Returns the plan with the largest batch size that fits on the GPUs, for ``--batch-size -1``."""
    if plan.config.batch_size != FIND_BATCH_SIZE:
        return plan

    def plan_steps(config: TrainConfig) -> StepPlan:
        sampler = build_train_sampler(ctx, config, plan.hyp, samples, stride=model.stride)
        return step_plan(config, epoch_batches=len(sampler))

    criterion = build_criterion(ctx, plan.settings, model, data.teacher)
    batch_size = batch_that_fits(ctx, plan.settings, model, criterion, plan_steps=plan_steps, pixels=data.spec.pixels)
    chosen = plan.with_batch_size(batch_size)
    check_settings(ctx, chosen.settings)
    return chosen


def warn_of_unused_settings(ctx: DistributedContext, settings: RunSettings, data: RunData, model: Detector) -> None:
    """Logs a warning for each setting of the command line that has no effect in this run."""
    if ctx.is_main:
        lines = unused_settings(ctx, settings, model.head, channels=model.channels, tile=data.spec.tile)
        for line in lines:
            get_logger().warning("%s", line)


def fit_anchors(ctx: DistributedContext, plan: RunPlan, model: Detector, train: DatasetIndex) -> None:
    """Checks the anchors of the model, if it has any, against the training boxes, and fits new ones. A run that
    continues has those of its checkpoint.

    All ranks take those of rank 0: the search compares sums of floats, which other processors may round otherwise.
    """
    anchors = model.head.anchors
    if anchors is None or plan.checkpoint is not None:
        return
    config = plan.config
    fitted = None
    if ctx.is_main:
        sides = train.sides_at(config.imgsz)
        refit = not config.noautoanchor
        message = check_anchors(sides, model.head, anchor_t=plan.hyp.anchor_t, refit=refit, seed=config.seed)
        get_logger().info("%s", message)
        fitted = anchors.cpu()
    anchors.copy_(broadcast_object(ctx, fitted))


def choose_lr_mult(
    ctx: DistributedContext, plan: RunPlan, loaders: Loaders, model: Detector, steps: StepPlan
) -> RunPlan:
    """Returns the plan with ``lr_mult``, which a run that continues and a recipe may have already."""
    if plan.hyp.lr_mult is not None:
        return plan
    if not plan.config.weights:
        return plan.with_lr_mult(1.0)
    return plan.with_lr_mult(probe_lr_mult(ctx, plan.config, loaders.train.samples, model, steps.total))


def try_export(ctx: DistributedContext, config: TrainConfig, model: Detector) -> None:
    """Exports the untrained model for ``--export``, so that a format that fails does so before the training."""
    if not config.export:
        return
    with torch_distributed_zero_first(ctx):
        if ctx.is_main:
            try_formats(model, config.export, config.imgsz)


def build_criterion(
    ctx: DistributedContext,
    settings: RunSettings,
    model: Detector,
    teacher: TeacherFile | None,
    train: DatasetIndex | None = None,
) -> Criterion:
    """Builds the loss of the model's head on the device. ``train``: the training split, for ``--cls-pw``; None: all
    classes count alike."""
    config = settings.config
    weights = None
    if config.cls_pw and train is not None:
        weights = class_weights(train.boxes_per_class(model.num_classes), config.cls_pw)
        by_weight = weights.argsort(descending=True, stable=True).tolist()
        shown = [f"{model.names[c]} {weights[c]:.3g}" for c in by_weight]
        get_logger().info("--cls-pw %g: weights in the loss: %s", config.cls_pw, listed(shown))
    criterion = model.head.build_loss(
        settings.hyp,
        teacher=teacher.build(model) if teacher else None,
        label_smoothing=config.label_smoothing,
        class_weights=weights,
    )
    return criterion.to(ctx.device)


def warn_of_short_run(ctx: DistributedContext, config: TrainConfig, steps: StepPlan) -> None:
    """Warns of a run with too few steps for a good detector, unless ``--time`` decides their number."""
    warning = few_steps_warning(steps, from_weights=bool(config.weights))
    if warning and ctx.is_main and not config.time:
        get_logger().warning("%s", warning)


def loaded_parameters(plan: RunPlan, starting_model: StartingModel, steps: StepPlan) -> LoadedParameters:
    """Returns the parameters that come from weights, with the rates that were chosen for them and for the others when
    the run began."""
    hyp = plan.hyp
    if hyp.lr_mult is None:
        raise ValueError("lr_mult must be chosen before the step is built")
    new_lr_mult = None if plan.checkpoint is None else plan.checkpoint.new_lr_mult
    if new_lr_mult is None:
        new_lr_mult = new_layers_lr_mult(math.inf if plan.config.time else steps.total)
    return LoadedParameters(new_rows=starting_model.pretrained, lr_mult=hyp.lr_mult, new_lr_mult=new_lr_mult)


def full_batch(train: InfiniteDataLoader) -> FullBatch:
    """Describes whole training batches. Regions to ignore are crowds, and objects that borders of moving tiles cut."""
    has_regions = bool(train.index.crowd.any()) or train.samples.tiles is not None
    return FullBatch(train.global_images(0), has_regions)


def describe_run(
    run: TrainingRun,
    data: RunData,
    starting_model: StartingModel,
    *,
    step: TrainStep,
    loaded: LoadedParameters,
    identity: dict[str, str],
) -> RunDescription:
    """Returns what all checkpoints of the run say of its settings, data and model."""
    spec = data.spec
    model = starting_model.model
    root = "" if run.config.stage else str(spec.root)  # a staged copy is of this node alone
    location = describe_location(spec.source, root, run.folder)
    config = replace(run.config, optimizer=step.optimizer.name)  # a longer run must not choose another when it resumes
    if config.data != "demo":
        config = replace(config, data=location["source"])  # valid from any working folder
    return RunDescription(
        model_spec=model.spec,
        names=list(model.names),
        imgsz=run.config.imgsz,
        bits=spec.pixels.bits,
        hyp=run.hyp,
        config=config,
        data=location | identity,
        val_images=sorted(spec.held_out),
        tile=spec.tile,
        pretrained={name: list(rows) for name, rows in starting_model.pretrained.items()},
        new_lr_mult=loaded.new_lr_mult,
        origin=starting_model.origin,
        teacher=data.teacher.stored if data.teacher else {},
    )
