"""Who this process is among the others, and the few ways in which processes wait for and talk to each other.

A `DistributedContext` is made once, from the environment that torchrun (or the old launcher) sets, and is passed on as
an argument. No other module reads RANK, LOCAL_RANK or WORLD_SIZE.
"""

from __future__ import annotations

import datetime
import gc
import itertools
import logging
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.rendezvous import rendezvous

from utils.errors import PeerFailure, Stopped, UserError
from utils.liveness import process_identity
from utils.meeting import Meeting
from utils.stop_signals import INTERRUPTED, REQUEUE, stop_signals

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
STOP_S, FAILED_S = 60.0, 4.0  # how long `spawn` waits for the other processes after one has stopped as asked, or failed
_BROKEN = ("gloo/transport", "Connection closed by peer", "Connection reset by peer", "NCCL error")


@dataclass(frozen=True)
class DistributedContext:
    """One process's place in the run. Ranks count from 0; ``local_rank`` is -1 when there is no process group."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int
    device: torch.device
    backend: str  # "" when there is no process group
    devices: tuple[torch.device, ...]  # more than one only for DataParallel in a single process
    store: dist.Store | None = field(default=None, repr=False, compare=False)
    launcher: str = ""  # names the torchrun process that started this one, on any machine; "" without torchrun
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
        device: str = "", local_rank: int | None = None, *, timeout_s: float = 1800.0
    ) -> DistributedContext:
        """The context of this process; joins the process group when launched as one of several.

        Args:
            device: as `--device`: "", "cpu", "mps", "0", "0,1", "cuda:1".
            local_rank: `--local-rank` of ``python -m torch.distributed.launch``, where LOCAL_RANK is not set.
            timeout_s: how long a collective may take before the group gives up.

        Raises:
            UserError: a half-set environment, a device that is not there, a busy port.
        """
        present = [name for name in _VARIABLES if os.environ.get(name)]
        if os.environ.get("LOCAL_RANK"):
            local_rank = _number("LOCAL_RANK")
        if not present and local_rank in (None, -1):
            devices = parse_devices(device)
            _make_current(devices[0])
            return DistributedContext(0, -1, 1, 1, 0, devices[0], "", devices)
        missing = [name for name in _VARIABLES if name not in present]
        if missing or local_rank is None:
            missing += [] if local_rank is not None else ["LOCAL_RANK"]
            raise UserError(
                f"the distributed environment is half set: {', '.join(missing)} missing; start with torchrun, "
                f"or unset {', '.join(present) or 'LOCAL_RANK'}"
            )
        rank, world_size = _number("RANK"), _number("WORLD_SIZE", least=1)
        local_world_size = _number("LOCAL_WORLD_SIZE", world_size, least=1)
        node_rank = _number("GROUP_RANK", rank // local_world_size)
        _number("MASTER_PORT")
        if rank >= world_size:
            raise UserError(f"RANK={rank} of WORLD_SIZE={world_size}: ranks count from 0 to {world_size - 1}")
        own = _device_of_local_rank(device, local_rank, local_world_size)
        backend = "cpu:gloo,cuda:nccl" if own.type == "cuda" else "gloo"
        _make_current(own)
        store = _join(backend, rank, world_size, timeout_s)
        return DistributedContext(
            rank, local_rank, world_size, local_world_size, node_rank, own, backend, (own,), store,
            launcher=_launcher(),
        )  # fmt: skip

    def close(self) -> None:
        """Leaves the process group.

        Nothing may use it any more: while a DDP model, say, keeps gloo's threads alive, the interpreter's end can take
        one of them while it lets go of a tensor, and the process aborts.
        """
        if self.is_distributed and dist.is_initialized():
            gc.collect()
            dist.destroy_process_group()

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Leaves the process group after the block, also when that stopped as asked; not when it failed, for then a
        collective may be under way, and an orderly end would wait for it."""
        try:
            yield
        except Stopped as stop:
            traceback.clear_frames(stop.__traceback__)
            self.close()
            raise
        self.close()


