"""A training run, put together from its settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import torch

from data.index.index import DatasetIndex, warn_of_small_boxes
from data.loading.build import build_train_loader, build_val_loader, check_loader_settings, warn_of_shared_images
from data.loading.loader import InfiniteDataLoader, ValidationLoader
from data.open import open_data
from data.spec.dataset_spec import DatasetSpec, DataSource, class_names
from engine.checkpoint.checkpoint import Checkpoint, Progress, RunDescription
from engine.checkpoint.checkpointer import Checkpointer
from engine.evaluation.evaluator import training_evaluator
from engine.evaluation.metrics import Fitness
from engine.hooks.hook import Hook
from engine.hooks.progress_bar import ProgressBar
from engine.hooks.results import ClassWeights, Results, ResultsCsv, Summary, TensorBoard, Validation
from engine.hooks.stopping import Checkpoints, EarlyStopping, NonFiniteSteps, TimeLimit
from engine.optim.build import RULES, SHORT_RUN
from engine.optim.schedule import StepPlan, step_plan, warn_of_few_steps
from engine.parallel.control import RunControl, Watchdog
from engine.run import Run, claim_folder, prepare_process, unused_settings
from engine.train.step import TrainStep, build_step, check_step_settings
from engine.train.trainer import Trainer
from models.build import build_starting_model
from models.detector import Detector
from models.losses.base import Criterion, class_weights
from utils.config.settings import FIND_BATCH_SIZE, Hyperparameters, TrainConfig
from utils.distributed.agreement import check_same_model, check_same_run
from utils.distributed.context import DistributedContext, broadcast_object, torch_distributed_zero_first
from utils.errors import errors_of
from utils.files.folders import describe_location
from utils.logger import get_logger
from utils.strings import counted, listed

if TYPE_CHECKING:
    from engine.teacher import TeacherFile


@dataclass(frozen=True)
class Inputs:
    """What a run reads and builds before it has a folder."""

    spec: DatasetSpec
    train: InfiniteDataLoader
    val: ValidationLoader
    fitness: Fitness
    model: Detector
    teacher: TeacherFile | None
    pretrained: dict[str, tuple[int, ...]]  # see `build_model`
    origin: dict[str, str]  # of the weights


@contextmanager
def build_run(ctx: DistributedContext, run: Run, watchdog: Watchdog) -> Iterator[Trainer]:
    """Yields the trainer of a run. Everything that can be rejected is checked before the run's folder is made. The
    caller has entered ``watchdog``."""
    config, checkpoint = run.config, run.checkpoint
    check_same_run(ctx, config, run.hyp, checkpoint and asdict(checkpoint.progress))
    check_settings(ctx, config, run.hyp)
    attached = attached_hooks(ctx, run)  # before anything is opened, as they may reject settings
    prepare_process(ctx, config, run.hyp, run.lines)
    run, inputs = open_inputs(ctx, run)
    with ExitStack() as stack:
        run = stack.enter_context(claim_folder(ctx, run))
        trainer = build_trainer(ctx, run, inputs, attached, RunControl(ctx, watchdog))
        for hook in trainer.hooks:
            stack.callback(hook.close)
        yield trainer


def open_inputs(ctx: DistributedContext, run: Run) -> tuple[Run, Inputs]:
    """The run with the batch size and ``lr_mult`` that it chooses itself, and its checked inputs."""
    config, hyp, checkpoint, teacher = run.config, run.hyp, run.checkpoint, None
    if config.teacher or config.keep_old:
        from engine.teacher import open_teacher

        teacher = open_teacher(ctx, config, checkpoint)
    spec = open_run_data(ctx, run, teacher)
    fitness = Fitness.parse(config.fitness, class_names(spec, config.single_cls))
    model, pretrained, origin = build_model(ctx, config, checkpoint, spec)
    if teacher is not None:
        teacher.check(spec, model)
    if config.batch_size == FIND_BATCH_SIZE:
        from engine.train.batch_size import batch_that_fits

        found = batch_that_fits(ctx, run, model, build_loss(ctx, run, model, teacher), pixels=spec.pixels)
        run = replace(run, config=replace(config, batch_size=found))
        config = run.config
        check_settings(ctx, config, hyp)  # again, now that the batch size is known
    if ctx.is_main:
        for line in unused_settings(ctx, config, hyp, model.head, channels=model.channels, tile=spec.tile):
            get_logger().warning("%s", line)
    train = build_train_loader(ctx, config, hyp, spec, stride=model.stride)
    val = build_val_loader(ctx, config, spec, stride=model.stride, tile=spec.tile, hyp=hyp, squares=model.head.squares)
    fitness.check_objects(val.index.ground_truth())
    if ctx.is_main:
        warn_of_shared_images(spec, train.index, val.index)
        warn_of_small_boxes(train.index, imgsz=config.imgsz, stride=model.stride)
    if checkpoint is not None:
        checkpoint.load_model(model)  # with its anchors, which the loss copies
    elif model.head.anchors is not None:
        from models.autoanchor import check_anchors

        sides, refit = train.index.sides_at(config.imgsz), not config.noautoanchor
        get_logger().info("%s", check_anchors(sides, model, anchor_t=hyp.anchor_t, refit=refit, seed=config.seed))
    if hyp.lr_mult is None:  # a resumed run has one
        lr_mult = 1.0
        if config.weights:
            from engine.optim.pretrained_rate import choose_lr_mult

            lr_mult = choose_lr_mult(ctx, config, train.samples, model, step_plan(config, len(train)).total)
        run = replace(run, hyp=replace(hyp, lr_mult=lr_mult))
    if config.export:
        from engine.export.run import try_formats

        with torch_distributed_zero_first(ctx):
            if ctx.is_main:
                try_formats(model, config.export, config.imgsz)
    return run, Inputs(spec, train, val, fitness, model, teacher, pretrained, origin)


def build_trainer(
    ctx: DistributedContext, run: Run, inputs: Inputs, attached: Sequence[Hook], control: RunControl
) -> Trainer:
    """The trainer of a run that has its folder, at the position of its checkpoint."""
    config, model, train, val = run.config, inputs.model, inputs.train, inputs.val
    criterion = build_loss(ctx, run, model, inputs.teacher, train.index)
    plan = step_plan(config, len(train))
    if ctx.is_main and not config.time:
        warn_of_few_steps(plan, from_weights=bool(config.weights))
    images = train.global_images(0)
    has_regions = bool(train.index.crowd.any()) or train.samples.tiles is not None  # moving tiles cut objects
    step = build_step(
        ctx, run, model, criterion, pretrained=inputs.pretrained, plan=plan, images=images, has_regions=has_regions
    )
    log_plan(run, step, plan)
    # Fingerprints depend on modification times. Machines with copies of their own have others: rank 0's count.
    indexes = (train.samples.index, val.samples.index)
    fingerprint = broadcast_object(ctx, "-".join(index.fingerprint_as_used() for index in indexes))
    progress = Progress()
    if run.checkpoint is not None:
        from engine.checkpoint.resume import restore_run

        progress = restore_run(ctx, run.checkpoint, step, config, len(train), fingerprint)
    description = describe_run(run, inputs, step.optimizer.name, fingerprint)
    checkpointer = Checkpointer(run.folder, ctx=ctx, description=description, period=config.save_period)
    evaluator = training_evaluator(ctx, step.ema.module, criterion, step.amp_dtype, val)
    validation = Validation(evaluator, val, config.val_every)
    fitness = inputs.fitness
    hooks = [
        Checkpoints(config.save_minutes * 60),
        NonFiniteSteps(),
        Results(fitness),
        ProgressBar(),
        *([ClassWeights(train)] if config.image_weights else []),
        *([TimeLimit(config.time)] if config.time else []),
        *([ResultsCsv(run.folder / "results.csv"), TensorBoard(run.folder)] if ctx.is_main else []),
        *attached,
        validation,
        *([EarlyStopping(config.patience, fitness.name, validation.is_due)] if config.patience else []),
        Summary(fitness.name),
    ]
    return Trainer(run, step, train, progress, control, checkpointer, hooks)


def attached_hooks(ctx: DistributedContext, run: Run) -> list[Hook]:
    """The hooks of what settings ask for. Raises UserError for settings that rule each other out, and for packages that
    are not installed."""
    config, hooks = run.config, []
    if ctx.eval_ranks or (run.checkpoint and run.checkpoint.hooks):
        from engine.evaluators.remote_validation import RemoteValidation

        hooks.append(RemoteValidation(ctx, config, run.checkpoint))
    if config.tracker and ctx.is_main:
        from engine.trackers import open_services

        hooks += open_services(config.tracker)
    if not config.noplots and ctx.is_main:
        from engine.report.plots import Plots

        hooks.append(Plots())
    if config.callbacks:
        from engine.callbacks import load_callbacks

        hooks.append(load_callbacks(config.callbacks))
    return hooks


def check_settings(ctx: DistributedContext, config: TrainConfig, hyp: Hyperparameters) -> None:
    """Raises UserError for what the settings and the processes alone rule out: at once, not after hours of copying or
    scanning images."""
    if config.export and ctx.is_main:
        from engine.export.options import require_packages

        require_packages(config.export)
    if config.batch_size == FIND_BATCH_SIZE:
        from engine.train.batch_size import check_batch_search

        check_batch_search(ctx, config)
    check_step_settings(ctx, config)
    check_loader_settings(ctx, config, hyp)


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
    ctx: DistributedContext, config: TrainConfig, checkpoint: Checkpoint | None, spec: DatasetSpec
) -> tuple[Detector, dict[str, tuple[int, ...]], dict[str, str]]:
    """The detector on its device, with starting weights and frozen layers; a resumed run's weights are loaded later.
    Also the parameters that came from weights when the run began: by name, the rows that were random; and the origin of
    these weights, as checkpoints store it."""
    names, channels = class_names(spec, config.single_cls), spec.pixels.channels
    if checkpoint is None:
        model, pretrained, source = build_starting_model(ctx, config, names, channels, resumed=None)
        origin = source._asdict()
        state = model.state_dict()
        from_files = [state[name] for name in pretrained]
    else:
        from engine.checkpoint.resume import check_classes

        check_classes(checkpoint, names, spec.source)
        with errors_of(checkpoint.path):
            model, _, _ = build_starting_model(ctx, config, names, channels, resumed=checkpoint.model_spec)
        origin = checkpoint.origin
        pretrained = {name: tuple(rows) for name, rows in checkpoint.pretrained.items()}
        from_files = list(checkpoint.model.values())
    check_same_model(ctx, model, from_files)
    return model, pretrained, origin


def build_loss(
    ctx: DistributedContext, run: Run, model: Detector, teacher: TeacherFile | None, train: DatasetIndex | None = None
) -> Criterion:
    """The loss of the model's head, on the device. It copies the anchors, so they must be final. ``train``: the
    training split, for ``--cls-pw``; None: all classes count alike."""
    config, weights = run.config, None
    if config.cls_pw and train is not None:
        weights = class_weights(train.boxes_of_classes(model.num_classes), config.cls_pw)
        shown = [f"{model.names[c]} {weights[c]:.3g}" for c in weights.argsort(descending=True, stable=True).tolist()]
        get_logger().info("--cls-pw %g: weights in the loss: %s", config.cls_pw, listed(shown))
    built = teacher.build(model) if teacher else None
    smoothing = config.label_smoothing
    loss = model.head.build_loss(run.hyp, teacher=built, label_smoothing=smoothing, class_weights=weights)
    return loss.to(ctx.device)


def log_plan(run: Run, step: TrainStep, plan: StepPlan) -> None:
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
    what = " and compiles the model" if config.compile else ""
    get_logger().info("starting; the first step is the slowest: it waits for the first batch%s", what)


def describe_run(run: Run, inputs: Inputs, rule: str, fingerprint: str) -> RunDescription:
    """What all checkpoints of the run say of its settings, data and model. ``rule``: the optimizer's."""
    spec, model = inputs.spec, inputs.model
    root = "" if run.config.stage else str(spec.root)  # a staged copy is of this node alone
    data = describe_location(spec.source, root, run.folder) | {"fingerprint": fingerprint}
    config = asdict(run.config) | {"optimizer": rule}  # a longer run must not choose another when it resumes
    if config["data"] != "demo":
        config["data"] = data["source"]  # valid from any working folder
    return RunDescription(
        model_spec=model.spec,
        names=list(model.names),
        imgsz=run.config.imgsz,
        bits=spec.pixels.bits,
        hyp=asdict(run.hyp),
        config=config,
        data=data,
        val_images=sorted(spec.held_out),
        tile=spec.tile,
        pretrained={name: list(rows) for name, rows in inputs.pretrained.items()},
        origin=inputs.origin,
        teacher=inputs.teacher.stored if inputs.teacher else {},
    )
