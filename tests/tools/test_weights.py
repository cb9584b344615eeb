"""--weights in the scripts: hostile files end with one line and run no code, names need the network, and the weights
determine the model.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import yaml

import detect
import train
import val
from models.weights.download import CATALOG
from models.weights.load import load_detector
from tests.helpers.documents import ROOT
from tests.helpers.hostile_files import write_hostile_files
from tests.helpers.scripts import SMALL, error_of
from tests.helpers.tiny import write_dataset, write_weights
from tools import weights as weights_command
from utils.entrypoint import run_main
from utils.files.checkpoint_file import read_checkpoint

KINDS = (
    "runs a command", "bare pickle that runs a command", "huge tensor", "huge tensor, safetensors",
    "huge header, safetensors", "truncated", "zip bomb", "not a checkpoint",
)  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """A tiny data set, an own checkpoint with its classes."""
    root = tmp_path_factory.mktemp("world")
    write_dataset(root / "set", train=8, val=3)
    write_weights(root / "own.pt", ["light", "dark"], seed=3)
    return root


def commands(world: Path, weights: Path | str, out: Path) -> dict[str, tuple]:
    data = str(world / "set" / "data.yaml")
    return {
        "train": (train.main, "--data", data, "--weights", weights, "--project", out, *SMALL),
        "val": (val.main, "--data", data, "--weights", weights, "--project", out, "--device", "cpu", "--workers", "0"),
        "detect": (detect.main, "--source", world / "set" / "images" / "val", "--weights", weights, "--project", out),
        "weights": (weights_command.main, weights, out / "converted.safetensors"),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_hostile_file_is_refused_in_one_line_by_every_script(world, tmp_path, capsys, kind):
    marker = tmp_path / "ran"
    path, message = write_hostile_files(tmp_path, marker)[kind]
    for name, command in commands(world, path, tmp_path / "out").items():
        line = error_of(capsys, *command)
        assert line.startswith(f"error: {path}: "), (name, line)
        assert message in line, name
    if kind == "zip bomb":
        assert message in error_of(capsys, train.main, "--resume", path)
    assert not marker.exists()
    assert not list((tmp_path / "out").rglob("*.pt"))


@pytest.mark.parametrize("script", ["train", "val", "detect", "weights"])
def test_an_uncached_name_with_offline_is_one_line(world, tmp_path, capsys, script):
    line = error_of(capsys, *commands(world, "yolo26n", tmp_path)[script], "--offline")
    assert "yolo26n: not on this machine, and --offline is set; put https://github.com/" in line
    assert line.endswith("lockstep/weights/yolo26n.pt")


def test_a_named_file_in_the_cache_needs_no_network(world, tmp_path, capsys, monkeypatch):
    """Named as in the catalog and found where a download would have stored it."""
    folder = tmp_path / "cache" / "lockstep" / "weights"
    folder.mkdir(parents=True)
    (folder / "yolo26n.pt").write_bytes((world / "own.pt").read_bytes())
    run_main(weights_command.main, ["yolo26n", str(tmp_path / "new.pt"), "--offline"])
    assert "2 classes" in capsys.readouterr().out


def test_training_without_model_uses_the_model_of_the_weights(world, tmp_path, capsys):
    command = commands(world, world / "own.pt", tmp_path)["train"]
    run_main(command[0], [*map(str, command[1:]), "--epochs", "1"])
    out = capsys.readouterr().out
    assert f"{world / 'own.pt'}: " in out
    assert "tensors loaded" in out
    content = read_checkpoint(tmp_path / "exp" / "last.pt")
    assert content["model_spec"] == read_checkpoint(world / "own.pt")["model_spec"]


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_converting_keeps_the_detector(world, tmp_path, capsys, suffix):
    run_main(weights_command.main, [str(world / "own.pt"), str(tmp_path / f"new{suffix}")])
    assert "2 classes, strides 8, 16, 32" in capsys.readouterr().out
    before, after = load_detector(world / "own.pt"), load_detector(tmp_path / f"new{suffix}")
    assert (after[0].names, after[0].spec, after[1]["imgsz"]) == (before[0].names, before[0].spec, 64)
    images = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    assert all(torch.equal(a, b) for a, b in zip(before[0](images), after[0](images)))
    if suffix == ".pt":
        torch.load(tmp_path / "new.pt", weights_only=True)
    command = commands(world, tmp_path / f"new{suffix}", tmp_path)["val"]
    run_main(command[0], [*map(str, command[1:]), "--imgsz", "64", "--noplots"])
    assert "AP" in capsys.readouterr().out


def test_the_documentation_shows_the_catalog():
    expected = []
    for name, content in yaml.safe_load(CATALOG.read_text()).items():
        size = f"{content['size'] / 1e6:.1f}" if "size" in content else "-"
        expected.append([name, content["license"], size, f"{content['ap']:.1f}"])
    permissive = [license in ("Apache-2.0", "MIT") for _, license, _, _ in expected]
    assert permissive == sorted(permissive, reverse=True)
    assert sum(permissive) == 10
    page = (ROOT / "docs" / "models.md").read_text()
    found = [
        row.split(" | ") for row in re.findall(r"^\| ((?:yolo[\w.-]+ )+\| \S+ \| [\d. -]+ \| [\d. ]+) \|$", page, re.M)
    ]
    split = [(names.split(), license, sizes.split(), aps.split()) for names, license, sizes, aps in found]
    assert [
        [n, license, s, ap] for names, license, *rest in split for n, s, ap in zip(names, *rest, strict=True)
    ] == expected


def test_impossible_conversions_are_one_line(world, tmp_path, capsys):
    line = error_of(capsys, weights_command.main, world / "own.pt", tmp_path / "new.onnx")
    assert "new.onnx: must end in .safetensors or .pt" in line
    assert "source and target are the same file" in error_of(
        capsys, weights_command.main, world / "own.pt", world / "own.pt"
    )
    torch.save({"elsewhere.weight": torch.zeros(2)}, tmp_path / "other.pt")
    (tmp_path / "kept.pt").write_text("the best of last week")
    refusal = error_of(capsys, weights_command.main, world / "own.pt", tmp_path / "kept.pt")
    assert refusal.endswith("kept.pt: exists already; choose another name, or remove it")
    assert "match no known model" in error_of(capsys, weights_command.main, tmp_path / "other.pt", tmp_path / "o2.pt")
    run_main(weights_command.main, [str(tmp_path / "other.pt"), str(tmp_path / "other.safetensors")])
    assert "1 tensor written to" in capsys.readouterr().out
