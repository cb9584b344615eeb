"""Settings that a run may leave open, and that are chosen when data and model are known.

Each function returns the settings of the run with its choice. A run that continues has those of its checkpoint.
"""

from __future__ import annotations

from dataclasses import replace

from data.loading.build import build_train_sampler
from data.loading.open_samples import TrainSamples
from data.samples.augmented import AugmentedImages
from engine.optim.schedule import StepPlan, step_plan
from engine.run.run import RunSettings
from engine.train.batch_size import batch_that_fits
from engine.train.lr_probe import probe_lr_mult
from engine.train.run_checks import check_settings
from models.detector import Detector
from models.losses.base import Criterion
from utils.config.settings import FIND_BATCH_SIZE, TrainConfig
from utils.distributed.context import DistributedContext


def choose_batch_size(
    ctx: DistributedContext, settings: RunSettings, model: Detector, criterion: Criterion, samples: TrainSamples
) -> RunSettings:
    """Chooses the largest batch size that fits on the GPUs, for ``--batch-size -1``."""
    if settings.config.batch_size != FIND_BATCH_SIZE:
        return settings

    def plan_steps(config: TrainConfig) -> StepPlan:
        sampler = build_train_sampler(ctx, config, settings.hyp, samples, stride=model.stride)
        return step_plan(config, epoch_batches=len(sampler))

    pixels = samples.dataset.split_index.pixels
    batch_size = batch_that_fits(ctx, settings, model, criterion, plan_steps=plan_steps, pixels=pixels)
    chosen = replace(settings, config=replace(settings.config, batch_size=batch_size))
    check_settings(ctx, chosen)
    return chosen


def choose_lr_mult(
    ctx: DistributedContext, settings: RunSettings, dataset: AugmentedImages, model: Detector, steps: StepPlan
) -> RunSettings:
    """Chooses ``lr_mult`` by how well the weights detect the objects of ``dataset``, unless a recipe gives it."""
    if settings.hyp.lr_mult is not None:
        return settings
    lr_mult = 1.0
    if settings.config.weights:
        lr_mult = probe_lr_mult(ctx, settings.config, dataset, model, steps.total)
    return replace(settings, hyp=replace(settings.hyp, lr_mult=lr_mult))
