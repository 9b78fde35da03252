"""`headrace eval` and `headrace export`."""

from __future__ import annotations

import json as json_text
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from headrace.cli.train import read_run
from headrace.cli.trust import Trust, require_trust
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.config import RunConfig

USAGE = (
    "Usage: headrace eval FILE.toml [OVERLAY.toml ...] [--section.key value ...] [OPTIONS]\n"
    "       headrace eval RUN_DIR [--section.key value ...] [OPTIONS]"
)
_OPTIONS = ("--checkpoint", "--model", "--url", "--api-key-env", "--json", "--plot", "--episodes", "--trust")


def evaluate(
    target: Annotated[str, Parameter(help="The run file; or a run folder or checkpoint.", allow_leading_hyphen=True)],
    /,
    *overrides: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    checkpoint: Annotated[
        Path | None, Parameter(help="Checkpoint, or run folder (its newest), to evaluate; else the model itself.")
    ] = None,
    model: Annotated[
        str | None, Parameter(help="Another model: a name, a folder or a hub id; with --url, its name there.")
    ] = None,
    url: Annotated[
        str | None, Parameter(help="Ask a model behind this OpenAI-compatible URL; needs the extra remote.")
    ] = None,
    api_key_env: Annotated[str | None, Parameter(help="Environment variable that holds the key for --url.")] = None,
    json: Annotated[Path | None, Parameter(help="Write all results, task by task, for headrace compare.")] = None,
    plot: Annotated[Path | None, Parameter(help="Draw a picture (PNG, SVG or PDF); needs the extra plot.")] = None,
    episodes: Annotated[Path | None, Parameter(help="Write all episodes to FILE.jsonl, a line each.")] = None,
    trust: Trust = False,
) -> None:
    """Evaluate a model, a checkpoint or a URL on the sets of a run file or of a run.

    Settings can be changed with `--section.key value`; `headrace train --help all` lists them.
    """
    _refuse_contradictions(checkpoint, model, url, api_key_env)
    if model is not None and url is None:
        overrides = (*overrides, f"--model.name={json_text.dumps(model, ensure_ascii=False)}")
    if Path(target).is_dir():
        config = _config_of_run(Path(target), overrides, trust)
        if model is None and url is None:
            checkpoint = checkpoint or Path(target)
    elif trust:
        raise ConfigError(f"--trust is for the folder of a run, and {target} is none; leave it out")
    else:
        # evaluated here, whatever the file says of when training evaluates
        config = read_run(target, (*overrides, "--eval.after=true"), *_OPTIONS)
    from headrace.evaluation.evaluate import Outputs, Remote, evaluate_run

    remote = Remote(url, model, api_key_env) if url is not None and model is not None else None
    evaluate_run(config, checkpoint, remote, Outputs(json, plot, episodes))


def _refuse_contradictions(checkpoint: Path | None, model: str | None, url: str | None, key: str | None) -> None:
    if checkpoint is not None and (model is not None or url is not None):
        raise ConfigError(f"--checkpoint and {'--url' if url else '--model'} both say what to evaluate; leave one out")
    if url is not None and model is None:
        raise ConfigError(f"which model at {url}? Add --model NAME, as the server calls it")
    if url is not None and not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url must begin with http:// or https://, got {url}; such as http://127.0.0.1:8000/v1")
    if key is not None and url is None:
        raise ConfigError(f"--api-key-env {key} is for a model behind a URL; add --url, or leave it out")


def _config_of_run(folder: Path, overrides: tuple[str, ...], trust: bool) -> RunConfig:
    from headrace.config.loading import build_config
    from headrace.evaluation.evaluate import run_of
    from headrace.run.stored import stored_config

    run = run_of(folder)
    stored = stored_config(run)
    if stored is None:
        raise ConfigError(f"{folder} is neither a run folder nor a checkpoint of one; give a run file or a run folder")
    require_trust(run, trust)
    return build_config(stored, overrides, where=str(run / "config.json"), may_be_idle=True, begun=True)


def export(
    run: Annotated[Path, Parameter(help="Run folder (its newest checkpoint) or a checkpoint.")],
    out: Annotated[Path, Parameter(help="Folder to write; must not exist or be empty.")],
    /,
    *,
    trust: Trust = False,
) -> None:
    """Write a trained model as an ordinary folder in Hugging Face format; adapters are merged in."""
    from headrace.evaluation.evaluate import export_run, run_of

    require_trust(run_of(run), trust)
    print(f"wrote {export_run(run, out)}")
