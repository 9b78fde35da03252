"""Combinations that make no sense fail at start-up, and say what to do instead."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from headrace.combinations import check_combinations
from headrace.config import RunConfig
from headrace.errors import ConfigError
from headrace.runfile import build_config

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("grpo alone in its group", {"rollout": {"group_size": 1}}, "group_size must be at least 2 for grpo, got 1"),
    (
        "a role's estimator alone in its group",
        {
            "rollout": {"group_size": 1},
            "algorithm": {"estimator": "reinforce", "roles": {"judge": {"estimator": "rloo"}}},
        },
        "at least 2 for rloo",
    ),
    ("greedy rollouts", {"rollout": {"temperature": 0}}, "temperature must be above 0"),
    ("more trajectories than rollouts", {"filters": {"min_trajectories": 9}}, "more than rollout.group_size 8"),
    ("pass@k of the whole group", {"algorithm": {"estimator": "pkpo", "pass_k": 8}}, "lower pass_k"),
    ("dpo with one rollout", {"algorithm": {"objective": "dpo"}, "rollout": {"group_size": 1}}, "raise it to 2"),
    (
        "dpo with precomputed advantages",
        {"algorithm": {"objective": "dpo", "use_precomputed_advantage": True}},
        "uses no advantages",
    ),
    (
        "dpo with a correction",
        {"algorithm": {"objective": "dpo", "proximal": "recompute", "correction": {"name": "tis"}}},
        "does nothing with objective dpo",
    ),
    (
        "dpo with an estimator",
        {"algorithm": {"objective": "dpo", "estimator": "rloo"}},
        "does nothing with objective dpo",
    ),
    ("dpo with kl", {"algorithm": {"objective": "dpo", "kl": {"coef": 0.1}}}, "set dpo.beta instead"),
    ("the dpo loss without pairs", {"algorithm": {"loss": "dpo"}}, 'set algorithm.objective = "dpo"'),
    ("dpo settings without dpo", {"dpo": {"beta": 0.2}}, "does nothing unless"),
    ("tis without old log-probabilities", {"algorithm": {"correction": {"name": "tis"}}}, '"recompute"'),
    (
        "bounds the wrong way round",
        {"algorithm": {"proximal": "recompute", "correction": {"name": "icepop", "low": 3.0}}},
        "must be below",
    ),
    (
        "a sequence level that icepop does not have",
        {"algorithm": {"proximal": "recompute", "correction": {"name": "icepop", "level": "sequence"}}},
        "is for tis",
    ),
    ("gae without a value head", {"algorithm": {"estimator": "gae"}}, "set algorithm.value_head = true"),
    ("a value head without gae", {"algorithm": {"value_head": True}}, "does nothing without estimator"),
    ("dual clip that no loss reads", {"algorithm": {"loss": "cispo", "dual_clip": 3.0}}, "read by loss ppo_clip, gspo"),
    ("delta that no loss reads", {"algorithm": {"dppo_delta": 0.1}}, "read by loss dppo_tv, dppo_kl"),
    (
        "std that no estimator reads",
        {"algorithm": {"estimator": "rloo", "normalize_by_std": False}},
        "read by estimator",
    ),
    ("sft with a loss", {"algorithm": {"objective": "sft", "loss": "cispo"}}, "does nothing with objective sft"),
    ("an sft term without demonstrations", {"sft": {"coef": 0.1}}, "name where the demonstrations come from"),
    ("an sft section that is off", {"sft": {"batch_size": 4}}, "while sft.coef is 0"),
    ("sft mixed into sft", {"algorithm": {"objective": "sft"}, "sft": {"coef": 1.0, "tasks": "x"}}, "use \\[data\\]"),
    (
        "a teacher that nobody asks",
        {"distill": {"coef": 2.0}},
        "of your own under self_distill",
    ),
    (
        "refreshing a teacher of its own",
        {"algorithm": {"estimator": "distill"}, "distill": {"teacher": "./t", "refresh_every": 2}},
        "refresh_every",
    ),
]


@pytest.mark.parametrize(("values", "remedy"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_nonsense_is_refused_with_a_remedy(values: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        build_config(values)


@pytest.mark.parametrize(("values", "remedy"), [row[1:] for row in REFUSED[:1]])
def test_a_configuration_made_in_python_is_checked_too(values: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        check_combinations(RunConfig.model_validate(values))


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"rollout": {"group_size": 1}, "algorithm": {"estimator": "reinforce"}},
        {"rollout": {"group_size": 1}, "algorithm": {"objective": "sft"}},
        {"rollout": {"group_size": 1}, "algorithm": {"objective": "dpo"}, "workflow": {"name": "preference"}},
        {"algorithm": {"proximal": "recompute", "correction": {"name": "tis", "level": "sequence"}}},
        {"algorithm": {"estimator": "gae", "value_head": True, "gamma": 0.9}},
        {"algorithm": {"loss": "my_losses.py:own", "dual_clip": 3.0}},
    ],
)
def test_what_makes_sense_passes(values: dict[str, Any]) -> None:
    build_config(values)


def test_a_written_configuration_reads_back_without_complaint() -> None:
    config = build_config({"algorithm": {"objective": "dpo"}, "dpo": {"beta": 0.2}})
    check_combinations(RunConfig.model_validate_json(config.model_dump_json()))


def test_per_step_mode_warns_and_names_the_grouping_hook() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        build_config({"algorithm": {"advantage_mode": "per_step"}})
    assert [w.category for w in caught] == [DeprecationWarning] and "by_step" in str(caught[0].message)
