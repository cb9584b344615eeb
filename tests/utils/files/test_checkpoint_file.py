"""Checkpoint files that are damaged, foreign, or replaced while they are read."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path

import pytest
import torch

from tests.helpers.messages import refused
from utils.files.checkpoint_file import read_checkpoint, write_checkpoint


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing", "x.pt: no such checkpoint"),
        ("device", "x.pt: cannot be read (is a pipe or device, not a file)"),
        ("empty", "x.pt: truncated, or not a PyTorch checkpoint (zip format, torch >= 1.6)"),
        ("truncated", "x.pt: truncated, or not a PyTorch checkpoint (zip format, torch >= 1.6)"),
        ("text", "x.pt: truncated, or not a PyTorch checkpoint (zip format, torch >= 1.6)"),
        ("pickle", "x.pt: truncated, or not a PyTorch checkpoint (zip format, torch >= 1.6)"),
        ("foreign zip", "x.pt: not a checkpoint of this program"),
        ("newer", "x.pt: written by a newer version (format 99); update this program"),
    ],
)
def test_bad_checkpoints_are_one_line(tmp_path, kind, message):
    path = tmp_path / "x.pt"
    contents = {"empty": b"", "text": b"hello", "pickle": pickle.dumps({"a": 1})}
    if kind == "truncated":
        write_checkpoint({"x": torch.zeros(1000)}, path)
        path.write_bytes(path.read_bytes()[:-500])
    elif kind in contents:
        path.write_bytes(contents[kind])
    elif kind == "device":
        path.symlink_to("/dev/null")
    elif kind != "missing":
        torch.save({"a": Path("x")} if kind == "foreign zip" else {"format": "lockstep", "version": 99}, path)
    with refused(message):
        read_checkpoint(path)


@pytest.mark.parametrize("moment", ["infolist", "testzip"])
def test_a_file_that_is_replaced_while_it_is_read_is_read_as_it_was(tmp_path, monkeypatch, moment):
    """val.py may read last.pt just when the training process writes it."""
    path = tmp_path / "last.pt"
    write_checkpoint({"epoch": 1, "x": torch.ones(1000)}, path)
    original = getattr(zipfile.ZipFile, moment)

    def replace_before(archive):
        write_checkpoint({"epoch": 2}, path)
        return original(archive)

    monkeypatch.setattr(zipfile.ZipFile, moment, replace_before)
    content = read_checkpoint(path)
    monkeypatch.undo()
    assert content["epoch"] == 1
    assert content["x"].sum() == 1000
    assert read_checkpoint(path)["epoch"] == 2


def test_an_entry_that_is_marked_as_a_folder_or_follows_other_bytes_is_refused(tmp_path):
    """torch would take a folder's tensor for whatever lies in the memory, although its checksum is right, and read a
    copy before the archive, whose checksums are not verified."""
    path = tmp_path / "last.pt"
    write_checkpoint({"x": torch.arange(50)}, path)
    whole = bytearray(path.read_bytes())
    path.write_bytes(whole * 2)
    with refused("last.pt: refused: there is data before the archive"):
        read_checkpoint(path)
    header = whole.rindex(b"PK\1\2", 0, whole.index(b"/data/0", whole.index(b"PK\1\2")))
    for offset, value in ((38, 0x10), (46, 0)):  # external attributes; the first letter of the name
        damaged = whole.copy()
        damaged[header + offset] = value
        path.write_bytes(damaged)
        with refused("last.pt: refused: it holds folders or entries without a name"):
            read_checkpoint(path)


def test_a_flipped_bit_is_refused(tmp_path):
    """torch does not verify the checksums in its files."""
    path = tmp_path / "last.pt"
    weight = torch.randn(4, 3, 3, 3)
    write_checkpoint({"model": {"w": weight}}, path)
    data = bytearray(path.read_bytes())
    data[bytes(data).index(weight.numpy().tobytes())] ^= 1
    path.write_bytes(data)
    with refused("last.pt: damaged checkpoint (the checksum of its entry archive/data/0 is wrong)"):
        read_checkpoint(path)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        ("x", "x.pt: damaged checkpoint: model: w: must be Tensor, got 'x'"),
        (None, "x.pt: damaged checkpoint: model: w: must be Tensor, got None"),
        ({}, "x.pt: damaged checkpoint: model: w: must be Tensor, got {}"),
        (
            torch.zeros(2, 2).to_sparse(),
            "x.pt: refused: a tensor is of a kind that no detector has (torch._utils._rebuild_sparse_tensor)",
        ),
    ],
)
def test_weights_that_are_not_tensors_are_refused(tmp_path, weight, message):
    write_checkpoint({"model": {"w": weight}}, tmp_path / "x.pt")
    with refused(message):
        read_checkpoint(tmp_path / "x.pt")
