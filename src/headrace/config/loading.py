"""Run files: TOML and `--section.key value` overrides become one `RunConfig`, or one clear sentence."""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from headrace.config import RunConfig
from headrace.config.rules import impossible, problems_of
from headrace.errors import ConfigError
from headrace.registry import nearest

Files = str | Path | Sequence[str | Path]
UNDECIDED = "undecided"
"""List at the top of a run file: what whoever wrote it has left to the user. With anything in it no run starts."""


class Layer(NamedTuple):
    """Settings from one source, with the keys that it sets."""

    source: str
    values: dict[str, Any]

    @property
    def keys(self) -> list[str]:
        """The keys of its values; of an empty table, that of the table."""
        return [key for key, _ in leaves(self.values)]


def load_config(files: Files, overrides: Sequence[str] = (), objects: Collection[str] | None = None) -> RunConfig:
    """Read TOML run files, each laid over those before it, and apply overrides such as `["--trainer.steps", "2"]`."""
    first, *others = read_layers([files] if isinstance(files, str | Path) else files)
    return build_config(first.values, overrides, where=first.source, objects=objects, overlays=others)


def read_layers(files: Sequence[str | Path]) -> list[Layer]:
    """The values of run files, in their order."""
    if not files:
        raise ConfigError("there is no run file to read; give at least one")
    return [Layer(str(path), _read_toml(path)) for path in map(Path, files)]


class UnsoundConfigError(ConfigError):
    """Every setting is valid on its own, but some contradict each other or have no effect."""

    def __init__(self, message: str, config: RunConfig) -> None:
        super().__init__(message)
        self.config = config


def build_config(
    values: dict[str, Any],
    overrides: Sequence[str] = (),
    where: str = "configuration",
    laid_by: str = "command line",
    *,
    overlays: Sequence[Layer] = (),
    objects: Collection[str] | None = None,
    may_be_idle: bool = False,
    begun: bool = False,
) -> RunConfig:
    """Validate nested values, `overlays` over them, and overrides; a problem names where its value comes from.

    `objects` will be given in place of names. `may_be_idle` accepts settings without effect. `begun` says that a run
    was started with `values`: their problems are accepted, or a newer version of Headrace could not use it.
    """
    changed = copy.deepcopy(values)  # the caller's values stay as they are
    for layer in overlays:
        _merge(changed, copy.deepcopy(layer.values), (), layer.source)
    given = dict(parse_overrides(overrides))
    for key, text in given.items():
        _lay_over(changed, key, _parse_value(text, _annotation_at(key.split("."))))
    laid = [(layer.source, layer.keys) for layer in overlays] + [(laid_by, list(given))]
    try:
        config = RunConfig.model_validate(changed)
        accepted = problems_of(RunConfig.model_validate(values), objects) if begun else []
    except ValidationError as error:
        raise ConfigError(_explain(error, where, laid)) from None
    found = impossible(config) if may_be_idle else problems_of(config, objects)
    problems = [problem for problem in found if problem not in accepted]
    if problems:
        settings = [(source, [_setting_of(key) for key in keys]) for source, keys in laid]
        raise UnsoundConfigError(
            _by_source(
                (_blamed(where, settings, lambda keys, text=text: _mentions(text, keys)), text) for text in problems
            ),
            config,
        )
    return config


