"""Every name in a configuration and its arguments, looked up at once: a start checks them before it loads anything."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from headrace.config import RunConfig
from headrace.config.derived import chosen
from headrace.errors import ConfigError, HeadraceError
from headrace.registry import builtin, check_call, load_object, resolve

_HEAVY = ("backend", "engine", "loss", "tracker")  # some of Headrace's own load torch: they are known to be there
_FILES = (".jsonl", ".parquet")
EVALUATION = ("workflow.name", "workflow.judger", "judge.", "eval.")
"""How the keys of the names begin that an evaluation uses."""


class _Named(NamedTuple):
    """A name, the setting that it is the value of, and the arguments that the run file gives with it."""

    key: str
    kind: str
    name: str
    args: Mapping[str, Any] | None = None
    args_key: str = ""


def check_names(config: RunConfig, objects: Collection[str] = (), keys: tuple[str, ...] = ("",)) -> None:
    """Raise ConfigError with every problem of `name_problems`."""
    if problems := name_problems(config, objects, keys):
        raise ConfigError("; ".join(problems))


def name_problems(config: RunConfig, objects: Collection[str] = (), keys: tuple[str, ...] = ("",)) -> list[str]:
    """Names that stand for nothing, and arguments that do not fit. A user's own modules are imported.

    `objects` ("workflow", "judger", "tasks", "eval_tasks") are given in place of names, which are not looked up. Only
    settings whose keys begin with one of `keys` are.
    """
    problems: list[str] = []
    for named in _names(config, objects):
        if not named.key.startswith(keys):
            continue
        try:
            target = _look_up(named)
        except HeadraceError as error:
            problems.append(f"{named.key}: {error}")
            continue
        except Exception as error:  # a user's module may fail in any way
            problems.append(f'{named.key} = "{named.name}" cannot be imported: {type(error).__name__}: {error}')
            continue
        try:
            _check_arguments(named, target)
        except HeadraceError as error:
            problems.append(f"{named.args_key}: {error}")
    return problems


def _look_up(named: _Named) -> Any:
    """The object; None for what is not imported here."""
    _, kind, name, *_ = named
    if kind == "model":
        load_object("headrace.models.catalog:resolve_model")(name)
    elif kind == "file":
        if not Path(name).expanduser().is_file():
            raise ConfigError(f"there is no task file {name}")
    elif not (kind in _HEAVY and name in builtin(kind)):
        found = resolve(kind, name)
        if kind == "workflow" and not inspect.iscoroutinefunction(getattr(found, "run", found)):
            raise ConfigError(f'"{name}" must be "async def run(task, model)", or a class with that method')
        return found
    return None


def _check_arguments(named: _Named, target: Any) -> None:
    if named.args is None:
        return
    if named.kind == "file":
        if named.args:
            raise ConfigError(f"the task file {named.name} takes no arguments, got {', '.join(sorted(named.args))}")
    elif named.kind == "tasks" or inspect.isclass(target):
        check_call(target, named.args, f'the {_WORDS.get(named.kind, named.kind)} "{named.name}"')
    elif named.args:
        raise ConfigError(f'the {named.kind} "{named.name}" is not a class, so it takes no arguments; remove them')


_WORDS = {"tasks": "task source"}


def _names(config: RunConfig, objects: Collection[str]) -> Iterator[_Named]:
    workflow, trainer = config.workflow, config.trainer
    if "workflow" not in objects:
        yield _Named("workflow.name", "workflow", workflow.name, workflow.args, "workflow.args")
    if workflow.judger and "judger" not in objects:
        yield _Named("workflow.judger", "judger", workflow.judger, workflow.judger_args, "workflow.judger_args")
    if workflow.grouping:
        yield _Named("workflow.grouping", "grouping", workflow.grouping)
    for source, route in config.judge.routes.items():
        if isinstance(name := route.get("name"), str):
            args = route.get("args")
            key = f"judge.routes.{source}"
            yield _Named(key, "judger", name, args if isinstance(args, dict) else None, f"{key}.args")
    for kind in ("estimator", "loss"):
        yield from (_Named(f"algorithm.{kind}", kind, name) for name in sorted(chosen(config.algorithm, kind)))
    yield _Named("backend.name", "backend", config.backend.name)
    yield _Named("engine.name", "engine", config.engine.name)
    yield _Named("trainer.staleness", "staleness", trainer.staleness)
    yield from (_Named("trainer.callbacks", "callback", name) for name in trainer.callbacks)
    yield from (_Named("track.trackers", "tracker", name) for name in config.track.trackers)
    yield from (_Named("eval.metrics", "evaluation metric", name) for name in config.eval.metrics)
    if config.backend.name in ("local", "fsdp", "verl"):  # whose model is loaded from this machine
        yield _Named("model.name", "model", config.model.name)
        if config.distill.teacher != "initial":
            yield _Named("distill.teacher", "model", config.distill.teacher)
    yield from _sources(config, objects)
    for name, one in config.eval.sets.items():
        at = f"eval.sets.{name}"
        if one.workflow:
            yield _Named(f"{at}.workflow", "workflow", one.workflow, one.workflow_args, f"{at}.workflow_args")
        if one.judger:
            yield _Named(f"{at}.judger", "judger", one.judger, one.judger_args, f"{at}.judger_args")


def _sources(config: RunConfig, objects: Collection[str]) -> Iterator[_Named]:
    """Where tasks come from, as far as it can be looked up without reading them."""
    given: dict[str, tuple[str, Mapping[str, Any]]] = {}
    if "tasks" not in objects:
        given |= {f"data.mixture.{name}": (one.tasks, one.args) for name, one in config.data.mixture.items()}
        given = given or {"data": (config.data.tasks, config.data.args)}
    if "eval_tasks" not in objects:
        given |= {f"eval.sets.{name}": (one.tasks, one.args) for name, one in config.eval.sets.items()}
    given |= {"sft": (config.sft.tasks, config.sft.args)} if config.sft.coef else {}
    for at, (tasks, args) in given.items():
        if tasks.endswith(_FILES):
            yield _Named(f"{at}.tasks", "file", tasks, args, f"{at}.args")
        elif not tasks.startswith(("hf:", "reasoning_gym:")) and tasks != "holdout" and not Path(tasks).is_dir():
            yield _Named(f"{at}.tasks", "tasks", tasks, args, f"{at}.args")
