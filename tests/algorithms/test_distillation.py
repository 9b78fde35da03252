"""Distillation through the real model, backend and trainer: a teacher in a folder, and the policy as its own."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from contracts.backend_contract import IMITATE, random_samples
from fakes import step
from headrace import Task, Trajectory, registry, self_distill
from headrace.algorithms.batching import grad_scale, pack
from headrace.algorithms.distill import distilled_advantages
from headrace.backends.local.backend import LocalBackend
from headrace.config import DistillSection
from headrace.data.episode import Step
from headrace.data.task import Message
from headrace.errors import BackendError, DataError, ModelError
from headrace.rollout.chat import ChatTemplate
from headrace.rollout.model_client import Model
from headrace.run.checkpoint import list_checkpoints
from headrace.tracking.base import RunInfo
from headrace.trainer.trainer import UnifiedTrainer
from recording_backend import (
    WatchedBackend,
    make_backend,
    plain_logprobs,
    plain_model,
    same_weights,
    scattered_reward,
    snapshot,
    trained,
    watched_config,
    watched_run,
)

DISTILL: dict[str, Any] = {"estimator": "distill", "loss": "importance_sampling"}
ALONE: dict[str, Any] = {"group_size": 1, "max_tokens": 8}


async def imitate(backend: LocalBackend, seed: int = 7) -> None:
    """One optimizer step that takes the policy somewhere else."""
    batch = pack(random_samples(4, 90, seed), IMITATE, 512)
    await backend.forward_backward(batch, IMITATE)
    await backend.optim_step(3e-3, grad_scale([batch], IMITATE))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of another checkpoint of the bundled model."""
    folder = tmp_path_factory.mktemp("teacher") / "model"

    async def make() -> None:
        backend = make_backend()
        for seed in range(4):
            await imitate(backend, seed)
        await backend.export(folder)
        await backend.close()

    asyncio.run(make())
    return str(folder)


# ---- a teacher in a folder ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "section",
    [{"coef": 1.0}, {"coef": 0.5, "discount": 0.9}, {"coef": 2.0, "discount": 0.5, "clip": 0.4}],
    ids=["plain", "discounted", "clipped"],
)
def test_advantages_are_how_much_likelier_the_teacher_finds_each_token(
    section: dict[str, Any], teacher: str, tmp_path: Path
) -> None:
    """No reward, no judger, no group: the teacher says it all."""
    result, backend = watched_run(
        tmp_path,
        algorithm=DISTILL,
        distill={"teacher": teacher, **section},
        rollout={**ALONE, "temperature": 0.8},
        trainer={"steps": 1, "batch_size": 4, "save_last": False},
    )
    assert result.steps == 1 and "reward/mean" not in result.metrics
    taught, initial = plain_model(teacher), plain_model()
    largest = 0.0
    for sample in backend.samples:
        theirs, ours = (
            trained(sample, plain_logprobs(model, sample.tokens, 0.8).detach()) for model in (taught, initial)
        )
        gains = [section["coef"] * (a - b) for a, b in zip(theirs, ours, strict=True)]
        wanted = [
            sum(section.get("discount", 0.0) ** (later - t) * gains[later] for later in range(t, len(gains)))
            for t in range(len(gains))
        ]
        bound = section.get("clip", 1e9)
        assert trained(sample, sample.advantages) == pytest.approx(
            [max(-bound, min(bound, value)) for value in wanted], abs=1e-3
        )
        largest = max(largest, *map(abs, wanted))
    assert largest > 0.4
    assert backend.learner.reference is None


def test_a_distilled_role_beside_one_with_rewards_and_a_penalty_on_them(teacher: str, tmp_path: Path) -> None:
    async def two_roles(task: Task, model: Model) -> list[Trajectory]:
        await model.chat(task.messages, role="student")
        reply = await model.chat(task.messages, role="solver")
        student, solver = model.trajectories()
        return [student, replace(solver, reward=float(sum(reply.completion_ids) % 5))]

    result, backend = watched_run(
        tmp_path,
        two_roles,
        algorithm={"roles": {"student": {"estimator": "distill"}}, "kl": {"coef": 0.1, "where": "reward"}},
        distill={"teacher": teacher},
    )
    assert result.steps == 1 and result.metrics["reward/mean"] >= 0
    students = [sample for sample in backend.samples if sample.role == "student"]
    solvers = [sample for sample in backend.samples if sample.role == "solver"]
    assert len(students) == len(solvers) == 8
    assert all(len(set(trained(s, s.advantages))) == s.trained_tokens for s in students)  # token by token
    assert all(len(set(trained(s, s.advantages))) == 1 for s in solvers)
    assert {s for step_ in backend.taught for s in (x.text for x in step_[0])}


