"""The commands of the program as functions.

A call becomes a command line in four steps: its arguments are checked as settings of the command (keywords.py); a data
set that is given by its content gets a file (data_file.py); the command runs in processes of its own (command.py); and
its result names what is returned, such as the folder of a `Run` (run.py).

Because of the separate processes, the memory is free afterwards, and several devices can be used from notebooks and
from scripts without ``if __name__ == "__main__"``. Ctrl-C, or interrupting a notebook's kernel, reaches the command
once: a training run saves, and the function returns.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Unpack

from lockstep.command import call_command
from lockstep.data_file import Data, DataFile
from lockstep.keywords import parse_keywords
from lockstep.run import Run
from lockstep.signatures import lists_settings
from utils.config.plain_values import checked_setting, checked_value, plain_value
from utils.config.settings import AUTO, ExportConfig, Hyperparameters, TrainConfig, ValConfig
from utils.config.settings_file import settings_file
from utils.config.tool_settings import CheckConfig
from utils.errors import UserError
from utils.program_folders import cache_folder
from utils.schema import Bounds

if TYPE_CHECKING:
    from lockstep.settings import CheckSettings, ExportSettings, TrainSettings, ValSettings

_NumProcesses = Annotated[int, Bounds(1)]


@lists_settings(TrainConfig, Hyperparameters)
def train(
    data: Data,
    *,
    devices: int = 1,
    callbacks: str | Callable | None = None,
    resume: Literal["auto", False] | None = None,
    **settings: Unpack[TrainSettings],
) -> Run:
    """Trains a detector, like the command ``lockstep train``. Returns the run, even if it was interrupted after saving.

    Args:
        data: the YAML of a data set, the folder of an export, the name of a YAML in configs/data, or the content of a
            YAML, in which paths are relative to the working folder.
        devices: number of processes on this machine that train together, each on its own GPU if there are GPUs.
        callbacks: MODULE:OBJECT, or a class or function of a module that other processes can import.
        resume: "auto" starts the run ``name`` in ``project`` if it does not exist, continues it if it was interrupted,
            and returns it if it has ended. (The function `resume` continues any run.)

    Raises:
        UserError (`lockstep.Error`): for mistakes in the arguments, or with the line that the command prints.
        KeyboardInterrupt: if interrupted before there was anything to save.
    """
    file = DataFile.of(data, _project_folder(settings, TrainConfig))
    own_settings = {"data": file.path, "callbacks": _callbacks_name(callbacks), "spawn": _spawn(devices, settings)}
    keywords: dict[str, Any] = {**settings}
    if _is_auto(resume):
        own_settings["resume"] = AUTO
    elif resume is not None:  # refused by `parse_keywords`, except False
        keywords["resume"] = resume
    return Run(_call("train", own_settings, keywords, file, required_key="folder")["folder"])


@lists_settings(TrainConfig, Hyperparameters)
def resume(run: Run | str | os.PathLike[str] = "", *, devices: int = 1, **settings: Unpack[TrainSettings]) -> Run:
    """Continues an interrupted training run, or trains it for more ``epochs``, with its own settings.

    Args:
        run: the run, its folder or a checkpoint; "": the newest run.
        devices: as in `train`.

    Raises the errors of `train`.
    """
    folder = checked_value("run", run.folder if isinstance(run, Run) else run, str)
    if folder == AUTO:
        raise UserError(
            f"lockstep.resume({AUTO!r}): names no run; lockstep.train(DATA, name=..., resume={AUTO!r}) starts one or "
            f"continues it, and lockstep.resume('./{AUTO}') continues the one in this folder"
        )
    own_settings = {"resume": folder, "spawn": _spawn(devices, settings)}
    return Run(_call("train", own_settings, settings, required_key="folder")["folder"])


@lists_settings(ValConfig)
def val(weights: str | os.PathLike[str], data: Data | None = None, **settings: Unpack[ValSettings]) -> Run:
    """Scores a checkpoint or an exported file. The returned run has ``metrics`` and a ``report``.

    Args:
        weights: the checkpoint or exported file.
        data: as in `train`; None: the data set that the file was trained on.

    Raises UserError (`lockstep.Error`) with the line that the command prints.
    """
    file = None if data is None else DataFile.of(data, _project_folder(settings, ValConfig))
    own_settings = {"weights": _weights_path(weights)}
    if file is not None:
        own_settings["data"] = file.path
    return Run(_call("val", own_settings, settings, file, required_key="folder")["folder"])


@lists_settings(ExportConfig)
def export(weights: str | os.PathLike[str], **settings: Unpack[ExportSettings]) -> list[Path]:
    """Exports a checkpoint to each ``format``, and compares the files with it. Returns the files, which are written
    next to the weights.

    Raises UserError (`lockstep.Error`) with the line that the command prints.
    """
    own_settings = {"weights": _weights_path(weights)}
    return [Path(path) for path in _call("export", own_settings, settings, required_key="files")["files"]]


@lists_settings(CheckConfig)
def check(data: Data, **settings: Unpack[CheckSettings]) -> dict[str, Any]:
    """Checks a data set. Returns the content of ``lockstep check --json``: "issues" is a list, "report" the page.

    Args:
        data: as in `train`.

    Raises UserError (`lockstep.Error`) with the line that the command prints. If the page cannot be written, "report"
    is None. If drawing it fails, the error's ``result.values`` contains the issues.
    """
    # Unlike a run, a check never writes to the working folder if that is the data set.
    file = DataFile.of(data, cache_folder() / "check", remedy="set XDG_CACHE_HOME to another folder")
    return dict(_call("check", {"data": file.path}, settings, file, required_key="issues"))


def _call(
    command: str,
    own_settings: Mapping[str, Any],
    keywords: Mapping[str, Any],
    data: DataFile | None = None,
    *,
    required_key: str,
) -> Mapping[str, Any]:
    """Calls a command with the arguments of a function (`parse_keywords`), and returns its result, which contains
    ``required_key``. ``data``: the data set that ``own_settings`` name."""
    parsed = parse_keywords(command, own_settings, keywords)
    written = contextlib.nullcontext() if data is None else data.written()
    with written, settings_file(parsed.config, parsed.explicit_flags) as settings_argument:
        return call_command(command, [settings_argument], required_key=required_key)


def _project_folder(settings: Mapping[str, Any], config: type[TrainConfig | ValConfig]) -> str:
    """Returns the folder of runs that ``settings`` name. Returns the default of ``config`` if they name none, or one
    that `parse_keywords` refuses with the other mistakes."""
    project = settings.get("project")
    if project is None:
        return config.project
    try:
        return checked_setting(config, "project", plain_value("project", project), "project") or config.project
    except UserError:
        return config.project


def _is_auto(resume: Any) -> bool:
    """Returns whether ``resume`` is "auto", as text or a path."""
    try:
        return plain_value("resume", resume) == AUTO
    except UserError:  # such as a `Run`
        return False


def _spawn(devices: int, settings: Mapping[str, Any]) -> int | None:
    """Returns the setting ``spawn`` for the parameter ``devices``; None for a single process."""
    num_processes = checked_value("devices", devices, _NumProcesses)
    if num_processes == 1:
        return None
    spawn = settings.get("spawn")
    if spawn is not None:
        raise UserError(f"devices={devices}, spawn={spawn}: both set the number of processes; give only one of them")
    return num_processes


def _weights_path(weights: str | os.PathLike[str]) -> str:
    """Returns the path or name of weights. Raises UserError for a `Run`, which `resume` takes."""
    if isinstance(weights, Run):
        raise UserError(f"weights: {weights!r} is a run; give its checkpoint .best or .last")
    return checked_value("weights", weights, str)


def _callbacks_name(callbacks: str | Callable | None) -> str | None:
    """Returns MODULE:OBJECT; None without callbacks. Raises UserError for an object that another process cannot
    import."""
    if callbacks is None or isinstance(callbacks, str):
        return checked_value("callbacks", callbacks, str | None)
    module = getattr(callbacks, "__module__", "__main__")
    name = getattr(callbacks, "__qualname__", "")
    if module == "__main__" or not name.isidentifier():
        raise UserError(
            f"callbacks: {name or type(callbacks).__name__}: the processes of the training cannot import it; put a "
            "class or a function into a file of its own, such as hooks.py, and give callbacks='hooks:NAME'"
        )
    return f"{module}:{name}"
