"""The rank of this process according to its environment. Only this module reads the variables that launchers set.

torchrun, ``--spawn`` and launch/ray_train.py all set those of torchrun.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from utils.errors import PeerFailure, UserError
from utils.machine.resources import available_cores, available_memory

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
# Launchers that start copies of a program, by the variable with the number of copies.
_COPIES = {"OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpirun", "SLURM_STEP_NUM_TASKS": "srun"}
PROCESS_BYTES = 600 * 10**6  # memory of a training or validating process on a CPU before its first batch
_GPU_FILES = ("nvidia", "nvhost", "kfd", "dxg")  # in /dev: CUDA, Jetson, ROCm, WSL


@dataclass(frozen=True)
class Launch:
    """The rank of a process, and its position on its node."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    address: str  # of the run's store
    port: int
    is_hosted: bool = False  # torchrun hosts the store; otherwise rank 0 does
    run_id: str = ""  # of torchrun; "" without it
    restarts: int = 0  # by torchrun

    @property
    def launcher(self) -> str:
        """How messages name this launcher."""
        return "torchrun" if self.run_id else "the environment"


def read_launch(environ: Mapping[str, str] | None = None) -> Launch | None:
    """Reads the rank of this process from the environment. Returns None if it is not one of several. ``environ``: None
    for that of this process.

    Raises UserError for variables that are incomplete, not numbers, or contradictory, and for copies of the program
    that do not know of each other and would overwrite each other's files.
    """
    environ = os.environ if environ is None else environ
    present = [name for name in _VARIABLES if environ.get(name)]
    if not present:
        _check_no_copies(environ)
        return None
    if len(present) < len(_VARIABLES):
        missing = ", ".join(name for name in _VARIABLES if name not in present)
        raise UserError(
            f"the distributed environment is incomplete: {missing} missing; start with torchrun, or unset "
            f"{', '.join(present)}"
        )
    launch = Launch(
        rank=_number(environ, "RANK"),
        world_size=_number(environ, "WORLD_SIZE"),
        local_rank=_number(environ, "LOCAL_RANK"),
        local_world_size=_number(environ, "LOCAL_WORLD_SIZE"),
        node_rank=_number(environ, "GROUP_RANK"),
        address=environ["MASTER_ADDR"],
        port=_number(environ, "MASTER_PORT"),
        is_hosted=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        run_id=environ.get("TORCHELASTIC_RUN_ID", ""),
        restarts=int(environ.get("TORCHELASTIC_RESTART_COUNT", 0)),
    )
    is_local = launch.local_rank < launch.local_world_size <= launch.world_size
    if not (is_local and launch.rank < launch.world_size and 0 < launch.port < 2**16):
        values = " ".join(f"{name}={environ[name]}" for name in _VARIABLES)
        raise UserError(f"{launch.launcher}: impossible values (ranks start at 0): {values}")
    return launch


def _check_no_copies(environ: Mapping[str, str]) -> None:
    """Raises UserError if a launcher has started copies of the program that do not know of each other."""
    for name, launcher in _COPIES.items():
        # The shell of ``srun --pty`` is a single process, whatever the size of its step.
        if environ.get(name) and _number(environ, name) > 1 and not environ.get("SLURM_PTY_PORT"):
            count = _number(environ, name)
            raise UserError(f"{launcher} has started {count} separate processes; use torchrun or --spawn")


def _number(environ: Mapping[str, str], name: str) -> int:
    """Returns the whole number that a variable holds. Raises UserError for another value."""
    if not environ[name].strip().isdecimal():
        raise UserError(f"{name} is {environ[name]!r}; it must be a whole number, 0 or more")
    return int(environ[name])


def evaluates(eval_ranks: int) -> bool:
    """Returns whether this process is one of the last ``eval_ranks`` of its run, which validate while the others train.

    Raises UserError if no process is left to train.
    """
    launch = read_launch() if eval_ranks else None
    world_size = launch.world_size if launch else 1
    rank = launch.rank if launch else 0
    if eval_ranks >= world_size:
        error_type = UserError if rank == 0 else PeerFailure
        raise error_type(
            f"--eval-ranks {eval_ranks}: {world_size} started, and at least one must train; start more, e.g. "
            f"--spawn {eval_ranks + 1}"
        )
    return rank >= world_size - eval_ranks


def require_one_process(script: str, instead: str = "start it once") -> None:
    """Ends this process with one line, on rank 0, if a launcher has started several: all would do the same work."""
    launch = read_launch()
    if launch is None or launch.world_size == 1:
        return
    if launch.rank:
        raise SystemExit(2)
    raise UserError(f"{script} runs in one process, but {launch.launcher} sets {launch.world_size}; {instead}")


def torchrun_variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Returns the variables that torchrun would set for a process of a run on this machine."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def check_processes(spawn: int, device: str, *, threads: int | None = None) -> None:
    """Raises UserError if ``--spawn`` starts more processes than the machine has cores (unless they may use a GPU) or
    memory for. Call it before torch is imported, which alone fills the memory if there are too many.

    Args:
        device: the value of `--device`.
        threads: of each process, by which users show that they know the cores; 0: not given; None: there is no flag.
    """
    cores = available_cores()
    free = available_memory()
    problem = ""
    if spawn > cores and not threads and not _may_have_gpu(device):
        problem = f"on {cores} CPU {'core' if cores == 1 else 'cores'}; start at most {cores}"
        if threads is not None:
            problem += ", or add --threads 1 if they are to share cores"
    elif spawn > 1 and spawn * PROCESS_BYTES > free:
        needed = f"need about {spawn * PROCESS_BYTES / 1e9:.1f} GB before the first batch"
        problem = f"{needed}, and {free / 1e9:.1f} GB are free; start at most {max(free // PROCESS_BYTES, 1)}"
    if problem:
        raise UserError(f"--spawn {spawn}: {spawn} processes {problem}")


def _may_have_gpu(device: str) -> bool:
    """Returns whether a process with this ``--device`` may find a GPU, as far as the system's files tell."""
    if device.strip().lower() == "cpu" or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    return any(name.startswith(_GPU_FILES) for name in os.listdir("/dev"))
