"""Host memory that a GPU may copy from by itself: locked where it lies, instead of copied to memory that is locked."""

from __future__ import annotations

import logging
import os

import torch

_log = logging.getLogger("lockstep")

PORTABLE = 1  # cudaHostRegisterPortable: for every device of the process


class PageLock:
    """Locks ranges of memory that were allocated without CUDA; tensors there are then pinned.

    Where the system refuses once (a limit on locked memory, a driver that cannot), nothing more is tried, and that is
    said. What is not locked is no less usable: torch copies it to pinned memory of its own.
    """

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._has_been_refused = False

    def lock(self, address: int, nbytes: int) -> bool:
        """Whether ``nbytes`` from ``address`` on are locked now. They must be to `unlock` before they are unmapped."""
        if self._has_been_refused:
            return False
        reason = self._register(address, nbytes)
        if reason is None:
            return True
        self._has_been_refused = True
        _log.info("batches are copied once more on their way to the GPU: their memory cannot be locked (%s)", reason)
        return False

    def unlock(self, address: int) -> None:
        if os.getpid() == self._owner:  # a forked worker has the finalizers of its parent, but no CUDA
            torch.cuda.cudart().cudaHostUnregister(address)

    def _register(self, address: int, nbytes: int) -> str | None:
        """None, or why not."""
        try:
            code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, PORTABLE))
        except (RuntimeError, AssertionError) as error:  # a torch without CUDA
            return str(error).splitlines()[0]
        if code == 0:
            return None
        _forget_last_error()
        return str(torch.cuda.CudaError(code))


def _forget_last_error() -> None:
    """CUDA remembers a thread's last error, and torch would blame it on the next kernel that this thread starts: let
    that be one of no consequence."""
    try:
        torch.zeros(1, device="cuda").add_(1)
    except RuntimeError:
        pass
