"""From `[data]` to the tasks of a run: which are trained, which are held out, and in which order they are drawn."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.config import DataSection, EvalSet
from headrace.data.curriculum import CurriculumSampler
from headrace.data.mixture import MixtureOrder, named
from headrace.data.sampler import TaskSampler
from headrace.data.sources import Loaded, load_source
from headrace.data.split import overlaps, prompt_key, split_tasks
from headrace.data.task import Task
from headrace.errors import ConfigError, DataError

HOLDOUT = "holdout"
_SHOWN = 3  # ids


@dataclass(frozen=True, slots=True)
class TrainingData:
    """The tasks of a run, source after source, and those that are kept from training."""

    tasks: list[Task]
    held_out: list[Task]
    bad_rows: tuple[str, ...] = ()
    sizes: Mapping[str, int] | None = None
    """How many tasks each source of a mixture has to train; None without a mixture."""


def load_training(
    section: DataSection, given: Iterable[Any] | None = None, report: Callable[[str], None] = lambda _: None
) -> TrainingData:
    """What `[data]` names; `given` are tasks in place of those. `report` gets the source that is being read."""
    if given is None and section.mixture:
        return _load_mixture(section, report)
    report("reading the tasks that were given" if given is not None else f'reading data.tasks = "{section.tasks}"')
    found = load_source(section, given, skip_bad=section.on_bad_row == "skip")
    split = split_tasks(found.tasks, section.holdout)
    return TrainingData(split.train, split.held_out, found.bad_rows)


def _load_mixture(section: DataSection, report: Callable[[str], None]) -> TrainingData:
    tasks: list[Task] = []
    bad: list[str] = []
    source_of: dict[str, str] = {}
    for name, entry in section.mixture.items():
        report(f'reading data.mixture.{name}.tasks = "{entry.tasks}"')
        found = load_source(entry, source_name=name, system=section.system, skip_bad=section.on_bad_row == "skip")
        own = named(found.tasks, name)
        source_of |= dict.fromkeys((task.id for task in own), name)
        tasks += own
        bad += found.bad_rows
    split = split_tasks(tasks, section.holdout)
    sizes = dict.fromkeys(section.mixture, 0)
    for task in split.train:
        sizes[source_of[task.id]] += 1
    empty = [name for name, size in sizes.items() if not size]
    if empty:
        raise DataError(
            f"data.holdout = {section.holdout} leaves nothing to train of the source {empty[0]}; lower it, or add tasks"
        )
    return TrainingData(split.train, split.held_out, tuple(bad), sizes)


def make_sampler(section: DataSection, batch_size: int, seed: int = 0, data: TrainingData | None = None) -> TaskSampler:
    """The stream that training draws from; `data` are tasks that are loaded already."""
    data = data or load_training(section)
    order = None
    if data.sizes is not None:
        weights = [section.mixture[name].weight for name in data.sizes]
        order = MixtureOrder(list(data.sizes.values()), weights, seed, section.shuffle)
    if section.curriculum.target is not None:
        return CurriculumSampler(section.curriculum, data.tasks, batch_size, seed, section.shuffle, order)
    return TaskSampler(data.tasks, batch_size, seed, section.shuffle, section.drop_last, order)


def load_evaluation(section: EvalSet, data: DataSection, held_out: list[Task], name: str) -> Loaded:
    """The tasks of an evaluation set; `held_out` are those that training leaves out."""
    if section.tasks != HOLDOUT:
        return load_source(section, system=data.system, skip_bad=data.on_bad_row == "skip")
    where = f'eval.sets.{name}.tasks = "{HOLDOUT}"'
    if unknown := [key for key in section.args if key != "count"]:
        raise ConfigError(
            f"{where} takes the tasks as training has them, so args.{unknown[0]} has no effect; remove it"
        )
    count = section.args.get("count")
    if not held_out:
        raise ConfigError(f"{where}, and nothing is held out; set data.holdout to a share such as 0.1, or to a number")
    if count is not None and (type(count) is not int or not 0 < count <= len(held_out)):
        raise ConfigError(f"{where}: args.count must be a number from 1 to {len(held_out)}, got {count!r}")
    # by digest, so that a few of them are of all sources; in their order
    chosen = {task.id for task in sorted(held_out, key=prompt_key)[:count]}
    return Loaded([task for task in held_out if task.id in chosen])


def check_overlap(section: DataSection, train: list[Task], sets: Mapping[str, list[Task]]) -> None:
    """Warn about evaluation tasks that are also trained, or refuse them, as `data.on_overlap` sets it."""
    if section.on_overlap == "ignore":
        return
    for name, shared in overlaps(train, sets).items():
        if not shared:
            continue
        ids = ", ".join(f'"{task.id}"' for task in shared[:_SHOWN])
        warning = (
            f'{len(shared)} of {len(sets[name])} tasks of the evaluation set "{name}" ask what is also trained: {ids}'
            f"{', …' if len(shared) > _SHOWN else ''}; evaluate other tasks, hold some out with data.holdout, "
            f'or set data.on_overlap = "ignore"'
        )
        if section.on_overlap == "stop":
            raise DataError(warning)
        warnings.warn(warning, stacklevel=2)


def warn_of_bad_rows(found: Loaded | TrainingData, what: str) -> None:
    """Warn how many rows were left out, and why."""
    warning = Loaded([], found.bad_rows).warning()
    if warning:
        warnings.warn(f"{what}: {warning}", stacklevel=2)
