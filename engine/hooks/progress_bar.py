"""Progress of an epoch: a bar on a terminal, plain lines elsewhere. It takes floats and never waits for the device."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from engine.hooks.hook import Epoch, Hook, Training
from utils.logger import get_logger, terminal_bars, terminal_columns
from utils.program import STARTED
from utils.strings import format_duration

if TYPE_CHECKING:
    from tqdm import tqdm

STEP_LINE_EVERY_S = 10.0
STATUS_EVERY_S = 0.1  # interval on a terminal, tqdm's own: reading the memory of a device takes long
MIN_BAR_COLUMNS = 4
MAX_BAR_COLUMNS = 12


@dataclass
class EpochMeter:
    """Counts the steps of an epoch in this process, and measures their speed."""

    title: str
    steps: int  # in the whole epoch
    taken_before: int  # steps that a resumed run has taken before
    epochs_left: int  # after this one
    done: int = field(init=False)  # steps, with those taken before
    images: int = 0  # over all processes
    wait_s: float = 0.0  # seconds spent waiting for data
    started: float = field(init=False)  # on the monotonic clock

    def __post_init__(self) -> None:
        self.done = self.taken_before
        self.started = time.monotonic()

    def count_step(self, images: int, wait_s: float) -> None:
        self.done += 1
        self.images += images
        self.wait_s += wait_s

    @property
    def has_steps(self) -> bool:
        """True if this process has taken a step of the epoch."""
        return self.done > self.taken_before

    def elapsed_s(self) -> float:
        """Returns the seconds since the start of the epoch in this process; never 0."""
        return max(time.monotonic() - self.started, 1e-9)

    def images_per_s(self) -> float:
        return self.images / self.elapsed_s()

    def wait_share(self) -> float:
        """Returns the fraction of the time that was spent waiting for data."""
        return min(self.wait_s / self.elapsed_s(), 1.0)

    def left_s(self, between_s: float) -> float:
        """Returns the seconds that the rest of the run will take, with ``between_s`` after each epoch."""
        step_s = self.elapsed_s() / max(self.done - self.taken_before, 1)
        steps_left = self.steps - self.done + self.epochs_left * self.steps
        return steps_left * step_s + (self.epochs_left + 1) * between_s


class ProgressBar(Hook):
    """Shows on rank 0 the time left, the fraction of time spent waiting for data, memory, losses and images per second;
    puts the speed of an epoch into its row."""

    _meter: EpochMeter  # for the newest epoch

    def __init__(self) -> None:
        self._bar: tqdm | None = None
        self._is_shown = False
        self._is_first_step = True
        self._shown_at = 0.0
        self._losses: dict[str, float] = {}
        self._device = torch.device("cpu")
        self._steps_done_at = 0.0
        self._between_s = 0.0  # seconds of validation and saving between two epochs

    def before_epoch(self, trainer: Training) -> None:
        self._meter = EpochMeter(
            title=f"epoch {trainer.progress.epoch + 1}/{trainer.epochs}",
            steps=trainer.steps.per_epoch,
            taken_before=math.ceil(trainer.progress.batch / trainer.steps.accumulate),
            epochs_left=trainer.epochs - trainer.progress.epoch - 1,
        )
        self._shown_at = self._meter.started
        if self._steps_done_at:
            self._between_s = self._meter.started - self._steps_done_at
        self._losses = {}
        self._device = trainer.ctx.device
        self._is_shown = trainer.ctx.is_main
        if self._is_shown:
            self._open_bar()

    def _open_bar(self) -> None:
        """Opens a bar, if there is a terminal for it."""
        tqdm = terminal_bars(sys.stderr)
        if tqdm is not None:
            meter = self._meter
            layout = bar_layout(meter.title, meter.steps, [], terminal_columns(sys.stderr))
            self._bar = tqdm(total=meter.steps, initial=meter.done, bar_format=layout, dynamic_ncols=True, leave=True)

    def after_step(self, trainer: Training) -> None:
        if self._is_first_step:
            get_logger().info("first step %.1f s after the start", time.monotonic() - STARTED)
        self._is_first_step = False
        self._meter.count_step(trainer.step_samples, trainer.data_wait_s)
        self._losses = trainer.progress.mean_losses(trainer.step.criterion.names)
        silent_s = time.monotonic() - self._shown_at
        if self._bar is not None:
            if silent_s >= STATUS_EVERY_S:
                self._show()
            self._bar.update()
        elif self._is_shown and silent_s >= STEP_LINE_EVERY_S and self._meter.done < self._meter.steps:
            self._show()

    def after_last_step(self, trainer: Training, epoch: Epoch) -> None:
        self._steps_done_at = time.monotonic()
        meter = self._meter
        if meter.has_steps:
            epoch.row |= {"speed/images_per_s": meter.images_per_s(), "speed/data_wait": meter.wait_share()}
        self.close()

    def after_steps(self, trainer: Training) -> None:
        self.close()

    def close(self) -> None:
        """Ends the bar, or writes the epoch's last line. A second call does nothing."""
        if self._is_shown and (self._bar is not None or self._meter.has_steps):
            self._show()
        if self._bar is not None:
            self._bar.close()
        self._bar = None
        self._is_shown = False

    def _show(self) -> None:
        """Writes the status into the bar, or as a line."""
        self._shown_at = time.monotonic()
        meter = self._meter
        status = self._status()
        if self._bar is not None:
            self._bar.bar_format = bar_layout(meter.title, meter.steps, status, terminal_columns(sys.stderr))
        else:
            get_logger().info("%s  %d/%d  %s", meter.title, meter.done, meter.steps, "  ".join(status))

    def _status(self) -> list[str]:
        """Returns the items that are shown, the most important first."""
        meter = self._meter
        # Losses are read a step late, so the first step of an epoch has none yet: nan would look like a failure.
        losses = [f"{name} {value:.3g}" for name, value in self._losses.items() if not math.isnan(value)]
        return [
            f"left {format_duration(meter.left_s(self._between_s))}",
            f"wait {meter.wait_share():.0%}",
            f"mem {memory_gb(self._device):.2f}G",
            *losses,
            f"{meter.images_per_s():.1f} img/s",
        ]


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
