"""Searches hyper-parameters: trains with different values and reports the best.

python -m tools.search --hyp optimizer --trials 30 --data DATA.yaml --weights yolov8n --epochs 20
python -m tools.search --hyp my_ranges.yaml --trials 30 --data DATA.yaml --folds 3

An Optuna study in a journal, which several processes share, also on several machines. A process holds a lock while it
runs a trial. A running trial without a lock is therefore one whose process was killed or stopped: it counts as failed,
and the next trial has its values and its folder, where the training continues.
"""

from __future__ import annotations

if __name__ == "__main__":
    from utils.process.signals import exit_on_interrupt

    exit_on_interrupt()  # while the following imports run

import dataclasses
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from tools.kfold import SPLITS, Rows, open_comparison, read_rows, run_child, settings_in
from utils.config.commands import COMMANDS
from utils.config.epochs import closing_epochs
from utils.config.flags import flag_name, override_of, words_of_settings
from utils.config.recipes import read_recipe, unknown_key
from utils.config.settings import AUTO, SCOPES, Hyperparameters, TrainConfig, changed_settings
from utils.config.tool_settings import KfoldConfig, SearchConfig
from utils.config.yaml_files import load_yaml
from utils.errors import UserError, first_line
from utils.files.locks import FileLock
from utils.files.safe_io import folder_below, open_direct, write_csv, write_whole
from utils.logger import configure_logging, get_logger, get_summary_logger
from utils.machine.packages import require_package
from utils.process.child import RunFailed
from utils.process.main import run_command, run_main
from utils.process.signals import StopSignals
from utils.program_folders import CONFIGS
from utils.schema import build, plain_value, suggestion, type_of
from utils.strings import counted

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

    from data.spec import DatasetSpec

JOURNAL_LOG = "journal.log"
FILES = rf"{JOURNAL_LOG}(\.lock.*)?|trials|trials\.csv|best\.yaml"
RANGE_SYNTAX = "[FROM, TO], [FROM, TO, log], {choice: [...]} or a single value"
HALVING_FACTOR = 3
MAX_FAILURES = 3  # trials in a row that fail before the search stops
PRINTED_TRIALS = 10


def main(argv: Sequence[str] | None = None) -> None:
    run_command("search", _search, argv)


def _search(config: SearchConfig) -> None:
    """Runs trials until this and other processes have completed or pruned ``config.trials``, and writes the results.

    Raises UserError if the settings are wrong or differ from those with which the search was started, if a training
    cannot begin, or if `MAX_FAILURES` trials fail in a row; `Stopped` after a signal.
    """
    require_package("optuna", "tools.search", "leave the hyper-parameters as they are")
    written, ranges = read_ranges(config)
    configure_logging(True, quiet=config.quiet)
    with StopSignals() as signals:
        spec, fitness = open_comparison(config, JOURNAL_LOG, FILES)
        study = open_study(config, settings_of_results(config, spec, written))
        fixed = {name: value for name, value in written.items() if name not in ranges}
        column = fitness.column.removeprefix("metrics/") if config.folds else fitness.column
        search = Search(config, ranges, fixed, column, study)
        failures = 0
        while (claimed := search.claim()) is not None:
            trial, lock = claimed
            with lock:
                reason = search.run(trial, signals)
            failures = failures + 1 if reason else 0
            if failures == MAX_FAILURES:
                raise UserError(f"{counted(failures, 'trial')} in a row failed; the last one: {reason}")
        search.report()


def settings_of_results(config: SearchConfig, spec: DatasetSpec, written: dict[str, Any]) -> dict[str, Any]:
    """Returns what must stay the same while a search continues, by names for messages: the settings that affect
    results, the ranges as ``written``, and digests of the labels."""
    from data.folds.held_out import index_to_divide

    others = {"data"}.union(*SCOPES.values())
    changed = {name: value for name, value in changed_settings(config).items() if name not in others}
    settings = {flag_name(name): plain_value(name, value) for name, value in changed.items()}
    settings |= {"--set": config.override, **{f"the range of {name}": value for name, value in written.items()}}
    for split in SPLITS:
        if split in spec.splits:
            settings[f"'{split}' with the digest"] = index_to_divide(spec, split, config).label_digest()
    return settings


