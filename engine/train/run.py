"""Builds a training run from its plan: one page, in the order in which things happen."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from data.dataset.spec import DEMO, DatasetSpec, class_names
from data.folds.held_out import hold_out_validation
from data.index.index import DatasetIndex
from data.index.messages import warn_of_shared_images, warn_of_unused_classes
from data.loading.build import build_run_val_loader, build_train_loader, data_facts, open_train_samples
from data.loading.loader import InfiniteDataLoader, ValidationLoader
from data.open import open_data
from data.render.letterbox import CanvasRule
from engine.evaluation.evaluator import Evaluator, tile_stitcher
from engine.evaluation.fitness import Fitness
from engine.evaluation.tables import protocol_text
from engine.export.parity import try_export
from engine.optim.build import RULES, SHORT_RUN, LoadedParameters, resolve_optimizer
from engine.optim.schedule import (
    FEW_STEPS,
    StepPlan,
    few_steps_warning,
    new_layers_lr_mult,
    random_weights_warning,
    step_plan,
)
from engine.parallel.control import RunControl
from engine.parallel.eval_ranks import EvalRanks, EvalSetup
from engine.parallel.virtual_ranks import resolve_virtual_ranks
from engine.report.summary import warn_of_small_boxes
from engine.train.batch_size import choose_batch_size
from engine.train.callbacks import UserCallbacks
from engine.train.check_settings import check_settings, unused_settings
from engine.train.checkpoint import Checkpointer, DataIdentity, RunDescription
from engine.train.folder import claim_folder
from engine.train.hooks import ClassWeights, EarlyStopping, EndLog, TensorBoard, TimeLimit
from engine.train.lr_probe import WeightsProbe, probe_weights
from engine.train.plots import Plots
from engine.train.progress_bar import ProgressBar
from engine.train.resume import Remaining, RunPlan, TrainingRun, restore_run
from engine.train.starting_model import build_starting_model, rebuild_starting_model
from engine.train.step import TrainStep, build_step
from engine.train.teacher import open_teacher
from engine.train.trackers import Service, Tracker, open_services
from engine.train.trainer import Hook, Trainer
from models.autoanchor import check_anchors
from models.detector import Detector
from models.losses.base import Criterion, class_weights
from models.losses.distillation import Teacher
from models.postprocess.detections import select_for_validation
from models.postprocess.nms import load_nms
from models.postprocess.selection import ValidationSettings
from models.weights.origin import Origin, taught_by
from utils.config.settings import Hyperparameters, RunSettings, TrainConfig
from utils.distributed.agreement import product_version
from utils.distributed.context import DistributedContext, broadcast_object
from utils.errors import UserError
from utils.logger import configure_logging, get_logger
from utils.machine.limits import limits_as_user_errors, memory_advice
from utils.machine.resources import busy_machine
from utils.mirrored_classes import mirrored_classes
from utils.process.signals import StopSignals
from utils.strings import counted, listed


def build_training(ctx: DistributedContext, plan: RunPlan, signals: StopSignals, stack: ExitStack) -> Trainer:
    """Builds the trainer of a run, at the position of its checkpoint if it continues. All checks come before a new
    run's folder is made, and those that need no files before any file is opened.

    Args:
        plan: its settings may leave the batch size, ``lr_mult`` and the optimizer open.
        stack: receives everything that is closed when the run ends, such as hooks and the lock on the run's folder.

    Raises UserError for settings, data, a model or weights that do not allow a run.
    """
    settings = plan.settings

    def advice_on_memory() -> str:  # names the batch size of the settings at the time of the error
        config = settings.config
        return memory_advice(config.batch_size, config.imgsz, min_batch=ctx.world_size, device=ctx.device.type)

    # The process.
    stack.enter_context(limits_as_user_errors(advice_on_memory))
    check_settings(ctx, settings, resumes=plan.checkpoint is not None)
    services = open_services(settings.config.tracker) if ctx.is_main else []
    callbacks = UserCallbacks(settings.config.callbacks) if settings.config.callbacks else None
    prepare_process(ctx, settings, plan.messages)

    # The data set, with the classes of a teacher.
    config = settings.config
    stored = None if plan.checkpoint is None else plan.checkpoint.description
    teacher_file = open_teacher(ctx, config, stored)
    spec = open_data(plan.data_source, ctx)
    used_classes = list(class_names(spec, single_cls=False)) if config.classes else []
    if teacher_file is not None and config.keep_old:
        spec = teacher_file.extend(spec, config.weights)
    if config.val_fraction:  # rank 0 chooses the images of a new run
        spec = hold_out_validation(ctx, config, spec, stored.val_images if stored else [])
    names = class_names(spec, config.single_cls)
    fitness = Fitness.parse(config.fitness, names)
    if stored is None:
        settings = choose_flips(ctx, settings, names, plan.given)

    # The model and its loss.
    if plan.checkpoint is None:
        starting_model = build_starting_model(ctx, config, names, spec.pixels.channels)
    else:
        starting_model = rebuild_starting_model(ctx, config, names, spec.pixels.channels, plan.checkpoint)
    model = starting_model.model
    check_kernels(config, model, ctx.device)
    teacher = None if teacher_file is None else teacher_file.build(spec, model)
    samples = open_train_samples(ctx, config, settings.hyp, spec, stride=model.stride)
    train = samples.reader.image_index
    loss_weights = choose_class_weights(config, model, train)

    # The batch size, which decides the number of steps.
    trial_loss = build_criterion(ctx, settings, model, loss_weights, teacher)
    settings = choose_batch_size(ctx, settings, model, trial_loss, samples)
    config = settings.config
    loader = build_train_loader(ctx, config, settings.hyp, samples, stride=model.stride)
    steps = step_plan(config, len(loader))

    # What the weights know of the training objects.
    probe = None
    comparable_weights = None  # starting weights that can be scored as they are
    if plan.checkpoint is None:
        needs_similar = steps.planned_steps <= FEW_STEPS and not (config.model or config.keep_old)
        probe = probe_weights(ctx, settings, samples, model, needs_similar=needs_similar)
        if probe is not None and probe.similar and not starting_model.is_complete:
            length = counted(steps.total, "step")
            get_logger().info("as the run has only %s, it keeps the class layers of %s", length, config.weights)
            starting_model = build_starting_model(ctx, config, names, spec.pixels.channels, similar=probe.similar)
            model = starting_model.model
        if starting_model.is_complete:
            comparable_weights = {name: tensor.to("cpu", copy=True) for name, tensor in model.state_dict().items()}
        fit_anchors(ctx, settings, model, train, probe)
    criterion = build_criterion(ctx, settings, model, loss_weights, teacher)
    val_loader, evaluator = build_validation(ctx, settings, spec, model, criterion)
    fitness.check_objects(evaluator.ground_truth)
    if ctx.is_main:
        for line in unused_settings(ctx, settings, model, tile=spec.tile):
            get_logger().warning("%s", line)
        warn_of_shared_images(spec, train, val_loader.index)
        warn_of_unused_classes(train)
        warn_of_small_boxes(train, imgsz=config.imgsz, stride=model.stride)

    # The step. The number of steps decides the last open settings.
    optimizer, optimizer_reason = choose_optimizer(config, steps)
    lr_mult = settings.hyp.lr_mult
    lr_mult_reason = " (lr_mult)" if stored is None else ""
    if lr_mult is None:
        lr_mult, lr_mult_reason = (1.0, "") if probe is None else probe.choose_lr_mult(config, steps)
    settings = RunSettings(replace(config, optimizer=optimizer), replace(settings.hyp, lr_mult=lr_mult))
    config = settings.config
    try_export(ctx, config, model)
    loaded = LoadedParameters(
        new_rows=starting_model.pretrained,
        lr_mult=lr_mult,
        new_lr_mult=stored.new_lr_mult if stored else new_layers_lr_mult(steps.planned_steps),
    )
    step = build_step(
        ctx,
        settings,
        model,
        criterion,
        steps,
        full_batch=loader.global_images(0),
        # Crowd regions, and objects cut by the borders of moving tiles.
        has_regions=bool(loader.index.crowd.any()) or loader.samples.tiles is not None,
        loaded=loaded,
    )
    identity = DataIdentity.of(samples.sample_index, val_loader.samples.sample_index)
    progress, unscored = restore_run(ctx, plan, step, epoch_batches=len(loader), identity=identity)

    # The folder, which is the first thing written, and what writes into it.
    started_from = plan.started_from
    rows = started_from.rows if started_from else []
    folder, run_id = claim_folder(
        ctx, plan.folder, settings, stack, progress, run_id=stored.run_id if stored else "", rows=rows
    )
    run = TrainingRun(
        folder=folder, run_id=run_id, settings=settings, started_from=started_from, remaining=plan.remaining
    )
    origin = starting_model.origin
    if teacher_file is not None and config.teacher and stored is None:  # a run that continues has stored both
        origin = taught_by(Origin(**origin), teacher_file.origin)._asdict()
    description = RunDescription(
        run_id=run_id,
        model_spec=model.spec,
        names=list(model.names),
        used_classes=used_classes,
        imgsz=config.imgsz,
        bits=spec.pixels.bits,
        config=config,
        hyp=settings.hyp,
        data={"source": str(spec.source), "root": "" if config.stage else str(spec.root)},
        identity=identity,
        val_images=sorted(spec.held_out),
        tile=spec.tile,
        pretrained={name: list(rows) for name, rows in starting_model.pretrained.items()},
        new_lr_mult=loaded.new_lr_mult,
        origin=origin,
        teacher={"path": teacher_file.path, "sha256": teacher_file.sha256} if teacher_file else {},
    )
    checkpointer = Checkpointer(folder, ctx=ctx, description=description, save_period=config.save_period, rows=rows)
    eval_ranks = None
    if ctx.eval_ranks:
        setup = describe_for_evaluators(plan, settings, step, spec=spec, val=val_loader.index)
        eval_ranks = EvalRanks(ctx, folder, setup)
        stack.callback(eval_ranks.close)
    hooks = build_hooks(run, step, loader, val_loader, evaluator, fitness, services, callbacks)
    for hook in hooks:
        stack.callback(hook.close)
    if plan.remaining is Remaining.STEPS:
        log_start(run, step, steps, optimizer_reason, lr_mult_reason, images=len(train))
    return Trainer(
        run=run,
        step=step,
        loader=loader,
        val_loader=val_loader,
        evaluator=evaluator,
        fitness=fitness,
        steps=steps,
        progress=progress,
        unscored=unscored,
        control=RunControl(ctx, signals),
        checkpointer=checkpointer,
        eval_ranks=eval_ranks,
        starting_weights=comparable_weights,
        hooks=hooks,
    )


def prepare_process(ctx: DistributedContext, settings: RunSettings, messages: Collection[str] = ()) -> None:
    """Sets up logging, threads and determinism. Logs the messages, and where the process runs."""
    config = settings.config
    configure_logging(ctx.is_main, file_follows=True)
    if config.threads or (resolve_virtual_ranks(ctx, config) and ctx.device.type == "cpu"):
        # The number of threads that share a sum affects its rounding, so it must not depend on the number of processes.
        torch.set_num_threads(config.threads or 1)
    choose_kernels(config)
    log = get_logger()
    for message in messages:
        log.info("%s", message)
    log.info("%s on %s, torch %s", counted(ctx.world_size, "process"), ctx.device, torch.__version__)


def choose_kernels(config: TrainConfig) -> None:
    """Makes torch use deterministic kernels with ``--deterministic``."""
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it, torch refuses matrix products
        torch.use_deterministic_algorithms(True)
        # Nothing here reads uninitialized memory, and filling it takes time. torch makes the setting a property of its
        # module at run time, which a type checker cannot see.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def choose_flips(
    ctx: DistributedContext, settings: RunSettings, names: Sequence[str], given: Collection[str]
) -> RunSettings:
    """Turns ``fliplr`` off if a mirrored image exchanges two of the classes ``names``, such as "left arrow" and "right
    arrow", unless it is one of the hyper-parameters that the user has ``given``. Logs this, and a warning of flips that
    stay on."""
    for flip in ("fliplr", "flipud"):
        pairs = mirrored_classes(names, flip)
        probability = getattr(settings.hyp, flip)
        if not pairs or probability == 0:
            continue
        exchanged = listed([f"'{one}' and '{other}'" for one, other in pairs], 1)
        reason = f"a flipped image exchanges the classes {exchanged}"
        if probability == getattr(Hyperparameters, flip) and flip not in given:
            off: dict[str, Any] = {flip: 0.0}
            settings = replace(settings, hyp=replace(settings.hyp, **off))
            get_logger().info("%s is turned off: %s; --set %s=%g turns it on", flip, reason, flip, probability)
        elif ctx.is_main:
            get_logger().warning("%s is %g, but %s; --set %s=0 turns it off", flip, probability, reason, flip)
    return settings


def choose_optimizer(config: TrainConfig, steps: StepPlan) -> tuple[str, str]:
    """Returns the optimizer, which for ``auto`` depends on the planned steps, and why, for the log; "" if the settings
    name it."""
    if config.optimizer != "auto":
        return config.optimizer, ""
    if steps.is_timed:
        reason = "as --time leaves the number of steps open"
    else:
        reason = f"as in all runs of {'at most' if steps.total <= SHORT_RUN else 'more than'} {SHORT_RUN:,} steps"
    return resolve_optimizer("auto", steps.planned_steps), reason


def check_kernels(config: TrainConfig, model: nn.Module, device: torch.device) -> None:
    """Raises UserError for a layer whose gradient torch cannot compute deterministically on a GPU, with
    ``--deterministic``."""
    for name, module in model.named_modules() if config.deterministic and device.type == "cuda" else ():
        if isinstance(module, nn.Upsample) and module.mode == "bicubic":
            raise UserError(
                f"--deterministic: layer {name} (Upsample, bicubic) has no deterministic gradient on a GPU; "
                "make it nearest or bilinear in the model YAML, or leave out --deterministic"
            )


def fit_anchors(
    ctx: DistributedContext, settings: RunSettings, model: Detector, train: DatasetIndex, probe: WeightsProbe | None
) -> None:
    """Checks the anchors of a model, if it has any, against the boxes of the training split, and refits them if needed.

    Loaded weights predict boxes relative to their anchors, so weights that detect the objects keep them. All ranks use
    the anchors of rank 0: the search compares sums of floats, which other processors may round differently.
    """
    anchors = model.head.anchors
    if anchors is None:
        return
    config = settings.config
    reason_to_keep = ""
    if not config.autoanchor:
        reason_to_keep = "refitting is off"
    elif probe is not None and probe.detects:
        reason_to_keep = f"{probe.source} detects training objects with them ({probe.details})"
    fitted = None
    if ctx.is_main:
        sides = train.sides_at(config.imgsz)
        message = check_anchors(
            sides, model.head, anchor_t=settings.hyp.anchor_t, reason_to_keep=reason_to_keep, seed=config.seed
        )
        get_logger().info("%s", message)
        fitted = anchors.cpu()
    anchors.copy_(broadcast_object(ctx, fitted))


def choose_class_weights(config: TrainConfig, model: Detector, train: DatasetIndex) -> Tensor | None:
    """Returns the class weights of the loss for ``--cls-pw``, float32 (C,), and logs them; None if all classes have
    equal weight. ``train``: the training split."""
    if not config.cls_pw:
        return None
    weights = class_weights(train.boxes_per_class(model.num_classes), config.cls_pw)
    by_weight = weights.argsort(descending=True, stable=True).tolist()
    shown = [f"{model.names[c]} {weights[c]:.3g}" for c in by_weight]
    get_logger().info("--cls-pw %g: weights in the loss: %s", config.cls_pw, listed(shown))
    return weights


def build_criterion(
    ctx: DistributedContext,
    settings: RunSettings,
    model: Detector,
    class_weights: Tensor | None,
    teacher: Teacher | None = None,
) -> Criterion:
    """Builds the loss of the model's head, with its current anchors, on the device. ``class_weights``: (C,)."""
    criterion = model.head.build_loss(
        settings.hyp, teacher=teacher, label_smoothing=settings.config.label_smoothing, class_weights=class_weights
    )
    return criterion.to(ctx.device)


