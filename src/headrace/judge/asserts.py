"""Reads asserts: which of them the host can evaluate (see `evaluate.py`), and why not, if it cannot."""

from __future__ import annotations

import ast
import builtins
import functools
from collections.abc import Iterator
from dataclasses import dataclass

from headrace.judge import library
from headrace.judge.evaluate import Evaluator
from headrace.judge.objects import object_variables

_PARTS = (ast.expr_context, ast.operator, ast.unaryop, ast.cmpop, ast.boolop, ast.Slice, ast.Starred, ast.keyword)
_MORE_PARTS = (ast.arguments, ast.arg, ast.comprehension, ast.alias, ast.ExceptHandler, ast.Module)


@dataclass(frozen=True, slots=True)
class Asserts:
    """One test. `problem` says why it would have to run beside the program, where its result can be forged."""

    source: str
    tree: ast.Module
    guest_names: frozenset[str]
    objects: frozenset[str]
    problem: str | None


@functools.lru_cache(maxsize=4096)
def read_asserts(source: str, entry_point: str | None = None) -> Asserts:
    """Parse a test; SyntaxError, ValueError, RecursionError or MemoryError if it is no Python."""
    tree = ast.parse(source)
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    if entry_point is not None and "check" in defined and not _called(tree, "check"):
        call = ast.Call(ast.Name("check", ast.Load()), [ast.Name(entry_point, ast.Load())], [])
        tree.body.append(ast.Expr(call))
        ast.fix_missing_locations(tree)
    bound = set(_bound(tree))
    guest = frozenset({entry_point} if entry_point else ())
    if not _names_of_program(tree, bound, guest):  # a solution that is named as one of Python's functions
        guest = frozenset(name for name in library.BUILTINS if _called(tree, name) and name not in bound)
    nodes = list(_evaluated(tree))
    objects, unclear = object_variables(nodes, _guest_names(nodes, bound) | guest)
    problem = next(_problems(tree, bound, guest, objects), unclear)
    return Asserts(ast.unparse(tree), tree, guest, objects, problem)


def _called(tree: ast.AST, name: str) -> bool:
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return any(isinstance(function, ast.Name) and function.id == name for function in calls)


def _bound(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.alias):
            yield node.asname or node.name


def _names_of_program(tree: ast.AST, bound: set[str], guest: frozenset[str]) -> bool:
    nodes = list(_evaluated(tree))
    loaded = {node.id for node in nodes if isinstance(node, ast.Name)}
    return bool(_guest_names(nodes, bound) | (loaded & guest))


def _guest_names(nodes: list[ast.AST], bound: set[str]) -> frozenset[str]:
    loaded = {node.id for node in nodes if isinstance(node, ast.Name)}
    return frozenset(loaded - bound - set(library.known_names()))


def _evaluated(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but the messages of asserts and annotations, which are not evaluated."""
    yield node
    skipped = {ast.Assert: "msg", ast.arg: "annotation", ast.FunctionDef: "returns", ast.AnnAssign: "annotation"}
    for name, value in ast.iter_fields(node):
        if skipped.get(type(node)) == name:
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _evaluated(child)


def _problems(tree: ast.Module, bound: set[str], guest: frozenset[str], objects: frozenset[str]) -> Iterator[str]:
    nodes = list(_evaluated(tree))
    if not any(isinstance(node, ast.Assert) for node in nodes):
        yield "it asserts nothing"
    yield from _problems_of_functions(nodes)
    if not _names_of_program(tree, bound, guest):
        yield "it calls nothing of the program"
    for node in nodes:
        yield from _problems_of_names(node, bound, guest)
        yield from _problems_of_form(node)
        yield from _problems_of_methods(node, objects)
    yield from _problems_of_modules(nodes)


def _problems_of_names(node: ast.AST, bound: set[str], guest: frozenset[str]) -> Iterator[str]:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        known = node.id in bound or node.id in guest or node.id in library.known_names()
        if not known and hasattr(builtins, node.id):
            yield f"it uses {node.id}"
        if node.id.startswith("__"):
            yield f"it uses {node.id}"
    if isinstance(node, ast.Attribute) and node.attr.startswith("__"):
        yield f"it uses .{node.attr}"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        function = node.func.id
        if function in guest or (function not in bound and function not in library.BUILTINS):
            for argument in node.args:
                inside = {one.id for one in ast.walk(argument) if isinstance(one, ast.Name)}
                if isinstance(argument, ast.Lambda) and inside & bound - {one.arg for one in argument.args.args}:
                    yield "it hands the program a lambda that uses names of the test"


def _problems_of_methods(node: ast.AST, objects: frozenset[str]) -> Iterator[str]:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        owner, name = node.func.value, node.func.attr
        if name in library.UNKNOWN_METHODS and not (isinstance(owner, ast.Name) and owner.id in objects):
            yield f"it calls .{name}"


def _problems_of_form(node: ast.AST) -> Iterator[str]:
    prefix = "_do_" if isinstance(node, ast.stmt) else "_get_"
    known = isinstance(node, (*_PARTS, *_MORE_PARTS)) or hasattr(Evaluator, prefix + type(node).__name__)
    if not known or isinstance(node, ast.MatMult):
        yield f"it contains {type(node).__name__}"
    if isinstance(node, ast.FormattedValue) and (node.format_spec is not None or node.conversion != -1):
        yield "it formats text"
    if isinstance(node, ast.AugAssign) and not isinstance(node.target, ast.Name):
        yield "it changes what is not a name"
    if isinstance(node, ast.comprehension) and node.is_async:
        yield "it is asynchronous"
    if isinstance(node, (ast.FunctionDef, ast.Lambda)):
        given = node.args
        if given.vararg or given.kwarg or given.kwonlyargs or given.posonlyargs or getattr(node, "decorator_list", ()):
            yield "it defines a function with starred or keyword-only arguments, or with a decorator"
    if isinstance(node, ast.Try):
        kinds = [kind for handler in node.handlers for kind in _kinds(handler.type)]
        named = any(handler.name for handler in node.handlers)
        if node.finalbody or named or not all(isinstance(k, ast.Name) and k.id in library.EXCEPTIONS for k in kinds):
            yield "it handles exceptions in a way that the host cannot follow"


def _kinds(node: ast.expr | None) -> list[ast.expr]:
    return [] if node is None else list(node.elts) if isinstance(node, ast.Tuple) else [node]


def _problems_of_functions(nodes: list[ast.AST]) -> Iterator[str]:
    called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    for function in (node for node in nodes if isinstance(node, ast.FunctionDef)):
        uses = [node for node in nodes if isinstance(node, ast.Name) and node.id == function.name]
        if not all(id(use) in called for use in uses):
            yield f"it uses its function {function.name} other than by calling it"
        if any(isinstance(node, ast.Assert) for node in ast.walk(function)) and not uses:
            yield f'it never calls {function.name}; append the call, or name the function in metadata["entry_point"]'


def _problems_of_modules(nodes: list[ast.AST]) -> Iterator[str]:
    there, imported = library.modules(), dict[str, str]()
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name not in there:
                    yield f"it imports {alias.name}"
                imported[alias.asname or alias.name] = alias.name
        if isinstance(node, ast.ImportFrom):
            inside = there.get(node.module or "", {}) if not node.level else {}
            yield from (f"it imports {alias.name}" for alias in node.names if alias.name not in inside)
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in imported:
            module = imported[node.value.id]
            if node.attr not in there.get(module, {}):
                yield f"it uses {module}.{node.attr}"
