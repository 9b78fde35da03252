"""Every name in a configuration, looked up at once: what `headrace train --dry-run` checks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from headrace.config import RunConfig
from headrace.config.conditions import chosen
from headrace.errors import ConfigError, HeadraceError
from headrace.registry import builtin, load_object, resolve

_HEAVY = ("backend", "engine", "loss", "tracker")  # some of Headrace's own load torch: they are known to be there


def check_names(config: RunConfig) -> None:
    """Raise ConfigError with every name that stands for nothing. A user's own modules are imported."""
    problems: list[str] = []
    for key, kind, name in _names(config):
        try:
            if kind == "model":
                load_object("headrace.models.catalog:resolve_model")(name)
            elif kind == "file":
                _require_file(name)
            elif not (kind in _HEAVY and name in builtin(kind)):
                resolve(kind, name)
        except HeadraceError as error:
            problems.append(f"{key}: {error}")
        except Exception as error:  # a user's module may fail in any way
            problems.append(f'{key} = "{name}" cannot be imported: {type(error).__name__}: {error}')
    if problems:
        raise ConfigError("; ".join(problems))


def _names(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Key, kind and name."""
    workflow, trainer = config.workflow, config.trainer
    yield "workflow.name", "workflow", workflow.name
    if workflow.judger:
        yield "workflow.judger", "judger", workflow.judger
    if workflow.grouping:
        yield "workflow.grouping", "grouping", workflow.grouping
    for source, route in config.judge.routes.items():
        if isinstance(name := route.get("name"), str):
            yield f"judge.routes.{source}", "judger", name
    for kind in ("estimator", "loss"):
        yield from ((f"algorithm.{kind}", kind, name) for name in sorted(chosen(config.algorithm, kind)))
    yield "backend.name", "backend", config.backend.name
    yield "engine.name", "engine", config.engine.name
    yield "trainer.staleness", "staleness", trainer.staleness
    yield from (("trainer.callbacks", "callback", name) for name in trainer.callbacks)
    yield from (("track.trackers", "tracker", name) for name in config.track.trackers)
    yield from (("eval.metrics", "evaluation metric", name) for name in config.eval.metrics)
    if config.backend.name == "local":
        yield "model.name", "model", config.model.name
        if config.distill.teacher != "initial":
            yield "distill.teacher", "model", config.distill.teacher
    yield from _sources(config)
    for name, one in config.eval.sets.items():
        if one.workflow:
            yield f"eval.sets.{name}.workflow", "workflow", one.workflow
        if one.judger:
            yield f"eval.sets.{name}.judger", "judger", one.judger


def _sources(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Where tasks come from, as far as it can be looked up without reading them."""
    given = {f"data.mixture.{name}.tasks": one.tasks for name, one in config.data.mixture.items()}
    given = given or {"data.tasks": config.data.tasks}
    given |= {f"eval.sets.{name}.tasks": one.tasks for name, one in config.eval.sets.items()}
    given |= {"sft.tasks": config.sft.tasks} if config.sft.coef else {}
    for key, tasks in given.items():
        if tasks.endswith((".jsonl", ".parquet")):
            yield key, "file", tasks
        elif tasks in builtin("tasks") or (":" in tasks and not tasks.startswith(("hf:", "reasoning_gym:"))):
            yield key, "tasks", tasks


def _require_file(name: str) -> None:
    if not Path(name).expanduser().is_file():
        raise ConfigError(f"there is no file {name}")
