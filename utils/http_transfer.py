"""One file over HTTP, whatever the server does: a cut or stalled transfer goes on where it stopped, and nothing passes
that is not the file that was asked for."""

from __future__ import annotations

import hashlib
import http.client
import re
import ssl
import time
import urllib.error
import urllib.request
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from utils.logger import get_logger
from utils.weights_catalogue import WeightsEntry

CHUNK_BYTES = 1 << 18
LINE_EVERY_S = 10.0
MAX_BYTES = 16 * 2**30  # of a file whose size nobody knows


@dataclass(frozen=True)
class TransferLimits:
    """When to give up: seconds without a byte, tries in all, seconds between them, bytes a second over ``stall_s``."""

    stall_s: float = 30.0
    tries: int = 4
    wait_s: float = 1.0
    least_rate: float = 256.0


class Interrupted(Exception):
    """The transfer stopped early; another try may go on with it."""


class Refused(Exception):
    """The server, or the file it sent, will not do; another try is of no use."""


def transfer(entry: WeightsEntry, file: IO[bytes], limits: TransferLimits) -> None:
    """Fills ``file`` and checks it. What an earlier run left in it is used only if a checksum can vouch for it.

    Raises Interrupted and Refused; on the former ``file`` keeps what has come.
    """
    if not entry.sha256:
        _empty(file)
    inherited = file.seek(0, 2) > 0
    validator = ""
    for number in range(limits.tries):
        try:
            validator = _receive(entry, file, validator, limits)
            _check(entry, file)
            return
        except Interrupted as error:
            if number + 1 == limits.tries:
                raise
            get_logger().info("%s; trying again", error)
            time.sleep(limits.wait_s * 2**number)
        except Refused:
            if not inherited:
                raise
            _empty(file)  # the leftovers were of another file
            inherited = False
    raise Interrupted("the remains of an earlier transfer did not fit")


def _empty(file: IO[bytes]) -> None:
    file.truncate(0)
    file.seek(0)


def _receive(entry: WeightsEntry, file: IO[bytes], validator: str, limits: TransferLimits) -> str:
    """One request; appends what it brings. Returns the server's mark of this version of the file, if it gives one."""
    have, stall_s = file.seek(0, 2), limits.stall_s
    request = urllib.request.Request(entry.url, headers={"User-Agent": "lockstep", "Accept-Encoding": "identity"})
    if have:
        request.add_header("Range", f"bytes={have}-")
        if validator:
            request.add_header("If-Range", validator)
    try:
        with urllib.request.urlopen(request, timeout=stall_s) as response:
            total = _length(response, entry, file, have)
            validator = response.headers.get("ETag", "")
            _copy(response, file, total or entry.size, limits)
            return "" if validator.startswith("W/") else validator
    except urllib.error.HTTPError as error:
        if error.code == 416:  # nothing is left to send: either all is here, or what is here is not of this file
            return validator
        kind = Interrupted if error.code in (408, 429) or error.code >= 500 else Refused
        raise kind(f"the server answers {error.code} {error.reason}") from None
    except TimeoutError:
        raise Interrupted(f"no byte for {stall_s:g} s") from None
    except urllib.error.URLError as error:
        reason = f"no answer for {stall_s:g} s" if isinstance(error.reason, TimeoutError) else error.reason
        raise Interrupted(f"unreachable: {reason}") from None
    except (http.client.HTTPException, ssl.SSLError, ConnectionError) as error:
        raise Interrupted(f"broken off: {error or type(error).__name__}") from None


def _length(response: http.client.HTTPResponse, entry: WeightsEntry, file: IO[bytes], have: int) -> int | None:
    """The whole file's length as the server has it; drops what is in ``file`` when the server starts anew."""
    total = None
    if have and response.status == 206:
        content_range = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", ""))
        if not content_range or int(content_range[1]) != have:
            raise Refused(f"the server sent another part ({response.headers.get('Content-Range')}) than was asked for")
        total = None if content_range[2] == "*" else int(content_range[2])
    else:
        _empty(file)
        total = response.length  # None where the header is missing or is no number
    if entry.size and total is not None and total != entry.size:
        raise Refused(f"the server has {total} bytes, {entry.size} are expected; is it another file?")
    return total


def _copy(response: http.client.HTTPResponse, file: IO[bytes], total: int, limits: TransferLimits) -> None:
    """Appends what comes. Raises Interrupted when it ends before ``total`` bytes or all but stops, Refused when there
    is more; ``total`` 0: not known."""
    said_at = since = time.monotonic()
    before = file.tell()
    while chunk := response.read1(CHUNK_BYTES):  # read1 returns what has come, so each wait is one stall at most
        file.write(chunk)
        if file.tell() > (total or MAX_BYTES):
            raise Refused(f"sends more than the {total or MAX_BYTES} bytes that are expected; nothing was kept")
        now = time.monotonic()
        if now - since >= limits.stall_s:
            if file.tell() - before < limits.least_rate * (now - since):
                raise Interrupted(f"only {file.tell() - before} bytes in {now - since:.0f} s")
            since, before = now, file.tell()
        if now - said_at > LINE_EVERY_S:
            said_at = now
            get_logger().info("%.1f of %s MB", file.tell() / 1e6, f"{total / 1e6:.1f}" if total else "?")
    file.flush()
    if file.tell() < total:
        raise Interrupted(f"cut off at {file.tell()} of {total} bytes")


def _check(entry: WeightsEntry, file: IO[bytes]) -> None:
    file.flush()
    size = file.seek(0, 2)
    if entry.size and size != entry.size:
        raise Refused(f"brought {size} bytes, {entry.size} are expected; nothing was kept")
    if not size:
        raise Refused("brought an empty file")
    if entry.sha256:
        found = _sha256(Path(file.name))
        if found != entry.sha256.lower():
            raise Refused(f"sha256 is {found}, {entry.sha256} is expected; nothing was kept")
    else:
        _check_looks(Path(file.name))


def _check_looks(path: Path) -> None:
    """What can be said of a file without a checksum: an error page is no checkpoint, nor is half a zip."""
    with open(path, "rb") as file:
        start = file.read(64).lstrip()
    if start[:1] == b"<":
        raise Refused("brought a web page, not weights; nothing was kept")
    if start[:2] == b"PK" and not zipfile.is_zipfile(path):
        raise Refused("brought a part of a checkpoint only; nothing was kept")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
