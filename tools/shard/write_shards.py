"""Writes a data set as tar files of images, with one index for each split."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from data.flat_strings import FlatStrings
from data.images.decode import read_bytes
from data.images.shards import MEMBER_ARRAYS, SPAN, SUFFIX, VERSION
from data.index import DatasetIndex, IndexSettings
from data.index_cache import index_content
from data.load import load_index
from data.open import open_data, problem_of_output
from data.spec import DatasetSpec, DataSource
from utils.config.tool_settings import ShardConfig
from utils.distributed.context import DistributedContext
from utils.errors import UserError, os_reason
from utils.files.array_file import write_arrays
from utils.files.paths import check_new_path
from utils.files.safe_io import write_whole
from utils.files.temporary_folder import creating_folder, temporary_folder
from utils.logger import get_logger, progress
from utils.machine.limits import require_posix
from utils.machine.threads import map_ahead
from utils.strings import counted, format_bytes

_HEADER = 512  # bytes before the content of a file in a tar file
READERS = 8  # threads that read images
_DIGITS = 9  # digits of an image's number, which names it in a tar file


def shard_data(config: ShardConfig) -> list[str]:
    """Implements ``python -m tools.shard``, and returns the names of the written splits.

    Raises UserError on Windows, if the data set cannot be opened, and like `write_set`.
    """
    require_posix("writing shards")  # as reading them
    spec = open_data(DataSource(config.data, cache_dir=config.cache_dir), DistributedContext.single())
    settings = IndexSettings(cache_dir=config.cache_dir, workers=READERS)
    max_bytes = config.megabytes * 10**6
    return write_set(spec, Path(config.out), max_bytes, settings, splits=config.split, max_bad=config.max_bad)


def write_set(
    spec: DatasetSpec,
    out: Path,
    max_bytes: int,
    settings: IndexSettings,
    *,
    splits: Sequence[str] = (),
    max_bad: float = ShardConfig.max_bad,
) -> list[str]:
    """Writes splits, with all classes of the labels, to the new folder ``out``. Returns their names.

    Args:
        spec: with all splits, even those that are not written, so that their images in a shared label file do not
            count as lost.
        max_bytes: approximate size of a tar file, unless an image is larger.
        settings: how the splits are read, and how many threads read the images.
        splits: names of the splits to write; empty for all.
        max_bad: see `load_split`.

    Raises UserError like `load_split`, and if ``out`` exists, is searched for images, or the disk is too small.
    """
    check_new_path(out)
    problem = problem_of_output(out, spec)
    if problem:
        raise UserError(f"{out}: {problem}; name another folder")
    labeled = spec.with_label_classes()
    names = list(dict.fromkeys(splits or spec.splits))
    for split in names:  # before the first is scanned
        labeled.check_split(split)
    indexes = {split: load_index(labeled, split, settings, max_bad=max_bad) for split in names}
    try:
        with creating_folder(out.absolute().parent), temporary_folder(out.absolute()) as temporary:
            folder = temporary / out.name
            folder.mkdir()
            content: dict[str, Any] = {"path": "."}
            for split, index in indexes.items():
                _write_split(folder, split, index, max_bytes, settings.workers)
                content[split] = f"{split}{SUFFIX}"
            yaml_text = yaml.safe_dump(content | spec.content(), sort_keys=False, allow_unicode=True)
            write_whole(folder / "data.yaml", yaml_text)
            os.rename(folder, out)
    except OSError as error:
        raise UserError(f"{error.filename or out}: {os_reason(error)}") from None
    return names


def _write_split(folder: Path, split: str, index: DatasetIndex, max_bytes: int, workers: int) -> None:
    """Writes the tar files and the index of a split."""
    paths = ["/".join(part for part in path.split("/") if part != "..") for path in index.paths]
    _check_unique(paths, index)
    members = {name: np.zeros(len(index), dtype) for name, dtype in MEMBER_ARRAYS.items()}
    contents = map_ahead(lambda i: read_bytes(index.path(i)), range(len(index)), threads=workers)
    # After a failure the threads end here, and not when the garbage is collected, see `map_ahead`.
    with contextlib.closing(contents), contextlib.closing(_TarFiles(folder, split, max_bytes)) as tars:
        for i, content in enumerate(progress(contents, desc=f"writing {split}", total=len(index))):
            label = json.dumps(_label(index, i, paths[i])).encode()
            members["position"][i] = tars.add(i, _suffix(paths[i]), content, label)
            members["size"][i] = len(content)
            members["crc"][i] = zlib.crc32(content)
    members["by_path"][:] = sorted(range(len(paths)), key=lambda i: os.fsencode(paths[i]))
    shards: list[list[Any]] = [[name, (folder / name).stat().st_size] for name in tars.names]
    _write_index(folder / f"{split}{SUFFIX}", index, paths, members, shards)
    total = sum(size for _, size in shards)
    num_images = counted(len(index), "image")
    get_logger().info("%s: %s in %s, %s", split, num_images, counted(len(shards), "tar file"), format_bytes(total))


class _TarFiles:
    """The tar files of a split. A new one is started when the next image would make one larger than ``max_bytes``, not
    counting its headers, its label and the padding."""

    def __init__(self, folder: Path, split: str, max_bytes: int) -> None:
        self.names: list[str] = []
        self._folder = folder
        self._split = split
        self._max_bytes = max_bytes
        self._tar: tarfile.TarFile | None = None  # the last one

    def add(self, number: int, suffix: str, image: bytes, label: bytes) -> int:
        """Appends the files NUMBER.SUFFIX and NUMBER.json. Returns the position of the image, with `SPAN` positions per
        tar file. Raises OSError if the disk is full."""
        tar = self._tar
        if tar is None or tar.offset + len(image) > self._max_bytes:
            tar = self._open_next()
        position = (len(self.names) - 1) * SPAN + tar.offset + _HEADER
        for name, content in ((suffix, image), (".json", label)):
            entry = tarfile.TarInfo(f"{number:0{_DIGITS}d}{name}")  # the modification time is always 0, in 1970
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
        return position

    def _open_next(self) -> tarfile.TarFile:
        self.close()
        name = f"{self._split}-{len(self.names):05d}.tar"
        self._tar = tarfile.open(self._folder / name, "w", format=tarfile.USTAR_FORMAT)  # noqa: SIM115
        self.names.append(name)
        return self._tar

    def close(self) -> None:
        """Completes the last file."""
        if self._tar is not None:
            self._tar.close()
            self._tar = None


def _write_index(
    file: Path, index: DatasetIndex, paths: Sequence[str], members: dict[str, np.ndarray], shards: list[list[Any]]
) -> None:
    """Writes the index of a split in shards.

    Args:
        paths: paths of the images, as used by training.
        members: the `MEMBER_ARRAYS`, which locate each image.
        shards: name and size of each tar file.
    """
    flat = FlatStrings.of(paths)
    meta, labels = index_content(index)
    arrays = labels | {"paths.data": flat.data, "paths.offsets": flat.offsets} | members
    write_arrays(file, meta | {"version": VERSION, "names": list(index.names), "shards": shards}, arrays)


def _suffix(path: str) -> str:
    """Returns the suffix of an image in lower case and restricted to ASCII letters, digits and dots, for a tar file."""
    return re.sub(r"[^a-z0-9.]", "", os.path.splitext(path)[1].lower())


def _check_unique(paths: Sequence[str], index: DatasetIndex) -> None:
    """Raises UserError if two images of ``index``, as of joined data sets, would have the same path in the shards."""
    first: dict[str, int] = {}
    for i, path in enumerate(paths):
        other = first.setdefault(path, i)
        if other != i:
            raise UserError(
                f"{index.root}: {index.paths[other]} and {index.paths[i]} would both be {path} in the shards; rename "
                "one, or leave it out"
            )


def _label(index: DatasetIndex, i: int, path: str) -> dict[str, Any]:
    """Returns the labels to write next to an image for other programs. This program reads the index instead."""
    rows = slice(index.offsets[i], index.offsets[i + 1])
    return {
        "path": path,
        "size_hw": index.image_hw[i].tolist(),
        "boxes_xywh_px": index.boxes_xywh_px[rows].tolist(),
        "classes": index.classes[rows].tolist(),
        "crowd": index.crowd[rows].tolist(),
    }
