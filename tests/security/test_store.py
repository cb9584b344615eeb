"""SECURITY.md, "Listening": who reaches the store of a run, and that its processes read data from it."""

from __future__ import annotations

import json
import os
import pickle
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from data.loading.build import open_val_index
from tests.data.data_set import DataSet, open_set
from tests.helpers.hostile_files import Touch
from utils.config.settings import TrainConfig
from utils.distributed.context import DistributedContext, max_over_ranks
from utils.distributed.join import joined_run
from utils.process.launch import read_launch
from utils.process.spawn import spawn


class _Hostile(dist.HashStore):
    """A store in which another program has replaced every value that a process reads by itself."""

    def __init__(self, value: bytes) -> None:
        super().__init__()
        self._value = value

    def get(self, key: str) -> Any:
        return self._value


def _touching(path: Path) -> bytes:
    return pickle.dumps(Touch((os.system, (f"touch '{path}'",))), 2)


def test_what_a_process_is_given_of_an_index_runs_nothing(tmp_path):
    data = DataSet(tmp_path / "set")
    data.pairs("train/x")
    data.yaml(train="images/train")
    spec = open_set(data.data)
    config = TrainConfig(cache_dir=str(tmp_path / "cache"), workers=0)
    store = _Hostile(_touching(tmp_path / "ran"))
    errors: list[BaseException] = []

    def open_as(rank: int) -> None:
        one = DistributedContext.single()
        ctx = replace(one, rank=rank, local_rank=rank, world_size=2, local_world_size=2, store=store)
        try:
            open_val_index(ctx, config, spec, "train")
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=open_as, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not (tmp_path / "ran").exists()
    assert any(isinstance(error, ValueError) for error in errors), errors


def _own_listening_addresses() -> set[str]:
    """Returns the addresses, in the kernel's hex digits, at which this process listens for TCP connections."""
    own = {os.readlink(file.path) for file in os.scandir("/proc/self/fd") if os.path.islink(file.path)}
    addresses = set()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in own:
                addresses.add(local.partition(":")[0])
    return addresses


def report_listening(folder: Path) -> None:
    """Writes the addresses at which a rank of ``--spawn`` listens, and on rank 0 the keys of the store."""
    with joined_run(read_launch(), "cpu") as ctx:
        max_over_ranks(ctx, 1)
        store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), wait_for_workers=False)
        keys = store.list_keys() if ctx.is_main else []
        (folder / f"{ctx.rank}.json").write_text(json.dumps([sorted(_own_listening_addresses()), keys]))
        max_over_ranks(ctx, 1)


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads Linux's table of sockets")
def test_a_run_of_one_machine_listens_on_its_loopback_interface_below_a_random_prefix(tmp_path):
    prefixes = set()
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        spawn(report_listening, 2, [tmp_path / name])
        (addresses, keys), (others, _) = (json.loads((tmp_path / name / f"{r}.json").read_text()) for r in range(2))
        assert {*addresses, *others} == {"0100007F"}  # 127.0.0.1, little-endian
        prefixes |= {key.partition("/")[0] for key in keys}
    first, second = prefixes
    assert min(len(first), len(second)) >= 32
