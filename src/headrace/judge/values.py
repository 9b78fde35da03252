"""The values of a test, and how they cross between the host and the program.

A value of the test is plain data on the host, or something of the program: a name, or an object that stays there (a
Handle). Before the host computes with a value, its plain form is taken. What has none fails the test.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from types import GeneratorType
from typing import Any

from headrace.judge import library
from headrace.judge.plain import Handle, NotPlainError, encode
from headrace.judge.session import Session


@dataclass(frozen=True, slots=True)
class GuestName:
    """A name of the program."""

    name: str


@dataclass(frozen=True, slots=True)
class Module:
    """What a test imported."""

    name: str
    inside: dict[str, Any]


class Scope(dict[str, Any]):
    """Names of the test, with those around it."""

    def __init__(self, outer: Scope | None = None) -> None:
        super().__init__()
        self.outer = outer

    def find(self, name: str) -> Any:
        """The value of a name; KeyError if the test has none."""
        return self[name] if name in self or self.outer is None else self.outer.find(name)


@dataclass(frozen=True, slots=True)
class Function:
    """A function or lambda of the test."""

    node: ast.FunctionDef | ast.Lambda
    scope: Scope


class Values:
    """Takes plain forms, and writes values down for the program."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def fetched(self, value: Any) -> Any:
        """The value itself where it is given by a name of the program."""
        return self._session.ask("get", {"e": value.name}) if isinstance(value, GuestName) else value

    def plain(self, value: Any) -> Any:
        """A host value; what it contains may still be in the program."""
        value = self.fetched(value)
        return self._session.plain(value) if isinstance(value, Handle) else value

    def deep(self, value: Any) -> Any:
        """A host value with nothing of the program in it."""
        if type(value) in (list, tuple, set, frozenset):
            return type(value)(self.deep(item) for item in value)
        if type(value) is dict:
            return {self.deep(key): self.deep(item) for key, item in value.items()}
        if isinstance(value, GeneratorType):
            return (self.deep(item) for item in value)
        if isinstance(value, (Handle, GuestName)):
            return self.deep(self.plain(value))
        return value

    def has_plain(self, handle: Handle) -> bool:
        """Whether an object of the program has a plain form."""
        try:
            self._session.plain(handle)
        except NotPlainError:
            return False
        return True

    def items(self, value: Any) -> list[Any]:
        """What iterating over a value gives; of an object of the program, what `list` of it gives there."""
        value = self.fetched(value)
        if isinstance(value, Handle) and not self.has_plain(value):
            value = self._session.ask("call", {"b": "list"}, [self.given(value)], {})
        return library.items_of(self.plain(value))

    def are_same(self, left: Any, right: Any) -> bool:
        """`left is right`, where one of them may be an object that has no plain form."""
        left, right = self.fetched(left), self.fetched(right)
        if isinstance(left, Handle) and isinstance(right, Handle):
            return left.number is not None and left.number == right.number
        for one in (left, right):
            if isinstance(one, Handle) and not self.has_plain(one):
                return False  # the other one is plain data
        return library.COMPARE[ast.Is](self.deep(left), self.deep(right))

    def given(self, value: Any) -> Any:
        """A value as the program gets it."""
        if isinstance(value, Handle):
            if value.number is None:
                raise NotPlainError("a value that could not be read")
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
            return {"l" if type(value) is list else "t": [self.given(item) for item in value]}
        if type(value) is dict:
            return {"d": [[self.given(key), self.given(item)] for key, item in value.items()]}
        for name, builtin in library.BUILTINS.items():
            if builtin is value:
                return {"b": name}
        return encode(value)

    def call(self, target: Any, positional: list[Any], named: dict[str, Any], lent: list[Any]) -> Any:
        """Call a function of the program. Containers that are `lent` change here as the program changes its copies."""
        kept = {
            index: self._session.ask("keep", self.given(value))
            for index, value in enumerate(positional)
            if type(value) in (list, dict, set) and any(value is one for one in lent)
        }
        given = [self.given(kept.get(index, value)) for index, value in enumerate(positional)]
        result = self._session.ask("call", target, given, {key: self.given(value) for key, value in named.items()})
        for index, handle in kept.items():
            _refill(positional[index], self.plain(self._session.ask("get", self.given(handle))))
        return result


def _refill(container: Any, fresh: Any) -> None:
    if type(fresh) is not type(container):
        raise NotPlainError("a container came back as another type")
    container.clear()
    container.extend(fresh) if type(container) is list else container.update(fresh)