def build_validation(
    ctx: DistributedContext, settings: RunSettings, spec: DatasetSpec, model: Detector, criterion: Criterion
) -> tuple[ValidationLoader, Evaluator]:
    """Opens the validation split of a run, and builds the evaluator of its averaged weights. Every process that
    validates must call this.

    It validates as val.py does, and also computes the loss. It runs in float32 whatever the precision of training,
    because the threshold that it finds will be used in float32.
    """
    load_nms()  # a torchvision that does not fit ends the run before its folder is made
    canvases = CanvasRule(settings.config.imgsz, model.stride, model.head.squares)
    loader = build_run_val_loader(ctx, settings.config, settings.hyp, spec, canvases)
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
    return loader, evaluator


def build_hooks(
    run: TrainingRun,
    step: TrainStep,
    loader: InfiniteDataLoader,
    val_loader: ValidationLoader,
    evaluator: Evaluator,
    fitness: Fitness,
    services: Collection[Service],
    callbacks: UserCallbacks | None,
) -> list[Hook]:
    """Builds the hooks of a run on this rank, in the order in which they are called."""
    config = run.config
    tensorboard = TensorBoard(run.folder)
    hooks: list[Hook] = [ProgressBar()]
    if config.image_weights:
        hooks.append(ClassWeights(loader))
    if config.time:
        hooks.append(TimeLimit(config.time))
    hooks.append(tensorboard)
    hooks += [Tracker(service) for service in services]
    if config.plots:
        hooks.append(Plots(val_loader.index, fitness, tensorboard))
    if callbacks is not None:
        hooks.append(callbacks)
    if config.patience:
        hooks.append(EarlyStopping(fitness.name))
    hooks.append(EndLog(fitness.name, evaluator.ground_truth, step.ema.module.names))
    return [hook for hook in hooks if step.ctx.is_main or not hook.on_rank_0]


