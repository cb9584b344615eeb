"""Names of classes that a checkpoint does not give itself."""

from __future__ import annotations

from pathlib import Path

from utils.config import load_yaml
from utils.logger import get_logger

COCO = Path(__file__).parents[1] / "configs" / "data" / "coco.yaml"


def names_for(count: int, names: tuple[str, ...] | None, source: str | Path) -> tuple[str, ...] | None:
    """``names`` if there are ``count``. Without names, 80 classes are taken to be COCO's, in the usual order, and the
    log says so: YOLOX's files and bare state dicts hold none. Otherwise None."""
    if names is not None:
        return names if len(names) == count else None
    listed = load_yaml(COCO)["names"]
    coco = tuple(listed[i] for i in range(len(listed)))
    if count != len(coco):
        return None
    get_logger().info("%s: holds no class names; its %d classes are taken to be COCO's", source, count)
    return coco
