"""Trains under Ray Train: each of Ray's workers starts one process of train.py, with its rank.

    python launch/ray_train.py --workers 8 --gpus 1 -- --project /shared/runs --data /shared/coco.yaml --model yolov8m
    python launch/ray_train.py --workers 1:4 --cpus 4 -- --project /shared/runs --data /shared/coco.yaml --device cpu

The flags after ``--`` are those of train.py; all nodes must see the folder ``--project``. Each epoch is reported to Ray
with its row of results.csv. After the loss of a worker, Ray starts as many workers as it can (with 1:4, one to four),
which resume; the same command resumes a job that has ended early.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from ray.train.context import TrainContext

if not Path(__file__).resolve().parents[1].joinpath("__init__.py").exists():  # not the installed package
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":
    from utils.process.interrupts import exit_on_interrupt

    exit_on_interrupt()  # while the following imports run

from utils.config.flags import Parser
from utils.config.parser import parse_config
from utils.config.settings import AUTO, TrainConfig
from utils.config.settings_file import settings_file
from utils.errors import Stopped, UserError, first_line
from utils.files.results_csv import ResultsTable
from utils.files.safe_io import read_text, write_whole
from utils.machine.packages import require_package
from utils.process.child import Child, RunResult, start_child
from utils.process.entrypoint import run_main
from utils.process.exit_codes import INTERRUPTED, USER_ERROR
from utils.process.outcome import Outcome
from utils.process.ports import free_port
from utils.program import IS_INSTALLED, command_prefix
from utils.program_folders import PROJECT

# Files in the run's folder:
RAY_YAML = "ray.yaml"  # the settings with which this program started the run
REPORTED_EPOCH = ".ray_epoch"  # the newest epoch that was reported to Ray
EXTENDABLE = ("epochs", "time", "patience")  # settings that may change to continue a run for longer
POLL_S = 2.0  # interval at which the process is polled; each poll is a barrier of all workers


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else list(argv)
    separator = argv.index("--") if "--" in argv else len(argv)
    own_flags = argv[:separator]
    parser = _parser()
    options, unknown = parser.parse_known_args(own_flags)
    if unknown:
        hint = "" if "--" in argv else "; flags of train.py follow '--'"
        raise UserError(f"{parser.unknown_message(unknown, own_flags)}{hint}")
    config = parse_config(TrainConfig, argv[separator + 1 :])
    if config.resume is not None or config.spawn:
        raise UserError("leave out --resume and --spawn: Ray starts the processes and resumes the run")
    config = replace(config, project=os.path.abspath(config.project), resume=AUTO)
    _connect(options.address)
    store_or_verify_settings(config, Path(config.project, config.name))
    run(config, options)


def _parser() -> Parser:
    """Creates the parser of the flags before ``--``."""
    parser = Parser(
        "python launch/ray_train.py",
        description=__doc__.split("\n")[0],
        usage="%(prog)s [flags] -- FLAGS_OF_TRAIN",
        epilog="example: %(prog)s --workers 8 --gpus 1 -- --data DATA.yaml",
        allow_abbrev=False,
    )
    workers_help = "number of workers, or MIN:MAX for as many as Ray can start (default: %(default)s)"
    failures_help = "restart the workers at most this many times (default: %(default)s)"
    parser.add_argument("--workers", default=1, type=read_workers, help=workers_help)
    read_cpus = partial(read_count, flag="--cpus", low=1)
    parser.add_argument("--cpus", type=read_cpus, default=1, help="CPUs per worker (default: %(default)s)")
    parser.add_argument("--gpus", type=int, choices=(0, 1), default=0, help="GPUs per worker (default: %(default)s)")
    read_failures = partial(read_count, flag="--failures", low=0)
    parser.add_argument("--failures", type=read_failures, default=3, help=failures_help)
    parser.add_argument("--address", help="address of the cluster; default: RAY_ADDRESS, or a cluster on this machine")
    return parser


def _connect(address: str | None) -> None:
    """Connects to the cluster at ``address`` or RAY_ADDRESS, or starts one on this machine. Raises UserError if no
    cluster answers."""
    ray = require_package("ray", "launch/ray_train.py", "start train.py with torchrun")
    import_folder = PROJECT.parent if IS_INSTALLED else PROJECT
    variables = {"PYTHONPATH": str(import_folder), "RAY_kill_child_processes_on_worker_exit": "false"}  # lets them save
    try:
        ray.init(address=address, runtime_env={"env_vars": variables}, log_to_driver=True)
    except (ConnectionError, ValueError) as error:
        variable = os.environ.get("RAY_ADDRESS", "")
        source = "a cluster on this machine"
        if address:
            source = f"--address {address}"
        elif variable:
            source = f"RAY_ADDRESS={variable}"
        raise UserError(f"{source}: {first_line(error)}") from None


def read_workers(text: str) -> int | tuple[int, int]:
    """Parses ``--workers``: a number, or a range such as 1:4."""
    try:
        numbers = [int(number) for number in text.split(":")]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2) or not 1 <= numbers[0] <= numbers[-1]:
        raise UserError(f"--workers {text}: must be a number, at least 1, or a range such as 1:4")
    return numbers[0] if len(numbers) == 1 else (numbers[0], numbers[1])


def read_count(text: str, *, flag: str, low: int) -> int:
    """Parses a whole number that is at least ``low``."""
    try:
        number = int(text)
    except ValueError:
        number = low - 1
    if number < low:
        raise UserError(f"{flag} {text}: must be a whole number, at least {low}")
    return number


def store_or_verify_settings(config: TrainConfig, folder: Path) -> None:
    """Stores the settings in the folder of a new run, or checks that they are the same as in the existing run.

    Raises UserError if they differ, if this program did not start that run, or if another process trains it.
    """
    from engine.train.folder import wait_until_saved  # imports torch
    from tools.experiment.stored_settings import StoredSettings, recipe_values
    from utils.files.new_folder import check_run_dir

    check_run_dir(config.project, config.name, exist_ok=True)
    wait_until_saved(folder)
    settings = StoredSettings(folder / RAY_YAML, config, recipe_values(config), {}, may_change=EXTENDABLE)
    if not is_trained(folder):
        folder.mkdir(parents=True, exist_ok=True)
        settings.store()
        (folder / REPORTED_EPOCH).unlink(missing_ok=True)
    elif settings.path.is_file():
        settings.check_unchanged()
    else:
        raise UserError(f"{folder}: has a run that was not started with launch/ray_train.py; choose another --name")


def is_trained(folder: Path) -> bool:
    """Returns whether an epoch of the run in ``folder`` has been trained, or a checkpoint saved."""
    return any((folder / name).is_file() for name in ("last.pt", "results.csv"))


def remove_if_untrained(folder: Path) -> None:
    """Removes the stored settings, and the folder if nothing else is in it, unless an epoch has been trained."""
    if not is_trained(folder):
        (folder / RAY_YAML).unlink(missing_ok=True)
        (folder / REPORTED_EPOCH).unlink(missing_ok=True)
        with suppress(OSError):  # it has a log
            folder.rmdir()


def run(config: TrainConfig, options: argparse.Namespace) -> None:
    """Trains, and prints the last epoch's results. Raises UserError if the job fails."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
    from ray.train.torch import TorchConfig, TorchTrainer

    folder = Path(config.project, config.name)
    trainer = TorchTrainer(
        partial(run_worker, config, os.getcwd()),
        torch_config=TorchConfig(backend="gloo"),  # for Ray's own workers, which only pass on results
        scaling_config=ScalingConfig(
            num_workers=options.workers,
            use_gpu=options.gpus > 0,
            resources_per_worker={"CPU": options.cpus, "GPU": options.gpus},
        ),
        run_config=RunConfig(
            name=config.name,
            storage_path=str(folder.parent / "ray"),
            failure_config=FailureConfig(max_failures=options.failures),
        ),
    )
    try:
        result = trainer.fit()
    except SystemExit:  # from Ray's handler of Ctrl-C, which has ended the workers
        print(f"stopped: {folder}; the same command resumes it")
        raise Stopped(INTERRUPTED) from None
    except TrainingFailedError as error:
        failures = getattr(error, "worker_failures", None) or {0: error}  # by rank
        reason = first_line(failures[min(failures)])
        raise UserError(f"{folder}: the job failed ({reason}); the same command resumes it") from None
    if result.return_value:
        remove_if_untrained(folder)
        raise UserError(result.return_value)
    print(f"done: {folder}", *epochs_of(folder)[-1:])


