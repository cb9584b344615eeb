"""The packages that the project requires, and the versions that are tested."""

from __future__ import annotations

import tomllib

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.helpers.repository import ROOT


def requirements() -> dict[str, dict[str, Requirement]]:
    """Returns the required packages by extra and by name, which is in lower case. Those of every installation are under
    "", those of the tests under "dev"."""
    file = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project = file["project"]
    groups = file["dependency-groups"]
    lists = {"": project["dependencies"], **project["optional-dependencies"], **groups}
    return {extra: _by_name(lines) for extra, lines in lists.items()}


def _by_name(lines: list[str]) -> dict[str, Requirement]:
    return {canonicalize_name(requirement.name): requirement for requirement in map(Requirement, lines)}
