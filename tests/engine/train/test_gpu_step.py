"""The step as on a GPU, on machines without one: no operation mixes devices, and the host waits for nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from engine.parallel.ddp import average_buffers, broadcast_parameters
from engine.parallel.sync_bn import convert_sync_bn
from engine.train.run import choose_kernels
from engine.train.sources import check_kernels
from engine.train.step import TrainStep
from models.detector import build_detector
from models.modules import unwrap
from tests.engine.gpu_cases import ALONE, CUDA, IGNORE, MODELS
from tests.helpers.fake_gpu import fake_gpu
from tests.helpers.kernel_count import KernelCount, NoSync
from tests.helpers.nondeterministic import DeterministicOnly
from tests.helpers.steps import make_train_step
from tests.helpers.tiny import TINY_MODEL, make_batch
from utils.batches import Batch, map_tensors
from utils.config.settings import TrainConfig
from utils.distributed.context import DistributedContext
from utils.errors import UserError

SECOND_OF_FOUR = DistributedContext(
    rank=1, local_rank=1, world_size=4, local_world_size=4, device=CUDA, backend="fake", devices=(CUDA,)
)

# A model of each file in configs/models.
BUILT_IN = (
    *("yolov5n", "yolov8n", "yolov9t", "yolov9s", "yolov9m", "yolov9c"),
    *("yolo11n", "yolo26n", "yoloxnano", "yoloxs"),
)


@pytest.fixture
def batch() -> Batch:
    """Four images, one with a region to ignore, as the prefetcher hands them over."""
    real = make_batch(4)
    with fake_gpu():
        on_gpu = map_tensors(real, lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=CUDA))
    return replace(on_gpu, targets=replace(on_gpu.targets, host_rows=real.targets.on_host, ignore=IGNORE))


@pytest.fixture
def four_processes() -> Iterator[None]:
    """A process group of four whose collectives do nothing; this process is the second one."""
    fake_pg = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    pytest.importorskip("torch.distributed._tools.fake_collectives")  # lets them take tensors without values
    dist.init_process_group("fake", rank=1, world_size=4, store=fake_pg.FakeStore())
    yield
    dist.destroy_process_group()


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Torch computes deterministically, as with ``--deterministic``."""
    fill = torch.utils.deterministic.fill_uninitialized_memory
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        choose_kernels(TrainConfig(deterministic=True))
        yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fill


def build_step(
    model: str | dict, ctx: DistributedContext = ALONE, *, optimizer: str = "SGD", sync_bn: bool = False, **changes
) -> TrainStep:
    """With autocast and the gradient scaler of float16. To be called inside `fake_gpu`."""
    with unset_fake_temporarily():  # a second head is a copy on meta, which some versions of torch refuse
        model = build_detector(model, 2, seed=1)
    model = model.to(CUDA, memory_format=torch.channels_last)  # as `build_starting_model` does
    settings = {"amp_dtype": torch.float16, **changes}
    step = make_train_step(ctx, model, optimizer=optimizer, **settings)
    if sync_bn:
        convert_sync_bn(model)
    return step


def take_steps(step: TrainStep, batch: Batch, images: int = 4) -> None:
    update = step.optimizer.step
    has_equal_strides: list[bool] = []

    def checked_update(nonfinite: Tensor) -> None:
        has_equal_strides.extend(p.grad.stride() == p.stride() for p in step.optimizer.parameters)
        update(nonfinite)

    step([batch], [images], 1)  # states and scales are made here
    with NoSync(), DeterministicOnly(), mock.patch.object(step.optimizer, "step", checked_update):
        step([batch, batch], [images, images], 2)
    # Fused optimizers do not check it, and operations on lists take a kernel for each tensor without it.
    assert has_equal_strides
    assert all(has_equal_strides)
    tensors = [*unwrap(step.model).state_dict().values(), *step.ema.module.state_dict().values()]
    tensors += [
        value for rule in step.optimizer.optimizers for state in rule.state.values() for value in state.values()
    ]
    assert {tensor.device for tensor in tensors if isinstance(tensor, Tensor)} == {CUDA}
    assert len(step.reader.pop(leave=0)) == 2  # or reading them raises: they are still on the device


