"""The same bits on any number of processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import train as train_script
from tests.engine.train.steps import global_batch, make_step, weights_of
from tests.helpers.same_content import assert_same_content
from tests.helpers.scripts import SMALL, call, run_python
from tests.helpers.tiny import TINY_ANCHOR_MODEL, TINY_MODEL, write_dataset, write_model
from utils.distributed.context import DistributedContext
from utils.files.torch_file import read_checkpoint


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "Muon"])
def test_two_virtual_ranks_with_the_statistics_of_the_whole_batch_equal_one(optimizer, channels_last):
    """Fused optimizers ignore the strides of gradients on a CPU."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    ends = []
    for virtual_ranks in (0, 2):
        step, model = make_step(
            DistributedContext.single(), "anchor_free", optimizer=optimizer, norm_eval=True, virtual_ranks=virtual_ranks
        )
        model.to(memory_format=layout)
        for update in (1, 2):
            step([global_batch()], [6], update)
        ends.append(weights_of(model))
    torch.testing.assert_close(*ends, rtol=1e-5, atol=5e-3 if optimizer == "Muon" else 1e-5)  # bfloat16 inside


def train(processes: int, world: Path, name: str, *more: str, workers: int = 0) -> dict:
    flags = ["--data", world / "set" / "data.yaml", *SMALL, "--batch-size", "6", "--workers", workers, "--threads", "1"]
    flags += ["--virtual-ranks", "4", "--project", world / "runs", "--name", name, "--multi-scale", *more]
    flags += ["--set", "mixup=0.5", "close_mosaic=1", "close_scale=1"]
    if processes == 1:
        call(train_script.main, *flags)
    else:
        run_python("train.py", *flags, torchrun=processes)
    return read_checkpoint(world / "runs" / name / "last.pt")


def test_a_layer_that_no_output_depends_on_keeps_its_weights(tmp_path):
    """It has no gradient; by one of zero, weight decay would shrink it."""
    write_dataset(tmp_path / "set")
    unused = {**TINY_MODEL, "backbone": [*TINY_MODEL["backbone"], [1, 1, "Conv", [8, 3, 2]]]}
    flags = ["--model", str(write_model(tmp_path / "model.yaml", unused)), "--optimizer", "SGD", "--epochs", "1"]
    runs = [train(1, tmp_path, count, *flags, "--virtual-ranks", count)["model"] for count in ("0", "4")]
    first, second = (run["model.5.conv.weight"] for run in runs)
    assert torch.equal(first, second)


MUON = (TINY_MODEL, ["--optimizer", "Muon", "--epochs", "2"])
SGD = (TINY_ANCHOR_MODEL, ["--optimizer", "SGD", "--epochs", "2", "--nominal-batch", "12"])


@pytest.mark.parametrize(
    ("model", "more", "counts"),
    [
        pytest.param(*MUON, (2,), id="anchor-free, Muon, two"),
        pytest.param(*SGD, (2, 4), id="anchors, SGD, accumulated", marks=pytest.mark.slow),
    ],
)
def test_several_processes_end_with_the_bits_of_one(tmp_path, model, more, counts):
    """Ten images in batches of six: shards of one and two images, and of one in the last batch; the numbers of workers
    differ too."""
    write_dataset(tmp_path / "set")
    more = ["--model", str(write_model(tmp_path / "model.yaml", model)), *more]
    one = train(1, tmp_path, "one", *more)
    for count in counts:
        assert_same_content(one, train(count, tmp_path, f"of{count}", *more, workers=2 - count // 2))
    whole = train(1, tmp_path, "whole", *more, "--virtual-ranks", "1")
    assert not torch.equal(whole["model"]["model.0.conv.weight"], one["model"]["model.0.conv.weight"])
