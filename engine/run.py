"""A run: its folder, its settings, the checkpoint that it resumes from, and what each of its processes sets up."""

from __future__ import annotations

import math
import os
import shutil
import traceback
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.resume import (
    check_can_continue,
    check_is_newest,
    resumed_config,
    resumed_epochs,
    resumed_hyperparameters,
)
from engine.parallel.ddp import resolve_virtual_ranks
from models.heads.base import DetectionHead
from utils.config.parser import read_recipe
from utils.config.settings import ALL_RANKS, Hyperparameters, TrainConfig, changed_settings, closing_epochs
from utils.distributed.context import DistributedContext, all_objects, broadcast_object, torch_distributed_zero_first
from utils.errors import UserError
from utils.files.folders import check_run_dir, find_location, increment_path
from utils.files.former_run import former_data, is_other_data
from utils.files.locks import FileLock
from utils.files.safe_io import open_direct, write_whole
from utils.logger import configure_logging, continue_in_file, get_logger
from utils.program import write_result
from utils.strings import counted

LAUNCHERS = ".launchers"  # in the run's folder: the torchrun processes that train it (`DistributedContext.launcher`)
LOCK_NAME = ".lock"  # in the run's folder; locked while a process trains it
_PATIENCE_S = 3.0  # a process that was just killed may still be ending


@dataclass(frozen=True)
class Run:
    """The same on every rank."""

    folder: Path  # of a new run, what the settings say, until `claim_folder` makes one
    config: TrainConfig
    hyp: Hyperparameters
    checkpoint: Checkpoint | None  # to resume from; None: a new run
    lines: list[str]  # the first lines of the log
    data_root: str = ""  # the data set's folder, as far as the checkpoint knows it
    begun: bool = True  # whether the folder has been made

    @property
    def settings(self) -> dict[str, Any]:
        """All flags and hyper-parameters by name."""
        return {**asdict(self.config), **asdict(self.hyp)}


@contextmanager
def open_run(ctx: DistributedContext, config: TrainConfig, given: Collection[str]) -> Iterator[Run]:
    """Yields a new run, the run that ``--resume`` names, or, when torchrun restarts its processes, the run that they
    were training, from its newest checkpoint. The folder of a resumed run is locked until the block ends;
    `claim_folder` makes and locks that of a new one. ``given``: names of the settings on the command line.

    Raises UserError when there is nothing to resume from, a folder cannot be made, or another process trains there.
    """
    lines: list[str] = []
    hyp = read_recipe(
        config.hyp, config.override, pretrained=bool(config.weights), keep_old=config.keep_old, lines=lines
    )
    launchers = all_objects(ctx, ctx.launcher)
    former = broadcast_object(ctx, run_of_launch(config, launchers) if ctx.is_main else None)
    if former is not None:
        folder, path = former, former / "last.pt"
    elif config.resume is None:
        with torch_distributed_zero_first(ctx):
            if ctx.is_main:
                check_run_dir(config.project, config.name, config.exist_ok)
        folder = Path(config.project) / config.name
        yield Run(folder, config, hyp, None, lines, begun=False)
        return
    else:
        path = Path(config.resume)
        if not config.resume:
            found = sorted(Path(config.project).glob("*/last.pt"), key=lambda path: path.stat().st_mtime)
            if not found:
                raise UserError(f"--resume: no last.pt under {config.project}; name one: --resume PATH/last.pt")
            path = broadcast_object(ctx, found[-1])
        path = path / "last.pt" if path.is_dir() else path
        folder = path.parent
    with ExitStack() as stack:
        with torch_distributed_zero_first(ctx):
            if ctx.is_main and folder.is_dir():
                stack.callback(_lock_run(folder).release)
        if former is not None and not path.is_file():
            run = Run(folder, config, hyp, None, [*lines, "restarted before the first checkpoint"])
        else:
            checkpoint = Checkpoint.read(path)
            run = _reopen(ctx, config, given, checkpoint)
            if former is None:
                check_can_continue(checkpoint, run.config, given)
        if ctx.is_main:
            note_launch(folder, launchers)
        yield run


@contextmanager
def claim_folder(ctx: DistributedContext, run: Run) -> Iterator[Run]:
    """Yields the run in a folder of its own, locked until the block ends, with its settings and the log. Every rank
    enters it, after the data set, the model and the weights have been checked, so that a refused command leaves nothing
    behind. If the block fails before the first checkpoint, the folders made here are removed.

    Raises UserError when the folder cannot be made, or when another process trains there (with ``--exist-ok``).
    """
    with ExitStack() as stack:
        if not run.begun:  # else `open_run` has locked its folder
            run = stack.enter_context(_new_run(ctx, run))
        if ctx.is_main:
            open(run.folder / "train.log", "ab", opener=open_direct).close()  # not where a link leads
            continue_in_file(run.folder / "train.log")
            settings = {"config": asdict(run.config), "hyp": asdict(run.hyp)}
            write_whole(run.folder / "settings.yaml", yaml.safe_dump(settings, sort_keys=False))
            write_result(folder=str(run.folder))
        get_logger().info("run folder %s (settings.yaml: all settings)", run.folder)
        yield run


