"""The engine process: `python -m headrace.engines.process.worker SOCKET BUFFER...`, with numbers of inherited files.

Serves one learner over the socket, and ends when the learner has gone. Decoding has a thread of its own; new weights
are read and checked beside it, and taken between two tokens.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any

import torch

from headrace.engines.process.wire import Answer, Call, Cancel, EngineOptions, Failed, Open, Opened, encode, receive
from headrace.engines.torch.engine import TorchEngine
from headrace.errors import EngineError, HeadraceError
from headrace.models.causal import CausalModel, build_causal_model
from headrace.models.load import load_model, load_tokenizer
from headrace.utils.interrupts import ignore_stop_signals
from headrace.utils.memory import keep_freed_memory
from headrace.weights.digest import weight_digest
from headrace.weights.shared_memory import BoundModels


class Worker:
    """Serves one engine over a socket."""

    def __init__(self, writer: asyncio.StreamWriter, files: Sequence[int]) -> None:
        self._writer = writer
        self._files = files
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Until the learner has gone."""
        opening = asyncio.create_task(self._open(await receive(reader)))
        while True:
            message = await receive(reader)
            assert opening.done(), "the learner waits for the engine to be open"
            if isinstance(message, Cancel):
                if message.number in self._tasks:
                    self._tasks[message.number].cancel()
            else:
                # tasks begin in the order in which they are made, so requests keep theirs
                task = self._tasks[message.number] = asyncio.create_task(self._answer(message))
                task.add_done_callback(lambda _, number=message.number: self._tasks.pop(number))

    async def _open(self, given: Open) -> None:
        try:
            self._models = await asyncio.to_thread(_bound_models, given, self._files)
            model = await asyncio.to_thread(self._models.model, given.live.buffer)
            self._engine = await asyncio.to_thread(_new_engine, given.options, model)
            if given.paused:
                await self._engine.pause()
            if given.pinned is not None:
                await self._load(given.pinned.version, given.pinned.buffer)
                await self._engine.pin()
            digest = await self._load(given.live.version, given.live.buffer)
        except Exception as error:  # whatever it is, the learner gets it
            self._send(Failed(str(error) if isinstance(error, HeadraceError) else f"{type(error).__name__}: {error}"))
            return
        self._send(Opened(digest, self._engine.health()))
        self._watching = asyncio.create_task(self._watch(given.options.health_every_s))

    async def _load(self, version: int, buffer: int) -> str:
        model = await asyncio.to_thread(self._models.model, buffer)
        digest = await asyncio.to_thread(lambda: weight_digest(model.weights()))
        await self._engine.switch_model(version, model)
        return digest

    async def _answer(self, call: Call) -> None:
        value, error = None, None
        try:
            method = self._load if call.method == "load" else getattr(self._engine, call.method)
            value = await method(*call.arguments)
        except HeadraceError as raised:
            error = raised
        except Exception as raised:  # a bug of ours; the learner must hear of it
            error = EngineError(f"{call.method} failed in the engine process: {type(raised).__name__}: {raised}")
        self._send(Answer(call.number, value, error, self._engine.health()))

    async def _watch(self, every_s: float) -> None:
        """Report changes of health; end with the learner, even if another process holds its socket open."""
        parent, reported = os.getppid(), None
        while os.getppid() == parent:
            health = self._engine.health()
            if health != reported:
                self._send(health)
                reported = health
            await asyncio.sleep(every_s)
        os._exit(0)

    def _send(self, message: Any) -> None:
        self._writer.write(encode(message))


def _bound_models(given: Open, files: Sequence[int]) -> BoundModels:
    options = given.options
    torch.set_num_threads(options.threads)
    keep_freed_memory()

    def build(hf_model: Any) -> CausalModel:
        model = build_causal_model(hf_model, options.model.fast_path, options.model.attention)
        model.row_block = options.row_block
        model.decode_with(options.weights)
        if options.compile:
            model.compile_decoding()
        return model

    return BoundModels(load_model(options.model).eval(), given.layout, files, build)


def _new_engine(options: EngineOptions, model: CausalModel) -> TorchEngine:
    tokenizer = load_tokenizer(options.model.name)
    return TorchEngine(
        model,
        eos_ids=options.eos_ids,
        detokenize=lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True),
        max_batch=options.max_batch,
        max_model_length=options.max_model_length,
        prefill_tokens=options.prefill_tokens,
        kept_tokens=options.kept_tokens,
        defaults=options.defaults,
        cache_on_publish=options.cache_on_publish,
        copy_model=lambda live: live,  # the learner does not write to a buffer that is pinned
    )


async def serve(connection: socket.socket, files: Sequence[int]) -> None:
    """Serve the learner at the other end of the socket; the process ends with it."""
    reader, writer = await asyncio.open_connection(sock=connection)
    try:
        await Worker(writer, files).serve(reader)
    except EOFError:
        os._exit(0)  # at once, whatever is being decoded


def main(connection: int, files: Sequence[int]) -> None:
    """Serve the learner at the other end of the socket."""
    ignore_stop_signals()  # signals are for the learner, which may want to finish its step
    asyncio.run(serve(socket.socket(fileno=connection), files))


if __name__ == "__main__":
    main(int(sys.argv[1]), [int(number) for number in sys.argv[2:]])