QUICK = [("yolo26", "SGD", 0), ("yolox", "Muon", 2)]
OTHER = [
    ("yolov5", "AdamW", 0),
    ("yolov8", "SGD", 0), ("yolov8", "Muon", 2), ("yolov5", "SGD", 2), ("yolo26", "SGD", 2), ("yolo26", "Muon", 0),
    ("yolox", "SGD", 0), ("yolov9", "Muon", 0), ("yolov9", "SGD", 2),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "optimizer", "virtual_ranks"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHER)]
)
def test_the_step_stays_on_the_device(batch, kind, optimizer, virtual_ranks):
    with fake_gpu():
        take_steps(build_step(MODELS[kind], optimizer=optimizer, virtual_ranks=virtual_ranks), batch)


@pytest.mark.usefixtures("four_processes")
@pytest.mark.parametrize(
    "changes", [pytest.param({}, marks=pytest.mark.slow), {"sync_bn": True}, {"virtual_ranks": 4}], ids=str
)
def test_collectives_stay_on_the_device(batch, changes):
    with fake_gpu():
        step = build_step(MODELS["yolov8"], SECOND_OF_FOUR, optimizer="AdamW", **changes)
        take_steps(step, batch, images=16)
        with NoSync():
            average_buffers(unwrap(step.model), SECOND_OF_FOUR)
            broadcast_parameters(unwrap(step.model), SECOND_OF_FOUR)


@pytest.mark.slow
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_models_stay_on_the_device(batch, name):
    with fake_gpu():
        take_steps(build_step(name), batch)


def with_upsampling(*modes: str) -> dict:
    """TINY_MODEL whose last level is upsampled once by each of one or two modes; these replace the levels before it."""
    layers = [[4 + i, 1, "nn.Upsample", [None, 2, mode]] for i, mode in enumerate(modes)]
    levels = [2, 5, 4] if len(modes) == 1 else [6, 5, 4]
    return {**TINY_MODEL, "head": [*layers, [levels, 1, "Detect", ["nc"]]]}


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("modes", [("nearest", "bilinear"), pytest.param(("nearest-exact",), marks=pytest.mark.slow)])
def test_upsampling_with_a_deterministic_gradient_is_taken(batch, modes):
    """Bilinear upsampling has a form with a fixed order."""
    spec = with_upsampling(*modes)
    with fake_gpu():
        take_steps(build_step(spec), batch)
    check_kernels(TrainConfig(deterministic=True), build_detector(spec, 2), CUDA)


@pytest.mark.usefixtures("deterministic")
def test_upsampling_without_a_deterministic_gradient_is_refused_before_training(batch):
    spec = with_upsampling("bicubic")
    message = "upsample_bicubic2d_backward has no deterministic kernel"
    with fake_gpu(), pytest.raises(AssertionError, match=message):
        take_steps(build_step(spec), batch)
    config = TrainConfig(deterministic=True)
    detector = build_detector(spec, 2)
    with pytest.raises(UserError, match=r"--deterministic: layer model\.5 \(Upsample, bicubic\)"):
        check_kernels(config, detector, CUDA)
    check_kernels(config, detector, torch.device("cpu"))
    check_kernels(replace(config, deterministic=False), detector, CUDA)


@pytest.mark.parametrize(
    ("optimizer", "kernels", "operations", "slow_lists"),
    [
        ("SGD", 1060, 1850, {}),
        # Muon's matrices are copied into padded batches, and its moves are views of these.
        pytest.param("Muon", 1360, 2550, {"_foreach_copy_": 63, "_foreach_sub_": 63}, marks=pytest.mark.slow),
    ],
)
def test_a_step_takes_few_launches(batch, optimizer, kernels, operations, slow_lists):
    """yolov8n; the number of images does not matter. Taking more should be a decision."""
    plain = replace(batch, targets=replace(batch.targets, ignore=None))
    with fake_gpu():
        step = build_step("yolov8n", optimizer=optimizer, amp_dtype=torch.bfloat16)
        step([plain], [4], 1)
        with KernelCount() as count:
            step([plain], [4], 2)
    assert count.kernels.total() <= kernels
    assert count.operations.total() <= operations
    assert count.slow_lists == slow_lists


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    ("dtype", "backend"), [(torch.float32, "Cudnn"), (torch.float16, "Cudnn"), (torch.bfloat16, "Native")]
)
def test_batch_norms_that_cudnn_computes(dtype, backend, layout, is_training):
    """Convolutions in bfloat16 are left to torch's own kernels, which are slower. If a version of torch changes this,
    `--amp auto` should be measured again."""
    with fake_gpu():
        x = torch.zeros(4, 8, 16, 16, dtype=dtype, device=CUDA).contiguous(memory_format=layout)
        weights = [torch.zeros(8, device=CUDA) for _ in range(4)]
        assert torch._C._select_batch_norm_backend(x, *weights, is_training, 1e-3).name == backend