def log_start(
    run: TrainingRun, step: TrainStep, steps: StepPlan, optimizer_reason: str, lr_mult_reason: str, *, images: int
) -> None:
    """Logs the optimizer and its rates with the reasons for them, and the number and size of steps. Warns of a machine
    that is busy, and of a new run that gives less than it could: one with too few steps for a good detector, unless
    ``--time`` decides their number, or from random weights on few training ``images``."""
    config = run.config
    hyp = run.hyp
    log = get_logger()
    is_new = run.started_from is None
    if not optimizer_reason:
        optimizer_reason = "--optimizer" if is_new else "as when the run began"
    factors = {group["is_new"]: group["lr_mult"] for group in step.optimizer.param_groups}
    new_factor = factors.get(True, 1.0)
    lr = (RULES[step.optimizer.name].lr if hyp.lr0 is None else hyp.lr0) * hyp.lr_factor * new_factor
    raised = ", raised for few steps" if new_factor > 1 else ""
    loaded = ""
    if False in factors and factors[False] != new_factor:
        loaded = f"; {loaded_weights_text(factors[False], new_factor)}{lr_mult_reason}"
    log.info("%s (%s), learning rate %g%s%s", step.optimizer.name, optimizer_reason, lr, raised, loaded)
    length = f"{counted(steps.total, 'step')} ({counted(config.epochs, 'epoch')} of {steps.per_epoch})"
    if steps.is_timed:  # the number of epochs is not known yet
        length = f"{counted(steps.per_epoch, 'step')} per epoch, for {config.time:g} hours (--time)"
    batches = "" if steps.accumulate == 1 else f"{steps.accumulate} batches of "
    log.info(
        "%s, each of %s%s at %d px, in %s%s",
        length,
        batches,
        counted(config.batch_size, "image"),
        config.imgsz,
        str(step.amp_dtype or torch.float32).removeprefix("torch."),
        "; the first one compiles the model" if config.compile else "",
    )
    if step.ctx.is_main:
        few_steps = few_steps_warning(steps, config)
        if few_steps and not config.time:
            log.warning("%s", few_steps)
        if is_new and config.data != DEMO:
            random_weights = random_weights_warning(images, weights=config.weights, model=config.model)
            if random_weights:
                log.warning("%s", random_weights)
        busy = busy_machine()
        if busy:
            log.warning("%s: steps take longer", busy)


