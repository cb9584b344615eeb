"""Which run the processes of torchrun train, so that those it starts anew find their run again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from utils.files.safe_io import open_direct

LAUNCHES = ".launches"  # in the folder of runs: a line for each torchrun process, with the run that it trains


def note_launch(project: str | Path, launchers: Sequence[str], folder: Path) -> None:
    """Records that the torchrun processes ``launchers`` (`DistributedContext.launcher`) train the run in ``folder``, so
    that a restart by any of them finds it."""
    new = set(launchers) - {""}
    if new:
        Path(project).mkdir(parents=True, exist_ok=True)
        with open(Path(project) / LAUNCHES, "a", encoding="utf-8", opener=open_direct) as file:
            file.write("".join(f"{launcher}\t{folder.resolve()}\n" for launcher in sorted(new)))


def forget_launch(project: str | Path, folder: Path) -> None:
    """Removes the record of a run whose folder is gone, if it is the only one: other lines may be of live runs, and a
    line without a folder does no harm."""
    path = Path(project) / LAUNCHES
    if path.is_file() and all(
        line.endswith(f"\t{folder.resolve()}") for line in path.read_text(encoding="utf-8").splitlines()
    ):
        path.unlink(missing_ok=True)


def run_of_launch(project: str | Path, launchers: Sequence[str]) -> Path | None:
    """The folder of the run that one of ``launchers`` has trained before, which makes this a restart; or None."""
    path = Path(project) / LAUNCHES
    if not any(launchers) or not path.is_file():
        return None
    found = None
    for line in path.read_text(encoding="utf-8").splitlines():
        launcher, _, folder = line.rpartition("\t")
        if launcher in launchers and Path(folder).is_dir():
            found = Path(folder)
    return found
