"""What runs in a loader's worker process: requests to batches, and the process's own settings."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import cv2
import torch

from data.sampler import BatchRequest
from utils.errors import UserError
from utils.machine.limits import explanation

PARENT_CHECK_S = 0.5  # until it notices, an orphan holds sockets by which other ranks would see that its parent died


@dataclass(frozen=True, slots=True)
class Failure:
    """A UserError on its way from a worker. Torch would wrap its message in a traceback."""

    message: str


class RequestDataset:
    """What torch takes for the data set: a request is an index. User errors, and what the machine refuses a worker,
    come back as `Failure`."""

    def __init__(self, make_batch: Callable[[BatchRequest], Any]) -> None:
        self.make_batch = make_batch

    def __getitem__(self, request: BatchRequest) -> Any:
        try:
            return self.make_batch(request)
        except UserError as error:
            return Failure(str(error))
        except Exception as error:
            line = explanation(error)
            if line is None:
                raise
            return Failure(line)


def init_worker(parent: int, worker: int) -> None:
    """One thread a worker, and signals left to the parent, so that Ctrl-C prints no tracebacks of workers, and a batch
    system's SIGTERM to every process lets the parent finish its step and save.

    Args:
        parent: its process id. Asking for it here would be too late: the parent may have been killed already.
        worker: number of the worker.
    """
    cv2.setNumThreads(0)
    torch.set_num_threads(1)
    sys.excepthook = _print_unless_parent_is_gone
    signal.set_wakeup_fd(-1)  # the parent's, which a fork shares
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "SIGUSR1"):
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # not on macOS, where SIGTERM just ends the worker
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_exit_with_parent, args=(parent,), daemon=True).start()


def _print_unless_parent_is_gone(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """A thread of multiprocessing that hands over tensors raises when the parent dies meanwhile."""
    if not issubclass(kind, ConnectionError | EOFError):
        sys.__excepthook__(kind, error, trace)


def _exit_with_parent(parent: int) -> None:
    """Obeys SIGTERM from the parent only, which is how torch and multiprocessing stop a worker. Ends the worker too
    when the parent is gone."""
    while os.getppid() == parent:
        received = signal.sigtimedwait({signal.SIGTERM}, PARENT_CHECK_S)
        if received is not None and received.si_pid == parent:
            break
    os._exit(0)
