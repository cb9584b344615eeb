"""The functions of the package lockstep. Most of these tests replace the command by a few lines of Python."""

from __future__ import annotations

import base64
import inspect
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
import yaml

import lockstep
from lockstep import command as command_module
from lockstep.keywords import parse_keywords
from tests.helpers.messages import refused
from tests.helpers.preloaded import python
from tests.helpers.tiny import write_dataset, write_model
from utils.config.recipes import read_recipe
from utils.config.settings import Hyperparameters
from utils.logger import terminal_bars

ROOT = Path(__file__).parents[2]
SMALL = {"imgsz": 64, "batch": 4, "device": "cpu", "workers": 0, "amp": "off", "noplots": True}

BEGINNING = """
import os, pathlib, signal, sys, time
from utils.process.result_file import report_error, claim_result_file, write_result
claim_result_file()
"""
PRINT_SETTINGS = "import json; print(json.dumps([sys.argv[1], json.loads(pathlib.Path(sys.argv[2][1:]).read_text())]))"

pytestmark = pytest.mark.usefixtures("preloaded")


@pytest.fixture
def command(monkeypatch, tmp_path):
    """Replaces the commands by a program; returns a function that sets its text."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def replace(text: str) -> None:
        text = f"{BEGINNING}{text}"
        monkeypatch.setattr(command_module, "command_prefix", lambda name: [python(), "-c", text, name])

    return replace


def test_keywords_become_the_settings_of_the_command(command, tmp_path, capsys):
    command(f"{PRINT_SETTINGS}; write_result(folder='a')")
    run = lockstep.val(tmp_path / "best.pt", device=0, rect=False, tta=True, iou_thres=None, imgsz=320)
    assert run.folder == tmp_path / "a"
    name, settings = json.loads(capsys.readouterr().out)
    assert name == "val"
    assert settings == {"weights": str(tmp_path / "best.pt"), "device": "0", "rect": False, "tta": True, "imgsz": 320}
    given = {"lr0": 0.01, "close_mosaic": 3, "freeze": [1, 2], "cache": True, "batch": 8, "tracker": []}
    parsed = parse_keywords("train", {}, given)
    assert parsed.explicit_flags == {"override", "freeze", "cache", "batch_size", "tracker"}
    config = parsed.config
    assert config.override == ["lr0=0.01", "close_mosaic=3"]
    assert (config.freeze, config.cache, config.batch_size) == ([1, 2], "ram", 8)


def test_the_data_of_a_check_is_not_written_to(command, tmp_path, capsys, monkeypatch):
    """The working folder is the data set; a file with the content of its YAML used to be written to it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path.parent / "cache"))
    command(f"{PRINT_SETTINGS}; write_result(issues=[])")
    data = {"path": ".", "train": "images", "names": ["cat"]}
    assert lockstep.check(data, split="val", out=Path("checked"), imgsz=None, noplots=True) == {"issues": []}
    name, settings = json.loads(capsys.readouterr().out)
    assert name == "check"
    assert yaml.safe_load(Path(settings.pop("data")).read_text()) == data | {"path": str(tmp_path)}
    assert settings == {"split": ["val"], "out": "checked", "noplots": True}
    assert not list(tmp_path.iterdir())
    lockstep.check("-x.yaml", split=["train", "val"])
    assert json.loads(capsys.readouterr().out)[1] == {"data": "-x.yaml", "split": ["train", "val"]}


