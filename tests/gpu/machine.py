"""What the checks run on: a GPU, or the CPU in a dry run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.engine.gpu_cases import MODELS

Figure = Callable[[str, object], None]  # the fixture `figure`


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The device of the checks, and their sizes there.

    Attributes:
        device: as of ``--device``.
        half: ``--amp`` of trainings in half precision; on a GPU with a loss scaler.
        heads: a model of each kind of head.
        imgsz, batch_size: of training steps and short trainings.
        demo_images: training images of the data set; a quarter of this number are validation images.
        epochs: of the training whose weights are validated and exported.
        learns: whether this training is long enough for a good detector.
        resumed_epochs: of trainings that are interrupted.
    """

    device: str
    half: str
    heads: dict[str, str | dict]
    imgsz: int
    batch_size: int
    demo_images: int
    epochs: int
    learns: bool
    resumed_epochs: int


GPU = Machine(
    device="0",
    half="fp16",
    heads={"yolov8": "yolov8n", "yolov5": "yolov5n", "yolo26": "yolo26n", "yolox": "yoloxnano"},
    imgsz=320,
    batch_size=8,
    demo_images=256,
    epochs=20,
    learns=True,
    resumed_epochs=2,
)
DRY_RUN = Machine(
    device="cpu",
    half="bf16",
    heads=MODELS,
    imgsz=64,
    batch_size=4,
    demo_images=32,
    epochs=2,
    learns=False,
    resumed_epochs=4,
)
