"""The files of launch/, as far as they can be checked without a cluster.

The Slurm file runs with stand-ins for srun, scontrol and torchrun; flags are parsed by the parsers that will read them.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

from tests.helpers.repository import ROOT
from utils.config.parser import parse_config
from utils.config.settings import AUTO, TrainConfig
from utils.errors import REQUEUE

LAUNCH = ROOT / "launch"
SLURM = LAUNCH / "slurm.sbatch"
STAND_INS = {
    # srun: runs what follows its own flags, one task, passing TERM on.
    "srun": 'while [[ $1 == --* ]]; do echo "$1" >> "$OUT/srun"; shift; done\nexec "$@"\n',
    "torchrun": 'trap "touch $OUT/told; exit 1" TERM\n'  # as torchrun does whatever its processes' exit code
    'printf "%s\\n" "$@" > "$OUT/torchrun"\n'
    'sleep "$NAP" & wait $!\nexit "$CODE"\n',
    "scontrol": 'case "$1 $2" in\n"show hostnames") echo alpha; echo beta;;\n'
    '"show job") echo "   JobState=$STATE Reason=None";;\n*) echo "$@" >> "$OUT/scontrol";;\nesac\n',
}


@pytest.fixture
def cluster(tmp_path):
    """The environment of a job on two nodes, with stand-ins for the commands."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in STAND_INS.items():
        (commands / name).write_text("#!/bin/bash\n" + text)
        (commands / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "123", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "[a-b]", "SLURM_GPUS_PER_NODE": "h100:4"}
    paths = {"OUT": str(tmp_path), "RUNS": str(tmp_path / "runs"), "USER": "me"}
    return {"PATH": f"{commands}:{os.environ['PATH']}", "NAP": "0", "CODE": "0", "STATE": "RUNNING", **job, **paths}


@pytest.mark.parametrize(
    ("number", "state"), [(signal.SIGUSR1, "RUNNING"), (signal.SIGTERM, "RUNNING"), (signal.SIGTERM, "COMPLETING")]
)
def test_slurm_stops_the_run_and_requeues_the_job(cluster, tmp_path, number, state):
    """A job that scancel has ended is not requeued. The shell is slow: srun has ended before it polls again."""
    slow_kill = 'kill() { builtin kill "$@" && if [ "$1" = -TERM ]; then sleep 0.3; fi; }\n'
    (tmp_path / "slow.sh").write_text(slow_kill)
    slow = {"BASH_ENV": str(tmp_path / "slow.sh")}
    job = subprocess.Popen(["bash", str(SLURM)], env=cluster | slow | {"NAP": "60", "STATE": state})
    deadline = time.monotonic() + 60
    while not (tmp_path / "torchrun").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    job.send_signal(number)
    code = job.wait(timeout=60)
    assert (tmp_path / "told").exists()
    if state != "RUNNING":
        assert code == 1
        assert not (tmp_path / "scontrol").exists()
        return
    assert code == REQUEUE
    assert (tmp_path / "scontrol").read_text() == "requeue 123\n"
    (tmp_path / "scontrol").unlink()
    assert subprocess.run(["bash", str(SLURM)], env=cluster | {"CODE": "1"}, check=False).returncode == 1
    assert not (tmp_path / "scontrol").exists()  # a failure


def kubernetes(folder: Path) -> tuple[list[str], dict[str, str], Path]:
    documents = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text(encoding="utf-8"))
    (script,) = next(d for d in documents if d["kind"] == "TrainJob")["spec"]["trainer"]["args"]
    pod = {"PET_MASTER_ADDR": "lockstep-node-0-0.lockstep", "PET_MASTER_PORT": "29400"}
    return ["-c", script.replace("/shared", str(folder))], pod, folder / "runs" / "lockstep"


def skypilot(folder: Path) -> tuple[list[str], dict[str, str], Path]:
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text(encoding="utf-8"))
    assert set(re.findall(r"(?<= )/\w+", task["run"])) - {"/tmp"} == set(task["file_mounts"])
    assert (
        task["num_nodes"] == 1 or task["file_mounts"]["/runs"]["mode"] != "MOUNT_CACHED"
    )  # each node caches for itself
    node = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "8", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    return ["-c", task["run"].replace("/runs", str(folder / "runs"))], node, folder / "runs" / "lockstep"


def sagemaker(folder: Path, host: str = "algo-1") -> tuple[list[str], dict[str, str], Path]:
    job = {"SM_HOSTS": '["algo-2", "algo-1"]', "SM_CURRENT_HOST": host, "SM_NUM_GPUS": "8", "SM_CHANNEL_TRAIN": "/data"}
    return [str(LAUNCH / "sagemaker.sh"), "--epochs", "3"], job | {"CHECKPOINTS": str(folder)}, folder / "run"


def slurm(folder: Path) -> tuple[list[str], dict[str, str], Path]:
    return [str(SLURM), "--data", "a b.yaml", "--batch-size", "64"], {}, folder / "runs" / "123"


@pytest.mark.parametrize(
    ("start", "place"),
    [
        (slurm, ("2", "4", "alpha:29500")),
        (kubernetes, (None, None, "lockstep-node-0-0.lockstep:29400")),
        (skypilot, ("2", "8", "10.0.0.1:29500")),
        (sagemaker, ("2", "8", "algo-1:29500")),
        (partial(sagemaker, host="algo-2"), ("2", "8", "algo-1:29500")),
    ],
)
def test_the_commands_are_accepted_by_the_parsers(tmp_path, cluster, start, place):
    words, environment, folder = start(tmp_path)
    subprocess.run(["bash", *words], env=cluster | environment, check=True)
    argv = (tmp_path / "torchrun").read_text().splitlines()
    parsed = get_args_parser().parse_args(argv)
    assert (parsed.rdzv_backend, parsed.training_script) == ("c10d", "train.py")
    for wanted, found in zip(place, (parsed.nnodes, parsed.nproc_per_node, parsed.rdzv_endpoint)):
        assert wanted in (None, found)
    config = parse_config(TrainConfig, parsed.training_script_args)
    assert config.resume == AUTO
    assert config.folder == folder
    if start is slurm:
        found = (config.data, config.batch_size, config.name, config.stage)
        assert found == ("a b.yaml", 64, "123", "/tmp/lockstep-me")
        assert "--ntasks-per-node=1" in (tmp_path / "srun").read_text()
        assert not (tmp_path / "scontrol").exists()
    elif start not in (kubernetes, skypilot):
        assert parsed.rdzv_conf == f"is_host={str(start is sagemaker).lower()}"
        assert (config.data, config.epochs) == ("/data/data.yaml", 3)
