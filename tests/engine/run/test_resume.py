from __future__ import annotations

import dataclasses
import os
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import lockstep
from engine.checkpoint.checkpoint import Checkpoint, StoredState
from engine.checkpoint.checkpointer import Checkpointer
from engine.checkpoint.description import RunDescription
from engine.checkpoint.newest_run import (
    EARLIER_CHECKPOINT,
    best_of_newest_run,
    checkpoint_of_newest_run,
    note_earlier_checkpoint,
)
from engine.checkpoint.progress import CheckpointHeader, PendingEpoch, Progress, RunConditions
from engine.commands.export import export_best
from engine.run.best_epoch import keep_best_epoch
from engine.run.find_checkpoint import check_is_newest, newest_checkpoint
from engine.run.folder import LAUNCHERS, find_run_of_launchers, note_launch
from engine.run.plan import plan_run
from engine.run.restore import EpochData, adapt_progress
from engine.run.resume import check_unfinished, choose_epochs
from engine.run.resume_settings import merge_config, merge_hyperparameters
from tests.helpers.messages import refused
from utils.config.recipes import read_recipe
from utils.config.settings import Hyperparameters, TrainConfig
from utils.distributed.context import DistributedContext
from utils.errors import UserError
from utils.files.checkpoint_file import read_checkpoint, write_checkpoint
from utils.files.torch_file import TorchFile

STORED = {
    "model_spec": {}, "names": [], "hyp": Hyperparameters(), "data": {"fingerprint": "x"},
    "config": TrainConfig(batch_size=8, epochs=10),
    "run": RunConditions(epoch_batches=10, images=80, seconds=1.0, world_size=2, device="cpu"),
    "progress": Progress(), "model": {}, "ema": {}, "optimizer": {}, "scaler": {},
}  # fmt: skip


def checkpoint_of(**changes) -> Checkpoint:
    """A checkpoint with the values of `STORED`, by their keys in the file, but for ``changes``."""
    values = STORED | changes

    def part(kind: type) -> Any:
        return kind(**{field.name: values[field.name] for field in fields(kind) if field.name in values})

    return Checkpoint(
        header=part(CheckpointHeader),
        description=part(RunDescription),
        state=part(StoredState),
        path=values.get("path", Path()),
    )


def inside() -> Progress:
    return Progress(epoch=2, batch=6, step=26, updates=26, loss_sums=[1.0, 2.0], finite_steps=6)


def resumed(
    progress: Progress,
    *,
    epoch_batches: int = 10,
    images: int = 80,
    fingerprint: str = "x",
    stored: dict | None = None,
    **settings,
) -> tuple[Progress, list[str]]:
    config = TrainConfig(**{"batch_size": 8, "epochs": 10, **settings})
    data = EpochData(batches=epoch_batches, images=images, fingerprint=fingerprint)
    return adapt_progress(checkpoint_of(progress=progress, **(stored or {})), config, data)


def test_an_unchanged_resume_prints_nothing():
    boundary = Progress(epoch=3, step=30, updates=30)
    trained = Progress(epoch=2, batch=10, step=30, updates=30, buffers_averaged=True)
    for progress in (inside(), boundary, trained):
        assert resumed(progress) == (progress, [])


def test_more_epochs_keep_the_position_and_print_the_schedules():
    where, lines = resumed(inside(), epochs=20)
    assert where == inside()
    assert lines == ["resume: the learning rate continues from its value after 13% of 20 epochs"]


def test_another_batch_size_keeps_the_position_among_the_images():
    where, lines = resumed(inside(), batch_size=16, epoch_batches=5)
    assert (where.epoch, where.batch, where.step, where.updates) == (2, 3, 13, 13)
    assert (where.loss_sums, where.finite_steps) == ([], 0)
    assert "continues at batch 3 of the 5 of epoch 3" in lines[0]
    where, _ = resumed(inside(), batch_size=4, epoch_batches=20, nominal_batch=20)
    assert (where.batch, where.updates) == (10, 2 * 4 + 2)


@pytest.mark.parametrize(("nominal_batch", "batch", "updates"), [(32, 4, 2 * 3 + 1), (16, 6, 2 * 5 + 3)])
def test_other_steps_repeat_no_batch_whose_losses_are_counted(nominal_batch, batch, updates):
    where, lines = resumed(inside(), nominal_batch=nominal_batch)
    assert (where.epoch, where.batch, where.updates) == (2, batch, updates)
    assert (where.loss_sums, where.finite_steps) == ([], 0)
    assert f"continues at batch {batch} of the 10 of epoch 3" in lines[0]


