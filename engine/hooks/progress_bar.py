"""Progress of an epoch: a bar on a terminal, plain lines elsewhere. It takes floats and never waits for the device."""

from __future__ import annotations

import math
import os
import sys
import time

import torch

from engine.hooks.hook import Action, Epoch, Hook, Training
from utils.logger import get_logger, terminal_bars
from utils.machine.resources import process_age_s
from utils.strings import format_duration

LINE_EVERY_S = 10.0
STATUS_EVERY_S = 0.1  # on a terminal, where tqdm draws no more often: the memory of a device takes long to read


class EpochBar:
    """Shows losses, images per second, the fraction of time spent waiting for data, memory, and the time left."""

    def __init__(
        self,
        total_steps: int,
        *,
        epoch: int,
        epochs: int,
        enabled: bool,
        done_steps: int = 0,
        device: torch.device | None = None,
        between_epochs_s: float = 0.0,
    ) -> None:
        """
        Args:
            total_steps: of an epoch.
            epoch: the current one, from 0.
            epochs: of the run.
            enabled: False shows nothing.
            done_steps: steps of this epoch that a former process has taken.
            device: of the run; the memory shown is what CUDA has reserved on it, or the process's resident memory.
            between_epochs_s: seconds that validation and saving take after an epoch, for the remaining time.
        """
        self._total, self._epoch, self._epochs, self._enabled = total_steps, epoch, epochs, enabled
        self._first, self._done, self._device, self._between_s = done_steps, done_steps, device, between_epochs_s
        self._images, self._wait_s = 0, 0.0
        self._values: dict[str, float] = {}
        self._started = self._line_at = time.monotonic()
        self._bar = None
        if enabled and (tqdm := terminal_bars(sys.stderr)) is not None:
            layout = "{desc} {percentage:3.0f}%|{bar:12}| {n_fmt}/{total_fmt} {postfix}"
            self._bar = tqdm(total=total_steps, initial=done_steps, bar_format=layout, dynamic_ncols=True, leave=True)
            self._bar.set_description_str(self._title, refresh=False)

    def update(self, values: dict[str, float], images: int, data_wait_s: float) -> None:
        """After a step: its values by name, its images over all processes, and the seconds that it waited for data."""
        self._done += 1
        self._images += images
        self._wait_s += data_wait_s
        self._values = values
        if not self._enabled:
            return
        if self._bar is not None:
            if time.monotonic() - self._line_at >= STATUS_EVERY_S:
                self._show_status()
            self._bar.update()
        elif time.monotonic() - self._line_at >= LINE_EVERY_S and self._done < self._total:
            self._write_line()

    def close(self) -> None:
        """Ends the bar, or writes the epoch's last line. A second call does nothing."""
        if not self._enabled:
            return
        self._enabled = False
        if self._bar is not None:
            self._show_status()
            self._bar.close()
        elif self._done > self._first:
            self._write_line()

    def speed(self) -> dict[str, float]:
        """Images per second over all processes and the fraction of time spent waiting for data, for results.csv; empty
        before the first step."""
        if self._done == self._first:
            return {}
        elapsed = max(time.monotonic() - self._started, 1e-9)
        return {"speed/images_per_s": self._images / elapsed, "speed/data_wait": min(self._wait_s / elapsed, 1.0)}

    @property
    def _title(self) -> str:
        return f"epoch {self._epoch + 1}/{self._epochs}"

    def _show_status(self) -> None:
        self._line_at = time.monotonic()
        self._bar.set_postfix_str(self._status(), refresh=False)

    def _write_line(self) -> None:
        self._line_at = time.monotonic()
        get_logger().info("%s  %d/%d  %s", self._title, self._done, self._total, self._status())

    def _status(self) -> str:
        elapsed = max(time.monotonic() - self._started, 1e-9)
        # Losses are read a step late, so the first step of an epoch has none yet: nan would look like a failure.
        parts = [f"{name} {value:.4g}" for name, value in self._values.items() if not math.isnan(value)]
        parts += [f"{self._images / elapsed:.1f} img/s", f"wait {min(self._wait_s / elapsed, 1.0):.0%}"]
        parts += [f"mem {memory_gb(self._device):.2f}G", f"left {format_duration(self._left_s(elapsed))}"]
        return "  ".join(parts)

    def _left_s(self, elapsed_s: float) -> float:
        step_s = elapsed_s / max(self._done - self._first, 1)
        epochs_left = self._epochs - self._epoch - 1
        steps_left = self._total - self._done + epochs_left * self._total
        return steps_left * step_s + (epochs_left + 1) * self._between_s


class ProgressBar(Hook):
    """Shows an `EpochBar` on rank 0, and puts the speed of an epoch into its row."""

    def __init__(self) -> None:
        self._bar: EpochBar | None = None
        self._is_first_step = True
        self._steps_done_at, self._between_s = 0.0, 0.0

    def before_epoch(self, trainer: Training) -> Action:
        if self._steps_done_at:
            self._between_s = time.monotonic() - self._steps_done_at
        self._bar = EpochBar(
            trainer.plan.steps,
            epoch=trainer.progress.epoch,
            epochs=trainer.epochs,
            enabled=trainer.ctx.is_main,
            done_steps=-(-trainer.progress.batch // trainer.plan.accumulate),
            device=trainer.ctx.device,
            between_epochs_s=self._between_s,
        )
        return Action.CONTINUE

    def after_step(self, trainer: Training) -> Action:
        if self._is_first_step and (age := process_age_s()) is not None:
            get_logger().info("first step %.1f s after the start", age)
        self._is_first_step = False
        losses = trainer.progress.mean_losses(trainer.step.criterion.names)
        self._bar.update(losses, images=trainer.images, data_wait_s=trainer.data_wait_s)
        return Action.CONTINUE

    def after_steps(self, trainer: Training, epoch: Epoch) -> Action:
        self._steps_done_at = time.monotonic()
        epoch.row |= self._bar.speed()
        self.close()
        return Action.CONTINUE

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._bar = None


def memory_gb(device: torch.device | None = None) -> float:
    """GB (10^9 bytes) that torch has reserved on a CUDA device, else the resident set of this process."""
    if device is not None and device.type == "cuda":
        return torch.cuda.memory_reserved(device) / 1e9
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e9
    except OSError:  # no /proc: the system reports only the peak
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak * (1 if sys.platform == "darwin" else 1024) / 1e9
