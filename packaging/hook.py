"""What the wheel changes: in it, the folders of this repository are one package. A build hook of hatchling.

In the repository the folders are imported under their own names (``from engine.train.trainer import Trainer``), which a
user's own modules may have, too. In the wheel imports are those of ``lockstep.engine``, and texts name the command
``lockstep train`` instead of ``python train.py``. Lines keep their numbers. One file is added: the settings as types of
keyword arguments, for editors.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

MOVED = {name: f"lockstep.{name}" for name in ("data", "engine", "models", "tools", "utils")}
MOVED |= {name: f"lockstep.scripts.{name}" for name in ("detect", "export", "train", "val")}
PACKAGED = {"lockstep": "lockstep", "configs": "lockstep.configs", "launch": "lockstep.launch", **MOVED}
COMMANDS = (  # in texts, and how they are typed when the package is installed
    (r"(torchrun (?:-\S+ \S+ )*)(train|val)\.py\b", r"\1-m lockstep \2"),
    (r"(?:python )?(?<![\w./])(detect|export|train|val)\.py\b", r"lockstep \1"),
    (r"(?:python -m )?(?<![\w.])tools\.(check|convert|demo|kfold|search|shard|weights)(?!\.?\w)", r"lockstep \1"),
)
CONTINUED = (r"(?m)^( +)train\.py\b", r"\1-m lockstep train")  # after the first line of a torchrun command


class PackageHook(BuildHookInterface):
    """Gives hatchling the changed files. An editable installation has none: it is a link to the repository."""

    def initialize(self, version: str, build_data: dict) -> None:
        if version == "standard":
            self._folder = TemporaryDirectory(prefix="lockstep-")
            for name, text in package_files(Path(self.root)).items():
                path = Path(self._folder.name, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8", newline="")
            build_data["force_include"][self._folder.name] = "/"

    def finalize(self, version: str, build_data: dict, artifact_path: str) -> None:
        if version == "standard":
            self._folder.cleanup()


def package_files(root: Path) -> dict[str, str]:
    """The files of the installed package by path."""
    files = {"lockstep/scripts/__init__.py": "", "lockstep/settings.py": "\n".join(types_of_settings(root))}
    for entry, module in PACKAGED.items():
        source, target = root / entry, module.replace(".", "/")
        for path in sorted(source.rglob("*")) if source.is_dir() else [source.with_suffix(".py")]:
            if path.is_file() and "__pycache__" not in path.parts:
                name = f"{target}/{path.relative_to(source).as_posix()}" if source.is_dir() else f"{target}.py"
                text = path.read_bytes().decode()
                text = re.sub(*CONTINUED, text) if entry == "launch" else text
                files[name] = with_commands(with_imports(text) if name.endswith(".py") else text)
    return files


def with_imports(source: str) -> str:
    """Module ``source`` with the imports of an installed one. Raises ValueError for ``import engine``."""
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import) and any(alias.name.partition(".")[0] in MOVED for alias in node.names):
            raise ValueError(f"line {node.lineno}: {lines[node.lineno - 1].strip()}: write from ... import ...")
        if isinstance(node, ast.ImportFrom) and (top := (node.module or "").partition(".")[0]) in MOVED:
            line, begin = lines[node.lineno - 1], node.col_offset + len("from ")
            lines[node.lineno - 1] = line[:begin] + line[begin:].replace(top, MOVED[top], 1)
    return "".join(lines)


def with_commands(text: str) -> str:
    for pattern, replacement in COMMANDS:
        text = re.sub(pattern, replacement, text)
    return text


def types_of_settings(root: Path) -> Iterator[str]:
    """The lines of a module with a TypedDict for each class of settings that functions of the package take."""
    sys.path.insert(0, str(root))
    try:
        from lockstep.keywords import NOT_KEYWORDS
        from utils.config.settings import Hyperparameters, TrainConfig
    finally:
        sys.path.remove(str(root))
    yield "from __future__ import annotations\n\nfrom typing import Literal, TypedDict\n"
    bases = [base for config in NOT_KEYWORDS for base in reversed(config.__mro__[:-1])]
    for config in dict.fromkeys([Hyperparameters, *bases]):
        inherited = [_type_name(base) for base in config.__bases__ if base is not object] or ["TypedDict"]
        inherited += ["Hyperparameters"] if config is TrainConfig else []
        yield f"\nclass {_type_name(config)}({', '.join(inherited)}, total=False):"
        for field in dataclasses.fields(config):
            if field.name in config.__annotations__ and field.name not in NOT_KEYWORDS.get(config, ()):
                yield f'    {field.name}: {_type_text(field)}\n    """{field.metadata["help"]}"""'
    yield ""


def _type_name(config: type) -> str:
    return config.__name__.strip("_").replace("Config", "Settings")


def _type_text(field: dataclasses.Field) -> str:
    """The type of a keyword; of a list, one element may be given."""
    if "dict" in field.type:
        return field.type
    element = field.type.removeprefix("list[").removesuffix("]")
    if choices := field.metadata["choices"]:
        element = f"Literal{list(choices)}"
    return f"list[{element}] | {element}" if field.type.startswith("list") else element
