"""A Python interpreter that has already imported torch and our packages, for tests and the processes that they start.

Importing torch takes two to three seconds, and our packages half a second. A server imports them once and forks a
process for each request of a client, including for the workers of pytest-xdist (tests/conftest.py). The client is a
program that takes the arguments of ``python``, passes on its open files, working folder, environment, file size limit
and signals, and ends as the forked process does. Tests get its path from `python`; torchrun (through ``PYTHON_EXEC``)
and multiprocessing start their processes with it.

It is not for tests that check memory, imported modules or SIGSTOP, because the process id is the client's. All
processes of a session share one string hash seed, while each real interpreter has its own.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import fcntl
import gc
import importlib.machinery
import io
import json
import multiprocessing
import os
import resource
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_VARIABLE = "LOCKSTEP_TEST_PYTHON"
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_PRELOADED = (
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "torch.utils.tensorboard",
    "torchvision",
    "cv2",
    "yaml",
    "tqdm",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "engine.assembly.build",
    "engine.commands.val",
    "engine.commands.detect",
    "engine.commands.export",
)
_ROOT = Path(__file__).parents[2]
_PACKAGES = ("utils", "data", "models", "engine", "tools")

# Runs without site-packages, in 20 ms.
_CLIENT = """\
#!{python} -IS
import json, os, resource, signal, socket, sys
argv = sys.argv[1:]
if not argv or (argv[0].startswith("-") and argv[0] not in ("-c", "-m", "-u", "-B")):
    os.execv({python!r}, [{python!r}, *argv])
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
mask = os.umask(0)
os.umask(mask)
job = dict(argv=argv, folder=os.getcwd(), environment=dict(os.environ), group=os.getpgrp(), umask=mask,
           client=os.getpid(), file_size=resource.getrlimit(resource.RLIMIT_FSIZE))
numbers = [n for n in map(int, os.listdir("/proc/self/fd")) if n != server.fileno()]
job["numbers"] = numbers = [n for n in numbers if os.path.exists(f"/proc/self/fd/{{n}}")]
content = json.dumps(job).encode()
socket.send_fds(server, [len(content).to_bytes(8, "big")], numbers)
server.sendall(content)
for number in numbers:
    os.close(number)
answer = server.makefile("r")
child = int(answer.readline())
def forward(number, frame):
    try:
        os.kill(child, number)
    except ProcessLookupError:
        pass
for number in {forwarded}:
    signal.signal(number, forward)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {forwarded})
status = int(answer.readline())
if os.WIFSIGNALED(status):
    signal.signal(os.WTERMSIG(status), signal.SIG_DFL) if os.WTERMSIG(status) != signal.SIGKILL else None
    os.kill(os.getpid(), os.WTERMSIG(status))
