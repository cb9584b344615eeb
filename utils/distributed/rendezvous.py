"""Rendezvous: the processes of a run connect to one store. Messages name those that do not join."""

from __future__ import annotations

import datetime
import json
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from utils.distributed.launch import Launch
from utils.distributed.store_barrier import process_identity, this_process
from utils.errors import UserError, first_line
from utils.logger import get_logger
from utils.machine.devices import devices_for_ranks, identities, make_current
from utils.strings import counted, rank_list

FIRST_LINE_S, NEXT_LINES_S = 10.0, 60.0
HOSTED_S = 20.0  # a launcher's store runs before the processes do: if it does not answer, the launcher has died
UNKNOWN_NAME = (
    "this machine does not know that name: name an address that all machines reach, or 127.0.0.1 on a single one "
    "(MASTER_ADDR; torchrun --local-addr or --master-addr)"
)


def open_store(launch: Launch, timeout_s: float) -> dist.Store:
    """Waits until all processes of the run have joined, and returns its store.

    Raises UserError if the address cannot be reached or used, if processes do not join within ``timeout_s``, or if two
    processes have the same rank.
    """
    own_store = launch.rank == 0 and not launch.is_hosted
    if not own_store:
        _wait_for_address(launch, min(timeout_s, HOSTED_S) if launch.is_hosted else timeout_s)
    options = {"timeout": datetime.timedelta(seconds=timeout_s), "wait_for_workers": False, "multi_tenant": True}
    try:
        store: dist.Store = dist.TCPStore(launch.address, launch.port, is_master=own_store, **options)
    except (RuntimeError, ValueError) as error:
        raise rendezvous_error(launch, error) from None
    # A static rendezvous of torchrun keeps its store, with all keys of former processes, when it restarts them. (Other
    # kinds make a new store each time, and their torchrun processes count different numbers of restarts.)
    generation = 0
    if launcher := _launcher_name(launch):
        first = store.compare_set(f"lockstep/first/{launcher}", "", str(launch.restarts))
        generation = launch.restarts - int(first)
    store = dist.PrefixStore(f"lockstep/{generation}", store)
    try:
        _check_in(store, launch, timeout_s)
    except dist.DistError as error:
        raise rendezvous_error(launch, error) from None
    return store


def rendezvous_error(launch: Launch, error: Exception) -> UserError:
    """Converts torch's error about a process group that could not be formed."""
    reason = first_line(error)
    hint = "is the port taken? choose another with --master-port" if "EADDRINUSE" in reason else "is it reachable?"
    return UserError(f"cannot form the process group at {launch.address}:{launch.port}: {reason}; {hint}")


def _launcher_name(launch: Launch) -> str:
    """Identifies the torchrun process that started this one, on any machine; "" without torchrun."""
    return f"{launch.run_id} {process_identity(os.getppid())}" if launch.run_id else ""


def _wait_for_address(launch: Launch, timeout_s: float) -> None:
    """Returns once the address accepts connections."""
    host = launch.launcher if launch.is_hosted else "process 0"
    what = f"process {launch.rank} of {launch.world_size}: {launch.address}:{launch.port}, where {host} should be,"
    problem = ""

    def answers() -> bool:
        nonlocal problem
        try:
            socket.create_connection((launch.address, launch.port), timeout=5).close()
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            hint = f"is {host} running, is the address right (MASTER_ADDR, MASTER_PORT), does a firewall block it?"
            if isinstance(error, socket.gaierror):
                hint = UNKNOWN_NAME
            problem = f"{what} does not answer ({reason}); {hint}"
            return False
        return True

    _wait_until(answers, lambda: problem, timeout_s)


def _check_in(store: dist.Store, launch: Launch, timeout_s: float) -> None:
    """Returns once every process has joined. Rank 0 logs which ones are missing."""
    own = f"process {launch.rank} of {launch.world_size} on {os.uname().nodename}"
    if store.add(f"here/{launch.rank}/count", 1) > 1:
        raise UserError(f"two processes were started as rank {launch.rank} (this one: {own}); each needs its own RANK")
    size = store.compare_set("world size", "", str(launch.world_size)).decode()
    if size != str(launch.world_size):
        raise UserError(f"{own}: another process of this run has WORLD_SIZE={size}")
    store.set(f"process/{launch.rank}", this_process())
    store.set(f"here/{launch.rank}", own)
    store.add("arrived", 1)

    def problem() -> str:
        missing = [rank for rank in range(launch.world_size) if not store.check([f"here/{rank}"])]
        who = f"{rank_list(missing)} of {launch.world_size} processes"
        return f"{who} did not join {launch.address}:{launch.port}; were they started?"

    poll_s = 0.05 * max(1.0, launch.world_size / 32)
    _wait_until(lambda: store.add("arrived", 0) >= launch.world_size, problem, timeout_s, poll_s, logs=launch.rank == 0)


