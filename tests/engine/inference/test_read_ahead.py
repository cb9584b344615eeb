from __future__ import annotations

from engine.inference.read_ahead import MAX_AHEAD_BYTES, ReadAheadLimit


def test_large_images_are_not_read_ahead():
    ahead = ReadAheadLimit(16)
    assert ahead() == 0  # their size is unknown
    for size, count in ((1000, 16), (MAX_AHEAD_BYTES // 10, 10), (1000, 10), (MAX_AHEAD_BYTES + 1, 0)):
        ahead.add(size)
        assert ahead() == count
