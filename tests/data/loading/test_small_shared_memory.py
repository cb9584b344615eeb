"""A container's /dev/shm of 64 MiB, the default, limits neither training nor a memory cache. Each process here gets a
/dev/shm of 1 MiB in its own mount namespace.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.preloaded import python
from tests.helpers.repository import ROOT
from tests.helpers.scripts import SMALL
from tests.helpers.tiny import write_dataset, write_model

# As the command unshare does. Workers are interpreters of their own: others would be forked outside of the namespace.
TRAIN = """
import ctypes, multiprocessing, os, sys
from pathlib import Path

MS_PRIVATE, MS_REC, CLONE_NEWNS, CLONE_NEWUSER = 1 << 18, 1 << 14, 0x00020000, 0x10000000
libc, user = ctypes.CDLL(None), os.geteuid()
failed = libc.unshare(CLONE_NEWNS | (CLONE_NEWUSER if user else 0))
if user and not failed:
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
failed = failed or libc.mount(None, b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None)
if failed or libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", ctypes.c_ulong(0), b"size=1m"):
    sys.exit("no namespace")
multiprocessing.set_executable(sys.executable)
if len(sys.argv) > 1:
    import train
    from utils.process.main import run_main

    run_main(train.main)
"""


def train_in_small_memory(*flags: str | Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [python(), "-c", TRAIN, *map(str, flags)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture(scope="module", autouse=True)
def _namespaces() -> None:
    if train_in_small_memory().returncode:
        pytest.skip("needs mount namespaces")


@pytest.fixture(scope="module")
def disk() -> Iterator[Path]:
    """A folder outside of /dev/shm, where those of other tests may be."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def large(disk) -> list[str]:
    """A data set with images of 1.2 MB."""
    folder = disk / "large"
    folder.mkdir()
    data = write_dataset(folder / "set", train=4, val=2, size=640)
    model = write_model(folder / "tiny.yaml")
    return ["--data", str(data), "--model", str(model), *SMALL, "--imgsz", "640", "--epochs", "1"]


@pytest.fixture(scope="module")
def crowded(disk) -> list[str]:
    """A data set whose batches have 24,000 boxes, 0.6 MB: two of them are in transit at a time, and a third is read."""
    folder = disk / "crowded"
    folder.mkdir()
    data = write_dataset(folder / "set", train=48, val=2)
    model = write_model(folder / "tiny.yaml")
    rng = np.random.default_rng(0)
    for path in (folder / "set/labels/train").glob("*.txt"):
        centers = rng.uniform(0.2, 0.8, (1500, 2))
        path.write_text("".join(f"0 {x:.6f} {y:.6f} 0.2 0.2\n" for x, y in centers))
    more = ["--batch-size", "16", "--hyp", "debug", "--epochs", "1"]
    return ["--data", str(data), "--model", str(model), *SMALL, *more]


@pytest.mark.parametrize(
    ("kind", "more"), [("large", ["--cache", "ram"]), pytest.param("crowded", [], marks=pytest.mark.slow)]
)
def test_training_needs_no_shared_memory_of_the_file_system(request, disk, monkeypatch, kind, more):
    monkeypatch.setenv("XDG_CACHE_HOME", str(disk / "cache"))
    project = disk / f"runs of {kind}{''.join(more)}"
    flags = [*request.getfixturevalue(kind), "--workers", "1", *more, "--project", str(project)]
    done = train_in_small_memory(*flags)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (project / "exp" / "last.pt").is_file()
