"""Private names of torch's loader: all that are used here are known, and torch still has them."""

from __future__ import annotations

from types import FunctionType

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from data.loading import worker_iterator
from data.loading.worker_iterator import WorkerIterator

# Set by the constructor of torch's iterator, the last two only with ``pin_memory`` on a GPU.
SET_BY_TORCH = {"_shutdown", "_workers", "_worker_result_queue", "_pin_memory_thread", "_pin_memory_thread_done_event"}
# Called on torch's iterator, or imported.
CALLED = {"_shutdown_workers", "_remove_worker_pids"}
# With `persistent_workers`, torch's loader calls the second and keeps its result in the first.
OF_THE_LOADER = {"_iterator", "_get_iterator"}


def private_names(function: FunctionType) -> set[str]:
    """Returns the private names that a function uses as attributes, globals, or arguments of `getattr`."""
    code = function.__code__
    strings = {value for value in code.co_consts if isinstance(value, str) and value.isidentifier()}
    names = strings.union(code.co_names)
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


def test_torch_has_the_private_names_that_its_iterator_is_extended_by():
    methods = [method for method in vars(WorkerIterator).values() if isinstance(method, FunctionType)]
    assert set().union(*map(private_names, methods)) == SET_BY_TORCH | CALLED
    assert private_names(_MultiProcessingDataLoaderIter.__init__) >= SET_BY_TORCH
    assert callable(_MultiProcessingDataLoaderIter._shutdown_workers)
    assert callable(worker_iterator._remove_worker_pids)


def test_torch_keeps_the_iterator_of_persistent_workers_in_the_loader():
    assert private_names(DataLoader.__iter__) >= OF_THE_LOADER
