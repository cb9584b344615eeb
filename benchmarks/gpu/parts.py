"""The parts of `benchmarks/gpu.sh`: commands, each of which is one row of the table. calls.py selects parts."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
EXPORTED_AP = 0.5  # minimum AP of the exported checkpoint: equal scores of a poor model prove nothing
TRAINED_AP = 0.7  # minimum AP after training on the demo set; on a CPU it is 0.88
KNOWN_OBJECTS = 0.4  # minimum score of trained weights on their training objects


@dataclass(frozen=True)
class Part:
    """A command of the benchmark.

    Attributes:
        name: name of its row, by which PARTS selects parts.
        expected_s: expected seconds on an H100 with 16 cores.
        command: program and arguments.
        needs: products of other parts that must exist: the data sets "small", "many" and "large"; "weights", a
            checkpoint trained on "small". See `Parts.provider`.
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
    trained_batch: int = 16  # batch size of the training whose weights are scored
    trained_epochs: int = 20
    end_to_end_batch: int = 64
    end_to_end_epochs: int = 3
    resumed_epochs: int = 2
    evaluated_epochs: int = 3
    demo_images: int = 256  # training images of the demo set
    copies: int = 32  # copies of each of these images in the data sets "many" and "large"
    heads: Sequence[str] = ("yolov8n", "yolov5n", "yolo26n", "yoloxnano")  # a model of each kind of head
    optimizers: Sequence[str] = ("SGD", "Muon")
    first_batches: Sequence[int] = (16, 64)
    step_batches: Sequence[int] = (16, 64, 128, 256)
    half_batches: Sequence[int] = (64, 128)
    loss_batch: int = 64
    loss_boxes: Sequence[int] = (16, 64, 96)
    further_models: Sequence[str] = ("yolo11n", "yolo26n")  # models whose kernels are listed besides yolov8n's
    larger_models: Sequence[str] = ("yolov8s",)  # timed besides yolov8n
    steps: int = 20  # steps per turn
    rounds: int = 3  # number of turns
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
    first_batches=(2,),
    step_batches=(2,),
    half_batches=(2,),
    loss_batch=2,
    loss_boxes=(16, 64),
    further_models=(),
    larger_models=(),
    steps=1,
    rounds=1,
    has_learned=False,
)


def flags(**settings: object) -> list[str]:
    """Converts settings to a command line: ``batch_size=[16, 64]`` becomes ``--batch-size 16 64``, and
    ``variants=True`` becomes ``--variants``. Settings that are False or an empty string are left out."""
    words: list[str] = []
    for name, value in settings.items():
        if value is False or value == "":
            continue
        words.append(f"--{name.replace('_', '-')}")
        if isinstance(value, (list, tuple)):
            words += [str(item) for item in value]
        elif value is not True:
            words.append(str(value))
    return words


