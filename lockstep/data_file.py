"""The file of a data set whose content is given from Python."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from utils.config.plain_values import checked_value, plain_value
from utils.errors import UserError, os_reason
from utils.files.safe_io import atomic_write
from utils.process.child import RunFailed

Data = str | os.PathLike[str] | Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class DataFile:
    """The file of a data set.

    Args:
        path: as --data takes it.
        content: what `written` writes to it; None: it is the user's own file.
        remedy: what to do if the file cannot be written.
    """

    path: str
    content: str | None = None
    remedy: str = ""

    @classmethod
    def of(cls, data: Data, folder: str | Path, *, remedy: str = "choose another project") -> DataFile:
        """Returns the file that ``data`` names or, if it is the content of a YAML, a file in ``folder``. Its name is a
        digest of the content, whose paths are relative to the working folder."""
        if not isinstance(data, Mapping):
            return cls(checked_value("data", data, str))
        from data.dataset.yaml_file import resolve_root  # loads NumPy

        content = plain_value("data", data)
        # Resolved as in a YAML in the working folder; "data" names it in messages.
        content["path"] = str(resolve_root(content.get("path"), Path("data"), known_root=""))
        text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
        digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
        return cls(str(Path(folder, f"data-{digest}.yaml")), text, remedy)

    @contextlib.contextmanager
    def written(self) -> Iterator[None]:
        """Writes the file. If a UserError leaves the block, removes what this call has made, unless the content
        describes a data set: another run may use the same file. A `RunFailed` then names "data" instead of the file.
        Raises UserError if the file cannot be written."""
        if self.content is None:
            yield
            return
        file = Path(self.path)
        made = [path for path in (file, *file.parents) if not os.path.lexists(path)]
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(file) as stream:  # runs that start at the same time write the same file
                stream.write(self.content.encode())
        except OSError as error:
            reason = os_reason(error)
            raise UserError(f"{file}: the content of data cannot be written ({reason}); {self.remedy}") from None
        try:
            yield
        except UserError as error:
            if file in made and not _is_data_set(file):
                _remove(made)
            if isinstance(error, RunFailed):
                reason = self._with_name_of_parameter(error.result.reason)
                raise RunFailed(dataclasses.replace(error.result, reason=reason)) from None
            raise

    def _with_name_of_parameter(self, message: str) -> str:
        """Returns ``message`` with "data" in place of the file, which the user has not written."""
        for path in (os.path.abspath(self.path), self.path):
            message = message.replace(path, "data")
        return message


def _is_data_set(yaml_file: Path) -> bool:
    """Returns whether a YAML describes a data set."""
    from data.dataset.yaml_file import load_dataset_spec  # loads NumPy

    try:
        load_dataset_spec(yaml_file)
    except UserError:
        return False
    return True


def _remove(paths: Sequence[Path]) -> None:
    """Removes a file and the folders above it that contain nothing else. ``paths``: from the file upwards."""
    file, *folders = paths
    file.unlink(missing_ok=True)
    for folder in folders:
        with contextlib.suppress(OSError):  # something else is in it
            folder.rmdir()
