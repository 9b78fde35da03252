"""Users' synchronous functions run in threads of their own, so that none blocks the event loop."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

_MOST = 256  # a thread that waits for a slow tool costs little; too few would make episodes wait for each other
_pool: ThreadPoolExecutor | None = None


async def call_anyhow(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """What a function returns: a coroutine function is awaited, any other runs in a thread."""
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        return await function(*arguments, **named)
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(_MOST, thread_name_prefix="headrace-user")
    context = contextvars.copy_context()
    call = functools.partial(context.run, function, *arguments, **named)
    result = await asyncio.get_running_loop().run_in_executor(_pool, call)
    return await result if inspect.isawaitable(result) else result
