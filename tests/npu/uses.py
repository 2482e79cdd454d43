# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns reading from Python source what it asks of a device's module: attributes, calls with their arguments, and methods
of the streams and events that come from it. Nothing is listed by hand; a use that cannot be read is an error, so that
none is overlooked. Must not know what a device offers.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


MODULE, STREAM, EVENT = "", "Stream", "Event"


@dataclass(frozen=True)
class Use:
    """
    One use of an attribute.

    Args:
        name (`str`): the attribute of the module, or "Stream.method", "Event.method".
        positional (`int`, *optional*): how many arguments it is called with by position, None if it is not called.
        keywords (`tuple[str, ...]`): and by name.
        is_optional (`bool`): the code does without it, where it is not there.
        where (`str`): the function that uses it.
    """

    name: str
    positional: int | None
    keywords: tuple[str, ...]
    is_optional: bool
    where: str

    def __str__(self) -> str:
        if self.positional is None:
            return self.name
        return f"{self.name}({', '.join([*['_'] * self.positional, *(f'{word}=_' for word in self.keywords)])})"


def uses_of_class(cls: type, handle: str) -> set[Use]:
    """
    All uses of the module that objects of `cls` hold as `self.<handle>`: in the methods they have, and in those of
    bases that these call through `super()`.
    """
    bases = [base for base in cls.__mro__ if base is not object]
    return uses_in_classes([ast.parse(textwrap.dedent(inspect.getsource(base))).body[0] for base in bases], handle)


def uses_in_classes(family: Sequence[ast.AST], handle: str) -> set[Use]:
    """The uses in the methods of an object whose class and bases, in the order in which they are asked, are these."""
    methods: dict[str, list[tuple[str, ast.FunctionDef]]] = {}
    for tree in family:
        for method in ast.iter_child_nodes(tree):
            if isinstance(method, ast.FunctionDef):
                known = methods.setdefault(method.name, [])
                if not known or f"super().{method.name}(" in ast.unparse(known[-1][1]):
                    known.append((f"{getattr(tree, 'name', '')}.{method.name}", method))
    returned = {name: _kind_of_annotation(known[0][1].returns) for name, known in methods.items()}
    uses: set[Use] = set()
    for known in methods.values():
        for where, method in known:
            uses |= _Reader(handle, returned, where).read(method)
    return uses


def uses_of_path(tree: ast.AST, path: str, where: str, is_ours: bool = True) -> set[Use]:
    """
    The uses of a module that is named in full, such as "torch.npu"; of submodules with the names on the way. Calls of
    others whose arguments cannot be counted are uses without a call.
    """
    uses = set()
    for node, above in _with_parents(tree):
        full = _dotted(node)
        if full.startswith(f"{path}.") and not isinstance(above, ast.Attribute):
            counted = above if is_ours or _is_counted(above) else None
            uses.add(_use(full.removeprefix(f"{path}."), node, counted, False, where))
    return uses


def _is_counted(call: ast.AST | None) -> bool:
    """Whether how many arguments a call has, and what their names are, is written down."""
    return isinstance(call, ast.Call) and not (
        any(keyword.arg is None for keyword in call.keywords)
        or any(isinstance(argument, ast.Starred) for argument in call.args)
    )


def _use(name: str, node: ast.AST, above: ast.AST | None, is_optional: bool, where: str) -> Use:
    if not isinstance(above, ast.Call) or above.func is not node:
        return Use(name, None, (), is_optional, where)
    if not _is_counted(above):
        raise ValueError(f"'{where}' calls '{name}' with arguments that cannot be counted: write them out")
    return Use(name, len(above.args), tuple(sorted(str(word.arg) for word in above.keywords)), is_optional, where)


