"""``--compile``: compiles the model, and on a GPU also the loss, for full batches.

The model is compiled in place: state-dict keys do not change, and copies (the EMA) are not compiled. One version is
compiled, for full batches. For the last, smaller batch of an epoch, model and loss run eagerly: compiling them would
take time while other processes wait, and another set of CUDA graphs. The size of the global batch decides, so that all
processes do the same.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir

import torch
from torch import Tensor, nn

from models.losses.base import Criterion
from utils.config.settings import TrainConfig
from utils.distributed.context import DistributedContext
from utils.errors import UserError
from utils.program_folders import private_folder

_CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"  # without it, torch takes a folder in /tmp, even another user's


@dataclass(frozen=True)
class Compilation:
    """The settings with which a model is compiled."""

    images: int  # number in a full global batch
    dynamic: bool = False  # one version for all image sizes instead of one for each
    cuda_graphs: bool = False
    loss: bool = False  # whether the loss is compiled as well
    has_regions: bool = False  # whether batches may have ignore regions

    def apply(self, model: nn.Module, criterion: Criterion) -> None:
        """Compiles ``model`` (unwrapped), and ``criterion`` if `loss` is set, at their first calls."""
        if self.loss:
            criterion.compile_terms(has_regions=self.has_regions)
        model.compile(dynamic=self.dynamic, mode="reduce-overhead" if self.cuda_graphs else "default")

    def for_batch(self, images: Tensor, batch_images: int) -> AbstractContextManager:
        """Returns the context for the forward pass and the loss of ``images`` (B, C, H, W), a shard of a global batch
        of ``batch_images``."""
        if batch_images != self.images:
            return torch.compiler.set_stance("force_eager")
        if self.dynamic:  # otherwise a square first batch would specialize the graph to height == width
            torch._dynamo.maybe_mark_dynamic(images, [2, 3])
        if self.cuda_graphs:
            torch.compiler.cudagraph_mark_step_begin()  # outputs of earlier runs are no longer used
        return nullcontext()

    def copy_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Copies gradients out of the memory of CUDA graphs, which write to it each time they run, so that the
        gradients of another batch can be added. Once per step is enough: the sum stays in the copy."""
        if not self.cuda_graphs:
            return
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()


def check_compiler(device: torch.device) -> None:
    """Raises UserError if this machine lacks what ``--compile`` needs, or another user may write where torch keeps
    compiled code, which it runs. Unless a variable names the folder, it is one of this program in that for temporary
    files, because code may fit this machine only."""
    if hasattr(os, "getuid") and not os.environ.get(_CACHE_VARIABLE):
        folder = Path(gettempdir(), f"lockstep-inductor-{os.getuid()}")
        os.environ[_CACHE_VARIABLE] = str(private_folder(folder, f"the variable {_CACHE_VARIABLE}"))
    needed: dict[str, object]
    if device.type == "cuda":
        header = Path(sysconfig.get_path("include"), "Python.h")
        compiler = any(map(shutil.which, (os.environ.get("CC", ""), "gcc", "clang")))
        needed = {"Triton": importlib.util.find_spec("triton"), "gcc": compiler, "python3-dev": header.exists()}
    else:
        needed = {"g++": any(map(shutil.which, (os.environ.get("CXX", ""), "g++", "clang++", "c++", "cl")))}
    missing = [name for name, is_there in needed.items() if not is_there]
    if missing:
        raise UserError(f"--compile: needs {' and '.join(missing)}; install it, or leave out --compile")


def plan_compilation(
    config: TrainConfig, ctx: DistributedContext, *, images: int, shards: int, has_regions: bool = False
) -> Compilation:
    """Decides how to compile in a run that has passed `check_settings`.

    Raises UserError for batches that leave processes without images, because these would not make the same calls as the
    others.

    Args:
        images: number in a full global batch.
        shards: number of shards of such a batch: virtual ranks, or processes.
        has_regions: whether batches may have ignore regions.
    """
    if images < shards:
        raise UserError(f"--compile: a batch of {images} images leaves some of its {shards} shards empty")
    is_on_gpu = ctx.device.type == "cuda"
    # With None, torch's default, it would compile for the first size, and again for all sizes at the second one.
    is_dynamic = bool(config.multi_scale or config.rect)
    exchanges_statistics = bool(config.sync_bn) and ctx.is_distributed  # in the forward pass
    return Compilation(
        images,
        dynamic=is_dynamic,
        cuda_graphs=is_on_gpu and not is_dynamic and not exchanges_statistics,
        loss=is_on_gpu and not config.deterministic,  # compiled scatters add in an undefined order
        has_regions=has_regions,
    )
