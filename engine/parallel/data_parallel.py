"""Several devices in one process: each computes a part of the batch with a copy of the model."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn


class DataParallel(nn.DataParallel):
    """`torch.nn.DataParallel` with one thread per device for the whole run, in the caller's autocast type.

    torch starts new threads at each call. cuDNN's plans belong to a thread: their kernels would be searched again at
    each step (pytorch#191744), and their memory is never freed (pytorch#169153). torch also passes on whether autocast
    is on but not its type: replicas would run in float16 without a gradient scaler.
    """

    def __init__(self, module: nn.Module, device_ids: Sequence[int] | None = None) -> None:
        super().__init__(module, device_ids=device_ids)
        self._threads: list[ThreadPoolExecutor] = []  # one per device

    def parallel_apply(self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Sequence[Any]) -> list[Any]:
        device = inputs[0][0].device.type
        modes = torch.is_grad_enabled(), torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)

        def run(replica: nn.Module, args: Sequence[Any], options: dict[str, Any]) -> Any:
            is_training, is_on, dtype = modes
            of_device, of_stream = nullcontext(), nullcontext()
            if args[0].is_cuda:
                of_device, of_stream = torch.cuda.device(args[0].device), torch.cuda.stream(streams[args[0].device])
            of_precision = torch.autocast(device, dtype, enabled=is_on)
            with of_device, of_stream, of_precision, torch.set_grad_enabled(is_training):
                return replica(*args, **options)

        streams = {args[0].device: torch.cuda.current_stream(args[0].device) for args in inputs if args[0].is_cuda}
        self._threads += [ThreadPoolExecutor(1) for _ in range(len(replicas) - len(self._threads))]
        calls = zip(self._threads, replicas, inputs, kwargs)
        running = [thread.submit(run, replica, args, options) for thread, replica, args, options in calls]
        return [future.result() for future in running]