@pytest.mark.parametrize(("path", "folder"), [(None, "."), ("~/set", "home/set")])
def test_the_folder_of_a_data_set_given_by_its_content_is_that_of_its_yaml(
    command, tmp_path, capsys, monkeypatch, path, folder
):
    """A `path` of None, as loaded from `path:` in a YAML, used to be a TypeError, and "~" a folder of this name."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    command(f"{PRINT_SETTINGS}; write_result(issues=[])")
    lockstep.check({"path": path, "train": "images"})
    content = yaml.safe_load(Path(json.loads(capsys.readouterr().out)[1]["data"]).read_text())
    assert content == {"path": str(tmp_path / folder), "train": "images"}
    with refused("data: path: must be text, got 3", lockstep.Error):
        lockstep.check({"path": 3, "train": "images"})


def test_numbers_and_arrays_of_numpy_are_settings():
    given = {"classes": np.array([0, 1]), "freeze": np.zeros(0, int), "epochs": np.int64(3), "lr0": np.float32(0.5)}
    config = parse_keywords("train", {}, given | {"cos_lr": np.bool_(True)}).config
    assert (config.classes, config.freeze, config.epochs, config.cos_lr) == (["0", "1"], [], 3, True)
    assert config.override == ["lr0=0.5"]


def test_none_is_the_null_of_the_hyperparameters_whose_type_says_so():
    """For all others, None is as if not given. `lr_mult=None` was, too: a training from weights used 1."""
    optional = {name for name, hint in Hyperparameters.__annotations__.items() if "None" in str(hint)}
    assert optional == {"lr0", "lr_mult", "close_mosaic", "close_scale"}
    given = dict.fromkeys(["weights", "epochs", *Hyperparameters.__annotations__])
    parsed = parse_keywords("train", {"hyp": "scratch"}, given)
    assert parsed.explicit_flags == {"hyp", "override"}
    config = parsed.config
    assert sorted(config.override) == sorted(f"{name}=null" for name in optional)
    assert read_recipe("scratch", [], pretrained=True).lr_mult == 1.0
    assert read_recipe(config.hyp, config.override, pretrained=True).lr_mult is None
    unset = dict.fromkeys(["weights", "iou_thres", "plots"])
    assert parse_keywords("val", {"weights": "a.pt"}, unset).explicit_flags == {"weights"}
    assert "lr_mult: learning rate factor of loaded parameters; None: by how well `weights` " in lockstep.train.__doc__


@pytest.mark.parametrize("classes", [["-bg"], ["-bg", "cat"], ["cat", "-bg"], ["--resume"], ['["cat"]']])
def test_names_that_look_like_flags_are_settings(classes):
    assert parse_keywords("train", {}, {"classes": classes}).config.classes == classes


def test_a_result_that_could_not_be_written_is_one_line(command):
    """The result file is in the temporary folder, whose disk may be full, though that of the run is not."""
    command("print('done')")
    with pytest.raises(lockstep.Error, match=r"^train ended without reporting its result \(.* may be full"):
        lockstep.train()


@pytest.mark.parametrize(("world_size", "passed"), [("1", set()), ("2", {"RANK", "WORLD_SIZE"})])
def test_the_variables_of_a_launcher_of_one_process_are_not_passed_on(command, monkeypatch, capsys, world_size, passed):
    """Otherwise, a second command would join the launcher's store as the same rank."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", world_size)
    command("print(*({'RANK', 'WORLD_SIZE'} & set(os.environ))); write_result(folder='a')")
    lockstep.val("best.pt")
    assert set(capsys.readouterr().out.split()) == passed


def test_an_error_is_the_line_of_the_command_and_not_shown_twice(command, capsys):
    command("print('a line'); report_error('data.yaml: is wrong'); sys.exit(2)")
    with refused("data.yaml: is wrong", lockstep.Error):
        lockstep.train()
    assert capsys.readouterr().out == "a line\n"
    command("sys.exit(3)")
    with refused("exit status 3", lockstep.Error):
        lockstep.check("data.yaml")
    command("os.kill(os.getpid(), signal.SIGKILL)")
    with refused("killed by SIGKILL; is there enough memory?", lockstep.Error):
        lockstep.export("best.pt")


def test_a_check_that_fails_after_it_has_found_issues_is_an_error(command):
    command("write_result(issues=['blurred']); sys.exit(1)")
    assert lockstep.check("data.yaml") == {"issues": ["blurred"]}
    command("write_result(issues=['blurred']); report_error('standard output cannot be written'); sys.exit(2)")
    with refused("standard output cannot be written", lockstep.Error) as caught:
        lockstep.check("data.yaml")
    assert caught.value.result.values["issues"] == ["blurred"]
    command("write_result(issues=[]); sys.exit(1)")
    with refused("exit status 1", lockstep.Error):
        lockstep.check("data.yaml")