def run_worker(config: TrainConfig, working_folder: str) -> str:
    """Runs in each of Ray's workers: runs a process of train.py until it ends. Returns "", or the error line of a
    process that refused to train, because another try would end in the same way.

    Raises RuntimeError if the process fails or is stopped; Ray then starts all workers again.
    """
    from ray import train
    from ray.train.collective import broadcast_from_rank_zero

    context = train.get_context()
    folder = Path(config.project, config.name)
    rank = context.get_world_rank()
    address_and_port = broadcast_from_rank_zero(rendezvous_address() if rank == 0 else None)
    environment = dict(os.environ) | rank_variables(context, *address_and_port)
    # The process gets a session of its own, because Ray kills the process group of a worker that it ends.
    with (
        settings_file(config) as settings,
        start_child(
            [*command_prefix("train"), settings], cwd=working_folder, environment=environment, start_new_session=True
        ) as child,
    ):
        refusal = refusal_of(report_until_done(folder, child, rank))
        if refusal:
            child.process.kill()  # it may be waiting for the refused one, without which nothing more can be saved
            return refusal
        result = child.wait()
    if result.outcome == Outcome.STOPPED:
        raise RuntimeError(f"process {rank} was stopped; it resumes")
    if result.outcome != Outcome.DONE:
        raise RuntimeError(f"process {rank}: {result.reason}")
    return ""


