# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns what is known of packages outside torch that make it know a device, as their metadata says it. Must not import
torch, which loads those packages itself and may fail to, nor name one.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.metadata import PackageNotFoundError, entry_points, requires, version

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version


_AUTOLOADED = "torch.backends"
"""The entry points of packages that torch loads when it is imported."""
_UNREADABLE = (ValueError, KeyError, TypeError)
"""What `importlib.metadata` raises for metadata that is broken, or not there, in one version of Python or another."""


def import_torch() -> None:
    """
    Imports torch, and with it the backends that it loads by itself.

    Raises:
        `RuntimeError`: one of these cannot be loaded; with both versions, and what to do.
    """
    try:
        importlib.import_module("torch")
    except (RuntimeError, SystemExit) as error:
        packages = sorted({point.dist.name for point in entry_points(group=_AUTOLOADED) if point.dist is not None})
        reasons = [text for text in map(describe_mismatch, packages) if text is not None]
        if not packages:
            raise
        if not reasons:
            cause = first_line(error.__cause__ or error)
            named = " and ".join(f"'{package}' {name_version(package)}" for package in packages)
            reasons = [
                f"torch {find_version('torch')} loads {named} when it is imported, and could not ({cause}). Prepare "
                "the libraries that it needs as its installation guide says, in the shell that starts Python; or "
                "uninstall it, to do without such devices: diffusers imports it too."
            ]
        raise RuntimeError(" ".join(reasons)) from error


def find_version(package: str) -> str | None:
    """The version of a package, as its metadata says it; None where there is none, or none that can be read."""
    try:
        return version(package)
    except (PackageNotFoundError, *_UNREADABLE):
        return None


def name_version(package: str) -> str:
    """As `find_version`, for messages."""
    return find_version(package) or "of unknown version"


def is_importable(package: str) -> bool:
    """Whether Python finds a package, be it without metadata, as where it was built and not installed."""
    return sys.modules.get(package) is not None or importlib.util.find_spec(package) is not None


def first_line(error: BaseException) -> str:
    """What an error says first; its kind, where it says nothing or only ends the process."""
    lines = str(error).strip().splitlines()
    if isinstance(error, SystemExit):
        return f"it ends the process: {lines[0]}" if lines else "it ends the process"
    return lines[0] if lines else type(error).__name__


def describe_mismatch(package: str) -> str | None:
    """Why an installed package does not go with this torch, with both versions and what to do; None if it does."""
    torch_version = find_version("torch")
    wanted = _torch_requirement(package)
    if torch_version is None or wanted is None or _accepts(wanted, torch_version):
        return None
    series = ".".join(torch_version.split(".")[:2])
    return (
        f"'{package}' {name_version(package)} was made for torch {wanted.specifier}, and torch {torch_version} is "
        f'installed. Install the torch it was made for (pip install "{wanted}"), or its release for this one '
        f'(pip install "{package}=={series}.*").'
    )


def _accepts(wanted: Requirement, torch_version: str) -> bool:
    """A torch that was built from source, or at night, before a release has the version of that."""
    try:
        versions = (torch_version, Version(torch_version).base_version)
    except InvalidVersion:
        return True  # importing it will show
    return any(wanted.specifier.contains(each, prereleases=True) for each in versions)


def _torch_requirement(package: str) -> Requirement | None:
    try:
        lines = requires(package) or ()
    except (PackageNotFoundError, *_UNREADABLE):
        return None
    for line in lines:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        if requirement.name == "torch" and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            return requirement
    return None
