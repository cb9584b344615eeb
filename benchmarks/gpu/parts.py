"""The parts of the four calls of `benchmarks/gpu.sh`: what each part runs, and how long it should take."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

CALLS = ("checks", "others", "speed", "compiled")
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


@dataclass(frozen=True)
class Part:
    """One command, independent of all others, and its requirements."""

    call: str
    name: str
    expected_s: int  # on an H100 with 16 cores
    command: Sequence[str]
    data: str = ""  # "small", "many", "large": see `data_part`
    gpu_only: str = ""  # why it is left out on a CPU; empty: it is not
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Sizes:
    """The sizes that the parts run with on a GPU, or `DRY` on a CPU to test that they run."""

    device: str = "0"
    imgsz: int = 640  # of what is timed
    small: int = 320  # of what is only checked
    batch: int = 8  # of what is only checked
    images: int = 256  # of the demo set
    times: int = 32  # each of them in the large sets
    heads: tuple[str, ...] = ("yolov8n", "yolov5n", "yolo26n", "yoloxnano")
    optimizers: tuple[str, ...] = ("SGD", "Muon")
    loss_batch: int = 64
    boxes: tuple[int, ...] = (16, 64, 96)
    step_batches: tuple[int, ...] = (16, 64, 128, 256)
    half_batches: tuple[int, ...] = (64, 128)  # of the comparison of float16 with bfloat16
    profiled: tuple[int, ...] = (16, 64)
    kernels: tuple[str, ...] = ("yolov8n", "yolo11n", "yolo26n")
    trained: tuple[str, ...] = ("yolov8n", "yolov8s")
    train_batch: int = 64
    steps: int = 20
    rounds: int = 3
    epochs: int = 3
    demo_epochs: int = 30
    resume_epochs: int = 2


DRY = Sizes(
    device="cpu",
    imgsz=64,
    small=64,
    batch=1,
    images=8,
    times=2,
    heads=("yolov8n", "yolov5n"),
    loss_batch=2,
    boxes=(16, 64),
    step_batches=(2,),
    half_batches=(2,),
    profiled=(2,),
    kernels=("yolov8n",),
    trained=("yolov8n",),
    train_batch=4,
    steps=1,
    rounds=1,
    epochs=2,
    demo_epochs=2,
    resume_epochs=4,
)


def numbers(values: Sequence[int]) -> list[str]:
    return [str(value) for value in values]


def check(part: str, sizes: Sizes, *flags: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.gpu.checks", part, "--device", sizes.device, *flags]


def step(sizes: Sizes, *flags: str) -> list[str]:
    command = [sys.executable, "-m", "benchmarks.speed.step", "--device", sizes.device, "--rounds", str(sizes.rounds)]
    return [*command, "--imgsz", str(sizes.imgsz), "--steps", str(sizes.steps), *flags]


def data_part(call: str, name: str, sizes: Sizes, folder: Path) -> Part:
    """Writes a data set: "small" is the demo set, "many" has each of its images many times, "large" in the size of what
    is timed too."""
    size = sizes.imgsz if name == "large" else sizes.small
    flags = ["--folder", str(folder), "--set", name, "--imgsz", str(size), "--images", str(sizes.images), "--times",
             str(sizes.times)]  # fmt: skip
    return Part(call, f"data set, {name}", 20 if name == "large" else 8, check("data", sizes, *flags))


def parts_of(sizes: Sizes, folder: Path, peer: str) -> list[Part]:
    """All parts, in the order in which a call runs them: the most important ones first."""
    every = [*checks(sizes, folder), *others(sizes, folder), *speeds(sizes, folder, peer), *compilations(sizes, folder)]
    return [Part(call, "environment", 8, check("environment", sizes)) for call in CALLS] + every


def training(sizes: Sizes, folder: Path, name: str, *flags: str) -> list[str]:
    """train.py for one epoch of the small set, without the interpreter."""
    return [
        "train.py", "--data", str(folder / "small" / "data.yaml"), "--model", "yolov8n", "--imgsz", str(sizes.small),
        "--batch-size", str(sizes.batch), "--epochs", "1", "--device", sizes.device, "--workers", "2", "--noplots",
        "--project", str(folder / "runs"), "--exist-ok", "--name", name, *flags,
    ]  # fmt: skip


def loss_share(sizes: Sizes, *flags: str) -> list[str]:
    return check("loss-share", sizes, "--imgsz", str(sizes.imgsz), "--batch-size", str(sizes.loss_batch), "--model",
                 "yolov8n", "yolo26n", "--boxes", *numbers(sizes.boxes), *flags)  # fmt: skip


def check_flags(sizes: Sizes, folder: Path) -> tuple[list[str], list[str], list[str]]:
    """Of checks without data, of checks of the small set, and of those that keep files."""
    size = ["--imgsz", str(sizes.small), "--batch-size"]
    data = [*size, str(sizes.batch), "--data", str(folder / "small/data.yaml")]
    return [*size, str(max(sizes.batch, 2))], data, ["--folder", str(folder)]


def torchrun(*flags: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1", *flags]


def checks(sizes: Sizes, folder: Path) -> list[Part]:
    size, data, own = check_flags(sizes, folder)
    both = ["--optimizer", *sizes.optimizers]
    half = "bf16" if sizes.device == "cpu" else "fp16"

    def part(name: str, expected_s: int, command: Sequence[str], needs: str = "", **more) -> Part:
        return Part("checks", name, expected_s, command, needs, **more)

    def train(name: str, *flags: str) -> list[str]:
        return [sys.executable, *training(sizes, folder, name, *flags)]

    return [
        part("float32 steps equal to the CPU's", 60,
             check("equal-steps", sizes, *size, "--model", *sizes.heads, *both)),
        part("NMS and box voting equal to the CPU's", 12, check("equal-detections", sizes, *size)),
        part("rendered images equal to the CPU's", 30, check("equal-rendering", sizes, *size)),
        part("no host sync in the step", 50, check("sync-free", sizes, *size, "--model", *sizes.heads, *both)),
        part("trains with one GPU", 50,
             train("plain", "--epochs", str(sizes.demo_epochs), "--batch-size", str(max(sizes.batch, 16))), "small"),
        part("validates", 25, check("validate", sizes, *data, *own), "small"),
        part("detects", 12, check("detect", sizes, *data, *own), "small"),
        part("no host sync in the training loop", 35, check("sync-free-loop", sizes, *data), "small"),
        part("float16 that overflows at once", 15, check("overflow", sizes, *size, *both)),
        part("the same bits on two processes of one GPU", 35,
             check("ranks", sizes, *size, *both, "--batch-size", "8"), environment=LOOPBACK),
        part("DDP and ZeRO on two processes of one GPU", 25,
             check("ranks-ddp", sizes, *size, "--batch-size", "8"), environment=LOOPBACK),
        part("batches copied from pinned memory", 15, check("feed", sizes, *data), "small"),
        part(f"trains in {half} with SGD", 15, train("half", "--amp", half, "--optimizer", "SGD"), "small"),
    ]  # fmt: skip


def others(sizes: Sizes, folder: Path) -> list[Part]:
    """Checks of less common ways to run."""
    size, data, own = check_flags(sizes, folder)
    by_another = ["--spawn", "2", "--eval-ranks", "1", "--epochs", str(sizes.epochs)]

    def part(name: str, expected_s: int, command: Sequence[str], needs: str = "", **more) -> Part:
        return Part("others", name, expected_s, command, needs, **more)

    return [
        part("a TorchScript file gives the checkpoint's AP", 30, check("exported", sizes, *data, *own), "small"),
        part("torchrun, one rank", 20, torchrun(*training(sizes, folder, "nccl")), "small"),
        part("a Predictor called by many threads", 20, check("predictor-threads", sizes, *size)),
        part("DataParallel on one device", 20, check("data-parallel", sizes, *size)),
        part("one process trains, another validates on the CPU", 45,
             [sys.executable, *training(sizes, folder, "by-another", *by_another)], "small"),
        part("loaded weights are scored as on the CPU", 15, check("weights-score", sizes, *data, *own), "small"),
        part("the first steps, and a smaller batch", 15,
             check("first-steps", sizes, "--imgsz", str(sizes.imgsz), "--batch-size", str(sizes.step_batches[0]))),
        part("NCCL with two processes on one GPU", 40,
             check("ranks-ddp", sizes, *size, "--batch-size", "8", "--backend", "nccl"),
             gpu_only="NCCL needs a GPU", environment={**LOOPBACK, "NCCL_MULTI_RANK_GPU_ENABLE": "1"}),
        part("the largest batch that fits", 180,
             check("largest-batch", sizes, "--imgsz", str(sizes.imgsz), "--data", str(folder / "many/data.yaml"),
                   "--folder", str(folder)), "many", gpu_only="--batch-size -1 needs a GPU"),
    ]  # fmt: skip


def speeds(sizes: Sizes, folder: Path, peer: str) -> list[Part]:
    beside = ["--peer", peer] if peer else []
    first, *others = sizes.trained
    steps = [f"{first}:{','.join(numbers(sizes.step_batches))}", *(f"{name}:{sizes.train_batch}" for name in others)]

    def part(name: str, expected_s: int, command: Sequence[str], needs: str = "") -> Part:
        return Part("speed", name, expected_s, command, needs)

    def end_to_end(model: str, expected_s: int, layouts: int) -> Part:
        flags = ["--data", str(folder / "large" / "data.yaml"), "--model", model, "--imgsz", str(sizes.imgsz),
                 "--batch-size", str(sizes.train_batch), "--epochs", str(sizes.epochs), "--layouts", str(layouts),
                 *beside]  # fmt: skip
        return part(f"end to end, {model}", expected_s, check("train", sizes, *flags), "large")

    return [
        part("loss and assignment, share of the step", 35, loss_share(sizes)),
        part("steps alone", 100 if peer else 70,
             step(sizes, "--model", *steps, "--amp", "auto", "--optimizer", *sizes.optimizers, *beside)),
        part("float16 against bfloat16, step alone", 25,
             step(sizes, "--model", first, "--batch-size", *numbers(sizes.half_batches), "--amp",
                  *(("bf16",) if sizes.device == "cpu" else ("bf16", "fp16")))),
        end_to_end(first, 95 if peer else 70, layouts=2),
        *(end_to_end(name, 85 if peer else 50, layouts=1) for name in others),
    ]  # fmt: skip


def compilations(sizes: Sizes, folder: Path) -> list[Part]:
    batch = str(sizes.train_batch)

    def part(name: str, expected_s: int, command: Sequence[str], needs: str = "", **more) -> Part:
        return Part("compiled", name, expected_s, command, needs, **more)

    def compiled(name: str, expected_s: int, command: Sequence[str], needs: str = "") -> Part:
        return part(name, expected_s, command, needs, gpu_only="on a CPU it takes minutes")

    def train(name: str, *flags: str) -> list[str]:
        return [sys.executable, *training(sizes, folder, name, *flags)]

    return [
        compiled("compiled steps are the uncompiled ones", 75,
                 check("compiled", sizes, "--imgsz", str(sizes.imgsz), "--batch-size", "16")),
        compiled("steps compiled", 70,
                 step(sizes, "--compile", "--batch-size", *numbers(sizes.profiled), "--amp", "auto")),
        part("the costliest kernels of a step", 60,
             check("kernels", sizes, "--imgsz", str(sizes.imgsz), "--batch-size", *numbers(sizes.profiled), "--model",
                   *sizes.kernels, "--optimizer", *sizes.optimizers)),
        part("stopped, killed and resumed: the same bits", 55,
             check("resume", sizes, "--imgsz", str(sizes.small), "--data", str(folder / "small/data.yaml"),
                   "--batch-size", str(max(sizes.batch, 4)), "--epochs", str(sizes.resume_epochs)), "small"),
        compiled("trains compiled, DDP, accumulating", 45,
                 torchrun(*training(sizes, folder, "compiled-ddp", "--compile",
                                    "--nominal-batch", str(2 * sizes.batch))), "small"),
        compiled("trains compiled, sizes vary", 45, train("compiled-sizes", "--compile", "--multi-scale"), "small"),
        part("torchrun by the loopback interface alone", 20,
             torchrun("--local-addr", "127.0.0.1", *training(sizes, folder, "loopback")), "small",
             environment=LOOPBACK),
        part("renderer on the device", 25,
             check("render", sizes, "--imgsz", str(sizes.imgsz), "--batch-size", batch, "--rounds", str(sizes.rounds))),
    ]  # fmt: skip
