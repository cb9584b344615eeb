"""Builds the wheel, in which all folders of this repository are one package. This is a build hook of hatchling.

In the repository, modules are imported by the names of their folders (``from engine.train.loop import Trainer``). A
user may have modules of the same names, so the wheel imports ``lockstep.engine...``. Messages and docstrings then name
the command ``lockstep train`` instead of ``python train.py``. Line numbers stay the same.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

MOVED = {name: f"lockstep.{name}" for name in ("data", "engine", "models", "tools", "utils")}
MOVED |= {name: f"lockstep.scripts.{name}" for name in ("detect", "export", "train", "val")}
PACKAGED = {"lockstep": "lockstep", "configs": "lockstep.configs", "launch": "lockstep.launch", **MOVED}
# Other files in these folders are not the program's: a user of YOLOv5 keeps images in data/.
SUFFIXES = {"configs": (".yaml",), "launch": (".py", ".sbatch", ".sh", ".yaml")}
CODE_SUFFIXES = (".css", ".html", ".py")
COMMANDS = (  # patterns of commands in the repository, and the same commands of the installed package
    (r"(torchrun (?:-\S+ \S+ )*)(train|val)\.py\b", r"\1-m lockstep \2"),
    (r"(?:python )?(?<![\w./])(detect|export|train|val)\.py\b", r"lockstep \1"),
    (r"(?:python -m )?(?<![\w.])tools\.(check|convert|demo|kfold|search|shard|weights)(?!\.?\w)", r"lockstep \1"),
    (r"python launch/ray_train\.py", "python -m lockstep.launch.ray_train"),
)
CONTINUED = (r"(?m)^( +)train\.py\b", r"\1-m lockstep train")  # after the first line of a torchrun command


class PackageHook(BuildHookInterface):
    """Adds the rewritten files to the wheel. An editable installation links to the repository instead."""

    def initialize(self, version: str, build_data: dict) -> None:
        if version == "standard":
            self._folder = TemporaryDirectory(prefix="lockstep-")
            root = Path(self.root)
            typing = {"lockstep/settings.pyi": settings_stub(root), "lockstep/py.typed": ""}
            for name, text in {**package_files(root), **typing}.items():
                path = Path(self._folder.name, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8", newline="")
            build_data["force_include"][self._folder.name] = "/"

    def finalize(self, version: str, build_data: dict, artifact_path: str) -> None:
        if version == "standard":
            self._folder.cleanup()


def package_files(root: Path) -> dict[str, str]:
    """Returns the content of each file of the wheel by its path."""
    files = {"lockstep/scripts/__init__.py": ""}
    for entry, module in PACKAGED.items():
        source = root / entry
        target = module.replace(".", "/")
        if not source.is_dir():
            files[f"{target}.py"] = _rewritten(source.with_suffix(".py"))
            continue
        for path in sorted(source.rglob("*")):
            name = path.relative_to(source)
            is_hidden = any(part.startswith(".") for part in name.parts)
            if path.is_file() and path.suffix in SUFFIXES.get(entry, CODE_SUFFIXES) and not is_hidden:
                files[f"{target}/{name.as_posix()}"] = _rewritten(path)
    return files


def settings_stub(root: Path) -> str:
    """Returns the types of the settings as keyword arguments. Another process imports the settings: its modules have
    names that this one may use."""
    command = [sys.executable, str(root / "packaging" / "settings_types.py")]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    return with_commands(subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout)


def _rewritten(path: Path) -> str:
    """Returns the text of a file of the repository with the imports and commands of the installed package."""
    text = path.read_bytes().decode()
    if path.parent.name == "launch":
        text = re.sub(*CONTINUED, text)
    if path.suffix == ".py":
        text = with_imports(text)
    return with_commands(text)


def with_imports(source: str) -> str:
    """Rewrites the imports of a module to those of the installed package. Raises ValueError for ``import engine``."""
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import) and any(alias.name.partition(".")[0] in MOVED for alias in node.names):
            raise ValueError(f"line {node.lineno}: {lines[node.lineno - 1].strip()}: write from ... import ...")
        if isinstance(node, ast.ImportFrom):
            top = (node.module or "").partition(".")[0]
            if top in MOVED:
                line = lines[node.lineno - 1]
                start = node.col_offset + len("from ")
                lines[node.lineno - 1] = line[:start] + line[start:].replace(top, MOVED[top], 1)
    return "".join(lines)


def with_commands(text: str) -> str:
    """Rewrites commands such as ``python train.py`` to those of the installed package."""
    for pattern, replacement in COMMANDS:
        text = re.sub(pattern, replacement, text)
    return text
