"""Imports packages without telemetry and without what they log meanwhile; optional ones may be missing."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import cast

from utils.errors import UserError

PACKAGES = {  # packages whose module has another name
    "PIL": "pillow",
    "ai_edge_litert": "ai-edge-litert",
    "ai_edge_quantizer": "ai-edge-quantizer",
    "cv2": "opencv-python",
    "litert_torch": "litert-torch",
    "yaml": "PyYAML",
}
_REQUIREMENTS = {"ray": '"ray[default,train]"'}  # of packages with extras
# By package: variables that it reads when it is imported, with values for which it opens no connection on its own.
_NO_TELEMETRY = {
    "albumentations": {"NO_ALBUMENTATIONS_UPDATE": "1"},  # else it looks for a newer version
    "mlflow": {"MLFLOW_DISABLE_TELEMETRY": "true"},
    "onnxruntime": {"ORT_DISABLE_TELEMETRY": "1"},
    "ray": {"RAY_USAGE_STATS_ENABLED": "0"},
    "wandb": {"WANDB_ERROR_REPORTING": "false"},
}
_REPORTING_PACKAGES = {"openvino": "openvino_telemetry"}  # reports imports and conversions if it can be imported


def require_installed(modules: Iterable[str], purpose: str, alternative: str) -> None:
    """Reports missing packages before the work starts. Does not import them.

    Raises UserError, which says that ``purpose`` needs the packages, and what to do instead of installing them.
    """
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if len(missing) == 1:
        raise _missing_package(missing[0], "is not installed", purpose, alternative)
    if missing:
        packages = ", ".join(PACKAGES.get(module, module) for module in missing)
        requirements = " ".join(dict.fromkeys(_requirement(module) for module in missing))
        raise UserError(
            f"{purpose}: the packages {packages} are not installed; pip install {requirements}, or {alternative}"
        )


def require_package(module: str, purpose: str, alternative: str) -> ModuleType:
    """Imports an optional package with its telemetry off, unless the user's environment turns it on. Returns it.

    Raises UserError, which says that ``purpose`` needs the package, and what to do instead of installing it.
    """
    try:
        with _without_telemetry(module):
            return import_quietly(module)
    except ImportError as error:
        is_missing = isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == module
        reason = "is not installed" if is_missing else f"cannot be loaded ({' '.join(str(error).split())})"
        raise _missing_package(module, reason, purpose, alternative) from None


def import_quietly(name: str) -> ModuleType:
    """Imports a module without the warnings that its package logs meanwhile: Matplotlib's about a home folder that it
    cannot write to, and about its list of fonts. Raises what the import raises."""
    logger = logging.getLogger(name.partition(".")[0])
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        return importlib.import_module(name)
    finally:
        logger.setLevel(level)


def _missing_package(module: str, reason: str, purpose: str, alternative: str) -> UserError:
    package = PACKAGES.get(module, module)
    return UserError(f"{purpose}: the package {package} {reason}; pip install {_requirement(module)}, or {alternative}")


def _requirement(module: str) -> str:
    """Returns what to install with pip, with the extras that are used."""
    return _REQUIREMENTS.get(module) or PACKAGES.get(module, module)


@contextlib.contextmanager
def _without_telemetry(module: str) -> Iterator[None]:
    """Disables the telemetry of ``module`` while the block imports it."""
    for variable, value in _NO_TELEMETRY.get(module, {}).items():
        os.environ.setdefault(variable, value)
    reporter = _REPORTING_PACKAGES.get(module)
    if reporter is None or reporter in sys.modules:
        yield
        return
    # Python raises ImportError for a module that is None here; the annotation of sys.modules does not know it.
    sys.modules[reporter] = cast(ModuleType, None)
    try:
        yield
    finally:
        sys.modules.pop(reporter, None)
