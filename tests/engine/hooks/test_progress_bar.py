"""The lines of an epoch's progress."""

from __future__ import annotations

import math
from types import SimpleNamespace
from unittest.mock import Mock

import torch

from engine.hooks import progress_bar
from engine.hooks.hook import Epoch
from engine.hooks.progress_bar import ProgressBar, memory_gb
from utils.distributed.context import DistributedContext
from utils.logger import configure_logging

OTHER = DistributedContext(1, 1, 2, 2, 0, torch.device("cpu"), "gloo", (torch.device("cpu"),))


def trainer_of(steps: int, *, epoch: int, epochs: int, **losses: float) -> SimpleNamespace:
    shown = dict(losses)
    progress = SimpleNamespace(epoch=epoch, batch=0, mean_losses=lambda names: shown)
    step, plan = SimpleNamespace(criterion=SimpleNamespace(names=())), SimpleNamespace(steps=steps, accumulate=1)
    parts = {"progress": progress, "step": step, "plan": plan, "ctx": DistributedContext.single(), "losses": shown}
    return SimpleNamespace(**parts, epochs=epochs, images=16, data_wait_s=0.0)


def test_without_a_terminal_progress_is_plain_lines(capsys, monkeypatch):
    configure_logging(True)
    now = [100.0]
    monkeypatch.setattr(progress_bar, "STARTED", 0.0)
    monkeypatch.setattr(progress_bar.time, "monotonic", lambda: now[0])
    bar, trainer, epoch = ProgressBar(), trainer_of(20, epoch=0, epochs=4, box=math.nan), Epoch(2)
    bar.before_epoch(trainer)
    bar.after_last_step(trainer, epoch)
    assert epoch.row == {}  # a resumed run may begin here
    now[0] += 10.0  # validation
    trainer.progress.epoch, trainer.data_wait_s = 1, 0.5
    bar.before_epoch(trainer)
    for step in range(20):
        now[0] += 2.0
        bar.after_step(trainer)
        trainer.losses |= {"box": 1.25, "cls": step + 1}
    bar.after_last_step(trainer, epoch)
    bar.close()
    captured = capsys.readouterr()
    first, *lines = captured.out.splitlines()
    assert first == "first step 112.0 s after the start"
    assert len(lines) == 4  # at 10, 20 and 30 s, and the end
    assert lines[0].startswith("epoch 2/4  5/20  box 1.25  cls 4  8.0 img/s  wait 25%  mem ")
    assert lines[0].endswith("left 2:20")  # 15 + 2 * 20 steps of 2 s, 3 validations of 10 s
    assert "\r" not in captured.out + captured.err
    assert epoch.row == {"speed/images_per_s": 8.0, "speed/data_wait": 0.25}


def test_losses_that_are_not_read_yet_are_not_shown_as_nan(monkeypatch, capsys):
    configure_logging(True)
    monkeypatch.setattr(progress_bar, "LINE_EVERY_S", 0.0)
    assert 0.01 < memory_gb(torch.device("cpu")) < 100
    bar, trainer = ProgressBar(), trainer_of(2, epoch=0, epochs=1, box=math.nan)
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
    now, reads, bar = [100.0], [], Mock()  # in the place of tqdm's
    monkeypatch.setattr(progress_bar, "terminal_bars", lambda stream: lambda **options: bar)
    monkeypatch.setattr(progress_bar, "memory_gb", lambda device: reads.append(device) or 3.5)
    monkeypatch.setattr(progress_bar.time, "monotonic", lambda: now[0])
    hook, trainer = ProgressBar(), trainer_of(100, epoch=0, epochs=1)
    hook.before_epoch(trainer)
    for step in range(100):
        now[0] += 2**-6
        trainer.losses["box"] = float(step)
        hook.after_step(trainer)
    hook.close()
    shown = [call.args[0] for call in bar.set_postfix_str.call_args_list]
    assert bar.update.call_count == 100
    assert len(reads) == 100 // 7 + 1  # and once at the end
    assert shown[0].startswith("box 6  1024.0 img/s  wait 0%  mem 3.50G")
    assert shown[-1].startswith("box 99  ")
