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

from benchmarks.command import end_of, parse_flags, positive, run_benchmark
from benchmarks.speed.compare import PEER, Comparison, Sides, our_command, peer_command, show


def main() -> None:
    options = parse_flags(
        "speed.step",
        __doc__,
        model={
            "nargs": "+",
            "type": sizes_of,
            "default": [("yolov8n", [])],
            "help": "names, or names with batch sizes: yolov8n:16,64",
        },
        imgsz={"default": 320},
        batch_size={"nargs": "+", "default": [16], "help": "for models that are named without sizes"},
        amp={},
        compile={"action": "store_true", "help": "torch.compile on our side"},
        optimizer={"nargs": "+", "default": ["SGD"], "help": "on our side; the peer's is SGD"},
        device={},
        steps={"type": positive, "default": 4, "help": "steps per turn"},
        threads={"type": int, "default": 0, "help": "on CPUs; 0: torch's choice"},
        rounds={},
        peer={},
    )
    shared = {name: getattr(options, name) for name in ("imgsz", "device", "steps", "threads")}
    commands = {
        f"{amp} {optimizer}": our_command("step", **shared, amp=amp, optimizer=optimizer, compile=options.compile)
        for amp, optimizer in itertools.product(options.amp, options.optimizer)
    }
    if options.peer:
        commands[PEER] = peer_command(options.peer, "step", **shared)
    rows = []
    errors = []
    with Sides(commands) as sides:
        for model, batch_sizes in options.model:
            for batch_size in batch_sizes or options.batch_size:
                results = sides.alternate(options.rounds, model=model, batch_size=batch_size)
                case_rows, case_errors = rows_of(results, f"{model} batch {batch_size}", options, batch_size)
                rows += case_rows
                errors += case_errors
    show(f"Training step, {options.imgsz} px, device {options.device}", rows)
    if errors:
        sys.exit("; ".join(errors))


def sizes_of(named: str) -> tuple[str, list[int]]:
    """Splits ``yolov8n:16,64`` into the model and its batch sizes. Raises argparse.ArgumentTypeError for other sizes
    than positive numbers."""
    model, _, sizes = named.partition(":")
    return model, [positive(size) for size in sizes.split(",")] if sizes else []


def rows_of(
    results: dict[str, list[dict]], case: str, options: argparse.Namespace, batch_size: int
) -> tuple[list[Comparison], list[str]]:
    """Returns rows of seconds per step and, on a GPU, of images per second, and the errors of the sides that failed."""
    rows = []
    errors = []
    seconds: dict[str, list[float]] = {}
    for name, turns in results.items():
        problems = [turn["error"] for turn in turns if "error" in turn]
        errors += [f"{name}, {case}: {end_of(SystemExit(problem))}" for problem in problems[:1]]
        seconds[name] = [] if problems else [turn["seconds"] for turn in turns]
    peer_seconds = seconds.pop(PEER, [])
    suffix = " compiled" if options.compile else ""
    if peer_seconds and results[PEER][0]["batches_per_update"] > 1:
        suffix += f" (peer: an update in {results[PEER][0]['batches_per_update']} batches)"
    for name, of_name in seconds.items():
        if of_name:
            label = f"{case} {results[name][0]['dtype']} {name.split()[1]}{suffix}"
            rows.append(Comparison(label, "s", of_name, peer_seconds))
            if options.device != "cpu":
                rates = ([batch_size / value for value in values] for values in (of_name, peer_seconds))
                rows.append(Comparison(label, "images/s", *rates, higher_is_better=True))
    return rows, errors


if __name__ == "__main__":
    run_benchmark(main)
