"""The parts of `benchmarks/gpu.sh`: commands, each of which is one row of the table, and the calls that run them."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.command import TORCHRUN

BUDGETS_S = {"first": 520, "again": 225, "others": 560}  # seconds a call, unless BUDGET_S is set
EXPORTED_AP = 0.5  # minimum AP of the exported checkpoint
TRAINED_AP = 0.7  # minimum AP after training on the demo set; on a CPU it is 0.88


@dataclass(frozen=True)
class Part:
    """A command of the benchmark.

    Attributes:
        name: name of its row, by which PARTS selects parts.
        expected_s: expected seconds on an H100 with 16 cores.
        command: program and arguments.
        needs: files that other parts make: YAMLs of data sets, a trained checkpoint.
        makes: the file that this part makes for others.
        skipped: why the part is not run; empty: it is.
    """

    name: str
    expected_s: int
    command: Sequence[object]
    needs: Sequence[Path] = ()
    makes: Path | None = None
    skipped: str = ""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Models, image and batch sizes. The defaults are for a GPU; `DRY_RUN_SIZES` tests that all parts run, on a CPU."""

    device: str = "0"
    half: str = "fp16"  # --amp of trainings in half precision with a scaler; a CPU has bf16 only
    timed_imgsz: int = 640
    checked_imgsz: int = 320
    checked_batch: int = 8
    trained_epochs: int = 20
    end_to_end_batch: int = 64
    end_to_end_epochs: int = 3
    resumed_epochs: int = 2
    evaluated_epochs: int = 3
    demo_images: int = 256  # training images of the demo set
    copies: int = 32  # copies of each of these images in the data sets "many" and "large"
    heads: Sequence[str] = ("yolov8n", "yolov5n", "yolo26n", "yoloxnano")  # a model of each kind of head
    optimizers: Sequence[str] = ("SGD", "Muon")
    timed_batches: Sequence[int] = (16, 64)
    steps: int = 20  # steps per turn
    has_learned: bool = True  # whether trainings are long enough for a good detector


DRY_RUN_SIZES = Sizes(
    device="cpu",
    half="bf16",
    timed_imgsz=64,
    checked_imgsz=64,
    checked_batch=4,
    trained_epochs=2,
    end_to_end_batch=4,
    end_to_end_epochs=2,
    resumed_epochs=4,
    evaluated_epochs=2,
    demo_images=32,
    copies=2,
    heads=("yolov8n", "yolov5n"),
    timed_batches=(2,),
    steps=1,
    has_learned=False,
)


