"""Names to objects: `(kind, name)` is looked up here, then in entry points, then as `"module:object"`.

Nothing is imported until it is asked for, so heavy packages load only when a run uses them.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from headrace.errors import ConfigError, MissingExtraError, install_line
from headrace.utils.usercode import contained

if TYPE_CHECKING:
    from headrace.algorithms.facts import (
        BackendFacts,
        CorrectionFacts,
        EstimatorFacts,
        KlFacts,
        LossFacts,
        ObjectiveFacts,
    )

_BUILTIN: dict[str, dict[str, str]] = {
    "backend": {
        "local": "headrace.backends.local.backend:LocalBackend",
        "fsdp": "headrace.backends.fsdp.backend:FsdpBackend",
        "tinker": "headrace.backends.tinker.backend:TinkerBackend",
        "verl": "headrace.backends.verl.backend:VerlBackend",
    },
    "engine": {
        "torch": "headrace.engines.builtin:torch_engine",
        "sglang": "headrace.engines.sglang.factory:sglang_engine",
        "vllm": "headrace.engines.vllm.factory:vllm_engine",
        "tinker": "headrace.backends.tinker.factory:tinker_engine",
    },
    "workflow": {
        "single_turn": "headrace.rollout.workflow:single_turn",
        "demonstration": "headrace.rollout.workflow:demonstration",
        "preference": "headrace.rollout.workflow:preference",
        "chat_loop": "headrace.rollout.chat_loop:ChatLoop",
        "tool_agent": "headrace.rollout.tools:ToolAgent",
        "environment": "headrace.rollout.environment:EnvironmentLoop",
        "external_agent": "headrace.rollout.gateway.external:ExternalAgent",
    },
    "grouping": {"by_step": "headrace.scheduling.buffer:group_by_step"},
    "judger": {
        "countdown": "headrace.judge.countdown:CountdownJudger",
        "exact": "headrace.judge.text:ExactJudger",
        "numeric": "headrace.judge.text:NumericJudger",
        "choice": "headrace.judge.text:ChoiceJudger",
        "f1": "headrace.judge.text:F1Judger",
        "regex": "headrace.judge.text:RegexJudger",
        "math": "headrace.judge.math:MathJudger",
        "code": "headrace.judge.code:CodeJudger",
        "sum": "headrace.judge.compose:WeightedSum",
        "overlong": "headrace.judge.compose:OverlongPenalty",
        "reasoning_gym": "headrace.judge.reasoning_gym:ReasoningGymJudger",
        "llm": "headrace.judge.llm:LLMJudger",
        "remote": "headrace.judge.remote:RemoteJudger",
        "verl_reward": "headrace.judge.verl_reward:VerlReward",
    },
    "tasks": {
        "countdown": "headrace.data.sources.countdown:countdown_tasks",
        "countdown_demonstrations": "headrace.data.sources.countdown:countdown_demonstrations",
    },
    "reader": {
        "jsonl": "headrace.data.sources.read:read_jsonl",
        "parquet": "headrace.data.sources.parquet:read_parquet",
        "huggingface": "headrace.data.sources.huggingface:read_dataset",
        "reasoning_gym": "headrace.data.sources.reasoning_gym:read_problems",
    },
    "objective": {
        "rl": "headrace.algorithms.objectives:AdvantageObjective",
        "sft": "headrace.algorithms.objectives:AdvantageObjective",
        "dpo": "headrace.algorithms.objectives:PreferenceObjective",
    },
    "staleness": {
        "count": "headrace.scheduling.staleness:Count",
        "drop": "headrace.scheduling.staleness:Drop",
        "wait": "headrace.scheduling.staleness:Wait",
        "mask": "headrace.scheduling.staleness:Mask",
        "trust": "headrace.scheduling.staleness:Trust",
    },
    "estimator": {
        "grpo": "headrace.algorithms.advantages.estimators:grpo",
        "rloo": "headrace.algorithms.advantages.estimators:rloo",
        "reinforce": "headrace.algorithms.advantages.estimators:reinforce",
        "reinforce_plus_plus_baseline": "headrace.algorithms.advantages.estimators:reinforce_plus_plus_baseline",
        "prpo": "headrace.algorithms.advantages.estimators:prpo",
        "maxrl": "headrace.algorithms.advantages.estimators:maxrl",
        "pkpo": "headrace.algorithms.advantages.estimators:pkpo",
        "opo": "headrace.algorithms.advantages.estimators:opo",
        "gae": "headrace.algorithms.advantages.gae:terminal_reward",
        "distill": "headrace.algorithms.distill:from_teacher",
        "constant": "headrace.algorithms.advantages.estimators:constant",
    },
    "loss": {
        "ppo_clip": "headrace.algorithms.losses:ppo_clip",
        "importance_sampling": "headrace.algorithms.losses:importance_sampling",
        "reinforce": "headrace.algorithms.losses:reinforce",
        "cispo": "headrace.algorithms.losses:cispo",
        "gspo": "headrace.algorithms.losses:gspo",
        "dppo_tv": "headrace.algorithms.losses:dppo_tv",
        "dppo_kl": "headrace.algorithms.losses:dppo_kl",
        "cross_entropy": "headrace.algorithms.losses:cross_entropy",
        "dpo": "headrace.algorithms.losses:dpo",
    },
    "tracker": {
        "console": "headrace.tracking.console:ConsoleTracker",
        "jsonl": "headrace.tracking.jsonl:JsonlTracker",
        "tensorboard": "headrace.tracking.tensorboard:TensorBoardTracker",
        "wandb": "headrace.tracking.wandb:new_tracker",
        "mlflow": "headrace.tracking.mlflow:new_tracker",
        "trackio": "headrace.tracking.trackio:new_tracker",
    },
}

# What to install when a leaf module's import fails, by the top-level package that is missing.
_EXTRA_OF_PACKAGE = {
    "torch": "local",
    "transformers": "local",
    "safetensors": "local",
    "tokenizers": "local",
    "peft": "local",
    "gguf": "gguf",
    "matplotlib": "plot",
    "pyarrow": "parquet",
    "datasets": "datasets",
    "reasoning_gym": "reasoning-gym",
    "mcp": "mcp",
    "math_verify": "math",
    "httpx2": "remote",
    "starlette": "gateway",
    "uvicorn": "gateway",
    "google": "serve",  # protobuf
    "tinker": "tinker",
    "ray": "ray",
    "verl": "verl",
    "tensordict": "verl",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "trackio": "trackio",
    "yaml": "local",
}

# Names of the form "scheme:module:object": who makes what they stand for out of "module:object".
_SCHEMES = {("workflow", "verl"): "headrace.verl.loading:agent_loop_workflow"}

_FACTS = "headrace.algorithms.facts"

_registered: dict[tuple[str, str], Any] = {}


def register(kind: str, name: str, target: Any) -> None:
    """Make `name` mean `target` (an object or `"module:object"`) for this process."""
    _registered[kind, name] = target


def builtin(kind: str) -> dict[str, str]:
    """What Headrace itself brings for `kind`: name to "module:object"."""
    return dict(_BUILTIN[kind])


def names(kind: str) -> list[str]:
    """Every name known for `kind`, sorted."""
    found = set(_BUILTIN.get(kind, {})) | {name for k, name in _registered if k == kind}
    found |= {point.name for point in entry_points(group=f"headrace.{kind}")}
    return sorted(found)


def resolve(kind: str, name: str) -> Any:
    """The object that `name` stands for; `"package.module:object"` and `"file.py:object"` work for every kind."""
    if (kind, name) in _registered:
        target = _registered[kind, name]
        return load_object(target) if isinstance(target, str) else target
    if name in _BUILTIN.get(kind, {}):
        return load_object(_BUILTIN[kind][name])
    for point in entry_points(group=f"headrace.{kind}"):
        if point.name == name:
            return point.load()
    scheme, _, path = name.partition(":")
    if ":" in path and (kind, scheme) in _SCHEMES:
        return load_object(_SCHEMES[kind, scheme])(path)
    if ":" in name:
        return load_object(name)
    raise ConfigError(
        f'unknown {kind} "{name}"{nearest(name, names(kind))}; known: {", ".join(names(kind))}, '
        f'or your own as "module:object"'
    )


@overload
def facts(kind: Literal["estimator"], name: str) -> EstimatorFacts: ...
@overload
def facts(kind: Literal["loss"], name: str) -> LossFacts: ...
@overload
def facts(kind: Literal["correction"], name: str) -> CorrectionFacts: ...
@overload
def facts(kind: Literal["kl"], name: str) -> KlFacts: ...
@overload
def facts(kind: Literal["objective"], name: str) -> ObjectiveFacts: ...
@overload
def facts(kind: Literal["backend"], name: str) -> BackendFacts: ...
def facts(kind: str, name: str) -> Any:
    """What is declared of an algorithm, in `algorithms/facts.py` or by the object itself.

    Nothing is imported for it: an object whose module is not loaded yet counts as one that declares nothing.
    """
    declared = importlib.import_module(_FACTS)  # by name: it is a layer above, and imports nothing itself
    if (kind, name) not in _registered:
        ours = next((ours for ours, path in _BUILTIN.get(kind, {}).items() if path == name), name)
        if ours in declared.FACTS[kind]:
            return declared.FACTS[kind][ours]
    return getattr(_loaded(kind, name), "facts", None) or declared.UNDECLARED[kind]


def is_loaded(kind: str, name: str) -> bool:
    """Whether what `name` stands for is Headrace's own, or of a module that is loaded: its facts are known."""
    return name in _BUILTIN[kind] or _loaded(kind, name) is not None


