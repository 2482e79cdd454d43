# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the wheels of torch_npu: which are the newest, fetching them, and what can be read in one. Nothing of them is
imported, for that needs CANN: Python is parsed, headers are text, and libraries are searched for strings.
"""

from __future__ import annotations

import ast
import fcntl
import inspect
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from pathlib import Path

from packaging.version import Version


PACKAGE = "torch_npu"


# A platform that has wheels of every release, to tell an index without one for this platform from no index.
ELSEWHERE = ("--platform", "manylinux_2_28_x86_64", "--python-version", "3.11", "--implementation", "cp")


class IndexUnreachable(Exception):
    """No package index that has the package answers."""

    def __init__(self) -> None:
        super().__init__(f"no package index that has {PACKAGE} can be reached")


class NoWheel(Exception):
    """The index answers, and has no wheel for this Python and platform."""

    def __init__(self) -> None:
        python = f"{sys.implementation.name} {sys.version.split()[0]} on {sysconfig.get_platform()}"
        super().__init__(f"the package index has no wheel of {PACKAGE} for {python}")


def _pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", *arguments, "--only-binary", ":all:", "--retries", "1", "--timeout", "20"]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def _versions(*platform: str) -> list[Version]:
    """What the index has for this Python and platform, or another; empty if nothing, or if there is no index."""
    answer = _pip("index", "versions", PACKAGE, *platform)
    found = re.search(r"^Available versions: (.+)$", answer.stdout, re.MULTILINE)
    if found is None and "No matching distribution" not in answer.stderr:
        raise RuntimeError(f"`pip index versions {PACKAGE}` failed: {answer.stderr or answer.stdout}")
    return [Version(text) for text in found[1].split(", ")] if found else []


@lru_cache
def newest_releases(count: int) -> list[Version]:
    """
    The newest release of each of the newest `count` minor versions, newest first.

    Raises:
        `IndexUnreachable`, `NoWheel`: there is none to be had.
    """
    versions = _versions()
    if not versions:
        raise NoWheel() if _versions(*ELSEWHERE) else IndexUnreachable()
    newest: dict[tuple[int, ...], Version] = {}
    for version in sorted(versions, reverse=True):
        newest.setdefault(version.release[:2], version)
    return list(newest.values())[:count]


def fetch(releases: Sequence[Version], folder: Path) -> list[Wheel]:
    """
    The wheels of `releases`, in their order. Those in `folder` are not fetched again; others that lie there go, and
    one process at a time does this.

    Raises:
        `IndexUnreachable`: the connection broke.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        wheels = []
        for release in releases:
            home = folder / str(release)
            if not list(home.glob("*.whl")):
                _fetch_one(release, home)
            (path,) = home.glob("*.whl")
            wheels.append(Wheel(path, release))
        for other in folder.iterdir():
            if other.is_dir() and other.name not in map(str, releases):
                shutil.rmtree(other)
    return wheels


