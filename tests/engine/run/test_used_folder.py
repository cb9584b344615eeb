"""A run in the folder of an earlier one (``--exist-ok``) is killed, and either run continues as if nothing had been."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from engine.checkpoint.newest_run import newest_run_id, run_id_of
from tests.helpers.processes import Processes
from tests.helpers.same_content import assert_same_run
from tests.helpers.scripts import SMALL
from tests.helpers.tiny import write_dataset, write_model
from utils.files.torch_file import read_checkpoint

REFUSED = 2  # exit status


def train(project: Path, *flags: object, faults: str = "") -> tuple[int, str]:
    """Runs train.py, and returns its exit status and output. The scores of its models differ, as `rated` makes them."""
    log = project / "log.txt"
    log.unlink(missing_ok=True)
    with Processes(log, faults=f"rated;{faults}") as run:
        run.ranks(1, *map(str, flags))
        (status,) = run.codes()
        return status, run.output()


def begin(references: Path, project: Path, *, seed: int, faults: str = "") -> int:
    """Trains a run of two epochs in ``project``/exp, whatever is there. Returns the exit status."""
    project.mkdir(exist_ok=True)
    files = [
        "--data",
        references / "set" / "data.yaml",
        "--model",
        references / "tiny.yaml",
        "--cache-dir",
        references / "cache",
    ]
    status, output = train(
        project, *files, *SMALL, "--project", project, "--exist-ok", "--epochs", 2, "--seed", seed, faults=faults
    )
    assert status in (0, -signal.SIGKILL), output
    return status


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs that nothing has interrupted: the earlier one, the same with a third epoch, and the new one."""
    root = tmp_path_factory.mktemp("references")
    write_dataset(root / "set", train=8, val=4)
    write_model(root / "tiny.yaml")
    begin(root, root / "earlier", seed=1)
    shutil.copytree(root / "earlier", root / "longer")
    train(root / "longer", "--resume", root / "longer" / "exp" / "last.pt", "--epochs", 3)
    begin(root, root / "new", seed=2)
    return root


def check_earlier_run(references: Path, project: Path) -> None:
    """Checks that the earlier run has lost nothing, and continues if its last.pt is named."""
    folder = project / "exp"
    for name in ("last.pt", "best.pt", "results.csv"):
        assert (folder / name).read_bytes() == (references / "earlier" / "exp" / name).read_bytes(), name
    if newest_run_id(folder) != run_id_of(folder / "last.pt"):
        status, output = train(project, "--resume", folder, "--epochs", 3)
        assert status == REFUSED
        assert "the newest run in this folder has saved nothing yet" in output
    status, output = train(project, "--resume", folder / "last.pt", "--epochs", 3)
    assert status == 0, output
    assert_same_run(references / "longer" / "exp", folder)


def check_new_run(references: Path, project: Path) -> None:
    """Checks that the new run continues, unless it has ended."""
    folder = project / "exp"
    assert newest_run_id(folder) == run_id_of(folder / "last.pt")
    is_over = read_checkpoint(folder / "last.pt")["progress"]["epoch"] == 2
    status, output = train(project, "--resume", folder)
    assert status == (REFUSED if is_over else 0), output
    assert_same_run(references / "new" / "exp", folder)


@pytest.mark.slow
def test_whichever_write_a_kill_precedes_both_runs_continue_with_their_own_files(references, tmp_path):
    """The new run is killed at each of the calls by which it puts a complete file in the place of another one."""
    earlier = run_id_of(references / "earlier" / "exp" / "last.pt")
    continued = []
    for number in range(1, 50):
        project = tmp_path / str(number)
        shutil.copytree(references / "earlier", project)
        if begin(references, project, seed=2, faults=f"replace:{project / 'calls'}:{number}") == 0:
            break
        is_earlier = run_id_of(project / "exp" / "last.pt") == earlier
        continued.append("earlier" if is_earlier else "new")
        check_run = check_earlier_run if is_earlier else check_new_run
        check_run(references, project)
    assert continued[:3] == ["earlier", "earlier", "new"]  # before settings.yaml, before last.pt, after it
    assert len(continued) > 6
