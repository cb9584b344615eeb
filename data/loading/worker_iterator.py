"""Torch's iterator over the batches of workers, which also ends the workers where torch's own would not.

It relies on private attributes of torch. Only the loader, which overrides `DataLoader._get_iterator`, relies on others;
tests/data/loading/test_worker_iterator.py lists both, and checks that torch still has them.
"""

from __future__ import annotations

import os

from torch.utils.data import DataLoader
from torch.utils.data._utils.signal_handling import _remove_worker_pids
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

PIN_THREAD_PATIENCE_S = 5.0  # longest wait for torch's pin-memory thread to end


class WorkerIterator(_MultiProcessingDataLoaderIter):
    """Starts workers and iterates over their batches.

    The workers also end if one of them fails to start, or if nobody closes the iterator.
    """

    def __init__(self, loader: DataLoader) -> None:
        self.owner_pid = os.getpid()
        try:
            super().__init__(loader)
        except BaseException:
            self._shutdown = True  # torch's destructor would use attributes that its constructor has not set yet
            self.kill_workers()
            raise

    def close(self) -> None:
        """Ends the workers as torch does, by a message to each."""
        self._shutdown_workers()

    def __del__(self) -> None:
        """Ends the workers of an iterator that nobody has closed.

        Torch's destructor would use their queues and sentinels. If a reference cycle was garbage-collected, these may
        already be finalized, and it would write to and close descriptors that belong to other objects by then.
        """
        if self._shutdown or os.getpid() != self.owner_pid:  # a forked process inherits the iterator, not the workers
            return
        self._shutdown = True
        _remove_worker_pids(id(self))  # torch would raise an error about workers that are killed
        if hasattr(self, "_pin_memory_thread"):
            self._pin_memory_thread_done_event.set()
            self._worker_result_queue.put((None, None))  # wakes the thread, which keeps this queue alive
            self._pin_memory_thread.join(PIN_THREAD_PATIENCE_S)
        self.kill_workers()

    def kill_workers(self) -> None:
        """Ends the workers that were started, without using any descriptor."""
        for worker in getattr(self, "_workers", ()):
            worker.kill()
            worker.join()
