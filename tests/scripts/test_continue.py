"""A job that is killed after its last epoch, in its report or its export, and starts again with ``--resume auto``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from engine.run.complete_record import record_reported
from engine.run.run import RunSettings
from tests.helpers.repository import ROOT
from tests.helpers.same_content import assert_same_content
from tests.helpers.scripts import SMALL, run_python
from tests.helpers.tiny import write_dataset, write_model
from utils.config.settings import Hyperparameters, TrainConfig
from utils.files.torch_file import read_checkpoint

EPOCHS = 2
# train.py, but the process that comes to the place that its first argument names is killed there; for SIGTERM, it gets
# that in its export. A report is one line, since drawing takes seconds. An export is an empty file: the small models of
# tests detect nothing, so a file of theirs cannot be checked.
SCRIPT = f"""
import os, signal, sys, time
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})

def write_report(page, history):
    epochs = len(history.get("epoch", ()))
    if place == "report" and epochs == {EPOCHS}:
        last = Path("runs", sys.argv[sys.argv.index("--name") + 1], "last.pt")
        while read_progress(last).epoch < {EPOCHS}:  # it is written in the background
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    page.path.write_text(f"after epoch {{epochs}}")
    page.is_written = True

def export(config):
    if place == "export":
        os.kill(os.getpid(), signal.SIGKILL)
    if place == "SIGTERM":
        os.kill(os.getpid(), signal.SIGTERM)
    path = Path(config.weights).with_suffix(".torchscript")
    path.touch()

if __name__ == "__main__":
    import engine.commands.export
    import train
    from engine.checkpoint.progress import read_progress
    from engine.report.page import ReportPage
    from utils.process.entrypoint import run_main
    place = sys.argv.pop(1)
    ReportPage.write = write_report
    engine.commands.export.export = export
    run_main(train.main)
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_dataset(folder / "set", train=4, val=2)
    write_model(folder / "tiny.yaml")
    (folder / "killed.py").write_text(SCRIPT)
    return folder


@pytest.mark.usefixtures("preloaded")
@pytest.mark.parametrize("torchrun", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_job_that_is_killed_in_its_report_and_then_in_its_export_ends_well(inputs: Path, torchrun: int):
    folder = inputs / "runs" / f"exp{torchrun}"
    flags = [flag for flag in SMALL if flag != "--noplots"]
    flags += ["--data", "set/data.yaml", "--model", "tiny.yaml", "--epochs", EPOCHS, "--cache-dir", inputs / "cache"]
    flags += ["--project", "runs", "--name", folder.name, "--resume", "auto", "--export", "torchscript"]
    killed = 1 if torchrun > 1 else -9

    run_python("killed.py", "report", *flags, folder=inputs, torchrun=torchrun, code=killed)
    last = read_checkpoint(folder / "last.pt")
    assert (folder / "report.html").read_text() == f"after epoch {EPOCHS - 1}"

    run_python("killed.py", "export", *flags, folder=inputs, torchrun=torchrun, code=killed)
    assert (folder / "report.html").read_text() == f"after epoch {EPOCHS}"
    log = (folder / "train.log").read_text()
    assert log.count(f"epoch {EPOCHS}: P ") == 1
    assert not (folder / "best.torchscript").exists()

    run_python("killed.py", "SIGTERM", *flags, folder=inputs, torchrun=torchrun)
    assert (folder / "best.torchscript").exists()
    assert (folder / "train.log").read_text() == log  # nothing else was left to do
    assert_same_content(read_checkpoint(folder / "last.pt"), last)  # writing the report does not change it


@pytest.mark.usefixtures("preloaded")
def test_a_run_that_has_ended_also_ends_its_evaluating_processes(tmp_path: Path):
    """They wait for a message in the store of torchrun, which outlives rank 0."""
    folder = tmp_path / "exp"
    folder.mkdir()
    settings = RunSettings(TrainConfig(project=".", epochs=3), Hyperparameters())
    stored = {"run_id": "run", **asdict(settings)}
    (folder / "settings.yaml").write_text(yaml.safe_dump(stored))
    record_reported(folder, "run", epochs=3)
    flags = ["--project", ".", "--resume", "auto", "--epochs", 3, "--device", "cpu", "--eval-ranks", 1]
    result = run_python(ROOT / "train.py", *flags, folder=tmp_path, torchrun=2, timeout=120)
    assert "exp: complete: its report after 3 epochs is written, and " in result.stdout
