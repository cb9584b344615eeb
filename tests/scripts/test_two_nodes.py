"""Two machines in one: trains on two network namespaces joined by a veth pair, two ranks in each, as a user would on
two machines.

The namespaces share no network except this pair, so torchrun's c10d rendezvous and gloo use it. Each node's disk is a
folder.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.helpers.processes import LAUNCHED
from tests.helpers.repository import ROOT
from tests.helpers.tiny import write_dataset, write_model
from utils.files.torch_file import read_checkpoint

ADDRESSES = ("10.213.77.1", "10.213.77.2")
PORT = 29577
COMMON = ["--imgsz", "64", "--batch-size", "8", "--epochs", "2", "--workers", "1", "--device", "cpu", "--amp", "off"]
COMMON += ["--virtual-ranks", "4", "--deterministic", "--noplots", "--optimizer", "SGD"]


@pytest.mark.slow
def test_two_nodes_equal_one_process(tmp_path: Path):
    """The weights are those of one process on the original data, bit for bit. tests/data/test_stage.py counts the reads
    of the shared file system."""
    data = write_dataset(tmp_path / "shared" / "set", train=48, val=12)
    flags = ["train.py", "--data", str(data), "--model", str(write_model(tmp_path / "tiny.yaml")), *COMMON]
    flags += ["--project", str(tmp_path / "runs")]
    with namespaces() as nodes:
        run_on(nodes, tmp_path, [*flags, "--name", "two"])
    environment = clean_environment() | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    subprocess.run([sys.executable, *flags, "--name", "one"], cwd=ROOT, env=environment, check=True, timeout=600)
    two, one = (read_checkpoint(tmp_path / "runs" / name / "last.pt") for name in ("two", "one"))
    for part in ("model", "ema"):
        assert all(torch.equal(two[part][key], one[part][key]) for key in one[part]), part


def clean_environment() -> dict[str, str]:
    """Without the interpreter that forks processes outside of the namespaces."""
    return {k: v for k, v in os.environ.items() if k not in (*LAUNCHED, "PYTHON_EXEC")}


def ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, stderr=None if check else subprocess.DEVNULL)


@contextmanager
def namespaces() -> Iterator[list[str]]:
    """Two namespaces with an address each, joined by a veth pair; always deleted at the end."""
    nodes = [f"lockstep{os.getpid()}-{n}" for n in range(2)]
    links = [f"ls{os.getpid()}n{n}" for n in range(2)]
    try:
        try:
            for node in nodes:
                ip("netns", "add", node)
        except (FileNotFoundError, subprocess.CalledProcessError):
            pytest.skip("needs root and iproute2")
        ip("link", "add", links[0], "netns", nodes[0], "type", "veth", "peer", "name", links[1], "netns", nodes[1])
        for node, link, address in zip(nodes, links, ADDRESSES):
            ip("-n", node, "link", "set", link, "name", "eth0")
            ip("-n", node, "address", "add", f"{address}/24", "dev", "eth0")
            ip("-n", node, "link", "set", "eth0", "up")
            ip("-n", node, "link", "set", "lo", "up")
        yield nodes
    finally:
        if shutil.which("ip") is not None:
            for node in nodes:
                ip("netns", "delete", node, check=False)


def run_on(nodes: list[str], folder: Path, flags: list[str]) -> None:
    """Runs one torchrun of two processes per node; each node has its own disk and caches."""
    runs = []
    for number, (node, address) in enumerate(zip(nodes, ADDRESSES)):
        launcher = ["--nnodes", "2", "--nproc-per-node", "2", "--rdzv-id", flags[-1], "--rdzv-backend", "c10d"]
        launcher += ["--rdzv-endpoint", f"{ADDRESSES[0]}:{PORT}", "--local-addr", address]
        launcher += ["--rdzv-conf", f"is_host={number == 0}"]  # the address is not that of the machine's name here
        command = ["ip", "netns", "exec", node, sys.executable, "-m", "torch.distributed.run", *launcher, *flags]
        command += ["--stage", str(folder / f"disk{number}")]
        environment = clean_environment()
        environment |= {"GLOO_SOCKET_IFNAME": "eth0", "XDG_CACHE_HOME": str(folder / f"cache{number}")}
        runs.append(subprocess.Popen(command, cwd=ROOT, env=environment))
    try:
        codes = [run.wait(timeout=600) for run in runs]
        assert codes == [0, 0], codes
    finally:
        for run in runs:
            if run.poll() is None:
                run.terminate()
                run.wait(timeout=60)
