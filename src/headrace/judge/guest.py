"""What runs in the sandbox beside a solution (`GUEST`).

It answers requests (see `session.py`) with plain values. The solution shares its interpreter and can make it answer
anything. So the host trusts no answer: it reads each one as untrusted data.
"""

from __future__ import annotations

# Plain values become JSON with tags; ints as hexadecimal text, which has no limit of length and is read in linear time.
# What is not exactly of a builtin type stays here, and crosses as a number with its plain form, if it has one.
GUEST = r"""
import builtins, json, os, sys
def main():
    dumps, loads, write, read, hexed, isa = json.dumps, json.loads, os.write, os.read, hex, isinstance
    def plain(value, depth=0):
        if depth > 99: raise TypeError("too deep")
        kind = type(value)
        if value is None or kind is bool or kind is str: return value
        if isa(value, int): return {"i": hexed(int(value))}
        if isa(value, float): return {"f": float.hex(float(value))}
        if isa(value, str): return str.__str__(value)
        if isa(value, (bytes, bytearray)): return {"y": value.hex()}
        if isa(value, complex): return {"c": [float.hex(value.real), float.hex(value.imag)]}
        deeper = depth + 1
        if isa(value, list): return {"l": [plain(item, deeper) for item in value]}
        if isa(value, tuple): return {"t": [plain(item, deeper) for item in value]}
        if isa(value, (set, frozenset)): return {"s": [plain(item, deeper) for item in value]}
        if isa(value, dict): return {"d": [[plain(key, deeper), plain(item, deeper)] for key, item in value.items()]}
        if not isa(value, type) and hasattr(value, "as_integer_ratio"):
            return {"r": [hexed(int(part)) for part in value.as_integer_ratio()]}
        raise TypeError(kind.__name__)
    def kept(value):
        number = numbers.setdefault(id(value), len(handles))
        if number == len(handles): handles.append(value)
        return number
    def crossing(value, depth=0):
        if depth > 99: raise TypeError("too deep")
        kind, deeper = type(value), depth + 1
        if value is None or kind in (bool, str, int, float, bytes, complex): return plain(value)
        if kind is list: return {"l": [crossing(item, deeper) for item in value]}
        if kind is tuple: return {"t": [crossing(item, deeper) for item in value]}
        try:
            if kind is set: return plain(value, depth)
            if kind is dict: return {"d": [[plain(key, deeper), crossing(item, deeper)] for key, item in value.items()]}
            return {"h": [kept(value), plain(value, depth)]}
        except Exception: return {"h": [kept(value)]}
    def given(value):
        if type(value) is not dict: return value
        ((tag, inner),) = value.items()
        if tag == "i": return int(inner, 16)
        if tag == "f": return float.fromhex(inner)
        if tag == "y": return bytes.fromhex(inner)
        if tag == "c": return complex(*[float.fromhex(part) for part in inner])
        if tag == "l": return [given(item) for item in inner]
        if tag == "t": return tuple([given(item) for item in inner])
        if tag == "s": return set([given(item) for item in inner])
        if tag == "d": return {given(key): given(item) for key, item in inner}
        if tag == "h": return handles[inner]
        if tag == "e": return eval(inner, names)
        if tag == "S": return slice(*[given(part) for part in inner])
        if tag == "b": return getattr(builtins, inner)
        if tag == "a": return getattr(given(inner[0]), inner[1])
        if tag == "r":
            import fractions
            return fractions.Fraction(*[int(part, 16) for part in inner])
    def answered(request):
        what, rest = request[0], request[1:]
        if what == "call":
            return given(rest[0])(*[given(one) for one in rest[1]], **{key: given(one) for key, one in rest[2].items()})
        if what in ("get", "keep"): return given(rest[0])
        if what == "item": return given(rest[0])[given(rest[1])]
        if what == "setitem": given(rest[0])[given(rest[1])] = given(rest[2])
        if what == "setattr": setattr(given(rest[0]), rest[1], given(rest[2]))
        if what == "run": exec(compile(rest[0], "test.py", "exec"), names); return True
    def exactly(count):
        found = b""
        while len(found) < count:
            more = read(requests, min(count - len(found), 65536))
            if not more: os._exit(0)
            found += more
        return found
    with os.fdopen(int(sys.argv[1]), "rb") as file: payload = json.load(file)
    os.dup2(os.open("/dev/null", os.O_WRONLY), 2)
    sys.argv = ["solution.py"]
    code, pipes = payload["code"], payload.get("pipes")
    del payload
    if pipes is None:
        import types
        module = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(code, "solution.py", "exec"), module.__dict__)
        return
    requests, answers = pipes
    names, handles, numbers = {"__name__": "solution"}, [], {}
    exec(compile(code, "solution.py", "exec"), names)
    while True:
        request = loads(exactly(int.from_bytes(exactly(4), "big")))
        try:
            value = answered(request)
            try: answer = ["v", {"h": [kept(value)]} if request[0] == "keep" else crossing(value)]
            except Exception: answer = ["v", {"h": [kept(value)]}]
            del value
        except BaseException as error:
            answer = ["x", [kind.__name__ for kind in type(error).__mro__]]
        body = dumps(answer).encode()
        body = len(body).to_bytes(4, "big") + body
        while body: body = body[write(answers, body):]
main()
"""
