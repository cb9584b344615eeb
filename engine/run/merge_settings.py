"""Merges the stored settings of a run with those of the command line that continues it.

All of them are resolved, and paths that mean the same file are made equal (`compare_file`), so a setting has changed if
its two values differ.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.checkpoint.description import NamedFiles
from engine.run.compare_files import FileMatch, compare_file
from engine.run.resolve_paths import with_checksums
from engine.run.run import PATH_SETTINGS, RunSettings, TrainCommand
from utils.config.flags import as_flag, flag_name
from utils.config.recipes import read_recipe, with_overrides
from utils.config.settings import AUTO, FIND_BATCH_SIZE, Hyperparameters, TrainConfig, names_with
from utils.errors import UserError

# Settings of the process that resumes, not of the run.
_PROCESS_SETTINGS = names_with(TrainConfig, on_resume="current")
# With other values, the stored weights would not fit the model, the optimizer state would not fit the parameters, the
# order of the images would be undefined, or the best epoch so far would be unknown.
_FIXED_SETTINGS = names_with(TrainConfig, on_resume="fixed")

# The location of the run, which the command line names itself with ``--resume auto``.
_LOCATION = ("project", "name", "exist_ok")

# The sources of hyper-parameters, which are compared by value.
_RECIPE = names_with(TrainConfig, scope="recipe")

# Values by which a command leaves a setting open. It is chosen when the run begins, and the run keeps it.
_UNSET = {"batch_size": FIND_BATCH_SIZE, "optimizer": "auto", "lr_mult": None}


@dataclass(frozen=True, kw_only=True)
class MergedSettings:
    """The settings of a run, and of a command that continues it, with equal paths where they mean the same file."""

    stored: RunSettings  # settings of the run so far; files that have moved have their new paths
    settings: RunSettings  # the stored settings with those of the command line
    local_paths: frozenset[str]  # settings whose paths are those of the command, which each process resolves itself
    messages: list[str]  # to be logged, about files and a recipe that the command names


def merge_settings(stored: RunSettings, command: TrainCommand) -> MergedSettings:
    """Merges the settings ``stored`` with those of the command line. Raises UserError for a setting that a run cannot
    change."""
    files = _ComparedFiles.of(stored, command)
    config = merge_config(files.run.config, files.current, command.explicit_flags)
    hyp, recipe_messages = merge_hyperparameters(files.run, files.current, command.explicit_flags)
    return MergedSettings(
        stored=files.run,
        settings=RunSettings(config, hyp, files.named_in(config)),
        local_paths=files.local_paths(),
        messages=[*files.messages(), *recipe_messages],
    )


@dataclass(frozen=True, kw_only=True)
class _ComparedFiles:
    """The files that a run has stored and those that a command names for the same settings."""

    stored: RunSettings
    command: TrainCommand
    matches: dict[str, FileMatch]  # by setting; only those that the command gives
    run: RunSettings  # the stored settings, with the command's paths for files that have moved
    current: TrainConfig  # the command's settings, with the stored paths of files that the run keeps

    @staticmethod
    def of(stored: RunSettings, command: TrainCommand) -> _ComparedFiles:
        names = sorted(PATH_SETTINGS.intersection(command.explicit_flags))
        matches = {name: compare_file(name, stored, command.config, command.files) for name in names}
        moved = [name for name, match in matches.items() if match is FileMatch.MOVED]
        moved_paths = {name: getattr(command.config, name) for name in moved}
        kept = [name for name, match in matches.items() if match.keeps_stored_path]
        kept_paths = {name: getattr(stored.config, name) for name in kept}
        return _ComparedFiles(
            stored=stored,
            command=command,
            matches=matches,
            run=replace(
                stored, config=replace(stored.config, **moved_paths), files=_with_typed(stored.files, command, moved)
            ),
            current=replace(command.config, **kept_paths),
        )

    def named_in(self, config: TrainConfig) -> NamedFiles:
        """Returns the files of the merged settings ``config``, with the checksums of those that are new to the run."""
        new = [name for name in PATH_SETTINGS if getattr(config, name) != getattr(self.run.config, name)]
        return with_checksums(_with_typed(self.run.files, self.command, new), config, new)

    def local_paths(self) -> frozenset[str]:
        """Returns the settings whose paths are those of the command."""
        typed = self.command.config
        return frozenset(name for name in self.matches if getattr(self.current, name) == getattr(typed, name))

    def messages(self) -> list[str]:
        """Returns a message for each file that has changed or can no longer be compared."""
        messages = []
        for name, match in self.matches.items():
            flag = f"{flag_name(name)} {getattr(self.command.config, name)}"
            if match is FileMatch.CHANGED:
                # Does not say that the change has no effect: a changed teacher is refused when it is opened.
                messages.append(
                    f"{flag}: has changed since the run began; to use the file as it is now, start a new run with "
                    "another --name"
                )
            elif match is FileMatch.BOTH_MISSING:
                stored_path = getattr(self.stored.config, name)
                messages.append(f"{flag}: no such file; the run has {stored_path}, which no longer exists either")
        return messages


def _with_typed(files: NamedFiles, command: TrainCommand, names: Iterable[str]) -> NamedFiles:
    """Returns ``files`` with what the command's user has typed for the settings ``names``."""
    typed = {name: command.files.typed.get(name, "") for name in names}
    return replace(files, typed=files.typed | typed)


