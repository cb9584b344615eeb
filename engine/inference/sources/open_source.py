"""Opens a source: the frames of images, folders, globs, lists, videos, webcams and streams."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from data.images.decode import EncodedImage, decode_image, read_image
from data.images.kinds import MAX_IMAGE_BYTES, image_suffixes
from engine.inference.sources.frames import FileProblem, Frame, FrameStream, SourceOptions
from engine.inference.sources.source_files import (
    VIDEO_SUFFIXES,
    by_number,
    by_sequence,
    is_stream,
    list_files,
    sequence_of,
    unread_summary,
)
from engine.inference.sources.video import open_stream, stream_frames, video_file_frames
from utils.errors import UserError
from utils.files.url import NETWORK_ERRORS, is_http, open_url, read_url, url_path, without_login
from utils.logger import get_logger
from utils.machine.threads import map_ahead
from utils.pixels import PixelFormat

DEFAULT_OPTIONS = SourceOptions()


def open_source(source: str, options: SourceOptions = DEFAULT_OPTIONS) -> FrameStream:
    """Yields the frames of ``source``, in order, and the problems of its files.

    Args:
        source: a file, a folder (its files, sorted), a glob (``**`` allowed), a .txt list of files (relative to the
            list's folder; each is read once), the number of a webcam, or the URL of an image, a video or a stream.

    Raises UserError: at the call for a missing source, an unknown file type, or a single image if ``options`` are for
    tracking; at iteration for an unreadable file, which is skipped if the source has others, and for a live source
    that is lost and does not come back.
    """
    if is_http(source) and _names_image(source, image_suffixes(options.pixels)):
        if options.in_sequences:
            raise _single_image(source)
        return _url_frames(source, read_url(source, max_bytes=MAX_IMAGE_BYTES), options.pixels)
    if is_stream(source):
        return stream_frames(source, open_stream(source), options)
    order = by_number if options.in_sequences else None
    files, unread = list_files(source, image_suffixes(options.pixels), order)
    if options.in_sequences:
        files = by_sequence(files)
        if len(files) == 1 and files[0].suffix.lower() not in VIDEO_SUFFIXES:
            raise _single_image(source)
    if unread:
        get_logger().warning("%s: %s", source, unread_summary(unread))
    return _file_frames(files, source, options)


def _single_image(source: str) -> UserError:
    """Returns the error for tracking in a single image."""
    name = without_login(source)
    return UserError(f"{name}: is one image; objects are tracked in videos, streams and folders of images")


def _names_image(url: str, suffixes: frozenset[str]) -> bool:
    """Returns whether a URL names an image: by its suffix, whatever follows it (``?size=large``), or without a suffix
    by the server's content type. OpenCV would treat an image as a video of one frame."""
    suffix = os.path.splitext(url_path(url))[1].lower()
    if suffix:
        return suffix in suffixes
    with contextlib.suppress(*NETWORK_ERRORS, ValueError), open_url(url) as response:
        return response.headers.get_content_maintype() == "image"
    return False  # if it is not a video either, OpenCV reports it


def _url_frames(url: str, content: bytes, pixels: PixelFormat) -> FrameStream:
    """Yields the image in ``content``, which was read from ``url``."""
    name = without_login(url)
    image = decode_image(EncodedImage.from_data(content, name), pixels=pixels)
    yield Frame(name, image, sequence=name)


def _file_frames(files: Sequence[Path], source: str, options: SourceOptions) -> FrameStream:
    """Yields the frames of files, and their problems."""
    usable = 0
    read = partial(_read_image, pixels=options.pixels)
    contents = map_ahead(read, _numbered(files), threads=options.threads, ahead=options.ahead)
    with contextlib.closing(contents):
        for path, content in zip(files, contents):
            items = video_file_frames(path, options) if content is None else _one(content)
            with contextlib.closing(items):
                for item in items:
                    if isinstance(item, Frame):
                        usable += 1
                    elif item.is_skipped and len(files) == 1:
                        raise UserError(item.reason)
                    yield item
    if not usable:
        raise UserError(f"{source}: none of its {len(files)} files can be read")


class NumberedFile(NamedTuple):
    """A file of a source."""

    path: Path
    sequence: str
    number: int  # number of an image in its sequence, from 0


def _numbered(files: Iterable[Path]) -> Iterator[NumberedFile]:
    """Yields files with their sequences, in which images are numbered from 0."""
    counts = Counter[str]()
    for path in files:
        sequence = sequence_of(path)
        yield NumberedFile(path, sequence, counts[sequence])
        counts[sequence] += 1


def _read_image(file: NumberedFile, pixels: PixelFormat) -> Frame | FileProblem | None:
    """Reads an image. Returns None for a video, which is opened only when the files before it are finished."""
    path = file.path
    if path.suffix.lower() in VIDEO_SUFFIXES:
        return None
    try:
        return Frame(str(path), read_image(path, pixels), file.number, sequence=file.sequence)
    except UserError as error:
        return FileProblem(str(path), str(error), is_skipped=True)


def _one(item: Frame | FileProblem) -> FrameStream:
    yield item
