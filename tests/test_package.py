"""The package that pip installs has the right content, and runs beside a user's own modules of the same names."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement

import lockstep
import train
from tests.helpers.preloaded import python
from tests.helpers.repository import ROOT
from tests.helpers.requirements import locked_versions, requirements
from tests.helpers.scripts import SMALL
from tests.helpers.tiny import write_dataset, write_model
from utils.config.commands import COMMANDS
from utils.program import VERSION

FOLDERS = ("data", "engine", "models", "tools", "utils")


def load_hook() -> ModuleType:
    pytest.importorskip("hatchling")
    spec = importlib.util.spec_from_file_location("hook", ROOT / "packaging" / "hook.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(target: str, folder: Path, root: Path = ROOT) -> Path:
    """Returns the wheel or sdist of ``root``."""
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", folder]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return build("wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory) -> Path:
    """A folder with the packages of the wheel, as pip unpacks them; tests/wheel.sh runs pip itself."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_the_wheel_has_one_package_and_says_what_it_needs(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(f"lockstep_yolo-{VERSION}.dist-info/METADATA").decode()
        commands = archive.read(f"lockstep_yolo-{VERSION}.dist-info/entry_points.txt").decode()
    assert commands == "[console_scripts]\nlockstep = lockstep.__main__:main\n"
    assert {name.partition("/")[0] for name in names} == {"lockstep", f"lockstep_yolo-{VERSION}.dist-info"}
    assert {"lockstep/scripts/train.py", "lockstep/configs/weights.yaml", "lockstep/launch/slurm.sbatch"} <= set(names)
    needed = re.findall(r"^Requires-Dist: (.+)$", metadata, re.M)
    assert [line for line in needed if line.startswith("torch")] == ["torch>=2.10", "torchvision>=0.25"]
    assert not any(line.startswith(("pytest", "ruff")) for line in needed)
    assert any(re.fullmatch(r"optuna\S+; extra == 'search'", line) for line in needed)


@pytest.mark.parametrize("python_version", ["3.11", "3.12", "3.13"])
def test_the_locked_versions_are_in_the_ranges(python_version):
    versions = locked_versions(python_version)
    locked = requirements()
    del locked["litert"]  # its packages cap the versions of others
    for name, requirement in [item for part in locked.values() for item in part.items()]:
        assert requirement.specifier.contains(versions[name]), (requirement, versions[name])


def test_requirements_txt_lists_what_pip_installs_and_pytest():
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    listed = [Requirement(line) for line in lines if not line.startswith("#")]
    needed = [*requirements()[""].values(), requirements()["dev"]["pytest"]]
    assert {line.name: line.specifier for line in listed} == {package.name: package.specifier for package in needed}


def tracked_files() -> list[str]:
    """The paths of all files in the repository, relative to its root. Skips the test if this is not a clone."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("this is not a clone")
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:  # such as the clone of another user, which git refuses to read
        pytest.skip(done.stderr.strip())
    return [name for name in done.stdout.split("\0") if (ROOT / name).is_file()]


def test_the_wheel_has_all_files_of_the_program(wheel):
    folders = tuple(f"{name}/" for name in (*FOLDERS, "configs", "launch", "lockstep"))
    expected = {f"lockstep/{name.removeprefix('lockstep/')}" for name in tracked_files() if name.startswith(folders)}
    with zipfile.ZipFile(wheel) as archive:
        assert expected <= set(archive.namelist())


def test_other_files_in_the_folders_of_the_program_stay_out_of_the_wheel(tmp_path: Path):
    hook = load_hook()
    for name in hook.PACKAGED:
        if (ROOT / name).is_dir():
            (tmp_path / name / "__pycache__").mkdir(parents=True)
        else:
            (tmp_path / f"{name}.py").touch()
    before = hook.package_files(tmp_path)
    (tmp_path / "data" / ".ipynb_checkpoints").mkdir()
    others = (
        "data/bus.jpg", "data/.env", "data/coco.yaml", "data/.ipynb_checkpoints/a.py", "data/__pycache__/a.pyc",
        "configs/.secret.yaml", "launch/notes.txt",
    )  # fmt: skip
    for name in others:
        (tmp_path / name).write_bytes(b"\xff\xd8")
    assert hook.package_files(tmp_path) == before


def module_names(tree: ast.Module) -> list[str]:
    """Returns what a module imports, and its strings that are the name of a module of the repository."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found.append(node.module)
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.Constant) and re.fullmatch(r"\w+(\.\w+)+", str(node.value)):
            place = ROOT / str(node.value).replace(".", "/")
            found += [node.value] if place.is_dir() or place.with_suffix(".py").is_file() else []
    return found


