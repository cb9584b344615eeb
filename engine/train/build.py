"""A training run, put together from its settings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from data.box_sizes import warn_of_small_boxes
from data.index.index import DatasetIndex
from data.loading.build import build_train_loader, build_val_loader, check_loader_settings, warn_of_shared_images
from data.loading.loader import InfiniteDataLoader
from data.open import open_data
from data.spec.dataset_spec import DatasetSpec, DataSource, class_names
from engine.agreement import check_same_model, check_same_run
from engine.checkpoint.checkpoint import Progress, RunDescription
from engine.checkpoint.checkpointer import Checkpointer
from engine.checkpoint.run import Run
from engine.evaluation.evaluator import training_evaluator
from engine.evaluation.fitness import Fitness
from engine.hooks.checkpoints import Checkpoints
from engine.hooks.hook import Hook
from engine.hooks.nonfinite import NonFiniteSteps
from engine.hooks.progress_bar import ProgressBar
from engine.hooks.results import Results, Summary
from engine.hooks.validation import Validation
from engine.optim.build import RULES, SHORT_RUN
from engine.optim.schedule import StepPlan, step_plan, warn_of_few_steps
from engine.parallel.control import RunControl
from engine.parallel.watchdog import Watchdog
from engine.process import open_folder, prepare_process, unused_settings
from engine.trackers.result_files import ResultFiles
from engine.train.step import TrainStep, build_step, check_step_settings
from engine.train.trainer import Trainer
from models.build import build_starting_model
from models.detector import Detector
from models.losses.base import Criterion, class_weights
from utils.config.settings import FIND_BATCH_SIZE, TrainConfig
from utils.distributed.collectives import broadcast_object, torch_distributed_zero_first
from utils.distributed.context import DistributedContext
from utils.errors import errors_of
from utils.files.folders import describe_location
from utils.logger import get_logger
from utils.strings import counted, listed

if TYPE_CHECKING:
    from engine.teacher import TeacherFile

# Parameters, and pixels on each GPU, below which computing takes a fast GPU about as long as launching some thousand
# kernels takes its host: estimated, not measured.
SMALL_MODEL, FEW_PIXELS = 5_000_000, 32 * 640**2


@contextmanager
def build_run(ctx: DistributedContext, run: Run, watchdog: Watchdog) -> Iterator[Trainer]:
    """Yields the trainer of a run. Everything that can be rejected is checked before the run's folder is made.

    Args:
        watchdog: entered by the caller.
    """
    check_same_run(ctx, run)
    check_settings(ctx, run)
    attached = attached_hooks(ctx, run)  # first, as they may reject settings
    prepare_process(ctx, run)
    teacher = find_teacher(ctx, run)
    spec = open_run_data(ctx, run, teacher)
    fitness = Fitness.parse(run.config.fitness, class_names(spec, run.config.single_cls))
    model, pretrained, origin = build_model(ctx, run, spec)
    if teacher is not None:
        teacher.check(spec, model)
    if run.config.batch_size == FIND_BATCH_SIZE:
        from engine.train.batch_size import with_batch_that_fits

        run = with_batch_that_fits(ctx, run, model, build_loss(ctx, run, model, teacher), pixels=spec.pixels)
        check_settings(ctx, run)  # again, now that the batch size is known
    config = run.config
    if ctx.is_main:
        for line in unused_settings(ctx, run, model.head, channels=model.channels, tile=spec.tile):
            get_logger().warning("%s", line)
    train_loader = build_train_loader(ctx, config, run.hyp, spec, stride=model.stride)
    val_loader = build_val_loader(
        ctx, config, spec, stride=model.stride, tile=spec.tile, hyp=run.hyp, squares=model.head.squares
    )
    fitness.check_objects(val_loader.index.ground_truth())
    if ctx.is_main:
        warn_of_shared_images(spec, train_loader.index, val_loader.index)
        warn_of_small_boxes(train_loader.index, imgsz=config.imgsz, stride=model.stride)
    if run.checkpoint is not None:
        run.checkpoint.load_model(model)  # with its anchors, which the loss copies below
    elif model.head.anchors is not None:
        _fit_anchors(run, model, train_loader)
    plan = step_plan(config, len(train_loader))
    run = _with_lr_mult(ctx, run, train_loader, model, plan)
    if config.export:
        from engine.export.run import try_formats

        with torch_distributed_zero_first(ctx):
            if ctx.is_main:
                try_formats(model, config.export, config.imgsz)
    with ExitStack() as stack:
        run = stack.enter_context(open_folder(ctx, run))
        criterion = build_loss(ctx, run, model, teacher, loss_weights(run, model, train_loader.index))
        if ctx.is_main and not config.time:
            warn_of_few_steps(plan, from_weights=bool(config.weights))
        images = train_loader.global_images(0)
        step = build_step(ctx, run, model, criterion, pretrained=pretrained, plan=plan, images=images)
        _log_plan(run, step, plan)
        # Fingerprints depend on modification times. Machines with copies of their own have others: rank 0's count.
        indexes = (train_loader.samples.index, val_loader.samples.index)
        fingerprint = broadcast_object(ctx, "-".join(index.fingerprint_as_used() for index in indexes))
        progress = _restore(ctx, run, step, plan, epoch_batches=len(train_loader), fingerprint=fingerprint)
        description = _describe(run, spec, model, step.optimizer.name, pretrained, origin, fingerprint, teacher)
        checkpointer = Checkpointer(run.folder, ctx=ctx, description=description, period=config.save_period)
        truth, tiles = val_loader.index.ground_truth(), val_loader.samples.tiles
        evaluator = training_evaluator(ctx, step.ema.module, criterion, step.amp_dtype, truth, tiles)
        validation = Validation(evaluator, val_loader, config.val_every)
        hooks = [*core_hooks(ctx, config, fitness, train_loader), *attached, *late_hooks(config, fitness, validation)]
        for hook in hooks:
            stack.callback(hook.close)
        yield Trainer(run, step, train_loader, progress, RunControl(ctx, watchdog), checkpointer, hooks)


def core_hooks(
    ctx: DistributedContext, config: TrainConfig, fitness: Fitness, train_loader: InfiniteDataLoader
) -> list[Hook]:
    """The hooks that come first."""
    hooks = [
        Checkpoints(config.save_minutes * 60, config.save_steps),
        NonFiniteSteps(config.max_bad_steps),
        Results(fitness),
        ProgressBar(),
    ]
    if config.image_weights:
        from engine.hooks.class_weights import ClassWeights

        hooks.append(ClassWeights(train_loader))
    if config.time:
        from engine.hooks.stopping import TimeLimit

        hooks.append(TimeLimit(config.time))
    return [*hooks, ResultFiles()] if ctx.is_main else hooks


def attached_hooks(ctx: DistributedContext, run: Run) -> list[Hook]:
    """The hooks of what settings ask for. Raises UserError for settings that rule each other out, and for packages that
    are not installed."""
    config, hooks = run.config, []
    if ctx.eval_ranks or (run.checkpoint and run.checkpoint.hooks):
        from engine.evaluators.remote_validation import RemoteValidation

        hooks.append(RemoteValidation(ctx, config, run.checkpoint))
    if config.tracker and ctx.is_main:
        from engine.trackers.services import Services

        hooks.append(Services(config.tracker, run.folder.parent))
    if not config.noplots and ctx.is_main:
        from engine.report.plots import Plots

        hooks.append(Plots())
    if config.callbacks:
        from engine.callbacks import load_callbacks

        hooks.append(load_callbacks(config.callbacks))
    return hooks


def late_hooks(config: TrainConfig, fitness: Fitness, validation: Validation) -> list[Hook]:
    """The hooks that come last."""
    hooks: list[Hook] = [validation]
    if config.patience:
        from engine.hooks.stopping import EarlyStopping

        hooks.append(EarlyStopping(config.patience, fitness.name, validation.is_due))
    return [*hooks, Summary(fitness.name)]


def check_settings(ctx: DistributedContext, run: Run) -> None:
    """Raises UserError for what the settings and the processes alone rule out: at once, not after hours of copying or
    scanning images."""
    config = run.config
    if config.export and ctx.is_main:
        from engine.export.options import require_packages

        require_packages(config.export)
    if config.batch_size == FIND_BATCH_SIZE:
        from engine.train.batch_size import check_batch_search

        check_batch_search(ctx, config)
    check_step_settings(ctx, config)
    check_loader_settings(ctx, config, run.hyp)


def find_teacher(ctx: DistributedContext, run: Run) -> TeacherFile | None:
    """The model of ``--teacher`` or ``--keep-old``; None without them."""
    if not (run.config.teacher or run.config.keep_old):
        return None
    from engine.teacher import open_teacher

    return open_teacher(ctx, run)


def open_run_data(ctx: DistributedContext, run: Run, teacher: TeacherFile | None = None) -> DatasetSpec:
    """The training and validation splits of the run's data set, staged first with ``--stage``, and with ``--keep-old``
    with the classes of the teacher before its own. With ``--val-fraction`` the main process chooses the validation
    images of a new run; a resumed run has those of its checkpoint."""
    config = run.config
    stored_in = str(run.checkpoint.path) if run.checkpoint and run.data_root else ""
    spec = open_data(DataSource.of_training(config, known_root=run.data_root, stored_in=stored_in), ctx)
    if config.keep_old:
        spec = teacher.extended(spec, config.weights)
    if not config.val_fraction:
        return spec
    from data.folds import hold_out_validation

    names = run.checkpoint.val_images if run.checkpoint else []
    return hold_out_validation(ctx, config, spec, names)


def build_model(
    ctx: DistributedContext, run: Run, spec: DatasetSpec
) -> tuple[Detector, dict[str, tuple[int, ...]], dict[str, str]]:
    """The detector on its device, with starting weights and frozen layers; a resumed run's weights are loaded later.
    Also the parameters that came from weights when the run began: by name, the rows that were random; and the origin of
    these weights, as checkpoints store it."""
    names, checkpoint, channels = class_names(spec, run.config.single_cls), run.checkpoint, spec.pixels.channels
    if checkpoint is None:
        model, pretrained, source = build_starting_model(ctx, run.config, names, channels, resumed=None)
        origin = source._asdict()
        state = model.state_dict()
        from_files = [state[name] for name in pretrained]
    else:
        from engine.checkpoint.resume import check_classes

        check_classes(checkpoint, names, spec.source)
        with errors_of(checkpoint.path):
            model, _, _ = build_starting_model(ctx, run.config, names, channels, resumed=checkpoint.model_spec)
        origin = checkpoint.origin
        pretrained = {name: tuple(rows) for name, rows in checkpoint.pretrained.items()}
        from_files = list(checkpoint.model.values())
    check_same_model(ctx, model, from_files)
    return model, pretrained, origin


def build_loss(
    ctx: DistributedContext, run: Run, model: Detector, teacher: TeacherFile | None, weights: Tensor | None = None
) -> Criterion:
    """The loss of the model's head, on the device. It copies the anchors, so they must be final. ``weights``: of the
    classes, see `loss_weights`."""
    smoothing, layout = run.config.label_smoothing, run.config.channels_last
    built = teacher.build(model, channels_last=layout) if teacher else None
    loss = model.head.build_loss(run.hyp, teacher=built, label_smoothing=smoothing, class_weights=weights)
    return loss.to(ctx.device)


def loss_weights(run: Run, model: Detector, index: DatasetIndex) -> Tensor | None:
    """`class_weights` of the training split, with a line in the log; None without ``--cls-pw``."""
    if not run.config.cls_pw:
        return None
    weights = class_weights(index.boxes_of_classes(model.num_classes), run.config.cls_pw)
    shown = [f"{model.names[c]} {weights[c]:.3g}" for c in weights.argsort(descending=True, stable=True).tolist()]
    get_logger().info("--cls-pw %g: weights in the loss: %s", run.config.cls_pw, listed(shown))
    return weights


def _fit_anchors(run: Run, model: Detector, train_loader: InfiniteDataLoader) -> None:
    """Fits the anchors of a new run to the training boxes, alike on all processes."""
    from models.autoanchor import check_anchors

    config, sides = run.config, train_loader.index.sides_at(run.config.imgsz)
    refit = not config.noautoanchor
    report = check_anchors(sides, model, anchor_t=run.hyp.anchor_t, refit=refit, seed=config.seed)
    get_logger().info("%s", report.line)


def _with_lr_mult(
    ctx: DistributedContext, run: Run, train_loader: InfiniteDataLoader, model: Detector, plan: StepPlan
) -> Run:
    """``run`` with a number for ``lr_mult: null``, the learning rate factor of loaded parameters."""
    if run.hyp.lr_mult is not None:  # a resumed run has one
        return run
    config, samples = run.config, train_loader.samples
    lr_mult = 1.0
    if config.weights:
        from engine.optim.pretrained_rate import choose_lr_mult

        lr_mult = choose_lr_mult(ctx, config, samples, model, plan.total)
    return replace(run, hyp=replace(run.hyp, lr_mult=lr_mult))


def _log_plan(run: Run, step: TrainStep, plan: StepPlan) -> None:
    """Logs the optimizer and its rates with the reasons for them, and what a step is."""
    config, hyp, optimizer = run.config, run.hyp, step.optimizer
    why = "--optimizer"
    if run.checkpoint is not None and run.checkpoint.config.get("optimizer") == config.optimizer:
        why = "as when the run began"
    if config.optimizer == "auto":
        why = f"auto: {'at most' if plan.total <= SHORT_RUN else 'more than'} {SHORT_RUN:,} steps"
    rates = {group["is_new"]: group["initial_lr"] for group in optimizer.param_groups}
    base = RULES[optimizer.name].lr if hyp.lr0 is None else hyp.lr0
    reasons = [f"default {base:g}" if hyp.lr0 is None else "lr0"]
    reasons += ["raised for new layers in few steps"] if rates.get(True, base) > base else []
    reasons += [f"lr_factor {hyp.lr_factor:g}"] if hyp.lr_factor != 1 else []
    reasons += [f"lr_mult {hyp.lr_mult:g}"] if False in rates else []
    rate = f"{min(rates.values()):g}"
    if len(rates) == 2:
        rate = f"{rates[True]:g} for new layers, {rates[False]:g} for loaded ones"
    get_logger().info("%s (%s), learning rate %s (%s)", optimizer.name, why, rate, ", ".join(reasons))
    get_logger().info(
        "%s (%s of %d), each of %s of %s at %d px, in %s",
        counted(plan.total, "step"), counted(config.epochs, "epoch"), plan.steps, counted(plan.accumulate, "batch"),
        counted(config.batch_size, "image"), config.imgsz, str(step.amp_dtype or torch.float32).removeprefix("torch."),
    )  # fmt: skip
    log_small_batches(step.ctx, config, sum(p.numel() for p in optimizer.parameters))
    what = " and compiles the model" if config.compile else ""
    get_logger().info("starting; the first step is the slowest: it waits for the first batch%s", what)


def log_small_batches(ctx: DistributedContext, config: TrainConfig, parameters: int) -> None:
    """Names the settings that help where GPUs wait for their host."""
    images = config.batch_size // (ctx.world_size * len(ctx.devices))
    is_small = parameters < SMALL_MODEL and images * config.imgsz**2 < FEW_PIXELS
    if ctx.device.type == "cuda" and is_small and not config.compile:
        get_logger().info(
            "%s per GPU and batch: GPUs may wait for kernel launches; --compile or a larger --batch-size may be faster",
            counted(images, "image"),
        )


def _restore(
    ctx: DistributedContext, run: Run, step: TrainStep, plan: StepPlan, *, epoch_batches: int, fingerprint: str
) -> Progress:
    """Loads the state of a resumed run into its parts, frees the checkpoint's copy of it, and returns where the run
    continues."""
    if run.checkpoint is None:
        return Progress()
    from engine.checkpoint.resume import resumed_position

    run.checkpoint.restore(ctx, step)
    progress, lines = resumed_position(
        run.checkpoint,
        fingerprint=fingerprint,
        batch_size=run.config.batch_size,
        epoch_batches=epoch_batches,
        accumulate=plan.accumulate,
        epochs=run.config.epochs,
    )
    for line in lines:
        get_logger().info("%s", line)
    run.checkpoint.release_tensors()
    if not run.config.image_weights:
        progress.class_weights = []
    return progress


def _describe(
    run: Run,
    spec: DatasetSpec,
    model: Detector,
    rule: str,
    pretrained: dict[str, tuple[int, ...]],
    origin: dict[str, str],
    fingerprint: str,
    teacher: TeacherFile | None,
) -> RunDescription:
    root = "" if run.config.stage else str(spec.root)  # a staged copy is of this node alone
    data = describe_location(spec.source, root, run.folder) | {"fingerprint": fingerprint}
    config = asdict(run.config) | {"optimizer": rule}  # a longer run must not choose another when it resumes
    if config["data"] != "demo":
        config["data"] = data["source"]  # valid from any working folder
    return RunDescription(
        model_spec=model.spec,
        names=list(model.names),
        pretrained={name: list(rows) for name, rows in pretrained.items()},
        imgsz=run.config.imgsz,
        bits=spec.pixels.bits,
        hyp=asdict(run.hyp),
        config=config,
        data=data,
        val_images=sorted(spec.held_out),
        tile=spec.tile,
        origin=origin,
        teacher=teacher.stored if teacher else {},
    )
