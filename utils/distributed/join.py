"""How the processes of a run join: each gets its place and device, and all meet at one store and form a process group.
`joined_run` also sees to it that each failure is reported once.

The launcher numbers all processes. With ``--eval-ranks``, the last ones form a group of their own, with ranks from 0.
For two nodes of three processes, three GPUs on each, and ``--eval-ranks 2``:

    launcher: rank                   0    1    2    |   3    4    5
    launcher: node, local rank       0,0  0,1  0,2  |   1,0  1,1  1,2
    trains or evaluates              t    t    t    |   t    e    e
    `DistributedContext`: rank       0    1    2    |   3    0    1       world_size 4 of those that train, else 2
    `DistributedContext`: local      0    1    2    |   0    0    1       local_world_size 3 and 1, else 2
    device                        cuda:0  :1   :2   |  :0   :1   :2
"""

from __future__ import annotations

import datetime
import gc
import multiprocessing
import os
import platform
import secrets
import signal
import socket
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from utils.distributed.context import DistributedContext
from utils.errors import LOST_PEER, PeerFailure, PeerLost, Stopped, UserError, first_line
from utils.logger import get_logger
from utils.machine.devices import devices_for_ranks, make_current, parse_devices
from utils.machine.limits import require_posix
from utils.process.launch import Launch
from utils.process.main import error_line
from utils.process.signals import end_with_parent
from utils.strings import rank_list

TIMEOUT_S = 1800.0  # for joining, and of collectives
_LOOPBACK = "127.0.0.1"
LEAVE_S = 5.0  # longest time for which process 0 waits for the others at the end
LOG_AFTER_S = 10.0  # waiting time after which a line is logged, and then again and again
# Parts of a failed collective's message that mean that another process has ended.
_LOST_PEER_MARKS = ("gloo/transport", "Connection closed by ", "Connection reset by peer", "ncclRemoteError")


@contextmanager
def joined_run(
    launch: Launch | None, device: str = "", *, eval_ranks: int = 0, timeout_s: float = TIMEOUT_S
) -> Iterator[DistributedContext]:
    """Joins the run (`join_run`) during the block. If a process raises an error in it that is not a bug, the first one
    raises it, and the others raise PeerFailure, so that one line is printed."""
    ctx = join_run(launch, device, eval_ranks=eval_ranks, timeout_s=timeout_s)
    try:
        yield ctx
    except Stopped as stop:
        traceback.clear_frames(stop.__traceback__)
        leave_run(ctx)
        raise
    except (PeerFailure, KeyboardInterrupt):
        raise
    except Exception as error:
        if ctx.store is None:
            raise
        raise _once(ctx.store, error) from error.__cause__
    leave_run(ctx)


def leave_run(ctx: DistributedContext) -> None:
    """Leaves the process group; process 0, with which the store may end, once the others have left or `LEAVE_S` later:
    they may still read from it. After a failure the group is not left: that could wait for a collective of the
    others."""
    if ctx.store is not None and dist.is_initialized():
        # If something (such as a DDP model) keeps gloo's threads alive, one of them can release a tensor while the
        # interpreter exits, which aborts the process.
        gc.collect()
        is_first = ctx.is_main and ctx.first_rank == 0
        deadline = time.monotonic() + LEAVE_S
        groups = [(ctx.store, ctx.world_size), (evaluation_store(ctx.store), ctx.eval_ranks)]
        with suppress(dist.DistError):
            ctx.store.add("left", 1)
            while is_first and any(store.add("left", 0) < size for store, size in groups):
                if time.monotonic() > deadline:
                    break
                time.sleep(0.01)
        dist.destroy_process_group()


def _once(store: dist.Store, error: Exception) -> Exception:
    """Returns the error to raise for an error of this process: the same, if it is a bug or the first of the run."""
    message = str(error)
    reason = message.partition("Last error:")[2].strip() or first_line(error)  # NCCL's own words
    is_peer_lost = any(mark in message for mark in _LOST_PEER_MARKS)
    if isinstance(error, RuntimeError) and (is_peer_lost or isinstance(error, dist.DistError)):
        if "/dev/shm" in message:
            error = UserError("NCCL needs more space in /dev/shm; start the container with --shm-size=8g or --ipc=host")
        elif "NCCL error" in message and not is_peer_lost:
            error = UserError(f"NCCL failed: {reason}")
        elif multiprocessing.parent_process() is not None:  # `spawn` says how the other process has ended
            return PeerFailure("another process of this run has ended", LOST_PEER)
        else:
            notes = getattr(error, "__notes__", None)  # how to continue a training
            detail = f"; {notes[0]}" if notes else f" ({reason})"
            error = PeerLost(f"another process of this run has ended; its launcher prints why{detail}")
    try:
        is_first = store.add("errors", 1) == 1
    except dist.DistError:  # the store is gone with its process: a cause is printed, if need be twice
        is_first = not isinstance(error, PeerLost)
    line = error_line(error)
    return error if line is None or is_first else PeerFailure(line)


