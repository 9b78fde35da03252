"""What does a call over HTTP cost, compared with `Model.chat`? Do ten thousand sessions leak anything?

    python benchmarks/gateway.py [--sessions 500] [--calls 20] [--all 10000] [--json FILE] [--quick]

The model costs nothing, so all time is the gateway's. The clients run in another process and write HTTP by hand: a
client library would cost several times as much as the gateway. First, many sessions are open at the same time, and each
makes its calls one after another. Then sessions are opened and closed, with one call each. Prints a Markdown table.
`--quick` runs a tenth of everything.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from fakes import FakeEngine, char_chat
from headrace.config import GatewaySection
from headrace.engines.base import SamplingParams
from headrace.rollout.gateway import close_gateway, model_session
from headrace.rollout.gateway.server import running
from headrace.rollout.model_client import Model

SAMPLING = SamplingParams(temperature=1.0, max_tokens=64)
MESSAGES = [{"role": "user", "content": "Make 24 from 3, 5 and 9. Use each number once."}]
BODY = json.dumps({"model": "any", "messages": MESSAGES}).encode()
REPLY = "Let me try: 3*5+9=24 <answer>3*5+9</answer>"


def new_model(seed: int) -> Model:
    """An engine that answers immediately."""
    return Model(FakeEngine(lambda _: REPLY), char_chat(), SAMPLING, seed)


# ---- clients, in a process of their own ------------------------------------------------------------------------------


async def call(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str, close: bool = False) -> float:
    """Seconds of one call."""
    began = time.perf_counter()
    head = f"POST {path}/v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(BODY)}\r\n"
    head += "Content-Type: application/json\r\n"
    writer.write(f"{head}{'Connection: close' if close else 'X: y'}\r\n\r\n".encode() + BODY)
    answer = await reader.readuntil(b"\r\n\r\n")
    if not answer.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(answer.decode())
    length = next(line for line in answer.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    await reader.readexactly(int(length.partition(b":")[2]))
    return time.perf_counter() - began


async def talk(url: str, calls: int, close: bool = False) -> list[float]:
    """Calls one after another, over one connection."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    spent = [await call(reader, writer, parts.path, close) for _ in range(calls)]
    writer.close()
    return spent


async def clients() -> None:
    """Read orders, one JSON object per line: which sessions to call, how often, and with what concurrency."""
    for line in sys.stdin:
        order = json.loads(line)
        slots = asyncio.Semaphore(order["at_once"])

        async def one(url: str, order: dict[str, int] = order, slots: asyncio.Semaphore = slots) -> list[float]:
            async with slots:
                return await talk(url, order["calls"], bool(order["close"]))

        began = time.perf_counter()
        spent = await asyncio.gather(*map(one, order["urls"]))
        took = time.perf_counter() - began
        print(json.dumps({"s": took, "each_s": [s for some in spent for s in some]}), flush=True)


class Clients:
    """The other process."""

    async def __aenter__(self) -> Clients:
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, __file__, "--clients", stdin=pipe, stdout=pipe, limit=2**28
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        await self._process.wait()

    async def talk(self, urls: list[str], calls: int, at_once: int, close: bool = False) -> tuple[float, list[float]]:
        """Seconds that it took in sum, and that each call took."""
        assert self._process.stdin and self._process.stdout
        order = {"urls": urls, "calls": calls, "at_once": at_once, "close": close}
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        found = json.loads(await self._process.stdout.readline())
        return found["s"], found["each_s"]


# ---- metrics ---------------------------------------------------------------------------------------------------------


async def direct(sessions: int, calls: int) -> float:
    """Milliseconds of a call without the gateway."""

    async def one(seed: int) -> None:
        model = new_model(seed)
        for _ in range(calls):
            await model.chat(MESSAGES)

    began = time.perf_counter()
    await asyncio.gather(*map(one, range(sessions)))
    return 1000 * (time.perf_counter() - began) / (sessions * calls)


async def held(clients: Clients, sessions: int, calls: int) -> dict[str, float]:
    """Many open sessions: all of them busy, and a single one."""
    async with AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(model_session(new_model(seed))) for seed in range(sessions)]
        urls = [session.root_url for session in opened]
        _, alone = await clients.talk(urls[:1], 10 * calls, 1)
        began = time.process_time()
        took, each = await clients.talk(urls, calls, sessions)
        busy = time.process_time() - began
    count = sessions * calls
    return {
        "open sessions": sessions,
        "calls per second": count / took,
        "call, ms (one client)": 1000 * median(alone),
        "call, ms (all busy, median)": 1000 * median(each),
        "call, ms (all busy, 99th percentile)": 1000 * sorted(each)[int(0.99 * len(each))],
        "CPU per call, ms": 1000 * busy / count,
    }


async def opened_and_closed(clients: Clients, sessions: int, at_once: int) -> dict[str, float]:
    """What many sessions leave behind."""
    gateway = await running(GatewaySection())
    gc.collect()
    before = len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd")), _resident_mb()
    began = time.perf_counter()
    for first in range(0, sessions, at_once):
        async with AsyncExitStack() as stack:
            some = range(first, min(first + at_once, sessions))
            opened = [await stack.enter_async_context(model_session(new_model(seed))) for seed in some]
            await clients.talk([session.root_url for session in opened], 1, 64, close=True)
    took = time.perf_counter() - began
    await asyncio.sleep(0.3)
    gc.collect()
    after = len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd")), _resident_mb()
    return {
        "sessions opened and closed": sessions,
        "sessions per second": sessions / took,
        "sessions left": gateway.sessions,
        "tasks left": after[0] - before[0],
        "file descriptors left": after[1] - before[1],
        "resident memory growth, MB": after[2] - before[2],
    }


def _resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def measure(sessions: int, calls: int, in_sum: int) -> dict[str, float]:
    """All metrics."""
    metrics = {"call of Model.chat, ms": await direct(sessions, calls)}
    async with Clients() as clients:
        async with model_session(new_model(0)) as session:
            await clients.talk([session.root_url], 50, 1)  # warm
        metrics |= await held(clients, sessions, calls)
        metrics["overhead per call, ms"] = metrics["CPU per call, ms"] - metrics["call of Model.chat, ms"]
        metrics |= await opened_and_closed(clients, in_sum, sessions)
    await close_gateway()
    return metrics


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=500)
    parser.add_argument("--calls", type=int, default=20, help="calls per open session")
    parser.add_argument("--all", type=int, default=10_000, help="sessions to open and close")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--clients", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.clients:
        asyncio.run(clients())
        return
    share = 10 if args.quick else 1
    metrics = asyncio.run(measure(args.sessions // share, args.calls, args.all // share))
    print("| metric | value |\n| --- | ---: |")
    for name, value in metrics.items():
        print(f"| {name} | {value:,.2f} |" if isinstance(value, float) else f"| {name} | {value:,} |")
    if args.json:
        args.json.write_text(json.dumps(metrics, indent=2) + "\n")


if __name__ == "__main__":
    main()
