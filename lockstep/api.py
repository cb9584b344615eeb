"""The program's commands as functions. Each runs in processes of its own: its memory is free afterwards, and several
devices work from notebooks and from scripts without ``if __name__ == "__main__"``.

Ctrl-C, or interrupting a notebook's kernel, reaches the command once. A training saves, and the function returns.
"""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import hashlib
import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar, Unpack

from lockstep.keywords import NOT_KEYWORDS, check_text, flags_of_keywords, in_python, path_text
from lockstep.run import Run
from utils.config.flags import flag_of
from utils.config.settings import ExportConfig, Hyperparameters, TrainConfig, ValConfig, default_of
from utils.distributed.spawn import end_with_parent, failure_reason
from utils.errors import INTERRUPTED, REQUEUE, UserError
from utils.logger import TERMINAL_VARIABLE
from utils.program import start_of

if TYPE_CHECKING:  # written when the wheel is built
    from lockstep.settings import ExportSettings, TrainSettings, ValSettings

Function = TypeVar("Function", bound=Callable[..., Any])
Data = str | os.PathLike[str] | Mapping[str, Any]
_STOPPED = (-signal.SIGINT, INTERRUPTED, REQUEUE)  # exit codes
# What the commands print about what they have written.
_TRAINED = r"run folder (.+) \(settings\.yaml: all settings\)"
_SCORED = r"results are in (.+)"
_EXPORTED = r"(.+): [\d.]+ MB, .*"


def _with_settings(*configs: type) -> Callable[[Function], Function]:
    """Gives a function, at runtime, the signature and the documentation that its ``**settings`` mean: the fields of
    ``configs`` that are keywords."""

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        *own, _ = signature.parameters.values()
        fields = [f for c in configs for f in dataclasses.fields(c) if f.name not in NOT_KEYWORDS.get(c, ())]
        kind = inspect.Parameter.KEYWORD_ONLY
        named = [inspect.Parameter(f.name, kind, default=default_of(f), annotation=f.type) for f in fields]
        function.__signature__ = signature.replace(parameters=[*own, *named])
        lines = [f"    {field.name}: {field.metadata['help']}" for field in fields]
        function.__doc__ = "\n".join([inspect.getdoc(function) or "", "", "Settings:", *lines])
        return function

    return decorate


@_with_settings(TrainConfig, Hyperparameters)
def train(
    data: Data = "demo", *, devices: int = 1, callbacks: str | Callable | None = None, **settings: Unpack[TrainSettings]
) -> Run:
    """Trains a detector, as the command ``lockstep train``. Returns the run, also if it was interrupted and has saved.

    Args:
        data: the YAML of a data set, its name, or its content, in which paths are relative to the working folder.
        devices: processes of this machine that train together, each on its own GPU if there are GPUs.
        callbacks: MODULE:OBJECT, or a class or function of a module that other processes can import.

    Raises:
        UserError (`lockstep.Error`): with the line that the command prints.
        KeyboardInterrupt: interrupted before there was anything to save.
    """
    flags = [f"--data={_data_file(data, settings.get('project', TrainConfig.project))}"]
    flags += [f"--spawn={devices}"] if devices > 1 else []
    flags += [f"--callbacks={_callbacks_name(callbacks)}"] if callbacks is not None else []
    return _train([*flags, *flags_of_keywords("train", settings)])


@_with_settings(TrainConfig, Hyperparameters)
def resume(run: Run | str | os.PathLike[str] = "", *, devices: int = 1, **settings: Unpack[TrainSettings]) -> Run:
    """Continues a training that was interrupted, or trains it for more ``epochs``, with the settings that it has.

    Args:
        run: the run, its folder or a checkpoint; "": the newest run.
        devices: as of `train`.

    Raises as `train`.
    """
    flags = [f"--resume={run.folder if isinstance(run, Run) else path_text('run', run)}"]
    return _train([*flags, *([f"--spawn={devices}"] if devices > 1 else []), *flags_of_keywords("train", settings)])


@_with_settings(ValConfig)
def val(weights: str | os.PathLike[str], data: Data | None = None, **settings: Unpack[ValSettings]) -> Run:
    """Scores a checkpoint or an exported file. The result has its ``metrics`` and ``report``.

    Args:
        weights: the file.
        data: as of `train`; None: the data set that the file was trained on.

    Raises UserError (`lockstep.Error`) with the line that the command prints.
    """
    flags = [f"--weights={path_text('weights', weights)}"]
    flags += [] if data is None else [f"--data={_data_file(data, settings.get('project', ValConfig.project))}"]
    return Run(_found(_SCORED, _finished("val", *_run("val", [*flags, *flags_of_keywords("val", settings)])))[-1])


@_with_settings(ExportConfig)
def export(weights: str | os.PathLike[str], **settings: Unpack[ExportSettings]) -> list[Path]:
    """Exports a checkpoint in each ``format``, and compares the files with it. Returns the files, next to the weights.

    Raises UserError (`lockstep.Error`) with the line that the command prints.
    """
    flags = [f"--weights={path_text('weights', weights)}", *flags_of_keywords("export", settings)]
    return [Path(path) for path in _found(_EXPORTED, _finished("export", *_run("export", flags)))]


