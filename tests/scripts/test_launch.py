"""The files of launch/, as far as they can be checked without a cluster.

The Slurm file runs with stand-ins for srun, scontrol and torchrun; flags are parsed by the parsers that will read them.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

from utils.config.parser import parse_config
from utils.config.settings import TrainConfig
from utils.machine.stop_signals import REQUEUE

LAUNCH = Path(__file__).parents[2] / "launch"
SLURM = LAUNCH / "slurm.sbatch"
STAND_INS = {
    # srun: runs what follows its own flags, one task, passing TERM on.
    "srun": 'while [[ $1 == --* ]]; do echo "$1" >> "$OUT/srun"; shift; done\nexec "$@"\n',
    "torchrun": 'printf "%s\\n" "$@" > "$OUT/torchrun"\n'
    'trap "touch $OUT/told; exit 1" TERM\n'  # as torchrun does whatever its processes' exit code
    'sleep "$NAP" & wait $!\nexit "$CODE"\n',
    "scontrol": 'if [ "$1" = show ]; then echo alpha; echo beta; else echo "$@" >> "$OUT/scontrol"; fi\n',
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
    return {"PATH": f"{commands}:{os.environ['PATH']}", "NAP": "0", "CODE": "0", **job, **paths}


def submit(cluster: dict[str, str], *flags: str) -> subprocess.Popen:
    return subprocess.Popen(["bash", str(SLURM), *flags], env=cluster)


def arguments(cluster: dict[str, str]) -> list[str]:
    return Path(cluster["OUT"], "torchrun").read_text().splitlines()


def train_config(argv: list[str]) -> TrainConfig:
    """train.py's settings in torchrun's arguments; the latter are checked too."""
    parsed = get_args_parser().parse_args(argv)
    assert parsed.rdzv_backend == "c10d"
    assert parsed.training_script == "train.py"
    return parse_config(TrainConfig, parsed.training_script_args, "")


@pytest.mark.parametrize("path", [SLURM, LAUNCH / "sagemaker.sh"], ids=lambda path: path.name)
def test_the_scripts_are_valid_bash(path):
    subprocess.run(["bash", "-n", str(path)], check=True)


def test_slurm_starts_a_run(cluster):
    assert submit(cluster, "--data", "a b.yaml", "--batch-size", "64").wait() == 0
    argv = arguments(cluster)
    parsed = get_args_parser().parse_args(argv)
    assert (parsed.nnodes, parsed.nproc_per_node, parsed.rdzv_endpoint) == ("2", "4", "alpha:29500")
    config = train_config(argv)
    assert (config.data, config.batch_size, config.name, config.exist_ok) == ("a b.yaml", 64, "123", True)
    assert config.stage == "/tmp/lockstep-me"
    assert config.resume is None
    assert "--ntasks-per-node=1" in Path(cluster["OUT"], "srun").read_text()
    assert not Path(cluster["OUT"], "scontrol").exists()


def test_slurm_resumes_after_a_requeue(cluster):
    last = Path(cluster["RUNS"], "123", "last.pt")
    last.parent.mkdir(parents=True)
    last.touch()
    assert submit(cluster, "--epochs", "7").wait() == 0
    config = train_config(arguments(cluster))
    assert (config.resume, config.epochs) == (str(last), 7)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_slurm_stops_the_run_and_requeues_the_job(cluster, number):
    job = submit(cluster | {"NAP": "60"})
    deadline = time.monotonic() + 20
    while not Path(cluster["OUT"], "torchrun").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)
    job.send_signal(number)
    assert job.wait(timeout=20) == REQUEUE
    assert Path(cluster["OUT"], "told").exists()
    assert Path(cluster["OUT"], "scontrol").read_text() == "requeue 123\n"


def test_slurm_does_not_requeue_a_failure(cluster):
    assert submit(cluster | {"CODE": "1"}).wait() == 1
    assert not Path(cluster["OUT"], "scontrol").exists()


def test_the_kubernetes_resources_are_consistent():
    documents = list(yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text(encoding="utf-8")))
    kinds = {d["kind"]: d for d in documents}
    assert list(kinds) == ["PersistentVolumeClaim", "TrainingRuntime", "TrainJob"]
    runtime, job = kinds["TrainingRuntime"], kinds["TrainJob"]
    assert job["spec"]["runtimeRef"] == {
        "apiGroup": runtime["apiVersion"].split("/")[0], "kind": runtime["kind"], "name": runtime["metadata"]["name"],
    }  # fmt: skip
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    pod = replicated["template"]["spec"]["template"]["spec"]
    assert (replicated["name"], pod["containers"][0]["name"]) == ("node", "node")  # the names that the Trainer fills in
    volumes = {v["name"]: v for v in pod["volumes"]}
    mounts = {m["mountPath"]: m["name"] for m in pod["containers"][0]["volumeMounts"]}
    assert set(mounts.values()) == set(volumes)
    claim = volumes["shared"]["persistentVolumeClaim"]["claimName"]
    assert claim == kinds["PersistentVolumeClaim"]["metadata"]["name"]
    trainer = job["spec"]["trainer"]
    assert trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == trainer["numProcPerNode"]
    assert trainer["command"] == ["bash", "-c"]
    (script,) = trainer["args"]
    for path in re.findall(r"(?<=\s)/\w+", script):
        assert path in mounts, path


@pytest.mark.parametrize("resumed", [False, True])
def test_the_kubernetes_command_is_accepted_by_the_parsers(tmp_path, cluster, resumed):
    documents = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text(encoding="utf-8"))
    (script,) = next(d for d in documents if d["kind"] == "TrainJob")["spec"]["trainer"]["args"]
    script = script.replace("/shared", str(tmp_path))
    last = tmp_path / "runs" / "lockstep" / "last.pt"
    if resumed:
        last.parent.mkdir(parents=True)
        last.touch()
    pod = {"PET_MASTER_ADDR": "lockstep-node-0-0.lockstep", "PET_MASTER_PORT": "29400"}
    subprocess.run(["bash", "-c", script], env=cluster | pod, check=True)
    config = train_config(arguments(cluster))
    assert config.resume == (str(last) if resumed else None)
    assert str(Path(config.project, config.name)) == str(last.parent)
    assert get_args_parser().parse_args(arguments(cluster)).rdzv_endpoint == "lockstep-node-0-0.lockstep:29400"


@pytest.mark.parametrize("resumed", [False, True])
def test_the_skypilot_command_is_accepted_by_the_parsers(tmp_path, cluster, resumed):
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text(encoding="utf-8"))
    script, last = task["run"].replace("/runs", str(tmp_path / "runs")), tmp_path / "runs" / "lockstep" / "last.pt"
    if resumed:
        last.parent.mkdir(parents=True)
        last.touch()
    node = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "8", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    subprocess.run(["bash", "-c", script], env=cluster | node, check=True)
    parsed = get_args_parser().parse_args(arguments(cluster))
    assert (parsed.nnodes, parsed.nproc_per_node, parsed.rdzv_endpoint) == ("2", "8", "10.0.0.1:29500")
    config = train_config(arguments(cluster))
    assert config.resume == (str(last) if resumed else None)
    assert str(Path(config.project, config.name)) == str(last.parent)
    assert set(re.findall(r"(?<= )/\w+", task["run"])) - {"/tmp"} == set(task["file_mounts"])


@pytest.mark.parametrize("host", ["algo-1", "algo-2"])
@pytest.mark.parametrize("resumed", [False, True])
def test_the_sagemaker_command_is_accepted_by_the_parsers(tmp_path, cluster, host, resumed):
    last = tmp_path / "run" / "last.pt"
    if resumed:
        last.parent.mkdir()
        last.touch()
    job = {"SM_HOSTS": '["algo-2", "algo-1"]', "SM_CURRENT_HOST": host, "SM_NUM_GPUS": "8", "SM_CHANNEL_TRAIN": "/data"}
    script = [str(LAUNCH / "sagemaker.sh"), "--epochs", "3"]
    subprocess.run(["bash", *script], env=cluster | job | {"CHECKPOINTS": str(tmp_path)}, check=True)
    parsed = get_args_parser().parse_args(arguments(cluster))
    assert (parsed.nnodes, parsed.nproc_per_node, parsed.rdzv_endpoint) == ("2", "8", "algo-1:29500")
    assert parsed.rdzv_conf == f"is_host={'true' if host == 'algo-1' else 'false'}"
    config = train_config(arguments(cluster))
    assert (config.data, config.epochs) == ("/data/data.yaml", 3)
    assert config.resume == (str(last) if resumed else None)