def test_a_program_that_outlives_the_command_is_not_waited_for(command, tmp_path, capsys):
    """A service that a callback has started holds the output of the command open."""
    command("""
import subprocess
service = '''
import pathlib, time
for _ in range(200):
    time.sleep(0.1)
    if pathlib.Path("returned").exists():
        raise SystemExit
pathlib.Path("was waited for").touch()
'''
subprocess.Popen([sys.executable, "-c", service])
write_result(folder="a")
print("x" * 100_000 + "end")
""")
    assert lockstep.train().folder == tmp_path / "a"
    (tmp_path / "returned").touch()
    assert not (tmp_path / "was waited for").exists()
    assert capsys.readouterr().out == "x" * 100_000 + "end\n"


def test_an_interrupt_is_passed_on_once_and_returns_the_run(command, tmp_path, monkeypatch):
    handle = signal.signal

    def noted(number: int, handler: object) -> object:
        before = handle(number, handler)
        (tmp_path / "passes on").touch()
        return before

    monkeypatch.setattr(signal, "signal", noted)
    command("""
def stop(*_):
    pathlib.Path("count").open("a").write("x")
    pathlib.Path("last.pt").touch()
    time.sleep(0.2)
    sys.exit(130)
signal.signal(signal.SIGINT, stop)
write_result(folder=".")
while not os.path.exists("passes on"):
    time.sleep(0.01)
os.kill(os.getppid(), signal.SIGINT)
time.sleep(60)
""")
    run = lockstep.train()
    assert run.folder == tmp_path
    assert (tmp_path / "count").read_text() == "x"


def test_an_interrupt_without_a_checkpoint_is_an_interrupt(command):
    command("os.kill(os.getppid(), signal.SIGINT); time.sleep(60)")
    with pytest.raises(KeyboardInterrupt):
        lockstep.train()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_bar_is_shown_as_it_moves(command, capsys):
    command(r"""sys.stderr.write("\r10%|#   \r20%|##  "); sys.stderr.flush(); time.sleep(0.3)
sys.stderr.write("\r          \r"); print("ö"); write_result(folder="runs/val/exp")""")
    assert lockstep.val("best.pt").folder.parts[-3:] == ("runs", "val", "exp")
    assert capsys.readouterr().out == "\r10%|#   \r20%|##  \r          \rö\n"


def test_half_a_character_at_the_end_is_shown(command, capsys):
    command(r"sys.stdout.buffer.write(b'a\xc3'); write_result(folder='a')")
    lockstep.val("best.pt")
    assert capsys.readouterr().out == "a\N{REPLACEMENT CHARACTER}"


def test_a_closed_output_does_not_stop_the_command(command, tmp_path, monkeypatch):
    """A notebook may close it, or the reader of a pipeline may have ended."""
    read, write = os.pipe()
    os.close(read)
    command("print('a line'); time.sleep(0.2); print('b'); pathlib.Path('done').touch(); write_result(folder='a')")
    closed = io.StringIO()
    closed.close()
    for output in (os.fdopen(write, "w", buffering=1, closefd=False), closed, None):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", output)
            assert lockstep.train().folder == tmp_path / "a"
        (tmp_path / "done").unlink()
    os.close(write)


def test_bars_are_drawn_for_the_process_that_shows_them(monkeypatch, capsys):
    assert terminal_bars(sys.stderr) is None
    monkeypatch.setenv("LOCKSTEP_TERMINAL", "1")
    assert terminal_bars(sys.stderr) is not None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"epochs": 0}, "epochs: must be at least 1, got 0"),
        ({"epocs": 1}, "epocs=1: unknown (did you mean 'epochs'?)"),
        ({"lr0": "x"}, "lr0: must be a number or null, got 'x'"),
        ({"half": True}, "half=True: use `amp` bf16 or `amp` fp16; `amp` auto uses bf16 if the device supports it"),
        (
            {"resume": True},
            'resume=True: call lockstep.resume(RUN); resume="auto" of lockstep.train starts or continues the run of a '
            "name",
        ),
        ({"devices": 2, "spawn": 4}, "devices=2, spawn=4: both set the number of processes; give only one of them"),
        ({"pretrained": True}, "pretrained=True: name the weights to start from with weights"),
        ({"pretrained": False, "weights": "a.pt"}, "pretrained=False: name the weights to start from with weights"),
        (
            {"override": ["lr0=1"]},
            "override=['lr0=1']: hyper-parameters are keywords of lockstep.train, such as lr0=0.01",
        ),
    ],
)
def test_mistakes_in_settings(given, message):
    with refused(message, lockstep.Error):
        lockstep.train(**given)


