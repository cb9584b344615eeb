"""The lines of an epoch's progress."""

from __future__ import annotations

import math

from engine.reporting import progress_bar
from engine.reporting.progress_bar import EpochBar


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