class Parts:
    """Creates the parts for given sizes, with one method per part. Arguments of a method differ between calls.

    Args:
        folder: folder to which all parts write their files.
        peer: Python of an environment that has Ultralytics; empty: measure only ours.
    """

    def __init__(self, sizes: Sizes, folder: Path, peer: str = "") -> None:
        self.sizes = sizes
        self.folder = folder
        self.peer = peer
        self.weights = folder / "runs" / "trained" / "last.pt"

    def is_skipped(self, part: Part) -> bool:
        """Returns whether the part is skipped because it does not run on a CPU."""
        return bool(part.cpu_skip_reason) and self.sizes.device == "cpu"

    # Products that other parts need

    def provider(self, product: str) -> Part:
        """Returns the part that makes a product."""
        return self.trains() if product == "weights" else self.data_set(product)

    def path_of(self, product: str) -> Path:
        return self.weights if product == "weights" else self.data(product)

    def data(self, name: str) -> Path:
        return self.folder / name / "data.yaml"

    def data_set(self, name: str) -> Part:
        """Writes the demo set ("small"), or many copies of each of its images, in the size for checks ("many") or for
        timing ("large")."""
        sizes = self.sizes
        imgsz = sizes.timed_imgsz if name == "large" else sizes.checked_imgsz
        command = self._check(
            "data", folder=self.folder, size=name, imgsz=imgsz, images=sizes.demo_images, times=sizes.copies
        )
        return Part(f"data set, {name}", 20 if name == "large" else 8, command, product=name)

    def trains(self) -> Part:
        command = self._train(
            "trained", batch_size=self.sizes.trained_batch, epochs=self.sizes.trained_epochs, val_every=10
        )
        return Part("trains with one GPU", 30, command, ["small"], product="weights")

    # The machine, and results that must equal the CPU's

    def environment(self) -> Part:
        return Part("environment", 8, self._check("environment"))

    def equal_steps(self, optimizers: Sequence[str], *, expected_s: int) -> Part:
        command = self._check("equal-steps", **self._checked(), model=self.sizes.heads, optimizer=optimizers)
        return Part("float32 steps equal to the CPU's", expected_s, command)

    def equal_detections(self) -> Part:
        return Part("NMS and box voting equal to the CPU's", 12, self._check("equal-detections", **self._checked()))

    def equal_scores(self, *, variants: bool, expected_s: int) -> Part:
        command = self._check_weights("validate", TRAINED_AP, variants=variants)
        return Part("scores of val.py equal to the CPU's", expected_s, command, ["small", "weights"])

    def equal_exports(self) -> Part:
        command = self._check_weights("exported", EXPORTED_AP)
        return Part("exported files score as the checkpoint", 40, command, ["small", "weights"])

    def equal_score_of_weights(self) -> Part:
        command = self._check_weights("weights-score", KNOWN_OBJECTS)
        return Part("loaded weights are scored as on the CPU", 15, command, ["small", "weights"])

    def detects(self) -> Part:
        return Part("detects", 9, self._check_weights("detect", 0.0), ["small", "weights"])

    # Host syncs

    def sync_free_steps(self, models: Sequence[str], *, expected_s: int) -> Part:
        command = self._check("sync-free", **self._checked(), model=models, optimizer=self.sizes.optimizers)
        return Part("no host sync in the step", expected_s, command)

    def sync_free_loop(self, *, expected_s: int) -> Part:
        command = self._check("sync-free-loop", **self._checked_data())
        return Part("no host sync in the training loop", expected_s, command, ["small"])

    # Numbers and bits

    def overflow(self) -> Part:
        command = self._check("overflow", **self._checked(), optimizer=self.sizes.optimizers)
        return Part("float16 that overflows at once", 12, command)

    def trains_in_half(self) -> Part:
        command = self._train("half", amp=self.sizes.half, optimizer="SGD")
        return Part(f"trains in {self.sizes.half} with SGD", 13, command, ["small"])

    def same_bits(self) -> Part:
        command = self._check("ranks", **self._checked(batch_size=8), optimizer=self.sizes.optimizers)
        return Part("the same bits on two processes of one GPU", 35, command, environment=LOOPBACK)

    def ddp(self) -> Part:
        command = self._check("ranks-ddp", **self._checked(batch_size=8))
        return Part("DDP and ZeRO on two processes of one GPU", 25, command, environment=LOOPBACK)

    def ddp_by_nccl(self) -> Part:
        command = self._check("ranks-ddp", **self._checked(batch_size=8), backend="nccl")
        variables = LOOPBACK | {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
        reason = "NCCL needs a GPU"
        return Part("NCCL with two processes on one GPU", 40, command, cpu_skip_reason=reason, environment=variables)

    def resumed(self, interruptions: Sequence[str], *, expected_s: int) -> Part:
        settings = self._checked_data(batch_size=max(self.sizes.checked_batch, 4), epochs=self.sizes.resumed_epochs)
        command = self._check("resume", **settings, interruption=interruptions)
        return Part("stopped and resumed: the same bits", expected_s, command, ["small"], environment=LOOPBACK)

    def pinned_batches(self) -> Part:
        return Part(
            "batches copied from pinned memory", 15, self._check("pinned-batches", **self._checked_data()), ["small"]
        )

    # Ways to run

    def torchrun(self) -> Part:
        return Part("torchrun, one rank", 20, self._torchrun([], "nccl"), ["small"])

    def torchrun_by_loopback(self) -> Part:
        command = self._torchrun(["--local-addr", "127.0.0.1"], "loopback")
        return Part("torchrun by the loopback interface", 14, command, ["small"], environment=LOOPBACK)

    def data_parallel(self) -> Part:
        return Part("DataParallel, twice on one device", 15, self._check("data-parallel", **self._checked()))

    def predictor_threads(self) -> Part:
        return Part("a Predictor called by many threads", 20, self._check("predictor-threads", **self._checked()))

    def validated_elsewhere(self, *, amp: str, expected_s: int) -> Part:
        settings = self._checked_data(epochs=self.sizes.evaluated_epochs)
        command = self._check("validate-elsewhere", **settings, folder=self.folder, amp=amp)
        named = "" if amp == "auto" else f", --amp {amp}"
        return Part(f"one process trains, another one validates on the CPU{named}", expected_s, command, ["small"])

    def largest_batch(self) -> Part:
        command = self._check("largest-batch", imgsz=self.sizes.timed_imgsz, data=self.data("many"), folder=self.folder)
        reason = "--batch-size -1 needs a GPU"
        return Part("the largest batch that fits", 180, command, ["many"], cpu_skip_reason=reason)

    # Speed

    def first_steps(self) -> Part:
        command = self._check("first-steps", imgsz=self.sizes.timed_imgsz, batch_size=self.sizes.step_batches[0])
        return Part("the first steps, and a smaller batch", 15, command)

    def loss(self) -> Part:
        sizes = self.sizes
        command = self._check(
            "loss-share",
            imgsz=sizes.timed_imgsz,
            batch_size=sizes.loss_batch,
            model=["yolov8n", "yolo26n"],
            boxes=sizes.loss_boxes,
        )
        return Part("loss and assignment, share of the step", 35, command)

    def first_timed_steps(self) -> Part:
        """Times steps at a few sizes, in the automatic type and in float16."""
        command = self._step(
            model=f"yolov8n:{joined(self.sizes.first_batches)}", amp=["auto", self.sizes.half], rounds=2, peer=self.peer
        )
        return Part("steps alone, bf16 and fp16", 65, command)

    def timed_steps(self) -> Part:
        """Times steps at many sizes, with SGD and Muon, and steps of a larger model."""
        sizes = self.sizes
        models = [f"yolov8n:{joined(sizes.step_batches)}"]
        models += [f"{name}:{sizes.end_to_end_batch}" for name in sizes.larger_models]
        command = self._step(model=models, amp="auto", optimizer=sizes.optimizers, peer=self.peer)
        return Part("steps alone", 100 if self.peer else 70, command)

    def timed_steps_in_half(self) -> Part:
        command = self._step(model="yolov8n", batch_size=self.sizes.half_batches, amp=["bf16", self.sizes.half])
        return Part("float16 against bfloat16, step alone", 25, command)

    def timed_steps_compiled(self, batches: Sequence[int], *, rounds: int, expected_s: int) -> Part:
        command = self._step(compile=True, batch_size=batches, amp="auto", rounds=rounds)
        named = f"batch {batches[0]}" if len(batches) == 1 else f"batches {' and '.join(map(str, batches))}"
        return self._compiled(Part(f"compiled steps, {named}", expected_s, command))

    def end_to_end(self, model: str, *, expected_s: int) -> Part:
        sizes = self.sizes
        command = self._check(
            "train",
            data=self.data("large"),
            model=model,
            imgsz=sizes.timed_imgsz,
            batch_size=sizes.end_to_end_batch,
            epochs=sizes.end_to_end_epochs,
            peer=self.peer,
        )
        return Part(f"end to end, {model}", expected_s, command, ["large"])

    def kernels(self, cases: Sequence[str], *, expected_s: int) -> Part:
        """Lists the costliest kernels. ``cases``: MODEL:BATCH:OPTIMIZER."""
        command = self._check("kernels", imgsz=self.sizes.timed_imgsz, case=cases)
        return Part("the costliest kernels of a step", expected_s, command)

    # --compile

    def equal_compiled_steps(self) -> Part:
        command = self._check("compiled", imgsz=self.sizes.timed_imgsz, batch_size=16)
        return self._compiled(Part("compiled steps equal to uncompiled ones", 75, command))

    def trains_compiled_ddp(self) -> Part:
        command = self._torchrun([], "compiled-ddp", compile=True, nominal_batch=2 * self.sizes.checked_batch)
        return self._compiled(Part("trains compiled, DDP, accumulating", 45, command, ["small"]))

    def trains_compiled_sizes(self) -> Part:
        command = self._train("compiled-sizes", compile=True, multi_scale=True)
        return self._compiled(Part("trains compiled, sizes vary", 45, command, ["small"]))

    # Commands

    def _compiled(self, part: Part) -> Part:
        return replace(part, cpu_skip_reason="on a CPU it takes minutes")

    def _check(self, name: str, **settings) -> list[str]:
        return [sys.executable, "-m", "benchmarks.gpu.checks", name, *flags(device=self.sizes.device, **settings)]

    def _check_weights(self, name: str, at_least: float, **settings) -> list[str]:
        """Checks the score of loaded weights. ``at_least``: minimum score, below which the check proves nothing."""
        needed = at_least if self.sizes.has_learned else 0.0
        defaults = self._checked_data(folder=self.folder, weights=self.weights, at_least=needed)
        return self._check(name, **defaults | settings)

    def _checked(self, **changes) -> dict:
        """Returns settings for checks that make their own batches."""
        return {"imgsz": self.sizes.checked_imgsz, "batch_size": max(self.sizes.checked_batch, 2)} | changes

    def _checked_data(self, **changes) -> dict:
        """Returns settings for checks on the small data set."""
        sizes = self.sizes
        defaults = {"imgsz": sizes.checked_imgsz, "batch_size": sizes.checked_batch, "data": self.data("small")}
        return defaults | changes

    def _step(self, **settings) -> list[str]:
        sizes = self.sizes
        defaults = {"device": sizes.device, "imgsz": sizes.timed_imgsz, "steps": sizes.steps, "rounds": sizes.rounds}
        return [sys.executable, "-m", "benchmarks.speed.step", *flags(**defaults | settings)]

    def _train(self, run: str, **settings) -> list[str]:
        """Returns the command of train.py, for one epoch on the small set unless ``settings`` differ."""
        defaults = self._checked_data(model="yolov8n", epochs=1, device=self.sizes.device, workers=2, noplots=True)
        defaults |= {"project": self.folder / "runs", "name": run, "exist_ok": True}
        return [sys.executable, "train.py", *flags(**defaults | settings)]

    def _torchrun(self, launch: Sequence[str], run: str, **settings) -> list[str]:
        """Returns a training command started by torchrun. ``launch``: flags of torchrun."""
        python, *script = self._train(run, **settings)
        launcher = [python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1"]
        return [*launcher, *launch, *script]


def joined(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))
