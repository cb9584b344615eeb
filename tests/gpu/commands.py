"""Runs scripts as a user does: in real interpreters."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from tests.helpers.processes import Processes

# A borrowed machine may have no other network interface than the loopback, and a name that does not resolve.
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc_per_node")
TIMEOUT_S = 280.0


def run(*arguments: object, code: int = 0, **environment: str) -> str:
    """Runs ``python ARGUMENTS`` in the repository's folder. Returns its output. Fails unless it exits with ``code``."""
    with tempfile.TemporaryDirectory() as folder, Processes(Path(folder, "log.txt"), real=True) as processes:
        processes.start([processes.python, *map(str, arguments)], **LOOPBACK, **environment)
        assert processes.codes(TIMEOUT_S) == [code], processes.output()
        return processes.output()


def scores_of(weights: Path, device: str, project: Path) -> dict:
    """Validates with val.py on ``device``. Returns the content of its results.json."""
    run("val.py", "--weights", weights, "--device", device, "--trust", "--noplots", "--exist-ok", "--project", project)
    return json.loads((project / "exp" / "results.json").read_text(encoding="utf-8"))
