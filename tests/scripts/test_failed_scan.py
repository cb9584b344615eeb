"""train.py under torchrun when the first process fails or is killed during the scan, while the other waits for it."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.preloaded import python
from tests.helpers.processes import Processes
from tests.helpers.scripts import SMALL
from tests.helpers.tiny import write_dataset, write_model


def start(run: Processes, folder: Path, data: Path) -> None:
    flags = ["--data", data, "--model", write_model(folder / "tiny.yaml"), "--project", folder, "--epochs", 1, *SMALL]
    flags += ["--cache-dir", folder / "cache"]
    run.torchrun(["--standalone", "--nproc_per_node", "2"], *map(str, flags), agent=python())


def test_a_leader_that_fails_during_the_scan_prints_the_reason_once(tmp_path):
    data = write_dataset(tmp_path / "set")
    for image in (data.parent / "images" / "train").iterdir():
        image.write_bytes(b"no image")
    with Processes(tmp_path / "log") as run:
        start(run, tmp_path, data)
        assert run.codes(120) != [0]
        assert run.output().count("error: ") == 1, run.output()
        assert "10 of 10 images and 19 of 19 objects" in run.output()
        assert not run.alive()
