"""Combinations that make no sense fail at start-up, and say what to do instead."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from headrace.config import RunConfig
from headrace.config.loading import build_config
from headrace.config.rules import check_settings
from headrace.errors import ConfigError

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
    (
        "a cut distribution, compared with the sampler",
        {"rollout": {"top_p": 0.9}},
        r'rollout.top_p = 0.9 cuts the distribution .*set rollout.top_p = 1, or set algorithm.proximal = "recompute"',
    ),
    (
        "a cut distribution, importance sampled",
        {"rollout": {"top_k": 20, "top_p": 0.5}, "algorithm": {"loss": "importance_sampling"}},
        "ratio of loss importance_sampling would be wrong; set rollout.top_p = 1 and rollout.top_k = 0",
    ),
    (
        "a cut distribution, corrected",
        {"rollout": {"top_k": 20}, "algorithm": {"proximal": "recompute", "correction": {"name": "tis"}}},
        "correction tis would be wrong",
    ),
    (
        "rounded weights, nothing corrected for",
        {"engine": {"weights": "int8"}, "algorithm": {"proximal": "recompute"}},
        'engine.weights = "int8" samples from another .*; set algorithm.correction.name = "tis", or algorithm.proximal',
    ),
    (
        "rounded weights, no ratio",
        {"engine": {"weights": "bfloat16"}, "algorithm": {"loss": "reinforce"}},
        'which loss reinforce does not correct for; use loss "importance_sampling", or set algorithm.correction.name',
    ),
    (
        "rounded weights, imitated",
        {"engine": {"weights": "int8"}, "algorithm": {"loss": "cross_entropy"}},
        "which loss cross_entropy does not correct for",
    ),
    (
        "rounded weights to the bit",
        {"engine": {"weights": "int8"}, "run": {"deterministic": True}},
        "against run.deterministic; remove one",
    ),
    (
        "rounded weights under adapters",
        {"engine": {"weights": "int8"}, "model": {"lora": {"rank": 4}}},
        "needs model.lora.rank = 0, got 4; change one of them",
    ),
    ("greedy rollouts", {"rollout": {"temperature": 0}}, "temperature must be above 0"),
    ("more trajectories than rollouts", {"filters": {"min_trajectories": 9}}, "lower it or raise rollout.group_size"),
    (
        "more trajectories than demonstrations",
        {"algorithm": {"objective": "sft"}, "filters": {"min_trajectories": 2}},
        "a group has 1: all would be dropped; lower it$",
    ),
    (
        "uniform demonstrations",
        {"algorithm": {"objective": "sft"}, "filters": {"drop_uniform": True}},
        "objective sft trains on given texts, not on rollouts; remove it",
    ),
    (
        "partly solved demonstrations",
        {"algorithm": {"objective": "sft"}, "filters": {"min_partial_tasks": 2}},
        "filters.min_partial_tasks .* objective sft",
    ),
    (
        "cut demonstrations",
        {"algorithm": {"objective": "sft"}, "filters": {"drop_terminations": ["length"]}},
        "filters.drop_terminations = .* has no effect",
    ),
    (
        "uniform groups of one",
        {"rollout": {"group_size": 1}, "algorithm": {"estimator": "reinforce"}, "filters": {"drop_uniform": True}},
        "filters.drop_uniform .* rollout.group_size is 1; remove it",
    ),
    (
        "partly solved groups of one",
        {"rollout": {"group_size": 1}, "algorithm": {"estimator": "reinforce"}, "filters": {"min_partial_tasks": 1}},
        "filters.min_partial_tasks .* rollout.group_size is 1; remove it",
    ),
    (
        "uniform groups that are distilled",
        {"algorithm": {"estimator": "distill"}, "filters": {"drop_uniform": True}},
        'estimator "distill" compares none; remove it',
    ),
    (
        "partly solved groups that are distilled",
        {"algorithm": {"estimator": "distill"}, "filters": {"min_partial_tasks": 1}},
        'estimator "distill" compares none; remove it',
    ),
    (
        "uniform pairs of a file",
        {"algorithm": {"objective": "dpo"}, "workflow": {"name": "preference"}, "filters": {"drop_uniform": True}},
        "filters.drop_uniform .* objective dpo trains on given texts",
    ),
    ("pass@k of the whole group", {"algorithm": {"estimator": "pkpo", "pass_k": 8}}, "lower pass_k"),
    ("dpo with one rollout", {"algorithm": {"objective": "dpo"}, "rollout": {"group_size": 1}}, "raise it to 2"),
    (
        "dpo with precomputed advantages",
        {"algorithm": {"objective": "dpo", "use_precomputed_advantage": True}},
        "use_precomputed_advantage = true has no effect: objective dpo",
    ),
    (
        "dpo with a correction",
        {"algorithm": {"objective": "dpo", "proximal": "recompute", "correction": {"name": "tis"}}},
        "has no effect: objective dpo does not read it",
    ),
    (
        "dpo with an estimator",
        {"algorithm": {"objective": "dpo", "estimator": "rloo"}},
        "has no effect: objective dpo does not read it",
    ),
    (
        "dpo with kl",
        {"algorithm": {"objective": "dpo", "kl": {"coef": 0.1}}},
        "algorithm.kl.coef = 0.1 .*; set dpo.beta",
    ),
    (
        "dpo with greedy rollouts",
        {"algorithm": {"objective": "dpo"}, "rollout": {"temperature": 0}},
        "temperature must be above 0",
    ),
    (
        "dpo with an sft term",
        {"algorithm": {"objective": "dpo"}, "sft": {"coef": 0.1, "tasks": "x"}},
        "sft.coef = 0.1 has no effect: objective dpo",
    ),
    (
        "dpo with a teacher",
        {"algorithm": {"objective": "dpo"}, "workflow": {"name": "mine.py:run"}, "distill": {"coef": 2.0}},
        "distill.coef = 2.0 has no effect: objective dpo",
    ),
    ("the dpo loss without pairs", {"algorithm": {"loss": "dpo"}}, 'set algorithm.objective = "dpo"'),
    ("dpo settings without dpo", {"dpo": {"beta": 0.2}}, "dpo.beta = 0.2 has no effect"),
    ("tis without old log-probabilities", {"algorithm": {"correction": {"name": "tis"}}}, '"recompute"'),
    (
        "bounds the wrong way round",
        {"algorithm": {"proximal": "recompute", "correction": {"name": "icepop", "low": 3.0}}},
        "must be below",
    ),
    (
        "a sequence level that icepop does not have",
        {"algorithm": {"proximal": "recompute", "correction": {"name": "icepop", "level": "sequence"}}},
        'correction.level = "sequence" has no effect: it is read by correction tis, not by "icepop"; remove it',
    ),
    (
        "a floor that tis does not have",
        {"algorithm": {"proximal": "recompute", "correction": {"name": "tis", "floor": 1e-3}}},
        'read by correction veto, not by "tis"',
    ),
    (
        "a lower bound that veto does not have",
        {"algorithm": {"proximal": "recompute", "correction": {"name": "veto", "low": 0.5}}},
        "correction.low = 0.5 has no effect: it is read by correction tis, icepop, sequence_mask",
    ),
    (
        "an upper bound that veto does not have",
        {"algorithm": {"proximal": "recompute", "correction": {"name": "veto", "high": 3.0}}},
        "correction.high = 3.0 has no effect: it is read by",
    ),
    ("a lower bound without a correction", {"algorithm": {"correction": {"low": 0.5}}}, 'not by "none"'),
    ("an upper bound without a correction", {"algorithm": {"correction": {"high": 3.0}}}, 'not by "none"'),
    ("a level without a correction", {"algorithm": {"correction": {"level": "sequence"}}}, 'not by "none"'),
    (
        "a floor without a correction",
        {"algorithm": {"correction": {"floor": 1e-3}}},
        "remove it, or set algorithm.correction.name",
    ),
    *(
        (
            f"old log-probabilities that {loss} does not read",
            {"algorithm": {"loss": loss, "proximal": "recompute"}},
            "algorithm.proximal = .* no chosen loss reads the learner's .*, and no correction is on; remove it",
        )
        for loss in ("importance_sampling", "reinforce", "dppo_tv", "dppo_kl", "cross_entropy")
    ),
    (
        "a length that no aggregation reads",
        {"algorithm": {"aggregation_length": 512}},
        'read by aggregation "constant", not by "token_mean"; remove it, or set',
    ),
    (
        "a kind of no divergence",
        {"algorithm": {"kl": {"kind": "k1"}}},
        'kl.kind = "k1" has no effect',
    ),
    ("a place of no divergence", {"algorithm": {"kl": {"where": "reward"}}}, 'kl.where = "reward" has no effect'),
    (
        "a divergence off rewards that a teacher does not read",
        {"algorithm": {"estimator": "distill", "kl": {"coef": 0.1, "where": "reward"}}},
        'which no chosen estimator reads; set algorithm.kl.where = "loss"',
    ),
    (
        "attempts that are all the same",
        {"eval": {"sets": {"dev": {"tasks": "countdown", "attempts": 4}}}},
        "raise eval.sets.dev.temperature, or set attempts = 1",
    ),
    ("gae without a value head", {"algorithm": {"estimator": "gae"}}, "set algorithm.value_head = true"),
    (
        "gae where there is no value head",
        {"algorithm": {"estimator": "gae"}, "backend": {"name": "tinker"}},
        'backend "tinker" has none; use another estimator',
    ),
    ("a value head without gae", {"algorithm": {"value_head": True}}, 'only estimator "gae" reads values'),
    ("dual clip that no loss reads", {"algorithm": {"loss": "cispo", "dual_clip": 3.0}}, "read by loss ppo_clip, gspo"),
    ("delta that no loss reads", {"algorithm": {"dppo_delta": 0.1}}, "read by loss dppo_tv, dppo_kl"),
    (
        "std that no estimator reads",
        {"algorithm": {"estimator": "rloo", "normalize_by_std": False}},
        "read by estimator",
    ),
    ("sft with a loss", {"algorithm": {"objective": "sft", "loss": "cispo"}}, "objective sft has a loss of its own"),
    ("an sft term without demonstrations", {"sft": {"coef": 0.1}}, "name where the demonstrations come from"),
    ("an sft section that is off", {"sft": {"batch_size": 4}}, "sft.batch_size = 4 has no effect: sft.coef is 0"),
    (
        "an sft section beside sft",
        {"algorithm": {"objective": "sft"}, "sft": {"tasks": "x"}},
        "the objective is sft already",
    ),
    (
        "sft mixed into sft",
        {"algorithm": {"objective": "sft"}, "sft": {"coef": 1.0, "tasks": "x"}},
        "from \\[data\\]",
    ),
    (
        "a teacher that nobody asks",
        {"distill": {"coef": 2.0}, "workflow": {"name": "tool_agent"}},
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


KNOBS = {
    "clip_low": 0.1,
    "clip_high": 0.3,
    "dual_clip": 3.0,
    "dppo_delta": 0.1,
    "pass_k": 3,
    "normalize_by_std": False,
    "gamma": 0.9,
    "gae_lambda": 0.9,
    "value_coef": 1.0,
    "proximal": "recompute",
}


@pytest.mark.parametrize("objective", ["sft", "dpo"])
@pytest.mark.parametrize("knob", KNOBS)
def test_a_knob_of_losses_and_estimators_is_refused_where_there_are_none(objective: str, knob: str) -> None:
    with pytest.raises(ConfigError, match=f"{knob} = .* has no effect: objective {objective} does not read it"):
        build_config({"algorithm": {"objective": objective, knob: KNOBS[knob]}})


@pytest.mark.parametrize(("values", "remedy"), [row[1:] for row in REFUSED[:1]])
def test_a_configuration_made_in_python_is_checked_too(values: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        check_settings(RunConfig.model_validate(values))


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"rollout": {"group_size": 1}, "algorithm": {"estimator": "reinforce"}},
        {"algorithm": {"objective": "dpo"}, "workflow": {"name": "preference"}},
        {"algorithm": {"proximal": "recompute", "correction": {"name": "tis", "level": "sequence"}}},
        {"algorithm": {"estimator": "gae", "value_head": True, "gamma": 0.9}},
        {"algorithm": {"loss": "my_losses.py:own", "dual_clip": 3.0}},
        {"algorithm": {"loss": "registered_elsewhere", "dual_clip": 3.0}},
        {"algorithm": {"loss": "my_losses.py:own", "proximal": "recompute"}},
        {"algorithm": {"loss": "gspo", "proximal": "recompute"}},
        {"algorithm": {"loss": "cispo", "proximal": "recompute"}},
        {"algorithm": {"loss": "reinforce", "proximal": "recompute", "roles": {"critic": {"loss": "ppo_clip"}}}},
        {"algorithm": {"loss": "importance_sampling", "proximal": "recompute", "correction": {"name": "tis"}}},
        {"algorithm": {"proximal": "recompute", "correction": {"name": "veto", "floor": 1e-3}}},
        {"algorithm": {"proximal": "recompute", "correction": {"name": "sequence_mask", "low": 0.5, "high": 1.5}}},
        {"algorithm": {"aggregation": "constant", "aggregation_length": 512}},
        {"algorithm": {"kl": {"coef": 0.1, "kind": "k1", "where": "reward"}}},
        {"algorithm": {"estimator": "distill", "kl": {"coef": 0.1}}},
        {
            "algorithm": {
                "kl": {"coef": 0.1, "where": "reward"},
                "roles": {"student": {"estimator": "distill"}},
            },
            "filters": {"drop_uniform": True},
        },
        {"algorithm": {"objective": "dpo"}, "filters": {"drop_uniform": True, "min_trajectories": 8}},
        {
            "algorithm": {"objective": "dpo"},
            "workflow": {"name": "preference"},
            "filters": {"min_trajectories": 2},
        },
        {"filters": {"drop_terminations": ["length", "turns", "tokens", "timeout"]}},
        {"eval": {"sets": {"dev": {"tasks": "countdown", "attempts": 4, "temperature": 0.7}}}},
    ],
)
def test_what_makes_sense_passes(values: dict[str, Any]) -> None:
    build_config(values)


def test_a_written_configuration_reads_back_without_complaint() -> None:
    config = build_config({"algorithm": {"objective": "dpo"}, "dpo": {"beta": 0.2}})
    check_settings(RunConfig.model_validate_json(config.model_dump_json()))


def test_per_step_mode_warns_and_names_the_grouping_hook() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        build_config({"algorithm": {"advantage_mode": "per_step"}})
    assert [w.category for w in caught] == [DeprecationWarning] and "by_step" in str(caught[0].message)
