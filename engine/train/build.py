"""Assembles a training run from its settings: one page, in the order in which things happen."""

from __future__ import annotations

from contextlib import ExitStack

from data.loading.build import build_train_loader, open_train_samples
from engine.checkpoint.checkpointer import Checkpointer
from engine.checkpoint.progress import Progress
from engine.export.trial import try_export
from engine.optim.schedule import step_plan
from engine.parallel.control import RunControl
from engine.parallel.watchdog import Watchdog
from engine.run.assembly import build_criterion, build_validation, choose_class_weights
from engine.run.best_epoch import keep_best_epoch
from engine.run.folder import claim_folder
from engine.run.process import advice_on_memory, prepare_process
from engine.run.restore import EpochData, restore_run
from engine.run.run import RunPlan
from engine.run.starting_model import build_run_model, fit_anchors, loaded_parameters
from engine.run.unused_settings import warn_of_unused_settings
from engine.train.build_step import FullBatch, build_step
from engine.train.choices import choose_batch_size, choose_lr_mult, choose_optimizer, name_data
from engine.train.run_checks import check_model, check_settings, check_splits
from engine.train.run_data import data_identity, describe_run, open_run_data
from engine.train.run_hooks import build_hooks, open_hook_parts
from engine.train.start_log import log_start, log_steps, warn_of_short_run
from engine.train.trainer import Trainer
from engine.train.validation import build_validator
from utils.distributed.context import DistributedContext
from utils.process.limits import limits_as_user_errors


def build_training(ctx: DistributedContext, plan: RunPlan, watchdog: Watchdog, stack: ExitStack) -> Trainer:
    """Builds the trainer of a run, at the position of its checkpoint if it continues.

    Everything that can be refused is checked before the run has a folder, and what needs no files before any is opened.

    Args:
        plan: what the command line asks for (`engine.run.plan.plan_run`).
        watchdog: entered by the caller.
        stack: what it holds is closed when the run ends: hooks, the run's folder and its lock.

    Raises UserError for settings, data, a model or weights with which no run is possible.
    """
    # What the settings and the processes alone rule out.
    settings = plan.settings  # some may be chosen below
    # Evaluated when an error is raised, so that it sees the batch size chosen by then.
    stack.enter_context(limits_as_user_errors(lambda: advice_on_memory(ctx, settings.config)))
    check_settings(ctx, settings)
    hook_parts = open_hook_parts(ctx, plan)
    prepare_process(ctx, settings, plan.startup_messages)

    # The data, the model, and the loss, which depends on both.
    data = open_run_data(ctx, plan)
    settings = name_data(settings, data.spec)
    starting_model = build_run_model(ctx, plan, data.spec)
    model = starting_model.model
    check_model(ctx, settings, model, data)
    samples = open_train_samples(ctx, settings.config, settings.hyp, data.spec, stride=model.stride)
    train_index = samples.reader.index
    fit_anchors(ctx, plan, model, train_index)
    class_weights = choose_class_weights(settings.config, model, train_index)
    teacher = data.build_teacher(model)
    criterion = build_criterion(ctx, settings, model, class_weights=class_weights, teacher=teacher)

    # The loaders and the steps, with the settings that follow from all these.
    settings = choose_batch_size(ctx, settings, model, criterion, samples)
    warn_of_unused_settings(ctx, settings, model.head, channels=model.channels, tile=data.spec.tile)
    train_loader = build_train_loader(
        ctx, settings.config, settings.hyp, data.spec, stride=model.stride, samples=samples
    )
    validation = build_validation(ctx, settings, data.spec, model, criterion)
    check_splits(ctx, data, train_index, validation.loader.index, imgsz=settings.config.imgsz, stride=model.stride)
    steps = step_plan(settings.config, len(train_loader))
    settings = choose_lr_mult(ctx, settings, samples, model, steps)
    settings = choose_optimizer(settings, steps)
    try_export(ctx, settings.config, model)
    warn_of_short_run(ctx, settings.config, steps)

    # The step, in the state of the checkpoint if there is one.
    loaded = loaded_parameters(starting_model, settings, steps, plan.checkpoint)
    step = build_step(ctx, settings, model, criterion, steps=steps, batch=FullBatch.of(train_loader), loaded=loaded)
    log_steps(plan, settings, step, steps)
    identity = data_identity(ctx, train_loader.samples.sample_index, validation.loader.samples.sample_index)
    progress = Progress()
    if plan.checkpoint is not None:
        epoch_data = EpochData.of(train_loader, fingerprint=identity["fingerprint"])
        progress = restore_run(ctx, plan.checkpoint, step, settings.config, epoch_data)

    # The folder, the first thing that is written, and what writes into it.
    run = claim_folder(ctx, plan, settings, stack, progress)
    description = describe_run(run, data, starting_model, loaded, identity)
    checkpointer = Checkpointer(run.folder, ctx=ctx, description=description, period=settings.config.save_period)
    if run.started_from is not None:
        keep_best_epoch(ctx, run.started_from.description, checkpointer, progress)
    validator = build_validator(
        run, step, validation, description=description, data_source=plan.data_source, stack=stack
    )
    hooks = build_hooks(ctx, run, step, train_loader, validation, fitness=data.fitness, parts=hook_parts)
    for hook in hooks:
        stack.callback(hook.close)
    log_start(settings.config)
    return Trainer(
        run=run,
        step=step,
        loader=train_loader,
        steps=steps,
        progress=progress,
        control=RunControl(ctx, watchdog),
        checkpointer=checkpointer,
        validator=validator,
        hooks=hooks,
    )
