"""The rank of this process according to its environment. Only this module reads the variables that launchers set.

torchrun, ``--spawn`` and users set RANK, WORLD_SIZE and so on; Open MPI sets OMPI_*, MPICH and Intel MPI PMI_* and
MPI_*, Slurm's srun SLURM_*. The first of these that is set is used: mpirun may start its processes through srun, and
Slurm's variables then describe mpirun's own helpers.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from utils.errors import PeerFailure, UserError
from utils.machine.resources import available_cores, available_memory

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_FIRST_PORT, _PORTS = 15000, 15000  # below the range that systems assign by themselves
PROCESS_BYTES = 600 * 10**6  # of a training or validating process on a CPU before its first batch
_GPU_FILES = ("nvidia", "nvhost", "kfd", "dxg")  # in /dev: CUDA, Jetson, ROCm, WSL


@dataclass(frozen=True)
class Launch:
    """The rank of a process, and its position on its node as far as the launcher sets it (None: not set)."""

    launcher: str  # for messages
    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int | None
    node_rank: int | None
    address: str  # of the run's store
    port: int
    is_hosted: bool = False  # the launcher hosts the store; otherwise rank 0 does


def read_launch(environ: Mapping[str, str] | None = None) -> Launch | None:
    """The rank of this process if it is one of several, else None.

    Args:
        environ: environment variables; None: those of this process.

    Raises UserError for variables that are incomplete, not numbers, or contradictory.
    """
    environ = os.environ if environ is None else environ
    if environ.get("RANK") or environ.get("LOCAL_RANK"):
        launch = _by_torchrun(environ)
    else:
        launch = _by_mpi(environ) or _by_srun(environ)
        if launch is None and any(environ.get(name) for name in _TORCHRUN):
            _refuse_incomplete(environ)
    if launch is not None:
        _check(launch)
    return launch


def is_launched(environ: Mapping[str, str] | None = None) -> bool:
    """Whether a launcher (or `spawn`) has started this process as one of several."""
    environ = os.environ if environ is None else environ
    if environ.get("RANK") or environ.get("LOCAL_RANK"):
        return True
    return _mpi_ranks(environ) is not None or _srun_size(environ) > 1


def evaluates(eval_ranks: int) -> bool:
    """Whether this process is one of the last ``eval_ranks`` of its run, which validate while the others train.

    Raises UserError if no process is left to train.
    """
    launch = read_launch() if eval_ranks else None
    size = launch.world_size if launch else 1
    if eval_ranks >= size:
        text = f"--eval-ranks {eval_ranks}: {size} started, and at least one must train; start more, e.g. --spawn"
        raise (PeerFailure if launch and launch.rank else UserError)(f"{text} {eval_ranks + 1}")
    return launch is not None and launch.rank >= size - eval_ranks


def require_one_process(script: str, instead: str = "start it once") -> None:
    """Ends this process with one line, on rank 0, if a launcher has started several: all would do the same work."""
    launch = read_launch()
    if launch is None or launch.world_size == 1:
        return
    if launch.rank:
        raise SystemExit(2)
    raise UserError(f"{script} runs in one process, but {launch.launcher} sets {launch.world_size}; {instead}")


def restarts_of_launcher() -> tuple[str, str]:
    """The id of the run and the number of restarts, as set by torchrun; "" without torchrun."""
    return os.environ.get("TORCHELASTIC_RUN_ID", ""), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def torchrun_variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    """The variables that torchrun would set for a process of a run on this machine."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _by_torchrun(environ: Mapping[str, str]) -> Launch:
    if any(not environ.get(name) for name in _TORCHRUN):
        _refuse_incomplete(environ)
    return Launch(
        launcher="torchrun" if environ.get("TORCHELASTIC_RUN_ID") else "the environment",
        rank=_required(environ, "RANK"),
        world_size=_required(environ, "WORLD_SIZE"),
        local_rank=_number(environ, "LOCAL_RANK"),
        local_world_size=_number(environ, "LOCAL_WORLD_SIZE"),
        node_rank=_number(environ, "GROUP_RANK"),
        address=environ["MASTER_ADDR"],
        port=_required(environ, "MASTER_PORT"),
        is_hosted=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _refuse_incomplete(environ: Mapping[str, str]) -> None:
    present = [name for name in (*_TORCHRUN, "LOCAL_RANK") if environ.get(name)]
    missing = [name for name in _TORCHRUN if name not in present]
    raise UserError(
        f"the distributed environment is incomplete: {', '.join(missing)} missing; start with torchrun, or unset "
        f"{', '.join(present) or 'LOCAL_RANK'}"
    )


def _mpi_ranks(environ: Mapping[str, str]) -> tuple[str, int, int, int | None, int | None] | None:
    """Launcher, rank, world size, local rank and local world size; None unless mpirun started several processes."""
    if environ.get("OMPI_COMM_WORLD_RANK") and environ.get("OMPI_COMM_WORLD_SIZE"):
        names = [f"OMPI_COMM_WORLD_{end}" for end in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
    elif environ.get("PMI_RANK") and environ.get("PMI_SIZE"):
        names = ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"]
    else:
        return None
    rank, size = _required(environ, names[0]), _required(environ, names[1])
    return ("mpirun", rank, size, _number(environ, names[2]), _number(environ, names[3])) if size > 1 else None


def _by_mpi(environ: Mapping[str, str]) -> Launch | None:
    ranks = _mpi_ranks(environ)
    if ranks is None:
        return None
    launcher, rank, size, local_rank, local_size = ranks
    job = environ.get("PMIX_NAMESPACE") or environ.get("PMI_ID_JOB") or str(os.getppid())
    address, port = _store_address(environ, launcher, local_size == size, job)
    return Launch(launcher, rank, size, local_rank, local_size, 0 if local_size == size else None, address, port)


def _srun_size(environ: Mapping[str, str]) -> int:
    """The number of tasks in the job step that this process belongs to; 1 outside a step.

    A batch script has SLURM_NTASKS and SLURM_PROCID, too, but is a single process. So is the shell of ``srun --pty``,
    whatever the size of the step.
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
    address, port = _store_address(environ, "srun", nodes == 1, job)
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


def _store_address(environ: Mapping[str, str], launcher: str, on_one_node: bool, job: str) -> tuple[str, int]:
    """Address and port of the run's store: MASTER_ADDR and MASTER_PORT, or derived from the job, equal on all nodes."""
    world_size = _number(environ, "WORLD_SIZE")
    size = _srun_size(environ) if launcher == "srun" else (_mpi_ranks(environ) or ("", 0, 1, None, None))[2]
    if world_size not in (None, size):
        raise UserError(f"WORLD_SIZE is {world_size}, but {launcher} has started {size} processes; unset WORLD_SIZE")
    port = _number(environ, "MASTER_PORT")
    if port is None:
        port = _FIRST_PORT + int.from_bytes(hashlib.blake2b(job.encode(), digest_size=4).digest()) % _PORTS
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    address = environ.get("MASTER_ADDR") or ("127.0.0.1" if on_one_node else _first_node(nodes or ""))
    if not address:
        raise UserError(
            f"{launcher} does not say on which machine its first process runs; set MASTER_ADDR to the name of that "
            "machine for all processes, as in: mpirun -x MASTER_ADDR=node0 -x MASTER_PORT=29500"
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
        raise UserError(f"{name} is {text!r}; it must be a whole number, 0 or more")
    return int(text)


def _required(environ: Mapping[str, str], name: str) -> int:
    value = _number(environ, name)
    assert value is not None, name
    return value


def _check(launch: Launch) -> None:
    if not 0 <= launch.rank < launch.world_size:
        raise UserError(f"{launch.launcher}: rank {launch.rank} of {launch.world_size} processes; ranks count from 0")
    if not 0 < launch.port < 2**16:
        raise UserError(f"MASTER_PORT is {launch.port}; it must be between 1 and 65535")
    size = launch.local_world_size
    if size is not None and not 0 < size <= launch.world_size:
        raise UserError(f"{launch.launcher}: {size} processes on this node, {launch.world_size} in all")
    if size is not None and launch.local_rank is not None and launch.local_rank >= size:
        raise UserError(f"{launch.launcher}: local rank {launch.local_rank} of {size} processes on this node")


def check_processes(spawn: int, device: str, *, threads: int | None = None) -> None:
    """Raises UserError if ``--spawn`` or torchrun starts more processes on this machine than its cores (unless they may
    use a GPU) or its memory allow. To be called before torch is imported, which alone fills the memory with too many.

    mpirun and Slurm, which know both, are trusted.

    Args:
        device: the value of `--device`.
        threads: of each process, by which users show that they know the cores; 0: not given; None: there is no flag.
    """
    launch = read_launch()
    if launch is None:
        count, flag = spawn, "--spawn"
    elif launch.launcher == "torchrun":  # which may bind each process to some of its own cores
        count, flag = launch.local_world_size or 1, "--nproc_per_node"
    else:
        return
    is_first = launch is None or not launch.local_rank
    cores = available_cores(affinity_of=os.getppid() if launch else 0)
    problem = ""
    if count > cores and not threads and not _may_have_gpu(device):
        share = "" if threads is None else ", or add --threads 1 if they are to share cores"
        problem = f"on {cores} CPU core{'s' * (cores > 1)}; start at most {cores}{share}"
    elif is_first and count > 1 and count * PROCESS_BYTES > (free := available_memory()):
        needed = f"need about {count * PROCESS_BYTES / 1e9:.1f} GB before the first batch"
        problem = f"{needed}, and {free / 1e9:.1f} GB are free; start at most {max(free // PROCESS_BYTES, 1)}"
    if problem:
        raise (UserError if is_first else PeerFailure)(f"{flag} {count}: {count} processes {problem}")


def _may_have_gpu(device: str) -> bool:
    """Whether a process with this ``--device`` may find a GPU, as far as the system's files tell."""
    if device.strip().lower() == "cpu" or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    return any(name.startswith(_GPU_FILES) for name in os.listdir("/dev"))
