"""Steps, learning rate and momentum as pure functions of the settings and the step, so there is no state to restore."""

from __future__ import annotations

import math
from dataclasses import dataclass

from utils.config.settings import Hyperparameters, TrainConfig
from utils.strings import counted

# Validation AP on BCCD by steps of batch 16: from random weights (160 px) 0.00 after 65 and 0.52 after 390, from
# yolov8n.pt (320 px) 0.48 after 39, 0.60 after 117 and 0.63 after 260. The demo set, from random weights (128 px): AP50
# 0.93 after 260.
ENOUGH_STEPS = 250
# From yolov8n.pt at 160 px on five sets of 140 to 240 images: 90 to 150 steps lose 0.02 to 0.06 AP against 180 to 300
# (benchmarks/LOG.md), and beyond 300 some sets gain and others lose.
ENOUGH_STEPS_FROM_WEIGHTS = 300
ABOUT = 0.8  # fraction of these numbers, which are rough, that is enough
# New layers learn faster in runs of fewer steps from weights.
MIN_STEPS_FROM_WEIGHTS = 100
MAX_ADVISED_EPOCHS = 100  # images that give too few steps in so many are too few themselves
# Up to this number of steps, new layers learn twice as fast.
FEW_STEPS = 50
# With fewer training images, pretrained weights give a much higher AP than random ones: on 140 and 296 images, 0.68 and
# 0.83 from YOLOX-nano, 0.15 and 0.37 from random weights (20 epochs, 320 px).
MANY_IMAGES = 1000


@dataclass(frozen=True)
class StepPlan:
    """The division of batches into optimizer steps."""

    accumulate: int  # batches per step; the last step of an epoch may have fewer
    per_epoch: int  # steps
    epochs: int  # epochs of the run; with ``--time``, changes once the duration of an epoch is known
    is_timed: bool = False  # with ``--time``

    @property
    def total(self) -> int:
        """Steps of the run."""
        return self.per_epoch * self.epochs

    @property
    def planned_steps(self) -> float:
        """Steps of the run, on which other choices depend; inf if its length is unknown (``--time``)."""
        return math.inf if self.is_timed else self.total


def step_plan(config: TrainConfig, epoch_batches: int) -> StepPlan:
    """Plans the steps of a run whose epochs have ``epoch_batches`` on each rank."""
    accumulate = max(round(config.nominal_batch / config.batch_size), 1)
    return StepPlan(
        accumulate, per_epoch=-(-epoch_batches // accumulate), epochs=config.epochs, is_timed=config.time > 0
    )


def epochs_in_time(done: int, seconds: float, total_s: float) -> int:
    """Returns how many epochs, at least ``done``, fit into ``total_s`` seconds if ``done`` epochs took ``seconds``.

    An epoch that would exceed the time by less than a twentieth of itself counts, because durations vary.
    """
    return done + max(math.floor((total_s - seconds) / seconds * done + 0.05), 0)


def few_steps_warning(steps: StepPlan, config: TrainConfig) -> str:
    """Returns a warning about a run with so few steps that its detector will be poor, and what gives enough: smaller
    batches, if they are larger than the default, or a number of epochs; "" if it has enough, or would not within
    `MAX_ADVISED_EPOCHS` of batches of the default size."""
    enough = _enough_steps(config)
    epochs = enough_epochs(steps, config)
    has_large_batches = steps.accumulate == 1 and config.batch_size > TrainConfig.batch_size
    if steps.total >= ABOUT * enough or (epochs > MAX_ADVISED_EPOCHS and not has_large_batches):
        return ""
    kind = "Fine-tuning" if config.weights else "Training from random weights"
    length = counted(steps.total, "step")
    smaller = ""
    if has_large_batches:
        length += f" of --batch-size {config.batch_size}"
        smaller = f"smaller batches (--batch-size {TrainConfig.batch_size}), or "
    return f"the run has only {length}. {kind} needs about {enough}: {smaller}--epochs {epochs}"


def _enough_steps(config: TrainConfig) -> int:
    return ENOUGH_STEPS_FROM_WEIGHTS if config.weights else ENOUGH_STEPS


def enough_epochs(steps: StepPlan, config: TrainConfig) -> int:
    """Returns the number of epochs with which a run has no longer few steps."""
    return -(-_enough_steps(config) // steps.per_epoch)


def random_weights_warning(images: int, *, weights: str, model: str) -> str:
    """Returns a warning about a run from random weights on so few training ``images`` that pretrained ones would give
    a much better detector, and the flag to add; "" if there is no reason for it."""
    if weights or images >= MANY_IMAGES:
        return ""
    place = f" in place of --model {model}" if model else ""
    trained = counted(images, "image")
    return (
        f"training starts from random weights, on {trained}. Pretrained ones give more in fewer epochs: "
        f"--weights yolox_s{place}"
    )


def new_layers_lr_mult(planned_steps: float) -> float:
    """Returns the factor on the learning rate of new layers in a run from weights.

    It is above 1, and at most 2, for fewer than `MIN_STEPS_FROM_WEIGHTS` steps, so that the layers move as far as they
    would in that many. ``planned_steps``: see `StepPlan`.

    Measured on four data sets: twice the rate adds 0.04 AP in runs of 36 to 60 steps, nothing in longer ones.
    """
    return max(MIN_STEPS_FROM_WEIGHTS / max(planned_steps, FEW_STEPS), 1.0)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Warm-up, then linear or cosine decay from 1 to ``final`` of the initial learning rate over the run.

    ``step`` counts optimizer steps from 0 to ``total_steps - 1``.
    """

    total_steps: int
    warmup_steps: int
    final: float
    cosine: bool
    momentum: float
    warmup_momentum: float
    warmup_bias_lr: float

    def decay(self, step: float) -> float:
        """Returns the factor on the initial learning rate, warm-up aside."""
        progress = min(max(step / max(self.total_steps - 1, 1), 0.0), 1.0)
        shape = (1 + math.cos(math.pi * progress)) / 2 if self.cosine else 1 - progress
        return self.final + (1 - self.final) * shape

    def learning_rate(self, step: int, initial: float, *, start: float = 0.0) -> float:
        """Returns the learning rate of a group whose initial one is ``initial``. Warm-up is linear, from ``start``."""
        target = initial * self.decay(step)
        if step >= self.warmup_steps:
            return target
        # step + 1: with a rate of 0 the first step would waste its batch
        return start + (target - start) * (step + 1) / (self.warmup_steps + 1)

    def momentum_at(self, step: int) -> float:
        """Returns the momentum, which rises linearly from ``warmup_momentum`` during warm-up."""
        if step >= self.warmup_steps:
            return self.momentum
        return self.warmup_momentum + (self.momentum - self.warmup_momentum) * step / self.warmup_steps


def build_schedule(hyp: Hyperparameters, steps: StepPlan, *, cosine: bool) -> Schedule:
    """Builds the schedule of a run. Warm-up takes at most a quarter of its steps."""
    return Schedule(
        total_steps=steps.total,
        warmup_steps=round(min(hyp.warmup_epochs * steps.per_epoch, steps.total // 4)),
        final=hyp.lrf,
        cosine=cosine,
        momentum=hyp.momentum,
        warmup_momentum=hyp.warmup_momentum,
        warmup_bias_lr=hyp.warmup_bias_lr,
    )
