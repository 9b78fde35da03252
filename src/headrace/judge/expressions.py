"""Expressions of a test, evaluated on the host; only calls of the program's own functions go to the program.

Names that neither the test nor `library` has are the program's: calling one is a request of the session, and gives a
Handle. Where a handle is compared, computed with or iterated over, its plain value is taken. So the program never sees
what is expected, and nothing of it decides whether an assert holds.
"""

from __future__ import annotations

import ast
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import GeneratorType
from typing import Any

from headrace.judge import library
from headrace.judge.plain import NotPlainError, encode
from headrace.judge.session import Handle, Session

_MOST_STEPS = 1_000_000
_LONGEST_S = 10.0  # of computing, all of it here
_DEEPEST = 30  # calls of the test's own functions


class FailedError(Exception):
    """An assert does not hold."""


class ReturnError(Exception):
    """A return statement, on its way to the call."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


@dataclass(frozen=True, slots=True)
class GuestName:
    """A name of the program."""

    name: str


@dataclass(frozen=True, slots=True)
class Module:
    """What a test imported."""

    name: str
    inside: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Function:
    """A function or lambda of the test."""

    node: ast.FunctionDef | ast.Lambda
    scope: Scope


class Scope(dict[str, Any]):
    """Names of the test, with those around it."""

    def __init__(self, outer: Scope | None = None) -> None:
        super().__init__()
        self.outer = outer

    def find(self, name: str) -> Any:
        """The value of a name; KeyError if the test has none."""
        return self[name] if name in self or self.outer is None else self.outer.find(name)


class Expressions:
    """Evaluates. `guest_names` are the program's even where they are Python's own (a solution named `sum`)."""

    def __init__(self, session: Session, guest_names: frozenset[str] = frozenset()) -> None:
        self._session = session
        self._guest_names = guest_names
        self._steps = 0
        self._depth = 0
        self._start_s = time.thread_time()

    @abstractmethod
    def _block(self, body: list[ast.stmt], scope: Scope) -> None:
        """Runs statements."""

    def _count(self) -> None:
        self._steps += 1
        if self._steps > _MOST_STEPS or (self._steps % 256 == 0 and time.thread_time() - self._start_s > _LONGEST_S):
            raise FailedError("the test takes too long on the host")

    def _bind(self, target: ast.expr, value: Any, scope: Scope) -> None:
        if isinstance(target, ast.Name):
            scope[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            items = self._items(value)
            if len(items) != len(target.elts):
                raise FailedError("values to unpack are not as many as names")
            for inner, item in zip(target.elts, items, strict=True):
                self._bind(inner, item, scope)
        elif isinstance(target, ast.Subscript):
            owner, index = self._value(target.value, scope), self._index(target.slice, scope)
            if isinstance(owner, Handle):
                self._session.ask("setitem", {"h": owner.number}, self._given(index), self._given(value))
            else:
                owner[index] = self._plain(value)
        elif isinstance(target, ast.Attribute):
            owner = self._value(target.value, scope)
            if not isinstance(owner, Handle):
                raise NotPlainError("only objects of the program have attributes to set")
            self._session.ask("setattr", {"h": owner.number}, target.attr, self._given(value))

    def _value(self, node: ast.expr, scope: Scope) -> Any:
        """A host value, or a Handle of one in the program."""
        self._count()
        return getattr(self, f"_get_{type(node).__name__}")(node, scope)

    def _plain(self, value: Any) -> Any:
        if isinstance(value, GuestName):
            value = self._session.ask("get", {"e": value.name})
        return self._session.plain(value) if isinstance(value, Handle) else value

    def _deep(self, value: Any) -> Any:
        """A host value with no handle in it."""
        if type(value) in (list, tuple, set, frozenset):
            return type(value)(self._deep(item) for item in value)
        if type(value) is dict:
            return {self._deep(key): self._deep(item) for key, item in value.items()}
        if isinstance(value, GeneratorType):
            return (self._deep(item) for item in value)
        return self._plain(value)

    def _items(self, value: Any) -> list[Any]:
        """What iterating over a value gives; of an object of the program, what `list` of it gives there."""
        if isinstance(value, Handle):
            try:
                return library.items_of(self._plain(value))
            except NotPlainError:
                return library.items_of(
                    self._plain(self._session.ask("call", {"e": "list"}, [{"h": value.number}], {}))
                )
        return library.items_of(self._plain(value))

    def _get_Constant(self, node: ast.Constant, scope: Scope) -> Any:
        return node.value

    def _get_Name(self, node: ast.Name, scope: Scope) -> Any:
        try:
            return scope.find(node.id)
        except KeyError:
            pass
        if node.id in library.BUILTINS and node.id not in self._guest_names:
            return library.BUILTINS[node.id]
        return GuestName(node.id)

    def _get_List(self, node: ast.List, scope: Scope) -> Any:
        return self._elements(node.elts, scope)

    def _get_Tuple(self, node: ast.Tuple, scope: Scope) -> Any:
        return tuple(self._elements(node.elts, scope))

    def _get_Set(self, node: ast.Set, scope: Scope) -> Any:
        return library.CONSTRUCTORS[set](self._deep(self._elements(node.elts, scope)))

    def _get_Dict(self, node: ast.Dict, scope: Scope) -> Any:
        made: dict[Any, Any] = {}
        for key, item in zip(node.keys, node.values, strict=True):
            if key is None:
                made.update(self._plain(self._value(item, scope)))
            else:
                made[self._deep(self._value(key, scope))] = self._value(item, scope)
        return made

    def _elements(self, nodes: list[ast.expr], scope: Scope) -> list[Any]:
        found: list[Any] = []
        for node in nodes:
            if isinstance(node, ast.Starred):
                found += self._items(self._value(node.value, scope))
            else:
                found.append(self._value(node, scope))
        return found

    def _get_BinOp(self, node: ast.BinOp, scope: Scope) -> Any:
        left, right = self._deep(self._value(node.left, scope)), self._deep(self._value(node.right, scope))
        return library.BINARY[type(node.op)](left, right)

    def _get_UnaryOp(self, node: ast.UnaryOp, scope: Scope) -> Any:
        return library.UNARY[type(node.op)](self._plain(self._value(node.operand, scope)))

    def _get_BoolOp(self, node: ast.BoolOp, scope: Scope) -> Any:
        value: Any = None
        for operand in node.values:
            value = self._plain(self._value(operand, scope))
            if bool(value) is isinstance(node.op, ast.Or):
                break
        return value

    def _get_Compare(self, node: ast.Compare, scope: Scope) -> Any:
        left = self._deep(self._value(node.left, scope))
        for compare, operand in zip(node.ops, node.comparators, strict=True):
            right = self._deep(self._value(operand, scope))
            if not library.COMPARE[type(compare)](left, right):
                return False
            left = right
        return True

    def _get_IfExp(self, node: ast.IfExp, scope: Scope) -> Any:
        return self._value(node.body if self._plain(self._value(node.test, scope)) else node.orelse, scope)

    def _get_Lambda(self, node: ast.Lambda, scope: Scope) -> Any:
        return Function(node, scope)

    def _get_JoinedStr(self, node: ast.JoinedStr, scope: Scope) -> Any:
        parts = [self._plain(self._value(part, scope)) for part in node.values]
        return library.method_of("", "join")([str(part) for part in parts])

    def _get_FormattedValue(self, node: ast.FormattedValue, scope: Scope) -> Any:
        return self._value(node.value, scope)

    def _index(self, node: ast.expr, scope: Scope) -> Any:
        if isinstance(node, ast.Slice):
            parts = (node.lower, node.upper, node.step)
            return slice(*(None if part is None else self._plain(self._value(part, scope)) for part in parts))
        return self._deep(self._value(node, scope))

    def _get_Subscript(self, node: ast.Subscript, scope: Scope) -> Any:
        owner, index = self._value(node.value, scope), self._index(node.slice, scope)
        if isinstance(owner, Handle):
            return self._session.ask("item", {"h": owner.number}, self._given(index))
        return self._plain(owner)[index]

    def _get_Attribute(self, node: ast.Attribute, scope: Scope) -> Any:
        owner = self._value(node.value, scope)
        if isinstance(owner, Module):
            return owner.inside[node.attr]
        if isinstance(owner, (Handle, GuestName)):
            return self._session.ask("get", {"a": [self._handle(owner).number, node.attr]})
        return library.method_of(owner, node.attr)

    def _get_ListComp(self, node: ast.ListComp, scope: Scope) -> Any:
        return [self._value(node.elt, inner) for inner in self._rounds(node.generators, scope)]

    def _get_GeneratorExp(self, node: ast.GeneratorExp, scope: Scope) -> Any:
        return (self._value(node.elt, inner) for inner in self._rounds(node.generators, scope))

    def _get_SetComp(self, node: ast.SetComp, scope: Scope) -> Any:
        found = [self._deep(self._value(node.elt, inner)) for inner in self._rounds(node.generators, scope)]
        return library.CONSTRUCTORS[set](found)

    def _get_DictComp(self, node: ast.DictComp, scope: Scope) -> Any:
        rounds = self._rounds(node.generators, scope)
        pairs = [(self._deep(self._value(node.key, inner)), self._value(node.value, inner)) for inner in rounds]
        return library.CONSTRUCTORS[dict](pairs)

    def _rounds(self, loops: list[ast.comprehension], scope: Scope) -> Iterator[Scope]:
        first, rest = loops[0], loops[1:]
        for item in self._items(self._value(first.iter, scope)):
            inner = Scope(scope)
            self._bind(first.target, item, inner)
            if all(self._plain(self._value(condition, inner)) for condition in first.ifs):
                yield from self._rounds(rest, inner) if rest else (inner,)

    # ---- calls -------------------------------------------------------------------------------------------------------

    def _get_Call(self, node: ast.Call, scope: Scope) -> Any:
        if isinstance(node.func, ast.Attribute):
            owner = self._value(node.func.value, scope)
            if isinstance(owner, (Handle, GuestName)) and not _is_on_plain_value(node.func, node):
                target: Any = {"a": [self._handle(owner).number, node.func.attr]}
                return self._ask_call(target, *self._arguments(node, scope))
            function = self._get_method(owner, node.func.attr)
        else:
            function = self._value(node.func, scope)
        positional, named = self._arguments(node, scope)
        if isinstance(function, (Handle, GuestName)):
            return self._ask_call(self._given(function), positional, named)
        if isinstance(function, Function):
            return self._call_own(function, positional, named)
        return self._call_host(function, positional, named)

    def _get_method(self, owner: Any, name: str) -> Any:
        return owner.inside[name] if isinstance(owner, Module) else library.method_of(self._plain(owner), name)

    def _arguments(self, node: ast.Call, scope: Scope) -> tuple[list[Any], dict[str, Any]]:
        named: dict[str, Any] = {}
        for keyword in node.keywords:
            value = self._value(keyword.value, scope)
            named.update({keyword.arg: value} if keyword.arg is not None else self._plain(value))
        return self._elements(node.args, scope), named

    def _ask_call(self, target: Any, positional: list[Any], named: dict[str, Any]) -> Handle:
        given = [self._given(value) for value in positional]
        return self._session.ask("call", target, given, {key: self._given(value) for key, value in named.items()})

    def _call_own(self, function: Function, positional: list[Any], named: dict[str, Any]) -> Any:
        arguments, scope = function.node.args, Scope(function.scope)
        names = [argument.arg for argument in arguments.args]
        defaults = dict(zip(names[len(names) - len(arguments.defaults) :], arguments.defaults, strict=True))
        given = {**dict(zip(names, positional, strict=False)), **named}
        if len(positional) > len(names) or set(given) - set(names) or set(names) - set(given) - set(defaults):
            raise FailedError("a function of the test is called with other arguments than it takes")
        for name in names:
            scope[name] = given[name] if name in given else self._value(defaults[name], function.scope)
        self._depth += 1
        if self._depth > _DEEPEST:
            raise FailedError("functions of the test call each other too deeply")
        try:
            if isinstance(function.node, ast.Lambda):
                return self._value(function.node.body, scope)
            self._block(function.node.body, scope)
        except ReturnError as returned:
            return returned.value
        finally:
            self._depth -= 1
        return None

    def _call_host(self, function: Any, positional: list[Any], named: dict[str, Any]) -> Any:
        single = positional[0] if len(positional) == 1 and not named else None
        name = getattr(function, "__name__", "")
        if isinstance(single, Handle) and library.BUILTINS.get(name) is function and name in library.DELEGATED:
            try:
                self._plain(single)
            except NotPlainError:
                return self._session.ask("call", {"e": name}, [{"h": single.number}], {})
        keep = function is isinstance
        if keep and len(positional) == 2 and isinstance(positional[1], (Handle, GuestName)):  # a class of the program
            return self._ask_call({"e": "isinstance"}, positional, {})
        values = [value if keep and place else self._for_host(value) for place, value in enumerate(positional)]
        named = {key: self._for_host(value) for key, value in named.items()}
        constructor = library.CONSTRUCTORS.get(function) if isinstance(function, type) else None
        return (constructor or function)(*values, **named)

    def _for_host(self, value: Any) -> Any:
        if isinstance(value, Function):
            return self._callable(value)
        if isinstance(value, type):
            return library.CONSTRUCTORS.get(value, value)
        return library.finite(self._deep(value))

    def _callable(self, function: Function) -> Callable[..., Any]:
        return lambda *values: self._deep(self._call_own(function, list(values), {}))

    def _handle(self, value: Handle | GuestName) -> Handle:
        return value if isinstance(value, Handle) else self._session.ask("get", {"e": value.name})

    def _given(self, value: Any) -> Any:
        """A value as the program gets it."""
        if isinstance(value, Handle):
            return {"h": value.number}
        if isinstance(value, GuestName):
            return {"e": value.name}
        if isinstance(value, Function):
            return {"e": ast.unparse(value.node)}
        if isinstance(value, slice):
            return {"S": [encode(part) for part in (value.start, value.stop, value.step)]}
        if isinstance(value, GeneratorType):
            value = list(value)
        if type(value) in (list, tuple):
            return {"l" if type(value) is list else "t": [self._given(item) for item in value]}
        if type(value) is dict:
            return {"d": [[self._given(key), self._given(item)] for key, item in value.items()]}
        for name, builtin in library.BUILTINS.items():
            if builtin is value:
                return {"e": name}
        return encode(value)


def _is_on_plain_value(method: ast.Attribute, call: ast.Call) -> bool:
    """Whether a method is taken of the plain value, and not left to the program.

    So are methods with arguments of what a call returned (`f(1).union({2})`): those may be what the test expects.
    Objects that a test keeps under a name (`sets = UnionFind(3)`) have methods of their own.
    """
    chained = isinstance(method.value, ast.Call) and bool(call.args or call.keywords)
    return method.attr in library.PREDICATES or (chained and method.attr in library.VALUE_METHODS)
