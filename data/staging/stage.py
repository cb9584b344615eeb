"""``--stage DIR``: the data set on each node's own disk, its shared file system read once in all.

The run's first process lists the data set. Each node's first process (its leader) says what its disk already holds and
reads its share of the rest, and the leaders send each other what they read (`file_exchange`). The nodes' other
processes wait for their leader. An interrupted copy is continued by the next start; a complete one costs the listing.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch.distributed as dist

from data.index.dataset_yaml import DatasetSpec, load_dataset_spec
from data.labels.findings import relative_name
from data.staging.copy import NODE_NOTE, StageCopy
from data.staging.plan import StagePlan, is_under, plan_stage
from utils.distributed.collectives import torch_distributed_zero_first
from utils.distributed.context import DistributedContext
from utils.distributed.file_exchange import Piece, exchange_items
from utils.distributed.groups import Subgroup, one_per_node_group
from utils.distributed.store_barrier import StoreBarrier
from utils.errors import UserError
from utils.logger import get_logger, progress


def stage_dataset(
    source: str,
    folder: str,
    splits: Sequence[str],
    ctx: DistributedContext,
    *,
    chunk_bytes: int | None = None,
    known_root: str = "",
) -> DatasetSpec:
    """The data set ``source`` as it is in its copy below ``folder``, which is made or completed first.

    Call it on every process of the run.

    Args:
        source: a data set YAML; the run's first process alone opens it.
        folder: on this node's disk; ``{node_rank}`` in it stands for the node's number. Nodes may name different ones.
        splits: which to copy.
        ctx: this process among the others.
        chunk_bytes: of what the leaders send each other at a time; None: 1 to 16 MiB.
        known_root: see `load_dataset_spec`.

    Returns:
        the data set with the copy's root and splits. Its ``source`` is the original YAML.

    Raises:
        UserError: the data set cannot be read, the disk is too small or cannot be written, two nodes share ``folder``.
    """
    if source == "demo":
        raise UserError("--stage copies from a shared disk; every node renders the demo set on its own: leave it out")
    leaders = one_per_node_group(ctx)
    place = Path(folder.replace("{node_rank}", str(ctx.node_rank))).expanduser().absolute()
    with torch_distributed_zero_first(ctx):
        if not ctx.is_node_leader:
            assert ctx.store is not None
            yaml = ctx.store.get(f"stage/{ctx.node_rank}/{splits}").decode("utf-8", "surrogateescape")
        else:
            names = [f"node {n}" for n in range(leaders.group_size)]
            title = f"stage/{leaders.handle.group_name}" if leaders.handle else ""
            with StoreBarrier(ctx.store, title, rank=leaders.local_group_rank, names=names) as barrier:
                yaml = str(_Leader(barrier, leaders, ctx.is_main, known_root).stage(source, place, splits, chunk_bytes))
            if ctx.store is not None:
                ctx.store.set(f"stage/{ctx.node_rank}/{splits}", yaml.encode("utf-8", "surrogateescape"))
        return dataclasses.replace(load_dataset_spec(yaml), source=source)


@dataclass(frozen=True)
class _Leader:
    """The first process of a node, among those of the other nodes."""

    barrier: StoreBarrier
    group: Subgroup
    shows: bool  # progress
    known_root: str

    def stage(self, source: str, place: Path, splits: Sequence[str], chunk_bytes: int | None) -> Path:
        """The YAML of this node's complete copy."""
        plan, token = self._from_first(
            lambda: (plan_stage(load_dataset_spec(source, self.known_root), splits), secrets.token_hex(8)),
        )
        if is_under(relative_name(place / plan.key, plan.spec.root), plan.folders):
            raise UserError(f"--stage: {place} is inside the data set; name a folder outside it")
        copy = StageCopy(place / plan.key, plan)
        self._check_places_differ(copy.folder, token)
        with copy.lock(patient=self.group.group_size == 1):
            own = copy.held(show_progress=self.shows)
            held = self._share_held(own)
            missing = int((~held.all(axis=0)).sum())
            copy.check_space(~own)
            self.barrier.wait_all()
            self._say(copy, held, missing)
            if not own.all():
                copy.begin()
            pieces = exchange_items(
                plan.sizes, held, copy.loader(own), barrier=self.barrier, group=self.group, chunk_bytes=chunk_bytes
            )
            files = self._written(copy, own, pieces)
            for _ in progress(files, desc="staging", total=missing, enabled=self.shows and missing > 0):
                pass
            copy.finish()
            self.barrier.wait_all()
        return copy.yaml

    def _from_first(self, make: Callable[[], tuple[StagePlan, str]]) -> tuple[StagePlan, str]:
        """What ``make`` returns on the run's first node, on all; the others wait as long as it takes."""
        box = [make() if self.group.local_group_rank == 0 else None]
        self.barrier.wait_all()
        if self.group.group_size > 1:
            dist.broadcast_object_list(box, src=self.group.group_rank_base, group=self.group.handle)
        assert box[0] is not None
        return box[0]

    def _check_places_differ(self, folder: Path, token: str) -> None:
        """Two nodes in one folder would copy the data set onto the shared disk that it is on already."""
        if self.group.group_size == 1:
            return
        notes = [folder / f"{NODE_NOTE}{n}-{token}" for n in range(self.group.group_size)]
        own = self.group.local_group_rank
        try:
            notes[own].touch()
            self.barrier.wait_all()
            others = [n for n, note in enumerate(notes) if n != own and note.exists()]
            self.barrier.wait_all()
        finally:
            notes[own].unlink(missing_ok=True)
        if others:
            raise UserError(
                f"--stage: {folder.parent} is the same folder on nodes {min(own, *others)} and {max(own, *others)}; "
                "name a disk of each node's own, or use {node_rank} in the name"
            )

    def _share_held(self, own: np.ndarray) -> np.ndarray:
        """What each node has, bool (N, F)."""
        self.barrier.wait_all()
        if self.group.group_size == 1:
            return own[None]
        packed: list[np.ndarray] = [np.empty(0)] * self.group.group_size
        dist.all_gather_object(packed, np.packbits(own), group=self.group.handle)
        return np.stack([np.unpackbits(bits, count=len(own)).astype(bool) for bits in packed])

    def _say(self, copy: StageCopy, held: np.ndarray, missing: int) -> None:
        if not self.shows:
            return
        if not missing:
            get_logger().info("--stage: %d files are complete in %s", held.shape[1], copy.folder)
            return
        total = int(copy.plan.sizes[~held.all(axis=0)].sum())
        get_logger().info(
            "--stage: %d of %d files (%.1f MiB) to %d node(s), here %s",
            missing, held.shape[1], total / 2**20, len(held), copy.folder,
        )  # fmt: skip

    def _written(self, copy: StageCopy, own: np.ndarray, pieces: Iterator[Piece]) -> Iterator[None]:
        """An item for each file that has arrived; those that this node has already are not written again."""
        for piece in pieces:
            if not own[piece.item]:
                copy.write(piece)
            if piece.digest:
                yield
