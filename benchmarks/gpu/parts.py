"""The parts of `benchmarks/gpu.sh`: commands, each of which is one row of the table, and the calls that run them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

BUDGETS_S = {"first": 520, "again": 225, "others": 560}  # seconds a call, unless BUDGET_S is set
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
EXPORTED_AP = 0.5  # minimum AP of the exported checkpoint: equal scores of a poor model prove nothing
TRAINED_AP = 0.7  # minimum AP after training on the demo set; on a CPU it is 0.88
SLOW_COMPILER = "on a CPU it takes minutes"


@dataclass(frozen=True)
class Part:
    """A command of the benchmark.

    Attributes:
        name: name of its row, by which PARTS selects parts.
        expected_s: expected seconds on an H100 with 16 cores.
        command: program and arguments.
        needs: products of other parts that must exist: the data sets "small", "many" and "large"; "weights", a
            checkpoint trained on "small".
        product: the product that this part makes for others; empty: none.
        cpu_skip_reason: why the part is skipped on a CPU; empty: it also runs there.
        environment: environment variables of the command, added to this process's.
    """

    name: str
    expected_s: int
    command: Sequence[str]
    needs: Sequence[str] = ()
    product: str = ""
    cpu_skip_reason: str = ""
    environment: dict[str, str] = field(default_factory=dict)


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
    checked_batch=1,
    trained_epochs=2,
    end_to_end_batch=4,
    end_to_end_epochs=2,
    resumed_epochs=4,
    evaluated_epochs=2,
    demo_images=8,
    copies=2,
    heads=("yolov8n", "yolov5n"),
    timed_batches=(2,),
    steps=1,
    has_learned=False,
)


def flags(**settings: object) -> list[str]:
    """Converts settings to a command line: ``batch_size=[16, 64]`` becomes ``--batch-size 16 64``, and
    ``variants=True`` becomes ``--variants``. Settings that are an empty string are left out."""
    words: list[str] = []
    for name, value in settings.items():
        if value != "":
            words.append(f"--{name.replace('_', '-')}")
            values = value if isinstance(value, (list, tuple)) else [] if value is True else [value]
            words += [str(item) for item in values]
    return words


class Parts:
    """The parts for given sizes, by call and in order of priority, so that a slow machine leaves out the last ones.

    Args:
        folder: folder to which all parts write their files.
        peer: Python of an environment that has Ultralytics; empty: measure only ours.
    """

    def __init__(self, sizes: Sizes, folder: Path, peer: str = "") -> None:
        self.sizes = sizes
        self.folder = folder
        self.peer = peer
        trained = self._train("trained", batch_size=16, epochs=sizes.trained_epochs, val_every=10)
        self.providers = {
            "small": self._data_set("small", 8, sizes.checked_imgsz),
            "many": self._data_set("many", 8, sizes.checked_imgsz),
            "large": self._data_set("large", 20, sizes.timed_imgsz),
            "weights": Part("trains with one GPU", 30, trained, ["small"], product="weights"),
        }
        self.calls = {"first": self._first(), "again": self._again(), "others": self._others()}

    def chosen(self, call: str, pattern: str) -> list[Part]:
        """Returns the parts of a call or, with a ``pattern``, those whose names match it; in "again" also those of
        "first"."""
        parts = self.calls[call]
        if pattern and call == "again":
            names = {part.name for part in parts}
            parts = [*(part for part in self.calls["first"] if part.name not in names), *parts]
        return [part for part in parts if re.search(pattern, part.name)]

    def with_providers(self, chosen: Sequence[Part]) -> Iterator[Part]:
        """Yields the parts in the order in which they run: each after the parts that make its needed products, unless
        these have already run."""
        products: set[str] = set()

        def preceded(part: Part) -> Iterator[Part]:
            for product in () if self.is_skipped(part) else part.needs:
                if product not in products:
                    yield from preceded(self.providers[product])
            products.add(part.product)
            yield part

        for part in chosen:
            yield from preceded(part)

    def is_skipped(self, part: Part) -> bool:
        """Returns whether the part is skipped because it does not run on a CPU."""
        return bool(part.cpu_skip_reason) and self.sizes.device == "cpu"

    def path_of(self, product: str) -> Path:
        return self.folder / ("runs/trained/last.pt" if product == "weights" else f"{product}/data.yaml")

    def _first(self) -> list[Part]:
        """Lists the parts for the first quarter of an hour on a GPU."""
        sizes = self.sizes
        batches = sizes.timed_batches
        cases = [*(f"yolov8n:{batch}:SGD" for batch in batches), f"yolov8n:{batches[0]}:Muon"]
        timed = f"yolov8n:{','.join(map(str, batches))}"
        learned = ["small", "weights"]
        end_to_end = self._check(
            "train", data=self.path_of("large"), model="yolov8n", imgsz=sizes.timed_imgsz, peer=self.peer,
            batch_size=sizes.end_to_end_batch, epochs=sizes.end_to_end_epochs,
        )  # fmt: skip
        return [
            self._environment(),
            self.providers["weights"],
            Part("float32 steps equal to the CPU's", 28, self._check_steps("equal-steps", model=sizes.heads)),
            Part("no host sync in the step", 25, self._check_steps("sync-free", optimizer=sizes.optimizers)),
            Part("steps alone, bf16 and fp16", 65,
                 self._step(model=timed, amp=["auto", sizes.half], rounds=2, peer=self.peer)),
            Part("scores of val.py equal to the CPU's", 18, self._check_weights("validate", TRAINED_AP), learned),
            Part("end to end, yolov8n", 100, end_to_end, ["large"]),
            Part("the costliest kernels of a step", 30,
                 self._check("kernels", imgsz=sizes.timed_imgsz, case=cases)),
            Part("exported files score as the checkpoint", 40, self._check_weights("exported", EXPORTED_AP), learned),
            Part("torchrun by the loopback interface", 14, self._torchrun("loopback"), ["small"], environment=LOOPBACK),
            self._resumed("stopped and resumed: the same bits", 32, ["torchrun"]),
            Part("detects", 9, self._check_weights("detect", 0.0), learned),
            Part("DataParallel, twice on one device", 15, self._check_steps("data-parallel")),
            self._compiled("compiled steps, batch 16", 45,
                           self._step(compile=True, batch_size=16, amp="auto", rounds=1)),
        ]  # fmt: skip

    def _again(self) -> list[Part]:
        """Lists the parts that follow "first"."""
        sizes = self.sizes
        elsewhere = self._check_data(
            "validate-elsewhere", epochs=sizes.evaluated_epochs, folder=self.folder, amp=sizes.half
        )
        return [
            self._environment(),
            self._compiled("compiled steps, batches 16 and 64", 70,
                           self._step(compile=True, batch_size=[16, 64], amp="auto", rounds=2)),
            Part("float16 that overflows at once", 12, self._check_steps("overflow", optimizer=sizes.optimizers)),
            Part(f"trains in {sizes.half} with SGD", 13,
                 self._train("half", amp=sizes.half, optimizer="SGD"), ["small"]),
            Part("the same bits on two processes of one GPU", 35,
                 self._check_steps("ranks", batch_size=8, optimizer=sizes.optimizers), environment=LOOPBACK),
            Part("batches copied from pinned memory", 15, self._check_data("pinned-batches"), ["small"]),
            Part("no host sync in the training loop", 18, self._check_data("sync-free-loop"), ["small"]),
            Part(f"one process trains, another one validates on the CPU, --amp {sizes.half}", 35, elsewhere, ["small"]),
        ]  # fmt: skip

    def _others(self) -> list[Part]:
        """Lists the parts about less common ways to run."""
        sizes = self.sizes
        ddp = self._check_steps("ranks-ddp", batch_size=8)
        accumulating = self._torchrun("compiled-ddp", compile=True, nominal_batch=2 * sizes.checked_batch)
        largest = self._check("largest-batch", imgsz=sizes.timed_imgsz, data=self.path_of("many"), folder=self.folder)
        return [
            self._environment(),
            self._compiled("compiled steps equal to uncompiled ones", 75,
                           self._check("compiled", imgsz=sizes.timed_imgsz, batch_size=16)),
            Part("no host sync in the step, all heads", 40,
                 self._check_steps("sync-free", model=sizes.heads, optimizer=["SGD"])),
            self._resumed("stopped or killed, and resumed: the same bits", 40, ["sigterm", "sigkill"]),
            Part("DDP and ZeRO on two processes of one GPU", 25, ddp, environment=LOOPBACK),
            Part("NCCL with two processes on one GPU", 40, [*ddp, "--backend", "nccl"],
                 cpu_skip_reason="NCCL needs a GPU",
                 environment=LOOPBACK | {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}),
            self._compiled("trains compiled, DDP, accumulating", 45, accumulating, ["small"]),
            self._compiled("trains compiled, sizes vary", 45,
                           self._train("compiled-sizes", compile=True, multi_scale=True), ["small"]),
            Part("the largest batch that fits", 180, largest, ["many"], cpu_skip_reason="--batch-size -1 needs a GPU"),
        ]  # fmt: skip

    def _environment(self) -> Part:
        return Part("environment", 8, self._check("environment"))

    def _data_set(self, name: str, expected_s: int, imgsz: int) -> Part:
        """Writes the demo set ("small"), or many copies of each of its images, in the size for checks ("many") or for
        timing ("large")."""
        sizes = self.sizes
        command = self._check(
            "data", folder=self.folder, size=name, imgsz=imgsz, images=sizes.demo_images, times=sizes.copies
        )
        return Part(f"data set, {name}", expected_s, command, product=name)

    def _resumed(self, name: str, expected_s: int, interruptions: Sequence[str]) -> Part:
        sizes = self.sizes
        settings = {"batch_size": max(sizes.checked_batch, 4), "epochs": sizes.resumed_epochs}
        command = self._check_data("resume", **settings, interruption=interruptions)
        return Part(name, expected_s, command, ["small"], environment=LOOPBACK)

    def _compiled(self, name: str, expected_s: int, command: Sequence[str], needs: Sequence[str] = ()) -> Part:
        return Part(name, expected_s, command, needs, cpu_skip_reason=SLOW_COMPILER)

    def _check(self, name: str, **settings: object) -> list[str]:
        return [sys.executable, "-m", "benchmarks.gpu.checks", name, *flags(device=self.sizes.device, **settings)]

    def _check_steps(self, name: str, **settings: object) -> list[str]:
        """Checks with batches that are made in memory."""
        defaults = {"imgsz": self.sizes.checked_imgsz, "batch_size": max(self.sizes.checked_batch, 2)}
        return self._check(name, **defaults | settings)

    def _check_data(self, name: str, **settings: object) -> list[str]:
        return self._check(name, **self._on_small() | settings)

    def _check_weights(self, name: str, at_least: float) -> list[str]:
        """Checks the trained weights. ``at_least``: minimum AP, below which the check proves nothing."""
        needed = at_least if self.sizes.has_learned else 0.0
        return self._check_data(name, folder=self.folder, weights=self.path_of("weights"), at_least=needed)

    def _on_small(self) -> dict[str, object]:
        sizes = self.sizes
        return {"imgsz": sizes.checked_imgsz, "batch_size": sizes.checked_batch, "data": self.path_of("small")}

    def _step(self, **settings: object) -> list[str]:
        sizes = self.sizes
        defaults = {"device": sizes.device, "imgsz": sizes.timed_imgsz, "steps": sizes.steps}
        return [sys.executable, "-m", "benchmarks.speed.step", *flags(**defaults | settings)]

    def _train(self, run: str, **settings: object) -> list[str]:
        """Returns the command of train.py, for one epoch on the small set unless ``settings`` differ."""
        defaults = self._on_small() | {"model": "yolov8n", "epochs": 1, "device": self.sizes.device, "workers": 2}
        defaults |= {"noplots": True, "project": self.folder / "runs", "name": run, "exist_ok": True}
        return [sys.executable, "train.py", *flags(**defaults | settings)]

    def _torchrun(self, run: str, **settings: object) -> list[str]:
        """Returns a training command started by torchrun, by the loopback interface."""
        python, *script = self._train(run, **settings)
        launcher = [python, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        return [*launcher, "--nproc_per_node", "1", *script]
