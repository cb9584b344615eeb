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
from packaging.requirements import Requirement

import lockstep
from tests.helpers.preloaded import python
from tests.helpers.repository import ROOT
from tests.helpers.requirements import requirements
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


def test_messages_name_the_command_that_is_installed(installed):
    assert installed.run("-m", "lockstep", "train", "--help").startswith("usage: lockstep train [flags]")
    message = installed.run("-m", "lockstep", "train", "--evolve", code=2)
    assert message == "error: --evolve: search hyper-parameters with lockstep search\n"
    assert "did you mean 'train'?" in installed.run("-m", "lockstep", "trian", code=2)
    assert installed.run("-m", "lockstep", "check", "--version") == f"lockstep {VERSION}\n"
