"""A container's /dev/shm of 64 MiB, the default, does not limit training; a memory cache that does not fit there is
refused with one line. Each process here gets a /dev/shm of 1 MiB in its own mount namespace.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.scripts import SMALL
from tests.helpers.tiny import write_dataset, write_model

ROOT = Path(__file__).parents[2]
UNSHARE = ["unshare", "--mount", *([] if hasattr(os, "geteuid") and os.geteuid() == 0 else ["--map-root-user"])]
MOUNT = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"'


def in_small_memory(*command: str | Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*UNSHARE, "sh", "-c", MOUNT, "sh", *map(str, command)],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _namespaces() -> None:
    if shutil.which("unshare") is None or in_small_memory("true").returncode:
        pytest.skip("needs mount namespaces")


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> list[str]:
    """A data set with images of 1.2 MB."""
    folder = tmp_path_factory.mktemp("large")
    data, model = write_dataset(folder / "set", train=4, val=2, size=640), write_model(folder / "tiny.yaml")
    return ["--data", str(data), "--model", str(model), *SMALL, "--imgsz", "640", "--epochs", "1"]


@pytest.fixture(scope="module")
def crowded(tmp_path_factory) -> list[str]:
    """A data set whose batches have 24,000 boxes, 0.6 MB: two of them are in transit at a time, and a third is read."""
    folder = tmp_path_factory.mktemp("crowded")
    data, model = write_dataset(folder / "set", train=48, val=2), write_model(folder / "tiny.yaml")
    rng = np.random.default_rng(0)
    for path in (folder / "set/labels/train").glob("*.txt"):
        centers = rng.uniform(0.2, 0.8, (1500, 2))
        path.write_text("".join(f"0 {x:.6f} {y:.6f} 0.2 0.2\n" for x, y in centers))
    more = ["--batch-size", "16", "--hyp", "debug", "--epochs", "1"]
    return ["--data", str(data), "--model", str(model), *SMALL, *more]


OTHERS = [
    pytest.param(*case, marks=pytest.mark.slow) for case in (("large", ["--render-on", "device"]), ("crowded", []))
]


@pytest.mark.parametrize(("kind", "more"), [("large", []), *OTHERS])
def test_training_needs_no_shared_memory_of_the_file_system(request, tmp_path, kind, more):
    flags = [*request.getfixturevalue(kind), "--workers", "1", *more, "--project", str(tmp_path)]
    done = in_small_memory(sys.executable, "train.py", *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "exp" / "last.pt").is_file()


def test_a_memory_cache_that_does_not_fit_is_refused(large, tmp_path):
    done = in_small_memory(sys.executable, "train.py", *large, "--cache", "ram", "--project", tmp_path)
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 2, done.stdout + done.stderr
    assert len(lines) == 1
    assert "--cache ram: needs" in lines[0]
    assert "--shm-size" in lines[0]
    assert "Traceback" not in done.stderr
