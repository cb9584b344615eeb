"""Progress of an epoch: a bar on a terminal, plain lines elsewhere. It takes floats and never waits for the device."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from engine.hooks.hook import Epoch, Hook, Training
from utils.logger import get_logger, terminal_bars, terminal_columns
from utils.program import STARTED
from utils.strings import format_duration

if TYPE_CHECKING:
    from tqdm import tqdm

LINE_EVERY_S = 10.0
STATUS_EVERY_S = 0.1  # on a terminal, where tqdm draws no more often: the memory of a device takes long to read
MIN_BAR_COLUMNS = 4
MAX_BAR_COLUMNS = 12


class ProgressBar(Hook):
    """Shows on rank 0 the time left, the fraction of time spent waiting for data, memory, losses and images per second;
    puts the speed of an epoch into its row."""

    def __init__(self) -> None:
        self._bar: tqdm | None = None
        self._is_shown = False
        self._is_first_step = True
        self._steps_done_at = 0.0
        self._between_s = 0.0  # seconds of validation and saving between two epochs

    def before_epoch(self, trainer: Training) -> None:
        self._started = self._line_at = time.monotonic()
        if self._steps_done_at:
            self._between_s = self._started - self._steps_done_at
        self._title = f"epoch {trainer.progress.epoch + 1}/{trainer.epochs}"
        self._epochs_left = trainer.epochs - trainer.progress.epoch - 1
        self._total = trainer.steps.per_epoch
        self._first = -(-trainer.progress.batch // trainer.steps.accumulate)
        self._done = self._first
        self._images = 0
        self._wait_s = 0.0
        self._values: dict[str, float] = {}
        self._device = trainer.ctx.device
        self._is_shown = trainer.ctx.is_main
        tqdm = terminal_bars(sys.stderr) if self._is_shown else None
        if tqdm is not None:
            layout = bar_layout(self._title, self._total, [], terminal_columns(sys.stderr))
            self._bar = tqdm(total=self._total, initial=self._done, bar_format=layout, dynamic_ncols=True, leave=True)

    def after_step(self, trainer: Training) -> None:
        if self._is_first_step:
            get_logger().info("first step %.1f s after the start", time.monotonic() - STARTED)
        self._is_first_step = False
        self._done += 1
        self._images += trainer.images
        self._wait_s += trainer.data_wait_s
        self._values = trainer.progress.mean_losses(trainer.step.criterion.names)
        silent_s = time.monotonic() - self._line_at
        if self._bar is not None:
            if silent_s >= STATUS_EVERY_S:
                self._show()
            self._bar.update()
        elif self._is_shown and silent_s >= LINE_EVERY_S and self._done < self._total:
            self._show()

    def after_last_step(self, trainer: Training, epoch: Epoch) -> None:
        self._steps_done_at = time.monotonic()
        if self._done > self._first:
            speed, waiting = self._speed()
            epoch.row |= {"speed/images_per_s": speed, "speed/data_wait": waiting}
        self.close()

    def after_steps(self, trainer: Training) -> None:
        self.close()

    def close(self) -> None:
        """Ends the bar, or writes the epoch's last line. A second call does nothing."""
        if self._is_shown and (self._bar is not None or self._done > self._first):
            self._show()
        if self._bar is not None:
            self._bar.close()
        self._bar = None
        self._is_shown = False

    def _show(self) -> None:
        """Writes the status into the bar, or as a line."""
        self._line_at = time.monotonic()
        status = self._status()
        if self._bar is not None:
            self._bar.bar_format = bar_layout(self._title, self._total, status, terminal_columns(sys.stderr))
        else:
            get_logger().info("%s  %d/%d  %s", self._title, self._done, self._total, "  ".join(status))

    def _status(self) -> list[str]:
        """Returns the items that are shown, the most important first."""
        step_s = self._elapsed_s() / max(self._done - self._first, 1)
        steps_left = self._total - self._done + self._epochs_left * self._total
        left_s = steps_left * step_s + (self._epochs_left + 1) * self._between_s
        speed, waiting = self._speed()
        # Losses are read a step late, so the first step of an epoch has none yet: nan would look like a failure.
        losses = [f"{name} {value:.3g}" for name, value in self._values.items() if not math.isnan(value)]
        left = f"left {format_duration(left_s)}"
        return [left, f"wait {waiting:.0%}", f"mem {memory_gb(self._device):.2f}G", *losses, f"{speed:.1f} img/s"]

    def _elapsed_s(self) -> float:
        """Returns the seconds since the first step of the epoch in this process; never 0."""
        return max(time.monotonic() - self._started, 1e-9)

    def _speed(self) -> tuple[float, float]:
        """Returns the images per second over all processes, and the fraction of time spent waiting for data."""
        return self._images / self._elapsed_s(), min(self._wait_s / self._elapsed_s(), 1.0)


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


def memory_gb(device: torch.device) -> float:
    """Returns GB (10^9 bytes) that torch has reserved on a CUDA device, else the peak memory of this process."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device) / 1e9
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / 1e9
