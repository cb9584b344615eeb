"""Builds the package lockstep from the folders of this repository: the hooks of PEP 517, without other packages.

In the repository the folders are imported under their own names (``from engine.train.trainer import Trainer``), which a
user's own modules may have, too. The wheel has them inside of one package: imports become those of ``lockstep.engine``,
and texts name the command ``lockstep train`` instead of ``python train.py``. Lines keep their numbers.

The same files give the same bytes.
"""

from __future__ import annotations

import ast
import base64
import gzip
import hashlib
import io
import re
import tarfile
import tomllib
import zipfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOVED = {name: f"lockstep.{name}" for name in ("data", "engine", "models", "utils")}
MOVED |= {name: f"lockstep.scripts.{name}" for name in ("detect", "export", "train", "val")}
COMMANDS = (  # in texts, and how they are typed when the package is installed
    (r"(torchrun (?:-\S+ \S+ )*)(train|val)\.py\b", r"\1-m lockstep \2"),
    (r"(?:python )?(?<![\w./])(detect|export|train|val)\.py\b", r"lockstep \1"),
    (
        r"(?:python -m )?(?<![\w.])(?:data|engine|models)\."
        r"(cache|check|compare|convert|demo|kfold|search|shard|weights)(?!\.?\w)",
        r"lockstep \1",
    ),
)
CONTINUED = (r"(?m)^( +)train\.py\b", r"\1-m lockstep train")  # after the first line of a torchrun command
DEVELOPMENT = "# Development"  # what follows it in requirements.txt is not needed to run the program
IN_SDIST = ("*.py", "*.toml", "*.txt", "*.md", "LICENSE", "packaging")


def build_wheel(folder: str, config_settings: object = None, metadata_directory: str | None = None) -> str:
    return _write_wheel(folder, package_files())


def build_editable(folder: str, config_settings: object = None, metadata_directory: str | None = None) -> str:
    """Installs a link to the repository, whose folders can then be imported under their own names."""
    return _write_wheel(folder, {"lockstep.pth": f"{ROOT}\n".encode()})


def build_sdist(folder: str, config_settings: object = None) -> str:
    name = f"{_stem()}.tar.gz"
    found = [path for pattern in IN_SDIST for path in ROOT.glob(pattern)]
    found += [ROOT / entry for entry in ("lockstep", "configs", "launch", *MOVED) if (ROOT / entry).is_dir()]
    files = {str(path.relative_to(ROOT)): path.read_bytes() for entry in found for path in _files(entry)}
    packed = io.BytesIO()
    with tarfile.open(mode="w", fileobj=packed, format=tarfile.PAX_FORMAT) as archive:
        for path, content in sorted({**files, "PKG-INFO": _metadata().encode()}.items()):
            entry = tarfile.TarInfo(f"{_stem()}/{path}")  # of 1970
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    Path(folder, name).write_bytes(gzip.compress(packed.getvalue(), mtime=0))
    return name


def package_files() -> dict[str, bytes]:
    """The content of the installed package by path."""
    files = {"lockstep/scripts/__init__.py": b""}
    for entry in ("lockstep", "configs", "launch", *MOVED):
        source = ROOT / entry if (ROOT / entry).is_dir() else ROOT / f"{entry}.py"
        target = MOVED.get(entry, "lockstep" if entry == "lockstep" else f"lockstep.{entry}").replace(".", "/")
        for path in _files(source):
            name = f"{target}/{path.relative_to(source).as_posix()}" if source.is_dir() else f"{target}.py"
            text = path.read_text(encoding="utf-8")
            if entry == "launch":
                text = re.sub(*CONTINUED, text)
            files[name] = (with_commands(with_imports(text)) if name.endswith(".py") else with_commands(text)).encode()
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


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return sorted(p for p in path.rglob("*") if p.is_file() and "__pycache__" not in p.parts)


def _project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def _version() -> str:
    return re.findall(r'^VERSION = "(.+)"$', (ROOT / "utils" / "program.py").read_text(encoding="utf-8"), re.M)[0]


def _stem() -> str:
    return f"{_project()['name']}-{_version()}"


def _requirements(file: Path) -> list[str]:
    lines = file.read_text(encoding="utf-8").partition(DEVELOPMENT)[0].splitlines()
    return [found for line in lines if (found := line.partition("#")[0].strip())]


def _metadata() -> str:
    project = _project()
    headers = [
        ("Metadata-Version", "2.4"),
        ("Name", project["name"]),
        ("Version", _version()),
        ("Summary", project["description"]),
        ("Keywords", ",".join(project["keywords"])),
        ("License-Expression", project["license"]),
        ("License-File", "LICENSE"),
        *(("Classifier", classifier) for classifier in project["classifiers"]),
        ("Requires-Python", project["requires-python"]),
        *(("Requires-Dist", requirement) for requirement in _requirements(ROOT / "requirements.txt")),
    ]
    for file in sorted(ROOT.glob("requirements-*.txt")):
        extra = file.stem.removeprefix("requirements-")
        headers.append(("Provides-Extra", extra))
        headers += [("Requires-Dist", f'{requirement}; extra == "{extra}"') for requirement in _requirements(file)]
    headers.append(("Description-Content-Type", "text/markdown"))
    text = "".join(f"{name}: {value}\n" for name, value in headers)
    return f"{text}\n{(ROOT / project['readme']).read_text(encoding='utf-8')}"


def _write_wheel(folder: str, files: Mapping[str, bytes]) -> str:
    name, info = f"{_stem()}-py3-none-any.whl", f"{_stem()}.dist-info"
    scripts = "".join(f"{name} = {target}\n" for name, target in _project()["scripts"].items())
    files = {
        **files,
        f"{info}/METADATA": _metadata().encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: lockstep\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\n{scripts}".encode(),
        f"{info}/licenses/LICENSE": (ROOT / "LICENSE").read_bytes(),
    }
    hashes = {path: hashlib.sha256(content).digest() for path, content in files.items()}
    sums = {path: base64.urlsafe_b64encode(value).rstrip(b"=").decode() for path, value in hashes.items()}
    lines = [f"{path},sha256={sums[path]},{len(content)}\n" for path, content in sorted(files.items())]
    record = "".join([*lines, f"{info}/RECORD,,\n"]).encode()
    with zipfile.ZipFile(Path(folder, name), "w", zipfile.ZIP_DEFLATED) as archive:
        for path, content in [*sorted(files.items()), (f"{info}/RECORD", record)]:
            entry = zipfile.ZipInfo(path)  # of 1980
            entry.external_attr, entry.compress_type = 0o644 << 16, zipfile.ZIP_DEFLATED
            archive.writestr(entry, content)
    return name
