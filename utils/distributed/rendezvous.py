"""Rendezvous: the processes of a run connect to one store and form a process group. Messages name missing processes."""

from __future__ import annotations

import datetime
import os
import socket
import time
from collections.abc import Callable
from dataclasses import replace

import torch.distributed as dist

from utils.distributed.context import DistributedContext
from utils.distributed.placement import place_process
from utils.distributed.store_barrier import process_key
from utils.errors import PeerLost, UserError, first_line, os_reason
from utils.logger import get_logger
from utils.machine.devices import make_current, parse_devices
from utils.process.identity import process_identity, this_process
from utils.process.launch import Launch
from utils.strings import rank_list

FIRST_LOG_AFTER_S = 10.0  # waiting time after which a line is logged
LOG_EVERY_S = 60.0  # interval between further lines
# A launcher's store runs before the processes start; if it does not answer, the launcher has died.
HOSTED_STORE_TIMEOUT_S = 20.0
UNRESOLVED_HOST = (
    "the host name does not resolve here; use an address that all machines reach, or 127.0.0.1 on a single one "
    "(MASTER_ADDR; torchrun --local-addr or --master-addr)"
)


def open_store(launch: Launch, timeout_s: float) -> dist.Store:
    """Waits until all processes of the run have joined, and returns its store.

    Raises PeerLost if the address cannot be reached or used, or if processes do not join within ``timeout_s``, and
    UserError if two processes have the same rank or different world sizes.
    """
    is_host = launch.rank == 0 and not launch.is_hosted
    if not is_host:
        _wait_for_address(launch, min(timeout_s, HOSTED_STORE_TIMEOUT_S) if launch.is_hosted else timeout_s)
    try:
        tcp_store = dist.TCPStore(
            launch.address,
            launch.port,
            is_master=is_host,
            timeout=datetime.timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (RuntimeError, ValueError) as error:
        raise rendezvous_error(launch, error) from None
    store = dist.PrefixStore(f"lockstep/{_generation(tcp_store, launch)}", tcp_store)
    try:
        _check_in(store, launch, timeout_s)
    except dist.DistError as error:
        raise rendezvous_error(launch, error) from None
    return store


def _generation(store: dist.Store, launch: Launch) -> int:
    """Counts how often torchrun has restarted the processes since the store was created.

    torchrun's static rendezvous keeps its store, with all keys of previous processes, when it restarts them. (Other
    kinds create a new store each time, and their torchrun processes count different numbers of restarts.)
    """
    launcher = _launcher_identity(launch)
    if not launcher:
        return 0
    first_restarts = store.compare_set(f"lockstep/first/{launcher}", "", str(launch.restarts))
    return launch.restarts - int(first_restarts)


def rendezvous_error(launch: Launch, error: Exception) -> PeerLost:
    """Converts torch's error about a process group that could not be formed to PeerLost."""
    reason = first_line(error)
    hint = "is the port taken? choose another with --master-port" if "EADDRINUSE" in reason else "is it reachable?"
    return PeerLost(f"cannot form the process group at {launch.address}:{launch.port}: {reason}; {hint}")


def _launcher_identity(launch: Launch) -> str:
    """Identifies the torchrun process that started this one, on any machine; "" without torchrun."""
    return f"{launch.run_id} {process_identity(os.getppid())}" if launch.run_id else ""


def _wait_for_address(launch: Launch, timeout_s: float) -> None:
    """Waits until the address accepts connections."""
    last_error: OSError | None = None

    def answers() -> bool:
        nonlocal last_error
        try:
            socket.create_connection((launch.address, launch.port), timeout=5).close()
        except OSError as error:
            last_error = error
            return False
        return True

    def problem() -> str:
        assert last_error is not None, "asked for after an attempt has failed"
        return _unreachable(launch, last_error)

    _wait_until(answers, problem, timeout_s)


def _unreachable(launch: Launch, error: OSError) -> str:
    """Explains that nothing answers at the run's address."""
    host = launch.launcher if launch.is_hosted else "process 0"
    reason = os_reason(error)
    hint = f"is {host} running, is the address right (MASTER_ADDR, MASTER_PORT), does a firewall block it?"
    if isinstance(error, socket.gaierror):
        hint = UNRESOLVED_HOST
    process = f"process {launch.rank} of {launch.world_size}"
    return f"{process}: {launch.address}:{launch.port}, where {host} should be, does not answer ({reason}); {hint}"


def _check_in(store: dist.Store, launch: Launch, timeout_s: float) -> None:
    """Waits until every process has joined. Rank 0 logs the missing ones."""
    description = f"process {launch.rank} of {launch.world_size} on {os.uname().nodename}"
    if store.add(f"here/{launch.rank}/count", 1) > 1:
        raise UserError(
            f"two processes were started as rank {launch.rank} (this one: {description}); each needs its own RANK"
        )
    size = store.compare_set("world size", "", str(launch.world_size)).decode()
    if size != str(launch.world_size):
        raise UserError(f"{description}: another process of this run has WORLD_SIZE={size}")
    store.set(process_key(launch.rank), this_process())
    store.set(f"here/{launch.rank}", description)
    store.add("arrived", 1)

    def problem() -> str:
        missing = [rank for rank in range(launch.world_size) if not store.check([f"here/{rank}"])]
        ranks = f"{rank_list(missing)} of {launch.world_size} processes"
        return f"{ranks} did not join {launch.address}:{launch.port}; were they started?"

    poll_s = 0.05 * max(1.0, launch.world_size / 32)
    _wait_until(lambda: store.add("arrived", 0) >= launch.world_size, problem, timeout_s, poll_s, logs=launch.rank == 0)


def _wait_until(
    is_done: Callable[[], bool], problem: Callable[[], str], timeout_s: float, poll_s: float = 0.5, *, logs: bool = True
) -> None:
    """Waits until ``is_done()`` is true. Logs ``problem()`` after ten seconds and then every minute, and raises
    PeerLost with it after ``timeout_s``."""
    started = time.monotonic()
    next_log_s = FIRST_LOG_AFTER_S
    while not is_done():
        waited_s = time.monotonic() - started
        if waited_s > timeout_s:
            raise PeerLost(f"gave up after {waited_s:.0f} s: {problem()}")
        if waited_s >= next_log_s:
            next_log_s += LOG_EVERY_S
            if logs:
                get_logger().warning("still waiting after %.0f s: %s", waited_s, problem())
        time.sleep(poll_s)


def join_run(
    launch: Launch | None, device: str = "", *, eval_ranks: int = 0, timeout_s: float = 1800.0
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
    store = open_store(launch, timeout_s)
    try:
        _check_eval_ranks(store, launch, eval_ranks)
        place = place_process(store, launch, device, eval_ranks)
    except dist.DistError as error:  # another process has ended, and the store with it
        raise rendezvous_error(launch, error) from None
    ctx = DistributedContext(
        rank=place.rank,
        local_rank=place.local_rank,
        world_size=place.world_size,
        local_world_size=place.local_world_size,
        node_rank=launch.node_rank,
        device=place.device,
        devices=(place.device,),
        backend="cpu:gloo,cuda:nccl" if place.device.type == "cuda" else "gloo",
        store=evaluation_store(store) if place.is_evaluating else store,
        launcher_identity=_launcher_identity(launch),
        eval_ranks=0 if place.is_evaluating else eval_ranks,
        first_rank=launch.rank - place.rank,
    )
    make_current(place.device)
    _init_process_group(ctx, launch, timeout_s)
    return ctx


def _check_eval_ranks(store: dist.Store, launch: Launch, eval_ranks: int) -> None:
    """Raises UserError if another process of the run has a different value of ``--eval-ranks``."""
    first = store.compare_set("eval ranks", "", str(eval_ranks)).decode()
    if first != str(eval_ranks):
        raise UserError(f"process {launch.rank} has --eval-ranks {eval_ranks}, another of this run {first}")


def _init_process_group(ctx: DistributedContext, launch: Launch, timeout_s: float) -> None:
    timeout = datetime.timedelta(seconds=timeout_s)
    assert ctx.store is not None
    try:
        ctx.store.set_timeout(timeout)
        ctx.store.set(process_key(ctx.rank), this_process())  # evaluating processes have a store and ranks of their own
        dist.init_process_group(
            ctx.backend,
            store=dist.PrefixStore("group", ctx.store),
            rank=ctx.rank,
            world_size=ctx.world_size,
            timeout=timeout,
        )
    except (RuntimeError, ValueError) as error:  # raised by torch, and by gloo if another process exits meanwhile
        raise rendezvous_error(launch, error) from None


def evaluation_store(store: dist.Store) -> dist.Store:
    """Returns the part of the run's store for messages to and from the evaluating processes."""
    return dist.PrefixStore("evaluators", store)
