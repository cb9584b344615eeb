"""Imports packages with their telemetry off and without their import-time warnings; explains missing packages."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import cast

from utils.errors import UserError

DISTRIBUTION_NAMES = {  # of packages whose module has another name
    "PIL": "pillow",
    "ai_edge_litert": "ai-edge-litert",
    "ai_edge_quantizer": "ai-edge-quantizer",
    "cv2": "opencv-python",
    "litert_torch": "litert-torch",
    "yaml": "PyYAML",
}
_REQUIREMENTS = {"ray": '"ray[default,train]"'}  # for packages with extras
# By package: environment variables read at import, with values that stop the package from opening connections.
_NO_TELEMETRY = {
    "albumentations": {"NO_ALBUMENTATIONS_UPDATE": "1"},  # otherwise it looks for a newer version
    "mlflow": {"MLFLOW_DISABLE_TELEMETRY": "true"},
    "onnxruntime": {"ORT_DISABLE_TELEMETRY": "1"},
    "ray": {"RAY_USAGE_STATS_ENABLED": "0"},  # nightly versions report by default
    "wandb": {"WANDB_ERROR_REPORTING": "false"},
}
_REPORTING_PACKAGES = {"openvino": "openvino_telemetry"}  # would report imports and conversions


def require_installed(modules: Iterable[str], purpose: str, alternative: str) -> None:
    """Checks, before work starts, that packages are installed. Does not import them.

    Raises UserError, which states that ``purpose`` needs the missing packages, and the ``alternative`` to installing
    them.
    """
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if len(missing) == 1:
        raise _missing_package(missing[0], "is not installed", purpose, alternative)
    if missing:
        packages = ", ".join(DISTRIBUTION_NAMES.get(module, module) for module in missing)
        requirements = " ".join(dict.fromkeys(requirement(module) for module in missing))
        raise UserError(
            f"{purpose}: the packages {packages} are not installed; pip install {requirements}, or {alternative}"
        )


def require_package(module: str, purpose: str, alternative: str) -> ModuleType:
    """Imports and returns an optional package with its telemetry off, unless the user's environment turns it on.

    Raises UserError, which states that ``purpose`` needs the package, and the ``alternative`` to installing it.
    """
    try:
        with _without_telemetry(module):
            return import_quietly(module)
    except ImportError as error:
        is_missing = isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == module
        reason = "is not installed" if is_missing else f"cannot be loaded ({' '.join(str(error).split())})"
        raise _missing_package(module, reason, purpose, alternative) from None


def import_quietly(name: str) -> ModuleType:
    """Imports a module and suppresses the warnings that its package logs meanwhile, such as Matplotlib's about a
    read-only home folder and its font list. Errors of the import propagate."""
    import logging  # here, because it would slow down --help

    logger = logging.getLogger(name.partition(".")[0])
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        return importlib.import_module(name)
    finally:
        logger.setLevel(level)


def _missing_package(module: str, reason: str, purpose: str, alternative: str) -> UserError:
    package = DISTRIBUTION_NAMES.get(module, module)
    return UserError(f"{purpose}: the package {package} {reason}; pip install {requirement(module)}, or {alternative}")


def requirement(module: str) -> str:
    """Returns the requirement for pip, with the extras in use."""
    return _REQUIREMENTS.get(module) or DISTRIBUTION_NAMES.get(module, module)


@contextlib.contextmanager
def _without_telemetry(module: str) -> Iterator[None]:
    """Disables the telemetry of ``module`` while the block imports it."""
    for variable, value in _NO_TELEMETRY.get(module, {}).items():
        os.environ.setdefault(variable, value)
    reporter = _REPORTING_PACKAGES.get(module)
    if reporter is None or reporter in sys.modules:
        yield
        return
    # Python raises ImportError for a module that is None here; the annotation of sys.modules does not allow None.
    sys.modules[reporter] = cast(ModuleType, None)
    try:
        yield
    finally:
        sys.modules.pop(reporter, None)