@pytest.mark.parametrize(("batch_size", "epoch_batches"), [(16, 5), (4, 20), (3, 27), (80, 1), (100, 1)])
def test_an_epoch_whose_steps_are_done_keeps_its_losses_with_another_batch_size(batch_size, epoch_batches):
    """Only its validation is missing: no step follows from which its losses could come."""
    trained = Progress(
        epoch=2, batch=10, step=30, updates=30, loss_sums=[1.0, 2.0], finite_steps=10, buffers_averaged=True
    )
    where, lines = resumed(trained, batch_size=batch_size, epoch_batches=epoch_batches)
    assert (where.epoch, where.batch) == (2, epoch_batches)
    assert where.step == where.updates == 3 * epoch_batches
    assert where.mean_losses(["box", "cls"]) == {"box": 0.1, "cls": 0.2}
    assert where.buffers_averaged
    assert "batch" not in "".join(lines)


def test_the_position_is_said_in_words():
    assert Progress(epoch=2).describe(10) == "2 epochs"
    assert Progress(epoch=2, batch=5).describe(10) == "epoch 3, batch 5 of 10"
    assert Progress(epoch=2, batch=10).describe(10) == "the steps of epoch 3"


def test_an_older_checkpoint_does_not_overwrite_later_epochs(tmp_path, monkeypatch):
    """The tensors of last.pt are not read for that: every rank compares."""
    for name, epoch in (("last.pt", 3), ("epoch1.pt", 1)):
        checkpoint = checkpoint_of(progress=Progress(epoch=epoch), ema={"weight": torch.ones(2)})
        write_checkpoint(checkpoint.content(), tmp_path / name)
    check_is_newest(Checkpoint.read(tmp_path / "last.pt"))
    older = Checkpoint.read(tmp_path / "epoch1.pt")
    monkeypatch.delattr(TorchFile, "_bytes_of")
    with refused(
        "epoch1.pt: the run has gone on to epoch 3 (.../last.pt), and resuming here would overwrite it; "
        "to go back anyway, move last.pt elsewhere first"
    ):
        check_is_newest(older)
    (tmp_path / "last.pt").write_bytes(b"damaged")
    check_is_newest(older)


@pytest.mark.parametrize(
    ("epoch", "settings", "given", "message"),
    [
        (10, {}, (), r"all epochs are done \(10\); to continue, set more: --resume RUN --epochs N$"),
        (10, {"epochs": 9}, ("epochs",), "--epochs 9: 10 are done already; .* set more: --resume RUN --epochs N$"),
        (10, {"time": 2.0}, (), r"--time 2: no other epoch fits \(10 epochs took 2 hours\); .* RUN --time HOURS "
                                r"\(of the whole run\) or --epochs N$"),
        (7, {"patience": 4}, (), r"stopped early after epoch 7: no better AP in 4 epochs \(--patience 4\); to "
                                 "continue, wait for longer: --resume RUN --patience N, above 4, or 0$"),
        (7, {"patience": 3, "val_every": 7}, ("patience",), r"stopped early .* in 4 epochs \(--patience 3\)"),
        (7, {"patience": 5}, (), None),
        (7, {"patience": 0}, (), None),
        (7, {"patience": 4, "val_every": 2}, (), None),  # the next validation decides
        (9, {}, (), None),
    ],
)  # fmt: skip
def test_a_run_that_has_ended_says_how_it_continues(epoch, settings, given, message):
    progress = Progress(epoch=epoch, best_epoch=3, best_fitness=0.5)
    run = dataclasses.replace(STORED["run"], seconds=7200.0)
    checkpoint = checkpoint_of(progress=progress, run=run, path=Path("some runs/exp/last.pt"))
    config = TrainConfig(**{"batch_size": 8, "epochs": 10, **settings})
    if message is None:
        check_unfinished(checkpoint, config, given)
        return
    with pytest.raises(UserError, match="^some runs/exp/last.pt: " + message.replace("RUN", "'some runs/exp/last.pt'")):
        check_unfinished(checkpoint, config, given)


def test_a_run_whose_last_epoch_has_no_scores_yet_has_not_ended():
    """``--eval-ranks``, stopped and resumed with fewer epochs."""
    pending = PendingEpoch(row={}, is_closing=False, progress=Progress(epoch=5), ema={})
    checkpoint = checkpoint_of(progress=Progress(epoch=5), pending=pending)
    check_unfinished(checkpoint, TrainConfig(epochs=5), ("epochs",))


