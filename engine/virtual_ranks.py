"""Into how many shares a step is cut."""

from __future__ import annotations

from utils.config import FIND_BATCH_SIZE, TrainConfig
from utils.distributed import DistributedContext
from utils.errors import UserError


def shares_of(ctx: DistributedContext, config: TrainConfig) -> int:
    """Virtual ranks that the step is to be cut into, 0 for plain DDP. That is as many shares as processes, added in an
    order of its own, so it is taken only where neither ``--virtual-ranks`` nor ``--deterministic`` is asked for.

    Raises UserError for a number that this run cannot have.
    """
    wanted, world = config.virtual_ranks or ctx.world_size, ctx.world_size
    if not config.virtual_ranks and (world == 1 or not config.deterministic):
        return 0
    if wanted & (wanted - 1) or wanted % world:
        fix = f"--virtual-ranks {wanted}: must be a power of two that the {world} process(es) divide"
        raise UserError(fix if config.virtual_ranks else f"--deterministic on {world} processes: use 2, 4, 8, ...")
    if wanted > config.batch_size != FIND_BATCH_SIZE:
        raise UserError(f"--virtual-ranks {wanted}: more than the {config.batch_size} images of a batch")
    if config.sync_bn or config.sync_bn_group:
        raise UserError("--sync-bn takes statistics over the whole batch, virtual ranks over a share: choose one")
    if len(ctx.devices) > 1:
        raise UserError("--virtual-ranks: one device a process; start with torchrun instead of --device 0,1")
    return wanted
