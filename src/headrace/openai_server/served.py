"""What is served: a run's checkpoint or a model, loaded, with the engine that samples from it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from headrace.backends.setup import attach_engine, choose
from headrace.config import RunConfig
from headrace.config.loading import build_config
from headrace.config.rules import resolve_objective
from headrace.engines.base import Generation, RolloutEngine, SamplingParams
from headrace.errors import ConfigError, ModelError
from headrace.evaluation.evaluate import run_of
from headrace.evaluation.setup import in_this_process
from headrace.openai_server.options import OpenAIOptions
from headrace.registry import nearest
from headrace.rollout.chat import ChatTemplate
from headrace.run.checkpoint import is_checkpoint, list_checkpoints, load_checkpoint
from headrace.run.stored import stored_config
from headrace.utils.threads import run_in_thread


@runtime_checkable
class Streams(Protocol):
    """An engine that says what it samples while it samples."""

    async def stream(
        self, prompt_ids: Any, params: SamplingParams, seed: int, on_tokens: Callable[[Any, Any], None]
    ) -> Generation: ...


@dataclass(frozen=True, slots=True)
class Served:
    """A model behind the server."""

    name: str
    engine: RolloutEngine
    tokenizer: Any
    template: ChatTemplate | None
    """None if the model has none: it cannot chat, only complete."""
    max_length: int | None
    version: int

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of a prompt, with the special tokens that the model begins a text with."""
        return tuple(self.tokenizer.encode(text))

    def decode(self, ids: Any) -> str:
        """Text of ids, special tokens left out."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)


def run_folder(target: str) -> Path | None:
    """The run that the target is, or is a checkpoint of; None if it names a model."""
    folder = Path(target)
    if not folder.is_dir():
        if folder.parent != Path() and any(folder.parent.glob("*/ledger.sqlite")):  # or it is taken for a hub id
            runs = sorted(beside.parent.name for beside in folder.parent.glob("*/ledger.sqlite"))
            raise ConfigError(f"there is no run {folder}{nearest(folder.name, runs)}")
        return None
    run = run_of(folder)
    stored = stored_config(run)
    # a model's folder has a config.json, too
    return run if stored is not None and "trainer" in stored and "model" in stored else None


def serving_config(options: OpenAIOptions) -> tuple[RunConfig, Path | None]:
    """The configuration of the target, and its checkpoint if it is a run. Nothing is loaded."""
    run = run_folder(options.target)
    if run is None:
        return _model_config(options), None
    if options.dtype is not None:
        raise ConfigError(f"--dtype is for a model, and {options.target} is a run, which has its own; leave it out")
    checkpoint = Path(options.target)
    if not is_checkpoint(checkpoint) and not list_checkpoints(checkpoint):
        raise ConfigError(f"{checkpoint} has no checkpoint yet; wait for one, or serve the model that it trains")
    stored = stored_config(run)
    assert stored is not None
    where = str(run / "config.json")
    config = build_config(stored, _overrides(options), where=where, may_be_idle=True, begun=True)
    return resolve_objective(config), checkpoint


def _model_config(options: OpenAIOptions) -> RunConfig:
    model = {"name": options.target, "dtype": options.dtype or "float32"}
    return build_config({"model": model}, _overrides(options), where="the command line", may_be_idle=True)


def _overrides(options: OpenAIOptions) -> tuple[str, ...]:
    given = {
        "engine.max_batch": options.max_batch,
        "engine.max_model_length": options.max_model_length,
        "backend.threads": options.threads or None,
        "run.deterministic": "false",  # replies are sampled with seeds of their own
    }
    return tuple(f"--{key}={value}" for key, value in given.items() if value is not None)


@asynccontextmanager
async def open_served(options: OpenAIOptions, report: Callable[[str], None]) -> AsyncIterator[Served]:
    """Load the target. Model and engine are closed at the end."""
    config, checkpoint = serving_config(options)
    config = in_this_process(config)
    choice = choose(config)
    backend = await run_in_thread(choice.new_backend, config)
    try:
        policy = attach_engine(config, backend, choice)
        try:
            state = await load_checkpoint(checkpoint, backend, report) if checkpoint is not None else None
            version = state.version if state is not None else 0
            await policy.sync.sync(version)
            yield _served(options, policy.engine, backend.tokenizer, version)
        finally:
            await policy.engine.close()
    finally:
        await backend.close()


def _served(options: OpenAIOptions, engine: RolloutEngine, tokenizer: Any, version: int) -> Served:
    try:
        template = ChatTemplate(tokenizer)
    except ModelError:
        template = None
    length: int | None = getattr(engine, "max_model_length", None)
    return Served(options.name or options.target, engine, tokenizer, template, length, version)