def test_no_module_of_the_wheel_names_modules_or_commands_of_the_repository(wheel):
    with zipfile.ZipFile(wheel) as archive:
        modules = {name: archive.read(name).decode() for name in archive.namelist() if name.endswith(".py")}
    modules.pop("lockstep/scripts/__init__.py")
    assert len(modules) > 200
    for name, text in modules.items():
        of_repository = {top.partition(".")[0] for top in module_names(ast.parse(text))} & {*FOLDERS, *COMMANDS}
        assert not of_repository, f"{name} names modules of {of_repository}"
        repository_command = re.search(
            r"(?<![\w/.])(?:train|val|detect|export)\.py\b|python -m (?!torch|lockstep)[\w.]+", text
        )
        assert repository_command is None, (name, repository_command)


@pytest.mark.parametrize("function", ["train", "val", "export", "check"])
def test_editors_know_the_keyword_arguments_of_an_installed_package(function, wheel):
    with zipfile.ZipFile(wheel) as archive:
        stub = archive.read("lockstep/settings.pyi").decode()
        assert "lockstep/py.typed" in archive.namelist()  # type checkers ignore other packages' annotations
    types: dict[str, Any] = {"__name__": "settings"}
    exec(compile(stub, "settings.pyi", "exec", dont_inherit=True), types)
    parameters = inspect.signature(getattr(lockstep, function)).parameters.values()
    annotations = types[f"{function.title()}Settings"].__annotations__
    settings = {p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
    assert settings - {"callbacks", "resume"} <= set(annotations)
    assert ("batch" in annotations) == (function != "check")
    assert annotations.get("offline", annotations.get("trust")) == bool | None


class Installed:
    """Runs the installed package in a folder of a user whose own modules have the names of our folders."""

    def __init__(self, site: Path, folder: Path) -> None:
        self.site = site
        self.folder = folder
        for name in ("utils.py", "data/__init__.py", "models/__init__.py", "engine/__init__.py", "train.py"):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text("OWN = True\n")
        self._environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        self._environment |= {"PYTHONPATH": str(site), "XDG_CACHE_HOME": str(folder / "cache")}

    def run(self, *words: str | Path, code: int = 0) -> str:
        """Returns the output of ``python WORDS``."""
        done = subprocess.run(
            [python(), *map(str, words)], cwd=self.folder, env=self._environment, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240,
        )  # fmt: skip
        assert done.returncode == code, done.stdout
        return done.stdout


@pytest.fixture
def installed(site, tmp_path) -> Installed:
    (tmp_path / "user").mkdir()
    return Installed(site, tmp_path / "user")


def flags_in(folder: Path) -> list[str]:
    data = write_dataset(folder / "set", train=6, val=3)
    model = write_model(folder / "tiny.yaml")
    return ["--data", str(data), "--model", str(model), "--epochs", "1", *SMALL]


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    return torch.load(path, weights_only=True)["ema"]


HOOKS = """
import lockstep.launch.ray_train
import data, engine, models, train, utils
assert all(module.OWN for module in (data, engine, models, train, utils))
class Hooks:
    def on_end(self, run):
        print("hook", type(run).__module__)
"""


@pytest.mark.slow
def test_the_command_trains_the_same_bits_beside_the_users_own_modules(installed, tmp_path, monkeypatch):
    flags = [*flags_in(tmp_path), "--threads", "1"]
    (installed.folder / "hooks.py").write_text(HOOKS)
    output = installed.run("-m", "lockstep", "train", *flags, "--callbacks", "hooks:Hooks")
    assert "hook lockstep.engine.train.callbacks" in output
    train.main([*flags, "--project", str(tmp_path)])
    folders = tmp_path / "exp", installed.folder / "runs" / "train" / "exp"
    ours, theirs = (weights_of(folder / "best.pt") for folder in folders)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert torch.load(folders[1] / "last.pt", weights_only=True)["program"] == VERSION


def test_messages_name_the_command_that_is_installed(installed):
    assert installed.run("-m", "lockstep", "train", "--help").startswith("usage: lockstep train [flags]")
    assert installed.run("-m", "lockstep", "check", "--help").startswith("usage: lockstep check DATA [flags]")
    message = installed.run("-m", "lockstep", "train", "--evolve", code=2)
    assert message == "error: --evolve: search hyper-parameters with lockstep search\n"
    assert "did you mean 'train'?" in installed.run("-m", "lockstep", "trian", code=2)
    for words in (["--version"], ["train", "--version"], ["check", "--version"]):
        assert installed.run("-m", "lockstep", *words) == f"lockstep {VERSION}\n"


@pytest.mark.slow
def test_all_ways_to_start_work_installed(installed, tmp_path):
    flags = [*flags_in(tmp_path), "--epochs", "2"]
    lockstep = ("-m", "lockstep")
    installed.run(*lockstep, "train", *flags, "--spawn", "2", "--name", "spawned")
    torchrun = ("-m", "torch.distributed.run", "--nproc_per_node", "2")
    installed.run(*torchrun, *lockstep, "train", *flags, "--name", "launched")
    runs = installed.folder / "runs" / "train"
    clone = [python(), *torchrun, str(ROOT / "train.py"), *flags, "--project", str(tmp_path), "--name", "clone"]
    subprocess.run(clone, cwd=ROOT, check=True, timeout=240)
    folders = runs / "spawned", runs / "launched", tmp_path / "clone"
    first, *others = (weights_of(folder / "last.pt") for folder in folders)
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)
    assert "resuming" in installed.run(*lockstep, "train", "--resume", runs / "spawned", "--epochs", "3")
    best = runs / "spawned" / "best.pt"
    assert "results are in" in installed.run(*lockstep, "val", "--weights", best, "--device", "cpu", "--noplots")
    installed.run(*lockstep, "export", "--weights", best, "--format", "torchscript", "--no-check")
    assert best.with_suffix(".torchscript").is_file()
    installed.run(*lockstep, "detect", "--weights", best, "--source", tmp_path / "set" / "images" / "val")
    assert "results are in" in installed.run(*lockstep, "kfold", *flags, "--folds", "2")
    assert "nothing to report" in installed.run(*lockstep, "check", tmp_path / "set" / "data.yaml", "--noplots")
    assert "2 classes" in installed.run(*lockstep, "weights", best, best.with_suffix(".safetensors"))
    small = {"imgsz": 64, "device": "cpu", "workers": 0, "plots": False}
    given = {"data": flags[1], "model": flags[3], "epochs": 1, "name": "python", "callbacks": "hooks:Hooks", **small}
    (installed.folder / "hooks.py").write_text(HOOKS)
    code = f"import utils, lockstep; print(utils.OWN, lockstep.train(**{given}).load().names)"
    output = installed.run("-c", code)
    assert "hook lockstep.engine.train.callbacks" in output
    assert output.endswith("True {0: 'light', 1: 'dark'}\n")


def test_help_imports_nothing_heavy():
    code = "import sys; from lockstep.__main__ import main; main(['--help']); print({*sys.modules} & {'torch', 'cv2'})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert all(f"  {command} " in done.stdout for command in COMMANDS)
    assert done.stdout.splitlines()[-1] == "set()"
