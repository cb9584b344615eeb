"""The rank and device of this process, as a value that is made once and passed on.

A `DistributedContext` is derived from the environment that the launcher sets (`utils.distributed.launch`).
"""

from __future__ import annotations

import datetime
import gc
import itertools
import multiprocessing
import os
import re
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from utils.distributed.launch import Launch, read_launch
from utils.distributed.rendezvous import all_gather_json, launcher_name, open_store, rendezvous_error
from utils.distributed.store_barrier import has_died
from utils.errors import PeerFailure, Stopped, UserError, first_line
from utils.machine.resources import boot_id

_BROKEN = ("gloo/transport", "Connection closed by peer", "Connection reset by peer", "NCCL error")


@dataclass(frozen=True)
class DistributedContext:
    """One process's position in the run. Ranks count from 0; ``local_rank`` is -1 when there is no process group."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int
    device: torch.device
    backend: str  # "" when there is no process group
    devices: tuple[torch.device, ...]  # more than one only for DataParallel in a single process
    store: dist.Store | None = field(default=None, repr=False, compare=False)
    launcher: str = ""  # identifies the torchrun process that started this one; "" without torchrun
    eval_ranks: int = 0  # processes that are not among these, but validate for them
    _turns: Iterator[int] = field(default_factory=itertools.count, repr=False, compare=False)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def is_distributed(self) -> bool:
        return self.local_rank >= 0

    @property
    def is_node_leader(self) -> bool:
        return self.local_rank in (-1, 0)

    @staticmethod
    def single(device: torch.device | str = "cpu") -> DistributedContext:
        """A run of one process on one device."""
        device = torch.device(device)
        _make_current(device)
        return DistributedContext(0, -1, 1, 1, 0, device, "", (device,))

    @staticmethod
    def from_environment(
        device: str = "",
        local_rank: int | None = None,
        *,
        eval_ranks: int = 0,
        timeout_s: float = 1800.0,
    ) -> DistributedContext:
        """The context of this process, which joins the process group if it was launched as one of several.

        Args:
            device: the value of `--device`: "", "cpu", "mps", "0", "0,1", "cuda:1".
            local_rank: the flag of this name, used if the variable is not set.
            eval_ranks: the last so many processes are a group of their own, with ranks from 0, and so are the others.
                They exchange messages in the store that `evaluators` returns.
            timeout_s: timeout of collectives.

        Raises:
            UserError: the environment is incomplete, a device does not exist, or a port is in use.
        """
        launch = read_launch(local_rank)
        if launch is None:
            devices = parse_devices(device)
            return replace(DistributedContext.single(devices[0]), devices=devices)
        store = open_store(launch, timeout_s)
        try:
            if (first := store.compare_set("eval ranks", "", str(eval_ranks)).decode()) != str(eval_ranks):
                raise UserError(f"process {launch.rank} has --eval-ranks {eval_ranks}, another of this run {first}")
            position = _locate_on_node(store, launch, device, eval_ranks)
        except dist.DistError as error:  # another process has ended, and the store with it
            raise rendezvous_error(launch, error) from None
        rank, world_size = launch.rank, launch.world_size - eval_ranks
        if rank >= world_size:
            rank, world_size, eval_ranks, store = rank - world_size, eval_ranks, 0, evaluators(store)
        backend = "cpu:gloo,cuda:nccl" if position.device.type == "cuda" else "gloo"
        _make_current(position.device)
        timeout = datetime.timedelta(seconds=timeout_s)
        try:
            store.set_timeout(timeout)
            prefixed = dist.PrefixStore("group", store)
            dist.init_process_group(backend, store=prefixed, rank=rank, world_size=world_size, timeout=timeout)
        except (RuntimeError, ValueError) as error:  # errors of torch, and of gloo if another process exits meanwhile
            raise rendezvous_error(launch, error) from None
        return DistributedContext(
            **position._asdict(),
            rank=rank,
            world_size=world_size,
            backend=backend,
            devices=(position.device,),
            store=store,
            launcher=launcher_name(),
            eval_ranks=eval_ranks,
        )

    def close(self) -> None:
        """Leaves the process group.

        It cannot be used afterwards. If something (such as a DDP model) keeps gloo's threads alive, the interpreter may
        exit while one of them releases a tensor, and the process aborts.
        """
        if self.is_distributed and dist.is_initialized():
            gc.collect()
            dist.destroy_process_group()

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Leaves the process group after the block, also after `Stopped`, but not after a failure: an orderly exit
        would wait for a collective that may be running."""
        try:
            yield
        except Stopped as stop:
            traceback.clear_frames(stop.__traceback__)
            self.close()
            raise
        self.close()


