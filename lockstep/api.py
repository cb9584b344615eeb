"""The commands of the program as functions.

Each command runs in processes of its own, so that its memory is free afterwards, and several devices can be used from
notebooks and from scripts without ``if __name__ == "__main__"``. Ctrl-C, or interrupting a notebook's kernel, reaches
the command once: a training run saves, and the function returns.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Unpack

from data.source.yaml_paths import resolve_root
from lockstep.command import call_command
from lockstep.keywords import keyword_fields, keyword_help, parse_keywords
from lockstep.run import Run
from utils.config.plain_values import checked_value, plain_value
from utils.config.settings import AUTO, ExportConfig, Hyperparameters, TrainConfig, ValConfig, default_of
from utils.config.settings_file import settings_file
from utils.config.tool_settings import CheckConfig
from utils.errors import UserError, os_reason
from utils.files.safe_io import atomic_write
from utils.program_folders import cache_folder
from utils.schema import Bounds

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from lockstep.settings import CheckSettings, ExportSettings, TrainSettings, ValSettings

Function = TypeVar("Function", bound=Callable[..., Any])
_NumProcesses = Annotated[int, Bounds(1)]
Data = str | os.PathLike[str] | Mapping[str, Any]


def _lists_settings(*configs: type[DataclassInstance]) -> Callable[[Function], Function]:
    """Makes `help` and notebooks list the settings that a function takes as ``**settings``: the fields of ``configs``.
    Editors and type checkers read their types in lockstep/settings.py."""
    fields = [field for config in configs for field in keyword_fields(config)]

    def decorate(function: Function) -> Function:
        # `inspect.signature` returns this; the type stubs of functions lack the attribute.
        function.__signature__ = _signature_with(function, fields)  # type: ignore[attr-defined]
        lines = [f"    {field.name}: {keyword_help(field)}" for field in fields]
        title = "Settings (None: as if not given, unless the setting says what None means):"
        function.__doc__ = "\n".join([inspect.getdoc(function) or "", "", title, *lines])
        return function

    return decorate


def _signature_with(function: Callable, fields: Sequence[dataclasses.Field]) -> inspect.Signature:
    """Returns the signature of ``function`` with a keyword for each of ``fields`` in place of its last parameter,
    ``**settings``."""
    signature = inspect.signature(function)
    *explicit, _ = signature.parameters.values()
    keywords = [
        inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default_of(field), annotation=field.type)
        for field in fields
    ]
    return signature.replace(parameters=[*explicit, *keywords])


@_lists_settings(TrainConfig, Hyperparameters)
def train(
    data: Data = "demo",
    *,
    devices: int = 1,
    callbacks: str | Callable | None = None,
    resume: Literal["auto", False] | None = None,
    **settings: Unpack[TrainSettings],
) -> Run:
    """Trains a detector, like the command ``lockstep train``. Returns the run, even if it was interrupted after saving.

    Args:
        data: the YAML of a data set, its name, or its content, in which paths are relative to the working folder.
        devices: number of processes on this machine that train together, each on its own GPU if there are GPUs.
        callbacks: MODULE:OBJECT, or a class or function of a module that other processes can import.
        resume: "auto" starts the run ``name`` in ``project`` if it does not exist, continues it if it was interrupted,
            and returns it if it has ended. (The function `resume` continues any run.)

    Raises:
        UserError (`lockstep.Error`): for mistakes in the arguments, or with the line that the command prints.
        KeyboardInterrupt: if interrupted before there was anything to save.
    """
    file = _data_file(data, settings.get("project"), TrainConfig.project)
    own_settings: dict[str, Any] = {"data": file.path}
    if callbacks is not None:
        own_settings["callbacks"] = _callbacks_name(callbacks)
    if plain_value("resume", resume) == AUTO:
        own_settings["resume"] = AUTO
        return _train(own_settings, devices, settings, file)
    return _train(
        own_settings, devices, {**settings, "resume": resume}, file
    )  # refused with the right call, unless unset


@_lists_settings(TrainConfig, Hyperparameters)
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
    return _train({"resume": folder}, devices, settings)


def _train(
    own_settings: dict[str, Any], devices: int, settings: Mapping[str, Any], data: _DataFile | None = None
) -> Run:
    """Runs train.py with the arguments of a function (`parse_keywords`)."""
    num_processes = checked_value("devices", devices, _NumProcesses)
    spawn = settings.get("spawn")
    if num_processes > 1 and spawn is not None:
        raise UserError(f"devices={devices}, spawn={spawn}: both set the number of processes; give only one of them")
    if num_processes > 1:
        own_settings = {**own_settings, "spawn": num_processes}
    return Run(_call("train", own_settings, settings, data, required_key="folder")["folder"])


def _call(
    command: str,
    own_settings: Mapping[str, Any],
    settings: Mapping[str, Any],
    data: _DataFile | None = None,
    *,
    required_key: str,
) -> Mapping[str, Any]:
    """Calls a command with the arguments of a function (`parse_keywords`), and returns its result. ``data``: the data
    set that ``own_settings`` name."""
    parsed = parse_keywords(command, own_settings, settings)
    written = contextlib.nullcontext() if data is None else data.written()
    with written, settings_file(parsed.config, parsed.explicit_flags) as word:
        return call_command(command, [word], required_key=required_key)


@_lists_settings(ValConfig)
def val(weights: str | os.PathLike[str], data: Data | None = None, **settings: Unpack[ValSettings]) -> Run:
    """Scores a checkpoint or an exported file. The returned run has ``metrics`` and a ``report``.

    Args:
        weights: the checkpoint or exported file.
        data: as in `train`; None: the data set that the file was trained on.

    Raises UserError (`lockstep.Error`) with the line that the command prints.
    """
    own_settings = {"weights": checked_value("weights", weights, str)}
    file = None
    if data is not None:
        file = _data_file(data, settings.get("project"), ValConfig.project)
        own_settings["data"] = file.path
    return Run(_call("val", own_settings, settings, file, required_key="folder")["folder"])


@_lists_settings(ExportConfig)
def export(weights: str | os.PathLike[str], **settings: Unpack[ExportSettings]) -> list[Path]:
    """Exports a checkpoint to each ``format``, and compares the files with it. Returns the files, which are written
    next to the weights.

    Raises UserError (`lockstep.Error`) with the line that the command prints.
    """
    own_settings = {"weights": checked_value("weights", weights, str)}
    return [Path(path) for path in _call("export", own_settings, settings, required_key="files")["files"]]


@_lists_settings(CheckConfig)
def check(data: Data, **settings: Unpack[CheckSettings]) -> dict[str, Any]:
    """Checks a data set. Returns the content of ``lockstep check --json``: "issues" is a list, "report" the page.

    Args:
        data: as in `train`.

    Raises UserError (`lockstep.Error`) with the line that the command prints. If only the page could not be drawn, the
    error's ``result.values`` contains the issues.
    """
    # Unlike a run, a check never writes to the working folder if that is the data set.
    file = _data_file(data, "", cache_folder() / "check", remedy="set XDG_CACHE_HOME to another folder")
    return dict(_call("check", {"data": file.path}, settings, file, required_key="issues"))


@dataclasses.dataclass(frozen=True)
class _DataFile:
    """The file of a data set.

    Args:
        path: as --data takes it.
        content: what `written` writes to it; None: it is the user's own file.
        remedy: what to do if the file cannot be written.
    """

    path: str
    content: str | None = None
    remedy: str = ""

    @contextlib.contextmanager
    def written(self) -> Iterator[None]:
        """Writes the file. If a UserError leaves the block, removes what this call has made, unless the content
        describes a data set: another run may use the same file. Raises UserError if the file cannot be written."""
        if self.content is None:
            yield
            return
        file = Path(self.path)
        try:
            made = [path for path in (file, *file.parents) if not path.exists()]
            file.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(file) as stream:  # runs that start at the same time write the same file
                stream.write(self.content.encode())
        except OSError as error:
            reason = os_reason(error)
            raise UserError(f"{file}: the content of data cannot be written ({reason}); {self.remedy}") from None
        try:
            yield
        except UserError:
            if file in made and not _is_data_set(file):
                file.unlink(missing_ok=True)
                for folder in made[1:]:
                    with contextlib.suppress(OSError):  # something else is in it
                        folder.rmdir()
            raise


def _is_data_set(yaml: Path) -> bool:
    """Returns whether a YAML describes a data set."""
    from data.source.dataset_yaml import load_dataset_spec  # loads NumPy

    try:
        load_dataset_spec(yaml)
    except UserError:
        return False
    return True


def _data_file(
    data: Data, project: Any, default_project: str | Path, *, remedy: str = "choose another project"
) -> _DataFile:
    """Returns the file of a data set: in ``project`` (None or empty: ``default_project``) if ``data`` is its
    content."""
    if not isinstance(data, Mapping):
        return _DataFile(checked_value("data", data, str))
    import yaml

    content = plain_value("data", data)
    # Resolved as in a YAML in the working folder; "data" names it in messages.
    content["path"] = str(resolve_root(content.get("path"), Path("data"), known_root=""))
    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
    folder = Path(checked_value("project", project, str | None) or default_project)
    file = folder / f"data-{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}.yaml"
    return _DataFile(str(file), text, remedy)


def _callbacks_name(callbacks: str | Callable) -> str:
    """Returns MODULE:OBJECT. Raises UserError for an object that another process cannot import."""
    if isinstance(callbacks, str):
        return checked_value("callbacks", callbacks, str)
    module = getattr(callbacks, "__module__", "__main__")
    name = getattr(callbacks, "__qualname__", "")
    if module == "__main__" or not name.isidentifier():
        raise UserError(
            f"callbacks: {name or type(callbacks).__name__}: the processes of the training cannot import it; put a "
            "class or a function into a file of its own, such as hooks.py, and give callbacks='hooks:NAME'"
        )
    return f"{module}:{name}"
