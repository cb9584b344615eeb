"""The functions of the package lockstep. Most of these tests replace the command."""

from __future__ import annotations

import inspect
import re

import lockstep
from tests.helpers.messages import refused
from tests.lockstep.hooks import run_script


def test_a_run_is_started_or_continued_by_its_name(replaced):
    calls = replaced()
    lockstep.train("b.yaml", name="night", resume="auto")
    assert calls[-1] == {"data": "b.yaml", "name": "night", "resume": "auto"}
    with refused("names no run; write lockstep.train(DATA, name=..., resume='auto')", lockstep.Error):
        lockstep.resume("auto")
    lockstep.resume("./auto")
    assert calls[-1] == {"resume": "./auto"}


def test_help_and_editors_know_the_settings():
    parameters = inspect.signature(lockstep.train).parameters
    assert list(parameters)[:3] == ["data", "callbacks", "resume"]
    assert (parameters["epochs"].default, parameters["epochs"].kind) == (100, inspect.Parameter.KEYWORD_ONLY)
    assert {"lr0", "batch_size", "weights"} <= set(parameters)
    assert parameters["resume"].default is None
    assert all(f"    {name}: " in lockstep.train.__doc__ for name in parameters)
    assert not re.search(
        "(?<![a-z])--[a-z]", "".join(f.__doc__ for f in (lockstep.train, lockstep.val, lockstep.export))
    )
    assert "format" in inspect.signature(lockstep.export).parameters


SCRIPT = """
import lockstep

small = dict(imgsz=64, device="cpu", workers=0, amp="off", plots=False)
run = lockstep.train("set/data.yaml", model="tiny.yaml", epochs=1, batch=4, spawn=2, **small)
print("finished", run.history["epoch"])
"""


def test_a_script_without_a_guard_trains_on_two_processes(data, tmp_path):
    done = run_script(SCRIPT, tmp_path)
    assert done.stdout.endswith("finished [1.]\n"), done.stdout + done.stderr


POOL = """
import multiprocessing
import lockstep

small = dict(device="cpu", workers=2, amp="off", plots=False)

def work(spawn):
    try:
        run = lockstep.train("set/data.yaml", model="tiny.yaml", imgsz=64, epochs=1, batch=4, spawn=spawn, **small)
    except lockstep.Error as error:
        return str(error)
    return lockstep.val(run.last, **small).metrics["AP"] == run.metrics["AP"]

if __name__ == "__main__":
    with multiprocessing.Pool(1) as pool:
        print("results:", *pool.map(work, [0, 2]))
"""


def test_a_daemonic_process_loads_without_workers(data, tmp_path):
    done = run_script(POOL, tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1].startswith("results: True --spawn 2: a daemonic process"), done.stdout
    told = [line for line in lines if "loaded without workers" in line]
    assert [line.split(": ")[1] for line in told] == ["train", "val", "val"]
