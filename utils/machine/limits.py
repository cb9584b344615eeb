"""One-line explanations of errors that are limits of the machine, not bugs: memory, files, disks, packages."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import re
from collections.abc import Callable, Iterator

from utils.errors import ExplainedError, UserError, os_reason
from utils.machine.packages import DISTRIBUTION_NAMES, requirement

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)  # errno of a full disk or an exceeded quota
_STORAGE_FAILED = (errno.EIO, errno.ESTALE)
_TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)
# Parts of error messages that mean that a limit was reached.
_TOO_MANY_FILES_MARKS = ("Too many open files", "received 0 items of ancdata")
_NO_MEMORY_MARKS = (
    "DefaultCPUAllocator: ",
    "CUDA out of memory",
    "CUDA error: out of memory",
    "STATUS_ALLOC_FAILED",
    "std::bad_alloc",
    "Insufficient memory",
    "Cannot allocate memory",
    "can't start new thread",
)
_NO_MEMORY_PACKAGES = ("builtins", "torch", "cv2", "numpy", "lmdb")  # packages whose errors contain these marks
_GPU_MARKS = ("CUDA", "CUBLAS", "CUDNN")
_ALLOCATION = re.compile(r"allocate (?P<bytes>\d+) bytes|allocate (?P<text>[\d.]+ [KMGT]iB)")
_LIBRARY = re.compile(r"(?P<library>lib[\w.+-]+\.so[\w.]*): cannot open shared object file")
_LIBRARIES_OF_OPENCV = ("libGL", "libgthread", "libglib", "libSM", "libXext", "libxcb", "libX11")
_LARGEST_STRIDE = 64  # of the models that the configurations and weights describe
_ADVICE = "less is needed with a smaller --batch-size or --imgsz, or fewer --workers"


def explain_limit(error: BaseException, advice: str = _ADVICE) -> str | None:
    """Explains an error that is a machine limit in one line. Returns None for other errors. ``advice`` tells how to use
    less memory."""
    if not isinstance(error, Exception) or isinstance(error, ExplainedError):
        return None
    lines = (explain(error, advice) for explain in _RECOGNIZERS)
    return next((line for line in lines if line is not None), None)


def require_posix(feature: str) -> None:
    """Raises UserError on Windows, which lacks the system calls that ``feature`` needs."""
    if os.name != "posix":
        raise UserError(f"{feature}: needs Linux or macOS")


def raise_if_limit(error: BaseException, path: str | os.PathLike) -> None:
    """Raises ``error``, naming the file at ``path``, if it is a machine limit: the file itself may be correct."""
    if explain_limit(error):
        if isinstance(error, OSError):
            error.filename = os.fspath(path)
        raise error


def _unmappable_library(error: Exception, advice: str) -> str | None:
    if isinstance(error, ImportError) and "failed to map segment" in str(error):
        return f"not enough memory on this machine to load {error.name or 'a library'}; {advice}"
    return None


def _missing_library(error: Exception, _: str) -> str | None:
    if not isinstance(error, ImportError):
        return None
    match = _LIBRARY.search(str(error))
    if match is None:
        return None
    library = match["library"]
    if library.startswith(_LIBRARIES_OF_OPENCV) and (error.name or "cv2").startswith("cv2"):
        return (
            f"OpenCV cannot be loaded, {library} is missing: apt install libgl1 libglib2.0-0, or "
            "pip uninstall opencv-python and pip install opencv-python-headless"
        )
    return f"{library} is missing, and a package needs it ({' '.join(str(error).split())})"


def _missing_package(error: Exception, _: str) -> str | None:
    """Explains that a package is not installed. (A missing module of this program, or of an installed package, is a
    bug.)"""
    module = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if not module or importlib.util.find_spec(module) is not None:
        return None
    return f"the package {DISTRIBUTION_NAMES.get(module, module)} is not installed; pip install {requirement(module)}"


def _too_many_open_files(error: Exception, _: str) -> str | None:
    if _errno_of(error) in _TOO_MANY_FILES or any(mark in str(error) for mark in _TOO_MANY_FILES_MARKS):
        return "too many open files; raise the limit with ulimit -n 65536, or use fewer --workers"
    return None


def _too_many_processes(error: Exception, _: str) -> str | None:
    """Explains that fork(2) was refused."""
    if isinstance(error, BlockingIOError) and "Resource temporarily unavailable" in str(error):
        return (
            "no more processes can be started; raise the limit (ulimit -u, docker run --pids-limit), or use fewer "
            "--workers"
        )
    return None


def _failed_storage(error: Exception, _: str) -> str | None:
    if not isinstance(error, OSError) or error.errno not in _STORAGE_FAILED:
        return None
    location = f"{error.filename}: " if error.filename else ""
    reason = os_reason(error)
    return f"{location}{reason}; the disk or network file system has failed"


def _no_kernels(error: Exception, _: str) -> str | None:
    if "no kernel image is available" not in str(error):
        return None
    return "torch or torchvision has no kernels for this GPU; install a build for it, or use --device cpu"


def _out_of_memory(error: Exception, advice: str) -> str | None:
    message = str(error)
    is_memory_error = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    package = type(error).__module__.partition(".")[0]
    has_mark = package in _NO_MEMORY_PACKAGES and any(mark in message for mark in _NO_MEMORY_MARKS)
    if not (is_memory_error or _errno_of(error) == errno.ENOMEM or has_mark):
        return None
    location = "on the GPU" if any(mark in message for mark in _GPU_MARKS) else "on this machine"
    return f"not enough memory {location}{_requested_amount(message)}; {advice}"


def _requested_amount(message: str) -> str:
    match = _ALLOCATION.search(message)
    if match is None:
        return ""
    size = match["text"] or f"{int(match['bytes']) / 2**30:.2f} GiB"
    return f" ({size} more was requested)"


def _errno_of(error: Exception) -> int | None:
    return error.errno if isinstance(error, OSError) else None


# Each function returns a line for errors of its kind, else None. The first one that returns a line decides.
_RECOGNIZERS: tuple[Callable[[Exception, str], str | None], ...] = (
    _unmappable_library,
    _missing_library,
    _missing_package,
    _too_many_open_files,
    _too_many_processes,
    _failed_storage,
    _no_kernels,
    _out_of_memory,
)


def memory_advice(batch_size: int, imgsz: int, *, min_batch: int, device: str) -> str:
    """Suggests settings that need less memory than the run's, as the ``advice`` for `explain_limit`. ``batch_size`` is
    0 or less if unknown. ``device`` is the device type."""
    smaller: list[str] = []
    if batch_size > max(min_batch, 0):
        smaller.append(f"--batch-size {max(batch_size // 2, min_batch)}")
    if imgsz >= 128:
        smaller.append(f"--imgsz {max(int(imgsz * 0.7) // _LARGEST_STRIDE * _LARGEST_STRIDE, _LARGEST_STRIDE)}")
    to_try = "a smaller --model"
    if smaller:
        to_try = f"{', '.join(smaller)} or {to_try}"
    settings = f"--imgsz {imgsz}"
    if batch_size > 0:
        settings = f"--batch-size {batch_size} with {settings}"
    advice = f"{settings} is too much here: try {to_try}"
    if device == "cuda" and batch_size > 0:
        advice += "; --batch-size -1 finds the largest that fits"
    return advice


@contextlib.contextmanager
def limits_as_user_errors(advice: str) -> Iterator[None]:
    """Converts errors of the block that are machine limits to UserError. ``advice`` is what to change."""
    try:
        yield
    except Exception as error:
        line = explain_limit(error, advice)
        if line is None:
            raise
        raise UserError(line) from None