def join_run(
    launch: Launch | None, device: str = "", *, eval_ranks: int = 0, timeout_s: float = TIMEOUT_S
) -> DistributedContext:
    """Creates the context of this process, and joins the process group if it was launched as one of several.

    Args:
        launch: the result of `read_launch`.
        device: the value of `--device`: "", "cpu", "mps", "0", "0,1", "cuda:1".
        eval_ranks: the last ``eval_ranks`` processes form a separate group, with ranks from 0. The groups exchange
            messages in the store that `evaluation_store` returns.
        timeout_s: time limit for joining, and timeout of collectives.

    Raises UserError if a device does not exist or processes contradict each other, and PeerLost if the process group
    cannot be formed, for example because its port is in use.
    """
    if launch is None:
        devices = parse_devices(device)
        return replace(DistributedContext.single(devices[0]), devices=devices)
    require_posix("several processes")
    if launch.run_id:
        end_with_parent(signal.SIGTERM)()  # if torchrun is killed, nobody else would end its processes
    ctx = _place(launch, device, eval_ranks)
    timeout = datetime.timedelta(seconds=timeout_s)
    try:
        store = _open_store(launch, eval_ranks, timeout_s)
        store.set_timeout(timeout)
        store = evaluation_store(store) if ctx.first_rank else store
        ctx = replace(ctx, store=store)
        make_current(ctx.device)
        if launch.is_on_one_machine:
            _keep_to_loopback()
        dist.init_process_group(
            ctx.backend,
            store=dist.PrefixStore("group", store),
            rank=ctx.rank,
            world_size=ctx.world_size,
            timeout=timeout,
        )
    except (RuntimeError, ValueError, OSError) as error:  # of torch, and of gloo if another process exits meanwhile
        hint = "is the port taken? choose another with --master-port"
        if "EADDRINUSE" not in str(error) and not isinstance(error, OSError):
            hint = "is it reachable, and are all processes started?"
        address = f"{launch.address}:{launch.port}"
        raise PeerLost(f"cannot form the process group at {address}: {first_line(error)}; {hint}") from None
    return ctx


def _place(launch: Launch, device: str, eval_ranks: int) -> DistributedContext:
    """Returns the context of a launched process, without the store. Raises UserError if a node has fewer GPUs than
    training processes."""
    devices = devices_for_ranks(device)
    num_training = launch.world_size - eval_ranks
    first_of_node = launch.rank - launch.local_rank
    training_here = min(max(num_training - first_of_node, 0), launch.local_world_size)
    evaluates = launch.rank >= num_training
    own_device = torch.device("cpu")
    if len(devices) == 1:  # or a launcher has made another GPU visible to each process
        own_device = devices[0]
    elif launch.local_rank < len(devices):
        own_device = devices[launch.local_rank]
    elif devices and not evaluates:
        raise UserError(
            f"{training_here} processes on a node with {len(devices)} GPUs: start one for each (--nproc_per_node or "
            "--spawn)"
        )
    if evaluates and len(devices) == 1 and launch.local_rank:
        own_device = torch.device("cpu")  # the only GPU trains
    return DistributedContext(
        rank=launch.rank - num_training if evaluates else launch.rank,
        local_rank=launch.local_rank - training_here if evaluates else launch.local_rank,
        world_size=eval_ranks if evaluates else num_training,
        local_world_size=launch.local_world_size - training_here if evaluates else training_here,
        node_rank=launch.node_rank,
        device=own_device,
        devices=(own_device,),
        # Evaluating processes exchange only objects, and their devices may differ.
        backend="cpu:gloo,cuda:nccl" if own_device.type == "cuda" and not evaluates else "gloo",
        launcher_identity=_launcher_identity(launch),
        eval_ranks=0 if evaluates else eval_ranks,
        first_rank=num_training if evaluates else 0,
    )


def _launcher_identity(launch: Launch) -> str:
    """Identifies the torchrun process that started this one, on any machine; "" without torchrun."""
    if not launch.run_id:
        return ""
    parent = os.getppid()
    started = ""
    with suppress(OSError):  # no /proc
        stat = Path(f"/proc/{parent}/stat").read_text(encoding="ascii", errors="replace")
        started = stat.rpartition(")")[2].split()[19]  # field 22 of proc(5)
    return f"{launch.run_id} {platform.node()} {parent} {started}"


