"""Progress of an epoch: a bar on a terminal, plain lines elsewhere. It takes floats and never waits for the device."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from engine.train.ledger import Epoch
from engine.train.loop import Hook, Trainer
from utils.logger import get_logger, terminal_bars, terminal_columns
from utils.program import seconds_since_start
from utils.strings import format_duration

if TYPE_CHECKING:
    from tqdm import tqdm

STEP_LINE_EVERY_S = 10.0
STATUS_EVERY_S = 0.1  # interval on a terminal, tqdm's own: reading the memory of a device takes long
PACE_S = 120.0  # the time left follows from the steps of the last minutes
MIN_PACE_STEPS = 10
MIN_BAR_COLUMNS = 4
MAX_BAR_COLUMNS = 12


class ProgressBar(Hook):
    """Shows the time left, the fraction of time spent waiting for data, a GPU's memory, losses and images per second;
    puts the speed of an epoch into its row."""

    on_rank_0 = True

    def __init__(self) -> None:
        self._bar: tqdm | None = None
        self._epoch = 0  # that is counted, from 1; 0: none yet
        self._recent: deque[float] = deque()  # seconds of the steps of the last `PACE_S`
        self._recent_s = 0.0  # their sum

    def _begin(self, trainer: Trainer) -> None:
        """Begins to count an epoch, whose first step in this process has been taken."""
        if not self._epoch:
            get_logger().info("first step %.1f s after the start", seconds_since_start())
        self._epoch = trainer.progress.epoch + 1
        self._title = f"epoch {self._epoch}/{trainer.steps.epochs}"
        self._steps = trainer.steps.per_epoch
        self._done = math.ceil(trainer.progress.batch / trainer.steps.accumulate) - 1  # with those of an earlier start
        self._taken = 0  # steps of this process
        self._images = 0  # over all processes
        self._wait_s = 0.0  # spent waiting for data
        self._shown_at = self._started = self._stepped_at = trainer.epoch_started
        tqdm = terminal_bars(sys.stderr)
        if tqdm is not None:
            layout = bar_layout(self._title, self._steps, [], terminal_columns(sys.stderr))
            self._bar = tqdm(total=self._steps, initial=self._done, bar_format=layout, dynamic_ncols=True, leave=True)

    def after_step(self, trainer: Trainer) -> None:
        is_first = not self._epoch
        if self._epoch != trainer.progress.epoch + 1:
            self._begin(trainer)
        self._done += 1
        self._taken += 1
        self._images += trainer.step_samples
        self._wait_s += trainer.data_wait_s
        now = time.monotonic()
        if not is_first:  # the first step waits for the first batch
            self._recent.append(now - self._stepped_at)
            self._recent_s += self._recent[-1]
        while self._recent_s > PACE_S and len(self._recent) > MIN_PACE_STEPS:
            self._recent_s -= self._recent.popleft()
        self._stepped_at = now
        silent_s = now - self._shown_at
        if self._bar is not None:
            if silent_s >= STATUS_EVERY_S:
                self._show(trainer)
            self._bar.update()
        elif silent_s >= STEP_LINE_EVERY_S or self._done == self._steps:
            self._show(trainer)

    def epoch_trained(self, trainer: Trainer, epoch: Epoch) -> None:
        if self._epoch == epoch.number:  # this process has taken a step of it
            images_per_s, wait = self._speed()
            epoch.row |= {"speed/images_per_s": images_per_s, "speed/data_wait": wait}
        self.close()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._bar = None

    def _speed(self) -> tuple[float, float]:
        """Returns images per second, and the fraction of the time that was spent waiting for data."""
        elapsed_s = max(time.monotonic() - self._started, 1e-9)
        return self._images / elapsed_s, min(self._wait_s / elapsed_s, 1.0)

    def _show(self, trainer: Trainer) -> None:
        """Writes the status into the bar, or as a line, the most important first."""
        self._shown_at = time.monotonic()
        images_per_s, wait = self._speed()
        step_s = (self._shown_at - self._started) / self._taken
        if self._recent:
            step_s = self._recent_s / len(self._recent)
        epochs_left = trainer.steps.epochs - self._epoch
        steps_left = self._steps - self._done + epochs_left * self._steps
        left_s = steps_left * step_s + (epochs_left + 1) * trainer.between_epochs_s
        losses = trainer.progress.mean_losses(trainer.step.criterion.names)
        status = [f"left {format_duration(left_s)}", f"wait {wait:.0%}"]
        if trainer.ctx.device.type == "cuda":
            status.append(f"mem {torch.cuda.memory_reserved(trainer.ctx.device) / 1e9:.2f}G")
        # Losses are read a step late: the first step of an epoch has none yet, and nan would look like a failure.
        status += [f"{name} {value:.3g}" for name, value in losses.items() if not math.isnan(value)]
        status.append(f"{images_per_s:.1f} img/s")
        if self._bar is not None:
            self._bar.bar_format = bar_layout(self._title, self._steps, status, terminal_columns(sys.stderr))
        else:
            get_logger().info("%s  %d/%d  %s", self._title, self._done, self._steps, "  ".join(status))


def bar_layout(title: str, steps: int, status: Sequence[str], columns: int) -> str:
    """Returns the ``bar_format`` of tqdm for a terminal of ``columns``: as much of ``status`` as fits, from its start,
    and a bar in the rest of the line."""
    room = columns - len(f"{title} {steps}/{steps}") - 1  # some terminals wrap a line that is full
    shown = ""
    for item in status:
        if len(shown) + len(item) + 2 > room:
            break
        shown += f"  {item}"
    bar = min(room - len(shown) - len(" ||"), MAX_BAR_COLUMNS)
    between = f" |{{bar:{bar}}}| " if bar >= MIN_BAR_COLUMNS else " "
    return f"{title}{between}{{n_fmt}}/{{total_fmt}}{shown}"