def _loaded(kind: str, name: str) -> Any:
    """The object that `name` stands for, if its module is loaded; else None."""
    target = _registered.get((kind, name), name)
    if target == name and ":" not in name:
        target = next((point.value for point in entry_points(group=f"headrace.{kind}", name=name)), name)
    if not isinstance(target, str):
        return target
    module_name, _, attribute = target.rpartition(":")
    if module_name.endswith(".py"):
        module_name = _module_name(Path(module_name))
    found: Any = sys.modules.get(module_name)
    for part in attribute.split("."):
        found = getattr(found, part, None)
    return found


def call_with(target: Callable[..., Any], args: Mapping[str, Any], what: str) -> Any:
    """Call what a run file names with the arguments that it gives; `what` names it where they do not fit."""
    check_call(target, args, what)
    with contained(what):
        return target(**args)


def check_call(target: Callable[..., Any], args: Mapping[str, Any], what: str) -> None:
    """Refuse arguments that do not fit, before anything is called."""
    signature = _signature(target)
    try:
        if signature is not None:
            signature.bind(**args)
    except TypeError as error:
        named = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        known = (
            [name for name, parameter in signature.parameters.items() if parameter.kind in named] if signature else []
        )
        meant = "".join(nearest(name, known) for name in args if name not in known)
        takes = f"it takes {', '.join(known)}" if known else "it takes none"
        raise ConfigError(f"{what} cannot be called with the arguments {dict(args)}: {error}{meant}; {takes}") from None


