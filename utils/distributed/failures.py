"""Reports each failure of a run on exactly one rank, even if the failed process ended without a message."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

from utils.distributed.context import DistributedContext
from utils.distributed.store_barrier import process_key
from utils.errors import ExplainedError, PeerFailure, PeerLost, Stopped, UserError, first_line
from utils.process.entrypoint import error_line
from utils.process.identity import has_died

# Parts of a failed collective's message that mean that another process has ended.
_LOST_PEER_MARKS = ("gloo/transport", "Connection closed by peer", "Connection reset by peer", "NCCL error")


@contextmanager
def report_errors_once(ctx: DistributedContext) -> Iterator[None]:
    """Ensures that exactly one rank reports each failure.

    | error in this process | raised if it is the first of the run | raised otherwise |
    | --- | --- | --- |
    | UserError | UserError | PeerFailure |
    | a machine limit, as `run_main` explains it | the same | PeerFailure |
    | a bug | the bug | the bug |
    | a failed collective: another process ended | PeerLost, unless `spawn` reports it | PeerFailure |
    | a failed collective: /dev/shm is too small | UserError | PeerFailure |
    | PeerFailure | PeerFailure | PeerFailure |
    | Stopped, KeyboardInterrupt | the same, and it is not counted | the same |
    """
    try:
        yield
    except (PeerFailure, Stopped, KeyboardInterrupt):  # a stopped process has no failure to report
        raise
    except BaseException as error:
        if ctx.store is None:
            raise
        if _has_lost_peer(error):
            raise _peer_error(ctx.store, ctx.world_size, error) from None
        is_first = _is_first_to_report(ctx.store)  # also counts a bug: its traceback is the report
        line = error_line(error)
        if line is not None and not is_first:
            raise PeerFailure(line) from None
        raise


def _peer_error(store: dist.Store, world_size: int, error: BaseException) -> ExplainedError:
    """Returns the error to raise in place of a failed collective's."""
    lost = _explain_lost_peer(store, world_size, error)
    if lost is not None and _is_first_to_report(store):
        return lost
    return PeerFailure("another process of this run has ended")


def _has_lost_peer(error: BaseException) -> bool:
    """Returns whether a collective failed because another process ended."""
    if not isinstance(error, RuntimeError):
        return False
    return isinstance(error, dist.DistError) or any(mark in str(error) for mark in _LOST_PEER_MARKS)


def _explain_lost_peer(store: dist.Store, world_size: int, error: BaseException) -> UserError | None:
    """Explains a failed collective. Returns None if the lost process's launcher reports how it ended (`spawn`)."""
    message = str(error)
    if "timed out" in message.lower():
        return PeerLost(f"another process did not answer in time: {first_line(error)}")
    if "/dev/shm" in message:
        return UserError("NCCL needs more space in /dev/shm; start the container with --shm-size=8g or --ipc=host")
    if multiprocessing.parent_process() is None:
        process = _ended_process(store, world_size)
        return PeerLost(f"{process} was killed, has crashed or has exited; its launcher prints the signal or exit code")
    return None


def _ended_process(store: dist.Store, world_size: int) -> str:
    """Names a process that has ended, if it can be observed from this machine."""
    with suppress(dist.DistError):
        for _ in range(20):  # its connections are closed a moment before it is gone
            for rank in range(world_size):
                if has_died(store.get(process_key(rank)).decode()):
                    return f"process {rank} of {world_size}"
            time.sleep(0.05)
    return "another process of this run"


def _is_first_to_report(store: dist.Store) -> bool:
    """Returns whether this process is the first to report an error."""
    try:
        return store.add("user_error", 1) == 1
    except dist.DistError:  # the store is gone, and with it the rank that reported
        return False
