"""Entry points of torch.hub, with the names that users of YOLOv5's hub models know.

    model = torch.hub.load("path/of/this/folder", "custom", path="best.pt", source="local")
    model = torch.hub.load("path/of/this/folder", "yolov8n", source="local")     # public weights, downloaded once
    results = model(["a.jpg", "b.jpg"], size=640)
    results.print()

engine/inference/hub.py describes the model and its results.
"""

from __future__ import annotations

import functools
import os
import pathlib
import sys
import typing

if typing.TYPE_CHECKING:
    from engine.inference.hub import HubModel

dependencies = ["torch", "cv2", "numpy", "yaml", "PIL"]
_ROOT = pathlib.Path(__file__).resolve().parent
_PACKAGES = ("utils", "data", "models", "engine")


def custom(
    path: str | os.PathLike,
    autoshape: bool = True,
    _verbose: bool = True,
    device: str | int | None = None,
    trust: bool = False,
) -> HubModel:
    """The model of a checkpoint or exported file. The parameters have the order of YOLOv5's hub.

    Args:
        autoshape: only True: the model takes images of any kind and size.
        _verbose: prints log lines.
        device: cpu, mps, a GPU's number, or None for the best available device.
        trust: open a TorchScript, .pt2 or OpenVINO file that you have not exported; it may run code in it.
    """
    if not autoshape:
        raise ValueError("autoshape=False: use models.weights.load.load_detector for the bare module")
    from engine.inference.hub import HubModel
    from utils.logger import configure_logging

    if _verbose:
        configure_logging(True)
    return HubModel(path, device, trust)


def _public(name: str, pretrained: bool = True, **settings: typing.Any) -> HubModel:
    """The model of public weights (configs/weights.yaml), which are downloaded if they are not on this machine.

    ``settings``: as of `custom`.
    """
    if not pretrained:
        raise ValueError(f"{name}: only pretrained models are loaded here; train.py --model {name} trains a new one")
    return custom(name, **settings)


def _names() -> list[str]:
    from models.weights.download import CATALOG
    from utils.config.yaml_files import load_yaml

    return list(load_yaml(CATALOG))


def __getattr__(name: str) -> typing.Callable[..., HubModel]:
    """The public weights are entry points too: `torch.hub.load(folder, "yolov8n", source="local")`."""
    if not name.startswith("_") and name in _names():
        return functools.partial(_public, name)
    raise AttributeError(f"hubconf.py has no {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_names()]


def _check_packages() -> None:
    """Raises ImportError if another module already has the name of one of this folder's packages."""
    for name in _PACKAGES:
        module = sys.modules.get(name)
        if module is None:
            continue
        places = [*getattr(module, "__path__", ()), getattr(module, "__file__", None) or "built in"]
        if _ROOT / name not in (pathlib.Path(place).resolve() for place in places):
            raise ImportError(
                f"a module named {name} is already imported from {places[0]}, but {_ROOT} has a package of this name; "
                "load the model before that module, or in another process"
            )


_check_packages()