class _Reader(ast.NodeVisitor):
    """Walks one function in the order in which it is written, and remembers what its names hold."""

    def __init__(self, handle: str, returned: dict[str, str | None], where: str) -> None:
        self._handle, self._returned, self._where = handle, returned, where
        self._kinds: dict[str, str | None] = {}
        self._fetched: dict[str, tuple[str, bool]] = {}
        """Names that hold an attribute of the module, brought by `getattr`: which, and whether it may be missing."""
        self._above: dict[ast.AST, ast.AST | None] = {}
        self._uses: set[Use] = set()

    def read(self, function: ast.FunctionDef) -> set[Use]:
        self._above = dict(_with_parents(function))
        self.visit(function)
        return self._uses

    def _kind(self, node: ast.AST) -> str | None:
        """What an expression holds: the module, a stream, an event (or several), or something else."""
        if isinstance(node, ast.Name):
            return self._kinds.get(node.id)
        if isinstance(node, ast.Subscript):
            inside = self._kind(node.value)
            return inside if inside in (STREAM, EVENT) else None
        if _dotted(node) == f"self.{self._handle}":
            return MODULE
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if self._kind(node.func.value) == MODULE:
                return next((kind for kind in (STREAM, EVENT) if kind.lower() in node.func.attr.lower()), None)
            if _dotted(node.func).startswith("self."):
                return self._returned.get(node.func.attr)
        return None

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for argument in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]:
            self._kinds[argument.arg] = _kind_of_annotation(argument.annotation)
        for statement in node.body:
            self.visit(statement)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self._bind(target, node.value)
            if not isinstance(target, (ast.Name, ast.Tuple)) and _dotted(target) != f"self.{self._handle}":
                self.visit(target)

    def visit_For(self, node: ast.For) -> None:
        self.visit(node.iter)
        self._bind(node.target, node.iter)
        for statement in [*node.body, *node.orelse]:
            self.visit(statement)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self._bind(node.target, node.iter)
        self.generic_visit(node)

    def _visit_comprehended(self, node: ast.AST) -> None:
        for generator in getattr(node, "generators", []):
            self.visit(generator)
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.comprehension):
                self.visit(child)

    visit_ListComp = visit_SetComp = visit_GeneratorExp = visit_DictComp = _visit_comprehended

    def _bind(self, target: ast.AST, value: ast.AST) -> None:
        kind = self._kind(value)
        for name in target.elts if isinstance(target, ast.Tuple) else [target]:
            if isinstance(name, ast.Name):
                self._kinds[name.id] = kind
                self._fetched.pop(name.id, None)
                if isinstance(value, ast.Call) and _is_getattr(value) and self._kind(value.args[0]) == MODULE:
                    self._fetched[name.id] = (_constant(value.args[1], self._where), len(value.args) > 2)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        kind = self._kind(node.value)
        if kind is not None:
            name = f"{kind}.{node.attr}" if kind else node.attr
            self._uses.add(_use(name, node, self._above[node], False, self._where))
        self._refuse_unread(node)
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if node.id in self._fetched and isinstance(node.ctx, ast.Load):
            name, is_optional = self._fetched[node.id]
            self._uses.add(_use(name, node, self._above[node], is_optional, self._where))
        self._refuse_unread(node)

    def visit_Call(self, node: ast.Call) -> None:
        if (_is_getattr(node) or _dotted(node.func) == "hasattr") and self._kind(node.args[0]) == MODULE:
            name = _constant(node.args[1], self._where)
            is_optional = len(node.args) > 2 or _dotted(node.func) == "hasattr"
            self._uses.add(_use(name, node, self._above[node], is_optional, self._where))
        self.generic_visit(node)

    def _refuse_unread(self, node: ast.expr) -> None:
        """The module itself may be asked for attributes and be given a name; where else it goes nobody would see."""
        above = self._above[node]
        if self._kind(node) != MODULE or isinstance(getattr(node, "ctx", None), ast.Store):
            return
        is_asked = isinstance(above, ast.Attribute) or (
            isinstance(above, ast.Call) and _dotted(above.func) in ("getattr", "hasattr") and above.args[0] is node
        )
        is_named = isinstance(above, ast.Assign) and all(isinstance(target, ast.Name) for target in above.targets)
        if not is_asked and not is_named:
            raise ValueError(f"'{self._where}' passes the device's module on: what is asked of it cannot be read")


def _with_parents(tree: ast.AST, above: ast.AST | None = None) -> Iterator[tuple[ast.AST, ast.AST | None]]:
    yield tree, above
    for child in ast.iter_child_nodes(tree):
        yield from _with_parents(child, tree)


def _dotted(node: ast.AST) -> str:
    """`a.b.c` as text, if it is that; else what cannot be mistaken for it."""
    if isinstance(node, ast.Name):
        return node.id
    return f"{_dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else "?"


def _is_getattr(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and _dotted(node.func) == "getattr"


def _constant(node: ast.AST, where: str) -> str:
    if not isinstance(node, ast.Constant):
        raise ValueError(f"'{where}' asks the device's module for a name that is computed: write it out")
    return str(node.value)


def _kind_of_annotation(annotation: ast.AST | None) -> str | None:
    words = re.findall(r"\w+", ast.unparse(annotation)) if annotation is not None else []
    return next((kind for kind in (STREAM, EVENT) if kind in words), None)
