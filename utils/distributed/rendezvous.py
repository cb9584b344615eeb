"""Rendezvous of a run's processes: each connects to one store. Messages name processes that do not join."""

from __future__ import annotations

import datetime
import json
import os
import socket
import time
from collections.abc import Sequence

import torch.distributed as dist

from utils.distributed.launch import Launch, restarts_of_launcher
from utils.distributed.store_barrier import process_identity, this_process
from utils.errors import UserError, first_line
from utils.logger import get_logger

FIRST_LINE_S, NEXT_LINES_S = 10.0, 60.0
HOSTED_S = 20.0  # a launcher's store runs before the processes do: if it does not answer, the launcher has died
_POLL_S = 0.05
_LISTED = 8


class _Wait:
    """A timeout, and the times at which to log that the process is still waiting."""

    def __init__(self, timeout_s: float) -> None:
        self._started = time.monotonic()
        self._timeout_s = timeout_s
        self._log_at = FIRST_LINE_S

    def waited_s(self) -> float:
        return time.monotonic() - self._started

    def is_over(self) -> bool:
        return self.waited_s() > self._timeout_s

    def should_log(self) -> bool:
        """True after ten seconds, then every minute."""
        if self.waited_s() < self._log_at:
            return False
        self._log_at += NEXT_LINES_S
        return True


def open_store(launch: Launch, timeout_s: float) -> dist.Store:
    """Waits until all processes of the run have joined, and returns its store.

    Raises UserError if the address cannot be reached or used, if processes do not join within ``timeout_s``, or if two
    processes have the same rank.
    """
    waiting = _Wait(timeout_s)
    own_store = launch.rank == 0 and not launch.is_hosted
    if not own_store:
        _wait_for_address(launch, _Wait(min(timeout_s, HOSTED_S)) if launch.is_hosted else waiting)
    options = {"timeout": datetime.timedelta(seconds=timeout_s), "wait_for_workers": False, "multi_tenant": True}
    try:
        store: dist.Store = dist.TCPStore(launch.address, launch.port, is_master=own_store, **options)
    except (RuntimeError, ValueError) as error:
        raise rendezvous_error(launch, error) from None
    store = dist.PrefixStore(f"lockstep/{_generation(store)}", store)
    try:
        _check_in(store, launch, waiting)
    except dist.DistError as error:
        raise rendezvous_error(launch, error) from None
    return store


def rendezvous_error(launch: Launch, error: Exception) -> UserError:
    """Converts torch's error about a process group that could not be formed."""
    reason = first_line(error)
    hint = "is the port taken? choose another with --master-port" if "EADDRINUSE" in reason else "is it reachable?"
    return UserError(f"cannot form the process group at {launch.address}:{launch.port}: {reason}; {hint}")


def all_gather_json(store: dist.Store, title: str, launch: Launch, value: object) -> list[object]:
    """Every process's value (converted to JSON and back), by rank, on every process."""
    store.set(f"{title}/{launch.rank}", json.dumps(value))
    return [json.loads(text) for text in store.multi_get([f"{title}/{rank}" for rank in range(launch.world_size)])]


def launcher_name() -> str:
    """Identifies the torchrun process that started this one, on any machine; "" without torchrun."""
    run, _ = restarts_of_launcher()
    return f"{run} {process_identity(os.getppid())}" if run else ""


def _generation(store: dist.Store) -> int:
    """How often torchrun has restarted the processes on this store.

    A static rendezvous keeps its store, with all the keys that former processes have set. Other kinds make a new store
    each time (and their torchrun processes count different numbers of restarts).
    """
    launcher, restarts = launcher_name(), restarts_of_launcher()[1]
    if not launcher:
        return 0
    return int(restarts) - int(store.compare_set(f"lockstep/first/{launcher}", "", restarts))


def _wait_for_address(launch: Launch, waiting: _Wait) -> None:
    """Returns once the address accepts connections."""
    where = f"{launch.address}:{launch.port}"
    while True:
        try:
            socket.create_connection((launch.address, launch.port), timeout=5).close()
            return
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
        host = launch.launcher if launch.is_hosted else "process 0"
        line = f"process {launch.rank} of {launch.world_size}: {where}, where {host} should be, does not answer"
        hint = f"is {host} running, is the address right (MASTER_ADDR, MASTER_PORT), does a firewall block it?"
        if waiting.is_over():
            raise UserError(f"{line} in {waiting.waited_s():.0f} s ({reason}); {hint}")
        if waiting.should_log():
            get_logger().warning("%s after %.0f s (%s); %s", line, waiting.waited_s(), reason, hint)
        time.sleep(10 * _POLL_S)


def _check_in(store: dist.Store, launch: Launch, waiting: _Wait) -> None:
    """Returns once every process has joined. The first of those that have joined logs which ones are missing."""
    own = f"process {launch.rank} of {launch.world_size} on {os.uname().nodename}"
    if store.add(f"here/{launch.rank}/count", 1) > 1:
        raise UserError(f"two processes were started as rank {launch.rank} (this one: {own}); each needs its own RANK")
    size = store.compare_set("world size", "", str(launch.world_size)).decode()
    if size != str(launch.world_size):
        raise UserError(f"{own}: another process of this run has WORLD_SIZE={size}")
    store.set(f"process/{launch.rank}", this_process())
    store.set(f"here/{launch.rank}", own)
    arrived = store.add("arrived", 1)
    while arrived < launch.world_size:
        if waiting.is_over() or waiting.should_log():
            missing = [rank for rank in range(launch.world_size) if not store.check([f"here/{rank}"])]
            is_first = not [rank for rank in range(launch.rank) if rank not in missing]
            text = f"{rank_list(missing)} of {launch.world_size} processes did not join {launch.address}:{launch.port}"
            if missing and waiting.is_over():
                raise UserError(f"{text} in {waiting.waited_s():.0f} s; were they started?")
            if missing and is_first:
                get_logger().warning("%s after %.0f s; waiting for them", text, waiting.waited_s())
        time.sleep(_POLL_S * max(1.0, launch.world_size / 32))
        arrived = store.add("arrived", 0)


def rank_list(ranks: Sequence[int]) -> str:
    """Names some ranks in a message: "rank 3", "ranks 0, 1 and 7 more"."""
    more = f" and {len(ranks) - _LISTED} more" if len(ranks) > _LISTED else ""
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, ranks[:_LISTED]))}{more}"
