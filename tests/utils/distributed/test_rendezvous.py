"""Processes that wait for others print which ones are missing; what cannot become a run ends with one line."""

from __future__ import annotations

import re
import threading
import time

import pytest
import torch.distributed as dist

from utils.distributed import rendezvous
from utils.errors import UserError
from utils.process.launch import Launch
from utils.process.ports import free_port


def launch_of(rank: int, world_size: int, port: int, address: str = "127.0.0.1", **more: object) -> Launch:
    return Launch(rank, world_size, rank, world_size, 0, address, port, **more)


def meet_in_thread(launch: Launch, timeout_s: float = 30) -> tuple[threading.Thread, list]:
    outcome: list = []

    def run() -> None:
        try:
            outcome.append(rendezvous.open_store(launch, timeout_s))
        except UserError as error:
            outcome.append(str(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, outcome


def failure_of(launch: Launch, timeout_s: float) -> str:
    thread, outcome = meet_in_thread(launch, timeout_s)
    thread.join(30)
    return outcome[0]


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(rendezvous, "FIRST_LOG_AFTER_S", 1.0)
    monkeypatch.setattr(rendezvous, "LOG_EVERY_S", 1.0)


def test_the_first_process_names_missing_ones_until_all_have_joined(caplog):
    port = free_port()
    started = [meet_in_thread(launch_of(rank, 3, port)) for rank in (0, 2)]
    missing = f" s: rank 1 of 3 processes did not join 127.0.0.1:{port};"
    deadline = time.monotonic() + 25
    while sum(missing in record.message for record in caplog.records) < 2:  # again and again
        assert time.monotonic() < deadline, caplog.text
        time.sleep(0.05)
    started.append(meet_in_thread(launch_of(1, 3, port)))
    for thread, outcome in started:
        thread.join(30)
        assert not isinstance(outcome[0], str), outcome
    first, _ = started[0]
    assert {record.threadName for record in caplog.records} == {first.name}  # rank 2 prints nothing


def test_what_does_not_come_ends_the_wait_with_one_line(caplog):
    assert re.match(r"gave up after \d+ s: process 1 of 2: 127.0.0.1:", failure_of(launch_of(1, 2, free_port()), 2))
    line = caplog.records[0].message
    assert re.match(r"still waiting after \d+ s: process 1 of 2: 127.0.0.1:", line)
    assert "where process 0 should be, does not answer (connection refused)" in line
    unknown = failure_of(launch_of(1, 2, 5, address="no-such-host.invalid"), 0)
    assert "no-such-host.invalid:5, where process 0 should be, does not answer" in unknown
    assert "the host name does not resolve here" in unknown
    assert "torchrun --local-addr" in unknown
    missing = failure_of(launch_of(0, 12, free_port()), 1)
    ranks = "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 3 more of 12 processes"
    assert re.match(rf"gave up after \d+ s: {ranks} did not join ", missing)


def test_a_launcher_that_has_died_is_not_waited_for(monkeypatch):
    """torchrun's own store is there before the processes, so that one does not answer later either."""
    monkeypatch.setattr(rendezvous, "HOSTED_STORE_TIMEOUT_S", 1.0)
    launch = launch_of(1, 2, free_port(), is_hosted=True, run_id="1")
    assert "where torchrun should be, does not answer (" in failure_of(launch, 1800)


def test_processes_of_different_runs_are_refused():
    port = free_port()
    started = [meet_in_thread(launch_of(0, 3, port))]
    store = dist.PrefixStore("lockstep/0", dist.TCPStore("127.0.0.1", port, is_master=False))
    store.wait(["here/0"])
    for rank, world_size, line in (
        (0, 3, "two processes were started as rank 0"),
        (3, 4, "another process of this run has WORLD_SIZE=3"),
    ):
        assert line in failure_of(launch_of(rank, world_size, port, is_hosted=True), 5)
    started += [meet_in_thread(launch_of(rank, 3, port)) for rank in (1, 2)]
    for thread, outcome in started:
        thread.join(30)
        assert not isinstance(outcome[0], str), outcome
