"""Which variables of a test hold objects of the program's classes, as far as the test itself shows it.

`r = f(1); assert r.union({2}) == {2}` wants plain data: `union` is taken of the plain value on the host. If the program
were asked, it could return the argument. `s = Sets(3); s.merge(0, 1); assert s.find(0) == 1` wants an object: its
methods are the program's. The program must not decide which of the two it is, so the test does.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from headrace.judge import library

_CHANGES = """
append extend insert pop popitem remove discard sort reverse clear add update setdefault
intersection_update difference_update symmetric_difference_update
"""
_CHANGE_NOTHING = library.PLAIN_NAMES - frozenset(_CHANGES.split())  # of plain data, if the result is not used


def object_variables(nodes: list[ast.AST], guest_names: frozenset[str]) -> tuple[frozenset[str], str | None]:
    """(variables that hold objects, the problem if one may hold either an object or plain data).

    A variable holds an object if a class made it (the name begins with a capital letter) and the test uses it as no
    plain data can be used: by other methods or fields, in `isinstance` with a class of the program, or by a statement
    that would do nothing to plain data.
    """
    makers = _makers(nodes, guest_names)
    made = {name for name, found in makers.items() if all(_is_class_name(one) for one in found)}
    shown = set(_used_as_objects(nodes, guest_names))
    for name in _used_as_either(nodes):
        if name in made - shown:
            maker = min(makers[name])
            return (
                frozenset(),
                f"{maker} may be a class or a function; if a class, add assert isinstance({name}, {maker})",
            )
    return frozenset(made & shown), next(_operators_on(made & shown, nodes), None)


def _operators_on(objects: set[str], nodes: list[ast.AST]) -> Iterator[str]:
    """Operators between two objects of the program: its classes could return what the test wants."""
    for node in nodes:
        match node:
            case ast.BinOp(left=ast.Name(id=left), right=ast.Name(id=right)):
                pass
            case ast.Compare(left=ast.Name(id=left), ops=[op], comparators=[ast.Name(id=right)]):
                if isinstance(op, (ast.Is, ast.IsNot)):
                    continue
            case _:
                continue
        if {left, right} <= objects:
            yield (
                f"{left} and {right} are objects of the program, and the operators between them are the program's; "
                f"compare their fields, or what their methods return"
            )


def _is_class_name(name: str) -> bool:
    return name.lstrip("_")[:1].isupper()


def _makers(nodes: list[ast.AST], guest_names: frozenset[str]) -> dict[str, set[str]]:
    """The functions and classes of the program whose results are assigned to a variable."""
    found: dict[str, set[str]] = {}
    parameters = _parameters(nodes)
    for node in nodes:
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or not isinstance(node.value, ast.Call):
            continue
        function = node.value.func
        if isinstance(function, ast.Name):
            names = parameters.get(function.id, {function.id}) & guest_names
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name) and names:
                    found.setdefault(target.id, set()).update(names)
    return found


def _parameters(nodes: list[ast.AST]) -> dict[str, set[str]]:
    """By the names of parameters of the test's functions: the names that are passed for them."""
    functions = {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}
    found: dict[str, set[str]] = {}
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in functions:
            for parameter, given in zip(functions[node.func.id].args.args, node.args, strict=False):
                if isinstance(given, ast.Name):
                    found.setdefault(parameter.arg, set()).add(given.id)
    return found


def _used_as_objects(nodes: list[ast.AST], guest_names: frozenset[str]) -> Iterator[str]:
    for node in nodes:
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if attribute not in library.PLAIN_NAMES:
                yield name
            case ast.Call(func=ast.Name(id="isinstance"), args=[ast.Name(id=name), ast.Name(id=kind)]):
                if kind in guest_names:
                    yield name
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=attribute))):
                if attribute in _CHANGE_NOTHING:
                    yield name


def _used_as_either(nodes: list[ast.AST]) -> Iterator[str]:
    """Variables with a use that plain data and objects can have, and in which the program would get a value."""
    unused = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        match node:
            case ast.Subscript(value=ast.Name(id=name), ctx=ast.Load()):
                yield name
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=attribute)) if id(node) not in unused:
                given = bool(node.args or node.keywords)
                if attribute in library.PREDICATES or (given and attribute in library.PLAIN_NAMES):
                    yield name
