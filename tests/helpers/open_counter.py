"""Counts how often the files below a folder are opened, by any process of this machine (Linux inotify)."""

from __future__ import annotations

import ctypes
import os
import select
import struct
from collections import Counter
from pathlib import Path

_IN_OPEN = 0x20
_IN_ISDIR = 0x40000000
_IN_Q_OVERFLOW = 0x4000
_EVENT = struct.Struct("iIII")


class OpenCounter:
    """A context manager: ``counts()`` returns the opens since it was entered or last called, by path relative to the
    folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> OpenCounter:
        libc = ctypes.CDLL(None, use_errno=True)
        self._handle = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        assert self._handle >= 0, os.strerror(ctypes.get_errno())
        self._watched: dict[int, str] = {}
        for folder, _, _ in os.walk(self._folder):
            watch = libc.inotify_add_watch(self._handle, os.fsencode(folder), _IN_OPEN)
            assert watch >= 0, os.strerror(ctypes.get_errno())
            self._watched[watch] = os.path.relpath(folder, self._folder)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._handle)

    def counts(self) -> Counter[str]:
        opened: Counter[str] = Counter()
        while select.select([self._handle], [], [], 0)[0]:
            block = os.read(self._handle, 1 << 20)
            while block:
                watch, mask, _, length = _EVENT.unpack_from(block)
                name = block[_EVENT.size : _EVENT.size + length].rstrip(b"\0").decode()
                block = block[_EVENT.size + length :]
                assert not mask & _IN_Q_OVERFLOW
                if not mask & _IN_ISDIR and name:
                    opened[os.path.normpath(os.path.join(self._watched[watch], name))] += 1
        return opened