def _open_store(launch: Launch, eval_ranks: int, timeout_s: float) -> dist.Store:
    """Connects to the run's store, waits until all processes have, and returns the part of the store for their keys.

    torchrun may keep its store, with the keys of ended processes, when it restarts them, and a change of membership
    counts as no restart. So each process 0 begins a new part, and closes it with the tickets of those that have
    arrived; a process whose ticket is not among them waits for the next part.

    Raises PeerLost if they do not arrive within ``timeout_s``, torch's errors if the store cannot be opened, and
    UserError on process 0 if the processes expect different numbers of processes.
    """
    deadline = time.monotonic() + timeout_s
    store: dist.Store = _connect(launch, deadline, timeout_s)
    if launch.store_prefix:
        store = dist.PrefixStore(launch.store_prefix, store)
    numbers = f"WORLD_SIZE {launch.world_size} and --eval-ranks {eval_ranks}"
    pause_s = 0.05 * max(1.0, launch.world_size / 32)  # bounds the load of the store
    if launch.rank == 0:
        return _begin_part(store, launch, numbers, deadline=deadline, pause_s=pause_s)
    ticket = secrets.token_hex(8)
    joined = 0
    while time.monotonic() < deadline:
        newest = store.add("lockstep/parts", 0)
        part = dist.PrefixStore(f"lockstep/{newest}", store)
        if newest != joined:
            joined = newest
            part.append("arrived", f"{launch.rank} {ticket} {numbers}\n")  # type: ignore[attr-defined]
        if joined and part.check(["tickets"]) and ticket in part.get("tickets").decode():
            return part
        time.sleep(pause_s)
    raise PeerLost(f"not all processes of the run have joined {launch.address}:{launch.port}; were they started?")


def _begin_part(store: dist.Store, launch: Launch, numbers: str, *, deadline: float, pause_s: float) -> dist.Store:
    """Begins a new part of the store on process 0, and returns it once all processes have arrived. Logs which it waits
    for. Raises PeerLost and UserError as `_open_store` does."""
    part = dist.PrefixStore(f"lockstep/{store.add('lockstep/parts', 1)}", store)
    part.append("arrived", f"0 first {numbers}\n")  # type: ignore[attr-defined]  # torch's stubs lack this method
    next_log = time.monotonic() + LOG_AFTER_S
    while True:
        tickets: dict[int, str] = {}
        for line in part.get("arrived").decode().splitlines():
            rank, ticket, other_numbers = line.split(" ", 2)
            if other_numbers != numbers:
                raise UserError(f"process 0 has {numbers}, process {rank} has {other_numbers}")
            tickets[int(rank)] = ticket
        missing = [rank for rank in range(launch.world_size) if rank not in tickets]
        if not missing:
            part.set("tickets", " ".join(tickets.values()))
            return part
        message = f"{rank_list(missing)} of {launch.world_size} did not join {launch.address}:{launch.port}"
        now = time.monotonic()
        if now > deadline:
            raise PeerLost(f"{message}; were they started?")
        if now > next_log:
            get_logger().warning("still waiting: %s", message)
            next_log = now + 6 * LOG_AFTER_S
        time.sleep(pause_s)


def _connect(launch: Launch, deadline: float, timeout_s: float) -> dist.TCPStore:
    """Connects to the run's store, which torchrun or process 0 hosts; process 0 of a run on one machine listens on the
    loopback interface only. Raises torch's errors, and OSError if the port is taken."""
    is_host = launch.rank == 0 and not launch.is_hosted
    is_local = launch.is_on_one_machine and not launch.is_hosted
    while True:
        try:
            return dist.TCPStore(
                _LOOPBACK if is_local else launch.address,
                launch.port,
                is_master=is_host,
                timeout=datetime.timedelta(seconds=min(LOG_AFTER_S, timeout_s)),
                wait_for_workers=False,
                multi_tenant=True,
                master_listen_fd=_bound_to_loopback(launch.port) if is_host and is_local else None,
            )
        except RuntimeError as error:
            if is_host or time.monotonic() > deadline:
                raise
            get_logger().warning("still waiting for %s:%d: %s", launch.address, launch.port, first_line(error))


def _bound_to_loopback(port: int) -> int:
    """Returns the descriptor of a socket that only processes of this machine can connect to. Raises OSError."""
    with socket.socket() as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch does: the last run's port is free
        bound.bind((_LOOPBACK, port))
        return bound.detach()


def _keep_to_loopback() -> None:
    """Makes gloo and NCCL listen on the loopback interface only, unless the user has chosen another for them."""
    for _, name in socket.if_nameindex():
        if name.startswith("lo"):  # lo on Linux, lo0 on macOS
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
            return


def evaluation_store(store: dist.Store) -> dist.Store:
    """Returns the part of the run's store for messages to and from the evaluating processes."""
    return dist.PrefixStore("evaluators", store)
