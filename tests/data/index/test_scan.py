"""train.py under torchrun when the first process fails or is killed during the scan, while the other waits for it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.helpers.preloaded import python
from tests.helpers.tiny import write_dataset, write_model

ROOT = Path(__file__).parents[3]


def start(tmp_path: Path, data: Path, odd: str = "", cache: Path | None = None) -> subprocess.Popen:
    command = [python(), "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += ["tests/robustness/odd_train.py" if odd else "train.py"]
    command += ["--data", str(data), "--model", str(write_model(tmp_path / "tiny.yaml")), "--project", str(tmp_path)]
    command += ["--imgsz", "64", "--batch-size", "4", "--device", "cpu", "--workers", "0", "--epochs", "1", "--noplots"]
    command += ["--cache-dir", str(cache)] if cache else []
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    environment |= {"STARTED_BY_TEST": str(tmp_path), "ODD": odd}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)


def processes_of(tmp_path: Path) -> dict[int, bytes]:
    """Environments of the running processes that ``start`` has started, by process id."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = b"\0" + (folder / "environ").read_bytes()
        except OSError:
            continue
        if f"\0STARTED_BY_TEST={tmp_path}\0".encode() in environment:
            found[int(folder.name)] = environment
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
def test_a_leader_that_is_killed_during_the_scan_ends_the_run(tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir()
    run = start(tmp_path, write_dataset(tmp_path / "set"), f"kill:{cache / 'calls'}:1", cache)  # as it writes the index
    while not (cache / "calls").exists() or not (cache / "calls").stat().st_size:
        time.sleep(0.02)
        assert run.poll() is None
    killed_at = time.monotonic()
    try:
        output, _ = run.communicate(timeout=30)
        assert time.monotonic() - killed_at < 10
    finally:
        for pid in processes_of(tmp_path):
            os.kill(pid, signal.SIGKILL)
    assert "done:" not in output
    assert run.returncode != 0
    assert "died while the others waited for it" in output or "SIGKILL" in output
    assert "Traceback" not in output.split("torch/distributed")[0]
    assert not processes_of(tmp_path)


def test_a_leader_that_fails_during_the_scan_prints_the_reason_once(tmp_path):
    data = write_dataset(tmp_path / "set")
    for image in (data.parent / "images" / "train").iterdir():
        image.write_bytes(b"no image")
    run = start(tmp_path, data)
    output, _ = run.communicate(timeout=120)
    assert run.returncode != 0
    assert output.count("error: 'train': 10 of 10 images can't be used") == 1, output
    assert not processes_of(tmp_path)
