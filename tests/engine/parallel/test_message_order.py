"""The messages of a step pair up in the order in which each process starts them. NCCL computes them in that order, and
waits forever if its peer starts them in another order; gloo, which the other tests use, accepts any order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.engine.parallel.pipeline_steps import SKIPPING, UNEQUAL, WHOLE, make_step, shards
from tests.helpers.tiny import TINY_MODEL
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


def exchanges(program: Sequence[Started]) -> list[tuple[Message, ...]]:
    return [started for started in program if not isinstance(started, Collective)]


def programs_of(
    world_size: int, model: dict, bounds: Sequence[tuple[int, int]], *, steps: int = 2, **settings: Any
) -> list[list[Started]]:
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
            step, _ = make_step(ctx, model, dtype=torch.float32, **settings)
            for update in range(1, steps + 1):
                step(shards(bounds), [end - start for start, end in bounds], update)
        programs.append(started)
    return programs


@pytest.mark.parametrize(
    ("bounds", "amp_dtype"),
    [(WHOLE, None), (UNEQUAL, None), ([(0, 2), (2, 4), (4, 6)], None), (UNEQUAL, torch.bfloat16)],
    ids=str,
)
@pytest.mark.parametrize(("model", "freeze"), [(TINY_MODEL, []), (SKIPPING, []), (SKIPPING, [0, 1, 2])])
def test_both_stages_of_a_pipeline_start_the_same_messages(model, freeze, bounds, amp_dtype):
    programs = programs_of(2, model, bounds, pipeline=True, freeze=freeze, amp_dtype=amp_dtype)
    assert are_computed(programs)
    batches = sum(end > start for start, end in bounds)
    counts = [len(exchanges(program)) for program in programs]
    assert counts == [2 * 2 * batches] * 2  # maps and gradients, in two steps


def test_pairs_of_a_pipeline_wait_for_each_other_only_in_sums():
    programs = programs_of(4, TINY_MODEL, UNEQUAL, pipeline=True)
    assert are_computed(programs)
    peers = [{message.peer for messages in exchanges(program) for message in messages} for program in programs]
    assert peers == [{1}, {0}, {3}, {2}]


@pytest.mark.parametrize(
    ("world_size", "virtual_ranks", "steps"), [(2, 2, 2), (2, 4, 2), (4, 4, 1), (4, 8, 1), (8, 8, 1)]
)
def test_virtual_ranks_exchange_in_one_order(world_size, virtual_ranks, steps):
    bounds = [(0, 2), (2, 3)]
    programs = programs_of(world_size, TINY_MODEL, bounds, pipeline=False, virtual_ranks=virtual_ranks, steps=steps)
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
