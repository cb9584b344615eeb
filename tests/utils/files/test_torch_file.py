"""Files of PyTorch: ours come back as they were, foreign ones run no code, and others are refused in one line."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers.hostile_files import Touch, opcode_call, tensor_program, zip_around
from tests.helpers.messages import refused
from tests.helpers.same_content import assert_same_content
from utils.errors import UserError
from utils.files.torch_file import (
    StandIn,
    is_safetensors,
    read_any,
    read_checkpoint,
    read_safetensors,
    write_checkpoint,
    write_safetensors,
)


def test_our_content_keeps_types_strides_and_what_is_shared(tmp_path):
    base = torch.arange(24, dtype=torch.float16).view(2, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    values = ["a", (1, 2.5, None, True, -(2**62)), {}]
    stored = {"x": base, "part": base[:1], "again": base, "empty": torch.zeros(0, 3), "values": values, "more": values}
    stored |= {str(dtype): torch.ones(3).to(dtype) for dtype in (torch.bfloat16, torch.int8, torch.bool, torch.float64)}
    write_checkpoint(stored, tmp_path / "x.pt")
    found = read_checkpoint(tmp_path / "x.pt")
    assert_same_content(found, torch.load(tmp_path / "x.pt", weights_only=True))
    assert_same_content(read_any(tmp_path / "x.pt"), found)
    assert [found[key].stride() for key in ("x", "part")] == [base.stride(), base[:1].stride()]
    found["x"].zero_()
    assert not found["part"].any()
    assert read_checkpoint(tmp_path / "x.pt")["x"].any()  # the file has not changed


@pytest.mark.parametrize(
    "kind", ["missing", "device", "empty", "truncated", "text", "pickle", "foreign object", "torchscript", "newer"]
)
def test_other_files_are_refused_in_one_line(tmp_path, kind):
    path = tmp_path / "x.pt"
    contents = {"empty": b"", "text": b"hello", "pickle": pickle.dumps({"a": 1})}
    if kind == "truncated":
        write_checkpoint({"x": torch.zeros(1000)}, path)
        path.write_bytes(path.read_bytes()[:-500])
    elif kind in contents:
        path.write_bytes(contents[kind])
    elif kind == "device":
        path.symlink_to("/dev/null")
    elif kind == "torchscript":
        torch.jit.save(torch.jit.script(torch.nn.ReLU()), path)
        assert isinstance(read_any(path), StandIn)  # `torch.load` would run it
    elif kind != "missing":
        torch.save({"a": Path("x")} if kind == "foreign object" else {"format": "lockstep", "version": 99}, path)
    with pytest.raises(UserError) as error:
        read_checkpoint(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_is_replaced_while_it_is_read_is_read_as_it_was(tmp_path, monkeypatch):
    """val.py may read last.pt just when the training process writes it."""
    path = tmp_path / "last.pt"
    write_checkpoint({"epoch": 1, "x": torch.ones(1000)}, path)
    original = torch.UntypedStorage.from_file

    def replace_before(*arguments):  # between the two times that torch opens the file
        write_checkpoint({"epoch": 2, "y": torch.zeros(3)}, path)
        return original(*arguments)

    monkeypatch.setattr(torch.UntypedStorage, "from_file", replace_before)
    content = read_checkpoint(path)
    monkeypatch.undo()
    assert (content["epoch"], float(content["x"].sum())) == (1, 1000)
    assert read_checkpoint(path)["epoch"] == 2


def test_a_flipped_bit_is_refused(tmp_path):
    """torch does not verify the checksums in its files."""
    path = tmp_path / "last.pt"
    weight = torch.randn(4, 3, 3, 3)
    write_checkpoint({"model": {"w": weight}}, path)
    data = bytearray(path.read_bytes())
    data[bytes(data).index(weight.numpy().tobytes())] ^= 1
    path.write_bytes(data)
    for read in (read_checkpoint, read_any):
        with pytest.raises(UserError, match=r"last.pt: damaged"):
            read(path)


def test_weights_that_are_not_tensors_are_refused(tmp_path):
    write_checkpoint({"model": {"w": "x"}}, tmp_path / "x.pt")
    with refused("x.pt: damaged checkpoint: model: w: ..."):
        read_checkpoint(tmp_path / "x.pt")


@pytest.mark.parametrize("function", ["os.system", "builtins.eval", "__builtin__.exec", "torch.hub.load", "trap.go"])
def test_code_in_a_pickle_does_not_run_and_names_are_not_imported(tmp_path, monkeypatch, function):
    marker = tmp_path / "touched"
    pickle.loads(pickle.dumps(Touch((os.system, (f"touch '{marker}'",)))))
    marker.unlink()  # the attack is real
    (tmp_path / "trap.py").write_text(f"open({str(marker)!r}, 'w')\ndef go(x): open({str(marker)!r}, 'w')\n")
    monkeypatch.syspath_prepend(tmp_path)
    module, _, name = function.rpartition(".")
    found = read_any(zip_around(opcode_call(module, name, f"touch '{marker}'"), tmp_path / "evil.pt"))
    assert isinstance(found, StandIn)
    assert (found.kind, found.args) == (function, (f"touch '{marker}'",))
    with pytest.raises(UserError):
        read_checkpoint(tmp_path / "evil.pt")
    assert not marker.exists()
    assert "trap" not in sys.modules


def test_a_pickle_cannot_change_how_the_next_file_is_read(tmp_path):
    """BUILD sets attributes of whatever is on the stack, also of a function that rebuilds tensors, or of a class."""
    for kind in ("torch._utils\n_rebuild_tensor_v2", "collections\nOrderedDict", "torch\nSize", "x\ny"):
        state = b"N}X\x07\x00\x00\x00__new__cbuiltins\neval\nsX\x0c\x00\x00\x00__defaults__Ns\x86b"
        zip_around(b"\x80\x02c" + kind.encode() + b"\n" + state + b".", tmp_path / "evil.pt")
        try:
            read_any(tmp_path / "evil.pt")
        except UserError:
            pass
    stored = {"w": torch.arange(4.0), "size": torch.Size([1, 2])}
    torch.save(stored, tmp_path / "sound.pt")
    assert_same_content(read_any(tmp_path / "sound.pt"), {**stored, "size": (1, 2)})


@pytest.mark.parametrize(
    "lie",
    [
        {"size": (2**40,), "stride": (1,), "count": 2**40},
        {"size": (2,), "stride": (-1,), "count": 6},
        {"size": (2, 2), "stride": (1,), "count": 6},
        {"size": (2,), "stride": (1,), "count": 6, "key": "../0"},
        {"size": (2,), "stride": (1,), "count": 6, "offset": -1},
    ],
)
def test_a_tensor_outside_its_storage_is_refused(tmp_path, lie):
    path = zip_around(tensor_program(**lie), tmp_path / "lie.pt", **{"0": bytes(24)})
    for read in (read_any, read_checkpoint):
        with pytest.raises(UserError, match=r"lie[.]pt: "):
            read(path)


def test_safetensors_come_back_whatever_their_path(tmp_path):
    base = torch.rand(4, 4)
    tensors = {str(dtype): torch.ones(2, 3).to(dtype) for dtype in (torch.bfloat16, torch.float16, torch.int64)}
    tensors |= {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 4), "strided": base[::2], "shared": base[1:]}
    path = tmp_path / "folder \udce9" / "x.safetensors"
    path.parent.mkdir()
    write_safetensors(path, tensors, {"key": "value"})
    assert is_safetensors(path)
    found, metadata = read_safetensors(path)
    assert_same_content(found, tensors)
    assert metadata == {"key": "value"}
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(UserError, match="not a safetensors file"):
        read_safetensors(path)
