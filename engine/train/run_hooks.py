"""The hooks of a run, in the order in which they are called."""

from __future__ import annotations

from collections.abc import Sequence

from data.loading.loader import InfiniteDataLoader
from engine.evaluation.metrics import Fitness
from engine.hooks.callbacks import load_callbacks
from engine.hooks.checkpointing import Checkpoints
from engine.hooks.hook import Hook
from engine.hooks.nonfinite import NonFiniteSteps
from engine.hooks.plots import Plots
from engine.hooks.progress_bar import ProgressBar
from engine.hooks.remote_validation import RemoteValidation
from engine.hooks.results import ClassScores, ClassWeights, EpochResults, Summary
from engine.hooks.stopping import EarlyStopping, TimeLimit
from engine.hooks.trackers import open_services
from engine.hooks.validation import Validation
from engine.hooks.writers import ResultsCsv, TensorBoard
from engine.run.assembly import RunValidation
from engine.run.run import RunPlan, TrainingRun
from engine.train.step import TrainStep
from utils.distributed.context import DistributedContext


def build_optional_hooks(ctx: DistributedContext, plan: RunPlan) -> list[Hook]:
    """Builds the hooks that a setting turns on.

    Raises UserError for settings that rule each other out, and for packages that are not installed.
    """
    config = plan.settings.config
    hooks: list[Hook] = []
    if ctx.eval_ranks:
        hooks.append(RemoteValidation(ctx, config, plan.data_source))
    if config.tracker and ctx.is_main:
        hooks += open_services(config.tracker)
    if not config.noplots and ctx.is_main:
        hooks.append(Plots())
    if config.callbacks:
        hooks.append(load_callbacks(config.callbacks))
    return hooks


def build_hooks(
    ctx: DistributedContext,
    run: TrainingRun,
    step: TrainStep,
    train_loader: InfiniteDataLoader,
    validation: RunValidation,
    *,
    fitness: Fitness,
    optional_hooks: Sequence[Hook],
) -> list[Hook]:
    """Builds the hooks of a run, in the order in which they are called."""
    config = run.config
    hooks: list[Hook] = [Checkpoints(config.save_minutes * 60), NonFiniteSteps(), EpochResults(fitness), ProgressBar()]
    if config.image_weights:
        hooks.append(ClassWeights(train_loader))
    if config.time:
        hooks.append(TimeLimit(config.time))
    if ctx.is_main:
        hooks += [ResultsCsv(run.folder / "results.csv"), TensorBoard(run.folder)]
        hooks.append(ClassScores(validation.evaluator.ground_truth, step.ema.module.names))
    hooks += optional_hooks
    hooks.append(Validation(validation.evaluator, validation.loader, config.val_every))
    if config.patience:
        hooks.append(EarlyStopping(config.patience, fitness.name, val_every=config.val_every))
    hooks.append(Summary(fitness.name))
    return hooks
