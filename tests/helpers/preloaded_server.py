"""The server of the interpreter that has already imported torch (`tests.helpers.preloaded`).

    python tests/helpers/preloaded_server.py SOCKET

For each client it forks a process that becomes what a new interpreter with the client's arguments would be, and one
that waits for it.
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
import runpy
import select
import signal
import socket
import sys
import tempfile
import threading
import types
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
_PACKAGES = ("utils", "data", "models", "engine", "tools")
_PRELOADED = (
    "torch",
    "torch.distributed",
    "torch.distributed.run",
    "torch._dynamo",
    "torch.utils.tensorboard",
    "torchvision",
    "cv2",
    "yaml",
    "tqdm",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "engine.run.build",
    "engine.commands.val",
    "engine.inference.detect",
    "engine.commands.export",
)


def serve(listener: socket.socket) -> dict:
    """Returns each client's job, in a process of its own. Ends with the session, which holds the other end of stdin."""
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            os._exit(0)
        client, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            return fork_job(client)
        client.close()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # those that have ended
                pass


def fork_job(client: socket.socket) -> dict:
    """Returns the client's job in another process. In this one, sends the client that process's id, and its status when
    it ends."""
    try:
        size, received, _, _ = socket.recv_fds(client, 8, 250)  # copies of the client's open files
        job = json.loads(client.makefile("rb").read(int.from_bytes(size, "big")))
    except (ConnectionError, json.JSONDecodeError):  # the client was killed before it had sent all
        os._exit(0)
    pid = os.fork()
    if pid == 0:
        client.close()
        return job | {"received": received}
    for descriptor in received:
        os.close(descriptor)
    with contextlib.suppress(BrokenPipeError):
        client.sendall(f"{pid}\n".encode())
        ready, _, _ = select.select([client.fileno(), os.pidfd_open(pid)], [], [])
        if client.fileno() in ready:  # it was killed
            os.kill(pid, signal.SIGKILL)
        client.sendall(f"{os.waitpid(pid, 0)[1]}\n".encode())
    os._exit(0)


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
    for number, descriptor in zip(job["descriptors"], received, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if number not in job["descriptors"]:
            setattr(sys, name, None)
    os.setsid()
    take_parent_of(job["client"])
    os.chdir(job["folder"])
    os.environ.clear()
    os.environ |= job["environment"]
    tempfile.tempdir = None
    multiprocessing.set_executable(os.environ.get("LOCKSTEP_TEST_PYTHON", sys.executable))
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads:
        import torch

        torch.set_num_threads(int(threads))


def take_parent_of(client: int) -> None:
    """Makes `os.getppid` return the client's parent in this process, whose own is the server. What this process forks
    has parents as usual."""
    real_getppid = os.getppid
    this_process = os.getpid()
    stat = Path(f"/proc/{client}/stat")

    def getppid() -> int:
        if os.getpid() != this_process:
            return real_getppid()
        return int(stat.read_text().rsplit(")", 1)[1].split()[1])

    os.getppid = getppid


def run(argv: list[str]) -> None:
    """Runs a script, ``-m`` a module or ``-c`` a program, as ``python`` does."""
    if argv[0] == "-u":
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(write_through=True)
        argv = argv[1:]
    main: Any = types.ModuleType("__main__")
    main.__builtins__ = builtins
    sys.modules["__main__"] = main
    kind = argv[0]
    if kind == "-m":
        module = argv[1]
        sys.argv = argv[1:]
        prepare_imports(os.getcwd())
        if module == "torch.distributed.run":
            name_methods_by_frames()
        runpy._run_module_as_main(module)  # type: ignore[attr-defined]
    elif kind == "-c":
        program = argv[1]
        sys.argv = ["-c", *argv[2:]]
        prepare_imports("")
        exec(compile(program, "<string>", "exec"), main.__dict__)
    else:
        script = os.path.abspath(argv[0])
        sys.argv = argv
        prepare_imports(os.path.dirname(os.path.realpath(script)))
        main.__file__ = script
        main.__cached__ = None
        exec(compile(Path(script).read_bytes(), script, "exec"), main.__dict__)


def name_methods_by_frames() -> None:
    """Makes torchrun's records name the calling method without `inspect.stack`, which looks through all modules: these
    are so many here that a launch would take four seconds."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name


def prepare_imports(folder: str) -> None:
    """Puts ``folder`` and PYTHONPATH first on the path. Forgets our packages if those of another tree, or none, would
    be imported with it."""
    from_variable = [os.path.abspath(one) for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
    sys.path[:1] = [folder, *from_variable]
    specs = [importlib.machinery.PathFinder.find_spec(name) for name in _PACKAGES]
    origins = [Path(spec.origin).resolve() for spec in specs if spec is not None and spec.origin is not None]
    if origins != [_ROOT / name / "__init__.py" for name in _PACKAGES]:
        for name in [name for name in sys.modules if name.split(".")[0] in _PACKAGES]:
            del sys.modules[name]


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


def main(address: str) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address + "~")
    listener.listen(64)
    os.rename(address + "~", address)  # it is there only once it can be connected to
    select.select([listener, sys.stdin], [], [])  # a session that starts no process imports nothing
    import_packages()
    job = serve(listener)
    become(job)
    try:
        run(job["argv"])
    except BaseException as error:
        end(error)
    end(None)


if __name__ == "__main__":
    main(sys.argv[1])
