"""Expressions of a test, evaluated on the host; only calls of the program's own functions go to the program.

Names that neither the test nor `library` has are the program's. A call of one is a request of the session; its result
is plain data, or a Handle of an object. Operators, comparisons, subscripts, builtins and methods of plain data are
evaluated here, on plain values. So the program never sees what is expected, and its objects decide no assert.
"""

from __future__ import annotations

import ast
import time
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

from headrace.judge import library
from headrace.judge.plain import Handle, NotPlainError
from headrace.judge.session import Session
from headrace.judge.values import Function, GuestName, Module, Scope, Values

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


class Expressions:
    """Evaluates. `guest_names` are the program's even where they are Python's own (a solution named `sum`).

    `objects` are the variables that hold objects of the program's classes (see `objects.py`).
    """

    def __init__(self, session: Session, guest_names: frozenset[str], objects: frozenset[str]) -> None:
        self._session = session
        self._values = Values(session)
        self._guest_names = guest_names
        self._objects = objects
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
            items = self._values.items(value)
            if len(items) != len(target.elts):
                raise FailedError("values to unpack are not as many as names")
            for inner, item in zip(target.elts, items, strict=True):
                self._bind(inner, item, scope)
        elif isinstance(target, ast.Subscript):
            owner, index = self._value(target.value, scope), self._index(target.slice, scope)
            if isinstance(owner, (Handle, GuestName)):
                given = self._values.given
                self._session.ask("setitem", given(owner), given(index), given(value))
            else:
                owner[index] = value
        elif isinstance(target, ast.Attribute):
            owner = self._value(target.value, scope)
            if not isinstance(owner, (Handle, GuestName)):
                raise NotPlainError("only objects of the program have attributes to set")
            self._session.ask("setattr", self._values.given(owner), target.attr, self._values.given(value))

    def _value(self, node: ast.expr, scope: Scope) -> Any:
        """A host value, or a Handle of one in the program."""
        self._count()
        return getattr(self, f"_get_{type(node).__name__}")(node, scope)

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
        return library.CONSTRUCTORS[set](self._values.deep(self._elements(node.elts, scope)))

    def _get_Dict(self, node: ast.Dict, scope: Scope) -> Any:
        made: dict[Any, Any] = {}
        for key, item in zip(node.keys, node.values, strict=True):
            if key is None:
                made.update(self._values.plain(self._value(item, scope)))
            else:
                made[self._values.deep(self._value(key, scope))] = self._value(item, scope)
        return made

    def _elements(self, nodes: list[ast.expr], scope: Scope) -> list[Any]:
        found: list[Any] = []
        for node in nodes:
            if isinstance(node, ast.Starred):
                found += self._values.items(self._value(node.value, scope))
            else:
                found.append(self._value(node, scope))
        return found

    def _get_BinOp(self, node: ast.BinOp, scope: Scope) -> Any:
        left, right = (
            self._values.deep(self._value(node.left, scope)),
            self._values.deep(self._value(node.right, scope)),
        )
        return library.BINARY[type(node.op)](left, right)

    def _get_UnaryOp(self, node: ast.UnaryOp, scope: Scope) -> Any:
        return library.UNARY[type(node.op)](self._values.plain(self._value(node.operand, scope)))

    def _get_BoolOp(self, node: ast.BoolOp, scope: Scope) -> Any:
        value: Any = None
        for operand in node.values:
            value = self._values.plain(self._value(operand, scope))
            if bool(value) is isinstance(node.op, ast.Or):
                break
        return value

    def _get_Compare(self, node: ast.Compare, scope: Scope) -> Any:
        left = self._value(node.left, scope)
        for compare, operand in zip(node.ops, node.comparators, strict=True):
            right = self._value(operand, scope)
            if not self._compare(compare, left, right):
                return False
            left = right
        return True

    def _compare(self, compare: ast.cmpop, left: Any, right: Any) -> bool:
        if isinstance(compare, (ast.Is, ast.IsNot)):
            return self._values.are_same(left, right) is isinstance(compare, ast.Is)
        return library.COMPARE[type(compare)](self._values.deep(left), self._values.deep(right))

    def _get_IfExp(self, node: ast.IfExp, scope: Scope) -> Any:
        return self._value(node.body if self._values.plain(self._value(node.test, scope)) else node.orelse, scope)

    def _get_Lambda(self, node: ast.Lambda, scope: Scope) -> Any:
        return Function(node, scope)

    def _get_JoinedStr(self, node: ast.JoinedStr, scope: Scope) -> Any:
        parts = [self._values.deep(self._value(part, scope)) for part in node.values]
        return library.attribute_of("", "join")([str(part) for part in parts])

    def _get_FormattedValue(self, node: ast.FormattedValue, scope: Scope) -> Any:
        return self._value(node.value, scope)

    def _index(self, node: ast.expr, scope: Scope) -> Any:
        if isinstance(node, ast.Slice):
            parts = (node.lower, node.upper, node.step)
            return slice(*(None if part is None else self._values.plain(self._value(part, scope)) for part in parts))
        return self._values.deep(self._value(node, scope))

    def _get_Subscript(self, node: ast.Subscript, scope: Scope) -> Any:
        owner, index = self._value(node.value, scope), self._index(node.slice, scope)
        if isinstance(owner, Handle) and self._is_object(node.value):
            return self._session.ask("item", self._values.given(owner), self._values.given(index))
        return self._values.plain(owner)[index]

    def _get_Attribute(self, node: ast.Attribute, scope: Scope) -> Any:
        owner = self._value(node.value, scope)
        if isinstance(owner, Module):
            return owner.inside[node.attr]
        owner = self._values.fetched(owner)
        if not isinstance(owner, Handle):
            return library.attribute_of(owner, node.attr)
        found = self._session.ask("get", {"a": [self._values.given(owner), node.attr]})
        if isinstance(found, Handle) and node.attr in library.PLAIN_NAMES and not self._is_object(node.value):
            return library.attribute_of(self._values.plain(owner), node.attr)  # a method, to be called later
        return found

    def _is_object(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id in self._objects

    def _get_ListComp(self, node: ast.ListComp, scope: Scope) -> Any:
        return [self._value(node.elt, inner) for inner in self._rounds(node.generators, scope)]

    def _get_GeneratorExp(self, node: ast.GeneratorExp, scope: Scope) -> Any:
        return (self._value(node.elt, inner) for inner in self._rounds(node.generators, scope))

    def _get_SetComp(self, node: ast.SetComp, scope: Scope) -> Any:
        found = [self._values.deep(self._value(node.elt, inner)) for inner in self._rounds(node.generators, scope)]
        return library.CONSTRUCTORS[set](found)

    def _get_DictComp(self, node: ast.DictComp, scope: Scope) -> Any:
        rounds = self._rounds(node.generators, scope)
        pairs = [(self._values.deep(self._value(node.key, inner)), self._value(node.value, inner)) for inner in rounds]
        return library.CONSTRUCTORS[dict](pairs)

    def _rounds(self, loops: list[ast.comprehension], scope: Scope) -> Iterator[Scope]:
        first, rest = loops[0], loops[1:]
        for item in self._values.items(self._value(first.iter, scope)):
            inner = Scope(scope)
            self._bind(first.target, item, inner)
            if all(self._values.plain(self._value(condition, inner)) for condition in first.ifs):
                yield from self._rounds(rest, inner) if rest else (inner,)

    # ---- calls -------------------------------------------------------------------------------------------------------

    def _get_Call(self, node: ast.Call, scope: Scope) -> Any:
        return self._call(node, scope, used=True)

    def _call(self, node: ast.Call, scope: Scope, used: bool) -> Any:
        """A call. One whose result is not used is there for what it does: arguments under a name change with it."""
        lent = [] if used else [self._value(one, scope) for one in node.args if isinstance(one, ast.Name)]
        if isinstance(node.func, ast.Attribute):
            owner = self._value(node.func.value, scope)
            if isinstance(owner, GuestName) and used:
                owner = self._values.fetched(owner)
            if isinstance(owner, (Handle, GuestName)) and self._is_method_of_program(node, owner, used):
                target = {"a": [self._values.given(owner), node.func.attr]}
                return self._values.call(target, *self._arguments(node, scope), lent)
            if isinstance(owner, Module):
                function = owner.inside[node.func.attr]
            else:
                function = library.attribute_of(self._values.plain(owner), node.func.attr)
        else:
            function = self._value(node.func, scope)
        positional, named = self._arguments(node, scope)
        if isinstance(function, (Handle, GuestName)):
            return self._values.call(self._values.given(function), positional, named, lent)
        if isinstance(function, Function):
            return self._call_own(function, positional, named)
        return self._call_host(function, positional, named)

    def _is_method_of_program(self, node: ast.Call, owner: Handle | GuestName, used: bool) -> bool:
        """Whether the program is asked. If not, the method is taken of the plain value.

        It is asked where it gains nothing by it: no plain value has this method, or the test shows that it wants an
        object, or the result is not used, or the request holds no value of the test that could be returned.
        """
        assert isinstance(node.func, ast.Attribute)
        name = node.func.attr
        if name not in library.PLAIN_NAMES or not used or self._is_object(node.func.value):
            return True
        if node.args or node.keywords or name in library.PREDICATES:
            return False
        return isinstance(owner, Handle) and not self._values.has_plain(owner)

    def _arguments(self, node: ast.Call, scope: Scope) -> tuple[list[Any], dict[str, Any]]:
        named: dict[str, Any] = {}
        for keyword in node.keywords:
            value = self._value(keyword.value, scope)
            named.update({keyword.arg: value} if keyword.arg is not None else self._values.plain(value))
        return self._elements(node.args, scope), named

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
        name = next((known for known, builtin in library.BUILTINS.items() if builtin is function), "")
        if len(positional) == 1 and not named:
            single = positional[0] = self._values.fetched(positional[0])
            if name == "len" and type(single) in (list, tuple, dict, set):  # whatever they contain
                return len(single)
            if isinstance(single, Handle) and self._answers(name, single):
                return self._session.ask("call", {"b": name}, [self._values.given(single)], {})
        if name == "isinstance" and len(positional) == 2:
            if isinstance(positional[1], (Handle, GuestName)):  # a class of the program
                return self._values.call({"b": name}, positional, {}, [])
            return isinstance(self._for_host(positional[0]), positional[1])
        if name in library.ITERATING:
            positional = self._iterable(name, positional)
        values = [self._for_host(value) for value in positional]
        named = {key: self._for_host(value, key == "key") for key, value in named.items()}
        constructor = library.CONSTRUCTORS.get(function) if isinstance(function, type) else None
        return (constructor or function)(*values, **named)

    def _answers(self, name: str, handle: Handle) -> bool:
        """Whether an object of the program gives the result of a builtin itself."""
        return name in ("str", "repr") or (name in library.ANSWERED and not self._values.has_plain(handle))

    def _iterable(self, name: str, positional: list[Any]) -> list[Any]:
        """Arguments of a builtin that iterates: objects of the program as what they hold, its functions callable."""
        called = 1 if name in ("map", "filter") else 0
        if name in ("max", "min") and len(positional) > 1:
            return positional
        functions = [self._for_host(value, as_function=True) for value in positional[:called]]
        iterated = map(self._values.fetched, positional[called:])
        return functions + [self._values.items(one) if isinstance(one, Handle) else one for one in iterated]

    def _for_host(self, value: Any, as_function: bool = False) -> Any:
        if isinstance(value, Function):
            return lambda *values: self._values.deep(self._call_own(value, list(values), {}))
        if as_function and isinstance(value, (Handle, GuestName)):
            target = self._values.given(value)
            return lambda *values: self._values.deep(self._values.call(target, list(values), {}, []))
        if isinstance(value, type):
            return library.CONSTRUCTORS.get(value, value)
        return library.finite(self._values.deep(value))
