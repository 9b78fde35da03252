"""What a call of the program returned: plain data before the test uses it, or an object that stays in the program."""

from __future__ import annotations

import pytest

from headrace.judge.asserts import read_asserts
from headrace.judge.code import _holds
from programs import talking_to

RETURNING = """
from collections import Counter, namedtuple
Point = namedtuple("Point", "x y")
def two_five(): return {2, 5}
def numbers(): return [3, 1, 2]
def text(): return "ab"
def table(): return {"k": 7}
def two(): return 2
def count(word): return Counter(word)
def point(): return Point(1, 2)
def generated():
    yield 3
    yield 1
def adder(n): return lambda x: n + x
def apply(f, xs): return [f(x) for x in xs]
def total(xs): return sum(xs)
def change(xs): xs.append(9); return xs
class Node:
    def __init__(self, value, after=None): self.value, self.after, self.items = value, after, [value]
    def __str__(self): return f"<{self.value}>"
def chain(n): return Node(n, Node(n + 1))
def chains(n): return [chain(k) for k in range(n)]
def length(node): return 0 if node is None else 1 + length(node.after)
class UnionFind:
    def __init__(self, n): self.parent = list(range(n))
    def find(self, x): return x if self.parent[x] == x else self.find(self.parent[x])
    def union(self, a, b): self.parent[self.find(a)] = self.find(b)
class Grid:
    def __init__(self, rows): self.rows = rows
    def __getitem__(self, key): return self.rows[key]
    def __setitem__(self, key, value): self.rows[key] = value
    def __len__(self): return len(self.rows)
    def index(self, row): return self.rows.index(row)
class Numbers(list):
    def double(self): self[:] = [2 * x for x in self]
history = []
def remember(x): history.append(x); return x
"""

# Objects that agree with everything, and give back what they are given.
ECHOING = """
class Echo:
    def __init__(self, *given): pass
    def __getattr__(self, name): return self
    def __call__(self, *given, **named): return given[-1] if given else self
    def __getitem__(self, key): return key
    def __iter__(self): return iter([Echo(), Echo()])
    def __eq__(self, other): return True
    def __ne__(self, other): return True
    __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __bool__ = __eq__
    def __hash__(self): return 1
    def __add__(self, other): return other
    __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __or__ = __ror__ = __and__ = __rand__ = __add__
    def __neg__(self): return self
    __abs__ = __pos__ = __invert__ = __neg__
    def __round__(self, digits=0): return digits
    def count(self, one): return 1
    def find(self, text): return 0
    def union(self, other): return other
    def issubset(self, other): return True
    def isdigit(self): return True
    startswith = endswith = issuperset = isdisjoint = issubset
two_five = numbers = text = table = two = generated = count = point = chain = chains = lambda *given: Echo()
adder = lambda n: Echo()
total = change = length = remember = lambda x: Echo()
apply = lambda f, xs: Echo()
"""

