"""Asserts: which the host evaluates, what they are worth, and that nothing a program answers decides them."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from fractions import Fraction
from typing import Any

import pytest

from headrace.data.task import Task
from headrace.errors import DataError
from headrace.judge.asserts import read_asserts
from headrace.judge.code import _holds, read_tests
from headrace.judge.plain import NotPlainError, decode, encode
from headrace.judge.session import RaisedError, Session, SessionEndedError
from programs import talking_to

PROGRAM = """
from fractions import Fraction
from decimal import Decimal
from collections import Counter, namedtuple
def add(a, b): return a + b
def sum(a, b): return 6
def same(x): return x
def yes(): return True
def none(): return None
def half(): return Fraction(1, 2)
def tenth(): return Decimal("0.1")
def count(text): return Counter(text)
def numbers(n):
    for k in range(n): yield k
def fail(kind="no"): raise ValueError(kind)
def apply(f, xs): return [f(x) for x in xs]
def reorder(xs): xs.sort()
def empty(xs): xs.clear(); return xs
Point = namedtuple("Point", "x y")
class Stack:
    def __init__(self): self.items = []; self.size = 0
    def push(self, x): self.items.append(x); self.size += 1
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
def poly(xs, x): return 0.0
"""

HUMANEVAL = """
METADATA = {'author': 'jt', 'dataset': 'test'}


def check(candidate):
    import math
    import random
    rng = random.Random(42)
    import copy
    for _ in range(5):
        coeffs = []
        for _ in range(2 * rng.randint(1, 4)):
            coeff = rng.randint(-10, 10)
            if coeff == 0:
                coeff = 1
            coeffs.append(coeff)
        solution = candidate(copy.deepcopy(coeffs))
        assert math.fabs(poly(coeffs, solution)) < 1e-4
    assert candidate([1]) == [1], "Error: " + str(candidate([1]))
    assert True, "This prints if this assert fails 1 (good for debugging!)"
