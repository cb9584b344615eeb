"""Each epoch is tracked once, in another thread, whatever the service does."""

from __future__ import annotations

import os
import shutil
import time

import pytest

from engine.hooks.hook import Epoch
from engine.hooks.tracking import TrackedRun
from tests.engine.hooks.tracked_run import CONFIG, OTHER_CONFIG, SETTINGS, MemoryService, Process, run_process
from utils.logger import configure_logging


@pytest.fixture(autouse=True)
def _log() -> None:
    configure_logging(True)


def test_results_settings_and_files_arrive_in_another_thread(tmp_path, capsys):
    for name in ("report.html", "results.png", "best.pt"):
        (tmp_path / name).write_text(name)
    service = MemoryService()
    run_process(tmp_path, service, range(1, 4))
    assert service.settings == SETTINGS
    assert service.epochs == [1, 2, 3]
    assert service.rows[1] == {"time": 1.0, "train/box": 0.5, "metrics/AP": 0.2}
    assert service.files == ["report.html", "results.csv", "results.png"]  # not the weights
    assert service.ends == [True]
    assert service.threads == {"Memory"}
    assert capsys.readouterr().out == ""


def test_each_epoch_is_tracked_once_across_resumes(tmp_path):
    """The second process repeats epochs 3 and 4, which the service has."""
    service = MemoryService()
    run_process(tmp_path, service, range(1, 5), complete=False)
    assert (service.epochs, service.files, service.ends) == ([1, 2, 3, 4], [], [False])
    run_process(tmp_path, service, range(3, 7))
    assert service.epochs == [1, 2, 3, 4, 5, 6]
    assert (service.keys, service.ends) == (["", "k"], [False, True])


@pytest.mark.parametrize(
    ("first", "config", "key", "epochs"),
    [
        (3, CONFIG, "k", [1, 2, 3, 4]),  # a repeated epoch has its earlier results
        (3, OTHER_CONFIG, "", [1, 2, 3]),  # a second tracked run, of the epochs that results.csv has
        (5, OTHER_CONFIG, "k", [1, 2, 3, 4, 5]),  # nothing is repeated
    ],
    ids=["repeats", "repeats with other settings", "repeats nothing"],
)
def test_a_run_that_goes_back_with_other_settings_is_another_tracked_run(tmp_path, first, config, key, epochs):
    service = MemoryService()
    run_process(tmp_path, service, range(1, 5))
    resumed = MemoryService()
    resumed.epochs = list(service.epochs) if key else []
    run_process(tmp_path, resumed, [first], config=config)
    assert (resumed.keys, resumed.epochs) == ([key], epochs)


@pytest.mark.parametrize(("run_id", "key"), [("run", "k"), ("other", "")])
def test_a_new_run_in_a_used_folder_is_another_tracked_run(tmp_path, run_id, key):
    """``--exist-ok``. A run that torchrun restarts before its first checkpoint stays the same."""
    run_process(tmp_path, MemoryService(), [1, 2], complete=False)
    service = MemoryService()
    run_process(tmp_path, service, [1], run_id=run_id)
    assert service.keys == [key]
    assert TrackedRun.read(tmp_path / "tracked_note.json") == TrackedRun("k", 1, run_id, str(tmp_path))


@pytest.mark.parametrize(
    ("place", "key"), [(shutil.copytree, ""), (shutil.move, "k"), (os.symlink, "k")], ids=["copied", "moved", "linked"]
)
def test_a_copied_run_is_another_tracked_run_and_a_moved_one_the_same(tmp_path, place, key):
    original = tmp_path / "exp"
    original.mkdir()
    (original / "settings.yaml").write_text("run_id: run\n")
    run_process(original, MemoryService(), [1, 2], complete=False)
    folder = tmp_path / "placed"
    place(original, folder)
    service = MemoryService()
    service.epochs = [1, 2] if key else []
    run_process(folder, service, [3])
    assert (service.keys, service.epochs) == ([key], [1, 2, 3])
    assert TrackedRun.read(folder / "tracked_note.json").folder == str(folder.resolve())


