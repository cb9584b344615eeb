"""No script opens a network connection unless a download was requested; the loopback interface is allowed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.helpers.scripts import SMALL
from tests.helpers.tiny import write_dataset, write_model

ROOT = Path(__file__).parents[1]
GUARD = """
import socket

def is_own(address):
    return not isinstance(address, tuple) or address[0] in ("127.0.0.1", "::1", "localhost")

def guarded(name):
    original = getattr(socket.socket, name)
    def call(self, address, *rest):
        if not is_own(address):
            print("NETWORK", name, address, flush=True)
            raise OSError("there is no network")
        return original(self, address, *rest)
    setattr(socket.socket, name, call)

resolve = socket.getaddrinfo
def getaddrinfo(host, *rest, **more):
    if not is_own((host,)):
        print("NETWORK resolve", host, flush=True)
        raise OSError("there is no network")
    return resolve(host, *rest, **more)

socket.getaddrinfo = getaddrinfo
for name in ("connect", "connect_ex"):
    guarded(name)
"""
SCRIPTS = """
import socket, sys
import train, val, detect
data, model, folder = sys.argv[1:4]
own = ["--data", data, "--model", model, "--project", folder, *sys.argv[4:], "--no-noplots"]
train.main([*own, "--epochs", "1", "--set", "albumentations=[{name: Blur, p: 0.5}]"])
weights = folder + "/exp/best.pt"
val.main(["--weights", weights, "--device", "cpu", "--workers", "0", "--noplots", "--project", folder + "/val"])
picture = folder + "/exp/train_batch0.jpg"
detect.main(["--weights", weights, "--device", "cpu", "--project", folder + "/found", "--source", picture])
try:
    socket.create_connection(("192.0.2.1", 9), timeout=1)
except OSError as error:
    print("the guard says:", error)
"""


def test_training_validation_and_detection_open_no_connection(tmp_path):
    (tmp_path / "guard").mkdir()
    (tmp_path / "guard" / "sitecustomize.py").write_text(GUARD)
    (tmp_path / "scripts.py").write_text(SCRIPTS)
    given = [write_dataset(tmp_path / "set"), write_model(tmp_path / "tiny.yaml"), tmp_path / "runs", *SMALL]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (tmp_path / "guard", ROOT)))}
    done = subprocess.run(
        [sys.executable, tmp_path / "scripts.py", *map(str, given)],
        env=environment, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "the guard says: there is no network" in done.stdout
    assert [line for line in done.stdout.splitlines() if line.startswith("NETWORK")] == ["NETWORK resolve 192.0.2.1"], (
        done.stdout
    )
