"""One training step, compared with Ultralytics: forward, loss, backward, clipping, optimizer and averaged weights, with
the same images per step and the same number of boxes.

    python -m benchmarks.speed.step --model yolov8n --imgsz 320 --batch-size 16 --amp off auto --peer PYTHON
    python -m benchmarks.speed.step --model yolov8n:16,64,256 yolov8s:64 --imgsz 640 --optimizer SGD Muon --device 0

A step is one batch, including its share of the weight update. The peer's step follows its trainer's defaults: float32
on CPUs, float16 with a scaler and channels last on GPUs; deterministic algorithms; one update per about 64 images. Ours
updates the weights with every batch. The peer's optimizer is always SGD. All processes stay alive and take turns.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack

from benchmarks.entrypoint import run_benchmark
from benchmarks.flag_types import at_least, choices_of, image_size
from benchmarks.peer import PEER_SIDE, find_peer
from benchmarks.processes import end_of
from benchmarks.speed.report import Comparison, add_flags, show
from benchmarks.speed.sides import Side

PEER = "peer"


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.speed.step", description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--model",
        nargs="+",
        type=sizes_of,
        default=[("yolov8n", [])],
        help="names, or names with batch sizes: yolov8n:16,64",
    )
    parser.add_argument("--imgsz", type=image_size, default=320, help="side of the images, pixels")
    parser.add_argument(
        "--batch-size", type=at_least(1), nargs="+", default=[16], help="for models that are named without sizes"
    )
    parser.add_argument("--amp", nargs="+", default=["off", "auto"], choices=choices_of("amp"), help="on our side")
    parser.add_argument("--compile", action="store_true", help="torch.compile on our side")
    optimizers = [name for name in choices_of("optimizer") if name != "auto"]
    parser.add_argument(
        "--optimizer", nargs="+", default=["SGD"], choices=optimizers, help="on our side; the peer's is SGD"
    )
    parser.add_argument("--device", default="cpu", help="cpu, or the number of a GPU")
    parser.add_argument("--steps", type=at_least(1), default=4, help="steps per turn")
    parser.add_argument("--threads", type=at_least(0), default=0, help="on CPUs; 0: torch's choice")
    add_flags(parser)
    options = parser.parse_args()
    options.peer = find_peer(options.peer)
    rows = []
    errors = []
    flags = step_flags(imgsz=options.imgsz, device=options.device, steps=options.steps, threads=options.threads)
    own_flags = ["--compile"] if options.compile else []
    with StepProcesses(options.amp, flags, own_flags=own_flags, peer=options.peer) as sides:
        for model, batch_sizes in options.model:
            for batch_size in batch_sizes or options.batch_size:
                model_rows, model_errors = compare(options, sides, model, batch_size)
                rows += model_rows
                errors += model_errors
    show(f"Training step, {options.imgsz} px, device {options.device}", rows)
    if errors:
        sys.exit("; ".join(errors))


def sizes_of(named: str) -> tuple[str, list[int]]:
    """Splits ``yolov8n:16,64`` into the model and its batch sizes. Raises argparse.ArgumentTypeError for other sizes
    than positive numbers."""
    model, _, sizes = named.partition(":")
    try:
        return model, [at_least(1)(size) for size in sizes.split(",")] if sizes else []
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"{named}: batch sizes must be positive numbers, as in yolov8n:16,64"
        ) from None


def step_flags(*, imgsz: int, device: str, steps: int, threads: int = 0) -> list[str]:
    """Returns the flags that both sides take."""
    return ["--imgsz", str(imgsz), "--device", device, "--steps", str(steps), "--threads", str(threads)]


class StepProcesses(AbstractContextManager):
    """Processes that time steps: ours by autocast type, and the peer's."""

    def __init__(
        self, amp: Sequence[str], flags: Sequence[str], *, own_flags: Sequence[str] = (), peer: str = ""
    ) -> None:
        """``flags``: of both sides (`step_flags`); ``own_flags``: further ones of benchmarks.speed.our_side; ``peer``:
        Python of the peer's environment, if it takes part."""
        ours = [sys.executable, "-m", "benchmarks.speed.our_side", "step", *flags, *own_flags]
        self._commands = {name: [*ours, "--amp", name] for name in amp}
        if peer:
            self._commands[PEER] = [peer, str(PEER_SIDE), "step", *flags]
        self._sides: dict[str, Side] = {}
        self._ended: dict[str, str] = {}  # reasons of the sides that ended by themselves
        self._stack = ExitStack()

    def __enter__(self) -> StepProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._commands

    def measure(self, name: str, **arguments: object) -> dict:
        """Measures a turn of one side, which is started on its first turn. "error" is why there are no "seconds"."""
        if name in self._ended:
            return {"error": self._ended[name]}
        try:
            if name not in self._sides:
                self._sides[name] = self._stack.enter_context(Side(self._commands[name]))
                self._sides[name].result()  # it is ready
            return self._sides[name].measure(**arguments)
        except SystemExit as error:  # the others' figures are still worth having
            self._ended[name] = end_of(error)
            return {"error": self._ended[name]}


def compare(
    options: argparse.Namespace, sides: StepProcesses, model: str, batch_size: int
) -> tuple[list[Comparison], list[str]]:
    """Lets the sides measure alternately. Returns table rows and errors."""
    cases = list(itertools.product(options.amp, options.optimizer))
    ours: dict[tuple[str, str], list[dict]] = {case: [] for case in cases}
    peer: list[dict] = []
    for _ in range(options.rounds):
        for amp, optimizer in cases:
            turn = sides.measure(amp, model=model, batch_size=batch_size, optimizer=optimizer)
            ours[amp, optimizer].append(turn)
        if PEER in sides:
            peer.append(sides.measure(PEER, model=f"{model}.yaml", batch_size=batch_size))
    peer_seconds, errors = seconds_or_error(peer, f"Ultralytics, {model} batch {batch_size}")
    suffix = " compiled" if options.compile else ""
    if peer and peer[0].get("batches_per_update", 1) > 1:
        suffix += f" (peer: an update in {peer[0]['batches_per_update']} batches)"
    rows = []
    for (amp, optimizer), turns in ours.items():
        label = f"{model} batch {batch_size} {turns[0].get('dtype', amp)} {optimizer}{suffix}"
        seconds, own_errors = seconds_or_error(turns, label)
        errors += own_errors
        if seconds:
            rows += rows_of(label, seconds, peer_seconds, images=0 if options.device == "cpu" else batch_size)
    return rows, errors


def rows_of(label: str, seconds: Sequence[float], peer_seconds: Sequence[float], *, images: int) -> list[Comparison]:
    """Returns a row of seconds per step and, unless ``images`` per step is 0, a row of images per second."""
    rows = [Comparison(label, "s", seconds, peer_seconds)]
    if images:
        rates = [images / value for value in seconds]
        peer_rates = [images / value for value in peer_seconds]
        rows.append(Comparison(label, "images/s", rates, peer_rates, higher_is_better=True))
    return rows


def seconds_or_error(turns: Sequence[dict], label: str) -> tuple[list[float], list[str]]:
    """Returns the seconds of all turns and no error, or no seconds and the error of one turn."""
    errors = [turn["error"] for turn in turns if "error" in turn]
    if errors:
        return [], [f"{label}: {errors[0]}"]
    return [turn["seconds"] for turn in turns], []


if __name__ == "__main__":
    run_benchmark(main)
