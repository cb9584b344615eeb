from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.progress import Progress
from engine.run.find_checkpoint import check_is_newest, find_checkpoint, newest_checkpoint
from engine.run.plan import plan_run
from engine.run.run import ContinuedRun, StartedFrom
from tests.helpers.messages import refused
from tests.helpers.run_checkpoints import checkpoint_of, name_newest_run, save_checkpoint
from utils.config.settings import TrainConfig
from utils.distributed.context import DistributedContext
from utils.errors import UserError
from utils.files.torch_file import write_checkpoint


def test_an_older_checkpoint_does_not_overwrite_later_epochs(tmp_path):
    for name, epoch in (("last.pt", 3), ("epoch1.pt", 1)):
        checkpoint = checkpoint_of(progress=Progress(epoch=epoch), ema={"weight": torch.ones(2)})
        write_checkpoint(checkpoint.content(), tmp_path / name)
    check_is_newest(StartedFrom.of(Checkpoint.read(tmp_path / "last.pt")))
    older = Checkpoint.read(tmp_path / "epoch1.pt")
    with refused(
        "epoch1.pt: the run has gone on to epoch 3 (.../last.pt), and resuming here would overwrite it; "
        "to go back anyway, move last.pt elsewhere first"
    ):
        check_is_newest(StartedFrom.of(older))
    (tmp_path / "last.pt").write_bytes(b"damaged")
    check_is_newest(StartedFrom.of(older))


@pytest.mark.parametrize("last_of", ["newest", "earlier", ""])
def test_a_checkpoint_of_an_earlier_run_does_not_overwrite_the_newest(tmp_path: Path, last_of):
    """This holds for one of a later epoch, and if the newest run has not saved its last.pt yet, or the user has moved
    that file away."""
    save_checkpoint(tmp_path / "epoch9.pt", Progress(epoch=9), run_id="earlier")
    save_checkpoint(tmp_path / "epoch1.pt", Progress(epoch=1), run_id="newest")
    if last_of:
        save_checkpoint(tmp_path / "last.pt", Progress(epoch=9 if last_of == "earlier" else 1), run_id=last_of)
    name_newest_run(tmp_path, "newest")
    check_is_newest(StartedFrom.of(Checkpoint.read(tmp_path / "epoch1.pt")))
    with refused(
        "epoch9.pt: is from an earlier run than the newest one in ..., which resuming here would overwrite; to "
        "continue the earlier run, copy epoch9.pt into a new folder, and resume it there: --resume FOLDER/epoch9.pt"
    ):
        check_is_newest(StartedFrom.of(Checkpoint.read(tmp_path / "epoch9.pt")))
    (tmp_path / "copy").mkdir()
    copy = (tmp_path / "epoch9.pt").rename(tmp_path / "copy" / "epoch9.pt")
    check_is_newest(StartedFrom.of(Checkpoint.read(copy)))


@pytest.mark.parametrize(
    ("times", "newest"),
    [
        ({"exp/last.pt": 1, "a/b/last.pt": 2, "a/b/settings.yaml": 2}, "a/b/last.pt"),  # --name a/b
        ({"exp/last.pt": 2, "a/b/last.pt": 1, "a/b/settings.yaml": 1}, "exp/last.pt"),
        ({"exp/last.pt": 1, "exp/settings.yaml": 1, "exp/moved/last.pt": 2}, "exp/last.pt"),
        ({"exp/best.pt": 1}, None),
    ],
)
def test_the_newest_run_is_found_whatever_folders_its_name_has(tmp_path: Path, times, newest):
    for name, seconds in times.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.utime(path, (seconds, seconds))
    assert newest_checkpoint(tmp_path) == (tmp_path / newest if newest else None)


def test_what_an_earlier_run_left_is_continued_by_its_own_name_only(tmp_path: Path):
    """A new run in its folder has ended before its first checkpoint. torchrun's restart also starts anew."""
    project = tmp_path / "runs"
    for name in ("other", "exp"):
        (project / name).mkdir(parents=True)
        save_checkpoint(project / name / "last.pt", Progress(epoch=4), run_id=name)
        name_newest_run(project / name, name)
    name_newest_run(project / "exp", "new")

    def resumed_path(resume: str | Path) -> Path:
        config = TrainConfig(project=str(project), resume=str(resume))
        with ExitStack() as stack:
            plan = plan_run(DistributedContext.single(), config, ("resume",), stack)
        assert isinstance(plan, ContinuedRun)
        return plan.started_from.path

    assert resumed_path("") == project / "other" / "last.pt"
    assert resumed_path(project / "exp" / "last.pt") == project / "exp" / "last.pt"
    reason = (
        "exp: the newest run in this folder has saved nothing yet; to continue the one before it: "
        "--resume .../exp/last.pt"
    )
    with refused(reason):
        resumed_path(project / "exp")
    (project / "other" / "last.pt").unlink()
    with refused(reason):
        resumed_path("")


@pytest.mark.parametrize(
    ("linked_by", "link_folder_of", "target_folder_of", "follows"),
    [
        ("file", "", "run", True),
        ("folder", "", "run", True),
        ("file", "another", "run", True),
        ("file", "run", "run", False),  # a copy of the folder, made of links (cp -rs)
        ("file", "run", "", False),  # a store of files (DVC, git-annex)
        ("file", "", "another", False),
    ],
)
def test_a_run_continues_in_its_folder_and_not_where_a_link_to_it_is(
    tmp_path: Path, linked_by, link_folder_of, target_folder_of, follows
):
    for folder, run_id in (("links", link_folder_of), ("exp", target_folder_of)):
        (tmp_path / folder).mkdir()
        if run_id:
            name_newest_run(tmp_path / folder, run_id)
    save_checkpoint(tmp_path / "exp" / "last.pt", Progress(epoch=4), run_id="run")
    link = tmp_path / "links" / "last.pt"
    link.symlink_to("../exp/last.pt")
    config = TrainConfig(resume=str(link if linked_by == "file" else link.parent))
    assert find_checkpoint(config) == (tmp_path / "exp" / "last.pt" if follows else link)


def test_a_link_to_itself_is_no_checkpoint(tmp_path: Path):
    link = tmp_path / "last.pt"
    link.symlink_to("last.pt")
    with ExitStack() as stack, pytest.raises(UserError, match=r"last\.pt: "):
        plan_run(DistributedContext.single(), TrainConfig(resume=str(link)), ("resume",), stack)


def test_a_last_checkpoint_that_links_to_itself_hides_no_older_one(tmp_path: Path):
    older = save_checkpoint(tmp_path / "epoch1.pt", Progress(epoch=1))
    (tmp_path / "last.pt").symlink_to("last.pt")
    check_is_newest(StartedFrom.of(older))