def _wait_until(
    is_done: Callable[[], bool], problem: Callable[[], str], timeout_s: float, poll_s: float = 0.5, *, logs: bool = True
) -> None:
    """Logs the ``problem`` after ten seconds and then every minute. Raises UserError with it after ``timeout_s``."""
    started, log_at = time.monotonic(), FIRST_LINE_S
    while not is_done():
        waited = time.monotonic() - started
        if waited > timeout_s:
            raise UserError(f"gave up after {waited:.0f} s: {problem()}")
        if waited >= log_at:
            log_at += NEXT_LINES_S
            if logs:
                get_logger().warning("still waiting after %.0f s: %s", waited, problem())
        time.sleep(poll_s)


def join(launch: Launch, device: str, eval_ranks: int, timeout_s: float) -> dict[str, Any]:
    """Makes this process one of the run's group. Returns the fields of its `DistributedContext`, whose
    ``from_environment`` has these arguments and raises these errors."""
    store = open_store(launch, timeout_s)
    try:
        if (first := store.compare_set("eval ranks", "", str(eval_ranks)).decode()) != str(eval_ranks):
            raise UserError(f"process {launch.rank} has --eval-ranks {eval_ranks}, another of this run {first}")
        local_rank, local_world_size, own_device = _locate_on_node(store, launch, device, eval_ranks)
    except dist.DistError as error:  # another process has ended, and the store with it
        raise rendezvous_error(launch, error) from None
    rank, world_size = launch.rank, launch.world_size - eval_ranks
    if rank >= world_size:
        rank, world_size, eval_ranks, store = rank - world_size, eval_ranks, 0, evaluators(store)
    backend = "cpu:gloo,cuda:nccl" if own_device.type == "cuda" else "gloo"
    make_current(own_device)
    timeout = datetime.timedelta(seconds=timeout_s)
    try:
        store.set_timeout(timeout)
        prefixed = dist.PrefixStore("group", store)
        dist.init_process_group(backend, store=prefixed, rank=rank, world_size=world_size, timeout=timeout)
    except (RuntimeError, ValueError) as error:  # errors of torch, and of gloo if another process exits meanwhile
        raise rendezvous_error(launch, error) from None
    return {
        **{"rank": rank, "world_size": world_size, "backend": backend, "store": store, "eval_ranks": eval_ranks},
        **{"local_rank": local_rank, "local_world_size": local_world_size, "node_rank": launch.node_rank},
        **{"device": own_device, "devices": (own_device,), "launcher": _launcher_name(launch)},
    }


def evaluators(store: dist.Store) -> dist.Store:
    """The part of the run's store that belongs to the evaluating processes, with the messages to and from them."""
    return dist.PrefixStore("evaluators", store)


def _locate_on_node(
    store: dist.Store, launch: Launch, device: str, eval_ranks: int = 0
) -> tuple[int, int, torch.device]:
    """The local rank, local world size and device of this process. Every process of the run must call this.

    Ranks on the node are counted separately for the processes that train and those that evaluate. The latter use the
    CPU unless every node has as many GPUs as processes of both kinds.

    Raises UserError on all training processes of a node that has fewer devices than these.
    """
    devices, node_rank = devices_for_ranks(device), launch.node_rank
    store.set(f"node/{launch.rank}", json.dumps([node_rank, identities(devices)]))
    notes = [json.loads(text) for text in store.multi_get([f"node/{rank}" for rank in range(launch.world_size)])]
    # A launcher may make different GPUs visible to each process, which then sees fewer than there are processes.
    here: dict[int, list[int]] = {}
    gpus: dict[int, set[str]] = {}
    for rank, (node, uuids) in enumerate(notes):
        here.setdefault(node, []).append(rank)
        gpus.setdefault(node, set()).update(uuids)
    local_rank, local_world_size, number = launch.local_rank, launch.local_world_size, launch.local_rank
    if eval_ranks:
        number = here[node_rank].index(launch.rank)  # evaluating processes come last, and so do their GPUs
        first = launch.world_size - eval_ranks
        same = [rank for rank in here[node_rank] if (rank >= first) == (launch.rank >= first)]
        local_rank, local_world_size = same.index(launch.rank), len(same)
        if launch.rank >= first and any(len(here[node]) > len(gpus[node]) for node in here):
            devices = ()
    if not devices:
        return local_rank, local_world_size, torch.device("cpu")
    if local_world_size > (count := len(gpus[node_rank])):
        raise UserError(f"{local_world_size} processes on a node with {counted(count, 'GPU')}: lower --nproc_per_node")
    return local_rank, local_world_size, devices[number % len(devices)]
