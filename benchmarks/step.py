"""One training step, ours against Ultralytics': forward, loss, backward, clipping, optimiser and averaged weights, with
the same pictures a step and the same number of boxes.

    python -m benchmarks.step --model yolov8n --imgsz 320 --batch-size 16 --amp off auto --peer PYTHON
    python -m benchmarks.step --model yolov8n yolov8s --imgsz 640 --batch-size 64 256 --device 0 --peer PYTHON

The peer's step is what its trainer does by default: float32 NCHW on CPUs, float16 with a scaler on GPUs; SGD on both
sides. Both processes stay; their steps alternate in blocks.
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.report import Comparison, add_flags, show
from benchmarks.turns import ROOT, alternate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", nargs="+", default=["yolov8n"])
    parser.add_argument("--imgsz", type=int, default=320)
    parser.add_argument("--batch-size", type=int, nargs="+", default=[16])
    parser.add_argument("--amp", nargs="+", default=["off", "auto"], help="of ours: off, auto, bf16, fp16")
    parser.add_argument("--compile", action="store_true", help="torch.compile on our side")
    parser.add_argument("--optimizer", default="SGD", help="of ours; the peer's is SGD")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=4, help="a turn")
    parser.add_argument("--threads", type=int, default=0, help="on CPUs; 0: torch's choice")
    add_flags(parser)
    options = parser.parse_args()
    rows = []
    for model in options.model:
        for batch_size in options.batch_size:
            rows += compare(options, model, batch_size)
    show(f"Training step, {options.imgsz} px, device {options.device}, {options.optimizer}", rows, log=options.log)


def compare(options: argparse.Namespace, model: str, batch_size: int) -> list[Comparison]:
    shared = ["--imgsz", str(options.imgsz), "--batch-size", str(batch_size), "--device", options.device]
    shared += ["--steps", str(options.steps), "--threads", str(options.threads)]
    commands = {}
    for amp in options.amp:
        ours = [sys.executable, "-m", "benchmarks.our_side", "step", "--model", model, "--amp", amp, *shared]
        commands[amp] = [*ours, "--optimizer", options.optimizer, *(["--compile"] if options.compile else [])]
    if options.peer:
        side = str(ROOT / "benchmarks" / "ultralytics_side.py")
        commands["peer"] = [options.peer, side, "step", "--model", f"{model}.yaml", *shared]
    results = alternate(commands, options.rounds)
    peer = [r["seconds"] for r in results.get("peer", [])]
    goals = {"off": 1.25, "auto": 2.0}  # of yolov8n at 320 px, batch 16, on CPUs
    is_goal = (model, options.imgsz, batch_size, options.device) == ("yolov8n", 320, 16, "cpu")
    rows = []
    for amp in options.amp:
        what = f"{model} batch {batch_size} {results[amp][0]['dtype']}{' compiled' if options.compile else ''}"
        seconds = [r["seconds"] for r in results[amp]]
        rows.append(Comparison(what, "s", seconds, peer, goal=goals.get(amp) if is_goal else None))
        if options.device != "cpu":
            rates = [batch_size / s for s in seconds]
            rows.append(Comparison(what, "images/s", rates, [batch_size / s for s in peer], higher_is_better=True))
    return rows


if __name__ == "__main__":
    main()