@pytest.mark.parametrize(
    ("config", "run_id"), [(CONFIG, "run"), (OTHER_CONFIG, "")], ids=["same settings", "other settings"]
)
def test_a_run_without_its_note_is_found_by_its_id_unless_other_epochs_may_follow(tmp_path, config, run_id):
    """The checkpoint may have been copied from a run whose later epochs the service has."""
    service = MemoryService()
    run_process(tmp_path, service, [3], config=config)
    assert (service.keys, service.run_ids) == ([""], [run_id])


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"key": "k", "ep', "damaged ("),
        (b"\xff\xfe", "not UTF-8"),
        (b'{"key": 5}', "key: must be text, got 5"),
        (b"[1]", "must be"),
    ],
)
def test_a_damaged_note_of_the_tracked_run_is_one_warning(tmp_path, capsys, content, reason):
    """A tracking problem must not end a run."""
    run_process(tmp_path, MemoryService(), [1, 2], complete=False)
    note = tmp_path / "tracked_note.json"
    note.write_bytes(content)
    service = MemoryService()
    run_process(tmp_path, service, [3])
    assert (service.keys, service.epochs) == ([""], [1, 2, 3])
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"warning: {note}: ")
    assert reason in line
    assert line.endswith("; Memory gets a new run with all epochs")
    assert TrackedRun.read(note) == TrackedRun("k", 3, "run", str(tmp_path))


def test_a_broken_service_costs_one_warning_and_catches_up(tmp_path, capsys):
    service = MemoryService()
    service.down = True
    run = Process(tmp_path, service)
    for epoch in (1, 2):
        run.track(epoch)
    deadline = time.monotonic() + 60
    while not (out := capsys.readouterr().out) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert out == "warning: Memory: no route to host; tried again after each epoch\n"
    time.sleep(0.1)
    service.down = False
    run.track(3)
    run.tracking.close()
    assert (service.epochs, service.settings) == ([1, 2, 3], SETTINGS)
    assert capsys.readouterr().out == ""


def test_a_service_that_never_works_is_reported_at_the_end(tmp_path, capsys):
    service = MemoryService()
    service.down = True
    run_process(tmp_path, service, range(1, 4))
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "warning: Memory lacks 3 epochs that results.csv has"
    assert len(lines) == 2
    assert not service.ends


def test_scores_that_come_after_their_epoch_was_tracked_are_missing(tmp_path, capsys):
    """The run is resumed with fewer epochs, so that its newest one, which was not validated, becomes the last."""
    unscored = Epoch(2, {"time": 1.0, "train/box": 0.5})
    run = Process(tmp_path, MemoryService())
    run.track(1)
    run.results.record(run.trainer, unscored)
    run.tracking.report(run.trainer, unscored)
    run.tracking.close()
    assert capsys.readouterr().out == ""
    run_process(tmp_path, MemoryService(), [3])
    assert capsys.readouterr().out == ""
    service = MemoryService()
    service.epochs = [1, 2, 3]
    run = Process(tmp_path, service, 4)
    run.track(2)
    run.tracking.close()
    assert service.epochs == [1, 2, 3]
    assert capsys.readouterr().out == "warning: Memory lacks the scores of epoch 2, added to results.csv later\n"


def test_a_service_that_hangs_delays_only_the_end_and_only_once(tmp_path, capsys):
    service = MemoryService()
    service.answer.clear()
    started = time.monotonic()
    run_process(tmp_path, service, range(1, 50), finish_s=0.5, close_s=120.0)
    assert time.monotonic() - started < 60
    assert capsys.readouterr().out == "warning: Memory: no answer in 0 s; results.csv has all epochs\n"
    assert len((tmp_path / "results.csv").read_text().splitlines()) == 50
    service.answer.set()
