"""The record of the torchrun processes that train a run, by which a restart finds its folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from engine.checkpoint.newest_run import newest_run_id
from utils.config.settings import TrainConfig
from utils.files.safe_io import write_whole

LAUNCHERS = ".launchers"  # in the run's folder


def record_launch(folder: Path, run_id: str, launchers: Sequence[str]) -> None:
    """Records which torchrun processes (`DistributedContext.launcher_identity`) train the run ``run_id`` in ``folder``,
    so that a restart by any of them finds it. Does nothing without torchrun."""
    names = [launcher for launcher in launchers if launcher]
    if names:
        write_whole(folder / LAUNCHERS, "\n".join([run_id, *names]))


def find_run_of_launchers(config: TrainConfig, launchers: Sequence[str]) -> Path | None:
    """Returns the folder whose newest run was trained by one of ``launchers``, which makes this start a restart; else
    None."""
    if not any(launchers):
        return None
    records = list((Path(config.project) / config.name).parent.glob(f"*/{LAUNCHERS}"))  # a name may contain folders
    if config.resume:  # last.pt, a link to it, or its folder, which may be in another project
        named = Path(config.resume)
        records += [folder / LAUNCHERS for folder in (named, named.parent, Path(os.path.realpath(named)).parent)]
    matches = []
    for record in records:
        if not record.is_file():
            continue
        # A damaged record names no launcher.
        run_id, _, names = record.read_text("utf-8", errors="replace").partition("\n")
        is_known = not set(launchers).isdisjoint(names.splitlines())
        if is_known and run_id == newest_run_id(record.parent):
            matches.append(record)
    if not matches:
        return None
    return max(matches, key=lambda record: record.stat().st_mtime).parent
