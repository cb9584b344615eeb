"""Non-maximum suppression of a validation batch, compared with torchvision's kernel and Ultralytics: the same boxes and
scores, similar to those of a trained model (many boxes around each object, most cells background).

    python -m benchmarks.nms --batch-size 16 --peer PYTHON
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.report import Comparison, add_flags, show
from benchmarks.turns import ROOT, alternate


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.nms", description=__doc__.split(":")[0])
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--boxes", type=int, default=8400, help="cells an image; 8400: 640 px, strides 8, 16, 32")
    parser.add_argument("--classes", type=int, default=80)
    parser.add_argument("--objects", type=int, default=30, help="an image")
    parser.add_argument("--device", default="cpu")
    add_flags(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "input.pt")
        content = make_input(options.batch_size, options.boxes, options.classes, options.objects)
        torch.save(content, path)
        shared = ["nms", "--input", str(path), "--device", options.device]
        ours = [sys.executable, "-m", "benchmarks.our_side", *shared]
        commands = {"ours": ours, "torchvision": [*ours, "--rule", "torchvision"]}
        if options.peer:
            commands["peer"] = [options.peer, str(ROOT / "benchmarks" / "ultralytics_side.py"), *shared]
        results = alternate(commands, options.rounds)
    candidates = (content["scores"] > 0.001).sum() / options.batch_size
    kept = {name: values[0]["kept"] / options.batch_size for name, values in results.items()}
    print(f"figure: {candidates:.0f} candidates an image; kept: {', '.join(f'{k} {v:.1f}' for k, v in kept.items())}")
    shared_boxes = results["torchvision"][0]["agreement"]
    print(f"figure: ours and torchvision's agree on {shared_boxes:.2%} of the boxes that either keeps")
    seconds = {name: [r["seconds"] * 1000 / options.batch_size for r in values] for name, values in results.items()}
    title = f"NMS, {options.boxes} cells, {options.classes} classes, {candidates:.0f} candidates, {options.device}"
    what = f"NMS, batch {options.batch_size}"
    rows = [Comparison(f"{what}, against torchvision", "ms an image", seconds["ours"], seconds["torchvision"])]
    if "peer" in seconds:
        rows.append(Comparison(f"{what}, against Ultralytics", "ms an image", seconds["ours"], seconds["peer"]))
    show(title, rows, log=options.log)


def make_input(batch: int, boxes: int, classes: int, objects: int) -> dict[str, torch.Tensor]:
    """``boxes_xyxy`` (B, N, 4) of a 640 px canvas and ``scores`` (B, N, C)."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    center = torch.rand(batch, objects, 2, generator=generator) * 640
    size = 20 * torch.exp(normal(batch, objects, 2) * 0.7 + 1)
    label = torch.randint(0, classes, (batch, objects), generator=generator)
    owner = torch.randint(0, objects, (batch, boxes), generator=generator)
    pick = owner[..., None].expand(-1, -1, 2)
    own_size = size.gather(1, pick) * torch.exp(normal(batch, boxes, 2) * 0.15)
    own_center = center.gather(1, pick) + normal(batch, boxes, 2) * own_size * 0.15
    scores = (normal(batch, boxes, classes) * 1.2 - 11).sigmoid()
    own_score = (normal(batch, boxes, 1) * 2.5 - 6.5).sigmoid()
    scores.scatter_(2, label.gather(1, owner)[..., None], own_score)
    corners = torch.cat([own_center - own_size / 2, own_center + own_size / 2], -1).clamp(0, 640)
    return {"boxes_xyxy": corners, "scores": scores}


if __name__ == "__main__":
    main()