def test_arguments_of_ultralytics_that_say_what_happens_anyway_are_accepted(command, capsys):
    command(f"{PRINT_SETTINGS}; write_result(folder='a')")
    lockstep.train("b.yaml", resume=False, pretrained=False, task="detect", mode="train")
    assert json.loads(capsys.readouterr().out)[1] == {"data": "b.yaml"}
    lockstep.train("b.yaml", pretrained=True, weights="a.pt")
    assert json.loads(capsys.readouterr().out)[1] == {"data": "b.yaml", "weights": "a.pt"}


@pytest.mark.parametrize("kind", [list, tuple, np.array])
def test_lists_of_ultralytics_are_one_value(kind, capsys):
    """They used to become several words after a flag that takes one: "unrecognized arguments: 1"."""
    config = parse_keywords("train", {}, {"device": kind([0, 1]), "imgsz": kind([640, 640])}).config
    assert (config.device, config.imgsz) == ("0,1", 640)
    assert capsys.readouterr().out == ""
    weights = {"weights": "a.pt"}
    assert parse_keywords("val", weights, {"imgsz": kind([480, 640])}).config.imgsz == 640
    assert capsys.readouterr().out == "imgsz=[480, 640]: used as imgsz=640, the larger one\n"
    assert parse_keywords("export", weights, {"imgsz": kind([480, 640])}).config.imgsz == [480, 640]
    assert parse_keywords("val", weights, {"imgsz": kind([[480]])}).config.imgsz == 480


@pytest.mark.parametrize(
    ("command_name", "given", "message"),
    [
        ("train", {"project": ["a", "b"]}, "project=['a', 'b']: must be one value, not a list"),
        ("train", {"epocs": None}, "epocs=None: unknown (did you mean 'epochs'?)"),
        ("val", {"lr0": None}, "lr0=None: unknown"),
        ("val", {"box": 7.0}, "box=7.0: unknown"),
        ("export", {"lr0": 1}, "lr0=1: unknown"),
        ("check", {"epochs": 3}, "epochs=3: unknown"),
        (
            "check",
            {"json": True},
            "json=True: functions return their results; lockstep.check returns what `lockstep check --json` prints",
        ),
        ("train", {"mosaik": 1}, "mosaik=1: unknown (did you mean 'mosaic'?)"),
    ],
)
def test_keywords_that_a_command_cannot_use_are_refused_without_suggesting_them(command_name, given, message):
    with pytest.raises(lockstep.Error) as error:
        parse_keywords(command_name, {"weights": "a.pt", "data": "a.yaml"}, given)
    assert str(error.value) == message


def test_a_run_is_started_or_continued_by_its_name(command, tmp_path, capsys):
    command(f"{PRINT_SETTINGS}; write_result(folder='a')")
    lockstep.train("b.yaml", name="night", resume="auto")
    assert json.loads(capsys.readouterr().out)[1] == {"data": "b.yaml", "name": "night", "resume": "auto"}
    with refused(
        "lockstep.resume('auto'): names no run; lockstep.train(DATA, name=..., resume='auto') starts one or continues "
        "it, and lockstep.resume('./auto') continues the one in this folder",
        lockstep.Error,
    ):
        lockstep.resume("auto")
    lockstep.resume("./auto")
    assert json.loads(capsys.readouterr().out)[1] == {"resume": "./auto"}


