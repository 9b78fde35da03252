"""What one does with a trained run: evaluate it, export it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from headrace.backends.base import Backend
from headrace.config import RunConfig
from headrace.config.rules import resolve_objective
from headrace.data.episode import Episode
from headrace.errors import ConfigError, boundary, first_of
from headrace.evaluation.evaluator import Evaluator, is_right, under
from headrace.evaluation.report import Progressing, draw, evaluation_table, show
from headrace.evaluation.results_file import EvaluationResult, SetResult, set_result, write_evaluation
from headrace.evaluation.setup import assemble_evaluation, assemble_remote_evaluation
from headrace.ledger.export import plain
from headrace.registry import load_object, resolve
from headrace.run.checkpoint import is_checkpoint, list_checkpoints, load_checkpoint
from headrace.tracking.terminal import working
from headrace.utils.event_loop import run_loop
from headrace.utils.interrupts import interruptible
from headrace.utils.threads import run_in_thread


@dataclass(frozen=True, slots=True)
class Remote:
    """A model behind a URL that speaks OpenAI's protocol; the key is in an environment variable."""

    url: str
    model: str
    api_key_env: str | None = None


@dataclass(frozen=True, slots=True)
class Outputs:
    """Files that an evaluation writes: results by task, a chart, and the episodes, one per line."""

    json: Path | None = None
    plot: Path | None = None
    episodes: Path | None = None

    def check(self) -> None:
        """Before the evaluation, not after it: can all of it be written?"""
        for path in (self.json, self.plot, self.episodes):
            if path is not None and not path.resolve().parent.is_dir():
                raise ConfigError(f"there is no folder {path.resolve().parent} to write {path.name} into")
        if self.plot is not None:
            load_object("headrace.tracking.evaluation_plot:draw_evaluation")
            if self.plot.suffix not in (".png", ".svg", ".pdf"):
                raise ConfigError(f"--plot must end in .png, .svg or .pdf, got {self.plot}")


def evaluate_run(
    config: RunConfig, checkpoint: Path | None = None, remote: Remote | None = None, outputs: Outputs | None = None
) -> dict[str, float]:
    """Evaluate, print a table and return the metrics.

    What is evaluated: `checkpoint`, which is a checkpoint or a run folder (its newest); or the model at `remote`; or
    else the model that the configuration names.
    """
    outputs = outputs or Outputs()
    if not config.eval.sets:
        raise ConfigError("the run file has no evaluation set; add a section [eval.sets.NAME] with tasks")
    if checkpoint is not None:
        _require_checkpoint(checkpoint)
    outputs.check()
    of = f"{remote.model} at {remote.url}" if remote else str(checkpoint or config.model.name)
    config = resolve_objective(config)
    evaluation = _Evaluation(outputs)
    try:
        if remote is not None:
            run_loop(lambda: interruptible(_evaluate_remote(config, remote, evaluation)))
        else:
            run_loop(lambda: interruptible(_evaluate(config, checkpoint, evaluation)))
    except KeyboardInterrupt:
        print(evaluation.how_far(), file=sys.stderr)
        raise
    result = EvaluationResult(of, tuple(evaluation.sets))
    # first what is to last: who reads the table may leave, as `| head` does
    if outputs.json is not None:
        write_evaluation(result, outputs.json)
    if outputs.plot is not None:
        draw(result, outputs.plot)
    show(evaluation_table(result))
    for what, path in (("results", outputs.json), ("chart", outputs.plot), ("episodes", outputs.episodes)):
        if path is not None:
            print(f"{what}: {path}")
    return {key: value for found in result.sets for key, value in under(found.name, found.metrics).items()}


def export_run(run_dir: Path, out: Path) -> Path:
    """A run's newest checkpoint (or a given one) as an ordinary model folder."""
    _require_checkpoint(run_dir)
    config = config_of(run_of(run_dir))
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} exists and is not empty; choose another folder")
    run_loop(lambda: interruptible(_export(config, run_dir, out)))
    return out


def run_of(folder: Path) -> Path:
    """The run that a checkpoint belongs to; of a run folder, itself."""
    return folder.resolve().parent.parent if is_checkpoint(folder) else folder


