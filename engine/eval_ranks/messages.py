"""Messages between training and evaluating processes, in the run's store.

Nobody waits for the reader, who may have died or be stopped. A send, a collective, and the rendezvous of
torch.distributed.rpc would wait.
"""

from __future__ import annotations

import pickle
from typing import Any, cast

import torch.distributed as dist

_PIECE_BYTES = 4 << 20  # the store takes at most 8 MiB at once


def post_message(store: dist.Store, key: str, message: Any) -> None:
    """Stores ``message``, with tensors on the CPU, as ``key``, pickled like an object of torch.distributed."""
    content = memoryview(pickle.dumps(message))
    starts = range(0, len(content), _PIECE_BYTES)
    for number, start in enumerate(starts):
        piece = bytes(content[start : start + _PIECE_BYTES])
        store.set(f"{key}/{number}", cast(str, piece))  # torch takes bytes, too, but its stubs do not say so
    store.set(key, str(len(starts)))  # last: the message is complete


def read_message(store: dist.Store, key: str) -> Any:
    """Returns the message; None if it has not been posted. It stays in the store."""
    if not store.check([key]):
        return None
    pieces = [store.get(f"{key}/{number}") for number in range(int(store.get(key)))]
    return pickle.loads(b"".join(pieces))


def discard_message(store: dist.Store, key: str) -> None:
    """Frees the memory of a posted message."""
    pieces = int(store.get(key))
    store.delete_key(key)
    for number in range(pieces):
        store.delete_key(f"{key}/{number}")