def _fetch_one(release: Version, home: Path) -> None:
    """A wheel is in its place whole, or not at all."""
    unfinished = home.with_name(f"{home.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    answer = _pip("download", "--no-deps", "--quiet", "--dest", str(unfinished), f"{PACKAGE}=={release}")
    if answer.returncode != 0:
        if not _versions():
            raise IndexUnreachable()
        raise RuntimeError(f"`pip download {PACKAGE}=={release}` failed: {answer.stderr or answer.stdout}")
    shutil.rmtree(home, ignore_errors=True)
    unfinished.rename(home)


class Wheel:
    """
    One wheel, read where it lies.

    Args:
        path (`Path`): the file.
        release (`Version`): what it was asked for as.
    """

    def __init__(self, path: Path, release: Version) -> None:
        self.release = release
        self._zip = zipfile.ZipFile(path)
        self._trees: dict[str, ast.Module] = {}

    @cached_property
    def members(self) -> frozenset[str]:
        return frozenset(self._zip.namelist())

    def _read(self, ending: str) -> bytes:
        found = [member for member in self.members if member.endswith(ending)]
        assert len(found) == 1, f"torch_npu {self.release}: files whose path ends in '{ending}': {found}"
        return self._zip.read(found[0])

    def text(self, ending: str) -> str:
        """The one file whose path ends so."""
        return self._read(ending).decode()

    def strings_missing(self, ending: str, wanted: Sequence[str]) -> list[str]:
        """Those of `wanted` that do not stand in the one library whose path ends so."""
        content = self._read(ending)
        return [word for word in wanted if word.encode() not in content]

    def trees_with(self, word: str) -> Iterator[ast.Module]:
        """The Python files of the package that `word` stands in, parsed."""
        for member in sorted(self.members):
            if member.startswith(f"{PACKAGE}/") and member.endswith(".py"):
                content = self._zip.read(member)
                if word.encode() in content:
                    yield self._parse(member, content)

    def _parse(self, member: str, content: bytes) -> ast.Module:
        if member not in self._trees:
            self._trees[member] = ast.parse(content, member)
        return self._trees[member]

    def _module(self, name: str) -> tuple[ast.Module, bool] | None:
        """A module of the wheel, parsed, and whether it is a package; None if it is compiled or not there."""
        for member in (f"{name.replace('.', '/')}/__init__.py", f"{name.replace('.', '/')}.py"):
            if member in self.members:
                return self._parse(member, self._zip.read(member)), member.endswith("__init__.py")
        return None

    def find(self, module: str, name: str) -> tuple[str, ast.AST] | None:
        """
        What `name`, which may have dots, is in `module`: the module that defines it, and the definition. Names of
        submodules are found as well. None: it is not there, or not in Python.
        """
        first, _, rest = name.partition(".")
        found = self._bound(module, first, set())
        submodule = self._module(f"{module}.{first}")
        if found is None and submodule is not None:
            found = (f"{module}.{first}", submodule[0])
        if found is None or not rest:
            return found
        home, node = found
        if isinstance(node, ast.Module):
            return self.find(home, rest)
        return self.method(home, node, rest) if isinstance(node, ast.ClassDef) else None

    def _bound(self, module: str, name: str, seen: set[tuple[str, str]]) -> tuple[str, ast.AST] | None:
        """What the last binding of `name` at the top of `module` leads to."""
        here = self._module(module)
        if here is None or (module, name) in seen:
            return None
        seen.add((module, name))
        found: tuple[str, ast.AST] | None = None
        for node in _top_level(here[0]):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
                found = (module, node)
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                    found = (module, node)
            elif isinstance(node, ast.ImportFrom):
                source = _absolute(module, here[1], node)
                for alias in node.names:
                    if alias.name == "*" and name in self._public(source):
                        found = self._bound(source, name, seen) or found
                    elif name == (alias.asname or alias.name):
                        found = self.find(source, alias.name) or found
        return found

    def _public(self, module: str) -> set[str]:
        """What `from module import *` would bring."""
        here = self._module(module)
        for node in _top_level(here[0]) if here is not None else []:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                return {str(name) for name in ast.literal_eval(node.value)}
        return set()

    def method(self, module: str, owner: ast.ClassDef, name: str) -> tuple[str, ast.AST] | None:
        """A method of a class, its own or of a base that is in Python."""
        for node in owner.body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                return module, node
        for base in owner.bases:
            found = self.find(module, ast.unparse(base))
            if found is not None and isinstance(found[1], ast.ClassDef):
                inherited = self.method(found[0], found[1], name)
                if inherited is not None:
                    return inherited
        return None

    def signature(self, module: str, node: ast.AST, bound: bool = False) -> inspect.Signature | None:
        """
        How a function, a method that is `bound` to an object, or a class is called; None for what cannot be called,
        or whose constructor is compiled.
        """
        if isinstance(node, ast.ClassDef):
            made = self.method(module, node, "__new__") or self.method(module, node, "__init__")
            return None if made is None else self.signature(*made, bound=True)
        return _signature(node, bound) if isinstance(node, ast.FunctionDef) else None


def _top_level(tree: ast.Module) -> Iterator[ast.stmt]:
    """The statements of a module that bind its names, those behind `if` and `try` included."""
    waiting: list[ast.stmt] = list(reversed(tree.body))
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, (ast.If, ast.Try, ast.With)):
            inner = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
            handled = [child for handler in getattr(node, "handlers", []) for child in handler.body]
            waiting.extend(reversed(inner + handled))


def _absolute(module: str, is_package: bool, node: ast.ImportFrom) -> str:
    """The module that an import names."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + is_package]
    return ".".join([*parts, node.module] if node.module else parts)


def _signature(function: ast.FunctionDef, bound: bool) -> inspect.Signature:
    """The signature that a definition would have, defaults aside; without its first argument where it is bound."""
    given, kinds = function.args, inspect.Parameter
    positional = [*given.posonlyargs, *given.args]
    required = len(positional) - len(given.defaults)
    parameters = [
        kinds(
            argument.arg,
            kinds.POSITIONAL_ONLY if index < len(given.posonlyargs) else kinds.POSITIONAL_OR_KEYWORD,
            default=kinds.empty if index < required else None,
        )
        for index, argument in enumerate(positional)
    ][1 if bound else 0 :]
    if given.vararg is not None:
        parameters.append(kinds(given.vararg.arg, kinds.VAR_POSITIONAL))
    for argument, default in zip(given.kwonlyargs, given.kw_defaults):
        parameters.append(kinds(argument.arg, kinds.KEYWORD_ONLY, default=kinds.empty if default is None else None))
    if given.kwarg is not None:
        parameters.append(kinds(given.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature(parameters)
