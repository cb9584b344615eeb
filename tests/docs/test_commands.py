"""Every command line in the documents is one that its program accepts: it is parsed by the program's own parser, up to
the point where work would begin. A line of a program that is not listed here also fails."""

from __future__ import annotations

import argparse
import importlib
import re
import sys
import tomllib
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType

import pytest
from torch.distributed.run import get_args_parser

from tests.helpers.documents import ROOT, Command, commands, documents
from utils.config.commands import COMMANDS
from utils.config.parser import Parser
from utils.process import main as process_main

PAGES = documents()
OTHERS = {  # programs that are not ours, and the first words that may follow
    "apt": "install", "chromium": "--headless", "docker": "run", "git": "worktree", "kubectl": "apply",
    "mlflow": "ui", "source": ".venv/bin/activate", "tensorboard": "--logdir",
    "twine": "check upload", "yolo": "detect track",
}  # fmt: skip
REST = "..."  # the rest of a command line, as in a line above it
PARSERS = ("parse_command", "parse_config")  # of utils.config.parser
LEFT_OUT = {"val": ["--weights", "best.pt"], "detect": ["--weights", "best.pt", "--source", "0"]}


class Parsed(Exception):
    pass


class Acceptance:
    """Runs a program's ``main`` with a command line until it has read it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def check(self, module: ModuleType, arguments: list[str]) -> None:
        """Fails unless ``python MODULE arguments`` is accepted: by our parser if the module uses it, which checks the
        values, too; else by argparse."""
        with self._monkeypatch.context() as patch:
            patch.setattr(sys, "argv", [module.__name__, *arguments])
            owner = process_main if hasattr(module, "run_command") else module
            used = [name for name in PARSERS if hasattr(owner, name)]
            for name in used:
                patch.setattr(owner, name, _stopping(getattr(owner, name)))
            if not used:
                for parser in (argparse.ArgumentParser, Parser):
                    patch.setattr(parser, "parse_args", _stopping(parser.parse_args))
            with pytest.raises(Parsed):
                module.main()


def _stopping(parse: Callable) -> Callable:
    def parse_and_stop(*args, **options):
        parse(*args, **options)
        raise Parsed

    return parse_and_stop


@pytest.fixture
def acceptance(monkeypatch: pytest.MonkeyPatch) -> Acceptance:
    return Acceptance(monkeypatch)


def check_python(words: list[str], acceptance: Acceptance, *, in_text: bool = False) -> None:
    """``FILE.py ...`` or ``-m MODULE ...``, as after ``python``. In a sentence, the name alone stands for a program."""
    if words[:2] == ["-m", "lockstep"]:
        if words[2:] in (["--help"], ["--version"]):
            return
        words = [*COMMANDS[words[2]].typed.split()[1:], *words[3:]]
    is_module = words[0] == "-m"
    name = words[1] if is_module else words[0].removesuffix(".py").replace("/", ".")
    assert is_module or words[0].endswith(".py"), words
    arguments = words[2 if is_module else 1 :]
    if name in ("venv", "build"):  # not ours
        return
    if name == "pytest":
        paths = [word for word in arguments if "/" in word]
        assert all((ROOT / path).exists() for path in paths), paths
        return
    if REST in arguments:
        arguments = [word for word in arguments if word != REST]
        arguments += [] if "--weights" in arguments else LEFT_OUT.get(name, [])
    path = ROOT / name.replace(".", "/")
    is_package = path.is_dir()
    assert (path / "__main__.py" if is_package else path.with_suffix(".py")).is_file(), path
    if in_text and not arguments:
        return
    code = f"{name}.__main__" if is_package else name
    module = importlib.import_module(code)
    text = Path(module.__file__).read_text(encoding="utf-8")
    if any(word in text for word in (*PARSERS, "run_command", "parse_flags", "argparse")):
        acceptance.check(module, arguments)
    else:
        assert not arguments, f"{name} takes no arguments"


def check_make(words: list[str]) -> None:
    targets = re.findall(r"^([\w.%-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for word in words:
        is_target = any(fnmatch(word, target.replace("%", "*")) for target in targets)
        assert is_target or "=" in word, words


def check_pip(words: list[str]) -> None:
    assert words[0] == "install", words
    if "-r" in words:
        assert (ROOT / words[words.index("-r") + 1]).is_file(), words
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"\.\[(.+)\]", " ".join(words))) <= set(extras), words


@pytest.mark.parametrize("page", PAGES)
def test_programs_accept_the_commands(page: str, acceptance, capsys):
    refused = []
    for command in commands(page):
        try:
            check_command(command, acceptance, capsys)
        except (Exception, SystemExit, pytest.fail.Exception) as error:
            refused.append(f"{command}: {error!r} {capsys.readouterr().err}")
    assert not refused, "\n".join(refused)


def check_command(command: Command, acceptance: Acceptance, capsys: pytest.CaptureFixture) -> None:
    program, *words = command.words
    if program in ("python", "python3"):
        check_python(words, acceptance, in_text=command.in_text)
    elif program == "lockstep":
        check_python(["-m", "lockstep", *words], acceptance, in_text=command.in_text)
    elif program == "torchrun":
        if [word for word in words if not word.startswith("-") and not word.isdigit() and word != "N"]:
            options = get_args_parser().parse_args(words)
            arguments = options.training_script_args
            if options.no_python:
                assert options.training_script == "lockstep"
                check_python(["-m", "lockstep", *arguments], acceptance, in_text=command.in_text)
                return
            script = ["-m", options.training_script] if options.module else [options.training_script]
            check_python([*script, *arguments], acceptance, in_text=command.in_text)
        else:  # only an option, named in a sentence
            options = ["1" if word == "N" else word for word in words]
            get_args_parser().parse_args([*options, "train.py"])
    elif program == "sbatch":
        script = words.index("launch/slurm.sbatch")
        assert (ROOT / words[script]).is_file()
        check_python(["train.py", *words[script + 1 :]], acceptance)
    elif program == "make":
        check_make(words)
    elif program == "pip":
        check_pip(words)
    else:
        assert program in OTHERS, f"no test knows the program {program!r}"
        assert (words or [""])[0] in OTHERS[program].split(" "), words


def test_the_table_for_users_of_ultralytics_has_lines_that_are_accepted(acceptance):
    rows = re.findall(
        r"^\| `yolo .+?` \| `python (.+?)` \|$", (ROOT / "docs" / "migration.md").read_text(), re.MULTILINE
    )
    assert len(rows) >= 4
    for line in rows:
        check_python(line.split(), acceptance)
