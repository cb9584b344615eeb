"""Trains under Ray Train: each of Ray's workers starts one process of train.py, with its rank.

    python launch/ray_train.py --workers 8 --storage /shared/runs -- --data /shared/coco/coco.yaml --model yolov8m
    python launch/ray_train.py --workers 1:4 --cpus 4 --storage s3://bucket/runs -- --data coco.yaml --device cpu

What follows ``--`` are the flags of train.py. Each epoch is reported to Ray with its row of results.csv and last.pt as
the checkpoint. After the loss of a worker, Ray starts as many as it finds (of 1:4, one to four), which resume; the same
command resumes a job that has ended early. Before a node is preempted, the processes save their state.

With ``--search``, the workers share the trials of one `engine.search`, whose flags follow ``--``.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from utils.config.parser import flags_of, parse_config  # noqa: E402 (imports need ROOT)
from utils.config.settings import TrainConfig  # noqa: E402
from utils.distributed.spawn import end_with_parent, free_port  # noqa: E402
from utils.entrypoint import run_main  # noqa: E402
from utils.errors import REQUEUE, UserError  # noqa: E402
from utils.files.checkpoint import read_checkpoint  # noqa: E402
from utils.files.locks import FileLock  # noqa: E402
from utils.files.results_csv import read_columns  # noqa: E402
from utils.program import start_of  # noqa: E402

POLL_S = 2.0  # between looks at the process; each is a barrier of all workers
SAVING_S = 60.0  # for processes of lost workers, which save before they end
KEPT = ("last.pt", "best.pt", "results.csv", "settings.yaml", "train.log")  # in Ray's checkpoints


@dataclass(frozen=True)
class Job:
    """What all workers are told."""

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
    parser.add_argument("--workers", default="1", help="a number, or from:to, of which Ray starts as many as it can")
    parser.add_argument("--storage", required=True, help="for runs: a folder that all nodes see, or the URI of a store")
    parser.add_argument("--name", default="exp", help="of the run, below --storage")
    parser.add_argument("--cpus", type=int, default=1, help="per worker")
    parser.add_argument("--gpus", type=int, choices=(0, 1), default=0, help="per worker")
    parser.add_argument("--failures", type=int, default=3, help="lost or failed workers after which the job ends")
    parser.add_argument("--address", default=None, help="of the cluster; default: RAY_ADDRESS, or one on this machine")
    parser.add_argument("--search", action="store_true", help="the flags are those of engine.search")
    options = parser.parse_args(argv[: argv.index("--")] if "--" in argv else argv)
    job = read_job(options, flags)
    try:
        import ray
    except ImportError:
        raise UserError("Ray is not installed: pip install -r requirements-ray.txt") from None
    ray.init(address=options.address, runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}}, log_to_driver=True)
    run(job, options)


def read_job(options: argparse.Namespace, flags: list[str]) -> Job:
    """Raises UserError for flags that train.py would refuse, or that are decided here."""
    is_shared = "://" not in options.storage
    project = Path(options.storage).absolute() if is_shared else Path.home() / ".cache" / "lockstep" / "ray"
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
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
    from ray.train.torch import TorchConfig, TorchTrainer

    try:
        least, _, most = options.workers.partition(":")
        workers = (int(least), int(most)) if most else int(least)
    except ValueError:
        raise UserError(f"--workers {options.workers}: must be a number, or two as in 1:4") from None
    state = str(job.folder.parent / "ray") if job.is_shared else options.storage
    trainer = TorchTrainer(
        partial(work, job),
        torch_config=TorchConfig(backend="gloo"),  # of Ray's own workers, which only pass on results
        scaling_config=ScalingConfig(
            num_workers=workers,
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
    except TrainingFailedError as error:
        raise UserError(f"{job.folder}: the job has failed ({error}); the same command resumes it") from None
    print(f"done: {job.folder}", result.metrics or "")


def work(job: Job) -> None:
    """What each of Ray's workers runs: one process of the program, until it ends.

    Raises RuntimeError if that fails or is stopped; Ray then starts all workers again.
    """
    import ray
    from ray import train
    from ray.train.collective import broadcast_from_rank_zero

    from engine.checkpoint.run import LOCK_NAME  # imports torch

    context = train.get_context()
    rank = context.get_world_rank()
    if rank == 0 and job.folder.is_dir() and not job.is_search:
        with FileLock(job.folder / LOCK_NAME) as lock:
            lock.acquire(SAVING_S)
    if not job.is_shared and context.get_local_rank() == 0 and (checkpoint := train.get_checkpoint()):
        with checkpoint.as_directory() as kept:
            shutil.copytree(kept, job.folder, dirs_exist_ok=True)
    start = None
    if rank == 0:
        reported = len(epochs_of(job))
        start = (ray.util.get_node_ip_address(), free_port(), (job.folder / "last.pt").is_file(), reported)
    address, port, resumes, reported = broadcast_from_rank_zero(start)
    if resumes and not job.is_search and read_checkpoint(job.folder / "last.pt")["progress"]["epoch"] >= job.epochs:
        return
    environment = {
        "RANK": rank,
        "WORLD_SIZE": context.get_world_size(),
        "LOCAL_RANK": context.get_local_rank(),
        "LOCAL_WORLD_SIZE": context.get_local_world_size(),
        "GROUP_RANK": context.get_node_rank(),
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }
    command = list(job.command)
    if job.is_search:
        command += ["--device", str(context.get_local_rank())] if job.has_gpus else []
    elif resumes:
        command += ["--resume", str(job.folder / "last.pt")]
    inherited = {name: value for name, value in os.environ.items() if name not in environment}
    child = subprocess.Popen(
        command,
        cwd=job.working_folder,
        env=inherited if job.is_search else inherited | {name: str(value) for name, value in environment.items()},
        preexec_fn=partial(end_with_parent, signal.SIGTERM),
    )
    try:
        if job.is_search:
            if code := child.wait():
                raise RuntimeError(f"engine.search ended with status {code}; its output says why")
        else:
            follow(job, child, rank, reported)
    finally:
        if child.poll() is None:
            child.terminate()
            child.wait()


def follow(job: Job, child: subprocess.Popen, rank: int, reported: int) -> None:
    """Waits for the process, and passes on what the run writes: all workers report together, rank 0 the values.

    Args:
        reported: epochs that Ray knows, or that a former job has trained.
    """
    from ray import train
    from ray.train.collective import broadcast_from_rank_zero

    is_stopping = False
    while True:
        code = child.poll()
        if code not in (None, 0, REQUEUE):
            raise RuntimeError(f"process {rank} ended with status {code}; its output says why")
        rows = epochs_of(job) if rank == 0 else []
        count, end = broadcast_from_rank_zero((len(rows), code) if rank == 0 else None)
        for epoch in range(reported, count):
            report(job, rows[epoch] if rank == 0 else {}, with_files=rank == 0 and epoch == count - 1)
        if end == REQUEUE:
            report(job, rows[-1] if rows else {}, with_files=rank == 0)
        reported = count
        if end is not None:
            break
        if not is_stopping and train.get_preemption_info() is not None:
            child.terminate()  # it saves
            is_stopping = True
        with suppress(subprocess.TimeoutExpired):
            child.wait(POLL_S)
    if code := child.wait():
        raise RuntimeError(f"process {rank} was stopped (status {code}); it resumes")


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
