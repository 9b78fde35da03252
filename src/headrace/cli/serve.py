"""`headrace serve`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from headrace.cli.help import examples
from headrace.cli.trust import Trust, require_trust
from headrace.errors import ConfigError

serve_app = App(name="serve", help="Serve a model to programs written for another API.")


@serve_app.command(name="tinker", help_epilogue=examples("headrace serve tinker --model bundled --port 8500"))
def tinker(
    *,
    model: Annotated[str, Parameter(help="A name from `headrace model list`, a folder, or a hub id.")] = "bundled",
    name: Annotated[str | None, Parameter(help="What clients call the model; by default its own name.")] = None,
    host: Annotated[str, Parameter(help="Address to listen at; beyond loopback an API key is needed.")] = "127.0.0.1",
    port: Annotated[int, Parameter(help="Port; 0 takes a free one.")] = 8500,
    api_key: Annotated[
        str | None, Parameter(help="Key that clients must send; begins with tml-.", env_var="HEADRACE_SERVE_KEY")
    ] = None,
    public_host: Annotated[
        str | None, Parameter(help="Name by which clients reach the server, beside its address: a proxy's, say.")
    ] = None,
    dir: Annotated[Path, Parameter(help="Where checkpoints are kept.")] = Path("tinker"),
    dtype: Annotated[Literal["float32", "bfloat16", "float64"], Parameter(help="Type of the weights.")] = "float32",
    threads: Annotated[int, Parameter(help="Threads of the tensor library; 0 for its own choice.")] = 0,
    rank_limit: Annotated[int, Parameter(help="Largest rank of adapters.")] = 256,
    max_models: Annotated[int, Parameter(help="Models in training at once.")] = 8,
    max_samplers: Annotated[int, Parameter(help="Sets of sampler weights kept in memory.")] = 16,
    max_batch: Annotated[int, Parameter(help="Sequences of one set of weights decoded together.")] = 128,
    max_model_length: Annotated[int | None, Parameter(help="Longest sequence; by default the model's limit.")] = None,
    micro_batch_tokens: Annotated[int, Parameter(help="Tokens that a forward and backward pass takes at once.")] = 1536,
    max_sessions: Annotated[int, Parameter(help="Clients at once.")] = 256,
    session_timeout_s: Annotated[float, Parameter(help="A session without a sign of life ends after this.")] = 60.0,
    order_wait_s: Annotated[float, Parameter(help="How long a request waits for an earlier one.")] = 60.0,
    results_mb: Annotated[float, Parameter(help="Memory for results that wait to be fetched.")] = 512.0,
    max_body_mb: Annotated[float, Parameter(help="Largest request.")] = 256.0,
) -> None:
    """Speak the Tinker API over the local engine and learner; needs the extra serve."""
    from headrace.registry import load_object
    from headrace.tracking.terminal import working

    with working("loading the server"):
        serve_tinker = load_object("headrace.tinker_server.run:serve_tinker")
    options = load_object("headrace.tinker_server.options:ServeOptions")(
        model=model, name=name, host=host, port=port, api_key=api_key, folder=dir, dtype=dtype, threads=threads,
        rank_limit=rank_limit, max_models=max_models, max_samplers=max_samplers, max_batch=max_batch,
        max_model_length=max_model_length, micro_batch_tokens=micro_batch_tokens, session_timeout_s=session_timeout_s,
        max_sessions=max_sessions, public_host=public_host, order_wait_s=order_wait_s, results_mb=results_mb,
        max_body_mb=max_body_mb,
    )  # fmt: skip
    serve_tinker(options, partial(print, flush=True))


@serve_app.command(
    name="openai",
    help_epilogue=examples("headrace serve openai runs/countdown", "headrace serve openai smollm2-135m --port 9000"),
)
def openai(
    target: Annotated[
        str, Parameter(help="A run folder (its newest checkpoint), a checkpoint, or a model.")
    ] = "bundled",
    /,
    *,
    name: Annotated[str | None, Parameter(help="What clients call the model; by default the target.")] = None,
    host: Annotated[str, Parameter(help="Address to listen at; beyond loopback an API key is needed.")] = "127.0.0.1",
    port: Annotated[int, Parameter(help="Port; 0 takes a free one.")] = 8000,
    api_key: Annotated[str | None, Parameter(help="Key that clients must send.", env_var="HEADRACE_SERVE_KEY")] = None,
    public_host: Annotated[
        str | None, Parameter(help="Name by which clients reach the server, beside its address: a proxy's, say.")
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float64"] | None,
        Parameter(help="Type of a model's weights; a run has its own."),
    ] = None,
    threads: Annotated[int, Parameter(help="Threads of the tensor library; 0 for its own choice.")] = 0,
    max_batch: Annotated[int, Parameter(help="Sequences decoded together.")] = 128,
    max_waiting: Annotated[int, Parameter(help="Sequences that may wait; more are refused with 429.")] = 1024,
    max_model_length: Annotated[int | None, Parameter(help="Longest sequence; by default the model's limit.")] = None,
    max_tokens: Annotated[int, Parameter(help="Tokens of a reply whose request sets no limit.")] = 1024,
    max_body_mb: Annotated[float, Parameter(help="Largest request.")] = 64.0,
    trust: Trust = False,
) -> None:
    """Serve a trained run or a model to programs that speak OpenAI's API; needs the extra gateway."""
    from headrace.registry import load_object
    from headrace.tracking.terminal import working

    with working("loading the server"):
        serve_openai = load_object("headrace.openai_server.run:serve_openai")
        run = load_object("headrace.openai_server.served:run_folder")(target)
    if run is not None:
        require_trust(run, trust)
    elif trust:
        raise ConfigError(f"--trust is for the folder of a run, and {target} is none; leave it out")
    options = load_object("headrace.openai_server.options:OpenAIOptions")(
        target=target, name=name, host=host, port=port, api_key=api_key, public_host=public_host, dtype=dtype,
        threads=threads, max_batch=max_batch, max_waiting=max_waiting, max_model_length=max_model_length,
        max_tokens=max_tokens, max_body_mb=max_body_mb,
    )  # fmt: skip
    serve_openai(options, partial(print, flush=True))