class ForgetfulBackend(WatchedBackend):
    """Its teacher does not score all that it is asked about."""

    forgets = "token"

    async def teacher_logprobs(self, steps: Sequence[Step]) -> list[list[float]]:
        found = await super().teacher_logprobs(steps)
        if self.forgets == "step":
            return found[:-1]
        return [*found[:-1], found[-1][:-1] if self.forgets == "token" else [float("nan"), *found[-1][1:]]]


@pytest.mark.parametrize(
    ("forgets", "error", "said"),
    [
        ("token", DataError, "scored 7 tokens, but the student sampled 8"),
        ("number", DataError, "no finite log-probability: token 0 has nan"),
        ("step", BackendError, "asked about 2 steps and scored 1"),
    ],
)
def test_a_missing_score_is_an_error_and_never_zero(
    forgets: str, error: type[Exception], said: str, teacher: str, tmp_path: Path
) -> None:
    forgetful = type("Forgetful", (ForgetfulBackend,), {"forgets": forgets})
    registry.register("backend", "forgetful", forgetful)
    with pytest.raises(error, match=said):
        watched_run(
            tmp_path, algorithm=DISTILL, distill={"teacher": teacher}, rollout=ALONE, backend={"name": "forgetful"}
        )


def test_scores_of_another_length_are_refused() -> None:
    with pytest.raises(DataError, match="scored 1 tokens, but the student sampled 2"):
        distilled_advantages([-1.0], [-1.0, -2.0], DistillSection())


async def test_given_text_cannot_be_distilled(teacher: str, tmp_path: Path) -> None:
    async def demonstrated(task: Task, model: Model) -> Trajectory:
        return Trajectory(tuple(model.demonstrate([*task.messages, {"role": "assistant", "content": "1"}])))

    with pytest.raises(DataError, match="needs the log-probabilities it was sampled with"):
        await UnifiedTrainer(
            watched_config(tmp_path, algorithm=DISTILL, distill={"teacher": teacher}, rollout=ALONE), demonstrated
        ).fit_async()


