"""Trains under Ray Train: each of Ray's workers starts train.py with its rank and ``--resume auto``.

    python launch/ray_train.py --workers 8 --gpus 1 -- --project /shared/runs --data /shared/coco.yaml --model yolov8m
    python launch/ray_train.py --workers 1:4 --cpus 4 -- --project /shared/runs --data /shared/coco.yaml --device cpu

The flags after ``--`` are those of train.py; all nodes must see the folder ``--project``. Each epoch is reported to Ray
with its row of results.csv. After the loss of a worker, Ray starts as many workers as it can (with 1:4, one to four),
which resume; the same command resumes a job that has ended early.
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

if not Path(__file__).resolve().parents[1].joinpath("__init__.py").exists():  # not the installed package
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":
    from utils.process.signals import exit_on_interrupt

    exit_on_interrupt()  # while the following imports run

from utils.config.parser import Parser, parse_config
from utils.config.settings import TrainConfig
from utils.errors import INTERRUPTED, USER_ERROR, Stopped, UserError, first_line
from utils.machine.packages import require_package
from utils.process.child import start_child
from utils.process.main import run_main
from utils.process.spawn import free_port
from utils.program import IS_INSTALLED, command_prefix
from utils.program_folders import PROJECT

POLL_S = 2.0  # interval at which the processes are polled; each poll is a barrier of all workers


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else list(argv)
    separator = argv.index("--") if "--" in argv else len(argv)
    parser = Parser("ray_train.py", usage="%(prog)s [flags] -- FLAGS_OF_TRAIN", allow_abbrev=False)
    parser.add_argument("--workers", default="1", help="number of workers, or MIN:MAX for as many as Ray can start")
    parser.add_argument("--cpus", type=int, default=1, help="CPUs per worker (default: %(default)s)")
    parser.add_argument("--gpus", type=int, choices=(0, 1), default=0, help="GPUs per worker (default: %(default)s)")
    parser.add_argument("--failures", type=int, default=3, help="how often to restart the workers")
    parser.add_argument("--address", help="address of the cluster; default: RAY_ADDRESS, or a cluster on this machine")
    options, unknown = parser.parse_known_args(argv[:separator])
    if unknown:
        raise UserError(f"{parser.unknown_message(unknown)}; flags of train.py follow '--'")
    counts = options.workers.split(":")
    if len(counts) > 2 or not all(count.isdecimal() for count in counts):
        raise UserError(f"--workers {options.workers}: must be a number, or a range such as 1:4")
    workers = (int(counts[0]), int(counts[1])) if len(counts) == 2 else int(counts[0])
    flags = argv[separator + 1 :]
    config = parse_config(TrainConfig, flags)
    if config.resume is not None or config.spawn:
        raise UserError("leave out --resume and --spawn: Ray starts the processes and resumes the run")
    folder = Path(config.project, config.name).absolute()

    ray = require_package("ray", "launch/ray_train.py", "start train.py with torchrun")
    from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
    from ray.train.torch import TorchConfig, TorchTrainer

    # The processes of train.py end on their own, after they have saved.
    variables = {"RAY_kill_child_processes_on_worker_exit": "false"}
    variables["PYTHONPATH"] = str(PROJECT.parent if IS_INSTALLED else PROJECT)
    try:
        ray.init(address=options.address, runtime_env={"env_vars": variables}, log_to_driver=True)
    except (ConnectionError, ValueError) as error:
        raise UserError(f"Ray: {first_line(error)}") from None
    trainer = TorchTrainer(
        partial(run_worker, [*flags, "--resume", "auto"], os.getcwd(), folder),
        torch_config=TorchConfig(backend="gloo"),  # of Ray's own workers, which only pass on results
        scaling_config=ScalingConfig(
            num_workers=workers,
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
        refusal = trainer.fit().return_value
    except SystemExit:  # from Ray's handler of Ctrl-C, which has ended the workers
        print(f"stopped: {folder}; the same command resumes it")
        raise Stopped(INTERRUPTED) from None
    except TrainingFailedError as error:
        failures = getattr(error, "worker_failures", None) or {0: error}  # by rank
        reason = first_line(failures[min(failures)])
        raise UserError(f"{folder}: the job failed ({reason}); the same command resumes it") from None
    if refusal:
        raise UserError(refusal)
    print(f"done: {folder}")


def run_worker(flags: Sequence[str], working_folder: str, folder: Path) -> str:
    """Runs train.py in a worker of Ray until the run ends, and reports its epochs. Returns the line with which the
    process of rank 0 has refused to begin, because another try would end in the same way; else "".

    Raises RuntimeError if the process fails or is stopped; Ray then starts all workers again.
    """
    import ray
    from ray import train
    from ray.train.collective import broadcast_from_rank_zero

    context = train.get_context()
    rank = context.get_world_rank()
    address, port = broadcast_from_rank_zero((ray.util.get_node_ip_address(), free_port()) if rank == 0 else None)
    launched = {
        "RANK": rank,
        "WORLD_SIZE": context.get_world_size(),
        "LOCAL_RANK": context.get_local_rank(),
        "LOCAL_WORLD_SIZE": context.get_local_world_size(),
        "GROUP_RANK": context.get_node_rank(),
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }
    environment = dict(os.environ) | {name: str(value) for name, value in launched.items()}
    words = [*command_prefix("train"), *flags]
    reported = len(epochs_of(folder))
    # A session of its own, because Ray kills the process group of a worker that it ends.
    with start_child(words, cwd=working_folder, environment=environment, start_new_session=True) as child:
        while True:
            result = child.poll()
            refusal = ""
            # A process that has no error of its own ends because of another one's.
            if result is not None and result.code and (result.code != USER_ERROR or "error" in result.values):
                if rank > 0 or result.code != USER_ERROR or result.has_begun:
                    raise RuntimeError(f"process {rank}: {result.reason or 'stopped; it resumes'}")
                refusal = result.reason
            state = (epochs_of(folder)[reported:], result is not None, refusal) if rank == 0 else None
            rows, has_ended, refusal = broadcast_from_rank_zero(state)
            for row in rows:
                train.report(row if rank == 0 else {})
            reported += len(rows)
            if refusal:
                child.process.kill()  # it may be waiting for the refused one
                return refusal
            if has_ended:
                result = child.wait()
                if result.code:
                    raise RuntimeError(f"process {rank}: {result.reason}")
                return ""
            with suppress(subprocess.TimeoutExpired):
                child.process.wait(POLL_S)


def epochs_of(folder: Path) -> list[dict[str, float]]:
    """Reads the rows of results.csv, omitting the empty values of each epoch."""
    table = folder / "results.csv"
    if not table.is_file():
        return []
    with open(table, encoding="utf-8", newline="") as file:
        return [{name.strip(): float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


if __name__ == "__main__":
    run_main(main)
