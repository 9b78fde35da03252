"""What holds for every setting of every section, so that a new one cannot be forgotten."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import numpy as np
import pytest
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from headrace import Callback, Model, Task, UnifiedTrainer
from headrace.cli.main import run
from headrace.config import RunConfig, Section, SourceSection
from headrace.config.effect import idle_settings
from headrace.config.loading import build_config, field_paths
from headrace.errors import ConfigError

NAMED = {"eval.sets": {"tasks": "countdown"}, "data.mixture": {"tasks": "countdown"}, "algorithm.roles": {}}
"""Tables of named sections, with the least that one needs."""


def every_setting() -> dict[str, FieldInfo]:
    """Key to field; settings of named sections under the name "x"."""
    found: dict[str, FieldInfo] = {}
    for path, field in field_paths():
        inner = get_args(field.annotation)
        if inner and isinstance(inner[-1], type) and issubclass(inner[-1], BaseModel):
            found |= {f"{path}.x.{key}": own for key, own in field_paths(inner[-1])}
        else:
            found[path] = field
    return found


SETTINGS = every_setting()


def nested(key: str, value: Any, bare: bool = False) -> dict[str, Any]:
    """The values of a run file in which `key` is `value`; `bare` leaves out what else its section needs."""
    values: dict[str, Any] = {}
    section = values
    *parents, last = key.split(".")
    for done in range(len(parents)):
        path = ".".join(parents[:done])
        section = section.setdefault(parents[done], {} if bare else dict(NAMED.get(path, {})))
    section[last] = value
    return values


def kinds(field: FieldInfo) -> set[Any]:
    return {field.annotation, *get_args(field.annotation)}


NUMBERS = [key for key, field in SETTINGS.items() if kinds(field) & {int, float}]


def refused(key: str, value: Any) -> bool:
    try:
        RunConfig.model_validate(nested(key, value))
    except ValidationError as error:
        return any(".".join(map(str, problem["loc"])).startswith(key) for problem in error.errors())
    return False


@pytest.mark.parametrize("value", [True, False, float("inf"), float("-inf"), float("nan"), 10**30, -(10**30)], ids=str)
def test_no_number_can_be_a_truth_value_infinite_or_absurd(value: Any) -> None:
    assert len(NUMBERS) > 80
    assert [key for key in NUMBERS if not refused(key, value)] == []


@pytest.mark.parametrize("value", [0, 1, 1.0])
def test_no_truth_value_can_be_a_number(value: Any) -> None:
    switches = [key for key, field in SETTINGS.items() if bool in kinds(field)]
    assert len(switches) > 20
    assert [key for key in switches if not refused(key, value)] == []


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("run.name", "a/b", "run.name: must be the name of one folder, got 'a/b'; folders above it go into run.dir"),
        ("run.name", "..", "run.name: must be the name of one folder"),
        ("run.name", "", "run.name: must be the name of one folder"),
        ("run.name", "x" * 300, "run.name: is longer than the 200 bytes"),
        ("run.dir", "a\0b", "run.dir: must be a path"),
        ("run.seed", 2**63, "run.seed: input should be less than 9223372036854775808"),
        ("optimizer.betas", [0.9, 1], "optimizer.betas.1: input should be less than 1, got 1"),
        ("optimizer.betas", [False, 0.9], "optimizer.betas.0: input should be a valid number, got False"),
        ("optimizer.betas", [-0.1, 0.9], "optimizer.betas.0: input should be greater than or equal to 0"),
        ("rollout.group_size", 100_000_000, "rollout.group_size: input should be less than or equal to 4096"),
        ("trainer.steps", True, "trainer.steps: must be a number, got true"),
        ("trainer.steps", np.bool_(True), "trainer.steps: must be a number, got true"),
        ("optimizer.lr", np.bool_(True), "optimizer.lr: must be a number, got true"),
        ("run.deterministic", np.int64(1), "run.deterministic: must be true or false, got 1"),
        ("optimizer.lr", 1e-320, "optimizer.lr: is too close to 0 to have an effect, got"),
        ("algorithm.kl.coef", 1e-300, "algorithm.kl.coef: is too close to 0 to have an effect, got 1e-300"),
        ("rollout.temperature", 1e-5, "rollout.temperature: must be 0 (greedy) or at least 0.0001, got 1e-05"),
        ("eval.sets.x.temperature", 1e-5, "eval.sets.x.temperature: must be 0 (greedy) or at least 0.0001, got 1e-05"),
        ("model.device", "cpu:3", 'write "cpu" instead of "cpu:3"'),
    ],
)
def test_a_mistake_is_a_sentence(key: str, value: Any, says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        build_config(nested(key, value))
    assert says in str(raised.value)


# ---- settings without effect -----------------------------------------------------------------------------------------

SET = {"tasks": "countdown"}
RUNS: list[dict[str, Any]] = [
    {},
    {"algorithm": {"objective": "sft"}},
    {"algorithm": {"objective": "dpo"}},
    {"algorithm": {"objective": "dpo"}, "dpo": {"min_reward_gap": 0.5}},
    {"algorithm": {"objective": "dpo"}, "workflow": {"name": "preference"}},
    {"backend": {"name": "tinker"}},
    {"backend": {"name": "tinker"}, "tinker": {"model": "theirs"}, "trainer": {"max_staleness": 2}},
    {"backend": {"name": "tinker"}, "tinker": {"state": "tinker://a/weights/b"}, "trainer": {"max_staleness": 2}},
    {"model": {"lora": {"rank": 4, "dropout": 0.1}}},
    {"model": {"device": "cuda:1", "dtype": "bfloat16"}},
    {"model": {"device": "cpu"}, "backend": {"gradient_checkpointing": True}},
    {"engine": {"name": "vllm"}, "backend": {"routing_replay": True}},
    {"trainer": {"max_staleness": 2, "placement": "separate", "save_every": 2, "keep_best": 1}},
    {"trainer": {"max_staleness": 2, "staleness": "count", "save_every_s": 0}},
    {"run": {"deterministic": True}, "ledger": {"enabled": False}},
    {"optimizer": {"schedule": "cosine", "warmup_steps": 3}},
    {"rollout": {"group_size": 1}, "algorithm": {"estimator": "distill"}},
    {"algorithm": {"estimator": "distill", "kl": {"coef": 0.1}}},
    {"algorithm": {"estimator": "distill"}, "distill": {"teacher": "./other"}},
    {"algorithm": {"estimator": "gae", "loss": "dppo_tv", "kl": {"coef": 0.1}}},
    {"algorithm": {"estimator": "pkpo", "aggregation": "constant", "loss": "importance_sampling"}},
    {"algorithm": {"roles": {"x": {"train": False}}}, "workflow": {"name": "mine.py:run"}},
    {"algorithm": {"correction": {"name": "tis"}}},
    {"algorithm": {"correction": {"name": "veto"}}},
    {"sft": {"coef": 0.1}},
    {"track": {"trackers": ["wandb"]}},
    {"track": {"trackers": ["wandb"], "episodes": 0}},
    {"track": {"trackers": ["jsonl"]}},
    {"workflow": {"name": "mine.py:run", "judger": "exact"}},
    {"data": {"mixture": {"y": SET}, "curriculum": {"target": 0.5}}, "filters": {"drop_uniform": True}},
    {"eval": {"sets": {"x": {"tasks": "holdout", "temperature": 1.0}}}},
    {"eval": {"sets": {"x": {"tasks": "countdown", "workflow": "mine.py:run", "judger": "exact"}}}},
    {"simulate": {"from_run": "runs/x", "slow_share": 0.1}},
    {"simulate": {"slow_share": 0.1}},
    {"simulate": {"fleet": {"weights_gb": 1.0, "mtbf_h": 5.0, "transport": "file"}}},
    {"workflow": {"name": "environment"}},
    {"workflow": {"name": "tool_agent"}, "rollout": {"max_tool_calls": 2}},
    {"workflow": {"name": "tool_agent"}, "rollout": {"max_tool_calls": 2, "max_episode_tokens": 100}},
    {"trainer": {"max_staleness": 2, "partial_rollouts": False}},
    {"trainer": {"save_every_s": 0, "save_last": False}},
    {"data": {"tasks": "rows.jsonl"}},
    {"data": {"mixture": {"x": {"tasks": "rows.jsonl"}, "y": SET}}},
    {"eval": {"sets": {"x": {"tasks": "rows.jsonl"}}}},
    {"eval": {"before": False, "after": False, "sets": {"x": SET}}},
    {"engine": {"name": "vllm"}, "workflow": {"name": "environment"}},
    {"engine": {"name": "vllm", "urls": ["http://127.0.0.1:8000"]}},
    {"judge": {"placement": "ray"}, "cluster": {"address": "auto"}, "workflow": {"judger": "exact"}},
    {"backend": {"name": "mine.py:Backend"}, "cluster": {"address": "auto"}},
    {
        "engine": {"name": "vllm"},
        "trainer": {"placement": "separate"},
        "cluster": {"address": "auto", "engine": {"CPU": 1}},
    },
    {"backend": {"name": "fsdp"}, "trainer": {"placement": "separate"}, "cluster": {"address": "auto"}},
    {"backend": {"name": "verl", "gradient_checkpointing": True}, "model": {"lora": {"rank": 4}}},
    {"backend": {"name": "mine.py:Backend"}, "judge": {"placement": "ray"}},
]
"""Between them, every condition of every setting holds in one and does not in another."""

VALUES: dict[str, Any] = {
    "backend.ranks": 2, "backend.verl": {"engine": {"forward_prefetch": True}},
    "run.name": "other", "judge.routes": {"*": {"name": "exact"}}, "optimizer.betas": [0.8, 0.9],
    "data.columns": {"id": "a"},
    "eval.sets.x.columns": {"id": "a"}, "data.mixture.x.columns": {"id": "a"}, "simulate.grid": {"run.seed": [1]},
    "gateway.host": "127.0.0.2", "gateway.token": "$NAME",
    "algorithm.roles.x.estimator": "grpo", "algorithm.roles.x.loss": "gspo",
    "filters.drop_terminations": ["length", "turns", "tools", "tokens", "timeout"], "workflow.grouping": "by_step",
    "rollout.max_episode_tokens": 1000, "model.device": "cuda", "engine.server_env": {"A": "b"},
    "engine.urls": ["http://127.0.0.1:8001"], "cluster.address": "auto", "launch.slurm.options": ["--exclusive"],
    "launch.k8s.mount": "/data", "launch.ray.address": "http://head:8265",
    "cluster.learner": {"GPU": 1}, "cluster.judger": {"CPU": 2}, "cluster.engine": {"CPU": 2}, "launch.hours": 3,
    "cluster.labels": {"pool": "a"}, "launch.k8s.node_selector": {"pool": "a"},
}  # fmt: skip
"""Values for settings whose type does not say enough."""


def another_value(key: str, field: FieldInfo) -> Any:
    """A value that is allowed and not the default."""
    if key in VALUES:
        return VALUES[key]
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    options = kinds(field)
    if bool in options:
        return not default
    if options & {int, float}:
        lowest = max((getattr(rule, "ge", getattr(rule, "gt", 0)) for rule in field.metadata), default=0)
        tries = [(default or 0) + 1, (default or 0) / 2, 0.5, 1, 2, lowest + 1]
        return next(value for value in tries if value != default and not refused(key, value))
    words = {
        word for option in options for word in (option, *get_args(option))
    }  # of a Literal, also of `Literal | None`
    if choices := [choice for choice in words if isinstance(choice, str) and choice != default]:
        return sorted(choices)[0]
    return {dict: {"a": 1}, tuple: ["a"]}.get(get_origin(field.annotation), "something")


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    both = {**base, **over}
    return {
        key: merged(base[key], value) if isinstance(value, dict) and isinstance(base.get(key), dict) else value
        for key, value in both.items()
    }


def declared(key: str) -> tuple[Any, ...] | None:
    """What the section of a setting declares for it."""
    section: Any = RunConfig
    *parents, last = key.split(".")
    for part in parents:
        if isinstance(section, type) and issubclass(section, BaseModel):
            section = section.model_fields[part].annotation
        else:
            section = get_args(section)[1]
    return section.effects.get(last)


def idle_in_runs(key: str, value: Any) -> Iterator[Any]:
    """Per run, the condition that does not hold when the setting is made, or None; runs that cannot be are left out."""
    for values in RUNS:
        try:
            config = RunConfig.model_validate(merged(merged(nested(key, value), values), nested(key, value, bare=True)))
        except ValidationError:
            continue
        yield next((idle.condition for idle in idle_settings(config, ()) if idle.key == key), None)


def test_every_setting_declares_when_it_has_effect() -> None:
    assert [key for key in SETTINGS if declared(key) is None] == []


def test_no_declaration_is_of_a_setting_that_is_not_there() -> None:
    for section in Section.__subclasses__() + SourceSection.__subclasses__():
        assert set(section.effects) <= set(section.model_fields), section


@pytest.mark.parametrize("key", SETTINGS)
def test_a_setting_is_refused_where_it_has_no_effect_and_accepted_where_it_has(key: str) -> None:
    missing = {None, *(declared(key) or ())}  # None: it has effect
    for spelled in dict.fromkeys((key, key.replace("roles.x.", "roles.agent."))):
        for found in idle_in_runs(spelled, another_value(key, SETTINGS[key])):
            missing -= {found}
            if not missing:
                return
    pytest.fail(f"no run in which: {[one.why if one else 'it has effect' for one in missing]}; add one to RUNS")


def test_a_setting_without_effect_is_named_with_value_reason_and_remedy() -> None:
    with pytest.raises(ConfigError) as raised:
        build_config({"trainer": {"partial_rollouts": False}})
    assert str(raised.value) == (
        "configuration: trainer.partial_rollouts = false has no effect: trainer.max_staleness is 0, so nothing is "
        "generated ahead of training; remove it, or raise trainer.max_staleness"
    )


USELESS: list[tuple[dict[str, Any], str]] = [
    ({"eval": {"before": False}}, "eval.before = false has no effect: there is no evaluation set"),
    (
        {"eval": {"before": False, "after": False, "sets": {"dev": SET}}},
        "eval.sets.dev.tasks = .* .* never evaluated; remove the set .--eval.sets={}., or set one of these",
    ),
    ({"algorithm": {"use_precomputed_advantage": True}}, 'workflow "single_turn" writes no advantages into its steps'),
    ({"workflow": {"grouping": "by_step"}}, 'an episode of workflow "single_turn" has one step'),
    ({"engine": {"kept_tokens": 0}}, "engine.kept_tokens = 0 has no effect: .* makes one model call per episode"),
    ({"filters": {"drop_terminations": ["turns"]}}, 'none ends with reason "turns"; remove "turns"'),
    ({"filters": {"drop_terminations": ["tools"]}}, 'no episode ends with reason "tools"'),
    ({"filters": {"drop_terminations": ["tokens"]}}, "rollout.max_episode_tokens is empty"),
    (
        {"engine": {"cache_on_publish": "recompute"}, "trainer": {"max_staleness": 1, "partial_rollouts": False}},
        "trainer.partial_rollouts is false, so no sequence is in flight",
    ),
    (
        {"ledger": {"keep_steps": 3}, "trainer": {"save_every_s": 0, "save_last": False}},
        "ledger.keep_steps = 3 has no effect: old episodes are removed when a checkpoint is saved",
    ),
    ({"rollout": {"max_episode_tokens": 257}}, "of at most rollout.max_tokens = 256 tokens"),
    ({"gateway": {"port": 8000}}, 'workflow "single_turn" opens no gateway'),
    ({"data": {"keep_columns": True}}, 'data.tasks = "countdown" generates tasks'),
    ({"data": {"tasks": "reasoning_gym:chain_sum", "on_bad_row": "skip"}}, "there are no bad rows"),
    ({"engine": {"health_every_s": 1.0}, "algorithm": {"objective": "sft"}}, "trains on given texts, not on rollouts"),
    (
        {"algorithm": {"roles": {"agent": {"train": False}}}},
        'algorithm.roles.agent.train = false leaves nothing to train: all trajectories of workflow "single_turn" have '
        'the role "agent"; remove it',
    ),
    (
        {"optimizer": {"warmup_steps": 1000}, "trainer": {"steps": 6}},
        "would never reach optimizer.lr",
    ),
    ({"optimizer": {"schedule": "cosine", "min_lr_ratio": 1}}, "never lowers the learning rate; lower the ratio"),
    ({"algorithm": {"clip_low": 5}}, "algorithm.clip_low must be at most 1, got 5"),
    (
        {"workflow": {"judger": "exact"}, "judge": {"routes": {"*": {"name": "exact"}}}},
        "both workflow.judger .* and judge.routes are set; keep one",
    ),
    ({"trainer": {"steps": 0}}, "trainer.steps: input should be greater than or equal to 1, got 0"),
]


@pytest.mark.parametrize(("values", "says"), USELESS)
def test_what_would_do_nothing_is_refused(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        build_config(values, objects=())


def test_rows_that_python_gives_may_have_columns_and_be_bad() -> None:
    given = {"data": {"keep_columns": True, "on_bad_row": "skip"}, "workflow": {"judger": "exact"}}
    rows = [{"instruction": "a", "level": 1}]
    UnifiedTrainer(given, tasks=rows)
    with pytest.raises(ConfigError, match=r"data\.keep_columns = true has no effect"):
        UnifiedTrainer(given)
    sets: dict[str, Any] = {"eval": {"sets": {"dev": {**SET, "keep_columns": True}}}, "workflow": {"judger": "exact"}}
    UnifiedTrainer(sets, eval_tasks={"dev": rows})
    with pytest.raises(ConfigError, match=r"eval\.sets\.dev\.keep_columns = true has no effect"):
        UnifiedTrainer(sets)


def test_a_callback_may_evaluate_a_set_that_nothing_else_does() -> None:
    never: dict[str, Any] = {"eval": {"before": False, "after": False, "sets": {"dev": SET}}}
    UnifiedTrainer({**never, "workflow": {"judger": "exact"}}, callbacks=[Callback()])
    with pytest.raises(ConfigError, match="the set is never evaluated"):
        UnifiedTrainer({**never, "workflow": {"judger": "exact"}})


def test_an_interval_longer_than_the_run_is_a_warning() -> None:
    values = {"trainer": {"steps": 2, "save_every": 20}, "eval": {"every": 10, "sets": {"dev": SET}}}
    with pytest.warns(UserWarning) as warned:
        UnifiedTrainer(values)
    assert [str(one.message) for one in warned] == [
        "trainer.save_every = 20 is above trainer.steps = 2: it saves no checkpoint on the way",
        "eval.every = 10 evaluates nothing before the end: the run has 2 steps",
    ]


def test_what_a_run_was_begun_with_is_accepted_when_it_is_resumed(tmp_path: Path) -> None:
    stored = {"workflow": {"grouping": "by_step"}, "run": {"dir": str(tmp_path), "name": "old"}}
    with pytest.raises(ConfigError, match="grouping"):
        build_config(stored, objects=())
    config = build_config(stored, [f"--run.resume={tmp_path / 'old'}"], objects=(), begun=True)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.json").write_text(json.dumps(stored))
    UnifiedTrainer(config)
    with pytest.raises(ConfigError, match=r"command line: engine\.kept_tokens"):
        build_config(stored, ["--engine.kept_tokens=5"], objects=(), begun=True)


def test_a_default_that_is_written_out_is_accepted() -> None:
    build_config(RunConfig().model_dump(mode="json"), objects=())


@pytest.mark.parametrize(
    ("values", "words", "says"),
    [
        ({}, ["--optimizer.min_lr_ratio=0.1"], "command line: optimizer.min_lr_ratio = 0.1"),
        ({"optimizer": {"min_lr_ratio": 0.1}}, [], "configuration: optimizer.min"),
        (
            {"trainer": {"staleness": "wait", "max_staleness": 1}},
            ["--trainer.max-staleness=0"],
            "command line: trainer.s",
        ),
        ({"optimizer": {"min_lr_ratio": 0.1}}, ["--optimizer.lr=0.1"], "configuration: optimizer.min"),
        ({}, ["--rollout.group_size", "1"], "command line: rollout.group_size must be at least 2"),
        (
            {"data": {"mixture": {"a": SET, "b": SET}}},
            ["--data.args.count=3"],
            'command line: data.args = {"count": 3} has no effect',
        ),
        ({}, ["--data.columns.foo=bar"], "command line: data.columns: a task has no field foo"),
        ({}, ["--gateway.host=0.0.0.0"], "command line: gateway: host"),
    ],
)
def test_what_an_override_does_is_blamed_on_it(values: dict[str, Any], words: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        build_config(values, words)
    assert str(raised.value).startswith(says)


def test_what_python_gives_as_objects_counts() -> None:
    config = build_config({"judge": {"retries": 5}, "rollout": {"max_turns": 3}})
    with pytest.raises(ConfigError, match=r"judge\.retries = 5 has no effect: there is no judger"):
        UnifiedTrainer(config)
    with pytest.raises(ConfigError, match=r"rollout\.max_turns = 3 has no effect") as raised:
        UnifiedTrainer(config, judger=lambda task, episode: 1.0)
    assert "judge.retries" not in str(raised.value)

    async def workflow(task: Task, model: Model) -> float:
        return 1.0

    UnifiedTrainer(config, workflow=workflow, judger=lambda task, episode: 1.0)


# ---- secrets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "section"),
    [
        ("gateway.token", {"workflow": {"name": "external_agent"}}),
        ("workflow.judger_args.api_key", {"workflow": {"judger": "llm"}}),
        ("workflow.args.environment.PASSWORD", {}),
        ("judge.routes.x.args.headers.Authorization", {}),
        ("eval.sets.x.judger_args.api_key", {"eval": {"sets": {"x": {"tasks": "countdown", "judger": "llm"}}}}),
    ],
)
def test_a_secret_is_refused_and_not_shown(key: str, section: dict[str, Any]) -> None:
    for values, words in (({}, [f"--{key}=hunter2"]), (nested(key, "hunter2"), [])):
        with pytest.raises(ConfigError) as raised:
            build_config(merged(section, values), words)
        assert key in str(raised.value) and "environment" in str(raised.value) and "hunter2" not in str(raised.value)
    stored = build_config(merged(section, nested(key, "$MY_SECRET"))).model_dump_json()
    assert "$MY_SECRET" in stored


# ---- names -----------------------------------------------------------------------------------------------------------


def test_a_dry_run_reports_every_wrong_name_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("raise RuntimeError('not today')\n")
    names = {
        "workflow.name": f"{broken}:run", "workflow.judger": "cuontdown", "algorithm.loss": "ppo_clpi",
        "algorithm.estimator": "gropo", "trainer.callbacks": "nowhere:Own", "track.trackers": "consle",
        "data.tasks": "missing.jsonl", "model.name": "./no/such/folder", "eval.metrics": "nowhere:metric",
        "eval.sets.x.tasks": "nowhere:tasks",
    }  # fmt: skip
    path = tmp_path / "run.toml"
    path.touch()
    assert run(["train", str(path), "--dry-run", *(f"--{key}={name}" for key, name in names.items())]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "not today" in said
    assert [key for key in names if key not in said] == []


def dry(tmp_path: Path, text: str, *words: str) -> int:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return run(["train", str(path), "--dry-run", f"--run-dir={tmp_path / 'r'}", *words])


def test_a_dry_run_checks_arguments_and_reports_problems_of_all_stages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own.py"
    own.write_text("class Agent:\n    def __init__(self, depth=1): ...\n    async def run(self, task, model): ...\n")
    folder = tmp_path / "r"
    (folder / "checkpoints" / "step_000003").mkdir(parents=True)
    stored = build_config({"run": {"name": "r", "dir": str(tmp_path)}, "rollout": {"group_size": 4}})
    (folder / "config.json").write_text(stored.model_dump_json())
    said = dry(
        tmp_path,
        f"""
        [workflow]
        name = "{own}:Agent"
        args = {{ dept = 2 }}
        judger = "exact"
        [judge.routes."*"]
        name = "exact"
        [eval.sets.x]
        tasks = "countdown"
        args = {{ cuont = 2 }}
        """,
        "--data.args.size=3", "--workflow.judger_args.nonsense=1",
    )  # fmt: skip
    err = capsys.readouterr().err
    assert said == 2 and err.count("\n") == 1
    for part in (
        "run.toml: both workflow.judger",
        'workflow.args: the workflow "', 'did you mean "depth"?',
        'data.args: the task source "countdown" cannot be called', "workflow.judger_args: the judger",
        'eval.sets.x.args: the task source "countdown"', 'did you mean "count"?',
        "was begun with other settings", "rollout.group_size: 4",
    ):  # fmt: skip
        assert part in err, part


def test_a_dry_run_says_what_would_become_of_the_run_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = '[workflow]\njudger = "exact"\n[trainer]\nsteps = 9\n'
    folder = tmp_path / "r"

    def said(*words: str) -> list[str]:
        before = sorted(path.name for path in tmp_path.rglob("*"))
        assert dry(tmp_path, text, *words) == 0
        assert before in ([], sorted(path.name for path in tmp_path.rglob("*")))
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith("# ")]

    dry(tmp_path, text)
    capsys.readouterr()
    assert said() == [f"# run directory: {folder}", "# starts a new run"]
    (folder / "checkpoints" / "step_000003").mkdir(parents=True)
    (folder / "checkpoints" / "step_000003" / "checkpoint.json").touch()
    (folder / "config.json").write_text(build_config({"workflow": {"judger": "exact"}}).model_dump_json())
    assert run(["train", str(tmp_path / "run.toml"), "--dry-run", f"--run-dir={folder}", "--trainer.steps=101"]) == 0
    assert "# resumes the run in it from step 3 of 101" in capsys.readouterr().out
    assert said("--run.resume=never")[0] == f"# run directory: {folder}-2"
    (folder / "finished").touch()
    assert said() == [f"# run directory: {folder}-2", "# starts a new run", "# r is finished; this run is r-2"]
    assert run(["train", "--resume", str(folder), "--dry-run"]) == 2
    assert "is finished after 100 steps" in capsys.readouterr().err