def test_a_longer_time_continues_a_run_whose_epochs_are_done():
    progress = Progress(epoch=10)
    checkpoint = checkpoint_of(progress=progress, run=dataclasses.replace(STORED["run"], seconds=3600.0))

    def epochs(hours: float, *given: str, stored: int = 10) -> int:
        return choose_epochs(checkpoint, TrainConfig(epochs=stored, time=hours), given)

    assert epochs(2.0, "time") == 20
    assert epochs(1.04, "time") == 10
    assert epochs(2.0) == 10  # the time of the run itself
    assert epochs(2.0, "time", stored=50) == 50  # it goes on, and `TimeLimit` decides
    assert epochs(0.0, "time", stored=10) == 10


def test_epochs_replace_a_time():
    stored = TrainConfig(batch_size=8, epochs=10, time=1.5)
    config, lines = merge_config(stored, TrainConfig(epochs=20), {"epochs"})
    assert (config.epochs, config.time) == (20, 0)
    assert lines == ["resume: epochs 10 -> 20", "resume: time 1.5 -> 0.0, as --epochs is given"]
    config, _ = merge_config(stored, TrainConfig(epochs=20, time=3.0), {"epochs", "time"})
    assert (config.epochs, config.time) == (20, 3)


def test_a_restart_keeps_the_epochs_that_its_time_limit_has_chosen():
    """torchrun gives the flags of the first start again."""
    command = TrainConfig(epochs=100, time=2.0)
    stored = TrainConfig(batch_size=8, epochs=37, time=2.0)
    assert merge_config(stored, command, {"epochs", "time"}) == (stored, [])
    config, _ = merge_config(dataclasses.replace(stored, time=1.0), command, {"epochs", "time"})
    assert (config.epochs, config.time) == (100, 2.0)  # the limit is new, and decides after an epoch


@pytest.mark.parametrize(
    ("name", "stored", "command"), [("optimizer", "SGD", "auto"), ("optimizer", "Muon", "auto"), ("batch_size", 48, -1)]
)
def test_what_was_chosen_when_a_run_began_stays_if_the_command_leaves_it_open(name, stored, command):
    """Another choice would not fit the stored state: with other --epochs, "auto" may mean another optimizer."""
    run = TrainConfig(epochs=10, **{name: stored})
    config, messages = merge_config(run, TrainConfig(epochs=20, **{name: command}), {name, "epochs"})
    assert config == dataclasses.replace(run, epochs=20)
    assert messages == ["resume: epochs 10 -> 20"]


def test_a_run_has_the_device_of_the_process_that_resumes_it():
    stored = TrainConfig(batch_size=8, device="cuda:1")
    assert merge_config(stored, TrainConfig(device="cpu"), {"device"})[0].device == "cpu"
    assert merge_config(stored, TrainConfig(), ())[0].device == TrainConfig().device


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("freeze", [1], [2], "--freeze [2]: the run being resumed has [1]; start a new run with --weights"),
        (
            "classes",
            ["car"],
            ["bus"],
            "--classes ['bus']: the run being resumed has ['car']; start a new run with --weights",
        ),
    ],
)
def test_what_a_run_cannot_change_is_refused(name, old, new, message):
    before = TrainConfig(**{name: old})
    now = TrainConfig(**{name: new})
    assert merge_config(before, before, {name}) == (before, [])
    with refused(message):
        merge_config(before, now, {name})


def test_changed_images_restart_the_epoch():
    where, lines = resumed(inside(), fingerprint="y", epoch_batches=12, images=96)
    assert (where.epoch, where.batch, where.updates) == (2, 0, 24)
    assert "have changed since the run began" in lines[0]
    assert lines[1] == "resume: begins epoch 3 again"


@pytest.mark.parametrize(
    ("stored", "changes", "keeps"),
    [
        ({}, {"fingerprint": "y"}, True),  # other labels, or a copy
        ({}, {"fingerprint": "y", "images": 79}, False),  # in as many batches, but in another permutation
        ({}, {"seed": 1}, False),
        ({}, {"rect": True}, False),
        ({}, {"image_weights": True}, False),
        ({}, {"repeat_factor": 0.1}, False),
        ({}, {"quad": True}, True),
        ({}, {"imgsz": 320}, True),
        ({"rect": True}, {"rect": True}, True),
        ({"rect": True}, {"rect": True, "imgsz": 320}, False),
        ({"rect": True}, {"rect": True, "batch_size": 16, "epoch_batches": 5}, False),
        ({"rect": True}, {"rect": True, "fingerprint": "y"}, False),  # other shapes
    ],
)
def test_another_order_of_the_images_begins_the_epoch_again(stored, changes, keeps):
    values = {"config": dataclasses.replace(STORED["config"], **stored)}
    where, lines = resumed(inside(), stored=values, **changes)
    if keeps:
        assert where == inside()
    else:
        assert (where.epoch, where.batch, where.loss_sums) == (2, 0, [])
        assert "resume: begins epoch 3 again" in lines


