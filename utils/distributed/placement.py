"""Ranks, roles and devices of the processes of a run.

The launcher numbers all processes. With ``--eval-ranks``, the last ones form a separate group, with ranks from 0. For
two nodes of three processes and ``--eval-ranks 2``, with three GPUs on each node:

    launcher: rank                   0    1    2    |   3    4    5
    launcher: node, local rank       0,0  0,1  0,2  |   1,0  1,1  1,2
    trains or evaluates              t    t    t    |   t    e    e
    `DistributedContext`: rank       0    1    2    |   3    0    1       world_size 4 of those that train, else 2
    `DistributedContext`: local      0    1    2    |   0    0    1       local_world_size 3 and 1, else 2
    device                        cuda:0  :1   :2   |  :0   :1   :2
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from utils.errors import UserError
from utils.machine.devices import devices_for_ranks, identities
from utils.process.launch import Launch
from utils.strings import counted


class Placement(NamedTuple):
    """The role of a process, its position among the processes with this role, and its device.

    Args:
        is_evaluating: whether it evaluates (``--eval-ranks``), or else trains.
        rank, world_size: among all processes with its role.
        local_rank, local_world_size: among those on its node.
    """

    is_evaluating: bool
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device


class _Node(NamedTuple):
    """The processes of a node."""

    ranks: list[int]  # in the run
    gpus: set[str]  # identities


def place_process(store: dist.Store, launch: Launch, device: str, eval_ranks: int = 0) -> Placement:
    """Returns the place of this process. Every process of the run must call this.

    Args:
        device: the value of ``--device``.
        eval_ranks: the last ``eval_ranks`` processes evaluate.

    Raises UserError on all training processes of a node that has fewer devices than training processes.
    """
    devices = devices_for_ranks(device)
    nodes = _exchange_devices(store, launch, devices)
    if launch.rank < launch.world_size - eval_ranks:
        return _place_trainer(launch, devices, nodes[launch.node_rank], eval_ranks)
    return _place_evaluator(launch, devices, nodes, eval_ranks)


def _place_trainer(launch: Launch, devices: Sequence[torch.device], node: _Node, eval_ranks: int) -> Placement:
    """Places a training process, or any process of a run without ``--eval-ranks``. These processes get the GPUs of a
    node first."""
    num_training = launch.world_size - eval_ranks
    local_rank = launch.local_rank
    local_world_size = launch.local_world_size
    if eval_ranks:
        trainers = [rank for rank in node.ranks if rank < num_training]
        local_rank = trainers.index(launch.rank)
        local_world_size = len(trainers)
    if devices and local_world_size > len(node.gpus):
        gpus = counted(len(node.gpus), "GPU")
        raise UserError(
            f"{local_world_size} processes on a node with {gpus}: start one for each (--nproc_per_node or --spawn)"
        )
    return Placement(
        is_evaluating=False,
        rank=launch.rank,
        world_size=num_training,
        local_rank=local_rank,
        local_world_size=local_world_size,
        device=devices[local_rank % len(devices)] if devices else torch.device("cpu"),
    )


def _place_evaluator(
    launch: Launch, devices: Sequence[torch.device], nodes: Mapping[int, _Node], eval_ranks: int
) -> Placement:
    """Places an evaluating process. It gets a GPU of its own if every node has at least as many GPUs as processes;
    otherwise it uses the CPU."""
    num_training = launch.world_size - eval_ranks
    ranks_of_node = nodes[launch.node_rank].ranks
    evaluators = [rank for rank in ranks_of_node if rank >= num_training]
    device = torch.device("cpu")
    if devices and all(len(node.gpus) >= len(node.ranks) for node in nodes.values()):
        device = devices[ranks_of_node.index(launch.rank) % len(devices)]  # after those of the training processes
    return Placement(
        is_evaluating=True,
        rank=launch.rank - num_training,
        world_size=eval_ranks,
        local_rank=evaluators.index(launch.rank),
        local_world_size=len(evaluators),
        device=device,
    )


def _exchange_devices(store: dist.Store, launch: Launch, devices: Sequence[torch.device]) -> dict[int, _Node]:
    """Returns the nodes of the run by node rank. (A launcher may make different GPUs visible to each process, which
    then sees fewer GPUs than there are processes.)"""
    store.set(f"node/{launch.rank}", json.dumps([launch.node_rank, identities(devices)]))
    values = store.multi_get([f"node/{rank}" for rank in range(launch.world_size)])
    nodes: dict[int, _Node] = {}
    for rank, value in enumerate(values):
        node_rank, uuids = json.loads(value)
        node = nodes.setdefault(node_rank, _Node([], set()))
        node.ranks.append(rank)
        node.gpus.update(uuids)
    return nodes