def test_a_teacher_that_is_not_there_is_an_error_at_start_up(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no model folder"):
        watched_run(tmp_path, algorithm=DISTILL, distill={"teacher": "./nowhere"}, rollout=ALONE)


async def test_a_prompt_beyond_what_the_teacher_reads_is_named() -> None:
    backend = make_backend(algorithm=DISTILL)
    with pytest.raises(DataError, match="the teacher reads at most 1024 tokens, and a prompt with its reply has 1030"):
        await backend.teacher_logprobs([step([5] * 1027, [3, 4, 5])])
    await backend.close()


# ---- the policy as its own teacher ----------------------------------------------------------------------------------


def privileged(task: Task) -> list[Message]:
    return [{"role": "user", "content": f"{task.instruction} It is {task.answer['solution']}."}]


TASKS = [Task(str(n), instruction=f"Make {n}.", answer={"solution": f"{n}+0"}) for n in range(8)]


@self_distill(lambda task, step: privileged(task))
async def solve(task: Task, model: Model) -> None:
    await model.chat(task.messages)


SELF: dict[str, Any] = {"algorithm": {"estimator": "reinforce", "loss": "importance_sampling"}, "rollout": ALONE}
REFRESHED: dict[str, Any] = {"algorithm": DISTILL, "rollout": ALONE, "distill": {"refresh_every": 2}}


def test_the_teacher_reads_the_privileged_prompt(tmp_path: Path) -> None:
    _, backend = watched_run(tmp_path, solve, TASKS, **SELF)
    chat, initial = ChatTemplate(backend.tokenizer), plain_model()
    ((steps, scores),) = backend.taught
    assert len(steps) == 2
    for asked, told in zip(steps, scores, strict=True):
        number = next(task for task in TASKS if task.messages == tuple(asked.messages))
        prompt = chat.render(privileged(number))
        assert asked.prompt_ids == chat.render(number.messages) != prompt  # the student never saw it
        whole = plain_logprobs(initial, [*prompt, *asked.response_ids]).tolist()
        assert told == pytest.approx(whole[len(prompt) - 1 :], abs=1e-4)
        assert len(told) == len(asked.response_ids)
        row = next(s for s in backend.samples if s.tokens == (*asked.prompt_ids, *asked.response_ids))
        wanted = distilled_advantages(told, asked.logprobs or (), DistillSection())
        assert trained(row, row.advantages) == pytest.approx(list(wanted))


def test_evaluation_runs_nothing_of_it(tmp_path: Path) -> None:
    asked: list[str] = []

    def remember(task: Task, step: Step) -> list[Message]:
        asked.append(task.id)
        return privileged(task)

    @self_distill(remember)
    async def rewarded(task: Task, model: Model) -> float:
        await model.chat(task.messages)
        return 1.0

    held_out = [{"id": f"held out {n}", "instruction": f"Make {n}."} for n in range(3)]  # without an answer
    config = watched_config(
        tmp_path, **SELF, eval={"before": True, "after": True, "sets": {"held_out": {"tasks": "given"}}}
    )
    result = UnifiedTrainer(config, rewarded, TASKS, eval_tasks={"held_out": held_out}).fit()
    backend = WatchedBackend.made.pop()
    assert result.first_evaluation["eval/held_out/failed"] == result.last_evaluation["eval/held_out/failed"] == 0
    assert result.last_evaluation["eval/held_out/pass@1"] == 1.0
    assert len(asked) == 2 and not any(name.startswith("held out") for name in asked)
    assert len(backend.taught) == 1


@pytest.mark.parametrize("rank", [0, 4])
def test_one_teacher_is_refreshed_at_its_versions(rank: int, tmp_path: Path) -> None:
    _, backend = watched_run(
        tmp_path,
        solve,
        TASKS,
        **REFRESHED,
        model={"lora": {"rank": rank}},
        optimizer={"lr": 3e-3},
        trainer={"steps": 5, "batch_size": 2, "save_last": False},
    )
    assert len(backend.teachers) == 5 and len({number for number, _ in backend.teachers}) == 1  # loaded once
    trainable = [name for name, p in backend.learner.hf_model.named_parameters() if p.requires_grad]
    weights = [{name: found[name] for name in trainable} for _, found in backend.teachers]
    policy = {v: {name: found[name] for name in trainable} for v, found in backend.sent.items()}
    if not rank:  # fresh adapters differ, and add nothing
        assert same_weights(weights[0], policy[0])
    assert same_weights(weights[1], weights[0]) and not same_weights(weights[2], weights[1])
    assert same_weights(weights[2], policy[2]) and same_weights(weights[3], policy[2])
    assert same_weights(weights[4], policy[4]) and not same_weights(policy[4], policy[3])


async def test_a_refreshed_adapter_changes_what_the_teacher_says() -> None:
    """The weights are shared with buffers laid out for speed: a copy must reach those."""
    backend = make_backend(model={"lora": {"rank": 4}}, algorithm=DISTILL, distill={"refresh_every": 1})
    prompt, reply = [5, 6, 7], [30, 31, 32, 33]
    asked = [step(prompt, reply)]
    initial = plain_logprobs(plain_model(), [*prompt, *reply]).tolist()[2:]
    assert (await backend.teacher_logprobs(asked))[0] == pytest.approx(initial, abs=1e-4)
    await imitate(backend)
    assert (await backend.teacher_logprobs(asked))[0] == pytest.approx(initial, abs=1e-4)
    await backend.refresh_teacher()
    (sample,) = random_samples(1, 90)
    (policy,) = await backend.compute_logprobs(pack([sample], IMITATE, 512))
    (again,) = await backend.teacher_logprobs([step(sample.tokens[:1], sample.tokens[1:])])
    assert again == pytest.approx(policy, abs=1e-5)
    await backend.close()


async def test_a_refresh_before_the_first_question_is_not_lost() -> None:
    backend = make_backend(algorithm=DISTILL, distill={"refresh_every": 1})
    await imitate(backend)
    await backend.refresh_teacher()
    await backend.teacher_logprobs([step([5, 6], [7, 8])])
    assert same_weights(backend.teachers[0][1], snapshot(backend.learner.hf_model))
    await backend.close()


class StopAt:
    """A tracker that stops its trainer after a step."""

    def __init__(self, last: int, trainer: UnifiedTrainer) -> None:
        self._last, self._trainer = last, trainer

    def start(self, info: RunInfo) -> None: ...
    def message(self, text: str) -> None: ...
    def close(self) -> None: ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == self._last:
            self._trainer.stop()


@pytest.mark.parametrize("rank", [0, 2])
def test_a_resumed_run_continues_with_the_refreshed_teacher(rank: int, tmp_path: Path) -> None:
    def config(name: str, *trackers: str) -> Any:
        return watched_config(
            tmp_path,
            **REFRESHED,
            run={"dir": str(tmp_path), "name": name, "deterministic": True},
            model={"lora": {"rank": rank}},
            optimizer={"lr": 3e-3},
            trainer={"steps": 4, "batch_size": 2},
            track={"trackers": ["jsonl", *trackers], "plot": False},
        )

    UnifiedTrainer(config("whole"), solve, TASKS).fit()
    whole = WatchedBackend.made.pop()
    part = UnifiedTrainer(config("part", "stopper"), solve, TASKS)
    registry.register("tracker", "stopper", lambda: StopAt(3, part))
    assert part.fit().interrupted
    checkpoint = list_checkpoints(tmp_path / "part")[-1]
    assert (checkpoint / "teacher.safetensors").is_file()
    UnifiedTrainer(config("part"), solve, TASKS).fit()
    resumed = WatchedBackend.made.pop()
    trainable = {name for name, p in whole.learner.hf_model.named_parameters() if p.requires_grad}
    then, now = ({n: w for n, w in b.teachers[-1][1].items() if n in trainable} for b in (whole, resumed))
    assert same_weights(then, now) and not same_weights(now, snapshot(resumed.learner.hf_model))
    assert same_weights(snapshot(resumed.learner.hf_model), snapshot(whole.learner.hf_model))


async def test_a_teacher_that_was_never_refreshed_is_not_in_the_checkpoint(tmp_path: Path) -> None:
    backend = make_backend(algorithm=DISTILL)
    await backend.teacher_logprobs([step([5, 6], [7, 8])])
    await backend.save(tmp_path / "state")
    assert not (tmp_path / "state" / "teacher.safetensors").exists()
    await imitate(backend)
    await backend.load(tmp_path / "state")
    await backend.teacher_logprobs([step([5, 6], [7, 8])])
    assert same_weights(backend.teachers[-1][1], backend.sent[0])
    await backend.close()


def test_other_groups_of_a_self_distilled_run_go_to_their_estimator(tmp_path: Path) -> None:
    """A workflow may distil one task and be paid for another."""

    async def either(task: Task, model: Model) -> Any:
        chosen = solve if int(task.id) % 2 else scattered_reward
        return await chosen(task, model)

    _, backend = watched_run(
        tmp_path,
        either,
        TASKS,
        rollout={"group_size": 2, "max_tokens": 8},
        algorithm={"estimator": "grpo"},
        trainer={"steps": 1, "batch_size": 8, "save_last": False},
    )
    assert len(backend.samples) == 16
    for sample in backend.samples:
        advantages = trained(sample, sample.advantages)
        assert len(set(advantages)) == (len(advantages) if int(sample.task_id) % 2 else 1)


def test_temperatures_of_teacher_and_student_agree() -> None:
    """Scores at another temperature than the one sampled at would make a perfect student look wrong."""
    backend = make_backend(algorithm=DISTILL)

    async def ask() -> tuple[list[float], list[float]]:
        rows = random_samples(1, 90)
        (ours,) = await backend.compute_logprobs(pack([replace(rows[0], temperature=0.6)], IMITATE, 512))
        tokens = rows[0].tokens
        (theirs,) = await backend.teacher_logprobs([step(tokens[:1], tokens[1:], temperature=0.6)])
        await backend.close()
        return ours, theirs

    ours, theirs = asyncio.run(ask())
    assert theirs == pytest.approx(ours, abs=1e-6)
    assert torch.get_num_threads() == 1
