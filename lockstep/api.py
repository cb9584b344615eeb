"""The commands of the program as functions: their arguments become settings (`parse_keywords`), with which the command
runs in this process (call.py), except `export`. With ``spawn``, it starts the processes that train together.

Ctrl-C, or interrupting a notebook's kernel, reaches the command, which a training run saves before it ends. The
function then raises KeyboardInterrupt, which also ends a notebook's "run all".
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import os
import signal
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack

import yaml

from lockstep.call import call
from lockstep.run import Run
from utils.config.commands import COMMANDS
from utils.config.flags import keyword_fields, keyword_help
from utils.config.parser import ParsedCommand, parse_keywords, settings_of_child
from utils.config.settings import AUTO, ExportConfig, Hyperparameters, TrainConfig, ValConfig, default_of
from utils.config.tool_settings import CheckConfig
from utils.errors import Stopped, UserError, os_reason
from utils.files.safe_io import atomic_write
from utils.logger import configure_logging, programs_logging
from utils.process.child import start_child
from utils.process.launch import require_one_process
from utils.program import command_prefix
from utils.program_folders import cache_folder
from utils.schema import checked_value, plain_value

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    # Only the wheel has this stub, so mypy does not know the types of ``**settings`` in a clone.
    from lockstep.settings import CheckSettings, ExportSettings, TrainSettings, ValSettings

Data = str | os.PathLike[str] | Mapping[str, Any]
Function = TypeVar("Function", bound=Callable[..., Any])


def lists_settings(*configs: type[DataclassInstance]) -> Callable[[Function], Function]:
    """Makes `help` and notebooks list the settings that a function takes as ``**settings``: the fields of ``configs``.
    Editors and type checkers read their types in lockstep/settings.pyi, which only the wheel has."""
    fields = [field for config in configs for field in keyword_fields(config)]

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        *explicit, _ = signature.parameters.values()
        keywords = [
            inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=default_of(f), annotation=f.type)
            for f in fields
        ]
        # `inspect.signature` returns this; the type stubs of functions lack the attribute.
        function.__signature__ = signature.replace(parameters=[*explicit, *keywords])  # type: ignore[attr-defined]
        lines = [f"    {field.name}: {keyword_help(field)}" for field in fields]
        title = "Settings (None means not given unless stated otherwise):"
        function.__doc__ = "\n".join([inspect.getdoc(function) or "", "", title, *lines])
        return function

    return decorate


@lists_settings(TrainConfig, Hyperparameters)
def train(
    data: Data,
    *,
    callbacks: str | Callable | None = None,
    resume: Literal["auto", False] | None = None,
    **settings: Unpack[TrainSettings],  # type: ignore[misc]
) -> Run:
    """Trains a detector, like the command ``lockstep train``, and returns the run.

    Args:
        data: the YAML of a data set, the folder of an export, the name of a YAML in configs/data, or the content of a
            YAML, in which paths are relative to the working folder.
        callbacks: MODULE:OBJECT, or a class or function at the top level of a module; with ``spawn``, of one that
            other processes can import.
        resume: "auto" starts the run ``name`` in ``project`` if it does not exist, continues it if it was interrupted,
            and returns it if it has ended. (The function `resume` continues any run.)

    Raises:
        UserError (`lockstep.Error`): for mistakes in the arguments, or with the line that the command prints.
        KeyboardInterrupt: if interrupted, once the run is saved; its text says how to continue.
    """
    own: dict[str, Any] = {"data": data}
    keywords: dict[str, Any] = {**settings}
    if str(resume) == AUTO:
        own["resume"] = AUTO
    elif resume is not None:  # refused by `parse_keywords`, except False
        keywords["resume"] = resume
    return _train(own, callbacks, keywords)


@lists_settings(TrainConfig, Hyperparameters)
def resume(
    run: Run | str | os.PathLike[str] = "",
    *,
    callbacks: str | Callable | None = None,
    **settings: Unpack[TrainSettings],  # type: ignore[misc]
) -> Run:
    """Continues an interrupted training run, or trains it for more ``epochs``, with its own settings.

    Args:
        run: the run, its folder or a checkpoint; "": the newest run.
        callbacks: as in `train`. A run that has some needs them again; "" continues it without.

    Raises the errors of `train`.
    """
    folder = checked_value("run", run.folder if isinstance(run, Run) else run, str)
    if folder == AUTO:
        raise UserError(
            f"lockstep.resume({AUTO!r}): names no run; write lockstep.train(DATA, name=..., resume={AUTO!r})"
        )
    return _train({"resume": folder}, callbacks, settings)


@lists_settings(ValConfig)
def val(weights: str | os.PathLike[str], data: Data | None = None, **settings: Unpack[ValSettings]) -> Run:  # type: ignore[misc]
    """Scores a checkpoint or an exported file. The returned run has ``metrics`` and a ``report``.

    Args:
        weights: the checkpoint or exported file.
        data: as in `train`; None: the data set that the file was trained on.

    Raises UserError (`lockstep.Error`) with the line that the command prints.
    """
    from engine.commands.start import validate

    own: dict[str, Any] = {"weights": weights}
    if data is not None:
        own["data"] = data
    parsed = _parse("val", own, settings)
    return Run(call(partial(validate, parsed.config))["folder"])


@lists_settings(ExportConfig)
def export(weights: str | os.PathLike[str], **settings: Unpack[ExportSettings]) -> list[Path]:  # type: ignore[misc]
    """Exports a checkpoint to each ``format``, and compares the files with it. Returns the files, which are written
    next to the weights.

    Raises UserError (`lockstep.Error`) with the line that the command prints.
    """
    parsed = _parse("export", {"weights": weights}, settings)
    # In a process of its own: torch's exporters keep each model that they have exported.
    word, variables = settings_of_child(parsed.config, parsed.explicit_flags)
    with programs_logging():
        configure_logging(True)  # for what `_parse` has left out
        with start_child([*command_prefix("export"), word], variables=variables, stop=signal.SIGINT) as child:
            result = child.wait()
    try:
        result.check()
    except Stopped:
        raise KeyboardInterrupt from None
    return [Path(file) for file in result.values["files"]]


@lists_settings(CheckConfig)
def check(data: Data, **settings: Unpack[CheckSettings]) -> dict[str, Any]:  # type: ignore[misc]
    """Checks a data set. Returns the content of ``lockstep check --json``: "issues" is a list, "report" the page.

    Args:
        data: as in `train`.

    Raises UserError (`lockstep.Error`) with the line that the command prints. If the page cannot be written, "report"
    is None.
    """
    config = _parse("check", {"data": data}, settings).config
    content: dict[str, Any] = {}

    def work() -> None:
        from tools.check.__main__ import check as check_data

        content.update(check_data(config))

    call(work)
    return content


def _parse(command: str, own_settings: Mapping[str, Any], keywords: Mapping[str, Any]) -> ParsedCommand[Any]:
    """Checks the arguments of a function (`parse_keywords`), and writes the YAML of a data set that is given by its
    content."""
    if COMMANDS[command].is_one_process:
        require_one_process(f"lockstep.{command}", COMMANDS[command].instead)
    data = own_settings.get("data")
    if not isinstance(data, Mapping):
        return parse_keywords(COMMANDS[command].settings, own_settings, keywords)
    # The YAML is written once the other arguments are known to be right, and to the project that they name.
    parsed: ParsedCommand[Any] = parse_keywords(
        COMMANDS[command].settings, {**own_settings, "data": "written below"}, keywords
    )
    # A check, unlike a run, never writes to the working folder: it may be the data set.
    folder = cache_folder() / "check" if command == "check" else Path(parsed.config.project)
    config = dataclasses.replace(parsed.config, data=_write_yaml(plain_value("data", data), folder))
    return dataclasses.replace(parsed, config=config)


def _write_yaml(content: dict[str, Any], folder: Path) -> str:
    """Writes the YAML of a data set to ``folder``, where runs that use it find it again, and returns its path: its name
    is a digest of the content. Paths in it are relative to the working folder."""
    from data.read_spec import resolve_root  # loads NumPy

    # Resolved as in a YAML in the working folder; "data" names it in messages.
    content["path"] = str(resolve_root(content.get("path"), Path("data"), known_root=""))
    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
    file = folder / f"data-{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}.yaml"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(file) as stream:  # runs that start at the same time write the same file
            stream.write(text.encode())
    except OSError as error:
        raise UserError(f"{file}: the content of data cannot be written ({os_reason(error)})") from None
    return str(file)


def _train(own: dict[str, Any], callbacks: str | Callable | None, keywords: Mapping[str, Any]) -> Run:
    """Trains, and returns the run. The KeyboardInterrupt of a run that is saved says how to continue it."""
    from engine.commands.start import train as train_command

    if callbacks is not None:
        own["callbacks"] = _callbacks_name(callbacks, is_alone=keywords.get("spawn") in (None, 0, 1))
    parsed: ParsedCommand[TrainConfig] = _parse("train", own, keywords)

    def how_to_continue(values: Mapping[str, Any]) -> str:
        run = Run(values.get("folder", ""))
        if "folder" not in values or not run.last.exists():
            return "stopped before there was anything to save"
        name = parsed.config.callbacks
        again = f", callbacks={name!r}" if name else ""  # a stored name does not act
        return f"the run is saved; lockstep.resume({str(run.folder)!r}{again}) continues it"

    return Run(call(partial(train_command, parsed), explain_stop=how_to_continue)["folder"])


def _callbacks_name(callbacks: str | Callable, *, is_alone: bool) -> str:
    """Returns MODULE:OBJECT. Raises UserError for an object that cannot be imported by it. ``is_alone``: whether this
    process trains alone, which needs to import nothing."""
    if isinstance(callbacks, str):
        return callbacks
    if not callable(callbacks):
        raise UserError(
            "callbacks: must be a function such as on_epoch, a class that has such functions, or MODULE:OBJECT, got a "
            f"value of type {type(callbacks).__name__}"
        )
    module = getattr(callbacks, "__module__", "")
    name = getattr(callbacks, "__qualname__", "")
    if not name.isidentifier() or (module == "__main__" and not is_alone):
        raise UserError(
            f"callbacks: {name or type(callbacks).__name__}: the processes of the training cannot import it; put a "
            "class or a function into a file of its own, such as hooks.py, and give callbacks='hooks:NAME'"
        )
    return f"{module}:{name}"