def _make_current(device: torch.device) -> None:
    """Makes a GPU the one that CUDA's events, streams and pinned copies belong to when nobody names another."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _join(backend: str, rank: int, world_size: int, timeout_s: float) -> dist.Store:
    timeout = datetime.timedelta(seconds=timeout_s)
    try:
        store, rank, world_size = next(iter(rendezvous("env://", rank, world_size, timeout=timeout)))
        store.set_timeout(timeout)
        store = dist.PrefixStore(f"lockstep/{_generation(store)}", store)
        dist.init_process_group(
            backend, store=dist.PrefixStore("group", store), rank=rank, world_size=world_size, timeout=timeout
        )
    except (RuntimeError, ValueError) as error:  # torch's own kinds, and gloo when another process goes meanwhile
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        reason = str(error).split("\n")[0]
        hint = "is the port taken? choose another with --master-port" if "EADDRINUSE" in reason else "is it reachable?"
        raise UserError(f"cannot form the process group at {where}: {reason}; {hint}") from None
    return store


def _generation(store: dist.Store) -> int:
    """How often this process's torchrun has restarted its processes on this store.

    A static rendezvous keeps its store, with all that former processes left in it; others come with a new one each time
    (and with torchrun processes that count different numbers of restarts).
    """
    launcher, restarts = _launcher(), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if not launcher:
        return 0
    return int(restarts) - int(store.compare_set(f"lockstep/first/{launcher}", "", restarts))


def _number(name: str, default: int | None = None, *, least: int = 0) -> int:
    """A variable of the environment, or ``default`` where it is not set. Raises UserError naming it."""
    text = os.environ.get(name, "" if default is None else str(default)).strip()
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise UserError(f"{name}={text}: wants a whole number from {least}; start with torchrun, which sets it")
    return number


def _launcher() -> str:
    run = os.environ.get("TORCHELASTIC_RUN_ID")
    return f"{run} {process_identity(os.getppid())}" if run else ""


def is_launched() -> bool:
    """True in a process that torchrun, the old launcher or `spawn` has started."""
    return any(os.environ.get(name) for name in ("RANK", "LOCAL_RANK"))


def parse_devices(device: str) -> tuple[torch.device, ...]:
    """``--device`` to devices: several only for CUDA. Raises UserError for what is not there."""
    text = device.strip().lower().replace("cuda:", "")
    if text in ("", "cuda"):
        if torch.cuda.is_available():
            return (torch.device("cuda", 0),)
        if text == "" and torch.backends.mps.is_available():
            return (torch.device("mps"),)
        if text == "":
            return (torch.device("cpu"),)
    if text == "cuda":
        raise UserError(f"--device {device}: no CUDA GPU is available here; use --device cpu")
    if text == "cpu":
        return (torch.device("cpu"),)
    if text == "mps":
        if not torch.backends.mps.is_available():
            raise UserError("--device mps: no Apple GPU is available here; use --device cpu")
        return (torch.device("mps"),)
    numbers = [part.strip() for part in text.split(",") if part.strip()]
    if not numbers or not all(part.isdigit() for part in numbers):
        raise UserError(f"--device {device}: wants cpu, mps, a GPU number, or several such as 0,1")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    absent = [part for part in numbers if int(part) >= count]
    if absent:
        have = f"GPUs 0 to {count - 1} are here" if count else "no CUDA GPU is available here; use --device cpu"
        raise UserError(f"--device {device}: there is no GPU {absent[0]}; {have}")
    if len(set(numbers)) < len(numbers):
        raise UserError(f"--device {device}: a GPU is named twice")
    return tuple(torch.device("cuda", int(part)) for part in numbers)


def _device_of_local_rank(device: str, local_rank: int, local_world_size: int) -> torch.device:
    text = device.strip().lower()
    if text == "cpu" or (text == "" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if text == "mps":
        raise UserError("--device mps: one process only; start without torchrun")
    devices = parse_devices(device)
    if text in ("", "cuda"):
        devices = tuple(torch.device("cuda", i) for i in range(torch.cuda.device_count()))
    if local_world_size > len(devices):
        raise UserError(f"{local_world_size} processes on this node but {len(devices)} GPUs: lower --nproc_per_node")
    return devices[local_rank]


@contextmanager
def torch_distributed_zero_first(ctx: DistributedContext) -> Iterator[None]:
    """The first process of each node runs the block, then the others do, reading what it left; all leave it together.

    Every process of the run must come here. They wait on the store and not in a collective (`utils.meeting`), also for
    the other nodes, so no group timeout trips however long a leader takes. If one raises, the others raise
    `PeerFailure`; if one dies or falls silent, UserError.
    """
    if not ctx.is_distributed:
        yield
        return
    leader = ctx.rank - ctx.local_rank
    names = [f"process {rank}" for rank in range(ctx.world_size)]
    names[leader] = f"the first process of node {ctx.node_rank}"
    with Meeting(ctx.store, f"zero_first/{next(ctx._turns)}", own=ctx.rank, names=names) as meeting:
        if not ctx.is_node_leader:
            meeting.hear(f"node {ctx.node_rank} is ready", leader)
        yield
        if ctx.is_node_leader:
            meeting.tell(f"node {ctx.node_rank} is ready")
        meeting.arrive()


@contextmanager
def one_voice(ctx: DistributedContext) -> Iterator[None]:
    """What goes wrong is said once. A `UserError` that several ranks run into stays one on the first of them and is
    `PeerFailure` on the others; so is the failure of a collective when another process ended."""
    try:
        yield
    except PeerFailure:
        raise
    except UserError as error:
        if ctx.store is None or _is_first_to_speak(ctx.store):
            raise
        raise PeerFailure(str(error)) from None
    except RuntimeError as error:
        text = str(error)
        if ctx.store is None or not (isinstance(error, dist.DistError) or any(mark in text for mark in _BROKEN)):
            raise
        if "imed out" in text and _is_first_to_speak(ctx.store):
            raise UserError(f"another process did not answer in time: {text.splitlines()[0]}") from None
        raise PeerFailure("another process of this run has ended") from None


def _is_first_to_speak(store: dist.Store) -> bool:
    try:
        return store.add("user_error", 1) == 1
    except dist.DistError:  # the store went with the rank that has spoken
        return False


def gather_arrays(ctx: DistributedContext, arrays: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]] | None:
    """Every rank's arrays on rank 0, by rank; None elsewhere. Lengths may differ from rank to rank."""
    if not ctx.is_distributed:
        return [arrays]
    gathered: list[Any] | None = [None] * ctx.world_size if ctx.is_main else None
    dist.gather_object(arrays, gathered, dst=0)
    return gathered