os._exit(os.WEXITSTATUS(status))
"""


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
        address = f"{folder}/socket"
        client = Path(folder, "python")
        client.write_text(_CLIENT.format(python=sys.executable, address=address, forwarded=[*map(int, _FORWARDED)]))
        client.chmod(0o755)
        command = [sys.executable, __file__, address]
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


@dataclass(frozen=True)
class _Child:
    """A forked process, and the client that waits for it."""

    pid: int
    pidfd: int
    client: socket.socket


class _Server:
    """Forks a process for each client's job. Ends with the session, which holds the other end of its stdin."""

    def __init__(self, address: str) -> None:
        self._children: dict[int, _Child] = {}  # by pidfd
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address + "~")
        self._listener.listen(64)
        os.rename(address + "~", address)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(sys.stdin, selectors.EVENT_READ)

    def wait_for_client(self) -> None:
        self._selector.select()

    def serve(self) -> dict:
        """Serves clients. Returns only in forked processes, with the job that the client sent."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is sys.stdin:
                    os._exit(0)
                if key.fileobj is self._listener:
                    job = self._accept()
                    if job is not None:
                        return job
                elif key.data in self._children:  # else it was finished in this round
                    child = self._children[key.data]
                    if key.fileobj is child.client:  # it was killed
                        os.kill(child.pid, signal.SIGKILL)
                    self._finish(child)

    def _accept(self) -> dict | None:
        """Forks a process for the next client. Returns its job in that process, and None in this one."""
        client, _ = self._listener.accept()
        received: list[int] = []  # copies of the client's open files
        try:
            size, received, _, _ = socket.recv_fds(client, 8, 250)
            job = json.loads(client.makefile("rb").read(int.from_bytes(size, "big")))
        except (ConnectionError, json.JSONDecodeError):  # the client was killed before it had sent all
            for descriptor in (*received, client.detach()):
                os.close(descriptor)
            return None
        pid = os.fork()
        if pid == 0:
            client.close()
            self._close_all()
            return job | {"received": received}
        for descriptor in received:
            os.close(descriptor)
        with contextlib.suppress(BrokenPipeError):  # the client was killed: seen by `serve`
            client.sendall(f"{pid}\n".encode())
        child = _Child(pid, os.pidfd_open(pid), client)
        self._children[child.pidfd] = child
        self._selector.register(child.pidfd, selectors.EVENT_READ, child.pidfd)
        self._selector.register(client, selectors.EVENT_READ, child.pidfd)
        return None

    def _finish(self, child: _Child) -> None:
        """Waits for a process to end, and sends its status to the client."""
        _, status = os.waitpid(child.pid, 0)
        with contextlib.suppress(BrokenPipeError):
            child.client.sendall(f"{status}\n".encode())
        self._selector.unregister(child.pidfd)
        self._selector.unregister(child.client)
        child.client.close()
        os.close(child.pidfd)
        del self._children[child.pidfd]

    def _close_all(self) -> None:
        """Closes the files that a forked process must not keep."""
        for child in self._children.values():
            child.client.close()
            os.close(child.pidfd)
        self._listener.close()
        self._selector.close()


def import_packages() -> None:
    """Imports the modules that most programs use."""
    sys.path.insert(0, str(_ROOT))
    for name in _PRELOADED:
        importlib.import_module(name)
    sys.path.pop(0)
    gc.freeze()  # their pages stay shared


def become(job: dict) -> None:
    """Gives this process the state that a new interpreter would have inherited from the client."""
    # Above the numbers that they get, so that none is replaced before it has been used.
    received = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 1000) for descriptor in job["received"]]
    os.closerange(0, 1000)
    for number, descriptor in zip(job["numbers"], received, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if number not in job["numbers"]:
            setattr(sys, name, None)
    try:
        os.setpgid(0, job["group"])
    except OSError:  # the group of a client that leads another session
        os.setsid()
    parent = os.getppid
    me = os.getpid()
    stat = Path(f"/proc/{job['client']}/stat")
    # Its parent is the client's, not the server. What it forks has parents as usual.
    os.getppid = lambda: int(stat.read_text().rsplit(")", 1)[1].split()[1]) if os.getpid() == me else parent()
    os.umask(job["umask"])
    resource.setrlimit(resource.RLIMIT_FSIZE, job["file_size"])
    os.chdir(job["folder"])
    os.environ.clear()
    os.environ |= job["environment"]
    time.tzset()
    tempfile.tempdir = None
    multiprocessing.set_executable(python())
    sys.orig_argv = [sys.executable, *job["argv"]]
    if threads := os.environ.get("OMP_NUM_THREADS"):
        import torch

        torch.set_num_threads(int(threads))


def run(argv: list[str]) -> None:
    """Runs a script, ``-m`` a module or ``-c`` a program, as ``python`` does."""
    if "-B" in argv[:2]:  # multiprocessing passes it on
        sys.dont_write_bytecode = True
        argv.remove("-B")
    if argv[0] == "-u":
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(write_through=True)
        argv = argv[1:]
    first = 0 if argv[0] not in ("-c", "-m") else 1
    kind = argv[0]
    what = argv[first]
    sys.argv = argv[first:]
    main: Any = types.ModuleType("__main__")
    main.__builtins__ = builtins
    sys.modules["__main__"] = main
    extra = [os.path.abspath(one) for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
    sys.path[:1] = [os.getcwd() if kind == "-m" else "" if first else os.path.dirname(os.path.realpath(what)), *extra]
    specs = [importlib.machinery.PathFinder.find_spec(name) for name in _PACKAGES]
    imported_from = [Path(spec.origin).resolve() for spec in specs if spec is not None and spec.origin is not None]
    if imported_from != [_ROOT / name / "__init__.py" for name in _PACKAGES]:  # those of another tree, or none
        for name in [name for name in sys.modules if name.split(".")[0] in _PACKAGES]:
            del sys.modules[name]
    if kind == "-m":
        runpy._run_module_as_main(what)  # type: ignore[attr-defined]
    elif first:
        sys.argv[0] = "-c"
        exec(compile(what, "<string>", "exec"), main.__dict__)
    else:
        main.__file__ = what
        main.__cached__ = None
        exec(compile(Path(what).read_bytes(), what, "exec"), main.__dict__)


def end(error: BaseException | None) -> None:
    """Ends this process as an interpreter would, but without tearing down its modules, which takes a second."""
    status = 0
    if isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    elif error is not None:
        status = 1
        sys.excepthook(type(error), error, error.__traceback__)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()
    if isinstance(error, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status & 0xFF)


if __name__ == "__main__":
    server = _Server(sys.argv[1])
    server.wait_for_client()  # a session that starts no process imports nothing
    import_packages()
    job = server.serve()
    become(job)
    try:
        run(job["argv"])
    except BaseException as error:
        end(error)
    end(None)
