"""SECURITY.md, "Listening": what the processes of a run read from its store is data."""

from __future__ import annotations

import os
import pickle
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from data.dataset.spec import DataSource
from data.open import open_data
from engine.parallel.eval_ranks import serve
from tests.data.data_set import DataSet, voc
from tests.helpers.hostile_files import Touch
from utils.distributed.context import DistributedContext


class _Hostile(dist.HashStore):
    """A store in which another program has replaced every value that a process reads by itself."""

    def __init__(self, value: bytes) -> None:
        super().__init__()
        self._value = value

    def get(self, key: str) -> Any:
        return self._value


def _touching(path: Path) -> bytes:
    return pickle.dumps(Touch((os.system, (f"touch '{path}'",))), 2)


def test_a_message_to_evaluating_processes_runs_nothing(tmp_path):
    program = _touching(tmp_path / "ran")
    store = dist.HashStore()
    store.set("setup/0", program)  # type: ignore[arg-type]
    store.set("setup", "1")
    with pytest.raises(pickle.UnpicklingError):
        serve(replace(DistributedContext.single(), store=store), lambda setup: pytest.fail("used"))
    assert not (tmp_path / "ran").exists()


def test_what_a_process_is_given_of_a_folder_runs_nothing(tmp_path):
    data = DataSet(tmp_path / "set")
    data.images("train/x.png")
    data.file("train/x.xml", voc(("b", 5, 5, 20, 20)))
    store = _Hostile(_touching(tmp_path / "ran"))
    errors: list[BaseException] = []

    def open_as(rank: int) -> None:
        one = DistributedContext.single()
        ctx = replace(one, rank=rank, local_rank=rank, world_size=2, local_world_size=2, store=store)
        try:
            open_data(DataSource(str(data.root), ("train",)), ctx)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=open_as, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not (tmp_path / "ran").exists()
    assert any(isinstance(error, ValueError) for error in errors), errors
