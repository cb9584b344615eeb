"""Checks that all processes of a run have the same settings, code, model and data, by comparing them on the store.

If processes disagree about sizes, collectives hang or mix up what they gather; if they disagree about numbers, training
ends without an error and with wrong weights.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from utils.config.settings import Hyperparameters, TrainConfig, ValConfig
from utils.distributed.context import DistributedContext
from utils.distributed.store_barrier import StoreBarrier
from utils.errors import PeerFailure, UserError
from utils.files.folders import PROJECT
from utils.strings import rank_list

_PACKAGES = ("utils", "data", "models", "engine", "scripts")  # "scripts": of the installed package
_LISTED_FACTS, _SHOWN_CHARACTERS = 4, 60
_LINGER_S = 5.0
# Settings of a process or its machine: they change neither the numbers nor which processes wait for each other.
MAY_DIFFER = frozenset(("device", "workers", "stage", "cache_dir", "offline", "spawn"))
# Of hyper-parameters: their values are compared, not where they come from.
_SOURCES = frozenset(("hyp", "override"))


def check_agreement(ctx: DistributedContext, title: str, facts: Mapping[str, object]) -> None:
    """Compares ``facts`` between all processes. Every process must call this.

    Args:
        title: the name of this comparison, the same on all processes. If it is used again, all processes must do so.
        facts: what must be equal on all processes, JSON-serializable, by its name in messages.

    Raises:
        UserError: on the first process, if they differ; names each differing fact, its values and their ranks.
        PeerFailure: on the others, if they differ.
    """
    if not ctx.is_distributed or ctx.world_size == 1:
        return
    assert ctx.store is not None
    title = f"{title}/{ctx.store.add(f'agreement/{title}/turns/{ctx.rank}', 1)}"  # keys of another turn are not read
    local = {name: _shown(value) for name, value in facts.items()}
    names = [f"process {rank}" for rank in range(ctx.world_size)]
    with StoreBarrier(ctx.store, f"agreement/{title}", rank=ctx.rank, names=names) as barrier:
        if ctx.is_main:
            ctx.store.set(f"agreement/{title}/0", json.dumps(local))
        barrier.wait_all()
        first = json.loads(ctx.store.get(f"agreement/{title}/0"))
        different = {name: local.get(name) for name in {**first, **local} if local.get(name) != first.get(name)}
        if different:
            number = ctx.store.add(f"agreement/{title}/different", 1)
            ctx.store.set(f"agreement/{title}/different/{number}", json.dumps([ctx.rank, different]))
        barrier.wait_all()
        count = ctx.store.add(f"agreement/{title}/different", 0)
        notes = [json.loads(ctx.store.get(f"agreement/{title}/different/{n + 1}")) for n in range(count)]
    if not notes:
        return
    text = f"the processes of this run differ: {_describe(first, sorted(notes))}"
    if not ctx.is_main:
        ctx.store.add(f"agreement/{title}/read", 1)
        raise PeerFailure(text)
    # This process may host the store that the others still read from.
    deadline = time.monotonic() + _LINGER_S
    while ctx.store.add(f"agreement/{title}/read", 0) < ctx.world_size - 1 and time.monotonic() < deadline:
        time.sleep(0.02)
    raise UserError(text)


def check_same_start(ctx: DistributedContext, config: TrainConfig | ValConfig) -> None:
    """Raises UserError on all processes when their flags, code or torch differ. Called before anything is opened."""
    facts = {"the code": product_version(), "torch": torch.__version__, "the device's type": ctx.device.type}
    facts |= {f"--{name.replace('_', '-')}": value for name, value in _compared(config).items()}
    facts["--stage"] = "given" if config.stage else "not given"
    check_agreement(ctx, "start", facts)


def check_same_run(
    ctx: DistributedContext, config: TrainConfig, hyp: Hyperparameters, progress: Mapping[str, Any] | None
) -> None:
    """Raises UserError on all processes when their settings or hyper-parameters, or the ``progress`` of the checkpoint
    that they resume from, differ."""
    facts: dict[str, object] = {f"setting {name}": value for name, value in _compared(config).items()}
    facts |= {f"hyper-parameter {name}": value for name, value in asdict(hyp).items()}
    facts["the checkpoint's progress"] = progress or "none"
    check_agreement(ctx, "run", facts)


def check_same_model(ctx: DistributedContext, model: nn.Module, from_files: Iterable[Tensor]) -> None:
    """Raises UserError on all processes when their models differ, or the weights ``from_files`` that they have read."""
    if ctx.world_size == 1:
        return
    facts: dict[str, object] = {"the class names": list(model.names), "the model": model.spec}
    facts["the checksum of the starting weights"] = sum(_checksum(tensor) for tensor in from_files)
    check_agreement(ctx, "model", facts)


def product_version() -> str:
    """A digest of this program's own source files: 12 hex digits."""
    digest = hashlib.blake2b(digest_size=6)
    files = [*PROJECT.glob("*.py"), *(path for package in _PACKAGES for path in (PROJECT / package).rglob("*.py"))]
    for path in sorted(files):
        digest.update(path.relative_to(PROJECT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _shown(value: object) -> str:
    """The value as text. A long text is replaced by its beginning and a digest."""
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
    if len(text) <= _SHOWN_CHARACTERS:
        return text or "empty"
    digest = hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=4).hexdigest()
    return f"{text[: _SHOWN_CHARACTERS // 2].encode('utf-8', 'replace').decode()}... ({digest})"


def _describe(first: Mapping[str, str], notes: Sequence[tuple[int, dict[str, str | None]]]) -> str:
    """One line with the value of each differing fact on rank 0, and the other values with their ranks."""
    ranks: dict[tuple[str, str], list[int]] = {}
    for rank, different in notes:
        for name, value in different.items():
            ranks.setdefault((name, str(value)), []).append(rank)
    lines: dict[str, list[str]] = {}
    for (name, value), holders in ranks.items():
        lines.setdefault(name, []).append(f"{value} on {rank_list(holders)}")
    parts = [f"{name} is {first.get(name)} on rank 0, {', '.join(others)}" for name, others in lines.items()]
    more = f"; and {len(parts) - _LISTED_FACTS} more" if len(parts) > _LISTED_FACTS else ""
    return "; ".join(parts[:_LISTED_FACTS]) + more


def _compared(config: TrainConfig | ValConfig) -> dict[str, Any]:
    return {name: value for name, value in asdict(config).items() if name not in MAY_DIFFER | _SOURCES}


def _checksum(tensor: Tensor) -> int:
    """The sum of the bits as integers, which does not depend on the order of addition."""
    flat = tensor.detach().reshape(-1)
    return int(flat.view(torch.int32 if flat.element_size() == 4 else torch.uint8).sum(dtype=torch.int64))