@contextmanager
def _new_run(ctx: DistributedContext, run: Run) -> Iterator[Run]:
    config, launchers, folder = run.config, all_objects(ctx, ctx.launcher), run.folder
    made: list[Path] = []  # folders, innermost first
    with ExitStack() as stack:
        with torch_distributed_zero_first(ctx):
            if ctx.is_main:
                absent = [path for path in (folder, *folder.parents) if not path.exists()]
                named, folder = folder, increment_path(config.project, config.name, config.exist_ok)
                made = [folder, *(path for path in absent if path != named)] if folder != named or absent else []
                stack.callback(_lock_run(folder).release)
                former = former_data(folder)
                if is_other_data(former, config.data):
                    text = "%s: has a run on other data, %s, whose files stay until this run replaces them (--exist-ok)"
                    get_logger().warning(text, folder, former)
                if others := sorted(folder.glob("epoch*.pt"), key=lambda path: (len(path.name), path.name)):
                    text = "%s: has %s of an earlier run; this run overwrites those of its own epochs"
                    get_logger().warning(text, folder, ", ".join(path.name for path in others))
        folder = Path(broadcast_object(ctx, folder))
        try:
            if ctx.is_main:
                note_launch(folder, launchers)
            yield replace(run, folder=folder, begun=True)
        except BaseException as error:  # while nobody else can use the folder; the stacks of a stalled run keep it
            traceback.clear_frames(error.__traceback__)  # closes their files, of which there may be too many
            if made and not any([*folder.glob(kept)] for kept in ("*.pt", "stall_rank*.txt")):
                shutil.rmtree(folder, ignore_errors=True)
                for outer in made[1:]:
                    with suppress(OSError):  # other runs are in it
                        outer.rmdir()
            raise


def _lock_run(folder: Path) -> FileLock:
    """The lock of the run in ``folder``, acquired. Removes files that a killed process left half written. Raises
    UserError if another process holds it."""
    lock = FileLock(folder / LOCK_NAME)
    if holder := lock.acquire(_PATIENCE_S):
        raise UserError(
            f"{folder}: another process is training this run ({holder}); wait for it, stop it, or start a new run "
            "with another --name"
        )
    for half_written in folder.glob(".*.tmp"):  # by `utils.files.safe_io`
        half_written.unlink(missing_ok=True)
    return lock


def _reopen(ctx: DistributedContext, config: TrainConfig, given: Collection[str], checkpoint: Checkpoint) -> Run:
    """The run that wrote ``checkpoint``, with what the command line changes."""
    check_is_newest(checkpoint)
    path, stored = checkpoint.path, checkpoint.config
    hyp, changes = resumed_hyperparameters(checkpoint.hyp, config, given, path, pretrained=bool(stored.get("weights")))
    source, root = find_location(checkpoint.data, path)
    if stored.get("data") != "demo":
        stored = stored | {"data": source}
    config, lines = resumed_config(stored, config, given, path)
    config = replace(config, epochs=resumed_epochs(checkpoint, config, given))
    lines += changes
    for key, name, now in (("world_size", "processes", ctx.world_size), ("device", "device", ctx.device.type)):
        if (before := checkpoint.run.get(key, now)) != now:
            lines.append(f"resume: {name} {before} -> {now}")
    within = f" and {counted(checkpoint.progress.batch, 'batch')}" if checkpoint.progress.batch else ""
    lines.insert(0, f"resuming {path} after epoch {checkpoint.progress.epoch} of {config.epochs}{within}")
    return Run(path.parent, config, hyp, checkpoint, lines, data_root=root if config.data == source else "")


def note_launch(folder: Path, launchers: Sequence[str]) -> None:
    """Records that the torchrun processes ``launchers`` train the run in ``folder``, so that a restart by any of them
    finds it."""
    if any(launchers):
        write_whole(folder / LAUNCHERS, "\n".join(filter(None, launchers)))


def run_of_launch(config: TrainConfig, launchers: Sequence[str]) -> Path | None:
    """The folder of the run that one of ``launchers`` has trained before, which makes this a restart; or None."""
    if not any(launchers):
        return None
    paths = [*(Path(config.project) / config.name).parent.glob(f"*/{LAUNCHERS}")]  # a name may have folders
    if config.resume:  # last.pt or its folder, which may be elsewhere
        paths += [folder / LAUNCHERS for folder in (Path(config.resume), Path(config.resume).parent)]
    own = [path for path in paths if path.is_file() and {*path.read_text("utf-8").splitlines()} & {*launchers}]
    return max(own, key=lambda path: path.stat().st_mtime).parent if own else None


