"""Failures of several processes are reported once."""

from __future__ import annotations

import errno
from dataclasses import replace

import pytest
from torch import distributed as dist

from tests.helpers.messages import refused
from utils.distributed.context import DistributedContext
from utils.distributed.failures import report_errors_once
from utils.errors import PeerFailure, Stopped, UserError


def test_nccl_without_shared_memory_is_reported_once_with_the_remedy():
    """All processes fail at the same time, before any of them has reported it."""
    text = """NCCL error in: NCCLUtils.cpp:94, unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL 2.27
ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.
Last error:
Error while creating shared memory segment /dev/shm/nccl-1YsMbG (size 7340384), error: No space left on device (28)"""
    ctx = replace(DistributedContext.single(), local_rank=0, world_size=2, store=dist.HashStore())
    with (
        refused("NCCL needs more space in /dev/shm; start the container with --shm-size=8g or --ipc=host") as first,
        report_errors_once(ctx),
    ):
        raise dist.DistBackendError(text)
    assert type(first.value) is UserError
    with pytest.raises(PeerFailure), report_errors_once(ctx):
        raise dist.DistBackendError(text)


@pytest.mark.parametrize(
    ("error", "is_repeated"),
    [
        (UserError("data.yaml: no such file"), False),
        (OSError(errno.ENOSPC, "No space left on device", "runs/exp"), False),
        (MemoryError(), False),
        (ValueError("a bug"), True),
    ],
)
def test_of_a_failure_of_all_processes_only_bugs_are_reported_by_each(error, is_repeated):
    ctx = replace(DistributedContext.single(), local_rank=0, world_size=2, store=dist.HashStore())
    with pytest.raises(type(error)), report_errors_once(ctx):
        raise error
    with pytest.raises(type(error) if is_repeated else PeerFailure), report_errors_once(ctx):
        raise error


@pytest.mark.parametrize("stop", [Stopped(75), KeyboardInterrupt()])
def test_a_stopped_process_leaves_the_report_to_one_that_has_failed(stop):
    ctx = replace(DistributedContext.single(), local_rank=0, world_size=2, store=dist.HashStore())
    with pytest.raises(type(stop)), report_errors_once(ctx):
        raise stop
    with refused("the disk is full"), report_errors_once(ctx):
        raise UserError("the disk is full")