def merge_config(stored: TrainConfig, current: TrainConfig, explicit_flags: Collection[str]) -> TrainConfig:
    """Returns the stored settings with those of the command line. Raises UserError for a setting that a run cannot
    change."""
    changes: dict[str, Any] = {name: getattr(current, name) for name in _PROCESS_SETTINGS}
    changes["override"] = _joined_overrides(stored, current, explicit_flags)
    if current.resume == AUTO:
        changes |= {name: getattr(current, name) for name in _LOCATION}
    for name in sorted(set(explicit_flags) - changes.keys()):
        old = getattr(stored, name)
        new = getattr(current, name)
        if new == old or is_unset(name, new):
            continue
        if name in _FIXED_SETTINGS:
            raise UserError(
                f"{as_flag(name, new)}: the run being resumed has {old!r}; leave it out, or start a new run with "
                "--weights"
            )
        changes[name] = new
    if current.time:
        changes.pop("epochs", None)  # the time decides on the number of epochs
    elif "epochs" in explicit_flags:
        changes["time"] = 0.0
    return replace(stored, **changes)


def is_unset(name: str, value: Any) -> bool:
    """Returns whether a command with this ``value`` leaves the setting ``name`` open."""
    return name in _UNSET and value == _UNSET[name]


def _joined_overrides(stored: TrainConfig, current: TrainConfig, explicit_flags: Collection[str]) -> list[str]:
    """Returns all ``--set`` of the run: another recipe (``--hyp``) drops the stored ones."""
    kept = [] if "hyp" in explicit_flags else stored.override
    added = current.override
    is_repeated = kept[len(kept) - len(added) :] == added  # torchrun restarts with the same command
    return kept if is_repeated else [*kept, *added]


def merge_hyperparameters(
    stored: RunSettings, current: TrainConfig, explicit_flags: Collection[str]
) -> tuple[Hyperparameters, list[str]]:
    """Returns the stored hyper-parameters, or those of ``--hyp`` if it is given, with ``--set`` on top, and messages to
    be logged about the recipe."""
    base = stored.hyp
    messages: list[str] = []
    if "hyp" in explicit_flags and _is_missing_recipe(stored.config, current):
        messages.append(f"--hyp {current.hyp}: no such file any more; the run keeps its hyper-parameters")
    elif "hyp" in explicit_flags:
        base = read_recipe(
            current.hyp, pretrained=bool(stored.config.weights), keep_old=stored.config.keep_old, lines=messages
        )
    hyp = with_overrides(base, current.override if "override" in explicit_flags else ())
    if is_unset("lr_mult", hyp.lr_mult):
        hyp = replace(hyp, lr_mult=stored.hyp.lr_mult)
    return hyp, messages


def _is_missing_recipe(stored: TrainConfig, current: TrainConfig) -> bool:
    """Returns whether ``--hyp`` repeats the name of a file that no longer exists: the run has stored its values."""
    is_file_name = Path(current.hyp).suffix.lower() in (".yaml", ".yml")
    return is_file_name and current.hyp == stored.hyp and not Path(current.hyp).exists()


def describe_changes(stored: RunSettings, settings: RunSettings) -> list[str]:
    """Returns a message for each setting of a run that changes. Settings of a process, the location of the run and the
    source of hyper-parameters are left out."""
    stored_by_name = stored.by_name()
    left_out = _RECIPE | _PROCESS_SETTINGS | set(_LOCATION)
    return [
        f"resume: {name} {stored_by_name[name]!r} -> {value!r}"
        for name, value in settings.by_name().items()
        if name not in left_out and value != stored_by_name[name]
    ]


def is_same_start(stored: RunSettings, planned: RunSettings) -> bool:
    """Returns whether a run with the settings ``stored`` may have started with those ``planned``, some of which may be
    left open."""
    left_out = names_with(TrainConfig, scope="machine") | _PROCESS_SETTINGS | _RECIPE
    stored_by_name = stored.by_name()
    for name, value in planned.by_name().items():
        if name in left_out or value == stored_by_name[name] or is_unset(name, value):
            continue
        if name not in PATH_SETTINGS:
            return False
        if not compare_file(name, stored, planned.config, planned.files).is_same_file:
            return False
    return True
