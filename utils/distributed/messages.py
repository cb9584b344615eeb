"""Messages of tensors and plain data through the run's store, from processes that never wait for the reader.

The store outlives each process but the one that hosts it. So a reader that has died or is stopped neither blocks nor
fails the sender, as a collective, a send, or a call of torch.distributed.rpc with its rendezvous would.
"""

from __future__ import annotations

import io
from typing import Any

import torch
import torch.distributed as dist

_PIECE_BYTES = 4 << 20  # the store takes at most 8 MiB at once


def post(store: dist.Store, key: str, message: Any) -> None:
    """Stores ``message`` (tensors on the CPU, and plain data) as ``key``."""
    file = io.BytesIO()
    torch.save(message, file)
    content = file.getbuffer()
    starts = range(0, len(content), _PIECE_BYTES)
    for number, start in enumerate(starts):
        store.set(f"{key}/{number}", bytes(content[start : start + _PIECE_BYTES]))
    store.set(key, str(len(starts)))  # last: the message is complete


def read(store: dist.Store, key: str) -> Any:
    """The message; None if it has not been posted. It stays in the store."""
    if not store.check([key]):
        return None
    pieces = (store.get(f"{key}/{number}") for number in range(int(store.get(key))))
    return torch.load(io.BytesIO(b"".join(pieces)), weights_only=True)


def discard(store: dist.Store, key: str) -> None:
    """Frees the memory of a posted message."""
    number = int(store.get(key))
    store.delete_key(key)
    for piece in range(number):
        store.delete_key(f"{key}/{piece}")