def broadcast_object(ctx: DistributedContext, value: Any) -> Any:
    """Rank 0's value on every rank."""
    if not ctx.is_distributed:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def max_over_ranks(ctx: DistributedContext, value: int) -> int:
    """The largest value of any rank, on every rank; none returns before all have called it."""
    if not ctx.is_distributed:
        return value
    box = torch.tensor([value])  # on the CPU, for which every group has gloo
    dist.all_reduce(box, op=dist.ReduceOp.MAX)
    return int(box)


def all_objects(ctx: DistributedContext, value: Any) -> list[Any]:
    """Every rank's value, by rank, on every rank."""
    if not ctx.is_distributed:
        return [value]
    values: list[Any] = [None] * ctx.world_size
    dist.all_gather_object(values, value)
    return values


def is_parallel(model: nn.Module) -> bool:
    """True for a model inside DataParallel or DistributedDataParallel."""
    return isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel)


def unwrap(model: nn.Module) -> nn.Module:
    """The bare model: out of DataParallel, DistributedDataParallel and torch.compile."""
    while True:
        if is_parallel(model):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod
        else:
            return model


def spawn(function, processes: int, args: Sequence[Any] = ()) -> None:
    """Runs ``function(*args)`` in ``processes`` processes of this machine, each with torchrun's environment set.

    Signals that ask a run to stop are passed on. Raises PeerFailure when one of them ends badly (its own message is
    already printed), Stopped when it stopped as asked; the others are stopped.
    """
    from multiprocessing import resource_tracker

    import torch.multiprocessing as mp

    port = _free_port()
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # its remarks on whom it stops
    # Ctrl-C waits until the processes have started and we have them. The tracker's start would end the waiting.
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        group = mp.start_processes(
            _spawned, (processes, port, function, tuple(args)), processes, join=False, start_method="spawn"
        )
    except BaseException:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        raise
    asked: list[int] = []

    def pass_on(number: int, _: object) -> None:
        asked.append(number)
        for process in group.processes:
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)

    for number in stop_signals():
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    try:
        while not group.join(timeout=1, grace_period=STOP_S if asked else FAILED_S):
            pass
    except mp.ProcessExitedException as error:
        if error.exit_code in (REQUEUE, INTERRUPTED):
            raise Stopped(error.exit_code) from None
        if asked:
            raise Stopped(128 + asked[0]) from None
        name = f"process {error.error_index} of {processes}"
        if error.signal_name is not None:  # it could not say anything itself
            raise UserError(f"{name} was killed by {error.signal_name}; is there enough memory?") from None
        raise PeerFailure(f"{name} failed") from None
    except mp.ProcessRaisedException as error:
        print(str(error).strip(), file=sys.stderr, flush=True)
        raise PeerFailure(f"process {error.error_index} of {processes} failed") from None
    finally:
        for number in stop_signals():
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def _spawned(index: int, processes: int, port: int, function, args: tuple) -> None:
    os.environ |= {
        "RANK": str(index),
        "LOCAL_RANK": str(index),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    function(*args)


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
