"""Changed checkpoints and safetensors files: refused, or the tensors that were saved."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
import random
import struct
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch

from engine.train.checkpoint import Checkpoint, DataIdentity
from engine.train.resume import continue_at, merge_settings
from models.weights.load import load_detector
from models.weights.read import read_weights
from tests.helpers.hostile_files import opcode_call, tensor_program, zip_around
from tests.helpers.same_content import assert_same_content
from tests.robustness.fuzzing import inputs
from tests.robustness.fuzzing.inputs import change_bytes
from tests.robustness.fuzzing.targets.case import REFUSED, Case
from utils.config.settings import TrainConfig
from utils.files.torch_file import read_checkpoint, read_safetensors


def checkpoints(case: Case) -> str:
    """A damaged checkpoint is refused, or gives what was saved. A hostile one, or one with replaced values, may do no
    worse than be refused."""
    rng = case.rng
    files = case.world.checkpoints
    kind = case.rng.random()
    is_damage = kind < 0.6
    path = case.folder / ("last.pt" if 0.6 <= kind < 0.85 else rng.choice(list(files)))
    if is_damage:
        case.write(path, change_bytes(files[path.name], rng, [d for n, d in files.items() if n != path.name]))
    else:
        case.files.append(path)
        write = write_other_values if kind < 0.85 else functools.partial(write_hostile, original=files[path.name])
        case.messages.append(f"{path.name}: {write(path, rng, case.world.last)}")
    own = case.attempt(lambda: read_checkpoint(path)) if path.name != "foreign.pt" else None
    if path.name == "last.pt":
        case.attempt(lambda: resume(path))
    original = case.folder / "original.pt"
    original.write_bytes(files[path.name])
    if is_damage and own not in (None, REFUSED):
        assert_same_content(own, read_checkpoint(original))
    stored = read_weights(path)
    if is_damage:
        assert_same_content(stored.tensors, read_weights(original).tensors)
    load_detector(path)
    return "what was saved" if is_damage else "loaded"


def resume(path: Path) -> None:
    """Does what --resume does with a checkpoint before anything is built."""
    checkpoint = Checkpoint.read(path)
    config, _ = merge_settings(checkpoint.description.config, TrainConfig(batch_size=4), ("batch_size",), path)
    identity = DataIdentity(train_labels="a", val_labels="b")
    continue_at(checkpoint, config, epoch_batches=1, identity=identity)


def write_other_values(path: Path, rng: random.Random, last: dict[str, Any]) -> str:
    """Writes a checkpoint with another plain value, or other tensors."""
    of_tensors = ("model", "ema", "optimizer", "scaler", "rank_buffers")
    plain = json.dumps({key: value for key, value in last.items() if key not in of_tensors}).encode()
    while True:
        changed, what = inputs.change_json(plain, rng)
        with contextlib.suppress(ValueError, RecursionError):
            tree = json.loads(changed)
            break
    if isinstance(tree, dict):
        tree |= {key: last[key] for key in of_tensors if key in last and rng.random() < 0.95}
        if rng.random() < 0.2:
            key = rng.choice([k for k in of_tensors[:4] if last.get(k)])
            tree[key], what = other_tensors(last[key], rng)
    with contextlib.suppress(RecursionError):
        torch.save(tree, path)
    return what


def other_tensors(held: dict[str, Any], rng: random.Random) -> tuple[Any, str]:
    held = dict(held)
    key = rng.choice(list(held))
    odd = (None, 5, "x", [], {}, torch.zeros(0), torch.zeros(3, 3), torch.full((8, 3, 3, 3), math.nan), -1, [None],
           torch.zeros(8, dtype=torch.int64), torch.zeros(2, dtype=torch.complex64), 2**70, {"x": torch.zeros(1)},
           torch.sparse_coo_tensor(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1), (8,)))  # fmt: skip
    if rng.random() < 0.2:
        del held[key]
        return held, f"no {key}"
    number = rng.randrange(len(odd))
    held[key] = odd[number]
    return held, f"{key} is odd value {number}"


def write_hostile(path: Path, rng: random.Random, _: dict[str, Any], *, original: bytes) -> str:
    """Writes a program in place of a checkpoint, false sizes of a tensor, or entries that were changed with care."""
    kind = rng.randrange(6)
    if kind == 0:
        where = rng.choice([("os", "system"), ("builtins", "eval"), ("torch", "load"), ("torch.nn", "Linear"),
                            ("torch._utils", "_rebuild_tensor_v2"), ("torch", "Size"), ("x", "y"),
                            ("torch.serialization", "load"), ("collections", "OrderedDict")])  # fmt: skip
        zip_around(opcode_call(*where, "true"), path)
        return f"calls {'.'.join(where)}"
    if kind == 1:
        numbers = [rng.choice((0, 1, 2, 6, 7, 2**31, 2**40, 2**62, -1, -(2**40))) for _ in range(4)]
        zip_around(tensor_program((numbers[0],), (numbers[1],), numbers[2], numbers[3]), path, **{"0": bytes(24)})
        return f"a tensor of {numbers}"
    with zipfile.ZipFile(io.BytesIO(original)) as archive:
        entries = {e.filename: archive.read(e) for e in archive.infolist()}
    program = next(n for n in entries if n.endswith("data.pkl"))
    chosen = program if rng.random() < 0.75 else rng.choice(list(entries))
    what = "is missing"
    if kind in (2, 3, 4):  # with a true checksum
        entries[chosen], what = change_bytes(entries[chosen], rng)
    else:
        entries.pop(chosen)
    compression = rng.choice((zipfile.ZIP_STORED,) * 4 + (zipfile.ZIP_DEFLATED,))
    with warnings.catch_warnings(), zipfile.ZipFile(path, "w", compression) as archive:
        warnings.simplefilter("ignore")  # two entries of a name
        for name, data in entries.items():
            for _ in range(2 if kind == 4 and name == chosen else 1):
                archive.writestr(name, data)
    return f"{chosen} {what}"


def safetensors(case: Case) -> str:
    """A changed safetensors file is refused, or gives the tensors that a plain reader finds in it."""
    files = case.world.safetensors
    path = case.folder / case.rng.choice(list(files))
    path.write_bytes(files[path.name])
    case.change(path, 0.4, [data for name, data in files.items() if name != path.name])
    found = case.attempt(lambda: read_safetensors(path))
    if found is not REFUSED:
        compare_tensors(found[0], path.read_bytes())
    load_detector(path)
    assert found is not REFUSED
    return "the tensors that it holds"


def compare_tensors(tensors: dict[str, torch.Tensor], data: bytes) -> None:
    dtypes = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "U8": "uint8", "I64": "int64",
              "I32": "int32", "I16": "int16", "I8": "int8", "BOOL": "bool"}  # fmt: skip
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    assert header.keys() == tensors.keys()
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        raw = tensors[name].contiguous().flatten().view(torch.uint8).numpy().tobytes() if end > begin else b""
        assert raw == data[8 + length + begin : 8 + length + end], name
        assert list(tensors[name].shape) == entry["shape"]
        assert str(tensors[name].dtype) == f"torch.{dtypes[entry['dtype']]}"