def require_parameters(target: Callable[..., Any], names: Sequence[str], what: str) -> None:
    """Refuse a user's function that cannot be called with so many values."""
    signature = _signature(target)
    try:
        if signature is not None:
            signature.bind(*names)
    except TypeError as error:
        name = getattr(target, "__name__", repr(target))
        given = ", ".join(names)
        raise ConfigError(f'{what} is called with ({given}), which "{name}" does not take: {error}') from None


def _signature(target: Callable[..., Any]) -> inspect.Signature | None:
    """The signature; None for C code without one: a wrong call will fail by itself."""
    try:
        return inspect.signature(target)
    except ValueError:
        return None


def nearest(word: str, known: Iterable[str]) -> str:
    """` (did you mean "x"?)` for the closest known word, or nothing."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f' (did you mean "{close[0]}"?)' if close else ""


def load_object(path: str) -> Any:
    """Import `"package.module:attribute"` or `"path/to/file.py:attribute"`."""
    module_name, _, attribute = path.rpartition(":")
    if not module_name or not attribute:
        raise ConfigError(f'"{path}" is not of the form "module:object" or "file.py:object"')
    module = _load_file(Path(module_name)) if module_name.endswith(".py") else _import(module_name)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            public = [n for n in dir(module) if not n.startswith("_")]
            raise ConfigError(f'"{module_name}" has no "{attribute}"{nearest(attribute, public)}')
        found = getattr(found, part)
    return found


def _import(module_name: str) -> Any:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # a console script does not have the user's folder on its path
    try:
        with contained(f'the import of "{module_name}"'):
            return importlib.import_module(module_name)
    except ModuleNotFoundError as missing:
        package = (missing.name or "").split(".")[0]
        if package in _EXTRA_OF_PACKAGE:
            extra = _EXTRA_OF_PACKAGE[package]
            raise MissingExtraError(
                f'"{package}" is not installed, which {module_name} needs; in the clone: {install_line(extra)}'
            ) from missing
        if module_name.startswith(package) and not module_name.startswith("headrace"):
            raise ConfigError(f'cannot import "{module_name}": there is no module "{missing.name}"') from missing
        raise


def _module_name(path: Path) -> str:
    return f"headrace_user_{path.stem}"


def _load_file(path: Path) -> Any:
    path = path.resolve()
    if not path.is_file():
        raise ConfigError(f"there is no file {path}")
    name = _module_name(path)
    if name in sys.modules and getattr(sys.modules[name], "__file__", None) == str(path):
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before exec: dataclasses and pickling look the module up by name
    try:
        with contained(f"the import of {path}"):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