def evaluators(store: dist.Store) -> dist.Store:
    """The part of the run's store that belongs to the evaluating processes, with the messages to and from them."""
    return dist.PrefixStore("evaluators", store)


def _make_current(device: torch.device) -> None:
    """Makes a GPU the default of CUDA events, streams and pinned copies."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def parse_devices(device: str) -> tuple[torch.device, ...]:
    """Parses ``--device``; several devices are possible with CUDA only. Raises UserError for devices that do not
    exist."""
    text = device.strip().lower().replace("cuda:", "")
    if not text and not torch.cuda.is_available():
        text = "mps" if torch.backends.mps.is_available() else "cpu"
    if text == "cpu":
        return (torch.device("cpu"),)
    if text == "mps":
        if not torch.backends.mps.is_available():
            raise UserError("--device mps: no Apple GPU is available here; use --device cpu")
        return (torch.device("mps"),)
    numbers = ["0"] if text in ("", "cuda") else [part.strip() for part in text.split(",") if part.strip()]
    if not numbers or not all(re.fullmatch("[0-9]{1,9}", part) for part in numbers):
        raise UserError(f"--device {device}: must be cpu, mps, a GPU number, or several such as 0,1")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    absent = [part for part in numbers if int(part) >= count]
    if absent:
        have = f"this machine has GPUs 0 to {count - 1}" if count else "no CUDA GPU is available here; use --device cpu"
        raise UserError(f"--device {device}: there is no GPU {absent[0]}; {have}")
    if len(set(numbers)) < len(numbers):
        raise UserError(f"--device {device}: a GPU is named twice")
    return tuple(torch.device("cuda", int(part)) for part in numbers)


class _NodePosition(NamedTuple):
    local_rank: int
    local_world_size: int
    node_rank: int
    device: torch.device


def _locate_on_node(store: dist.Store, launch: Launch, device: str, eval_ranks: int = 0) -> _NodePosition:
    """The position of this process on its node. What the launcher does not set is derived from the machines' names, in
    the same way on all processes. Every process of the run must call this.

    Ranks on the node are counted separately for the processes that train and those that evaluate. The latter use the
    CPU unless every node has as many GPUs as processes of both kinds.

    Raises UserError on all training processes of a node that has fewer devices than these.
    """
    devices = _devices_for_ranks(device)
    known = (launch.node_rank, launch.local_rank, launch.local_world_size)
    notes: list[Any] = all_gather_json(store, "node", launch, [machine_name(), *known, _identities(devices)])
    machines = [note[0] for note in notes]
    if any(None in note[1:4] for note in notes):
        order = list(dict.fromkeys(machines))  # by the lowest rank on each
        node_rank = order.index(machines[launch.rank])
        local_rank = machines[: launch.rank].count(machines[launch.rank])
        local_world_size = machines.count(machines[launch.rank])
        nodes = machines
    else:
        node_rank, local_rank, local_world_size = notes[launch.rank][1:4]
        nodes = [note[1] for note in notes]
    ranks = {node: [rank for rank, other in enumerate(nodes) if other == node] for node in nodes}
    # A launcher may make different GPUs visible to each process, which then sees fewer than there are processes.
    counts = {node: len({uuid for rank in ranks[node] for uuid in notes[rank][4]}) for node in nodes}
    number, count = local_rank, counts[nodes[launch.rank]]
    if eval_ranks:
        here, first = ranks[nodes[launch.rank]], launch.world_size - eval_ranks
        number = here.index(launch.rank)  # evaluating processes come last, and so do their GPUs
        same = [rank for rank in here if (rank >= first) == (launch.rank >= first)]
        local_rank, local_world_size = same.index(launch.rank), len(same)
        if launch.rank >= first and any(len(ranks[node]) > counts[node] for node in ranks):
            devices = ()
    if not devices:
        return _NodePosition(local_rank, local_world_size, node_rank, torch.device("cpu"))
    if local_world_size > count:
        raise UserError(f"{local_world_size} processes on this node but {count} GPUs: lower --nproc_per_node")
    return _NodePosition(local_rank, local_world_size, node_rank, devices[number % len(devices)])


def machine_name() -> str:
    """Identifies the machine by host name and boot id: hosts may share a name, and containers a kernel."""
    return f"{os.uname().nodename} {boot_id()}"


def _devices_for_ranks(device: str) -> tuple[torch.device, ...]:
    """The visible GPUs, one of which this process uses; empty if processes run on the CPU."""
    text = device.strip().lower()
    if text == "cpu" or (text == "" and not torch.cuda.is_available()):
        return ()
    if text == "mps":
        raise UserError("--device mps: supports one process only; start without torchrun")
    devices = parse_devices(device)
    if text in ("", "cuda"):
        devices = tuple(torch.device("cuda", i) for i in range(torch.cuda.device_count()))
    return devices


def _identities(devices: Sequence[torch.device]) -> list[str]:
    """Names of GPUs that do not depend on which GPUs are visible."""
    return [str(torch.cuda.get_device_properties(device).uuid) for device in devices]


@contextmanager
def report_errors_once(ctx: DistributedContext) -> Iterator[None]:
    """Reports each failure once. If several ranks raise a `UserError`, it becomes `PeerFailure` on all but the first of
    them; so does the failure of a collective after another process has ended, unless that left no message."""
    try:
        yield
    except PeerFailure:
        raise
    except UserError as error:
        if ctx.store is None or _is_reporter(ctx.store):
            raise
        raise PeerFailure(str(error)) from None
    except RuntimeError as error:
        text = str(error)
        if ctx.store is None:
            raise
        if not (isinstance(error, dist.DistError) or any(mark in text for mark in _BROKEN)):
            _is_reporter(ctx.store)
            raise
        if "timed out" in text.lower() and _is_reporter(ctx.store):
            raise UserError(f"another process did not answer in time: {first_line(error)}") from None
        if "/dev/shm" in text and _is_reporter(ctx.store):
            raise UserError(
                "NCCL needs more space in /dev/shm; start the container with --shm-size=8g or --ipc=host"
            ) from None
        # `spawn` prints with which status a process has ended.
        if multiprocessing.parent_process() is None and _is_reporter(ctx.store):
            raise UserError(f"{_ended_process(ctx)} ended without a message; was it killed, or does it exit?") from None
        raise PeerFailure("another process of this run has ended") from None
    except BaseException:
        if ctx.store is not None:
            _is_reporter(ctx.store)
        raise


def _ended_process(ctx: DistributedContext) -> str:
    """Names a process that has ended, as far as this machine can observe it."""
    with suppress(dist.DistError):
        for _ in range(20):  # its connections are closed a moment before it is gone
            for rank in range(ctx.world_size):
                if has_died(ctx.store.get(f"process/{rank}").decode()):
                    return f"process {rank} of {ctx.world_size}"
            time.sleep(0.05)
    return "another process of this run"


def _is_reporter(store: dist.Store) -> bool:
    """Whether this process is the first that reports an error."""
    try:
        return store.add("user_error", 1) == 1
    except dist.DistError:  # the store is gone, and with it the rank that has reported
        return False
