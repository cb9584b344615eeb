from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from pathlib import Path

import pytest

from engine.checkpoint.progress import Progress
from engine.run.launch_record import record_launch
from engine.run.plan import plan_run
from engine.run.run import ContinuedRun, EndedRun
from tests.helpers.messages import refused
from tests.helpers.run_checkpoints import name_newest_run, save_checkpoint
from utils.config.settings import TrainConfig
from utils.distributed.context import DistributedContext
from utils.errors import UserError
from utils.files.torch_file import write_checkpoint


def test_a_restart_of_a_resume_that_has_saved_nothing_resumes_again(tmp_path: Path):
    """``--resume epochN.pt``, whose last.pt has been moved away."""
    name_newest_run(tmp_path, "run")
    record_launch(tmp_path, "run", ["job node0 1"])
    (tmp_path / "epoch2.pt").write_bytes(b"damaged")
    ctx = dataclasses.replace(DistributedContext.single(), launcher_identity="job node0 1")
    config = TrainConfig(resume=str(tmp_path / "epoch2.pt"))
    with ExitStack() as stack, pytest.raises(UserError, match=r"epoch2\.pt"):
        plan_run(ctx, config, ("resume",), stack)


def test_a_run_that_is_named_does_not_move_to_another_project(tmp_path: Path, monkeypatch):
    """The flag was ignored, and stored as the run's project."""
    monkeypatch.chdir(tmp_path)
    Path("runs/exp").mkdir(parents=True)
    Path("link").symlink_to("runs")
    save_checkpoint(Path("runs/exp/last.pt"), Progress(epoch=4), run_id="run", config=TrainConfig(epochs=10))

    def resume_in(project: str) -> None:
        config = TrainConfig(resume="runs/exp", project=project)
        with ExitStack() as stack:
            plan_run(DistributedContext.single(), config, ("resume", "project"), stack)

    for project in ("runs", "link", str(tmp_path)):
        resume_in(project)
    with refused("--project other: the run continues in its own folder, runs/exp; leave out --project"):
        resume_in("other")


@pytest.mark.parametrize("content", [{}, {"config": {}}, None])
def test_a_file_from_which_no_run_can_resume_leaves_its_folder_as_it_is(tmp_path: Path, content: dict | None):
    """It is reported before --project, which says where runs are."""
    path = tmp_path / "public.pt"
    if content is not None:
        write_checkpoint(content, path)
    before = list(tmp_path.iterdir())
    config = TrainConfig(resume=str(path), project="other")
    with ExitStack() as stack, pytest.raises(UserError, match=r"public\.pt: (holds|no such checkpoint)"):
        plan_run(DistributedContext.single(), config, ("resume", "project"), stack)
    assert list(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("is_saved", "launcher", "flags", "folder", "epoch", "known_root"),
    [
        (False, "", {}, None, None, ""),  # a new run
        (False, "job", {}, "exp", None, ""),  # torchrun starts again what has saved nothing
        (True, "job", {}, "exp", 4, "images"),
        (True, "", {"resume": "exp"}, "exp", 4, "images"),
        (True, "", {"resume": "exp", "data": "other.yaml"}, "exp", 4, ""),
    ],
)
def test_a_plan_says_what_the_run_has_already(
    tmp_path: Path, monkeypatch, is_saved, launcher, flags, folder, epoch, known_root
):
    monkeypatch.chdir(tmp_path)
    Path("exp").mkdir()
    name_newest_run(Path("exp"), "run")
    record_launch(Path("exp"), "run", ["job"])
    Path("other.yaml").touch()
    if is_saved:
        config = TrainConfig(data="set.yaml", epochs=10)
        save_checkpoint(
            Path("exp/last.pt"),
            Progress(epoch=4),
            run_id="run",
            config=config,
            data={"source": "set.yaml", "root": "images"},
        )
    ctx = dataclasses.replace(DistributedContext.single(), launcher_identity=launcher)
    config = TrainConfig(**{"data": "set.yaml", "project": ".", **flags})
    with ExitStack() as stack:
        plan = plan_run(ctx, config, list(flags), stack)
    assert not isinstance(plan, EndedRun)
    assert plan.folder == (folder and Path(folder))
    assert isinstance(plan, ContinuedRun) == (epoch is not None)
    if isinstance(plan, ContinuedRun):
        assert plan.started_from.progress.epoch == epoch
    assert (plan.data_source.data, plan.data_source.known_root) == (plan.settings.config.data, known_root)
    assert plan.data_source.stored_in == ("exp/last.pt" if known_root else "")
