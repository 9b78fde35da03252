"""Programs that forge the result of a test, and the forms of tests that they are tried on."""

from __future__ import annotations

# every form of test that forgers are tried on; 2 is right for all that compare with a number
FORMS = [
    "assert f(1) == 2",
    "assert 2 == f(1)",
    "assert f(1) != 7",
    "assert 2 in [f(1)]",
    "assert 2 in f(1)",
    "assert f(1) not in [7]",
    "assert f(1) is True",
    "assert f(1) < 3 and f(1) > 1",
    "assert abs(f(1) - 1.5) < 1e-6",
    "import math\nassert math.isclose(f(1), 2.0, rel_tol=1e-9)",
    "assert all(f(x) == y for x, y in [(1, 2), (2, 3)])",
    "assert any(f(x) == 2 for x in range(3))",
    "assert isinstance(f(1), int) and f(1) == 2",
    "assert f(1) == 2.0",
    "assert f(1) == [2]",
    "assert sorted(f(1)) == [1, 2]",
    "assert len(f(1)) == 2",
    "assert f(1).startswith('ab')",
    "assert f(1).issubset({1, 2})",
    "assert set(f(1)) == {2}",
    "assert not f(1)",
    "def check(candidate):\n    assert candidate(1) == 2\n    assert 2 == candidate(1)\ncheck(f)",
    "r = f(1)\nassert r.union({2, 5}) == {2, 5}",
    "r = f(1)\nu = r.union\nassert u({2, 5}) == {2, 5}",
    "r = f(1)\nassert r.get('k', 7) == 7",
    "assert f(1)[2] == 2",
    "r = f(1)\nassert r[2] == 2 and r[0:2] == [0, 1]",
    "assert f(1) + 3 == 3 and -f(1) == -f(1)",
    "a, b = f(1)\nassert a == 1 and b == 2",
    "assert [x + 1 for x in f(1)] == [2, 3]",
    "assert round(f(1), 2) == 2 and max(f(1), 2) == 2",
]

LENIENT = """
class Yes{base}:
    def __eq__(self, other): return True
    def __ne__(self, other): return True
    __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __eq__
    __hash__ = object.__hash__
    def __sub__(self, other): return 0.0
    __rsub__ = __add__ = __radd__ = __mod__ = __sub__
    def __float__(self): return 2.0
    def __abs__(self): return 0.0
    def startswith(self, *a): return True
    issubset = startswith
    def as_integer_ratio(self): return (0, 0)
def f(x): return Yes({value})
"""

ECHO = """
class Echo:
    def __getattr__(self, name): return lambda *given: given[-1] if given else self
    def __getitem__(self, key): return [0, 1] if isinstance(key, slice) else key
    def __add__(self, other): return other
    __radd__ = __sub__ = __rsub__ = __mul__ = __add__
    def __neg__(self): return self
    def __iter__(self): return iter([Echo(), Echo()])
    def __round__(self, digits): return digits
    def __eq__(self, other): return True
    __gt__ = __lt__ = __contains__ = __eq__
def f(x): return Echo()
"""

FORGERS: dict[str, str] = {
    "gives back what it is given": ECHO,
    "a ratio of 0 to 0": "class Zero:\n    def as_integer_ratio(self): return (0, 0)\ndef f(x): return Zero()",
    "a ratio of 0 to 0 inside": (
        "class Zero:\n    def as_integer_ratio(self): return (0, 0)\ndef f(x): return [Zero(), (Zero(),), {1: Zero()}]"
    ),
    "a ratio below 0": "class Odd:\n    def as_integer_ratio(self): return (-2, -1)\ndef f(x): return Odd()",
    "equal to everything": LENIENT.format(base="", value=""),
    "an int that is equal to everything": LENIENT.format(base="(int)", value="7"),
    "text that starts with everything": LENIENT.format(base="(str)", value="'zz'"),
    "patched builtins": (
        "import builtins, math, json, operator\n"
        "yes = lambda *a, **k: True\n"
        "for name in 'all any isinstance abs len sorted set hash'.split(): setattr(builtins, name, yes)\n"
        "builtins.AssertionError = BaseException\nmath.isclose = yes\noperator.eq = yes\n"
        "def f(x): raise SystemExit(0)"
    ),
    "a patched encoder": (
        "import json, os\nreal = json.dumps\n"
        "json.dumps = lambda value, **k: real(['v', True])\ndef f(x): raise ValueError"
    ),
    "reads frames for what is expected": (
        "import sys, gc, re\ndef f(x):\n    frame, said = sys._getframe(), []\n    while frame:\n"
        "        said += [str(value) for value in frame.f_locals.values()]\n        frame = frame.f_back\n"
        "    said += [str(one)[:300] for one in gc.get_objects() if isinstance(one, (str, list))]\n"
        "    found = re.search(r'assert .*? == (\\d)', ' '.join(said))\n"
        "    return int(found.group(1)) if found else 'nothing found'"
    ),
    "says yes on every pipe": (
        "import os, json\nbody = json.dumps(['v', True]).encode()\nbody = len(body).to_bytes(4, 'big') + body\n"
        "for fd in range(3, 64):\n    try: os.write(fd, body * 50)\n    except OSError: pass\n"
        "def f(x): return 'zz'"
    ),
    "ends with status 0": "import os\nos._exit(0)",
    "raises in every method": (
        "class Bad(dict):\n    def __getattribute__(self, name): raise MemoryError\n"
        "    def __iter__(self): raise KeyboardInterrupt\ndef f(x): return Bad()"
    ),
}
# A forger gains no more than the plain value that it gives would: these differ from 7, have a length of 2, or are True.
HONEST = {
    "text that starts with everything": 3,
    "reads frames for what is expected": 2,
    "says yes on every pipe": 3,
}
