"""Facts about algorithms: complete, light to read, and true of the functions they are about."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch

from headrace import registry
from headrace.algorithms import facts, overview
from headrace.algorithms.advantages.estimators import GroupRewards
from headrace.algorithms.losses import LossContext, correction_weights
from headrace.backends.tinker.check import check_config
from headrace.config import AlgorithmSection, CorrectionSection, KlSection
from headrace.config.loading import build_config
from headrace.config.rules import check_declared
from headrace.errors import ConfigError
from headrace.registry import builtin, resolve

BY_REWARD = [name for name, one in facts.ESTIMATORS.items() if not one.needs_teacher]
BY_GROUP = [name for name in BY_REWARD if not facts.ESTIMATORS[name].needs_value_head]
LENGTHS = (10, 20, 30)


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})


def estimate(name: str, *rewards: tuple[float, ...]) -> list[list[float]]:
    groups = [GroupRewards(one, LENGTHS[: len(one)]) for one in rewards]
    return resolve("estimator", name)(groups, AlgorithmSection(pass_k=2))


def test_everything_that_can_be_chosen_has_facts_and_nothing_else() -> None:
    for kind in ("estimator", "loss", "objective", "backend"):
        assert set(facts.FACTS[kind]) == set(builtin(kind)), kind
    assert set(facts.CORRECTIONS) == set(get_args(CorrectionSection.model_fields["name"].annotation))
    assert set(facts.KLS) == set(get_args(KlSection.model_fields["kind"].annotation))


def test_facts_are_read_without_numpy_or_torch() -> None:
    code = (
        "import sys; from headrace.registry import facts; from headrace.config.rules import impossible; "
        "assert facts('loss', 'ppo_clip').ratio == 'old'; assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- estimators ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BY_GROUP)
def test_a_group_relative_estimator_is_one_that_gives_nothing_to_a_group_of_one(name: str) -> None:
    alone, among = estimate(name, (1.0,)), estimate(name, (1.0,), (1.0, 0.0, 0.5))
    gives_nothing = alone == [[0.0]] and among[0] == [0.0]
    assert gives_nothing == facts.ESTIMATORS[name].group_relative


@pytest.mark.parametrize("name", BY_REWARD)
def test_an_estimator_of_one_group_gives_the_same_whatever_stands_beside_the_group(name: str) -> None:
    alone = estimate(name, (1.0, 0.0, 0.5))
    beside = estimate(name, (1.0, 0.0, 0.5), (9.0, 0.0, 2.0))
    assert (alone[0] == beside[0]) == facts.ESTIMATORS[name].one_group


@pytest.mark.parametrize("name", BY_REWARD)
def test_an_estimator_reads_rewards_or_does_not(name: str) -> None:
    differs = estimate(name, (1.0, 0.0, 0.5)) != estimate(name, (0.0, 1.0, 0.2))
    assert differs == facts.ESTIMATORS[name].reads_rewards


CHANGED = {"normalize_by_std": False, "pass_k": 1, "gamma": 0.5, "gae_lambda": 0.5, "value_head": True}


@pytest.mark.parametrize("name", BY_GROUP)
def test_an_estimator_reads_the_settings_that_it_declares(name: str) -> None:
    groups = [GroupRewards((1.0, 0.0, 0.5), LENGTHS)]
    before = resolve("estimator", name)(groups, AlgorithmSection())
    read = [
        key for key, value in CHANGED.items()
        if resolve("estimator", name)(groups, AlgorithmSection(**{key: value})) != before  # type: ignore[arg-type]
    ]  # fmt: skip
    assert read == list(facts.ESTIMATORS[name].settings)


# ---- losses ----------------------------------------------------------------------------------------------------------


def context(**changes: float) -> LossContext:
    """Two rows of two tokens; `changes` shift the old or the sampler's log-probabilities, or set [algorithm]."""
    now = torch.tensor([-0.5, -1.0, -0.7, -1.2], dtype=torch.float64)
    algorithm = AlgorithmSection(dual_clip=2.0).model_copy(
        update={key: value for key, value in changes.items() if key in AlgorithmSection.model_fields}
    )
    return LossContext(
        logprobs_M=now,
        old_logprobs_M=now - 0.9 + changes.get("old", 0.0),
        sampler_logprobs_M=now - 0.9 + changes.get("sampler", 0.0),
        advantages_M=torch.tensor([1.0, -2.0, 0.5, -1.0], dtype=torch.float64),
        row_M=torch.tensor([0, 0, 1, 1]),
        rows=2,
        algorithm=algorithm,
        reference_logprobs_M=now - 0.2,
    )


def losses(name: str, **changes: float) -> list[float]:
    return resolve("loss", name)(context(**changes))[0].tolist()


@pytest.mark.parametrize("name", facts.LOSSES)
def test_a_loss_divides_by_what_it_declares(name: str) -> None:
    read = {what for what in ("old", "sampler") if losses(name, **{what: 0.8}) != losses(name)}
    assert read == ({facts.LOSSES[name].ratio} if facts.LOSSES[name].ratio else set())


@pytest.mark.parametrize("name", facts.LOSSES)
def test_a_loss_reads_the_settings_that_it_declares(name: str) -> None:
    below = 1.4  # ratios below 1 as well, for the lower bound
    changed = {"clip_low": 0.01, "clip_high": 0.9, "dual_clip": 1.1, "dppo_delta": 0.9}
    read = {
        key
        for key, value in changed.items()
        for shift in (0.0, below)
        if losses(name, old=shift, sampler=shift, **{key: value}) != losses(name, old=shift, sampler=shift)
    }
    assert read == set(facts.LOSSES[name].settings)