def open_study(config: SearchConfig, settings: dict[str, Any]) -> optuna.Study:
    """Opens the study of a search, or creates it. Raises UserError if its journal is damaged, or if its trainings have
    begun with other ``settings``."""
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    first_step = config.prune_after or (1 if config.folds else max(config.epochs // 5, 1))
    pruners: dict[str, optuna.pruners.BasePruner] = {
        "median": optuna.pruners.MedianPruner(n_warmup_steps=first_step),
        "halving": optuna.pruners.SuccessiveHalvingPruner(min_resource=first_step, reduction_factor=HALVING_FACTOR),
        "none": optuna.pruners.NopPruner(),
    }
    pruner = pruners[config.pruner]
    journal = config.folder / JOURNAL_LOG
    open(journal, "ab", opener=open_direct).close()  # raises where a link leads elsewhere
    with _lock(config.folder / ".lock"):
        try:
            storage = JournalStorage(JournalFileBackend(str(journal)))
            study = optuna.create_study(
                storage=storage, study_name="search", direction="maximize", load_if_exists=True, pruner=pruner
            )
        except (ValueError, KeyError, TypeError) as error:
            message = f"{journal}: damaged ({first_line(error)}); restore it, or choose another --name"
            raise UserError(message) from None
        if not any(config.folder.rglob("settings.yaml")):
            study.set_user_attr("settings", settings)
    stored = study.user_attrs["settings"]
    for name in (*stored, *settings):
        if stored.get(name) != settings.get(name):
            raise UserError(
                f"{config.folder}: was started with {name} {stored.get(name, 'not set')}, not "
                f"{settings.get(name, 'not set')}; continue with the same settings, or choose another --name"
            )
    return study


def _lock(path: Path) -> FileLock:
    """Waits for a lock that processes of a search hold for a moment."""
    return FileLock(path).wait("another process of this search")


@dataclass(frozen=True)
class Search:
    """A search, as this process takes part in it."""

    config: SearchConfig
    ranges: dict[str, BaseDistribution]
    fixed: dict[str, Any]  # hyper-parameters with one value for all trials
    column: str  # fitness in results.csv
    study: optuna.Study

    def trials(self) -> list[FrozenTrial]:
        """Returns the trials of all processes."""
        return self.study.get_trials(deepcopy=False)

    def path(self, trial: optuna.Trial | FrozenTrial, suffix: str = "") -> Path:
        """Returns the path of a file of a trial; without ``suffix``, the folder of its training."""
        number = f"{trial.number:04}{suffix}"
        return self.config.folder / "trials" / (number if suffix else trial.user_attrs.get("run", number))

    def claim(self) -> tuple[optuna.Trial, FileLock] | None:
        """Claims a trial, and its lock; None if enough have ended or are running. The first trial has the recipe's
        values, as far as the ranges contain them."""
        import optuna

        folder_below(self.config.folder, "trials")
        with _lock(self.config.folder / ".lock"):
            for running in self._in("RUNNING"):
                self._fail_if_killed(running)
            if len(self._in("COMPLETE", "PRUNED", "RUNNING")) >= self.config.trials:
                return None
            number = len(self.trials())
            if not number:
                words = [*(override_of(name, value) for name, value in self.fixed.items()), *self.config.override]
                recipe = dataclasses.asdict(read_recipe("auto", words, pretrained=bool(self.config.weights)))
                for name in ("close_mosaic", "close_scale"):
                    recipe[name] = closing_epochs(recipe[name], self.config.epochs)
                self._enqueue(recipe)
            self.study.sampler = optuna.samplers.TPESampler(seed=self.config.seed + number)
            trial = self.study.ask(self.ranges)
            return trial, _lock(self.path(trial, ".lock"))

    def _in(self, *states: str) -> list[FrozenTrial]:
        """Returns the trials in these states."""
        return [trial for trial in self.trials() if trial.state.name in states]

    def _fail_if_killed(self, trial: FrozenTrial) -> None:
        """Ends a running trial that no process runs, and lets the next one try its values again in its folder."""
        from optuna.trial import TrialState

        with FileLock(self.path(trial, ".lock")) as lock:
            is_free = not lock.acquire() and lock.excludes_others
            if is_free and not self.trials()[trial.number].state.is_finished():  # it may have ended meanwhile
                self.study.tell(trial.number, state=TrialState.FAIL)
                self._enqueue(trial.params, run=self.path(trial).name)

    def _enqueue(self, values: dict[str, Any], **attributes: Any) -> None:
        """Lets the next trial have those of ``values`` that are in the ranges."""
        known = {name: values[name] for name in self.ranges if name in values}
        allowed = {name: value for name, value in known.items() if _contains(self.ranges[name], value)}
        self.study.enqueue_trial(allowed, user_attrs=attributes)

    def run(self, trial: optuna.Trial, signals: StopSignals) -> str:
        """Trains, or cross-validates, with the values of a trial, and records its state. Returns why it failed, or "".

        Raises `Stopped` after a signal, and `RunFailed` if the training is refused before it begins; the trial will be
        tried again.
        """
        from optuna.trial import TrialState

        log = get_logger()
        log.info("trial %d: %s", trial.number, _values_text(trial.params))
        words = [override_of(name, value) for name, value in {**self.fixed, **trial.params}.items()]
        changes = {"hyp": "auto", "override": [*words, *self.config.override]}
        folder = self.path(trial)
        if self.config.folds:
            settings: TrainConfig = settings_in(KfoldConfig, self.config, folder, **changes)
        else:
            settings = settings_in(TrainConfig, self.config, folder, resume=AUTO, **changes)
        is_pruned = False
        fitness = None
        reason = ""
        total = self.config.folds or self.config.epochs
        try:
            is_pruned = run_child(settings, signals, total=total, on_rows=lambda rows: self._prunes(trial, rows, total))
            rows = read_rows(folder)
            self._prunes(trial, rows, total)
            fitness = self._fitness(rows)
        except RunFailed as error:
            if not error.result.has_begun:
                raise
            reason = error.result.reason
        if is_pruned:
            self.study.tell(trial.number, state=TrialState.PRUNED)
        elif fitness is not None:
            self.study.tell(trial.number, fitness)
        else:
            reason = reason or "nothing could be scored"
            trial.set_user_attr("reason", reason)
            self.study.tell(trial.number, state=TrialState.FAIL)
        log.info("%s%s", _summary(self.trials()[trial.number]), reason and f": {reason}")
        self._remove_weights()
        return reason

    def _scores(self, rows: Rows) -> dict[int, float]:
        """Returns the fitness of each epoch, or fold, that has one."""
        step = "fold" if self.config.folds else "epoch"
        return {int(row[step]): float(row[self.column]) for row in rows if row[step].isdigit() and row.get(self.column)}

    def _fitness(self, rows: Rows) -> float | None:
        """Returns the fitness of the best epoch, or of the images of all folds together; None if there is none."""
        if self.config.folds:
            return float(rows[-1][self.column]) if rows[-1][self.column] else None
        return max(self._scores(rows).values(), default=None)

    def _prunes(self, trial: optuna.Trial, rows: Rows, total: int) -> bool:
        """Reports the new ones of the ``total`` rows of a trial, and returns whether to prune it."""
        reported = self.trials()[trial.number].intermediate_values
        new = {step: fitness for step, fitness in self._scores(rows).items() if step not in reported}
        for step, fitness in new.items():
            trial.report(fitness, step)
        return bool(new) and max(new) < total and trial.should_prune()

    def _remove_weights(self) -> None:
        """Removes the weights of all ended trials but the best. A trial may have the folder of a killed one."""
        trials = self.trials()
        best = best_of(trials)
        kept = {self.path(trial) for trial in trials if trial is best or not trial.state.is_finished()}
        for folder in {self.path(trial) for trial in trials} - kept:
            for path in folder.rglob("*.pt"):
                if re.fullmatch(r"(last|best|epoch\d+)\.pt", path.name):
                    path.unlink(missing_ok=True)  # another process removes them, too

    def report(self) -> None:
        """Writes the best recipe and a table of the trials, and logs the best trials."""
        log = get_summary_logger()
        trials = self.trials()
        rows: list[Sequence[Any]] = [("trial", "state", self.column, *self.ranges, "reason")]
        for trial in trials:
            values = (trial.params.get(name, "") for name in self.ranges)
            fitness = "" if trial.value is None else trial.value
            rows.append((trial.number, trial.state.name.lower(), fitness, *values, trial.user_attrs.get("reason", "")))
        write_csv(self.config.folder / "trials.csv", rows)
        counts = Counter(trial.state.name.lower() for trial in trials)
        log.info("%s", ", ".join(f"{count} {state}" for state, count in counts.items()))
        for trial in sorted(self._in("COMPLETE"), key=lambda trial: -trial.values[0])[:PRINTED_TRIALS]:
            log.info("%s: %s", _summary(trial), _values_text(trial.params))
        best = best_of(trials)
        if best is not None:
            recipe = self.config.folder / "best.yaml"
            default = TrainConfig()
            changes = {"hyp": str(recipe), "plots": default.plots}
            training = settings_in(TrainConfig, self.config, default.folder, **changes)
            line = f"{COMMANDS['train'].typed} {shlex.join(words_of_settings(changed_settings(training)))}"
            write_whole(recipe, f"# {line}\n{yaml.safe_dump(self.fixed | best.params, sort_keys=False)}")
            log.info("the best recipe: %s", line)


def best_of(trials: Sequence[FrozenTrial]) -> FrozenTrial | None:
    """Returns the complete trial with the highest fitness, the first one of a tie."""
    complete = [trial for trial in trials if trial.state.name == "COMPLETE"]
    return max(complete, key=lambda trial: trial.values[0], default=None)


def read_ranges(config: SearchConfig) -> tuple[dict[str, Any], dict[str, BaseDistribution]]:
    """Reads the YAML of ``--hyp``: hyper-parameters with a range, or with one value. Returns its content, and the
    ranges. Raises UserError."""
    known = {path.stem: path for path in sorted((CONFIGS / "search").glob("*.yaml"))}
    path = known.get(config.hyp, Path(config.hyp))
    if not path.is_file():
        hint = suggestion(config.hyp, known)
        raise UserError(f"--hyp {shlex.quote(config.hyp)}: no such ranges or file{hint}; known: {', '.join(known)}")
    written = load_yaml(path)
    ranges: dict[str, BaseDistribution] = {}
    for name, value in written.items() if isinstance(written, dict) else ():
        # A list of mappings is a value of albumentations.
        if isinstance(value, dict) or (isinstance(value, list) and not all(isinstance(item, dict) for item in value)):
            ranges[name] = _distribution(name, value, str(path))
        else:
            build(Hyperparameters, {name: value}, str(path), unknown_key)
    if not ranges:
        raise UserError(f"{path}: has no 'hyper-parameter: range' line; a range is {RANGE_SYNTAX}")
    for item in config.override:
        name = item.partition("=")[0].strip()
        if name in ranges:
            raise UserError(f"--set {item}: {path} searches {name}; remove one")
    return written, ranges


def _distribution(name: str, value: Any, path: str) -> BaseDistribution:
    """Builds the distribution for the range ``value`` of a hyper-parameter. Raises UserError."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    def checked(item: Any) -> Any:
        """Returns ``item`` converted to the type of the hyper-parameter. Raises UserError."""
        return getattr(build(Hyperparameters, {name: item}, path, unknown_key), name)

    try:
        match value:
            case {"choice": [*choices]} if len(value) == 1:
                return CategoricalDistribution([checked(item) for item in choices])
            case [low, high, *scale] if scale in ([], ["log"]):
                ends = (checked(low), checked(high))
                is_int = type_of(Hyperparameters.__dataclass_fields__[name], Hyperparameters) is int
                return (IntDistribution if is_int else FloatDistribution)(*ends, log=bool(scale))
    except (ValueError, TypeError) as error:  # the ends are in the wrong order, null, or 0 with log
        raise UserError(f"{path}: {name}: {first_line(error)}") from None
    raise UserError(f"{path}: {name}: expected {RANGE_SYNTAX}, got {value!r}")


def _contains(distribution: BaseDistribution, value: Any) -> bool:
    """Returns whether ``distribution`` can draw ``value``."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(distribution, CategoricalDistribution):
        return value in distribution.choices
    assert isinstance(distribution, IntDistribution | FloatDistribution)
    return value is not None and distribution.low <= value <= distribution.high


def _summary(trial: FrozenTrial) -> str:
    fitness = "" if trial.value is None else f" {trial.value:.4f}"
    return f"trial {trial.number} {trial.state.name.lower()}{fitness}"


def _values_text(values: dict[str, Any]) -> str:
    """Returns ``name=value ...`` with four significant digits."""
    texts = (f"{value:.4g}" if isinstance(value, float) else str(value) for value in values.values())
    return " ".join(map("{}={}".format, values, texts))


if __name__ == "__main__":
    run_main(main)