def check(
    data: Data,
    *,
    split: list[str] | tuple[str, ...] = (),
    weights: str | os.PathLike[str] = "",
    out: str | os.PathLike[str] = "",
    **settings: Any,
) -> dict[str, Any]:
    """Checks a data set. Returns what ``lockstep check --json`` prints: "issues" is a list, "report" the page.

    Args:
        data: as of `train`.
        split: the splits to check; empty: all.
        weights: a checkpoint that was trained on this data; adds the label errors that it sees.
        out: the folder of the report; "": runs/check/exp, exp2, ...
        settings: imgsz, trust, min_score, device, workers, verify, noplots: flags of the command.

    Raises UserError (`lockstep.Error`) with the line that the command prints.
    """
    given = {"split": list(split), "weights": weights or None, "out": out or None, **settings}
    given = {name: value for name, value in given.items() if value is not None and value is not False}
    flags = [word for name, value in given.items() if value not in ([], ()) for word in flag_of(name, value)]
    with tempfile.TemporaryFile() as content:
        code, output = _run("check", [os.fspath(_data_file(data, "runs/check")), "--json", *flags], content)
        content.seek(0)
        text = content.read()
        _finished("train", 0 if code == 1 and text else code, output)  # 1: there are issues
        return json.loads(text)


def _train(flags: list[str]) -> Run:
    code, output = _run("train", flags)
    folders = _found(_TRAINED, output)
    run = Run(folders[-1]) if folders else None
    if run is None or not run.last.is_file() or code not in _STOPPED:
        _finished("train", code, output)
    return run


def _finished(command: str, code: int, output: list[str]) -> list[str]:
    """``output`` of a command that has succeeded. Raises UserError or KeyboardInterrupt for any other."""
    if code in _STOPPED:
        raise KeyboardInterrupt
    if code:
        raise UserError(in_python(command, failure_reason(code, output)))
    return output


def _found(pattern: str, output: list[str]) -> list[str]:
    return [match[1] for line in output if (match := re.fullmatch(pattern, line))]


def _run(command: str, flags: list[str], stdout: IO[bytes] | None = None) -> tuple[int, list[str]]:
    """Runs a command and shows here what it prints, but for its error: bars on terminals and in notebooks, else lines.

    Args:
        stdout: receives its standard output instead.

    Returns:
        its exit status, and its lines.
    """
    check_text(*flags)
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    if sys.stdout.isatty() or "ipykernel" in sys.modules:
        columns, lines = shutil.get_terminal_size((120, 24))
        environment |= {TERMINAL_VARIABLE: "1", "COLUMNS": str(columns), "LINES": str(lines)}
    with _interrupts() as interrupts:
        child = subprocess.Popen(
            [*start_of(command), *flags],
            stdin=subprocess.DEVNULL,
            stdout=stdout or subprocess.PIPE,
            stderr=subprocess.PIPE if stdout else subprocess.STDOUT,
            env=environment,
            process_group=0,  # a terminal's Ctrl-C reaches this process only, which passes it on
            preexec_fn=end_with_parent,
        )
        interrupts.append(partial(child.send_signal, signal.SIGINT))
        try:
            lines = _shown(child.stderr or child.stdout)
            return child.wait(), lines
        finally:
            if child.poll() is None:  # an error here
                child.terminate()
                child.wait()


@contextlib.contextmanager
def _interrupts() -> Iterator[list[Callable[[], object]]]:
    """In the block, an interrupt raises nothing, which could lose output, but calls the functions in the list."""
    functions: list[Callable[[], object]] = []
    if threading.current_thread() is not threading.main_thread():  # which alone is interrupted
        yield functions
        return
    previous = signal.signal(signal.SIGINT, lambda *_: [function() for function in functions])
    try:
        yield functions
    finally:
        signal.signal(signal.SIGINT, previous)


def _shown(pipe: IO[bytes]) -> list[str]:
    """Shows what comes through ``pipe`` until it is closed, but for errors. Returns the lines."""
    decoder, lines, shown = codecs.getincrementaldecoder("utf-8")("replace"), [""], ""
    with pipe:
        while data := os.read(pipe.fileno(), 1 << 16):
            text = decoder.decode(data)
            complete = (lines.pop() + text).split("\n")
            lines += [line.rpartition("\r")[2] for line in complete]  # without the states of a bar
            shown += text
            error = re.search(r"^error: .*\Z", shown, re.MULTILINE)  # perhaps not yet complete
            rest = shown[error.start() :] if error else ""
            sys.stdout.write(re.sub(r"(?m)^error: .*\n?", "", shown))
            sys.stdout.flush()
            shown = rest
    return lines


def _data_file(data: Data, project: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """The file of a data set. One that is given by its content is written to ``project``, from which checkpoints name
    it."""
    if not isinstance(data, Mapping):
        return path_text("data", data)
    import yaml

    content = {**_plain(data), "path": os.path.abspath(data.get("path", ""))}
    try:
        text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
    except yaml.YAMLError as error:
        raise UserError(f"data: must hold texts, numbers, lists and mappings ({error})") from None
    check_text(f"project={project}")
    file = Path(project, f"data-{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}.yaml")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _callbacks_name(callbacks: str | Callable) -> str:
    if isinstance(callbacks, str):
        return callbacks
    module, name = getattr(callbacks, "__module__", "__main__"), getattr(callbacks, "__qualname__", "")
    if module == "__main__" or not name.isidentifier():
        raise UserError(
            f"callbacks: {name or type(callbacks).__name__}: the processes of the training cannot import it; put a "
            "class or a function into a file of its own, such as hooks.py, and give callbacks='hooks:NAME'"
        )
    return f"{module}:{name}"
