"""One-line explanations of errors that are limits of the machine, not bugs: memory, files, disks, packages."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Iterator
from types import ModuleType

from utils.errors import UserError
from utils.machine.quiet_import import import_quietly

_NO_MEMORY = (
    "DefaultCPUAllocator: ",
    "CUDA out of memory",
    "CUDA error: out of memory",
    "STATUS_ALLOC_FAILED",
    "std::bad_alloc",
    "Insufficient memory",
    "Cannot allocate memory",
    "can't start new thread",
)
_STORAGE = (errno.EIO, errno.ESTALE)  # of a disk or network file system that fails
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)  # errno of a full disk or an exceeded quota
_NO_FILES = ("Too many open files", "received 0 items of ancdata")
_WORKER = re.compile(
    r"DataLoader worker \(pid\(?s?\)? [\d, ]+\) (is killed by signal: (?P<signal>[^.]*)|exited unexpec)"
)
_ALLOCATION = re.compile(r"allocate (?P<bytes>\d+) bytes|allocate (?P<text>[\d.]+ [KMGT]iB)")
PACKAGES = {"cv2": "opencv-python", "yaml": "PyYAML", "PIL": "pillow"}  # packages whose module has another name
_WITH_EXTRAS = {"ray": '"ray[default,train]"'}  # what to install for all of a package that is used
# By package: variables that it reads when it is imported, with values for which it opens no connection on its own.
_NO_TELEMETRY = {
    "albumentations": {"NO_ALBUMENTATIONS_UPDATE": "1"},  # else it looks for a newer version
    "mlflow": {"MLFLOW_DISABLE_TELEMETRY": "true"},
    "onnxruntime": {"ORT_DISABLE_TELEMETRY": "1"},
    "ray": {"RAY_USAGE_STATS_ENABLED": "0"},
    "wandb": {"WANDB_ERROR_REPORTING": "false"},
}
_REPORTING_PACKAGES = {"openvino": "openvino_telemetry"}  # reports imports and conversions if it can be imported
_LIBRARY = re.compile(r"(?P<library>lib[\w.+-]+\.so[\w.]*): cannot open shared object file")
_NO_SHM = "/dev/shm is full; make it larger (docker run --shm-size=8g)"
_NO_MEMORY_LEFT = (
    "most likely the machine ran out of memory (dmesg says so); use fewer --workers, a smaller --batch-size or "
    "--imgsz, or no --cache ram"
)
_ADVICE = "less is needed with a smaller --batch-size or --imgsz, or fewer --workers"


def explanation(error: BaseException, advice: str = _ADVICE) -> str | None:
    """One line about an error that is a limit of the machine, else None. ``advice``: how to use less memory."""
    text = str(error)
    if isinstance(error, ImportError):
        return _explain_import(error, advice)
    if not isinstance(error, Exception) or isinstance(error, UserError):
        return None
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.EMFILE, errno.ENFILE) or any(mark in text for mark in _NO_FILES):
        return "too many open files; raise the limit with ulimit -n 65536, or use fewer --workers"
    if isinstance(error, OSError) and number in _STORAGE:
        where = f"{error.filename}: " if error.filename else ""
        reason = (error.strerror or text).lower()
        return f"{where}{reason}; the disk or network file system has failed"
    if worker := _WORKER.search(text):
        # An error that names the signal, if it interrupts the wait for a batch, is only the cause of the one raised.
        named = _WORKER.search(str(error.__cause__)) or worker
        signal = (worker["signal"] or named["signal"] or "").strip()
        name = f" by the signal '{signal}'" if signal else ""
        return f"a loader process was killed{name}: {_NO_SHM if 'Bus error' in signal else _NO_MEMORY_LEFT}"
    is_named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or number == errno.ENOMEM
    is_foreign = type(error).__module__.partition(".")[0] in ("builtins", "torch", "cv2", "numpy", "lmdb")
    if is_named or (is_foreign and any(mark in text for mark in _NO_MEMORY)):
        where = "on the GPU" if "CUDA" in text or "CUBLAS" in text or "CUDNN" in text else "on this machine"
        amount = ""
        if found := _ALLOCATION.search(text):
            size = found["text"] or f"{int(found['bytes']) / 2**30:.2f} GiB"
            amount = f" ({size} more was requested)"
        return f"not enough memory {where}{amount}; {advice}"
    return None


def _explain_import(error: ImportError, advice: str) -> str | None:
    if "failed to map segment" in str(error):
        return f"not enough memory on this machine to load {error.name or 'a library'}; {advice}"
    if library := _LIBRARY.search(str(error)):
        name = library["library"]
        if name.startswith(("libGL", "libgthread", "libglib", "libSM", "libXext", "libxcb", "libX11")):
            return (
                f"OpenCV cannot be loaded, {name} is missing: apt install libgl1 libglib2.0-0, or "
                "pip uninstall opencv-python and pip install opencv-python-headless"
            )
        return f"{name} is missing, and a package needs it ({' '.join(str(error).split())})"
    module = (error.name or "").partition(".")[0]
    if isinstance(error, ModuleNotFoundError) and module and importlib.util.find_spec(module) is None:
        package = PACKAGES.get(module, module)
        return f"the package {package} is not installed: pip install {package}"
    return None


def require_installed(modules: Iterable[str], what: str, instead: str) -> None:
    """Reports missing packages before the work starts. Does not import them.

    Raises UserError, which says ``what`` needs the packages, and what to do ``instead`` of installing them.
    """
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if len(missing) == 1:
        raise _without_package(missing[0], "is not installed", what, instead)
    if missing:
        packages = [PACKAGES.get(module, module) for module in missing]
        wanted = dict.fromkeys(_WITH_EXTRAS.get(module, package) for module, package in zip(missing, packages))
        listed = ", ".join(packages)
        command = f"pip install {' '.join(wanted)}"
        raise UserError(f"{what}: the packages {listed} are not installed; {command}, or {instead}")


def require_package(module: str, what: str, instead: str) -> ModuleType:
    """Imports an optional package with its telemetry off, unless the user's environment turns it on. Returns it.

    Raises UserError, which says ``what`` needs the package, and what to do ``instead`` of installing it.
    """
    try:
        with _without_telemetry(module):
            return import_quietly(module)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == module
        reason = "is not installed" if missing else f"cannot be loaded ({' '.join(str(error).split())})"
        raise _without_package(module, reason, what, instead) from None


def _without_package(module: str, reason: str, what: str, instead: str) -> UserError:
    package = PACKAGES.get(module, module)
    wanted = _WITH_EXTRAS.get(module, package)
    return UserError(f"{what}: the package {package} {reason}; pip install {wanted}, or {instead}")


@contextlib.contextmanager
def _without_telemetry(module: str) -> Iterator[None]:
    """In the block, ``module`` can be imported without anything that it would report to its vendor."""
    for variable, value in _NO_TELEMETRY.get(module, {}).items():
        os.environ.setdefault(variable, value)
    reporter = _REPORTING_PACKAGES.get(module)
    if reporter is None or reporter in sys.modules:
        yield
        return
    sys.modules[reporter] = None  # Python then raises ImportError for it
    try:
        yield
    finally:
        sys.modules.pop(reporter, None)


def memory_advice(batch_size: int, imgsz: int, *, least_batch: int, device: str) -> str:
    """The advice for `explanation`: settings that need less memory than those of the run. ``batch_size``: 0 or less if
    it is not known. ``device``: its type."""
    fits = []
    if batch_size > max(least_batch, 0):
        fits.append(f"--batch-size {max(batch_size // 2, least_batch)}")
    if imgsz >= 128:
        fits.append(f"--imgsz {max(int(imgsz * 0.7) // 32 * 32, 64)}")
    fits.append("a smaller --model")
    tried = f"{', '.join(fits[:-1])} or {fits[-1]}" if len(fits) > 1 else fits[0]
    found = "; --batch-size -1 finds the largest that fits" if device == "cuda" and batch_size > 0 else ""
    now = f"--batch-size {batch_size} with --imgsz {imgsz}" if batch_size > 0 else f"--imgsz {imgsz}"
    return f"{now} is too much here: try {tried}{found}"


@contextlib.contextmanager
def explained(advice: str) -> Iterator[None]:
    """Converts errors of the block that are limits of the machine to UserError."""
    try:
        yield
    except Exception as error:
        line = explanation(error, advice)
        if line is None:
            raise
        raise UserError(line) from None
