"""Streams and events of a fake GPU (`tests.helpers.fake_gpu`), which order work as CUDA does, and record it.

A stream does its own work in order. Work of another stream counts as done for it if it came before an event that the
stream has waited for. For the host, work counts as done if it came before an event or a stream that the host has waited
for, and work that the host starts afterwards comes after it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_READS = [torch.ops.aten.item.default, torch.ops.aten.is_nonzero.default, torch.ops.aten._local_scalar_dense.default]
Seen = Counter[int]  # stream to the number of its operations that are known to be done


class Entry(NamedTuple):
    """Something that happened on a stream."""

    stream: int  # 0: the default stream
    name: str  # "copy" from the host, "record" and "wait" of an event, "keep" (`Tensor.record_stream`)
    storage: int = 0  # of the tensor that is copied or kept


@dataclass(eq=False)
class FakeStream:
    """Stands in for `torch.cuda.Stream`."""

    order: StreamOrder
    number: int
    done: int = 0  # operations
    seen: Seen = field(default_factory=Counter)

    def record_event(self) -> FakeEvent:
        event = FakeEvent(self.order)
        event.record(self)
        return event

    def wait_event(self, event: FakeEvent) -> None:
        self.order.log.append(Entry(self.number, "wait"))
        self.seen |= event.seen

    def synchronize(self) -> None:
        self.order.wait("stream", self.state())

    def state(self) -> Seen:
        """Returns the operations known to be done once all of this stream's work is."""
        return self.seen | Seen({self.number: self.done})


class FakeEvent:
    """Stands in for `torch.cuda.Event`."""

    def __init__(self, order: StreamOrder, **options: bool) -> None:
        self._order = order
        self.seen: Seen = Counter()

    def record(self, stream: FakeStream | None = None) -> None:
        stream = stream or self._order.current
        self._order.log.append(Entry(stream.number, "record"))
        self.seen = stream.state()

    def synchronize(self) -> None:
        self._order.wait("event", self.seen)

    def elapsed_time(self, end: FakeEvent) -> float:
        return 1.0


class _Written(NamedTuple):
    """The stream and operation that wrote the newest values of a tensor's memory."""

    stream: int
    number: int  # of the operation on the stream