def test_an_epoch_whose_steps_are_done_stays_so_in_another_order():
    trained = Progress(epoch=2, batch=10, step=30, updates=30, buffers_averaged=True)
    assert resumed(trained, seed=1) == (trained, [])


def test_a_resumed_run_keeps_its_hyperparameters_unless_the_command_changes_them():
    stored = Hyperparameters(close_mosaic=10, scale=0.5, close_scale=0)
    config = TrainConfig(override=["close_scale=null"])
    hyp, lines = merge_hyperparameters(stored, config, (), pretrained=False)
    assert (hyp.close_mosaic, hyp.close_scale, lines) == (10, 0, [])
    hyp, lines = merge_hyperparameters(stored, config, ("override",), pretrained=False)
    assert (hyp.close_mosaic, hyp.close_scale, lines) == (10, None, ["resume: close_scale 0 -> None"])
    hyp, lines = merge_hyperparameters(dataclasses.replace(stored, close_scale=None), config, (), pretrained=False)
    assert (hyp.close_scale, lines) == (None, [])


def test_a_resumed_run_keeps_the_rate_that_was_chosen_when_it_began():
    for config, given in ((TrainConfig(hyp="finetune"), "hyp"), (TrainConfig(override=["lr_mult=null"]), "override")):
        hyp, lines = merge_hyperparameters(Hyperparameters(lr_mult=0.0625), config, (given,), pretrained=True)
        assert (hyp.lr_mult, lines) == (0.0625, [])


def test_a_recipe_named_on_resume_is_that_of_a_run_that_keeps_old_classes():
    config = TrainConfig(hyp="auto")  # nobody repeats --keep-old, which cannot change
    hyp, _ = merge_hyperparameters(Hyperparameters(), config, ("hyp",), pretrained=True, keep_old=True)
    assert hyp == read_recipe("keep_old", pretrained=True)


def test_the_log_names_what_has_no_effect_in_the_recipe(tmp_path: Path):
    (tmp_path / "hyp.yaml").write_text("mosaic: 0.5\nfl_gamma: 0.0\n")
    config = TrainConfig(hyp=str(tmp_path / "hyp.yaml"), project=str(tmp_path))
    line = f"{tmp_path}/hyp.yaml: without effect here: fl_gamma 0.0 (there is no focal loss)"
    with ExitStack() as stack:
        plan = plan_run(DistributedContext.single(), config, ("hyp",), stack)
    assert (plan.settings.hyp.mosaic, plan.startup_messages) == (0.5, [line])
    _, lines = merge_hyperparameters(Hyperparameters(mosaic=1.0), config, ("hyp",), pretrained=False)
    assert lines == [line, "resume: mosaic 1.0 -> 0.5"]


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


