"""``--stage DIR``: copies the data set to a local disk of each node, reading the shared file system only once.

The first process of the run lists the data set. The first process of each node (its leader) reports which files its
disk already has and reads a shard of the rest; the leaders send each other what they read (`file_exchange`). The other
processes of a node wait for their leader. The next run continues an interrupted copy, and only checks a complete one.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch.distributed as dist

from data.index.dataset_yaml import DatasetSpec, load_dataset_spec
from data.labels.findings import relative_name
from data.staging.copy import NODE_NOTE, StageCopy
from data.staging.file_exchange import Piece, exchange_items
from data.staging.plan import StagePlan, is_under, plan_stage
from utils.distributed.collectives import torch_distributed_zero_first
from utils.distributed.context import DistributedContext
from utils.distributed.groups import Subgroup, one_per_node_group
from utils.distributed.store_barrier import StoreBarrier
from utils.errors import UserError
from utils.files.caches import format_bytes
from utils.logger import get_logger, progress
from utils.strings import counted


def stage_dataset(
    source: str,
    folder: str,
    splits: Sequence[str],
    ctx: DistributedContext,
    *,
    chunk_bytes: int | None = None,
    known_root: str = "",
    optional: Sequence[str] = (),
) -> DatasetSpec:
    """Copies the files of the data set ``source`` that are missing in its copy in ``folder``, and opens the copy.

    Every process of the run must call this.

    Args:
        source: a data set YAML. Only the first process of the run opens it.
        folder: on this node's disk; may differ between nodes. ``{node_rank}`` in it is replaced by the node's number.
        splits: the splits to copy.
        chunk_bytes: size of a message between leaders; None: 1 to 16 MiB.
        known_root: see `load_dataset_spec`.
        optional: more splits to copy, if the data set has them.

    Returns:
        the data set with the copy's root and splits. Its ``source`` is the original YAML.

    Raises:
        UserError: the data set cannot be read, the disk is too small or cannot be written, or two nodes use one folder.
    """
    if source == "demo":
        raise UserError("--stage: the demo set cannot be staged, since each node renders it; omit --stage")
    leaders = one_per_node_group(ctx)
    local_folder = Path(os.path.expanduser(folder.replace("{node_rank}", str(ctx.node_rank)))).absolute()
    with torch_distributed_zero_first(ctx):
        if not ctx.is_node_leader:
            assert ctx.store is not None
            yaml = ctx.store.get(f"stage/{ctx.node_rank}/{splits}").decode("utf-8", "surrogateescape")
        else:
            names = [f"node {n}" for n in range(leaders.group_size)]
            title = f"stage/{leaders.handle.group_name}" if leaders.handle else ""
            with StoreBarrier(ctx.store, title, rank=leaders.local_group_rank, names=names) as barrier:
                leader = _Leader(barrier, leaders, ctx.is_main, known_root, optional)
                yaml = str(leader.stage(source, local_folder, splits, chunk_bytes))
            if ctx.store is not None:
                ctx.store.set(f"stage/{ctx.node_rank}/{splits}", yaml.encode("utf-8", "surrogateescape"))
        return dataclasses.replace(load_dataset_spec(yaml), source=source)


@dataclass(frozen=True)
class _Leader:
    """The first process of a node."""

    barrier: StoreBarrier
    group: Subgroup
    show_progress: bool
    known_root: str
    optional: Sequence[str]

    def stage(self, source: str, folder: Path, splits: Sequence[str], chunk_bytes: int | None) -> Path:
        """Completes the copy of this node and returns its YAML."""
        plan, token = self._plan(source, splits)
        if is_under(relative_name(folder / plan.key, plan.spec.root), plan.folders):
            raise UserError(f"--stage: {folder} is inside the data set; name a folder outside it")
        copy = StageCopy(folder / plan.key, plan)
        self._check_folders_differ(copy.folder, token)
        with copy.lock(wait=self.group.group_size == 1):
            local = copy.complete_files(show_progress=self.show_progress)
            present = self._gather(local)
            missing = int((~present.all(axis=0)).sum())
            copy.check_space(~local)
            self.barrier.wait_all()
            self._log(copy, present, missing)
            if not local.all():
                copy.begin()
            pieces = exchange_items(
                plan.sizes, present, copy.loader(local), barrier=self.barrier, group=self.group, chunk_bytes=chunk_bytes
            )
            files = self._write(copy, local, pieces)
            for _ in progress(files, desc="staging", total=missing, enabled=self.show_progress and missing > 0):
                pass
            copy.finish()
            self.barrier.wait_all()
        return copy.yaml

    def _plan(self, source: str, splits: Sequence[str]) -> tuple[StagePlan, str]:
        """The plan and a random token, made by the first leader and broadcast to the others."""
        box: list[tuple[StagePlan, str] | None] = [None]
        if self.group.local_group_rank == 0:
            spec = load_dataset_spec(source, self.known_root)
            splits = (*splits, *(split for split in self.optional if split in spec.splits))
            box = [(plan_stage(spec, splits), secrets.token_hex(8))]
        self.barrier.wait_all()
        if self.group.group_size > 1:
            dist.broadcast_object_list(box, src=self.group.group_rank_base, group=self.group.handle)
        assert box[0] is not None
        return box[0]

    def _check_folders_differ(self, folder: Path, token: str) -> None:
        """Raises UserError if two nodes use one folder, which then is on a shared disk."""
        if self.group.group_size == 1:
            return
        notes = [folder / f"{NODE_NOTE}{n}-{token}" for n in range(self.group.group_size)]
        rank = self.group.local_group_rank
        try:
            notes[rank].touch()
            self.barrier.wait_all()
            others = [n for n, note in enumerate(notes) if n != rank and note.exists()]
            self.barrier.wait_all()
        finally:
            notes[rank].unlink(missing_ok=True)
        if others:
            raise UserError(
                f"--stage: {folder.parent} is the same folder on nodes {min(rank, *others)} and {max(rank, *others)}; "
                "name a folder on a local disk of each node, or use {node_rank} in the name"
            )

    def _gather(self, local: np.ndarray) -> np.ndarray:
        """The files that each node has, bool (N, F), from those of this node, bool (F,)."""
        self.barrier.wait_all()
        if self.group.group_size == 1:
            return local[None]
        packed: list[np.ndarray] = [np.empty(0)] * self.group.group_size
        dist.all_gather_object(packed, np.packbits(local), group=self.group.handle)
        return np.stack([np.unpackbits(bits, count=len(local)).astype(bool) for bits in packed])

    def _log(self, copy: StageCopy, present: np.ndarray, missing: int) -> None:
        nodes, files = present.shape
        if self.show_progress and missing:
            size = format_bytes(int(copy.plan.sizes[~present.all(axis=0)].sum()))
            get_logger().info(
                "--stage: copying %d of %d files (%s) to %s, on this node to %s",
                missing, files, size, counted(nodes, "node"), copy.folder,
            )  # fmt: skip
        elif self.show_progress:
            get_logger().info("--stage: complete in %s (%s)", copy.folder, counted(files, "file"))

    def _write(self, copy: StageCopy, local: np.ndarray, pieces: Iterator[Piece]) -> Iterator[None]:
        """Writes the files that this node lacks. Yields once for each file that has arrived on all nodes."""
        for piece in pieces:
            if not local[piece.item]:
                copy.write(piece)
            if piece.digest:
                yield
