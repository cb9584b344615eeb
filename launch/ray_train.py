"""Trains under Ray Train: each of Ray's workers starts one process of train.py, with its rank.

    python launch/ray_train.py --workers 8 --storage /shared/runs -- --data /shared/coco/coco.yaml --model yolov8m
    python launch/ray_train.py --workers 1:4 --cpus 4 --storage s3://bucket/runs -- --data coco.yaml --device cpu

What follows ``--`` are the flags of train.py. Each epoch is reported to Ray with its row of results.csv and last.pt as
the checkpoint. After the loss of a worker, Ray starts as many as it finds (of 1:4, one to four), which resume; the same
command resumes a job that has ended early. Before a node is preempted, the processes save their state.

With ``--search``, the workers share the trials of one `tools.search`, whose flags follow ``--``.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.child import start  # noqa: E402 (imports need ROOT)
from utils.config.flags import flags_of  # noqa: E402
from utils.config.parser import parse_config  # noqa: E402
from utils.config.settings import TrainConfig  # noqa: E402
from utils.distributed.spawn import free_port  # noqa: E402
from utils.entrypoint import USER_ERROR, run_main  # noqa: E402
from utils.errors import INTERRUPTED, REQUEUE, Stopped, UserError, first_line, one_line  # noqa: E402
from utils.files.results_csv import read_columns  # noqa: E402
from utils.program import start_of  # noqa: E402

POLL_S = 2.0  # between looks at the process; each is a barrier of all workers
KEPT = ("last.pt", "best.pt", "results.csv", "settings.yaml", "train.log")  # in Ray's checkpoints


@dataclass(frozen=True)
class Job:
    """The settings of all workers."""

    command: list[str]  # without --resume
    folder: Path  # of the run
    working_folder: str
    epochs: int
    is_shared: bool  # whether all nodes see the run's folder; otherwise it comes from Ray's checkpoints
    has_gpus: bool
    is_search: bool = False


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else list(argv)
    flags = argv[argv.index("--") + 1 :] if "--" in argv else []
    parser = argparse.ArgumentParser(
        "python launch/ray_train.py", description=__doc__.split("\n")[0], usage="%(prog)s [flags] -- FLAGS_OF_TRAIN"
    )
    parser.add_argument(
        "--workers", default="1", help="number of workers, or from:to, within which Ray starts as many as it can"
    )
    parser.add_argument(
        "--storage", required=True, help="folder for runs that all nodes see, or the URI of an object store"
    )
    parser.add_argument("--name", default="exp", help="name of the run, below --storage")
    parser.add_argument("--cpus", type=int, default=1, help="CPUs per worker")
    parser.add_argument("--gpus", type=int, choices=(0, 1), default=0, help="GPUs per worker")
    parser.add_argument("--failures", type=int, default=3, help="end the job after this many lost or failed workers")
    parser.add_argument(
        "--address", default=None, help="address of the cluster; default: RAY_ADDRESS, or a cluster on this machine"
    )
    parser.add_argument("--search", action="store_true", help="the flags are those of tools.search")
    options = parser.parse_args(argv[: argv.index("--")] if "--" in argv else argv)
    job, options.workers = read_job(options, flags), read_workers(options.workers)
    try:
        import ray
    except ImportError:
        raise UserError('Ray is not installed: pip install "ray[default,train]"') from None
    variables = {"PYTHONPATH": str(ROOT), "RAY_kill_child_processes_on_worker_exit": "false"}  # they save
    try:
        ray.init(address=options.address, runtime_env={"env_vars": variables}, log_to_driver=True)
    except (ConnectionError, ValueError) as error:
        raise UserError(f"--address {options.address}: {first_line(error)}") from None
    run(job, options)


def read_workers(text: str) -> int | tuple[int, int]:
    try:
        least, most = (int(number) for number in (text.split(":") if ":" in text else (text, text)))
    except ValueError:
        least = most = 0
    if not 1 <= least <= most:
        raise UserError(f"--workers {text}: must be a number from 1, or two as in 1:4")
    return (least, most) if ":" in text else least


def read_job(options: argparse.Namespace, flags: list[str]) -> Job:
    """Raises UserError for flags that train.py would refuse, or that are decided here."""
    is_shared = "://" not in options.storage
    if Path(options.name).name != options.name or options.name in ("", "..") or one_line(options.name) != options.name:
        raise UserError(f"--name {options.name!r}: must be the name of a folder, without its path")
    copy = Path.home() / ".cache" / "lockstep" / "ray" / blake2b(options.storage.encode()).hexdigest()[:24]
    project = Path(options.storage).absolute() if is_shared else copy
    if decided := {"--project", "--name", "--resume", "--spawn"} & {flag.partition("=")[0] for flag in flags}:
        raise UserError(f"{min(decided)} after --: --storage and --name say where the run is, and Ray resumes it")
    if options.search:
        if not is_shared:
            raise UserError(f"--storage {options.storage}: a search needs a folder that all nodes see")
        command = [*start_of("search"), *flags, "--project", str(project), "--name", options.name]
        return Job(command, project / options.name, os.getcwd(), 0, is_shared, options.gpus > 0, is_search=True)
    config = parse_config(TrainConfig, flags, "Trains a detector.")
    config = replace(config, project=str(project), name=options.name, exist_ok=True)
    command = [*start_of("train"), *flags_of(config)]
    return Job(command, project / options.name, os.getcwd(), config.epochs, is_shared, options.gpus > 0)


def run(job: Job, options: argparse.Namespace) -> None:
    """Trains, and prints the last epoch's results. Raises UserError if the job fails."""
    from ray.train import (
        CheckpointConfig,
        FailureConfig,
        RunConfig,
        ScalingConfig,
        TrainingFailedError,
        WorkerGroupError,
    )
    from ray.train.torch import TorchConfig, TorchTrainer

    state = str(job.folder.parent / "ray") if job.is_shared else options.storage
    place = job.folder if job.is_shared else f"{options.storage.rstrip('/')}/{options.name}"
    trainer = TorchTrainer(
        partial(work, job),
        torch_config=TorchConfig(backend="gloo"),  # of Ray's own workers, which only pass on results
        scaling_config=ScalingConfig(
            num_workers=options.workers,
            use_gpu=options.gpus > 0,
            resources_per_worker={"CPU": options.cpus, "GPU": options.gpus},
        ),
        run_config=RunConfig(
            name=options.name,
            storage_path=state,
            failure_config=FailureConfig(max_failures=options.failures),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    try:
        result = trainer.fit()
    except SystemExit:  # by Ray's handler of Ctrl-C, which has ended the workers
        print(f"stopped: {place}; the same command resumes it")
        raise Stopped(INTERRUPTED) from None
    except TrainingFailedError as error:
        errors = error.worker_failures if isinstance(error, WorkerGroupError) else {0: error}
        reason = first_line(errors[min(errors)])
        raise UserError(f"{place}: the job has failed ({reason}); the same command resumes it") from None
    if result.return_value:
        raise UserError(result.return_value)
    print(f"done: {place}", result.metrics or "")


def work(job: Job) -> str:
    """What each of Ray's workers runs: one process of the program, until it ends. Returns "", or why another try would
    fail, too, as the settings or the data are wrong.

    Raises RuntimeError if the process fails or is stopped; Ray then starts all workers again.
    """
    import ray
    from ray import train
    from ray.train.collective import broadcast_from_rank_zero

    from tools.training import former_training, wait_for_former  # imports torch

    context = train.get_context()
    rank = context.get_world_rank()
    copies = not job.is_shared and context.get_local_rank() == 0
    if (rank == 0 or copies) and not job.is_search:
        wait_for_former(job.folder)
    if copies:  # the folder may be that of a job whose checkpoints have been deleted
        shutil.rmtree(job.folder, ignore_errors=True)
        if checkpoint := train.get_checkpoint():
            with checkpoint.as_directory() as kept:
                shutil.copytree(kept, job.folder)
    meeting = None
    if rank == 0:
        last, done = (None, False) if job.is_search else former_training(job.folder, job.epochs)
        meeting = (ray.util.get_node_ip_address(), free_port(), last, done, len(epochs_of(job)))
    address, port, last, done, reported = broadcast_from_rank_zero(meeting)
    if done:
        return ""
    environment = {
        "RANK": rank,
        "WORLD_SIZE": context.get_world_size(),
        "LOCAL_RANK": context.get_local_rank(),
        "LOCAL_WORLD_SIZE": context.get_local_world_size(),
        "GROUP_RANK": context.get_node_rank(),
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),  # no page on the end of another process
    }
    command = list(job.command)
    if job.is_search:
        command += ["--device", str(context.get_local_rank())] if job.has_gpus else []
    elif last:
        command += ["--resume", str(last)]
    inherited = {name: value for name, value in os.environ.items() if name not in environment}
    ours = {} if job.is_search else {name: str(value) for name, value in environment.items()}
    with start(command, cwd=job.working_folder, environment=inherited | ours, start_new_session=True) as child:
        # In a session of its own, as Ray kills the process group of a worker that it ends.
        process = child.process
        code, is_refused = (process.wait(), False) if job.is_search else follow(job, process, rank, reported)
        reason = child.reason if code else ""
    if code == REQUEUE:
        raise RuntimeError(f"process {rank} was stopped; it resumes")
    if reason and not is_refused:
        raise RuntimeError(f"process {rank}: {reason}")
    return reason


def follow(job: Job, child: subprocess.Popen, rank: int, reported: int) -> tuple[int, bool]:
    """Waits for the process, and passes on what the run writes: all workers report together, rank 0 the values.

    Args:
        reported: epochs that Ray knows, or that a former job has trained.

    Returns the exit status of the process, and whether the settings or the data were refused.
    """
    from ray import train
    from ray.train.collective import broadcast_from_rank_zero

    is_preempted = False
    while True:
        code = child.poll()
        rows = epochs_of(job) if rank == 0 else []
        has_begun = (job.folder / "settings.yaml").is_file()
        count = len(rows) if code is not None or has_saved(job) else reported  # a report has its epoch's checkpoint
        count, end, has_begun = broadcast_from_rank_zero((count, code, has_begun) if rank == 0 else None)
        if end is None and code not in (None, 0, REQUEUE):
            return code, False
        for epoch in range(reported, count):
            report(job, rows[epoch] if rank == 0 else {}, with_files=rank == 0 and epoch == count - 1)
        if end == REQUEUE:
            report(job, rows[-1] if rows else {}, with_files=rank == 0)
        reported = count
        if end is not None:
            break
        if not is_preempted and train.get_preemption_info() is not None:
            child.terminate()  # it saves
            is_preempted = True
        with suppress(subprocess.TimeoutExpired):
            child.wait(POLL_S)
    code = child.wait()
    while end == REQUEUE and is_preempted:  # until Ray ends the workers, which it then does not count as a failure
        time.sleep(POLL_S)
    return code, end == USER_ERROR and not has_begun


def report(job: Job, metrics: dict[str, float], *, with_files: bool) -> None:
    from ray import train

    if not with_files or not (job.folder / "last.pt").is_file():
        train.report(metrics)
        return
    with tempfile.TemporaryDirectory() as copies:
        for name in KEPT:
            if (job.folder / name).is_file():
                shutil.copy2(job.folder / name, copies)
        train.report(metrics, checkpoint=train.Checkpoint.from_directory(copies))


def has_saved(job: Job) -> bool:
    """Whether last.pt is as new as results.csv, whose row is written first."""
    last, table = job.folder / "last.pt", job.folder / "results.csv"
    return last.is_file() and table.is_file() and last.stat().st_mtime_ns >= table.stat().st_mtime_ns


def epochs_of(job: Job) -> list[dict[str, float]]:
    """The rows of results.csv, without values that an epoch does not have."""
    table = job.folder / "results.csv"
    if not table.is_file():
        return []
    columns = read_columns(table)
    rows = zip(*columns.values())
    return [{name: float(v) for name, v in zip(columns, row) if not math.isnan(v)} for row in rows]


if __name__ == "__main__":
    run_main(main)
