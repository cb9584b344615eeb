"""Progress of an epoch: a bar on a terminal, plain lines elsewhere. It takes floats and never waits for the device."""

from __future__ import annotations

import math
import resource
import sys
import time

import torch

from engine.hooks.hook import Epoch, Hook, Training
from utils.logger import get_logger, terminal_bars
from utils.program import STARTED
from utils.strings import format_duration

LINE_EVERY_S = 10.0
STATUS_EVERY_S = 0.1  # on a terminal, where tqdm draws no more often: the memory of a device takes long to read


class ProgressBar(Hook):
    """Shows on rank 0 losses, images per second, the fraction of time spent waiting for data, memory, and the time
    left; puts the speed of an epoch into its row."""

    def __init__(self) -> None:
        self._bar = None  # of tqdm
        self._is_shown, self._is_first_step = False, True
        self._steps_done_at, self._between_s = 0.0, 0.0  # validation and saving take so long between two epochs

    def before_epoch(self, trainer: Training) -> None:
        self._started = self._line_at = time.monotonic()
        if self._steps_done_at:
            self._between_s = self._started - self._steps_done_at
        self._title = f"epoch {trainer.progress.epoch + 1}/{trainer.epochs}"
        self._epochs_left, self._total = trainer.epochs - trainer.progress.epoch - 1, trainer.plan.steps
        self._first = self._done = -(-trainer.progress.batch // trainer.plan.accumulate)
        self._images, self._wait_s, self._values = 0, 0.0, {}
        self._device, self._is_shown = trainer.ctx.device, trainer.ctx.is_main
        if self._is_shown and (tqdm := terminal_bars(sys.stderr)) is not None:
            layout = "{desc} {percentage:3.0f}%|{bar:12}| {n_fmt}/{total_fmt} {postfix}"
            self._bar = tqdm(total=self._total, initial=self._done, bar_format=layout, dynamic_ncols=True, leave=True)
            self._bar.set_description_str(self._title, refresh=False)

    def after_step(self, trainer: Training) -> None:
        if self._is_first_step:
            get_logger().info("first step %.1f s after the start", time.monotonic() - STARTED)
        self._is_first_step = False
        self._done += 1
        self._images += trainer.images
        self._wait_s += trainer.data_wait_s
        self._values = trainer.progress.mean_losses(trainer.step.criterion.names)
        since = time.monotonic() - self._line_at
        if self._bar is not None:
            if since >= STATUS_EVERY_S:
                self._show()
            self._bar.update()
        elif self._is_shown and since >= LINE_EVERY_S and self._done < self._total:
            self._show()

    def after_last_step(self, trainer: Training, epoch: Epoch) -> None:
        self._steps_done_at = time.monotonic()
        if self._done > self._first:
            speed, waiting = self._speed()
            epoch.row |= {"speed/images_per_s": speed, "speed/data_wait": waiting}
        self.close()

    def close(self) -> None:
        """Ends the bar, or writes the epoch's last line. A second call does nothing."""
        if self._is_shown and (self._bar is not None or self._done > self._first):
            self._show()
        if self._bar is not None:
            self._bar.close()
        self._bar, self._is_shown = None, False

    def _show(self) -> None:
        """As the status of the bar, or as a line."""
        self._line_at = time.monotonic()
        # Losses are read a step late, so the first step of an epoch has none yet: nan would look like a failure.
        parts = [f"{name} {value:.4g}" for name, value in self._values.items() if not math.isnan(value)]
        speed, waiting = self._speed()
        parts += [f"{speed:.1f} img/s", f"wait {waiting:.0%}", f"mem {memory_gb(self._device):.2f}G"]
        step_s = self._elapsed_s() / max(self._done - self._first, 1)
        steps_left = self._total - self._done + self._epochs_left * self._total
        left_s = steps_left * step_s + (self._epochs_left + 1) * self._between_s
        status = "  ".join([*parts, f"left {format_duration(left_s)}"])
        if self._bar is not None:
            self._bar.set_postfix_str(status, refresh=False)
        else:
            get_logger().info("%s  %d/%d  %s", self._title, self._done, self._total, status)

    def _elapsed_s(self) -> float:
        return max(time.monotonic() - self._started, 1e-9)

    def _speed(self) -> tuple[float, float]:
        """Images per second over all processes, and the fraction of time spent waiting for data."""
        return self._images / self._elapsed_s(), min(self._wait_s / self._elapsed_s(), 1.0)


def memory_gb(device: torch.device) -> float:
    """GB (10^9 bytes) that torch has reserved on a CUDA device, else the most that this process has had in memory."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device) / 1e9
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / 1e9