def loaded_weights_text(factor: float, new_factor: float) -> str:
    """Says how fast loaded weights learn, in words: ``factor`` and ``new_factor`` multiply the learning rate of loaded
    and of new ones."""
    if factor == 0:
        return "loaded weights do not learn"
    if factor > new_factor:
        return f"loaded weights learn {factor / new_factor:.3g} times faster"
    return f"loaded weights learn {new_factor / factor:.3g} times slower"


def describe_for_evaluators(
    plan: RunPlan, settings: RunSettings, step: TrainStep, *, spec: DatasetSpec, val: DatasetIndex
) -> EvalSetup:
    """Describes a run to its evaluating processes. ``val``: the validation split."""
    model = step.ema.module
    weights = step.criterion.class_weights
    return EvalSetup(
        config=settings.config,
        hyp=settings.hyp,
        source=replace(plan.data_source, val_images=tuple(sorted(spec.held_out))),
        finds_own_data="data" in plan.local,
        names=list(model.names),
        model_spec=model.spec,
        anchors=None if model.head.anchors is None else model.head.anchors.cpu(),
        class_weights=None if weights is None else weights.cpu(),
        device=step.ctx.device.type,
        threads=torch.get_num_threads(),
        facts=common_facts(val),
    )


def common_facts(val: DatasetIndex) -> dict[str, str]:
    """Returns properties that training and evaluating processes must have in common, by their names in messages."""
    facts = {"the code": product_version(), "torch": torch.__version__} | data_facts("val", val)
    return {name: str(value) for name, value in facts.items()}