# Each is passed by RETURNING. None is passed by ECHOING.
PLAIN_USES = [
    "assert two_five().union({2, 5}) == {2, 5}",
    "r = two_five()\nassert r.union({2, 5}) == {2, 5}",
    "r = two_five()\nu = r.union\nassert u({2}) == {2, 5}",
    "u = two_five().union\nassert u({2, 5}) == {2, 5}",
    "r = two_five()\nassert r.issubset({2, 5, 7}) and not r.isdisjoint({2})",
    "r = two_five()\nassert r.intersection({2}) == {2} and 2 in r and 3 not in r",
    "r = two_five()\nr.add(7)\nassert r == {2, 5, 7} and r.union({2}) == {2, 5, 7}",
    "r = numbers()\nassert r.count(3) == 1 and r.index(3) == 0",
    "assert numbers()[2] == 2",
    "r = numbers()\nassert r[2] == 2 and r[1:] == [1, 2] and r[-1] == 2",
    "r = numbers()\nr[0] = 4\nassert r[0] == 4 and r == [4, 1, 2]",
    "r = numbers()\nr.sort()\nassert r == [1, 2, 3]",
    "assert numbers() + [4] == [3, 1, 2, 4] and [4] + numbers() == [4, 3, 1, 2]",
    "r = numbers()\nr += [4]\nassert r == [3, 1, 2, 4]",
    "assert two() + 1 == 3 and 1 + two() == 3 and -two() == -2 and two() * 2 == 4 and two() % 2 == 0",
    "assert abs(two() - 1.5) < 1 and round(two(), 1) == 2 and two() | 1 == 3",
    "x = two()\nassert 1 < x < 3 and x != 3 and not x == 3 and x",
    "assert len(numbers()) == 3",
    "assert [x for x in numbers()] == [3, 1, 2] and sum(x for x in numbers()) == 6",
    "total_ = 0\nfor x in numbers():\n    total_ += x\nassert total_ == 6",
    "a, b, c = numbers()\nassert a == 3 and c == 2",
    "assert sorted(numbers()) == [1, 2, 3] and max(numbers()) == 3 and set(numbers()) == {1, 2, 3}",
    "assert sorted(numbers(), key=lambda x: -x) == [3, 2, 1] and list(map(str, numbers())) == ['3', '1', '2']",
    "assert all(x > 0 for x in numbers()) and any(x == 3 for x in numbers())",
    "assert total(numbers()) == 6",
    "assert [*numbers(), 0] == [3, 1, 2, 0] and {**table(), 'a': 1} == {'k': 7, 'a': 1}",
    "assert [numbers()] == [[3, 1, 2]] and (two(), {'a': two()}) == (2, {'a': 2})",
    "assert (two() if two() > 1 else 0) == 2 and (two() or 0) == 2 and not not two()",
    "assert f'{two()}' == '2'",
    "d = table()\nassert d.get('k', 1) == 7 and d.get('z', 7) == 7 and d['k'] == 7 and list(d.items()) == [('k', 7)]",
    "assert text().startswith('a') and text().upper() == 'AB' and text().zfill(3) == '0ab' and not text().isdigit()",
    "r = text()\nassert r.replace('a', 'b') == 'bb' and 'a' in r and r.find('a') == 0 and r * 2 == 'abab'",
    "assert isinstance(two(), int) and type(numbers()) is list",
    "import math\nassert math.isclose(two(), 2.0)",
    "xs = numbers()\nchange(xs)\nassert xs == [3, 1, 2, 9]",
    "xs = [1]\nys = xs\nchange(xs)\nassert ys == [1, 9]",
    "def check(candidate):\n    r = candidate()\n    assert r.union({2, 5}) == {2, 5}\ncheck(two_five)",
    "assert two().real == 2 and two().numerator == 2",
    "c = count('aab')\nassert c == {'a': 2, 'b': 1} and c['a'] == 2 and c.get('z', 7) == 7",
    "c = count('aab')\nassert c.most_common(1) == [('a', 2)] and c.get('z', 7) == 7",
    "p = point()\nassert p == (1, 2) and p[0] == 1 and p.x == 1",
    "assert list(generated()) == [3, 1] and sorted(generated()) == [1, 3] and [x for x in generated()] == [3, 1]",
    "assert apply(lambda x: x * 2, [1, 2]) == [2, 4]",
    "assert list(map(two_five, [])) == [] and list(map(total, [[1], [2]])) == [1, 2]",
]


def test_what_a_call_returned_is_plain_data_before_the_test_uses_it() -> None:
    with talking_to(RETURNING) as session:
        for source in PLAIN_USES:
            check = read_asserts(source)
            assert check.problem is None, (source, check.problem)
            assert _holds(check, session), source
    with talking_to(ECHOING) as session:
        for source in PLAIN_USES:
            assert not _holds(read_asserts(source), session), source


