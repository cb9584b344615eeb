"""The main road on a system like Windows, as far as Linux can imitate it.

The code of this project sees the modules of Windows: no fcntl, os and signal without the calls of POSIX. A file that is
open or mapped can be neither replaced nor removed, and processes are spawned. Paths, and the packages that this project
uses, remain those of Linux. .github/workflows/tests.yml trains on Windows itself.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import train
from tests.helpers.exports import calibrated_detector
from tests.helpers.repository import ROOT
from tests.helpers.tiny import TINY_MODEL, write_dataset, write_detector
from utils.files.torch_file import read_checkpoint

# Python runs this module when it starts, also in spawned processes.
SITECUSTOMIZE = '''
import builtins, multiprocessing, os, signal, sys, types

MISSING_MODULES = {"fcntl", "grp", "pwd", "resource", "termios"}
MISSING_NAMES = set("""
    O_CLOEXEC O_DIRECTORY O_NOFOLLOW O_NONBLOCK O_SYNC fchmod fchown fork forkpty fstatvfs fwalk getegid geteuid getgid
    getloadavg getpgid getsid getuid killpg lchown memfd_create mkfifo mknod nice posix_fadvise posix_fallocate pread
    preadv pwrite pwritev register_at_fork sched_getaffinity sched_setaffinity sendfile setpgid setsid statvfs sync
    sysconf uname SIGALRM SIGBUS SIGCHLD SIGHUP SIGKILL SIGPIPE SIGQUIT SIGUSR1 SIGUSR2 SIG_BLOCK SIG_UNBLOCK alarm
    pause pthread_kill pthread_sigmask setitimer siginterrupt sigpending sigtimedwait sigwait sigwaitinfo
""".split())


class ModuleOfWindows(types.ModuleType):
    def __init__(self, module, **values):
        vars(self).update(values, module=module)

    def __getattr__(self, name):
        if name in MISSING_NAMES:
            raise AttributeError(f"Windows has no {name}")
        return getattr(self.module, name)

    def __setattr__(self, name, value):
        setattr(self.module, name, value)


seen = {
    "os": ModuleOfWindows(os, name="nt", O_BINARY=0),
    "signal": ModuleOfWindows(signal),
    "sys": ModuleOfWindows(sys, platform="win32"),
}
import_module = builtins.__import__


def import_as_on_windows(name, globals=None, *args, **options):
    importer = (globals or {}).get("__file__") or ""
    if importer.startswith(os.environ["PROJECT"]) and "site-packages" not in importer:
        if name in MISSING_MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        if name in seen:
            return seen[name]
    return import_module(name, globals, *args, **options)


def is_in_use(path):
    """Whether this process has opened or mapped a file."""
    if not os.path.isfile(path):
        return False
    path = os.path.realpath(path)
    opened = {os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")}
    return path in opened or any(line.endswith(f" {path}\\n") for line in open("/proc/self/maps"))


def refuse_in_use(call):
    def checked(*paths, **options):
        for path in paths:
            if is_in_use(path):
                raise PermissionError(13, "the file is used by another process", str(path))
        return call(*paths, **options)

    return checked


for name in ("remove", "rename", "replace", "unlink"):
    setattr(os, name, refuse_in_use(getattr(os, name)))
builtins.__import__ = import_as_on_windows
multiprocessing.set_start_method("spawn")
'''

# One process runs all commands, because importing torch takes longest.
COMMANDS = """
import sys

if __name__ == "__main__":
    import detect, export, train, val
    from tools.check.__main__ import main as check
    from utils.errors import UserError

    weights, *flags = sys.argv[1:]
    train.main(flags)
    train.main(["--resume", "runs/exp", "--epochs", "2"])
    val.main(["--weights", "runs/exp/best.pt", "--workers", "0", "--project", "val"])
    detect.main(["--weights", weights, "--source", "set/images/val", "--save-txt", "--save-crop", "--project", "seen"])
    export.main(["--weights", weights, "--format", "torchscript", "--data", "set/data.yaml"])
    check(["set/data.yaml"])
    for refused in (["--spawn", "2"], ["--cache", "disk"], ["--cache", "ram"], ["--stage", "copy"]):
        try:
            train.main([*flags, *refused])
        except UserError as error:
            print("refused:", error)
"""


@pytest.mark.slow
def test_train_resume_val_detect_export_and_check_need_no_call_of_posix(tmp_path: Path):
    write_dataset(tmp_path / "set", train=16, val=8)
    detector = calibrated_detector(TINY_MODEL, ("light", "dark"))
    weights = write_detector(tmp_path / "start.pt", detector)
    flags = ["--data", "set/data.yaml", "--weights", "start.pt", "--imgsz", "64", "--batch-size", "8", "--epochs", "1"]
    flags += ["--device", "cpu", "--project"]
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE, encoding="utf-8")
    (tmp_path / "commands.py").write_text(COMMANDS, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "PROJECT": str(ROOT)}
    command = [sys.executable, "commands.py", str(weights), *flags, "runs", "--workers", "2"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    refused = [line for line in done.stdout.splitlines() if line.startswith("refused: ")]
    assert [line.rpartition(": ")[2] for line in refused] == ["needs Linux or macOS"] * 4, done.stdout
    assert len((tmp_path / "runs/exp/results.csv").read_text("utf-8").splitlines()) == 3
    assert any((tmp_path / "seen/exp/labels").glob("*.txt"))
    assert any((tmp_path / "seen/exp/crops").glob("*/*.jpg"))
    assert (tmp_path / "start.torchscript").exists()
    assert (tmp_path / "val/exp/report.html").exists()
    assert (tmp_path / "runs/check/exp/report.html").exists()

    train.main([*flags, "linux", "--workers", "0"])
    train.main(["--resume", "linux/exp", "--epochs", "2"])
    ours, theirs = (read_checkpoint(tmp_path / runs / "exp/last.pt") for runs in ("linux", "runs"))
    assert all(torch.equal(ours["model"][name], theirs["model"][name]) for name in ours["model"])