def rendezvous_address() -> tuple[str, int]:
    """Returns the address of this node and a free port, for the store of the run. Called on rank 0."""
    import ray

    return ray.util.get_node_ip_address(), free_port()


def rank_variables(context: TrainContext, address: str, port: int) -> dict[str, str]:
    """Returns the environment variables that torchrun would set for the process of this worker. ``address``, ``port``:
    see `rendezvous_address`."""
    variables = {
        "RANK": context.get_world_rank(),
        "WORLD_SIZE": context.get_world_size(),
        "LOCAL_RANK": context.get_local_rank(),
        "LOCAL_WORLD_SIZE": context.get_local_world_size(),
        "GROUP_RANK": context.get_node_rank(),
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }
    return {name: str(value) for name, value in variables.items()}


def report_until_done(folder: Path, child: Child, rank: int) -> list[RunResult | None]:
    """Reports new epochs to Ray until the job is over. All workers do so together, with the values of rank 0. Returns
    the results of all processes, by rank; None for a process that is still running.

    Once the job is over, polls once more: the process that has caused the first failure may have ended a moment later.
    """
    from ray import train

    is_last_poll = False
    while True:
        result = child.poll()  # before the rows are read, so that none is missed
        statuses = gather(Status(result, unreported_epochs(folder) if rank == 0 else []))
        for row in statuses[0].rows:
            train.report(row if rank == 0 else {})
            if rank == 0:
                write_whole(folder / REPORTED_EPOCH, f"{row['epoch']:.0f}", durable=True)
        results = [status.result for status in statuses]
        if is_last_poll:
            return results
        is_last_poll = is_over(results)
        with suppress(subprocess.TimeoutExpired):
            child.process.wait(POLL_S)


class Status(NamedTuple):
    """The state that a worker sends to the others."""

    result: RunResult | None  # result of its process; None while it runs
    rows: list[dict[str, float]]  # rows of new epochs, on rank 0


def gather(status: Status) -> list[Status]:
    """Returns the statuses of all workers, by rank. Every worker must call this."""
    from torch.distributed import all_gather_object, get_world_size

    gathered: list[Any] = [None] * get_world_size()
    all_gather_object(gathered, tuple(status))  # pickle cannot import the classes of a script
    return [Status(*values) for values in gathered]


def is_over(results: Sequence[RunResult | None]) -> bool:
    """Returns whether the job is done or has failed. A failure caused by a peer does not count until all have ended:
    the peer's own error explains it better."""
    ended = [result for result in results if result is not None]
    has_failed = any(result.outcome != Outcome.DONE and not result.failed_because_of_peer for result in ended)
    is_done = results[0] is not None and results[0].outcome == Outcome.DONE
    return has_failed or is_done or len(ended) == len(results)


def refusal_of(results: Sequence[RunResult | None]) -> str:
    """Returns the line with which a process has refused the settings, the data or its machine, or a full disk; "" if
    none has. A bug or a crash is no refusal, not even before the run has begun: another try may succeed."""
    for result in results:
        if result is None or result.outcome != Outcome.REFUSED or result.failed_because_of_peer:
            continue
        if result.code == USER_ERROR:
            return result.reason
    return ""


def unreported_epochs(folder: Path) -> list[dict[str, float]]:
    """Returns the rows of results.csv that no worker has reported to Ray, including rows of lost workers."""
    note = folder / REPORTED_EPOCH
    text = read_text(note) if note.is_file() else ""
    newest = int(text) if text.isdecimal() else 0  # if damaged, Ray gets the epochs twice, and the job goes on
    return [row for row in epochs_of(folder) if row["epoch"] > newest]


def epochs_of(folder: Path) -> list[dict[str, float]]:
    """Reads the rows of results.csv, omitting the empty values of each epoch."""
    table = folder / "results.csv"
    rows = ResultsTable.read(table).rows if table.is_file() else {}
    return [{k: v for k, v in rows[epoch].items() if not math.isnan(v)} for epoch in sorted(rows)]


if __name__ == "__main__":
    run_main(main)
