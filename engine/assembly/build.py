"""Assembles a training run from its settings: one page, in the order in which things happen."""

from __future__ import annotations

from contextlib import ExitStack

from data.dataset.spec import class_names
from data.loading.build import build_train_loader, open_train_samples
from engine.assembly.build_step import StepBatches, build_step, loaded_parameters
from engine.assembly.choices import choose_batch_size, choose_flips, choose_remaining
from engine.assembly.loss_and_validation import (
    build_criterion,
    build_validation,
    choose_class_weights,
    fit_model_anchors,
)
from engine.assembly.process_setup import advice_on_memory, prepare_process
from engine.assembly.run_checks import check_settings
from engine.assembly.run_data import open_run_data
from engine.assembly.run_description import describe_run
from engine.assembly.run_hooks import build_hooks, open_hook_resources
from engine.assembly.start_log import log_start
from engine.assembly.starting_model import build_run_model
from engine.assembly.unused_settings import warn_of_unused_settings
from engine.assembly.weights_probe import probe_weights
from engine.checkpoint.checkpointer import Checkpointer
from engine.checkpoint.data_identity import DataIdentity
from engine.export.parity import try_export
from engine.parallel.control import RunControl
from engine.parallel.watchdog import Watchdog
from engine.run.best_epoch import keep_best_epoch
from engine.run.folder import claim_folder
from engine.run.restore import EpochData, read_run_checkpoint, restore_run
from engine.run.run import ContinuedRun, Remaining, RunPlan
from engine.train.epoch_results import EpochResults
from engine.train.report_only import ReportOnlyTrainer
from engine.train.trainer import Trainer
from engine.train.validation import build_validator
from utils.distributed.context import DistributedContext
from utils.machine.limits import limits_as_user_errors


def build_training(ctx: DistributedContext, plan: RunPlan, watchdog: Watchdog, stack: ExitStack) -> Trainer:
    """Builds the trainer of a run, at the position of its checkpoint if it continues.

    All checks come before the run's folder is created, and checks that need no files come before any file is opened.

    Args:
        plan: result of `engine.run.plan.plan_run`.
        watchdog: entered by the caller.
        stack: receives everything that is closed when the run ends, such as hooks and the lock on the run's folder.

    Raises UserError for settings, data, a model or weights that do not allow a run.
    """
    # Checks that need only the settings and the processes.
    settings = plan.settings  # some are open (see `NewRun`), and chosen below as soon as they can be
    # The advice names the batch size of the settings at the time of the error.
    stack.enter_context(limits_as_user_errors(lambda: advice_on_memory(ctx, settings.config)))
    check_settings(ctx, settings)
    hook_resources = open_hook_resources(ctx, settings.config, plan.existing_folder)
    prepare_process(ctx, settings, plan.startup_messages)

    # The data, the model, and the loss, which depends on both.
    data = open_run_data(ctx, settings.config, plan.data_source, plan.started_from)
    settings = choose_flips(ctx, settings, class_names(data.spec, settings.config.single_cls))
    checkpoint = read_run_checkpoint(ctx, plan)  # None: a new run
    starting_model = build_run_model(ctx, settings, data, checkpoint)
    model = starting_model.model
    samples = open_train_samples(ctx, settings.config, settings.hyp, data.spec, stride=model.stride)
    train_index = samples.reader.image_index
    teacher = data.build_teacher(model)
    probe = None
    if checkpoint is None:
        probe = probe_weights(ctx, settings, samples, model)
        fit_model_anchors(ctx, settings, model, train_index, probe)
    class_weights = choose_class_weights(settings.config, model, train_index)
    criterion = build_criterion(ctx, settings, model, class_weights=class_weights, teacher=teacher)

    # The loaders, which need the batch size.
    settings = choose_batch_size(ctx, settings, model, criterion, samples)
    warn_of_unused_settings(ctx, settings, model.head, channels=model.channels, tile=data.spec.tile)
    train_loader = build_train_loader(ctx, settings.config, settings.hyp, samples, stride=model.stride)
    validation = build_validation(ctx, settings, data.spec, model, criterion)
    data.check_splits(ctx, train_index, validation.loader.index, imgsz=settings.config.imgsz, stride=model.stride)

    # The steps, whose number decides the last open settings.
    batches = StepBatches.of(train_loader, settings.config)
    steps = batches.steps
    settings, optimizer_reason = choose_remaining(settings, probe, steps)
    try_export(ctx, settings.config, model)
    loaded = loaded_parameters(starting_model.pretrained, settings, steps, checkpoint)
    step = build_step(ctx, settings, model, criterion, batches, loaded)

    # The state of the checkpoint, if there is one.
    identity = DataIdentity.of(samples.sample_index, validation.loader.samples.sample_index)
    epoch_data = EpochData.of(train_loader, identity=identity)
    position = restore_run(ctx, plan, checkpoint, step, epoch_data)
    progress = position.progress
    del checkpoint  # its tensors are in place

    # The folder, which is the first thing written, and the objects that write into it.
    run = claim_folder(ctx, plan, settings, stack, progress)
    description = describe_run(run, data, starting_model, loaded, identity)
    checkpointer = Checkpointer(run.folder, ctx=ctx, description=description, save_period=settings.config.save_period)
    if isinstance(plan, ContinuedRun) and plan.scores_epochs:
        keep_best_epoch(ctx, plan.started_from.description, checkpointer, progress)
    control = RunControl(ctx, watchdog)
    validator = build_validator(run, step, validation, control, description=description, plan=plan)
    stack.callback(validator.close)
    hooks = build_hooks(run, step, train_loader, validation, fitness=data.fitness, resources=hook_resources)
    for hook in hooks:
        stack.callback(hook.close)
    log_start(run, step, steps, optimizer_reason)
    trainer_class = ReportOnlyTrainer if run.remaining is Remaining.REPORT else Trainer
    return trainer_class(
        run=run,
        step=step,
        loader=train_loader,
        steps=steps,
        progress=progress,
        pending=position.pending,
        control=control,
        checkpointer=checkpointer,
        validator=validator,
        results=EpochResults(data.fitness),
        hooks=hooks,
    )