class Parts:
    """The parts for given sizes, by call and in order of priority, so that a slow machine leaves out the last ones.

    Args:
        folder: folder to which all parts write their files.
        peer: Python of an environment that has Ultralytics; empty: measure only ours.
    """

    def __init__(self, sizes: Sizes, folder: Path, peer: str = "") -> None:
        device = sizes.device
        on_cpu = device == "cpu"
        compiler = "on a CPU it takes minutes" if on_cpu else ""
        small, many, large = (folder / name / "data.yaml" for name in ("small", "many", "large"))
        weights = folder / "trained" / "last.pt"

        def check(name: str, **settings: Any) -> list[str]:
            return [sys.executable, "-m", "benchmarks.gpu.checks", name, json.dumps(settings, default=str)]

        def data_set(path: Path, expected_s: int, imgsz: int, copies: int = 1) -> Part:
            settings = {"folder": path.parent, "imgsz": imgsz, "images": sizes.demo_images, "copies": copies}
            command = check("checks.write_data", **settings)
            return Part(f"data set, {path.parent.name}", expected_s, command, makes=path)

        # The settings of checks with batches made in memory, on the small data set, and of the trained weights.
        in_memory = {"device": device, "imgsz": sizes.checked_imgsz, "batch_size": sizes.checked_batch}
        on_small = {**in_memory, "data": small}
        learned = {"device": device, "weights": weights, "folder": folder}
        step = [sys.executable, "-m", "benchmarks.speed.step", "--device", device, "--imgsz", sizes.timed_imgsz]
        step += ["--steps", sizes.steps]
        train = ["train.py", "--data", small, "--model", "yolov8n", "--imgsz", sizes.checked_imgsz, "--device", device]
        train += ["--workers", 2, "--noplots", "--project", folder, "--exist-ok", "--name"]
        one_epoch = ["--batch-size", sizes.checked_batch, "--epochs", 1]
        makes_weights = [sys.executable, *train, "trained", "--batch-size", 16, "--epochs", sizes.trained_epochs]
        makers = [
            data_set(small, 8, sizes.checked_imgsz),
            data_set(many, 8, sizes.checked_imgsz, sizes.copies),
            data_set(large, 20, sizes.timed_imgsz, sizes.copies),
            Part("trains with one GPU", 30, [*makes_weights, "--val-every", 10], [small], weights),
        ]
        self.maker_of = {part.makes: part for part in makers}
        environment = Part("environment", 8, check("checks.environment"))
        batches = sizes.timed_batches
        first = [
            environment,
            self.maker_of[weights],
            Part("float32 steps equal to the CPU's", 28,
                 check("equal.compare_steps", **in_memory, models=sizes.heads, optimizers=["SGD"])),
            Part("no host sync in the step", 25,
                 check("syncs.waits_of_steps", **in_memory, models=["yolov8n"], optimizers=sizes.optimizers)),
            Part("steps alone, bf16 and fp16", 65,
                 [*step, "--model", f"yolov8n:{','.join(map(str, batches))}", "--amp", "auto", sizes.half,
                  "--rounds", 2, "--peer", peer]),
            Part("scores of val.py equal to the CPU's", 18,
                 check("scripts.validate", **learned, min_ap=TRAINED_AP if sizes.has_learned else 0.0),
                 [small, weights]),
            Part("end to end, yolov8n", 100,
                 check("scripts.time_training", device=device, data=large, imgsz=sizes.timed_imgsz, peer=peer,
                       batch_size=sizes.end_to_end_batch, epochs=sizes.end_to_end_epochs),
                 [large]),
            Part("the costliest kernels of a step", 30,
                 check("kernels.costliest_kernels", device=device, imgsz=sizes.timed_imgsz,
                       cases=[*(("yolov8n", size, "SGD") for size in batches), ("yolov8n", batches[0], "Muon")])),
            Part("exported files score as the checkpoint", 40,
                 check("scripts.export", **learned, min_ap=EXPORTED_AP if sizes.has_learned else 0.0),
                 [small, weights]),
            Part("torchrun by the loopback interface", 14,
                 [sys.executable, *TORCHRUN, *train, "loopback", *one_epoch], [small]),
            Part("stopped and resumed: the same bits", 32,
                 check("interruptions.stop_and_resume", **on_small, epochs=sizes.resumed_epochs,
                       interruptions=["torchrun"]),
                 [small]),
            Part("detects", 9, check("scripts.detect", **learned, data=small), [small, weights]),
            Part("DataParallel, twice on one device", 15, check("data_parallel.compare_replicas", **in_memory)),
            Part("compiled steps, batch 16", 45,
                 [*step, "--compile", "--batch-size", 16, "--amp", "auto", "--rounds", 1], skipped=compiler),
        ]  # fmt: skip
        again = [
            environment,
            Part("compiled steps, batches 16 and 64", 70,
                 [*step, "--compile", "--batch-size", 16, 64, "--amp", "auto", "--rounds", 2], skipped=compiler),
            Part("float16 that overflows at once", 12,
                 check("overflow.check_overflow", **in_memory, optimizers=sizes.optimizers)),
            Part(f"trains in {sizes.half} with SGD", 13,
                 [sys.executable, *train, "half", *one_epoch, "--amp", sizes.half, "--optimizer", "SGD"], [small]),
            Part("the same bits on two processes of one GPU", 35,
                 check("ranks.compare_processes", **in_memory, optimizers=sizes.optimizers)),
            Part("batches copied from pinned memory", 15, check("batches.compare_batches", **on_small), [small]),
            Part("no host sync in the training loop", 18, check("syncs.waits_of_loop", **on_small), [small]),
            Part(f"one process trains, another one validates on the CPU, --amp {sizes.half}", 35,
                 check("scripts.validate_elsewhere", **on_small, epochs=sizes.evaluated_epochs, amp=sizes.half,
                       folder=folder),
                 [small]),
        ]  # fmt: skip
        others = [
            environment,
            Part("compiled steps equal to uncompiled ones", 75,
                 check("compiled.compare_compiled", device=device, imgsz=sizes.timed_imgsz, batch_size=16),
                 skipped=compiler),
            Part("no host sync in the step, all heads", 40,
                 check("syncs.waits_of_steps", **in_memory, models=sizes.heads, optimizers=["SGD"])),
            Part("stopped or killed, and resumed: the same bits", 40,
                 check("interruptions.stop_and_resume", **on_small, epochs=sizes.resumed_epochs,
                       interruptions=["sigterm", "sigkill"]),
                 [small]),
            Part("DDP and ZeRO on two processes of one GPU", 25, check("ranks.compare_ddp", **in_memory)),
            Part("NCCL with two processes on one GPU", 40,
                 check("ranks.compare_ddp", **in_memory, backend="nccl"),
                 skipped="NCCL needs a GPU" if on_cpu else ""),
            Part("trains compiled, DDP, accumulating", 45,
                 [sys.executable, *TORCHRUN, *train, "compiled-ddp", *one_epoch, "--compile", "--nominal-batch",
                  2 * sizes.checked_batch],
                 [small], skipped=compiler),
            Part("trains compiled, sizes vary", 45,
                 [sys.executable, *train, "compiled-sizes", *one_epoch, "--compile", "--multi-scale"],
                 [small], skipped=compiler),
            Part("the largest batch that fits", 180,
                 check("scripts.largest_batch", device=device, data=many, imgsz=sizes.timed_imgsz, folder=folder),
                 [many], skipped="--batch-size -1 needs a GPU" if on_cpu else ""),
        ]  # fmt: skip
        self.calls = {"first": first, "again": again, "others": others}

    def chosen(self, call: str, pattern: str) -> list[Part]:
        """Returns the parts of a call or, with a ``pattern``, those whose names match it; in "again" also those of
        "first"."""
        parts = self.calls[call]
        if pattern and call == "again":
            parts = [*self.calls["first"], *(part for part in parts if part not in self.calls["first"])]
        return [part for part in parts if re.search(pattern, part.name)]

    def with_makers(self, chosen: Sequence[Part]) -> list[Part]:
        """Returns the parts in the order in which they run: each after the parts that make what it needs."""
        ordered: list[Part] = []
        for part in chosen:
            makers = [] if part.skipped else [self.maker_of[path] for path in part.needs]
            ordered += [needed for needed in (*makers, part) if needed not in ordered]
        return ordered
