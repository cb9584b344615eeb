"""Builds the hooks of a run, in the order in which they are called."""

from __future__ import annotations

from dataclasses import dataclass

from data.loading.loader import InfiniteDataLoader
from engine.evaluation.fitness import Fitness
from engine.hooks.callbacks import UserCallbacks, load_callbacks
from engine.hooks.checkpointing import Checkpoints
from engine.hooks.class_weights import ClassWeights
from engine.hooks.end_log import ClassScores, Summary
from engine.hooks.hook import Hook
from engine.hooks.nonfinite import NonFiniteSteps
from engine.hooks.plots import Plots, check_plots
from engine.hooks.progress_bar import ProgressBar
from engine.hooks.stopping import EarlyStopping, TimeLimit
from engine.hooks.tracking import Service, Tracking, open_services
from engine.hooks.writers import TensorBoard
from engine.train.resume import TrainingRun
from engine.train.step import TrainStep
from engine.train.validation import RunValidation
from utils.config.settings import TrainConfig
from utils.distributed.context import DistributedContext
from utils.files.results_csv import ResultsTable


@dataclass(frozen=True, kw_only=True)
class HookResources:
    """External resources of the hooks, opened before the data so that a missing or unusable one fails early."""

    services: list[Service]  # those that ``--tracker`` names; empty except on rank 0
    callbacks: UserCallbacks | None  # None without ``--callbacks``


def open_hook_resources(ctx: DistributedContext, config: TrainConfig) -> HookResources:
    """Opens the external resources of the hooks. Raises UserError for packages that are not installed, accounts that
    are not set up, and callbacks that cannot be imported."""
    services = open_services(config.tracker) if ctx.is_main else []
    if config.plots and ctx.is_main:
        check_plots()
    callbacks = load_callbacks(config.callbacks) if config.callbacks else None
    return HookResources(services=services, callbacks=callbacks)


def build_hooks(
    run: TrainingRun,
    step: TrainStep,
    train_loader: InfiniteDataLoader,
    validation: RunValidation,
    table: ResultsTable,
    *,
    fitness: Fitness,
    resources: HookResources,
) -> list[Hook]:
    """Builds the hooks of a run, in the order in which they are called. ``table``: the results of the run."""
    config = run.config
    ctx = step.ctx
    hooks: list[Hook] = [Checkpoints(config.save_minutes * 60), NonFiniteSteps(), ProgressBar()]
    if config.image_weights:
        hooks.append(ClassWeights(train_loader))
    if config.time:
        hooks.append(TimeLimit(config.time))
    if ctx.is_main:
        tensorboard = TensorBoard(run.folder)
        hooks += [tensorboard, ClassScores(validation.evaluator.ground_truth, step.ema.module.names)]
        hooks += [Tracking(service, table) for service in resources.services]
        if config.plots:
            hooks.append(Plots(validation.loader.index, fitness, tensorboard))
    if resources.callbacks is not None:
        hooks.append(resources.callbacks)
    if config.patience:
        hooks.append(EarlyStopping(config.patience, fitness.name, val_every=config.val_every))
    hooks.append(Summary(fitness.name))
    return hooks