def parse_overrides(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """`--a.b value` and `--a.b=value` as (key, text) pairs."""
    rest = iter(words)
    for word in rest:
        if not word.startswith("--"):
            raise ConfigError(f'expected an option such as --trainer.steps, got "{word}"')
        key, equals, text = word[2:].partition("=")
        if not equals:
            following = next(rest, None)
            if following is None:
                raise ConfigError(f"--{key} needs a value")
            text = following
        yield key, text


def leaves(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value under its dotted key; an empty table is a value."""
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def field_paths(model: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every `section.key` with its pydantic field, depth first."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from field_paths(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def _read_toml(path: Path) -> dict[str, Any]:
    if not path.exists():
        near = nearest(path.name, (p.name for p in path.parent.glob("*.toml"))) if path.parent.is_dir() else ""
        raise ConfigError(f"there is no run file {path}{near}")
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; give the run file in it, such as {path / 'config.toml'}")
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path} is not a run file: it is nested too deeply") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    undecided = values.pop(UNDECIDED, None)
    if undecided:
        listed = undecided if isinstance(undecided, list) else [undecided]
        raise ConfigError(
            f"{path} is not decided yet: {'; '.join(map(str, listed))}. Decide each, then remove it from the list "
            f"`{UNDECIDED}` at the top of the file"
        )
    return values


def _parse_value(text: str, annotation: Any) -> Any:
    """The text as a TOML value. Where the setting is a string, the text itself: 7 is a name, too."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        value = text  # a bare word is a string
    if get_origin(annotation) is tuple and _is_text(get_args(annotation)[0]) and not isinstance(value, list):
        return [value if isinstance(value, str) else text]
    return text if _is_text(annotation) and not isinstance(value, str) else value


def _is_text(annotation: Any) -> bool:
    options = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return all(
        option in (str, Path, NoneType)
        or (get_origin(option) is Literal and all(isinstance(word, str) for word in get_args(option)))
        for option in options
    )


def _merge(values: dict[str, Any], over: dict[str, Any], at: tuple[str, ...], source: str) -> None:
    """Lay one file's values over another's: key by key in sections and tables, any other value as a whole."""
    for key, value in over.items():
        path, below = (*at, key), values.get(key)
        if isinstance(below, dict) != isinstance(value, dict) and key in values:
            names = ("a table", "a value") if isinstance(value, dict) else ("a value", "a table")
            raise ConfigError(
                f"{source}: {'.'.join(path)} is {names[0]}, and {names[1]} in the file that it is laid over"
            )
        # an empty table empties one, as --eval.sets={} does; an empty section changes nothing
        if isinstance(value, dict) and isinstance(below, dict) and (value or not _is_table(path)):
            _merge(below, value, path, source)
        else:
            values[key] = value


def _is_table(path: Sequence[str]) -> bool:
    return get_origin(_annotation_at(path)) is dict


def _lay_over(values: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for done, part in enumerate(parents):
        inner = values.setdefault(_as_written(part, values), {})
        if not isinstance(inner, dict):
            raise ConfigError(f"--{key}: {'.'.join(parents[: done + 1])} is a value, not a section")
        values = inner
    values[_as_written(last, values)] = value


def _as_written(part: str, values: dict[str, Any]) -> str:
    """--eval.sets.dev-set is that set if the file has it; else dashes stand for underscores."""
    return part if part in values else part.replace("-", "_")


Laid = Sequence[tuple[str, Sequence[str]]]
"""What was laid over the first file, in order: each source with the keys that it sets."""


def _explain(error: ValidationError, file: str, laid: Laid) -> str:
    """All problems, each with where it comes from: a file, or an override."""
    found: list[tuple[str, str]] = []
    for problem in _joined(error.errors()):
        where = ".".join(str(part) for part in problem["loc"])
        path = f"{where.replace('-', '_')}."

        def sets(keys: Sequence[str], path: str = path) -> bool:
            # a problem of a table or section may come from a key in it
            options = [f"{key.replace('-', '_')}." for key in keys]
            return any(path.startswith(option) or option.startswith(path) for option in options)

        found.append((_blamed(file, laid, sets), _sentence(problem, where)))
    return _by_source(found)


def _joined(problems: Iterable[Any]) -> list[dict[str, Any]]:
    """A value that fits none of several types as one problem, at the setting itself."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for problem in problems:
        location = problem["loc"]
        parent = [str(part) for part in location[:-1]]
        if len(parent) > 1 and not isinstance(location[-1], int) and _is_union(_annotation_at(parent)):
            location = location[:-1]  # the last part names the type that was tried
        key = tuple(map(str, location))
        if key in found and found[key]["input"] == problem["input"]:
            found[key]["msg"] += f" or {problem['msg'].removeprefix('Input should be ')}"
        else:
            found[(*key, str(len(found))) if key in found else key] = {**problem, "loc": location}
    return list(found.values())


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, UnionType)


def _blamed(file: str, laid: Laid, sets: Callable[[Sequence[str]], bool]) -> str:
    """The last source that sets what a problem is about; else the first file."""
    return next((source for source, keys in reversed(laid) if sets(keys)), file)


def _by_source(problems: Iterable[tuple[str, str]]) -> str:
    """Sentences, each with the source to blame, by these sources."""
    found: dict[str, list[str]] = {}
    for source, sentence in problems:
        found.setdefault(source, []).append(sentence)
    return "; ".join(f"{source}: {'; '.join(sentences)}" for source, sentences in found.items())


def _setting_of(key: str) -> str:
    """The setting that an override changes; of a key in a free table (data.args.count), the table."""
    parts = key.replace("-", "_").split(".")
    for length in range(1, len(parts)):
        annotation = _annotation_at(parts[:length])
        is_named = get_origin(annotation) is dict and _is_section(get_args(annotation)[1])
        if not (_is_section(annotation) or is_named):
            return ".".join(parts[:length])
    return ".".join(parts)


def _mentions(text: str, keys: Iterable[str]) -> bool:
    """Whether a sentence is about one of these settings."""
    return any(re.search(rf"(?<![\w.]){re.escape(key)}(?![\w.]*\w)", text) for key in keys)


def _sentence(problem: Any, where: str) -> str:
    if problem["type"] == "extra_forbidden":
        return f'unknown key "{where}"{_nearest_key(problem["loc"])}'
    if problem["type"] == "value_error":
        return f"{where + ': ' if where else ''}{problem['msg'].removeprefix('Value error, ')}"
    return f"{where}: {problem['msg'][0].lower() + problem['msg'][1:]}, got {problem['input']!r}"


def _nearest_key(location: tuple[int | str, ...]) -> str:
    section = _annotation_at([str(part) for part in location[:-1]])
    known = list(section.model_fields) if _is_section(section) else []
    close = nearest(str(location[-1]), known)
    if close:
        return close
    elsewhere = [path for path, _ in field_paths() if path.rsplit(".", 1)[-1] == location[-1]]
    if elsewhere:
        return f' (did you mean "{elsewhere[0]}"?)'
    return f"; known here: {', '.join(known)}" if known else ""


def _annotation_at(path: Sequence[str]) -> Any:
    """What the configuration wants at a path: a section, a type, or Any where it does not say."""
    found: Any = RunConfig
    for part in path:
        if _is_section(found):
            field = found.model_fields.get(part) or found.model_fields.get(part.replace("-", "_"))
            found = field.annotation if field else Any
        else:
            found = get_args(found)[1] if get_origin(found) is dict else Any
        if _is_union(found):
            found = next((option for option in get_args(found) if _is_section(option)), found)
    return found


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)
