"""Runs a process under strace, which watches its system calls and those of the processes that it starts."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.processes import LAUNCHED

CALLS = "openat,bind,listen,connect,sendto,sendmsg,sendmmsg"
# An address of a call, as strace writes it.
ADDRESS = re.compile(r'inet_addr\("([^"]+)"\)|inet_pton\(AF_INET6, "([^"]+)"')
OWN_ADDRESS = re.compile(r"127\.|::1$|::ffff:127\.|0\.0\.0\.0$|::$")
BOUND = re.compile(r"\bbind\(\d+<([^>]*)>.*\{sa_family=(AF_INET6?),")
LISTENING = re.compile(r"\blisten\(\d+<([^>]*)>")
OPENED = re.compile(r'\bopenat\(AT_FDCWD<([^>]*)>, "([^"]*)"')


@dataclass(frozen=True)
class Watched:
    """The result of a process, its system calls, and the files that it has left."""

    done: subprocess.CompletedProcess[str]
    calls: str  # strace's record; "" without strace
    home: list[str]  # files in its home folder, but those of our cache

    @property
    def asked(self) -> list[str]:
        """The addresses of other machines that were contacted."""
        found = {version4 or version6 for version4, version6 in ADDRESS.findall(self.calls)}
        return sorted(address for address in found if not OWN_ADDRESS.match(address))

    @property
    def listens_to_others(self) -> bool:
        """Whether a socket listened at another address than 127.0.0.1."""
        listening = {*LISTENING.findall(self.calls)}
        return any(
            found[1] in listening and '"127.0.0.1"' not in line
            for line in self.calls.splitlines()
            if (found := BOUND.search(line))
        )

    def opened_below(self, folder: Path) -> set[Path]:
        """Returns what a process has opened, or tried to open, below ``folder``, relative to it."""
        paths = {Path(os.path.normpath(Path(*opened))) for opened in OPENED.findall(self.calls)}
        return {path.relative_to(folder) for path in paths if folder in path.parents}


def watch(argv: Sequence[object], folder: Path, working_folder: Path | None = None, **variables: str) -> Watched:
    """Runs ``python ARGV``, without strace where nothing can watch it.

    Args:
        folder: for its home folder and the record.
        working_folder: by default ``folder``.
        variables: additions to the environment.
    """
    home = folder / "home"
    noted = folder / "noted"
    home.mkdir(parents=True)
    command = [sys.executable, *map(str, argv)]
    removed = {*LAUNCHED, "XDG_CACHE_HOME", "MPLCONFIGDIR", "PYTHON_EXEC", "LD_LIBRARY_PATH"}  # OpenCV sets the last
    environment = {name: value for name, value in os.environ.items() if name not in removed}
    environment |= {"HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1", **variables}
    if strace_works():
        # --seccomp-bpf: the kernel stops the process at these calls alone, not at all of them.
        options = ["-f", "--seccomp-bpf", "-qq", "-y", "-e", f"trace={CALLS}", "-o", str(noted)]
        command = ["strace", *options, *command]
    done = subprocess.run(
        command, cwd=working_folder or folder, env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    files = (path.relative_to(home).as_posix() for path in home.rglob("*") if not path.is_dir())
    return Watched(
        done=done,
        calls=noted.read_text(errors="replace") if noted.exists() else "",
        home=sorted(name for name in files if not name.startswith(".cache/lockstep/")),
    )


def strace_works() -> bool:
    """Whether strace is installed, and may watch processes here."""
    return (
        shutil.which("strace") is not None
        and not subprocess.run(["strace", "-qq", "-o", os.devnull, "true"]).returncode
    )


def require_strace() -> None:
    """Skips the test where nothing can watch a process."""
    if not strace_works():
        pytest.skip("needs strace, and the permission to watch processes")