def config_of(run_dir: Path) -> RunConfig:
    """The configuration that a run has."""
    try:
        return RunConfig.model_validate_json((run_dir / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the configuration of the run {run_dir}: {error}") from None


async def _export(config: RunConfig, checkpoint: Path, out: Path) -> None:
    with working(f"loading the model {config.model.name}") as doing:
        backend: Backend = await run_in_thread(resolve("backend", config.backend.name), config)
        try:
            doing(f"loading {checkpoint}")
            await load_checkpoint(checkpoint, backend, _report)
            doing(f"writing {out}")
            await backend.export(out)
        finally:
            await backend.close()


@dataclass(slots=True)
class _Evaluation:
    """An evaluation under way: what is done of it."""

    outputs: Outputs
    sets: list[SetResult] = field(default_factory=list)
    _at: tuple[str, int, int] | None = None

    async def run(self, evaluator: Evaluator) -> None:
        """Evaluate every set. Episodes are written as they are done, so that an interruption loses none."""
        with boundary(ConfigError, f"cannot write {self.outputs.episodes}", OSError):
            lines = (
                self.outputs.episodes.open("w", encoding="utf-8", errors="backslashreplace")
                if self.outputs.episodes
                else None
            )

        def write(name: str, episode: Episode) -> None:
            if lines is not None:
                lines.write(_line(name, episode))
                lines.flush()

        def keep(name: str, metrics: dict[str, float], episodes: list[Episode]) -> None:
            self.sets.append(set_result(name, metrics, evaluator.sets[name][1], episodes))

        try:
            async with evaluator:
                with Progressing() as bars:
                    await evaluator.evaluate(self._progress(bars.show), keep, write)
        except BaseExceptionGroup as group:  # of the episodes side by side, the first that ended them all
            error = first_of(group)
            raise error from error.__cause__
        finally:
            if lines is not None:
                lines.close()

    def _progress(self, show: Callable[[str, int, int], None]) -> Callable[[str, int, int], None]:
        def progress(name: str, done: int, total: int) -> None:
            self._at = (name, done, total)
            show(name, done, total)

        return progress

    def how_far(self) -> str:
        """For who interrupted it."""
        if self._at is None:
            return "stopped before the first episode was done"
        name, done, total = self._at
        kept = f"; the episodes so far are in {self.outputs.episodes}" if self.outputs.episodes else ""
        return f'stopped in the set "{name}" after {done} of {total} episodes{kept}'


def _line(name: str, episode: Episode) -> str:
    row = {"set": name, "right": is_right(episode), "text": episode.text, **plain(episode.to_dict())}
    return json.dumps(row, ensure_ascii=False) + "\n"


async def _evaluate(config: RunConfig, checkpoint: Path | None, evaluation: _Evaluation) -> None:
    with working(f"loading the tasks and the model {config.model.name}"):
        parts = await run_in_thread(assemble_evaluation, config)
    try:
        with working(f"loading {checkpoint or 'the engine'}"):
            if checkpoint is not None:
                await load_checkpoint(checkpoint, parts.backend, _report)
            await parts.sync.sync(0)  # the engine may have the weights of the model as it was loaded
        await evaluation.run(parts.evaluator)
    finally:
        await parts.engine.close()
        await parts.backend.close()


async def _evaluate_remote(config: RunConfig, remote: Remote, evaluation: _Evaluation) -> None:
    new_client = load_object("headrace.engines.openai:OpenAIClient")
    rollout = config.rollout
    client = new_client(
        remote.url, remote.model, remote.api_key_env, timeout_s=rollout.timeout_s, max_concurrent=rollout.max_concurrent
    )
    try:
        await evaluation.run(assemble_remote_evaluation(config, client))
    finally:
        await client.close()


def _require_checkpoint(path: Path) -> None:
    """Before anything is loaded."""
    if not is_checkpoint(path) and not list_checkpoints(path):
        raise ConfigError(f"{path} is neither a checkpoint nor a run folder with one")


def _report(text: str) -> None:
    print(text, file=sys.stderr)