@pytest.mark.parametrize(
    ("statement", "hint"),
    [
        ("from lockstep import YOLO", r'lockstep has no YOLO: lockstep.load\("best.pt"\) is the model for detection'),
        ("lockstep.YOLO('yolov8n.pt')", "lockstep has no YOLO: .* lockstep.train"),
        ("from lockstep import RTDETR", "lockstep has no RTDETR: there are YOLO detectors only"),
        ("lockstep.predict('a.jpg')", r'write lockstep.load\("best.pt"\)\(images\)'),
    ],
)
def test_names_of_other_programs_get_a_hint(statement, hint):
    with pytest.raises(ImportError, match=hint):
        exec(statement, {"lockstep": lockstep})


def test_other_names_are_attribute_errors_and_submodules_are_found():
    assert not hasattr(lockstep, "nothing")
    assert not hasattr(lockstep, "__wrapped__")
    from lockstep import keywords

    assert keywords.parse_keywords is parse_keywords


def test_more_processes_than_cores_are_refused():
    with pytest.raises(lockstep.Error, match=r"^--spawn 999: 999 processes on \d+ CPU cores"):
        lockstep.train(devices=999, device="cpu")


def test_keywords_that_change_nothing_are_a_line(capsys):
    given = {"verbose": False, "val": True, "plots": True, "augment": True, "cache": False, "amp": False, "nbs": 64}
    parsed = parse_keywords("train", {}, given)
    assert parsed.explicit_flags == {"amp", "cache", "nominal_batch"}
    assert (parsed.config.amp, parsed.config.nominal_batch) == ("off", 64)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "verbose=False: without effect (there is one level of detail)"
    assert [line.split("=")[0] for line in lines] == ["verbose", "val", "plots", "augment"]


class Hooks:
    def on_end(self, run):
        (run.folder / "done.txt").touch()


def on_end(run):
    (run.folder / "done.txt").touch()


def test_callbacks_that_another_process_cannot_import_are_refused():
    class Local:
        pass

    main = type("Hooks", (), {"__module__": "__main__"})
    for callbacks, message in (
        (
            Local,
            "callbacks: test_callbacks_that_another_process_cannot_import_are_refused.<locals>.Local: the "
            "processes of the training cannot import it; put a class or a function into a file of its own, "
            "such as hooks.py, and give callbacks='hooks:NAME'",
        ),
        (
            Hooks(),
            "callbacks: Hooks: the processes of the training cannot import it; put a class or a function into "
            "a file of its own, such as hooks.py, and give callbacks='hooks:NAME'",
        ),
        (
            main,
            "callbacks: Hooks: the processes of the training cannot import it; put a class or a function into "
            "a file of its own, such as hooks.py, and give callbacks='hooks:NAME'",
        ),
        (
            lambda run: None,
            "callbacks: test_callbacks_that_another_process_cannot_import_are_refused.<locals>.<lambda>: the "
            "processes of the training cannot import it; put a class or a function into a file of its own, "
            "such as hooks.py, and give callbacks='hooks:NAME'",
        ),
    ):
        with refused(message, lockstep.Error):
            lockstep.train(callbacks=callbacks)


