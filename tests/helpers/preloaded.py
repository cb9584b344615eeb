"""A Python interpreter that has already imported torch and our packages, for tests and the processes that they start.

Importing torch takes two to three seconds, and our packages half a second. A server (`tests.helpers.preloaded_server`)
imports them once and forks a process for each request of a client (`tests.helpers.preloaded_client`), including for the
workers of pytest-xdist (tests/conftest.py). The client takes the arguments of ``python``, passes on its open files,
working folder, environment and signals, and ends as the forked process does. Tests get its path from
`python`; torchrun (through ``PYTHON_EXEC``) and multiprocessing start their processes with it.

It is not for tests that check memory, imported modules or SIGSTOP, because the process id is the client's. All
processes of a session share one string hash seed, while each real interpreter has its own.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_VARIABLE = "LOCKSTEP_TEST_PYTHON"
_CLIENT = Path(__file__).with_name("preloaded_client.py")
_SERVER = Path(__file__).with_name("preloaded_server.py")


def python() -> str:
    """Returns the client of this session's server, or a real interpreter if the session has none."""
    return os.environ.get(_VARIABLE, sys.executable)


@contextlib.contextmanager
def preloaded_python() -> Iterator[None]:
    """Runs the server, and makes `python` return its client in this process and its children (pytest's workers)."""
    if _VARIABLE in os.environ:
        multiprocessing.set_executable(python())
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        address = f"{folder}/socket"  # where the client looks for it
        client = Path(folder, "python")
        client.write_text(f"#!{sys.executable} -IS\n{_CLIENT.read_text()}")
        client.chmod(0o755)
        command = [sys.executable, str(_SERVER), address]
        with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as server:
            while not os.path.exists(address):
                assert server.poll() is None
                time.sleep(0.02)
            os.environ |= {_VARIABLE: str(client), "PYTHON_EXEC": str(client)}
            multiprocessing.set_executable(python())
            try:
                yield
            finally:
                del os.environ[_VARIABLE], os.environ["PYTHON_EXEC"]
                multiprocessing.set_executable(sys.executable)
                server.kill()
