"""The step's fraction of the device's peak, both measured in the same type: floating-point operations of the model's
convolutions and matrix products, forwards and backwards, over the time of the whole step, against the better of a large
matrix product and a large convolution.

    python -m benchmarks.roofline --model yolov8n --imgsz 320 --batch-size 16
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.our_side import seconds_of
from benchmarks.report import append_log
from benchmarks.training_step import build_step, make_batches


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.roofline", description=__doc__.split(":")[0])
    parser.add_argument("--model", default="yolov8n")
    parser.add_argument("--imgsz", type=int, default=320)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--amp", nargs="+", default=["off", "auto"])
    parser.add_argument("--log", action="store_true", help="append a dated row to benchmarks/README.md")
    options = parser.parse_args()
    for amp in options.amp:
        text = measure(options.model, options.imgsz, options.batch_size, options.device, amp)
        print(f"figure: {text}", flush=True)
        if options.log:
            append_log(f"Roofline: {text}.")


def measure(model: str, imgsz: int, batch_size: int, device_name: str, amp: str) -> str:
    take_step = build_step(model, device=device_name, amp=amp)
    device, dtype = take_step.ctx.device, take_step.amp_dtype or torch.float32
    (batch,) = make_batches(1, batch_size, imgsz, device)
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1
        take_step([batch], [batch_size], steps)
        take_step.reader.pop()

    with FlopCounterMode(display=False) as counter:
        step()
    operations = counter.get_total_flops()
    for _ in range(2):
        step()
    seconds = seconds_of(step, 8, device.type)
    peaks = {
        "matrix product": peak_of_matrix_product(device, dtype),
        "convolution": peak_of_convolution(device, dtype),
    }
    best, name = max(peaks, key=peaks.get), str(dtype).removeprefix("torch.")
    rate = operations / seconds
    return (
        f"{model} {imgsz} px, batch {batch_size}, {name}: {operations / 1e9:.0f} GFLOP in {seconds * 1000:.1f} ms = "
        f"{rate / 1e12:.3g} TFLOP/s, {rate / peaks[best]:.1%} of the {peaks[best] / 1e12:.3g} of a large {best}"
    )


def peak_of_matrix_product(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of a square matrix product."""
    side = 8192 if device.type == "cuda" else 1536
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    return 2 * side**3 / _best_seconds(lambda: a @ b, device)


def peak_of_convolution(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of a 3 x 3 convolution with 256 channels."""
    channels, side, images = 256, 80, 32 if device.type == "cuda" else 2
    layer = nn.Conv2d(channels, channels, 3, padding=1, bias=False).to(device, dtype, memory_format=torch.channels_last)
    x = torch.randn(images, channels, side, side, device=device, dtype=dtype).to(memory_format=torch.channels_last)

    def convolve() -> Tensor:
        with torch.no_grad():
            return layer(x)

    return 2 * images * side * side * channels * channels * 9 / _best_seconds(convolve, device)


def _best_seconds(action, device: torch.device) -> float:
    for _ in range(3):
        action()
    return min(seconds_of(action, 5, device.type) for _ in range(4))


if __name__ == "__main__":
    main()
