"""Runs in a peer's environment, not in this program's: writes checkpoints with random weights as the peer writes them,
and the peer's outputs for one image. test_peer_outputs.py compares them.

    PEER/bin/python tests/models/peers/write.py ultralytics OUT yolo11n yolo26n yolov9t
    PEER/bin/python tests/models/peers/write.py yolox OUT yolox-nano

OUT/NAME.npz contains the image, uint8 (H, W, 3) RGB; decoded boxes (N, 4), cx cy w h in pixels, and scores (N, C); and
raw maps (channels, N), one array per branch of the head; in float32, computed in float64, because deep random networks
amplify rounding errors, which could hide other differences. The weights are periodic, so that the files can be
compressed.
"""

from __future__ import annotations

import math
import sys
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

CLASSES = 3
HEIGHT, WIDTH = 64, 96
PERIOD = 251  # of the weights; a prime, so that no two output channels of a convolution are alike


def randomise(net: nn.Module, seed: int, scale: float = 1.0) -> None:
    """Random weights, and the batch statistics that pictures give with them, so that activations stay in range.

    ``scale``: of the network's input, 255 where it takes bytes.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(tensor: Tensor) -> Tensor:
        repeats = -(-tensor.numel() // PERIOD)
        return torch.randn(PERIOD, generator=generator).repeat(repeats)[: tensor.numel()].view_as(tensor)

    norms = [module for module in net.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.weight.data.copy_(1 + 0.2 * draw(norm.weight))
        norm.bias.data.copy_(0.2 * draw(norm.bias))
    for name, module in net.named_modules():
        if isinstance(module, nn.Conv2d) and not name.endswith("dfl.conv"):
            predicts = module.bias is not None  # no batch norm follows
            gain = 0.1 if predicts else 1.0
            module.weight.data.copy_(gain * draw(module.weight) / math.sqrt(module.weight[0].numel()))
            if predicts:
                module.bias.data.copy_(0.3 * draw(module.bias))
    net.eval()
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.train().momentum = 1.0
    with torch.no_grad():
        net(scale * torch.stack([as_tensor(picture(192, 192, seed + 1 + i)) for i in range(4)]))
    for norm, momentum in zip(norms, momenta):
        norm.eval().momentum = momentum


def picture(height: int, width: int, seed: int) -> np.ndarray:
    """Returns soft blobs and noise, uint8 (H, W, 3)."""
    rng = np.random.default_rng(seed)
    coarse = torch.from_numpy(rng.random((1, 3, 5, 7), dtype=np.float32))
    smooth = nn.functional.interpolate(coarse, (height, width), mode="bicubic", align_corners=False)[0]
    noisy = smooth.permute(1, 2, 0).numpy() + rng.normal(0, 0.05, (height, width, 3))
    return (noisy.clip(0, 1) * 255).astype(np.uint8)


def as_tensor(image: np.ndarray) -> Tensor:
    """Returns float32 (3, H, W) in [0, 1], channels in the order they have."""
    return torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1).float() / 255


def ultralytics_outputs(name: str, out: Path, image: np.ndarray, seed: int) -> dict:
    from ultralytics import YOLO
    from ultralytics.nn.tasks import DetectionModel

    model = YOLO(f"{name}.yaml")
    model.model = DetectionModel(f"{name}.yaml", nc=CLASSES, verbose=False)
    model.model.names = {i: f"class {i}" for i in range(CLASSES)}
    randomise(model.model, seed)
    path = out / f"{name}.pt"
    model.save(path)
    drop_notices(path)
    net = YOLO(path).model.double().eval()  # what the file holds, which is float16
    with torch.inference_mode():
        decoded, raw = net(as_tensor(image)[None].double())
    branches = {"raw": raw} if "boxes" in raw else {f"raw_{key}": value for key, value in raw.items()}
    maps = {key: torch.cat((value["boxes"], value["scores"]), 1)[0] for key, value in branches.items()}
    boxes, scores = decoded[0].T.split((4, CLASSES), 1)
    return {"boxes": boxes, "scores": scores, **maps}


def drop_notices(path: Path) -> None:
    """Removes from a test file what is not read: the package's texts. Random weights and their objects are kept."""
    content = torch.load(path, weights_only=False)
    kept = {key: value for key, value in content.items() if key in ("epoch", "model", "ema")}
    torch.save(kept, path)


def yolox_outputs(name: str, out: Path, image: np.ndarray, seed: int) -> dict:
    from yolox.exp import get_exp

    experiment = get_exp(None, name)
    experiment.num_classes = CLASSES
    net = experiment.get_model().eval()
    randomise(net, seed, scale=255.0)
    torch.save({"start_epoch": 1, "model": net.state_dict(), "optimizer": {}}, out / f"{name}.pth")
    net.double()
    pixels = 255 * as_tensor(image[..., ::-1])[None].double()  # BGR
    with torch.inference_mode():
        decoded = net(pixels)[0]
        net.head.decode_in_inference = False
        raw = net(pixels)[0]
    boxes, objectness, scores = decoded.split((4, 1, CLASSES), 1)
    return {"boxes": boxes, "scores": objectness * scores, "raw_boxes": raw[:, :4].T}


PEERS = {"ultralytics": ultralytics_outputs, "yolox": yolox_outputs}


def main(package: str, folder: str, *names: str) -> None:
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    for name in names:
        seed = zlib.crc32(name.encode())
        image = picture(HEIGHT, WIDTH, seed)
        outputs = PEERS[package](name, out, image, seed)
        arrays = {key: value.float().numpy() for key, value in outputs.items()}
        np.savez_compressed(out / f"{name}.npz", image=image, **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
