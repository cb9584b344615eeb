"""The lines of an epoch's progress."""

from __future__ import annotations

import math

from engine.hooks import progress_bar
from engine.hooks.progress_bar import EpochBar


def test_losses_that_are_not_read_yet_are_not_shown_as_nan(monkeypatch):
    lines = []
    monkeypatch.setattr(progress_bar, "LINE_EVERY_S", 0.0)
    monkeypatch.setattr(progress_bar, "terminal_bars", lambda stream: None)
    monkeypatch.setattr(progress_bar.get_logger(), "info", lambda text, *values: lines.append(text % values))
    bar = EpochBar(3, epoch=1, epochs=4, enabled=True)
    bar.update({"box": math.nan, "cls": math.nan}, images=16, data_wait_s=0.0)
    bar.update({"box": 1.25, "cls": 0.5}, images=16, data_wait_s=0.0)
    assert "nan" not in lines[0]
    assert "img/s" in lines[0]
    assert lines[0].startswith("epoch 2/4  1/3")
    assert "box 1.25  cls 0.5" in lines[1]


def test_a_bar_reads_the_memory_at_most_every_tenth_of_a_second(monkeypatch):
    class Bar:
        """Stands in for tqdm."""

        def __init__(self, **options) -> None:
            self.shown, self.steps = [], 0

        def set_description_str(self, text, refresh) -> None: ...

        def set_postfix_str(self, text, refresh) -> None:
            self.shown.append((self.steps, text))

        def update(self) -> None:
            self.steps += 1

        def close(self) -> None: ...

    now, reads = [100.0], []
    monkeypatch.setattr(progress_bar, "terminal_bars", lambda stream: Bar)
    monkeypatch.setattr(progress_bar, "memory_gb", lambda device: reads.append(device) or 3.5)
    monkeypatch.setattr(progress_bar.time, "monotonic", lambda: now[0])
    bar = EpochBar(100, epoch=0, epochs=1, enabled=True)
    for step in range(100):
        now[0] += 2**-6
        bar.update({"box": float(step)}, images=16, data_wait_s=0.0)
    shown, steps = bar._bar.shown, bar._bar.steps
    bar.close()
    assert steps == 100
    assert len(reads) == 100 // 7 + 1  # and once at the end
    assert shown[0][1].startswith("box 6  1024.0 img/s  wait 0%  mem 3.50G")
    assert shown[-1][1].startswith("box 99  ")
