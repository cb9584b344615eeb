"""The rank of this process according to its environment. Only this module reads the variables that launchers set.

torchrun, ``--spawn`` and launch/ray_train.py all set torchrun's variables.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from utils.config.commands import COMMANDS
from utils.errors import PeerFailure, UserError
from utils.program import IS_INSTALLED

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
STORE_PREFIX = "LOCKSTEP_STORE_PREFIX"  # begins the keys of a run of ``--spawn`` in its store; random
# Launchers that start copies of a program, by the variable with the number of copies.
_COPIES = {"OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpirun", "SLURM_STEP_NUM_TASKS": "srun"}


@dataclass(frozen=True)
class Launch:
    """The rank of a process, and its position on its node."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    address: str  # address of the run's store
    port: int
    is_hosted: bool = False  # torchrun hosts the store; otherwise rank 0 does
    run_id: str = ""  # torchrun's run id; "" without it
    store_prefix: str = ""  # see `STORE_PREFIX`

    @property
    def is_on_one_machine(self) -> bool:
        """Whether all processes of the run are on this machine."""
        return self.local_world_size == self.world_size


def read_launch(environ: Mapping[str, str] | None = None) -> Launch | None:
    """Reads the rank of this process from ``environ`` (None: this process's environment). Returns None if the process
    is not one of several.

    Raises UserError for variables that are incomplete, not numbers, or contradictory, and for independent copies of the
    program, which would overwrite each other's files.
    """
    environ = os.environ if environ is None else environ
    present = [name for name in _VARIABLES if environ.get(name)]
    if not present:
        _check_no_copies(environ, "use torchrun or --spawn")
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
        store_prefix=environ.get(STORE_PREFIX, ""),
    )
    fits_node = launch.local_rank < launch.local_world_size <= launch.world_size
    if not (fits_node and launch.rank < launch.world_size and 0 < launch.port < 2**16):
        values = " ".join(f"{name}={environ[name]}" for name in _VARIABLES)
        raise UserError(f"the distributed environment is impossible (ranks start at 0): {values}")
    return launch


def _check_no_copies(environ: Mapping[str, str], instead: str) -> None:
    """Raises UserError if a launcher has started independent copies of the program. ``instead`` is what to do instead
    of starting them."""
    for name, launcher in _COPIES.items():
        count = _number(environ, name, default="1")
        # The shell of ``srun --pty`` is a single process, whatever the size of its job step.
        if count > 1 and not environ.get("SLURM_PTY_PORT"):
            raise UserError(f"{launcher} has started {count} separate processes; {instead}")


def _number(environ: Mapping[str, str], name: str, *, default: str = "") -> int:
    """Returns the value of a variable, or ``default`` if it is empty or missing, as an integer. Raises UserError if it
    is not one, or is negative."""
    value = environ.get(name) or default
    digits = value.strip()
    if not digits.isdecimal():
        raise UserError(f"{name} is {value!r}; it must be a whole number, 0 or more")
    return int(digits)


def is_eval_rank(launch: Launch | None, eval_ranks: int) -> bool:
    """Returns whether this process is one of the run's last ``eval_ranks``, which validate while the others train.

    Raises UserError if no process is left to train.
    """
    world_size = launch.world_size if launch else 1
    rank = launch.rank if launch else 0
    if eval_ranks >= world_size:
        error_type = UserError if rank == 0 else PeerFailure
        raise error_type(
            f"--eval-ranks {eval_ranks}: {world_size} started, and at least one must train; start more, e.g. "
            f"--spawn {eval_ranks + 1}"
        )
    return rank >= world_size - eval_ranks


def forget_copy_count() -> None:
    """Removes the copy counts of launchers from the environment: the copies of this program divide the work, and the
    processes that each of them starts are not copies."""
    for name in _COPIES:
        os.environ.pop(name, None)


def require_one_process(command: str, instead: str) -> None:
    """Refuses several processes, which would all do the same work. ``instead`` is what to do instead of starting them.

    A process that joins no other may have any other variables of a launcher: clusters export MASTER_ADDR to all jobs.

    Raises UserError on rank 0, in copies, which have no rank, and if the variables are incomplete; on the other ranks
    of a launcher PeerFailure.
    """
    is_launched = all(os.environ.get(name) for name in _VARIABLES)
    world_size = _number(os.environ, "WORLD_SIZE", default="1")
    if world_size > 1:
        is_rank_0 = _number(os.environ, "RANK", default="0") == 0
        error_type = UserError if is_rank_0 or not is_launched else PeerFailure
        remedy = instead if is_launched else f"{instead}, or unset WORLD_SIZE"
        raise error_type(f"{command} runs in one process, but WORLD_SIZE is {world_size}; {remedy}")
    if not is_launched:
        _check_no_copies(os.environ, instead)


def typed_command(name: str) -> str:
    """Returns the command ``name`` as users type it; with torchrun if that runs this process, on one machine, and can
    run the command."""
    command = COMMANDS[name]
    launch = read_launch()
    if command.is_one_process or launch is None or not launch.run_id or not launch.is_on_one_machine:
        return command.typed
    script = f"-m {command.typed}" if IS_INSTALLED else command.typed.removeprefix("python ")
    return f"torchrun --nproc_per_node {launch.world_size} {script}"


def torchrun_variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Returns the variables that torchrun would set for a process of a single-node run."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def safe_path_variables() -> dict[str, str]:
    """Returns variables with which started processes load no code from the working folder, which may be the data set of
    a stranger: no modules of Python, and no shared libraries.

    The working folder is also what an empty path in LD_LIBRARY_PATH means, such as the one that ``import cv2`` appends
    if the variable is empty.
    """
    folders = [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    return {"PYTHONSAFEPATH": "1", "LD_LIBRARY_PATH": ":".join(folders) or os.devnull}


def environment_of_child() -> dict[str, str]:
    """Returns the environment for a command that this process starts, with `safe_path_variables`. Unless this process
    is one of several, the launcher's variables are left out; otherwise every command would join the launcher's store as
    the same rank, or be refused because a cluster exports only some of them."""
    if (os.environ.get("WORLD_SIZE") or "1") != "1":
        return os.environ | safe_path_variables()
    return {
        name: value
        for name, value in os.environ.items()
        if name not in (*_VARIABLES, STORE_PREFIX) and not name.startswith("TORCHELASTIC_")
    } | safe_path_variables()
