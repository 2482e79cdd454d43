# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns what is known of packages outside torch that make it know a device, as their metadata says it. Must not import
torch, which loads those packages itself and may fail to, nor name one.
"""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, entry_points, requires, version

from packaging.requirements import InvalidRequirement, Requirement


_AUTOLOADED = "torch.backends"
"""The entry points of packages that torch loads when it is imported."""


def import_torch() -> None:
    """
    Imports torch, and with it the backends that it loads by itself.

    Raises:
        `RuntimeError`: one of these cannot be loaded; with both versions, and what to do.
    """
    try:
        importlib.import_module("torch")
    except RuntimeError as error:
        packages = sorted({point.dist.name for point in entry_points(group=_AUTOLOADED) if point.dist is not None})
        reasons = [text for text in map(describe_mismatch, packages) if text is not None]
        if not packages:
            raise
        if not reasons:
            cause = str(error.__cause__ or error).strip().splitlines()[0]
            named = " and ".join(f"'{package}' {find_version(package)}" for package in packages)
            reasons = [
                f"torch {find_version('torch')} loads {named} when it is imported, and could not ({cause}). Prepare "
                "the libraries that it needs as its installation guide says, in the shell that starts Python; or "
                "uninstall it, to do without such devices: diffusers imports it too."
            ]
        raise RuntimeError(" ".join(reasons)) from error


def find_version(package: str) -> str | None:
    """The installed version of a package; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def describe_mismatch(package: str) -> str | None:
    """Why an installed package does not go with this torch, with both versions and what to do; None if it does."""
    torch_version = find_version("torch")
    wanted = _torch_requirement(package)
    if torch_version is None or wanted is None or wanted.specifier.contains(torch_version, prereleases=True):
        return None
    series = ".".join(torch_version.split(".")[:2])
    return (
        f"'{package}' {find_version(package)} was made for torch {wanted.specifier}, and torch {torch_version} is "
        f'installed. Install the torch it was made for (pip install "{wanted}"), or its release for this one '
        f'(pip install "{package}=={series}.*").'
    )


def _torch_requirement(package: str) -> Requirement | None:
    for line in requires(package) or ():
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        if requirement.name == "torch" and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            return requirement
    return None