def test_a_restart_finds_its_own_run_only(tmp_path: Path):
    """One of the launchers of the earlier start is enough, because nodes come and go."""
    here = TrainConfig(project=str(tmp_path / "runs"))
    for name in ("exp", "exp2"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    assert find_run_of_launchers(here, ["job node0 1"]) is None
    note_launch(tmp_path / "runs" / "exp", ["job node0 1", "job node1 2"])
    note_launch(tmp_path / "runs" / "exp2", ["", ""])  # without torchrun nothing is stored
    exp = tmp_path / "runs" / "exp"
    for project, resume in (("runs", None), ("elsewhere", exp), ("elsewhere", exp / "last.pt")):
        config = TrainConfig(project=str(tmp_path / project), resume=resume and str(resume))
        assert find_run_of_launchers(config, ["job node1 2", "job node2 9"]) == exp
    (tmp_path / "runs" / "a" / "b2").mkdir(parents=True)
    note_launch(tmp_path / "runs" / "a" / "b2", ["job node3 1"])
    assert (
        find_run_of_launchers(dataclasses.replace(here, name="a/b"), ["job node3 1"]) == tmp_path / "runs" / "a" / "b2"
    )
    assert find_run_of_launchers(here, ["job node0 7"]) is None
    assert find_run_of_launchers(here, [""]) is None


def test_damaged_notes_in_a_folder_mean_nothing(tmp_path: Path):
    """They are ours: no start of a run may fail because of them."""
    folder = tmp_path / "exp"
    folder.mkdir()
    (folder / "last.pt").touch()
    for name in (EARLIER_CHECKPOINT, LAUNCHERS):
        (folder / name).write_bytes(b"\xff\xfe\x00")
    assert checkpoint_of_newest_run(folder) == folder / "last.pt"
    assert find_run_of_launchers(TrainConfig(project=str(tmp_path)), ["job node0 1"]) is None


def test_a_restart_continues_what_its_own_start_has_saved(tmp_path: Path):
    """Not the last.pt that an earlier run has left in a folder that is used again."""
    folder = tmp_path
    last = tmp_path / "last.pt"
    assert checkpoint_of_newest_run(folder) is None
    last.write_bytes(b"of an earlier run")
    note_earlier_checkpoint(folder, is_new=True)
    assert checkpoint_of_newest_run(folder) is None
    note_earlier_checkpoint(folder, is_new=True)  # a restart that has not saved anything either
    assert checkpoint_of_newest_run(folder) is None
    replacement = tmp_path / "new"
    replacement.write_bytes(b"of this run")
    replacement.replace(last)
    assert checkpoint_of_newest_run(folder) == last
    note_earlier_checkpoint(folder, is_new=False)
    assert checkpoint_of_newest_run(folder) == last


@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_best_pt_of_an_earlier_run_is_not_that_of_the_newest(tmp_path: Path, caplog, is_resumed):
    """Not for ``--export`` and `lockstep.Run`, until the new run has replaced it or turns out to be the earlier one."""
    progress = Progress(epoch=4, best_epoch=4, best_fitness=0.5)
    checkpoint = saved(tmp_path / "best.pt", progress)
    saved(tmp_path / "last.pt", progress)
    note_earlier_checkpoint(tmp_path, is_new=True)
    note_earlier_checkpoint(tmp_path, is_new=False)  # the run is interrupted and continues
    assert best_of_newest_run(tmp_path) is None
    with pytest.raises(UserError, match=r"best\.pt: is of an earlier run in this folder"):
        _ = lockstep.Run(tmp_path).best
    export_best(tmp_path, TrainConfig(export=["onnx"]))
    assert caplog.messages == ["--export: no epoch could be scored, so there is no best.pt to export"]
    checkpointer = Checkpointer(tmp_path, ctx=DistributedContext.single(), description=checkpoint.description)
    if is_resumed:
        keep_best_epoch(checkpointer.ctx, checkpoint.description, checkpointer, progress)
    else:
        checkpointer.copy_to_best(tmp_path / "last.pt")
        checkpointer.finish()
    assert best_of_newest_run(tmp_path) == tmp_path / "best.pt" == lockstep.Run(tmp_path).best


def test_what_an_earlier_run_left_is_continued_by_its_own_name_only(tmp_path: Path):
    """A new run in its folder has ended before its first checkpoint. torchrun's restart also starts anew."""
    project = tmp_path / "runs"
    for name in ("other", "exp"):
        (project / name).mkdir(parents=True)
        saved(project / name / "last.pt", Progress(epoch=4))
    note_earlier_checkpoint(project / "exp", is_new=True)

    def resumed_path(resume: str | Path) -> Path:
        config = TrainConfig(project=str(project), resume=str(resume))
        with ExitStack() as stack:
            plan = plan_run(DistributedContext.single(), config, ("resume",), stack)
        return plan.checkpoint.path

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


def test_a_restart_of_a_resume_that_has_saved_nothing_resumes_again(tmp_path: Path):
    """``--resume epochN.pt``, whose last.pt has been moved away."""
    note_launch(tmp_path, ["job node0 1"])
    (tmp_path / "epoch2.pt").write_bytes(b"damaged")
    ctx = dataclasses.replace(DistributedContext.single(), launcher="job node0 1")
    config = TrainConfig(resume=str(tmp_path / "epoch2.pt"))
    with ExitStack() as stack, pytest.raises(UserError, match=r"epoch2\.pt"):
        plan_run(ctx, config, ("resume",), stack)


BEFORE = Progress(epoch=4, best_epoch=3, best_fitness=0.3)
LATER = Progress(epoch=9, best_epoch=9, best_fitness=0.5)


def saved(path: Path, progress: Progress, **changes) -> Checkpoint:
    checkpoint = checkpoint_of(progress=progress, path=path, **changes)
    write_checkpoint(checkpoint.content(), path)
    return checkpoint


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
    note_launch(Path("exp"), ["job"])
    if is_saved:
        config = TrainConfig(data="set.yaml", epochs=10)
        saved(Path("exp/last.pt"), BEFORE, config=config, data={"source": "set.yaml", "root": "images"})
    ctx = dataclasses.replace(DistributedContext.single(), launcher=launcher)
    config = TrainConfig(**{"data": "set.yaml", "project": ".", **flags})
    with ExitStack() as stack:
        plan = plan_run(ctx, config, list(flags), stack)
    assert plan.folder == (folder and Path(folder))
    assert (plan.checkpoint and plan.checkpoint.header.progress.epoch) == epoch
    assert (plan.data_source.data, plan.data_source.known_root) == (plan.settings.config.data, known_root)
    assert plan.data_source.stored_in == ("exp/last.pt" if known_root else "")


@pytest.mark.parametrize(
    ("files", "changes", "best", "aside"),
    [
        ({"best": replace(BEFORE, epoch=3)}, {}, 3, []),  # nothing to do
        ({"best": replace(BEFORE, epoch=3)}, {"config": TrainConfig(epochs=20)}, 3, []),
        ({"best": LATER}, {"config": TrainConfig(epochs=20)}, -1, ["best9.pt"]),
        ({"best": LATER, "epoch3": replace(BEFORE, epoch=3)}, {"config": TrainConfig(epochs=20)}, 3, ["best9.pt"]),
        ({"best": LATER, "epoch3": replace(LATER, epoch=3)}, {"config": TrainConfig(epochs=20)}, -1, ["best9.pt"]),
        ({"best": LATER, "best9": LATER}, {"config": TrainConfig(epochs=20)}, -1, ["best9-2.pt", "best9.pt"]),
        ({"best": LATER}, {}, -1, []),  # the run repeats epoch 9, and writes the file again
        ({}, {}, -1, []),
        ({"best": replace(BEFORE, epoch=3)}, {"imgsz": 96, "config": TrainConfig(imgsz=96)}, -1, ["best3.pt"]),
        ({"best": replace(BEFORE, epoch=3)}, {"data": {"val_labels": "other"}}, -1, ["best3.pt"]),
        ({"best": replace(BEFORE, epoch=3)}, {"data": {"fingerprint": "other", "val_labels": "y"}}, 3, []),  # a copy
        ({"best": replace(BEFORE, epoch=3)}, {"data": {"fingerprint": "other"}}, 3, []),  # an earlier version
    ],
)
def test_the_best_epoch_of_a_resumed_run_is_that_of_its_best_pt(tmp_path: Path, files, changes, best, aside):
    stored = {"imgsz": 64, "data": {"fingerprint": "x", "val_labels": "y"}}
    for name, progress in files.items():
        saved(tmp_path / f"{name}.pt", progress, **stored)
    checkpoint = saved(tmp_path / "epoch4.pt", BEFORE, **stored)
    description = replace(checkpoint.description, **changes)
    single = DistributedContext.single()
    checkpointer = Checkpointer(tmp_path, ctx=single, description=description)
    progress = replace(BEFORE)
    keep_best_epoch(single, checkpoint.description, checkpointer, progress)
    checkpointer.finish()
    assert (progress.best_epoch, progress.best_fitness) == (best, 0.3 if best == 3 else -1.0)
    assert sorted(path.name for path in tmp_path.glob("best?*.pt")) == aside
    if best == 3:
        assert read_checkpoint(tmp_path / "best.pt")["progress"]["epoch"] == 3


def test_a_best_pt_is_kept_when_a_run_goes_back_to_before_its_first_validation(tmp_path: Path):
    saved(tmp_path / "best.pt", LATER)
    start = Progress(epoch=1)
    checkpoint = saved(tmp_path / "epoch1.pt", start)
    changes = {"config": TrainConfig(epochs=20)}
    description = replace(checkpoint.description, **changes)
    single = DistributedContext.single()
    checkpointer = Checkpointer(tmp_path, ctx=single, description=description)
    keep_best_epoch(single, checkpoint.description, checkpointer, start)
    assert start == Progress(epoch=1)
    assert not (tmp_path / "best.pt").exists()
    assert read_checkpoint(tmp_path / "best9.pt")["progress"]["epoch"] == 9