def prepare_process(
    ctx: DistributedContext, config: TrainConfig, hyp: Hyperparameters, lines: Sequence[str] = ()
) -> None:
    """Sets up logging, threads and determinism, and logs ``lines`` and the settings that differ from the defaults."""
    configure_logging(ctx.is_main, file_follows=True)
    if config.threads or (resolve_virtual_ranks(ctx, config) and ctx.device.type == "cpu"):
        # How many threads share a sum decides its rounding, so every number of processes must use as many.
        torch.set_num_threads(config.threads or 1)
    choose_kernels(config)
    log = get_logger()
    for line in lines:
        log.info("%s", line)
    log.info("%s on %s, torch %s", counted(ctx.world_size, "process"), ctx.device, torch.__version__)
    changed = [changed_settings(config), changed_settings(hyp)]
    changed[0].pop("override", None)  # is in the hyper-parameters
    lists = [", ".join(f"{k}={'null' if v is None else v}" for k, v in part.items()) or "defaults" for part in changed]
    log.info("settings: %s; hyper-parameters: %s", *lists)


def unused_settings(
    ctx: DistributedContext,
    config: TrainConfig,
    hyp: Hyperparameters,
    head: DetectionHead,
    *,
    channels: int = 3,
    tile: int = 0,
) -> list[str]:
    """A line for each given setting that has no effect in this run. ``tile``: see `DatasetSpec`."""
    ranks = ctx.world_size
    given = {item.partition("=")[0].strip() for item in config.override}
    length, batch = counted(config.epochs, "epoch"), counted(config.batch_size, "image")
    epochs = math.inf if config.time else config.epochs
    mixing = ("mosaic", "mixup")
    mixes = not config.rect and any(getattr(hyp, name) > 0 for name in mixing)
    virtual = config.virtual_ranks
    rules: list[tuple[str, bool, str]] = [  # a setting, whether it has no effect, and why; the first rule that holds
        *((name, True, "the model's loss does not use it") for name in sorted(head.unused_hyperparameters)),
        ("one2one", not head.is_dual, "the model's loss does not use it"),
        *((name, channels != 3, "images without three channels have no color") for name in ("hsv_h", "hsv_s", "hsv_v")),
        ("lr_mult", not config.weights, "without --weights"),
        ("distill", not (config.keep_old or config.teacher), "without --teacher or --keep-old"),
        ("cls_pw", head.num_classes == 1, "the model has one class"),
        *((name, hyp.warmup_epochs == 0, "warmup_epochs is 0") for name in ("warmup_momentum", "warmup_bias_lr")),
        *((name, config.rect and getattr(hyp, name) > 0, "--rect leaves mosaic and mixup out") for name in mixing),
        ("mosaic_block", not mixes, "no image is made of several"),
        ("close_mosaic", not mixes and not head.refines, "there is no mosaic or mixup"),
        ("close_scale", hyp.scale == 0, "scale is 0"),
        *((name, not tile, "the data set's YAML has no 'tile'") for name in ("tile_visibility", "tile_backgrounds")),
        ("tile_backgrounds", config.image_weights, "--image-weights chooses how often tiles are seen"),
        ("spawn", config.spawn == 1, "one process trains anyway"),
        ("eval_ranks", epochs == 1 or config.val_every == 0, "the training processes validate after the last epoch"),
        ("eval_ranks", config.patience == 1, "--patience 1 needs the result of every epoch before the next"),
        ("sync_bn", ranks == 1, "one process sees the whole batch"),
        ("sync_bn", config.sync_bn == 1, "each process has its own statistics anyway"),
        ("zero", ranks == 1, "one process holds the whole state of the optimizer"),
        ("virtual_ranks", virtual == ranks == 1, "one process processes whole batches anyway"),
        ("virtual_ranks", virtual == ranks and config.deterministic, "--deterministic cuts batches by process anyway"),
        ("nominal_batch", round(config.nominal_batch / config.batch_size) <= 1, f"a batch has {batch} already"),
        ("cos_lr", hyp.lrf == 1, "lrf 1 keeps the learning rate where it is"),
        ("patience", config.patience >= epochs, f"the run has {length}"),
        ("patience", config.val_every == 0, "--val-every 0 validates after the last epoch only"),
        ("save_period", config.save_period > epochs, f"the run has {length}"),
        ("noautoanchor", head.anchors is None, "the model has no anchors"),
    ]
    shown = {name: f"--set {name}" for name in given}
    for name, value in changed_settings(config).items():
        shown[name] = f"--{name.replace('_', '-')}" + ("" if value is True or value == ALL_RANKS else f" {value}")
    reasons = {name: why for name, is_unused, why in reversed(rules) if is_unused and name in shown}
    lines = [
        f"{shown[name]} does nothing{' ' if why.startswith('without ') else ': '}{why}" for name, why in reasons.items()
    ]
    closing = closing_epochs(hyp.close_mosaic, config.epochs)
    if mixes and epochs <= closing:
        lines.append(f"mosaic and mixup do nothing: close_mosaic is {closing} and the run has {length}")
    if "warmup_epochs" in given and hyp.warmup_epochs > epochs / 4:
        lines.append(
            f"--set warmup_epochs={hyp.warmup_epochs:g} is cut: the warm-up takes at most a quarter of the run, here "
            f"{epochs / 4:g} epochs"
        )
    return lines


def choose_kernels(config: TrainConfig) -> None:
    """Deterministic kernels with ``--deterministic``."""
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch asks for it, or refuses matrix products
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # which nothing here reads; it takes time
