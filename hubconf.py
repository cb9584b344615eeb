"""Entry points of torch.hub.

    model = torch.hub.load("path/of/this/folder", "custom", path="best.pt", source="local")
    model = torch.hub.load("path/of/this/folder", "yolov8n", source="local")     # public weights, downloaded once
    results = model(["a.jpg", "b.jpg"])
    print(results.pandas().xyxy[0])

Models and results are those of `lockstep.load`, and take what programs for YOLOv5 use most of theirs
(engine/inference/hub.py).
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


def custom(path: str | os.PathLike, *arguments: typing.Any, **settings: typing.Any) -> HubModel:
    """Loads a checkpoint or an exported file. Takes the arguments of `load_from_hub`."""
    from engine.inference.hub import load_from_hub

    return load_from_hub(path, *arguments, **settings)


def _names() -> list[str]:
    """Lists the names of the public weights."""
    from models.weights.catalog import CATALOG
    from utils.config.yaml_files import load_yaml

    return list(load_yaml(CATALOG))


def __getattr__(name: str) -> typing.Callable[..., HubModel]:
    """Makes each name of public weights an entry point: `torch.hub.load(folder, "yolov8n", source="local")`."""
    if not name.startswith("_") and name in _names():
        return functools.partial(custom, name)
    raise AttributeError(f"hubconf.py has no {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_names()]


def _check_packages() -> None:
    """Raises ImportError if an imported module has the name of one of this folder's packages."""
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
