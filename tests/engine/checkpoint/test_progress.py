from __future__ import annotations

from engine.checkpoint.progress import Progress


def test_the_position_is_described_in_words():
    assert Progress(epoch=2).describe(10) == "2 epochs"
    assert Progress(epoch=2, batch=5).describe(10) == "epoch 3, batch 5 of 10"
    assert Progress(epoch=2, batch=10).describe(10) == "the steps of epoch 3"
