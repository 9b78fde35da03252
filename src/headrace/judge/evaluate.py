"""Runs the statements of a test on the host: a small interpreter of Python's syntax tree. See `expressions.py`."""

from __future__ import annotations

import ast
from typing import Any

from headrace.judge import library
from headrace.judge.expressions import Expressions, FailedError, ReturnError
from headrace.judge.session import RaisedError, Session
from headrace.judge.values import Function, Module, Scope


class _BreakError(Exception):
    pass


class _ContinueError(Exception):
    pass


class Evaluator(Expressions):
    """Runs one test."""

    def __init__(self, session: Session, guest_names: frozenset[str], objects: frozenset[str]) -> None:
        super().__init__(session, guest_names, objects)
        self._modules = library.modules()

    def run(self, tree: ast.Module) -> None:
        """All statements. FailedError or any other exception if the test is not passed."""
        self._block(tree.body, Scope())

    def _block(self, body: list[ast.stmt], scope: Scope) -> None:
        for statement in body:
            self._count()
            getattr(self, f"_do_{type(statement).__name__}")(statement, scope)

    def _do_Assert(self, node: ast.Assert, scope: Scope) -> None:
        if not self._values.plain(self._value(node.test, scope)):
            raise FailedError(f"line {node.lineno}")

    def _do_Expr(self, node: ast.Expr, scope: Scope) -> None:
        if isinstance(node.value, ast.Call):
            self._count()
            self._call(node.value, scope, used=False)
        else:
            self._value(node.value, scope)

    def _do_Pass(self, node: ast.Pass, scope: Scope) -> None:
        pass

    def _do_Assign(self, node: ast.Assign, scope: Scope) -> None:
        value = self._value(node.value, scope)
        for target in node.targets:
            self._bind(target, value, scope)

    def _do_AnnAssign(self, node: ast.AnnAssign, scope: Scope) -> None:
        if node.value is not None:
            self._bind(node.target, self._value(node.value, scope), scope)

    def _do_AugAssign(self, node: ast.AugAssign, scope: Scope) -> None:
        target: Any = ast.copy_location(ast.Name(node.target.id, ast.Load()), node)  # type: ignore[union-attr]
        left, right = self._values.plain(self._value(target, scope)), self._values.plain(self._value(node.value, scope))
        self._bind(node.target, library.BINARY[type(node.op)](left, right), scope)

    def _do_For(self, node: ast.For, scope: Scope) -> None:
        for item in self._values.items(self._value(node.iter, scope)):
            self._bind(node.target, item, scope)
            try:
                self._block(node.body, scope)
            except _BreakError:
                return
            except _ContinueError:
                continue
        self._block(node.orelse, scope)

    def _do_If(self, node: ast.If, scope: Scope) -> None:
        self._block(node.body if self._values.plain(self._value(node.test, scope)) else node.orelse, scope)

    def _do_Break(self, node: ast.Break, scope: Scope) -> None:
        raise _BreakError

    def _do_Continue(self, node: ast.Continue, scope: Scope) -> None:
        raise _ContinueError

    def _do_FunctionDef(self, node: ast.FunctionDef, scope: Scope) -> None:
        scope[node.name] = Function(node, scope)

    def _do_Return(self, node: ast.Return, scope: Scope) -> None:
        raise ReturnError(None if node.value is None else self._value(node.value, scope))

    def _do_Import(self, node: ast.Import, scope: Scope) -> None:
        for alias in node.names:
            scope[alias.asname or alias.name] = Module(alias.name, self._modules[alias.name])

    def _do_ImportFrom(self, node: ast.ImportFrom, scope: Scope) -> None:
        inside = self._modules[node.module or ""]
        for alias in node.names:
            scope[alias.asname or alias.name] = inside[alias.name]

    def _do_Try(self, node: ast.Try, scope: Scope) -> None:
        try:
            self._block(node.body, scope)
        except (RaisedError, FailedError) as error:
            names = error.names if isinstance(error, RaisedError) else ["AssertionError", "Exception", "BaseException"]
            for handler in node.handlers:
                if handler.type is None or any(name in names for name in _exception_names(handler.type)):
                    self._block(handler.body, scope)
                    break
            else:
                raise
        else:
            self._block(node.orelse, scope)


def _exception_names(node: ast.expr) -> list[str]:
    nodes = node.elts if isinstance(node, ast.Tuple) else [node]
    return [name.id for name in nodes if isinstance(name, ast.Name)]
