"""The lines of an epoch's progress."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import struct
import termios
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from tqdm import tqdm

from engine.hooks import progress_bar
from engine.hooks.hook import Epoch
from engine.hooks.progress_bar import ProgressBar, bar_layout, memory_gb
from engine.optim.schedule import StepPlan
from models.detector import build_detector
from tests.helpers.steps import make_train_step
from tests.helpers.tiny import TINY_MODEL
from tests.helpers.training import HookTraining, hook_training
from utils.distributed.context import DistributedContext
from utils.logger import configure_logging, terminal_columns

OTHER = replace(DistributedContext.single(), rank=1, local_rank=1, world_size=2, local_world_size=2, backend="gloo")


def trainer_of(steps: int, *, epochs: int) -> HookTraining:
    plan = StepPlan(accumulate=1, per_epoch=steps, epochs=epochs)
    step = make_train_step(DistributedContext.single(), build_detector(TINY_MODEL, 2))
    return hook_training(steps=plan, step=step, step_samples=16)


def set_losses(trainer: HookTraining, *, box: float, cls: float, dfl: float) -> None:
    """Makes these the mean losses of the epoch."""
    trainer.progress.loss_sums = [box, cls, dfl]
    trainer.progress.finite_steps = 1


def test_without_a_terminal_progress_is_plain_lines(capsys, monkeypatch):
    configure_logging(True)
    now = [100.0]
    monkeypatch.setattr(progress_bar, "STARTED", 0.0)
    monkeypatch.setattr(progress_bar.time, "monotonic", lambda: now[0])
    bar = ProgressBar()
    trainer = trainer_of(20, epochs=4)
    epoch = Epoch(2)
    bar.before_epoch(trainer)
    bar.after_last_step(trainer, epoch)
    assert epoch.row == {}  # a resumed run may begin here
    now[0] += 10.0  # validation
    trainer.progress.epoch = 1
    trainer.data_wait_s = 0.5
    bar.before_epoch(trainer)
    for step in range(20):
        now[0] += 2.0
        bar.after_step(trainer)
        set_losses(trainer, box=1.25, cls=step + 1, dfl=0.5)
    bar.after_last_step(trainer, epoch)
    bar.close()
    captured = capsys.readouterr()
    first, *lines = captured.out.splitlines()
    assert first == "first step 112.0 s after the start"
    assert len(lines) == 4  # at 10, 20 and 30 s, and the end
    assert lines[0].startswith("epoch 2/4  5/20  left 2:20  ")  # 15 + 2 * 20 steps of 2 s, 3 validations of 10 s
    assert "  wait 25%  mem " in lines[0]
    assert lines[0].endswith("  box 1.25  cls 4  dfl 0.5  8.0 img/s")
    assert "\r" not in captured.out + captured.err
    assert epoch.row == {"speed/images_per_s": 8.0, "speed/data_wait": 0.25}


def test_losses_that_are_not_read_yet_are_not_shown_as_nan(monkeypatch, capsys):
    configure_logging(True)
    monkeypatch.setattr(progress_bar, "STEP_LINE_EVERY_S", 0.0)
    assert 0.01 < memory_gb(torch.device("cpu")) < 100
    bar = ProgressBar()
    trainer = trainer_of(2, epochs=1)
    for ctx, lines in ((OTHER, 0), (DistributedContext.single(), 1)):  # only rank 0 shows something
        trainer.ctx = ctx
        bar.before_epoch(trainer)
        bar.after_step(trainer)
        shown = [line for line in capsys.readouterr().out.splitlines() if "img/s" in line]
        assert len(shown) == lines
        assert "nan" not in "".join(shown)
        bar.close()
        capsys.readouterr()


def test_a_bar_reads_the_memory_at_most_every_tenth_of_a_second(monkeypatch):
    now = [100.0]
    reads = []
    shown = []
    bar = Mock()  # in place of tqdm's
    bar.update.side_effect = lambda: shown.append(bar.bar_format)
    monkeypatch.setattr(progress_bar, "terminal_bars", lambda stream: lambda **options: bar)
    monkeypatch.setattr(progress_bar, "terminal_columns", lambda stream: 200)
    monkeypatch.setattr(progress_bar, "memory_gb", lambda device: reads.append(device) or 3.5)
    monkeypatch.setattr(progress_bar.time, "monotonic", lambda: now[0])
    hook = ProgressBar()
    trainer = trainer_of(100, epochs=1)
    hook.before_epoch(trainer)
    for step in range(100):
        now[0] += 2**-6
        set_losses(trainer, box=step, cls=1.0, dfl=0.5)
        hook.after_step(trainer)
    hook.close()
    assert bar.update.call_count == 100
    assert len(reads) == 100 // 7 + 1  # and once at the end
    assert "wait 0%  mem 3.50G  box 6  cls 1  dfl 0.5  1024.0 img/s" in shown[6]
    assert "  box 99  " in bar.bar_format


STATUS = ["left 1:20:41", "wait 12%", "mem 11.17G", "box 1.17", "cls 0.925", "dfl 1.12", "162.4 img/s"]


@pytest.mark.parametrize("columns", [1, 20, 40, 60, 80, 100, 120, 200])
@pytest.mark.parametrize(("title", "steps"), [("epoch 1/2", 9), ("epoch 117/300", 12_345)])
def test_a_terminal_cuts_nothing_and_shows_the_time_left_first(title, steps, columns):
    """Each part is whole or absent, and what is shown is the start of the list."""
    stream = Terminal()
    bar = tqdm(total=steps, file=stream, bar_format=bar_layout(title, steps, STATUS, columns), mininterval=0)
    bar.n = steps
    bar.refresh()
    line = stream.getvalue().split("\r")[-1].rstrip()
    assert len(line) < columns or line == f"{title} {steps}/{steps}"
    shown = [part for part in STATUS if part in line]
    assert shown == STATUS[: len(shown)]
    assert line.endswith("  ".join([f"{steps}/{steps}", *shown]))
    if columns >= 80:
        assert shown[:3] == STATUS[:3]
    if columns >= 120:
        assert shown == STATUS
        assert line.startswith(f"{title} |")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_width_is_that_of_the_terminal_or_of_the_process_that_shows_it(monkeypatch):
    controller, terminal = pty.openpty()
    monkeypatch.setenv("COLUMNS", "123")
    with open(terminal, "w") as stream:
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 77, 0, 0))
        assert terminal_columns(stream) == 77
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 0, 0, 0, 0))  # not known
        assert terminal_columns(stream) == 123
    os.close(controller)
    assert terminal_columns(io.StringIO()) == 123