def test_a_command_is_started_without_importing_torch():
    code = "import sys, lockstep.api; print({'torch', 'numpy'} & set(sys.modules))"
    interpreter = Path(sys.prefix, "bin", "python")  # not one that has imported it
    done = subprocess.run([interpreter, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_help_and_editors_know_the_settings():
    parameters = inspect.signature(lockstep.train).parameters
    assert list(parameters)[:4] == ["data", "devices", "callbacks", "resume"]
    assert (parameters["epochs"].default, parameters["epochs"].kind) == (100, inspect.Parameter.KEYWORD_ONLY)
    assert {"lr0", "batch_size", "weights"} <= set(parameters)
    assert parameters["resume"].default is None
    assert "    epochs: number of epochs" in lockstep.train.__doc__
    assert "    patience: stop after this many epochs without a better `fitness`; 0: never" in lockstep.train.__doc__
    assert not re.search(
        "(?<![a-z])--[a-z]", "".join(f.__doc__ for f in (lockstep.train, lockstep.val, lockstep.export))
    )
    assert "format" in inspect.signature(lockstep.export).parameters


def test_a_data_set_is_given_by_its_content(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_dataset(tmp_path / "set", train=5, val=2)
    data = {"path": "set", "train": Path("images/train"), "val": ["images/val"], "names": {0: "light", 1: "dark"}}
    run = lockstep.train(data, model=write_model(tmp_path / "tiny.yaml"), epochs=1, lr0=0.01, callbacks=on_end, **SMALL)
    assert run.folder == tmp_path / "runs" / "train" / "exp"
    assert run.best.is_file()
    assert run.last.is_file()
    assert (run.folder / "done.txt").is_file()
    assert run.history["epoch"].tolist() == [1.0]
    assert run.metrics["AP"] == run.history["metrics/AP"][0]
    assert run.load().names == {0: "light", 1: "dark"}
    with refused(
        "data: must be text, a number, or a list or mapping of these, got an object of type object", lockstep.Error
    ):
        lockstep.train({"train": object()})


def test_the_content_of_a_data_set_may_have_numbers_of_numpy(command, tmp_path, capsys):
    command(f"{PRINT_SETTINGS}; write_result(issues=[])")
    data = {"path": str(tmp_path), "train": (Path("a"), "b"), "names": {np.int64(0): np.str_("cat")}, "nc": np.int64(1)}
    lockstep.check(data)
    content = yaml.safe_load(Path(json.loads(capsys.readouterr().out)[1]["data"]).read_text())
    assert content == {"path": str(tmp_path), "train": ["a", "b"], "names": {0: "cat"}, "nc": 1}


@pytest.mark.parametrize(
    ("data", "settings", "left"),
    [
        ({}, {}, []),  # refused by the command
        ({"train": "images", "names": ["cat"]}, {"epocs": 3}, []),  # refused before it starts
        ({"train": "images", "names": ["cat"]}, {}, ["runs"]),  # another run may have started with the same data set
    ],
)
def test_a_refused_data_set_leaves_no_file(command, tmp_path, monkeypatch, data, settings, left):
    """One file and the folders of runs were left for each attempt."""
    monkeypatch.chdir(tmp_path)
    command("report_error(ValueError('refused')); sys.exit(2)")
    with pytest.raises(lockstep.Error):
        lockstep.train(data, **settings)
    assert [path.name for path in tmp_path.iterdir()] == left


def test_a_folder_that_cannot_be_made_for_the_content_of_a_data_set_is_named(tmp_path, monkeypatch):
    """The error used to be a FileExistsError or NotADirectoryError."""
    (tmp_path / "file").touch()
    for project in (tmp_path / "file", tmp_path / "file" / "runs", tmp_path / ("x" * 300)):
        with refused(f"{project}/data-....yaml: the content of data cannot be written (...); choose another project"):
            lockstep.train({"train": "a"}, project=project)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with refused("the content of data cannot be written (not a directory); set XDG_CACHE_HOME to another folder"):
        lockstep.check({"train": "a"})


def test_a_validation_may_have_several_processes(command, capsys):
    """The keyword used to be refused in favor of one that only training has."""
    command(f"{PRINT_SETTINGS}; write_result(folder='a')")
    lockstep.val("best.pt", spawn=2)
    assert json.loads(capsys.readouterr().out)[1] == {"weights": "best.pt", "spawn": 2}


def test_the_number_of_devices_may_be_of_numpy(command, capsys):
    command(f"{PRINT_SETTINGS}; write_result(folder='a')")
    lockstep.train(devices=np.int64(2))
    lockstep.train(devices=1)
    settings = [json.loads(line)[1] for line in capsys.readouterr().out.splitlines()]
    assert settings == [{"data": "demo", "spawn": 2}, {"data": "demo"}]


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("train", {"devices": 0}, "devices: must be at least 1, got 0"),
        ("train", {"devices": -1}, "devices: must be at least 1, got -1"),
        ("resume", {"devices": "2"}, "devices: must be a whole number, got '2'"),
        ("train", {"devices": None}, "devices: must be a whole number, got None"),
        ("train", {"devices": [0, 1]}, "devices: must be a whole number, got [0, 1]"),
        ("train", {"data": None}, "data: must be text, got None"),
        ("train", {"data": {}, "project": np.array([1, 2])}, "project: must be text, got [1, 2]"),
        ("train", {"resume": np.array([1, 2])}, "resume=array([1, 2]): call lockstep.resume(RUN); ..."),
        ("train", {"resume": lockstep.Run("/a")}, "resume=Run('/a'): call lockstep.resume(RUN); ..."),
        ("resume", {"run": None}, "run: must be text, got None"),
        ("val", {"weights": 3}, "weights: must be text, got 3"),
        ("val", {"weights": lockstep.Run("/a")}, "weights: Run('/a') is a run; give its checkpoint .best or .last"),
        ("export", {"weights": lockstep.Run("/a")}, "weights: Run('/a') is a run; give its checkpoint .best or .last"),
        ("export", {"weights": b"a.pt"}, "weights: must be text, ..., got an object of type bytes"),
    ],
)
def test_arguments_of_another_type_are_refused_by_name(command, name, given, message):
    command("write_result(folder='a', files=[])")  # so that no training starts if it is not refused
    with refused(message, lockstep.Error):
        getattr(lockstep, name)(**given)


def test_a_notebook_shows_scores_and_curves(tmp_path):
    run = lockstep.Run(tmp_path / "<b>")
    run.folder.mkdir()
    assert run._repr_html_() == f"<p>{tmp_path}/&lt;b&gt;</p>"
    (run.folder / "results.json").write_text('{"ap": 0.5, "ap50": null, "images": 4, "seconds": 2.5}')
    assert run.metrics == pytest.approx({"AP50": np.nan, "AP": 0.5}, nan_ok=True)
    assert run._repr_html_().endswith("<th>AP50</th><td>–</td></tr><tr><th>AP</th><td>0.500</td></tr></table>")
    (run.folder / "results.csv").write_text("epoch,time,train/box,metrics/AP\n1,5,2.5,0.1\n2,9,2.0,0.2\n")
    (png,) = re.findall('src="data:image/png;base64,(.+)"', run._repr_html_())
    height, width, _ = cv2.imdecode(np.frombuffer(base64.b64decode(png), np.uint8), cv2.IMREAD_COLOR).shape
    assert 2.5 * height < width < 3.5 * height  # a panel for the loss, and one for AP


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"ap": 0.5', "results.json:1: malformed JSON (...)"),
        ("", "results.json: not the results of a validation"),
        ("[0.5]", "results.json: must be 'key: value' lines, got [0.5]"),
        ('{"ap": "good"}', "results.json: ap: must be a number or null, got 'good'"),
    ],
)
def test_damaged_scores_are_refused_and_not_shown(tmp_path, content, message):
    """They used to be a JSONDecodeError, also where a notebook shows the run, or scores of any type."""
    (tmp_path / "results.json").write_text(content)
    run = lockstep.Run(tmp_path)
    with refused(f"{tmp_path}/{message}", lockstep.Error):
        _ = run.metrics
    assert run._repr_html_() == f"<p>{tmp_path}</p>"


SCRIPT = """
import lockstep

small = dict(imgsz=64, device="cpu", workers=0, amp="off", noplots=True)
run = lockstep.train("set/data.yaml", model="tiny.yaml", epochs=1, batch=4, devices=2, **small)
assert lockstep.resume(run, epochs=2).history["epoch"].tolist() == [1, 2]
assert 0 <= lockstep.val(run.best, "set/data.yaml", device="cpu", workers=0, noplots=True).metrics["AP"] <= 1
(file,) = lockstep.export(run.best, format="torchscript", check=False)
assert file.is_file()
checked = lockstep.check("set/data.yaml", out="checked")
assert checked["report"] == "checked/report.html" and checked["issues"] == []
print("finished")
"""


@pytest.mark.slow
def test_a_script_without_a_guard_does_everything_on_two_processes(tmp_path):
    write_dataset(tmp_path / "set", train=5, val=2)
    write_model(tmp_path / "tiny.yaml")
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [python(), "script.py"], cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "HOME": str(tmp_path)},
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.stdout.endswith("finished\n"), done.stdout + done.stderr
