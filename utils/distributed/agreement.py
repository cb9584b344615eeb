"""What the processes of a run must have in common, compared before it matters."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from utils.config.settings import SCOPES, TrainConfig, ValConfig
from utils.distributed.context import DistributedContext, all_objects
from utils.errors import PeerFailure, UserError
from utils.program_folders import PROJECT
from utils.strings import rank_list

CODE_FOLDERS = ("utils", "data", "models", "engine", "scripts")  # "scripts" exists in the installed package only
_MAX_SHOWN_CHARACTERS = 60


def check_agreement(ctx: DistributedContext, facts: Mapping[str, object]) -> None:
    """Raises UserError on rank 0 and PeerFailure on the others if ``facts`` differ between processes: collectives would
    hang, or training would produce wrong weights. Every process must call this. Facts are JSON-serializable; their keys
    are their names in messages."""
    facts_by_rank = all_objects(ctx, {name: _shown(value) for name, value in facts.items()})
    differences: list[str] = []
    for name in facts_by_rank[0]:
        ranks_by_value: dict[str, list[int]] = {}
        for rank, rank_facts in enumerate(facts_by_rank):
            ranks_by_value.setdefault(str(rank_facts.get(name)), []).append(rank)
        if len(ranks_by_value) > 1:
            values = [f"{value} on {rank_list(ranks)}" for value, ranks in ranks_by_value.items()]
            differences.append(f"{name} is {', but '.join(values)}")
    if differences:
        error_type = UserError if ctx.is_main else PeerFailure
        raise error_type(f"the processes of this run differ: {'; '.join(differences)}")


def _shown(value: object) -> str:
    """Returns the value as JSON, shortened to its beginning and a digest if it is long."""
    text = json.dumps(value, sort_keys=True, default=str)
    if len(text) <= _MAX_SHOWN_CHARACTERS:
        return text
    return f"{text[: _MAX_SHOWN_CHARACTERS // 2]}... ({hashlib.blake2b(text.encode(), digest_size=4).hexdigest()})"


def check_same_start(ctx: DistributedContext, config: TrainConfig | ValConfig) -> None:
    """Raises UserError if the processes differ in flags, code or torch version. Called before anything else is opened.
    Flags of the machine may differ; whether ``--stage`` is given may not."""
    if ctx.world_size == 1:
        return
    facts: dict[str, object] = {**program_facts(), "the device's type": ctx.device.type}
    facts |= {f"--{name.replace('_', '-')}": v for name, v in asdict(config).items() if name not in SCOPES["machine"]}
    facts["--stage"] = "given" if config.stage else "not given"
    check_agreement(ctx, facts)


def program_facts() -> dict[str, str]:
    """Returns what all processes of a run must have in common to compute the same, by its name in messages."""
    return {"the code": product_version(), "torch": str(torch.__version__)}


def check_same_model(ctx: DistributedContext, model: Any, from_files: Iterable[Tensor]) -> None:
    """Raises UserError if the processes differ in their models, or in the weights ``from_files`` that they read.
    ``model``: has the attributes ``names`` and ``spec`` of a `models.detector.Detector`."""
    if ctx.world_size == 1:
        return
    facts: dict[str, object] = {"the class names": list(model.names), "the model": model.spec}
    facts["the checksum of the starting weights"] = sum(_checksum(tensor) for tensor in from_files)
    check_agreement(ctx, facts)


def _checksum(tensor: Tensor) -> int:
    """Sums the bits as integers, so that the result does not depend on the order of addition."""
    flat = tensor.detach().reshape(-1)
    return int(flat.view(torch.int32 if flat.element_size() == 4 else torch.uint8).sum(dtype=torch.int64))


def product_version() -> str:
    """Returns a digest of the source files that determine a result, so not of tools, as 12 hex digits. In the installed
    package, the modules of the Python interface lie beside these files, and count too."""
    digest = hashlib.blake2b(digest_size=6)
    files = [*PROJECT.glob("*.py"), *(path for package in CODE_FOLDERS for path in (PROJECT / package).rglob("*.py"))]
    for path in sorted(files):
        digest.update(path.relative_to(PROJECT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