class StreamOrder(TorchDispatchMode):
    """While active, inside `fake_gpu`, fails on

    - operations on values that another stream, or the host, may not have finished writing;
    - operations on memory of another stream without `Tensor.record_stream`, which the allocator may reuse too early.

    Attributes:
        log: events and copies from the host, in the order in which the host asked for them.
        kernels: operations on tensors of the GPU, by stream.
        waits: the host's waits: for a "copy" from or to it, a "value" that it reads (0), an "event", a "stream", or the
            "device".
    """

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Entry] = []
        self.kernels: Counter[int] = Counter()
        self.waits: Counter[str] = Counter()
        self.host_seen: Seen = Counter()
        self.streams = [FakeStream(self, 0)]
        self.current = self.streams[0]
        self._written: dict[int, _Written] = {}  # by storage
        self._owner: dict[int, int] = {}  # storage of the GPU to the stream that has allocated it
        self._kept: set[tuple[int, int]] = set()  # storage, stream
        self._alive: list[Any] = []  # storages, whose numbers are then not used again
        self._patches = ExitStack()

    def __enter__(self) -> StreamOrder:
        stand_ins = {
            "Stream": self._new_stream,
            "Event": lambda **options: FakeEvent(self, **options),
            "stream": self._entered,
            "current_stream": lambda device=None: self.current,
            "synchronize": self._synchronize,
        }
        for name, stand_in in stand_ins.items():
            self._patches.enter_context(mock.patch(f"torch.cuda.{name}", stand_in))
        self._patches.enter_context(mock.patch.object(Tensor, "record_stream", lambda *given: self._keep(*given)))
        for name in ("numpy", "tolist"):
            self._patches.enter_context(mock.patch.object(Tensor, name, self._checked(getattr(Tensor, name))))
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._patches.close()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _READS and args[0].is_cuda:
            self.wait("value", self.current.state())
            return 0
        result = func(*args, **kwargs)
        if func.namespace == "prim":  # asks for the device
            return result
        taken = _tensors((args, kwargs))
        given = _tensors(result)
        is_on_gpu = any(tensor.is_cuda for tensor in (*taken, *given))
        for tensor in taken:
            self._check(tensor, func, is_on_gpu)
        if is_on_gpu:
            known = {_storage(tensor) for tensor in taken}
            made = [tensor for tensor in given if _storage(tensor) not in known]
            values = _by_name(func, args, kwargs)
            changed = _tensors([values.get(name) for name in _written_to(func)])
            self._note(taken, made, changed)
            copied = [tensor for tensor in taken if tensor.dim() or len(taken) == 1]  # others: numbers of an operation
            is_between = len({tensor.device.type for tensor in (*copied, *made)}) > 1
            if is_between and not values.get("non_blocking"):
                self.wait("copy", self.current.state())
        return result

    def wait(self, what: str, *seen: Seen) -> None:
        """Makes the host wait until work is done."""
        self.waits[what] += 1
        for part in seen:
            self.host_seen |= part

    def entries(self, tensor: Tensor) -> list[tuple[int, str]]:
        """Returns the streams and names in the log, without copies and memory of other tensors."""
        return [entry[:2] for entry in self.log if entry.storage in (0, _storage(tensor))]

    def _check(self, tensor: Tensor, what: object, is_on_gpu: bool) -> None:
        storage = _storage(tensor)
        stream = self.current
        written = self._written.get(storage)
        if written is not None:
            seen = stream.state() | self.host_seen if is_on_gpu else self.host_seen
            reader = f"stream {stream.number}" if is_on_gpu else "the host"
            assert seen[written.stream] >= written.number, f"{what}: {reader} did not wait for stream {written.stream}"
        owner = self._owner.get(storage)
        if is_on_gpu and owner is not None and owner != stream.number:
            is_kept = (storage, stream.number) in self._kept
            assert is_kept, f"{what}: stream {owner} may give away memory that stream {stream.number} uses"

    def _note(self, taken: list[Tensor], made: list[Tensor], changed: list[Tensor]) -> None:
        """Records a GPU operation that reads, creates and changes tensors."""
        stream = self.current
        stream.seen |= self.host_seen
        stream.done += 1
        self.kernels[stream.number] += 1
        from_host = any(tensor.device.type == "cpu" and tensor.dim() for tensor in taken)
        for tensor in made:
            self._alive.append(tensor.untyped_storage())
            if tensor.is_cuda:
                self._owner[_storage(tensor)] = stream.number
        for tensor in (*made, *changed):
            self._written[_storage(tensor)] = _Written(stream.number, stream.done)
            if tensor.is_cuda and from_host:
                self.log.append(Entry(stream.number, "copy", _storage(tensor)))

    def _new_stream(self, device: torch.device | None = None) -> FakeStream:
        self.streams.append(FakeStream(self, len(self.streams)))
        return self.streams[-1]

    def _synchronize(self, device: torch.device | None = None) -> None:
        self.wait("device", *(stream.state() for stream in self.streams))

    @contextmanager
    def _entered(self, stream: FakeStream | None) -> Iterator[None]:
        previous = self.current
        self.current = stream or previous
        yield
        self.current = previous

    def _keep(self, tensor: Tensor, stream: FakeStream) -> None:
        self.log.append(Entry(stream.number, "keep", _storage(tensor)))
        self._kept.add((_storage(tensor), stream.number))

    def _checked(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps ``function``, a method that reads values, to fail unless the host has waited for the values."""

        def read(tensor: Tensor, **options: bool) -> Any:
            self._check(tensor, function.__name__, is_on_gpu=False)
            return function(tensor, **options)

        return read


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _by_name(func: Any, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of an operation by name."""
    return {argument.name: value for argument, value in zip(func._schema.arguments, args)} | kwargs


def _written_to(func: Any) -> list[str]:
    """Returns the names of the arguments that an operation writes to."""
    return [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
