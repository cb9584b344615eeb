"""Takes the arguments of ``python``, and has the server of `tests.helpers.preloaded_server` run them.

`tests.helpers.preloaded` copies this file beside the server's socket, below a line that makes it a program. It runs
without site-packages, in 20 ms; importing pathlib and typing would take three more each.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

ANSWERED_FLAGS = ("-c", "-m", "-u")  # a real interpreter gets all others
FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main(argv: list[str]) -> None:
    if not argv or (argv[0].startswith("-") and argv[0] not in ANSWERED_FLAGS):
        os.execv(sys.executable, [sys.executable, *argv])
    server = socket.socket(socket.AF_UNIX)
    server.connect(os.path.join(os.path.dirname(__file__), "socket"))
    send_job(server, argv)
    answers = server.makefile("r")
    forward_signals(int(answers.readline()))
    end_as(int(answers.readline()))


def send_job(server: socket.socket, argv: list[str]) -> None:
    """Sends the arguments, what a process inherits from its parent, and the open files, which are closed here."""
    descriptors = [int(name) for name in os.listdir("/proc/self/fd") if int(name) != server.fileno()]
    descriptors = [number for number in descriptors if os.path.exists(f"/proc/self/fd/{number}")]  # not listdir's own
    job = {
        "argv": argv,
        "folder": os.getcwd(),
        "environment": dict(os.environ),
        "client": os.getpid(),
        "descriptors": descriptors,
    }
    content = json.dumps(job).encode()
    socket.send_fds(server, [len(content).to_bytes(8, "big")], descriptors)
    server.sendall(content)
    for number in descriptors:
        os.close(number)


def forward_signals(child: int) -> None:
    def forward(number: int, frame: object) -> None:
        try:
            os.kill(child, number)
        except ProcessLookupError:
            pass

    for number in FORWARDED_SIGNALS:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED_SIGNALS)


def end_as(status: int) -> None:
    """Ends this process as ``status``, a wait status, says that the forked one has ended."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


if __name__ == "__main__":
    main(sys.argv[1:])
