"""The messages of a step pair up in the order in which each process starts them. NCCL computes them in that order, and
waits forever if its peer starts them in another order; gloo, which the other tests use, accepts any order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from models.detector import build_detector
from tests.helpers.steps import make_train_step
from tests.helpers.tiny import TINY_MODEL, make_batch
from utils.distributed.context import DistributedContext

fake_pg = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
CPU = torch.device("cpu")


class Message(NamedTuple):
    """A part of a batch of sends and receives."""

    kind: str  # isend or irecv
    peer: int
    type: torch.dtype
    length: int


class Collective(NamedTuple):
    kind: str
    type: torch.dtype
    length: int


Started = tuple[Message, ...] | Collective  # what a process starts at once


@contextmanager
def process(rank: int, world_size: int) -> Iterator[list[Started]]:
    """Process ``rank`` of a group whose messages are recorded instead of sent; what is received is zero."""
    started: list[Started] = []

    def exchange(operations: Sequence[dist.P2POp]) -> list:
        for operation in operations:
            if operation.op is dist.irecv:
                operation.tensor.zero_()
        started.append(tuple(Message(o.op.__name__, o.peer, o.tensor.dtype, o.tensor.numel()) for o in operations))
        return []

    def collective(kind: str) -> Callable[..., None]:
        def call(tensor: Tensor, *args: object, **options: object) -> None:
            started.append(Collective(kind, tensor.dtype, tensor.numel()))

        return call

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=fake_pg.FakeStore())
    collectives = {name: collective(name) for name in ("all_reduce", "broadcast", "all_gather", "reduce_scatter")}
    try:
        with mock.patch.object(dist, "batch_isend_irecv", exchange), mock.patch.multiple(dist, **collectives):
            yield started
    finally:
        dist.destroy_process_group()


def are_computed(programs: Sequence[Sequence[Started]]) -> bool:
    """Returns whether all that the processes start is computed: a collective once it is next in all processes, a batch
    of messages once it is next in both, and each is the other's mirror image."""
    queues = [deque(program) for program in programs]
    is_moving = True
    while is_moving:
        is_moving = False
        for rank, queue in enumerate(queues):
            if not queue:
                continue
            if isinstance(queue[0], Collective):
                partners = range(len(queues))
                is_next = all(other and other[0] == queue[0] for other in queues)
            else:
                (peer,) = {message.peer for message in queue[0]}
                partners = (rank, peer)
                is_next = bool(queues[peer]) and queues[peer][0] == mirrored(queue[0], rank)
            if is_next:
                is_moving = True
                for partner in partners:
                    queues[partner].popleft()
    return not any(queues)


def mirrored(messages: Sequence[Message], rank: int) -> tuple[Message, ...]:
    """Returns what the peer of process ``rank`` starts for its ``messages``. Within a batch, sends and receives may be
    swapped."""
    kinds = {"isend": "irecv", "irecv": "isend"}
    both = [m._replace(kind=kinds[m.kind], peer=rank) for m in messages]
    return tuple(sorted(both, key=lambda message: message.kind != "isend"))


def programs_of(world_size: int, virtual_ranks: int, *, steps: int) -> list[list[Started]]:
    """Returns what each process starts in some steps with the same micro-batches."""
    programs = []
    for rank in range(world_size):
        ctx = DistributedContext(
            rank=rank,
            local_rank=rank,
            world_size=world_size,
            local_world_size=world_size,
            device=CPU,
            backend="fake",
            devices=(CPU,),
        )
        with process(rank, world_size) as started:
            step = make_train_step(ctx, build_detector(TINY_MODEL, 2, seed=1), virtual_ranks=virtual_ranks)
            for update in range(1, steps + 1):
                step([make_batch(6).shard(0, 2), make_batch(6).shard(2, 3)], [2, 1], update)
        programs.append(started)
    return programs


@pytest.mark.parametrize(
    ("world_size", "virtual_ranks", "steps"), [(2, 2, 2), (2, 4, 2), (4, 4, 1), (4, 8, 1), (8, 8, 1)]
)
def test_virtual_ranks_exchange_in_one_order(world_size, virtual_ranks, steps):
    programs = programs_of(world_size, virtual_ranks, steps=steps)
    assert are_computed(programs)
    levels = world_size.bit_length() - 1
    assert [len(program) for program in programs] == [steps * 2 * levels] * world_size  # halving and doubling


def test_messages_in_another_order_are_found():
    first = [(Message("isend", 1, torch.float32, 4),), (Message("irecv", 1, torch.float32, 4),)]
    second = [mirrored(messages, 0) for messages in first]
    assert are_computed([first, second])
    assert not are_computed([first, second[::-1]])
    assert not are_computed([first, [second[0], (second[1][0]._replace(length=5),)]])
    assert not are_computed([first, second[:1]])
    total = Collective("all_reduce", torch.float32, 4)
    assert are_computed([[*first, total], [*second, total]])
    assert not are_computed([[*first, total], [total, *second]])