"""

# test, whether PROGRAM passes it
FORMS: list[tuple[str, bool]] = [
    ("assert add(1, 2) == 3", True),
    ("assert add(1, 2) == 4", False),
    ("assert 3 == add(1, 2)", True),
    ("assert add(1, 2) != 4", True),
    ("assert add(1, 2) != 3", False),
    ("assert not add(0, 0)", True),
    ("assert not add(0, 1)", False),
    ("assert yes() is True", True),
    ("assert same(1) is True", False),
    ("assert none() is None", True),
    ("assert none() is not None", False),
    ("assert 2 in same([1, 2])", True),
    ("assert 3 not in same([1, 2])", True),
    ("assert same(3) in (1, 2)", False),
    ("import math\nassert math.isclose(add(0.1, 0.2), 0.3, rel_tol=1e-9)", True),
    ("import math as m\nassert m.isclose(add(0.1, 0.2), 0.4)", False),
    ("from math import isclose, pi\nassert isclose(same(3.14159265), pi, abs_tol=1e-6)", True),
    ("assert abs(add(1, 0.5) - 1.5) < 1e-6", True),
    ("assert abs(add(1, 0.5) - 1.6) < 1e-6", False),
    ("assert round(same(1.2345), 2) == 1.23", True),
    ("assert all(add(x, 1) == y for x, y in [(1, 2), (2, 3)])", True),
    ("assert all(add(x, 1) == y for x, y in [(1, 2), (2, 4)])", False),
    ("assert any(x > 2 for x in same([1, 2, 3]))", True),
    ("assert 1 < add(1, 1) < 3", True),
    ("assert 1 < add(1, 1) < 2", False),
    ("assert isinstance(same([1]), list) and len(same([1])) == 1", True),
    ("assert type(same(1)) == int", True),
    ("assert sorted(same([2, 1])) == [1, 2]", True),
    ("assert sorted(same(['bb', 'a']), key=len) == ['a', 'bb']", True),
    ("assert sorted(same([(1, 'b'), (0, 'c')]), key=lambda pair: pair[0])[0] == (0, 'c')", True),
    ("assert list(numbers(3)) == [0, 1, 2]", True),
    ("assert numbers(3) == [0, 1, 2]", False),
    ("assert [x for x in numbers(3)] == [0, 1, 2]", True),
    ("assert same('abc').startswith('ab') and same('abc').upper() == 'ABC'", True),
    ("assert same({1}).issubset({1, 2})", True),
    ("assert same([1, [2, (3, {4: {5}})]]) == [1, [2, (3, {4: {5}})]]", True),
    ("assert same((1, 2)) == [1, 2]", False),
    ("assert half() == 0.5 and half() + 1 == 1.5", True),
    ("from decimal import Decimal\nassert tenth() == Decimal('0.1')", True),
    ("from collections import Counter\nassert count('aab') == Counter('baa')", True),
    ("assert count('aab') == {'a': 2, 'b': 1}", True),
    ("assert same(b'ab') == b'ab' and same(2j) == 2j and same(None) is None", True),
    ("assert same(float('inf')) == float('inf')", True),
    ("assert same(float('nan')) == float('nan')", False),
    ("assert add('é\\ud800', '') == 'é\\ud800'", True),
    ("assert apply(lambda x: x * 2, [1, 2]) == [2, 4]", True),
    ("assert apply(str, [1, 2]) == ['1', '2']", True),
    ("xs = [3, 1, 2]\nreorder(xs)\nassert xs == [1, 2, 3]", True),
    ("xs = [3, 1, 2]\nassert empty(xs) == sorted(xs)", False),
    ("s = Stack()\ns.push(1)\ns.push(2)\nassert s.pop() == 2\nassert len(s) == 1 and s.size == 2", True),
    ("p = Point(1, 2)\nassert p.x == 1 and p == (1, 2)", True),
    ("assert Stack() == Stack()", False),
    ("assert isinstance(Stack(), Stack) and not isinstance(same(1), Stack)", True),
    ("assert isinstance(same(1), (int, float)) and not isinstance(same('a'), (int, float))", True),
    ("try:\n    fail()\n    assert False\nexcept ValueError:\n    pass", True),
    ("try:\n    yes()\n    assert False, 'no error'\nexcept ValueError:\n    pass", False),
    ("try:\n    fail()\nexcept KeyError:\n    pass\nassert yes()", False),
    ("assert fail()", False),
    ("assert missing() == 1", False),
    ("assert sum(10, 15) == 6", True),
    ("def twice(x):\n    return 2 * x\nassert add(2, 2) == twice(2)", True),
    ("for a, b in ((1, 2), (3, 4)):\n    assert add(a, b) == a + b", True),
    ("x = add(1, 2)\ny = add(x, x)\nassert y == 6 and x == 3", True),
    ("assert same(x := 3) == 3", False),
    (HUMANEVAL + "check(same)", True),
    ("def check(candidate):\n    assert candidate(1, 2) == 4\ncheck(add)", False),
]


def test_asserts_are_worth_what_python_says() -> None:
    with talking_to(PROGRAM) as session:
        for source, passes in FORMS:
            check = read_asserts(source)
            if "x := 3" in source:
                assert check.problem is not None
            else:
                assert check.problem is None, (source, check.problem)
                assert _holds(check, session) is passes, source


def test_what_is_expected_is_in_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    ask = Session.ask
    monkeypatch.setattr(Session, "ask", lambda self, *request: sent.append(json.dumps(request)) or ask(self, *request))
    tests = [
        "assert add(1, 2) == 7771",
        "assert 7772 == add(1, 2)",
        "assert abs(add(1, 2) - 7773) < 1e-9",
        "import math\nassert math.isclose(add(1, 2), 7774)",
        "assert all(add(x, x) == y for x, y in [(1, 7775), (2, 7776)])",
        "assert add(1, 2) in [7777]",
        "def check(candidate):\n    wanted = 7778\n    assert candidate(1, 2) == wanted\ncheck(add)",
    ]
    with talking_to(PROGRAM) as session:
        assert not any(_holds(read_asserts(test), session) for test in tests)
    assert len(sent) >= len(tests) and not [line for line in sent for n in range(7771, 7779) if hex(n) in line]


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("assert eval('f(1)') == 2", "uses eval"),
        ("assert callable(f)", "uses callable"),
        ("import numpy as np\nassert np.allclose(f(1), 2)", "imports numpy"),
        ("from os import *\nassert f(1) == 2", "imports"),
        ("import math\nassert math.nothing(f(1))", "uses math.nothing"),
        ("assert f(1).__eq__(2)", "uses .__eq__"),
        ("assert __builtins__ and f(1)", "uses __builtins__"),
        ("class A: pass\nassert f(A())", "contains ClassDef"),
        ("with open('x') as g:\n    assert f(1) == 2", "contains With"),
        ("while f(1):\n    assert f(1)", "contains While"),
        ("assert f'{f(1):>99999999}' == ''", "formats text"),
        ("f(1)", "asserts nothing"),
        ("x = 5", "asserts nothing"),
        ("assert 1 == 1", "calls nothing of the program"),
        ("def check(candidate):\n    assert candidate(1) == 2", "never calls check"),
        ("def g(x):\n    return x\nassert f(g) == 2", "other than by calling"),
        ("y = 3\nassert f(lambda x: x + y) == 2", "a lambda that uses names"),
        ("try:\n    assert f(1)\nfinally:\n    pass", "handles exceptions"),
        ("assert (lambda *a: f(1))() == 2", "starred"),
    ],
)
def test_a_test_that_would_have_to_run_beside_the_program_is_refused_with_a_remedy(source: str, why: str) -> None:
    task = Task("t7", instruction="?", metadata={"tests": ["assert f(1) == 2", source]})
    with pytest.raises(DataError, match="allow_forgeable = true") as raised:
        read_tests(task)
    assert 'task "t7"' in str(raised.value) and why in str(raised.value)
    checks, _ = read_tests(task, allow_forgeable=True)
    assert [check.problem is None for check in checks] == [True, False]


def test_tests_that_may_be_forged_come_last() -> None:
    tests = ["assert eval('1') == f(1)", "assert f(1) == 2"]
    checks, _ = read_tests(Task("t", instruction="?", metadata={"tests": tests}), allow_forgeable=True)
    assert [check.source for check in checks] == tests[::-1]


def test_a_check_function_is_called_with_the_entry_point() -> None:
    source = "def check(candidate):\n    assert candidate(1, 2) == 3"
    check = read_asserts(source, "add")
    assert check.problem is None
    with talking_to(PROGRAM) as session:
        assert _holds(check, session)
        assert not _holds(read_asserts(source, "same"), session)


# ---- costs -----------------------------------------------------------------------------------------------------------

BOMBS = [
    "assert 'x' * same(10 ** 9) == 'y'",
    "assert [0] * same(10 ** 9)",
    "assert 9 ** same(10 ** 9)",
    "assert 1 << same(10 ** 9)",
    "assert list(range(same(10 ** 9)))",
    "assert sorted(range(same(10 ** 9)))",
    "assert same(0.5) in range(10 ** 9)",
    "assert same('x') in range(10 ** 9)",
    "assert same(1 / 3) in range(same(10 ** 12))",
    "import random\nassert random.choices([1, 2], k=same(10 ** 9))",
    "assert '%0999999999d' % same(1)",
    "assert same('a' * 10 ** 5).replace('a', 'b' * 10 ** 5)",
    "assert ('b' * 10 ** 5).join(same(['a'] * 10 ** 5))",
    "import math\nassert math.factorial(same(10 ** 7))",
    "assert round(same(10), -same(10 ** 9)) == 1",
    "assert pow(same(3), 10 ** 9)",
    "assert all(same(i) == i for i in range(10 ** 8))",
    "assert len(set(same([n * (2 ** 61 - 1) for n in range(1, 9000)]))) == 1",
    "x = 2\nfor _ in range(100):\n    x = x * x\nassert same(1) == x",
]


def test_what_would_cost_much_of_little_is_not_passed_and_costs_little() -> None:
    with talking_to(PROGRAM) as session:
        for source in BOMBS:
            check = read_asserts(source)
            assert check.problem is None, (source, check.problem)
            start = time.thread_time()
            assert _holds(check, session) is False, source
            assert time.thread_time() - start < 1.0, source


# ---- answers that no honest program gives ----------------------------------------------------------------------------

ANSWERS: dict[str, bytes] = {
    "no JSON": b"\xff\x00{",
    "nested deeply": b"[" * 100_000,
    "nested deeply as a value": b'["v",' + b'{"l":[' * 20_000 + b"]}" * 20_000 + b"]",
    "a number without a tag": b'["v", 2]',
    "many digits": b'["v", ' + b"9" * 100_000 + b"]",
    "a ratio of 0 to 0": b'["v", {"r": ["0x0", "0x0"]}]',
    "a ratio of three": b'["v", {"r": ["0x4", "0x2", "0x1"]}]',
    "a ratio below 0": b'["v", {"r": ["-0x4", "-0x2"]}]',
    "a huge ratio": b'["v", {"r": ["' + b"f" * 90_000 + b'", "' + b"d" * 90_000 + b'"]}]',
    "an unknown tag": b'["v", {"z": 2}]',
    "two tags": b'["v", {"i": "0x2", "f": "0x2"}]',
    "a tag of a list": b'["v", {"i": ["0x2"]}]',
    "a set of lists": b'["v", {"s": [{"l": []}]}]',
    "keys that are lists": b'["v", {"d": [[{"l": []}, 1]]}]',
    "pairs of three": b'["v", {"d": [[1, 2, 3]]}]',
    "a set of one hash": b'["v", {"s": ['
    + b",".join(b'{"i": "%x"}' % (n * (2**61 - 1)) for n in range(1, 9000))
    + b"]}]",
    "nothing": b"",
    "null": b"null",
    "an object": b'{"v": 2}',
    "raised what is no list": b'["x", 5]',
    "raised nothing": b'["x"]',
    "two values": b'["v", {"i": "0x2"}, {"i": "0x2"}]',
}


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_that_no_honest_program_gives_passes_no_test_and_raises_nothing(name: str) -> None:
    (to_program, requests), (answers, from_program) = os.pipe(), os.pipe()

    def answer() -> None:
        with contextlib.suppress(OSError):
            body = len(ANSWERS[name]).to_bytes(4, "big") + ANSWERS[name]
            while body:
                body = body[os.write(from_program, body) :]

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        session = Session(requests, answers, 5.0, 1 << 18)
        for test in ("assert f(1) == 2", "assert f(1)", "assert f(1) != 3", "assert not f(1)"):
            start = time.thread_time()
            assert _holds(read_asserts(test), session) is False
            assert time.thread_time() - start < 0.5
            session.close()
    finally:
        for pipe in (to_program, requests, answers, from_program):
            os.close(pipe)
        thread.join()


def test_a_late_or_endless_answer_ends_the_session() -> None:
    for body, why in ((b"", "late"), (b"\xff\xff\xff\xff", "too long")):
        (to_program, requests), (answers, from_program) = os.pipe(), os.pipe()
        try:
            os.write(from_program, body)
            session = Session(requests, answers, 0.1, 1000)
            with pytest.raises(SessionEndedError, match=why):
                session.ask("get", {"e": "f"})
            with pytest.raises(SessionEndedError):
                session.ask("get", {"e": "f"})
        finally:
            for pipe in (to_program, requests, answers, from_program):
                os.close(pipe)


@pytest.mark.parametrize(
    "value",
    [None, True, "a", 3, -(2**70), 0.1, float("inf"), 2j, b"\x00", [1, (2, {"a": {3}})], {}, Fraction(1, 3)],
)
def test_values_come_back_as_they_went(value: Any) -> None:
    assert decode(json.loads(json.dumps(encode(value)))) == value


def test_what_is_not_plain_is_not_encoded() -> None:
    with pytest.raises(NotPlainError):
        encode(object())


def test_what_a_program_raises_is_known_by_its_classes() -> None:
    with talking_to(PROGRAM) as session, pytest.raises(RaisedError) as raised:
        session.ask("call", {"e": "fail"}, [], {})
    assert raised.value.names == ["ValueError", "Exception", "BaseException", "object"]
