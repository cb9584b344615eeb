"""What the environment says of this process's place in a run: the only module that reads launchers' variables.

torchrun, ``--spawn`` and people by hand set RANK, WORLD_SIZE and so on; Open MPI sets OMPI_*, MPICH and Intel MPI
PMI_* and MPI_*, Slurm's srun SLURM_*. The first of these that is there counts: mpirun may start its processes through
srun, and then Slurm's numbers are those of mpirun's own helpers.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from utils.errors import UserError

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_FIRST_PORT, _PORTS = 15000, 15000  # below those that systems give out by themselves


@dataclass(frozen=True)
class Launch:
    """A process's place, as far as its launcher tells (None: it doesn't)."""

    launcher: str  # for messages
    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int | None
    node_rank: int | None
    address: str  # of the run's store
    port: int
    is_hosted: bool = False  # the launcher hosts the store; otherwise rank 0 does


def read_launch(
    local_rank: int | None = None, local_world_size: int | None = None, environ: Mapping[str, str] | None = None
) -> Launch | None:
    """The place of this process among several; None for a process of its own.

    Args:
        local_rank, local_world_size: the flags that old launchers and their examples pass; variables go before them.
        environ: the variables; None: this process's.

    Raises UserError for variables that are half set, no numbers, or contradict each other.
    """
    environ = os.environ if environ is None else environ
    local_rank = None if local_rank == -1 else local_rank
    if environ.get("RANK") or environ.get("LOCAL_RANK") or local_rank is not None:
        launch = _by_torchrun(environ, local_rank, local_world_size)
    else:
        launch = _by_mpi(environ) or _by_srun(environ)
        if launch is None and any(environ.get(name) for name in _TORCHRUN):
            _refuse_half_set(environ)
    if launch is not None:
        _check(launch)
    return launch


def is_launched(environ: Mapping[str, str] | None = None) -> bool:
    """True in a process that a launcher (or `spawn`) has started as one of several."""
    environ = os.environ if environ is None else environ
    if environ.get("RANK") or environ.get("LOCAL_RANK"):
        return True
    return _mpi_place(environ) is not None or _srun_size(environ) > 1


def restarts_of_launcher() -> tuple[str, str]:
    """The run's name and the number of restarts, as torchrun tells its processes; "" without torchrun."""
    return os.environ.get("TORCHELASTIC_RUN_ID", ""), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def torchrun_variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What torchrun would set for a process of a run on this machine."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _by_torchrun(environ: Mapping[str, str], local_rank: int | None, local_world_size: int | None) -> Launch:
    if any(not environ.get(name) for name in _TORCHRUN):
        _refuse_half_set(environ)
    told = _number(environ, "LOCAL_WORLD_SIZE")
    if None not in (told, local_world_size) and told != local_world_size:
        raise UserError(f"--local-world-size {local_world_size}, but LOCAL_WORLD_SIZE is {told}; leave the flag out")
    own = _number(environ, "LOCAL_RANK")
    return Launch(
        launcher="torchrun" if environ.get("TORCHELASTIC_RUN_ID") else "the environment",
        rank=_required(environ, "RANK"),
        world_size=_required(environ, "WORLD_SIZE"),
        local_rank=local_rank if own is None else own,
        local_world_size=local_world_size if told is None else told,
        node_rank=_number(environ, "GROUP_RANK"),
        address=environ["MASTER_ADDR"],
        port=_required(environ, "MASTER_PORT"),
        is_hosted=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _refuse_half_set(environ: Mapping[str, str]) -> None:
    present = [name for name in (*_TORCHRUN, "LOCAL_RANK") if environ.get(name)]
    missing = [name for name in _TORCHRUN if name not in present]
    raise UserError(
        f"the distributed environment is half set: {', '.join(missing)} missing; start with torchrun, or unset "
        f"{', '.join(present) or 'LOCAL_RANK'}"
    )


def _mpi_place(environ: Mapping[str, str]) -> tuple[str, int, int, int | None, int | None] | None:
    """Launcher, rank, world size, local rank and local world size; None without mpirun, or for its only process."""
    if environ.get("OMPI_COMM_WORLD_RANK") and environ.get("OMPI_COMM_WORLD_SIZE"):
        names = [f"OMPI_COMM_WORLD_{end}" for end in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
    elif environ.get("PMI_RANK") and environ.get("PMI_SIZE"):
        names = ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"]
    else:
        return None
    rank, size = _required(environ, names[0]), _required(environ, names[1])
    return ("mpirun", rank, size, _number(environ, names[2]), _number(environ, names[3])) if size > 1 else None


def _by_mpi(environ: Mapping[str, str]) -> Launch | None:
    place = _mpi_place(environ)
    if place is None:
        return None
    launcher, rank, size, local_rank, local_size = place
    job = environ.get("PMIX_NAMESPACE") or environ.get("PMI_ID_JOB") or str(os.getppid())
    address, port = _meeting_point(environ, launcher, local_size == size, job)
    return Launch(launcher, rank, size, local_rank, local_size, 0 if local_size == size else None, address, port)


def _srun_size(environ: Mapping[str, str]) -> int:
    """How many tasks the job step has that this process is one of; 1 outside a step.

    A batch script has SLURM_NTASKS and SLURM_PROCID too, without being a task of several. The shell of
    ``srun --pty`` is one, whatever the step's size.
    """
    in_step = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_STEP_NUM_TASKS")
    if not environ.get("SLURM_PROCID") or not in_step or environ.get("SLURM_PTY_PORT"):
        return 1
    return _number(environ, "SLURM_STEP_NUM_TASKS") or _number(environ, "SLURM_NTASKS") or 1


def _by_srun(environ: Mapping[str, str]) -> Launch | None:
    size = _srun_size(environ)
    if size == 1:
        return None
    nodes = _number(environ, "SLURM_STEP_NUM_NODES")
    job = f"{environ.get('SLURM_JOB_ID', '')}.{environ.get('SLURM_STEP_ID', '')}"
    address, port = _meeting_point(environ, "srun", nodes == 1, job)
    return Launch(
        launcher="srun",
        rank=_required(environ, "SLURM_PROCID"),
        world_size=size,
        local_rank=_number(environ, "SLURM_LOCALID"),
        local_world_size=size if nodes == 1 else None,
        node_rank=_number(environ, "SLURM_NODEID"),
        address=address,
        port=port,
    )


def _meeting_point(environ: Mapping[str, str], launcher: str, on_one_node: bool, job: str) -> tuple[str, int]:
    """Address and port of the run's store: MASTER_ADDR and MASTER_PORT, or what follows from the job on every node."""
    told = _number(environ, "WORLD_SIZE")
    size = _srun_size(environ) if launcher == "srun" else (_mpi_place(environ) or ("", 0, 1, None, None))[2]
    if told not in (None, size):
        raise UserError(f"WORLD_SIZE is {told}, but {launcher} has started {size} processes; unset WORLD_SIZE")
    port = _number(environ, "MASTER_PORT")
    if port is None:
        port = _FIRST_PORT + int.from_bytes(hashlib.blake2b(job.encode(), digest_size=4).digest()) % _PORTS
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    address = environ.get("MASTER_ADDR") or ("127.0.0.1" if on_one_node else _first_node(nodes or ""))
    if not address:
        raise UserError(
            f"{launcher} does not tell on which machine its first process runs; set MASTER_ADDR to that machine's "
            f"name on all, as in: mpirun -x MASTER_ADDR=node0 -x MASTER_PORT=29500"
        )
    return address, port


def _first_node(nodes: str) -> str:
    """The first of Slurm's list of nodes: gpu[003-007,9],login gives gpu003."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0]) if first else ""


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name)
    if not text:
        return None
    if not text.strip().isdecimal():
        raise UserError(f"{name} is {text!r} and must be a whole number from 0")
    return int(text)


def _required(environ: Mapping[str, str], name: str) -> int:
    value = _number(environ, name)
    assert value is not None, name
    return value


def _check(launch: Launch) -> None:
    if not 0 <= launch.rank < launch.world_size:
        raise UserError(f"{launch.launcher}: rank {launch.rank} of {launch.world_size} processes; ranks count from 0")
    if not 0 < launch.port < 2**16:
        raise UserError(f"MASTER_PORT is {launch.port} and must be between 1 and 65535")
    size = launch.local_world_size
    if size is not None and not 0 < size <= launch.world_size:
        raise UserError(f"{launch.launcher}: {size} processes on this node, {launch.world_size} in all")
    if size is not None and launch.local_rank is not None and launch.local_rank >= size:
        raise UserError(f"{launch.launcher}: local rank {launch.local_rank} of {size} processes on this node")
