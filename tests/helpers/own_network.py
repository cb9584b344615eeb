"""Runs a command in a network of its own, whose name server notes the names that it is asked for.

    python tests/helpers/own_network.py NOTED COMMAND...

The network has nothing but a loopback interface. The names are appended to the file NOTED. Ends with "no namespace" on
a system that does not permit such networks.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import signal
import socket
import struct
import sys
from pathlib import Path

CLONE_NEWNS = 1 << 17
CLONE_NEWUSER = 1 << 28
CLONE_NEWNET = 1 << 30
MS_BIND = 1 << 12
MS_REC = 1 << 14
MS_PRIVATE = 1 << 18
SIOCSIFFLAGS = 0x8914
IFF_UP = 1
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)


def main(noted: str, command: list[str]) -> None:
    Path(noted).write_text("")
    servers = Path(f"{noted}.servers")
    servers.write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
    if not enter_namespaces() or not replace_name_servers(servers):
        sys.exit("no namespace")
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    fcntl.ioctl(server, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", IFF_UP))
    server.bind(("127.0.0.1", 53))
    if os.fork():
        server.close()
        os.execv(command[0], command)
    answer_nothing(server, noted)


def enter_namespaces() -> bool:
    """Gives this process mounts and a network of its own. Returns False if the system does not permit it."""
    user = os.geteuid()
    if LIBC.unshare(CLONE_NEWNS | CLONE_NEWNET | (CLONE_NEWUSER if user else 0)):
        return False
    if user:
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    return True


def replace_name_servers(servers: Path) -> bool:
    """Mounts ``servers`` over /etc/resolv.conf, for this process only. Returns False if that is not permitted."""
    private = LIBC.mount(None, b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None)
    return not private and not LIBC.mount(
        os.fsencode(servers), b"/etc/resolv.conf", None, ctypes.c_ulong(MS_BIND), None
    )


def answer_nothing(server: socket.socket, noted: str) -> None:
    """Notes the names in the questions until the command ends, whose process is the parent of this one."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for stream in (0, 1, 2):
        os.close(stream)
    while True:
        question = server.recv(4096)
        labels = re.findall(rb"[\x01-\x3f]([\w-]+)", question[12:])
        with open(noted, "ab") as file:
            file.write(b".".join(labels) + b"\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
