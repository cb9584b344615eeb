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


def locked_versions(python_version: str) -> dict[str, str]:
    """Returns the versions in constraints.txt on Linux, by name."""
    here = {"python_version": python_version, "python_full_version": f"{python_version}.1", "sys_platform": "linux"}
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    pins = [pin for pin in pins if pin.marker is None or pin.marker.evaluate(here)]
    versions: dict[str, str] = {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in pins}
    assert len(versions) == len(pins), "a package has two versions"
    return versions


def _by_name(lines: list[str]) -> dict[str, Requirement]:
    return {canonicalize_name(requirement.name): requirement for requirement in map(Requirement, lines)}