# test, whether RETURNING passes it: objects stay in the program, and what they answer is compared here
OBJECT_USES: list[tuple[str, bool]] = [
    ("s = UnionFind(3)\ns.union(0, 1)\nassert s.find(0) == s.find(1)\nassert s.find(2) == 2", True),
    ("s = UnionFind(3)\ns.union(0, 1)\nassert s.find(0) == 0", False),
    (
        "g = Grid([[1, 2]])\nassert isinstance(g, Grid)\nassert g[0][1] == 2 and len(g) == 1 and g.index([1, 2]) == 0",
        True,
    ),
    ("g = Grid([[1, 2]])\ng[0] = 5\nassert g.rows == [5]", True),
    ("def check(C):\n    g = C([[1]])\n    assert isinstance(g, Grid)\n    assert g[0] == [1]\ncheck(Grid)", True),
    ("n = Numbers([1, 2])\nn.double()\nassert n == [2, 4] and list(n) == [2, 4]", True),
    ("c = chain(1)\nassert c.value == 1 and c.after.value == 2 and c.after.after is None and c.items == [1]", True),
    ("c = chain(1)\nassert c.after is not None and c.after is c.after and c is not None", True),
    ("c = chain(1)\nassert c.after is None", False),
    ("c = chain(1)\nc.after.after = Node(5)\nassert length(c) == 3 and str(c) == '<1>'", True),
    ("cs = chains(3)\nassert len(cs) == 3 and cs[1].value == 1 and [c.value for c in cs] == [0, 1, 2]", True),
    ("assert length(chain(1)) == 2 and length(chains(2)[1]) == 2", True),
    ("add = adder(5)\nassert add(3) == 8 and adder(1)(2) == 3", True),
    ("g = generated()\nassert next(g) == 3 and next(g) == 1", True),
    ("p = point()\nassert apply(lambda q: q.x, [p]) == [1]", True),
    ("remember(4)\nassert history == [4] and history[0] == 4\nhistory.clear()\nassert remember(5) == 5", True),
    ("assert history == [5]", True),
    ("assert chain(1) == chain(1)", False),
    ("assert chain(1)", False),
    ("assert chain(1) != 7", False),
    ("assert 7 not in chains(1)", False),
    ("assert chains(1).count(7) == 0", False),
    ("assert chain(1)[0] == 0", False),
    ("assert two() in chains(1)", False),
]


def test_objects_stay_in_the_program_and_their_answers_are_compared_on_the_host() -> None:
    with talking_to(RETURNING) as session:
        for source, passes in OBJECT_USES:
            check = read_asserts(source)
            assert check.problem is None, (source, check.problem)
            assert _holds(check, session) is passes, source


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("r = Diff([1], [2])\nassert r.union({2}) == {2}", "assert isinstance(r, Diff)"),
        ("m = Matrix([[1]])\nassert m[0] == [1]", "assert isinstance(m, Matrix)"),
        ("def check(C):\n    m = C(1)\n    assert m.get('k', 7) == 7\ncheck(Table)", "assert isinstance(m, Table)"),
        ("assert f(1).format(3) == '3'", "it calls .format"),
        ("assert f(1).translate({97: 98}) == 'b'", "it calls .translate"),
    ],
)
def test_a_test_that_shows_neither_an_object_nor_plain_data_is_refused(source: str, problem: str) -> None:
    assert problem in str(read_asserts(source).problem)


@pytest.mark.parametrize("compared", ["a == b", "a + b == 3", "(a + b).x == 3", "a in b", "a < b"])
def test_operators_of_the_programs_objects_are_refused_at_load(compared: str) -> None:
    test = f"a = Vector(1)\nb = Vector(2)\nassert a.x == 1\nassert b.x == 2\nassert {compared}"
    assert "the operators between them are the program's" in (read_asserts(test).problem or "")


def test_whether_an_object_is_there_may_be_asked() -> None:
    assert read_asserts("a = Vector(1)\nassert a.x == 1\nassert a is not None").problem is None