@pytest.mark.parametrize("name", facts.LOSSES)
def test_a_loss_needs_a_reference_or_does_not(name: str) -> None:
    without = replace(context(), reference_logprobs_M=None)
    if facts.LOSSES[name].needs_reference:
        with pytest.raises(ConfigError, match="needs a reference"):
            resolve("loss", name)(without)
    else:
        resolve("loss", name)(without)


# ---- corrections -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in facts.CORRECTIONS if name != "none"])
def test_a_correction_does_to_tokens_what_it_declares(name: str) -> None:
    sampler = torch.zeros(4, dtype=torch.float64)
    old = torch.tensor([-12.0, 0.1, 0.1, 0.1], dtype=torch.float64)
    rows = torch.tensor([0, 0, 1, 1])

    def weights(**settings: object) -> list[float]:
        section = CorrectionSection.model_validate({"name": name, "low": 0.5, **settings})
        return correction_weights(section, old, sampler, rows, 2)[0].tolist()

    declared, found = facts.CORRECTIONS[name], weights()
    assert (0.0 in found) == declared.masks
    assert (found[:2] == [0.0, 0.0]) == declared.rejects_rows
    changed = {"level": "sequence", "low": 0.0, "high": 1.05, "floor": 1e-6}
    assert {key for key, value in changed.items() if weights(**{key: value}) != found} == set(declared.settings)


# ---- who reads them --------------------------------------------------------------------------------------------------


def test_the_help_of_a_setting_names_those_that_read_it() -> None:
    """Help texts begin with the names: "ppo_clip, gspo, cispo: ..."."""
    declared: dict[str, list[str]] = {}
    for table in (facts.ESTIMATORS, facts.LOSSES):
        for name, one in table.items():
            for setting in one.settings:
                declared.setdefault(setting, []).append(name)
    for setting, names in declared.items():
        text = AlgorithmSection.model_fields[setting].description or ""
        assert re.match(r"([a-z_, ]+):", text), text
        assert text.partition(":")[0].split(", ") == names, setting


ENTRIES = [one for one in overview.algorithms() if one.kind == "estimator"]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_the_tinker_backend_refuses_what_is_listed_as_not_for_it(entry: overview.Algorithm) -> None:
    head = {"value_head": True} if facts.ESTIMATORS[entry.name].needs_value_head else {}
    given = {"algorithm": {"estimator": entry.name, **head}, "backend": {"name": "tinker"}}
    if "tinker" in entry.backends:
        check_config(build_config(given))
    else:
        with pytest.raises(ConfigError, match='value head, and backend "tinker" has none'):
            check_config(build_config(given))


def test_a_teacher_of_one_role_is_scored_at_temperature_1_through_tinker_too() -> None:
    config = build_config(
        {
            "algorithm": {"roles": {"agent": {"estimator": "distill"}}},
            "rollout": {"temperature": 0.7},
            "backend": {"name": "tinker"},
            "tinker": {"vocabulary": 400},
        }
    )
    with pytest.raises(ConfigError, match="teacher at temperature 1"):
        check_config(config)


# ---- a user's own ----------------------------------------------------------------------------------------------------

OWN = """
from headrace.algorithms.facts import estimator, loss

@estimator(group_relative=True, one_group=True)
def marked(groups, algorithm):
    return [[reward - max(group.rewards) for reward in group.rewards] for group in groups]

def unmarked(groups, algorithm):
    return [[0.0 for _ in group.rewards] for group in groups]

@loss(ratio=None)
def plain(context):
    return -context.advantages_M * context.logprobs_M, {}
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    path = tmp_path / f"own_{tmp_path.name}.py".replace("-", "_")
    path.write_text(OWN)
    return str(path)


def test_what_a_users_estimator_declares_is_known_once_it_is_loaded(own: str) -> None:
    assert not registry.facts("estimator", f"{own}:marked").group_relative
    resolve("estimator", f"{own}:marked")
    assert registry.facts("estimator", f"{own}:marked") == facts.EstimatorFacts(group_relative=True, one_group=True)
    assert registry.facts("estimator", f"{own}:unmarked") == facts.EstimatorFacts()


def test_the_path_of_one_of_headraces_own_has_its_facts() -> None:
    for name, path in builtin("estimator").items():
        assert registry.facts("estimator", path) is facts.ESTIMATORS[name]


def test_rules_use_what_a_users_own_declares(own: str) -> None:
    def config(estimator: str, **sections: dict[str, object]) -> None:
        made = build_config({"algorithm": {"estimator": f"{own}:{estimator}"}, **sections})
        resolve("estimator", f"{own}:{estimator}")
        check_declared(made)

    config("marked", trainer={"stream": True, "placement": "separate", "max_staleness": 1})
    with pytest.raises(ConfigError, match=r"at least 2 for .*marked, got 1"):
        config("marked", rollout={"group_size": 1})
    config("unmarked", rollout={"group_size": 1})
    with pytest.raises(ConfigError, match="compares groups with each other"):
        config("unmarked", trainer={"stream": True, "placement": "separate", "max_staleness": 1})


def test_a_users_loss_without_a_ratio_is_not_trained_again(own: str) -> None:
    made = build_config(
        {
            "algorithm": {"loss": f"{own}:plain"},
            "trainer": {"max_staleness": 2},
            "produce": {"reuse": 2},
        }
    )
    check_declared(made)
    resolve("loss", f"{own}:plain")
    with pytest.raises(ConfigError, match="corrects for what has changed"):
        check_declared(made)


def test_a_registered_object_stands_before_headraces_own_of_that_name() -> None:
    registry.register("estimator", "distill", lambda groups, algorithm: [])
    assert not registry.facts("estimator", "distill").needs_teacher
