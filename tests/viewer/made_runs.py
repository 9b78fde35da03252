"""Run folders for tests of the viewer, made through the ledger itself: finished, running, crashed."""

from __future__ import annotations

import json
import math
import random
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from headrace.config import RunConfig
from headrace.data.episode import Episode, ModelOutput, OwnedMessages, Step, Trajectory
from headrace.data.sample import ClipState, LearnerValues, Sample, TrainBatch, merge_steps
from headrace.ledger import Ledger
from headrace.models.catalog import model_folder

SIZE = 4  # rollouts of a group
GROUPS = 3  # of a step


def tokenizer() -> Any:
    """The bundled model's."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(model_folder("bundled") / "tokenizer.json"))


@dataclass
class MadeRun:
    """A run that is recorded step by step."""

    folder: Path
    name: str = "made"
    rng: random.Random = field(default_factory=lambda: random.Random(7))
    step: int = 0
    group: int = 0

    def begin(self, steps: int = 4, **config: Any) -> Ledger:
        """The folder with its configuration, and its ledger."""
        self.folder.mkdir(parents=True, exist_ok=True)
        values = RunConfig().model_dump(mode="json")
        values["run"]["name"] = self.name
        values["trainer"]["steps"] = steps
        for key, value in config.items():
            section, _, name = key.partition("__")
            values[section][name] = value
        (self.folder / "config.json").write_text(json.dumps(values, indent=1))
        self._encode = tokenizer().encode
        return Ledger.open(self.folder)

    def make_step(self, ledger: Ledger, commit: bool = True) -> None:
        """A batch of groups, one group that is filtered, and the metrics of the step."""
        rows: list[tuple[Sample, LearnerValues]] = []
        members = []
        rewards: list[float] = []
        for _ in range(GROUPS):
            members.append(self.group)
            for episode in self.make_group(ledger, skill=0.3 + 0.1 * self.step):
                rewards.append(episode.reward)
                rows += [learned(sample, self.rng) for sample in samples_of(episode, self.rng)]
        self.make_group(ledger, skill=0.0)
        ledger.decided(self.group - 1, "filtered", reason="all rewards are equal", step=self.step, filtered=SIZE)
        samples = tuple(sample for sample, _ in rows)
        values = LearnerValues(*(tuple(getattr(v, name)[0] for _, v in rows) for name in LearnerValues.__slots__))
        batch = TrainBatch(samples, (1.0,) * len(samples), (tuple(range(len(samples))),), len(samples), learned=values)
        ledger.batch(self.step, self.step, members, trained=[batch])
        for member in members:
            ledger.decided(member, "trained", step=self.step, trained=SIZE)
        if commit:
            ledger.committed(self.step, 1)
            ledger.published(self.step + 1, f"{self.step:08x}", self.step + 1)
        self.step += 1
        self.write_metrics(sum(rewards) / len(rewards))

    def make_group(
        self, ledger: Ledger, skill: float, task: str | None = None, reply: str | None = None
    ) -> list[Episode]:
        """A group of the next task, rolled out and judged."""
        group_id, self.group = self.group, self.group + 1
        name = task or f"task {group_id % 5}"
        ledger.dispatched(group_id, (0, group_id), name, "countdown", SIZE, self.step)
        found = [self.make_episode(ledger, group_id, n, name, self.rng.random() < skill, reply) for n in range(SIZE)]
        ledger.flush()
        return found

    def make_episode(
        self, ledger: Ledger, group_id: int, rollout: int, task: str, right: bool, reply: str | None = None
    ) -> Episode:
        """Two turns with a tool between them; every fourth has a changed history."""
        place = (group_id, rollout, 0)
        ledger.started(*place, seed=group_id * 100 + rollout)
        asked: list[dict[str, Any]] = [
            {"role": "system", "content": "You have a calculator."},
            {"role": "user", "content": f"Make {10 + group_id} from 2 3 {rollout}. It is {task}."},
        ]
        first = self._said(reply or f"3*2={5 + right}\nlet me see", self._ids(str(asked)), 0)
        ledger.called(*place, first, role="agent", seed=1, request_digest="a", messages=asked)
        ledger.resulted(*place, 0, kind="tool", name="calculate", request_digest="t", payload={"value": 6, "of": "3*2"})
        history = [*asked, first.message, {"role": "tool", "content": "6"}]
        prompt = (*first.prompt_ids, *first.completion_ids, *self._ids("tool 6"))
        if rollout == 3:
            history, prompt = history[1:], self._ids("another beginning")
        second = self._said(f" <answer>{10 + group_id if right else 0}</answer>", prompt, 1)
        ledger.called(*place, second, role="agent", seed=2, request_digest="b", messages=history)
        verdict = [float(right), right, {"well_formed": 1.0, "length_penalty": -0.1}]
        ledger.resulted(*place, 1, kind="judger", name="CountdownJudger", request_digest="j", payload=verdict)
        steps = (Step.from_model_output(first, asked), Step.from_model_output(second, history))
        trajectory = Trajectory(steps, "agent", float(right))
        episode = Episode(
            task, (trajectory,), group_id, rollout, 0, group_id * 100 + rollout, "countdown", is_correct=right
        )
        episode = replace(episode, metrics={"well_formed": 1.0})
        ledger.finished(episode, 0.4 + 0.1 * rollout)
        return episode

    def fail_group(self, ledger: Ledger) -> None:
        """A group whose episodes failed, the first one at its second attempt."""
        group_id, self.group = self.group, self.group + 1
        ledger.dispatched(group_id, (0, group_id), "a task that breaks", "countdown", SIZE, self.step)
        ledger.started(group_id, 0, 0, 5)
        for rollout in range(SIZE):
            attempt = 1 if rollout == 0 else 0
            ledger.started(group_id, rollout, attempt, 5)
            broken = Episode("a task that breaks", (), group_id, rollout, attempt, 5, "countdown", "error")
            ledger.finished(replace(broken, error="ToolError: the tool is down"), 0.2)
        ledger.decided(group_id, "failed", reason="all episodes failed", step=max(0, self.step - 1), failed=SIZE)

    def evaluate(self, ledger: Ledger, share: float) -> None:
        """Ten tasks, of which a share is right."""
        episodes = []
        for number in range(10):
            right = number < round(10 * share)
            output = self._said("<answer>1</answer>", self._ids("evaluate"), 0)
            asked = OwnedMessages(({"role": "user", "content": f"held out {number}"},))
            step = Step.from_model_output(output, asked)
            trajectory = Trajectory((step,), "agent", float(right))
            episodes.append(
                Episode(f"held out {number}", (trajectory,), number, 0, is_correct=right, source="countdown")
            )
        metrics = {"pass@1": share, "pass@1_low": max(0.0, share - 0.2), "pass@1_high": min(1.0, share + 0.2)}
        ledger.evaluated(self.step, "held_out", metrics | {"tasks": 10.0, "failed": 0.0, "reward": share}, episodes)
        self.write_metrics(None, {f"eval/held_out/{key}": value for key, value in metrics.items()})

    def write_metrics(self, reward: float | None, more: dict[str, float] | None = None) -> None:
        """A line of metrics.jsonl."""
        row: dict[str, float] = {"step": self.step, **(more or {})}
        if reward is not None:
            row |= {
                "reward/mean": reward, "reward/std": 0.4, "response/length_mean": 20.0 + self.step,
                "policy/entropy": 1 / (1 + self.step), "staleness/mean": 0.2, "staleness/max": 1.0,
                "drift/same_version": 1e-7, "time/step_s": 0.5, "tokens/generated": 800.0, "tokens/trained": 700.0,
                "tokens/s": 1200.0, "policy/grad_norm": 0.4,
            }  # fmt: skip
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._encode(text, add_special_tokens=False).ids)

    def _said(self, text: str, prompt: Sequence[int], call: int) -> ModelOutput:
        ids = (*self._ids(text), 2)
        logprobs = tuple(-abs(self.rng.gauss(0, 0.6)) for _ in ids)
        versions = tuple(max(0, self.step - (n < 3)) for n in range(len(ids)))
        return ModelOutput(text, tuple(prompt), ids, logprobs, logprobs, versions, content=text, call=call)


def samples_of(episode: Episode, rng: random.Random) -> list[Sample]:
    """Training rows with an advantage; the last trained token of each is masked."""
    found = []
    for sample in merge_steps(replace(episode.trajectories[0], rollout_idx=episode.rollout_idx)):
        mask = list(sample.loss_mask)
        mask[max(n for n, one in enumerate(mask) if one)] = 0
        advantage = episode.reward - 0.5
        found.append(
            replace(
                sample,
                loss_mask=tuple(mask),
                advantages=tuple(advantage * one for one in mask),
                group_id=episode.group_id,
                rollout_idx=episode.rollout_idx,
                role="agent",
            )
        )
    return found


def learned(sample: Sample, rng: random.Random) -> tuple[Sample, LearnerValues]:
    """What a learner might have computed of a row."""
    trained = [logprob for logprob, kept in zip(sample.logprobs, sample.loss_mask, strict=True) if kept]
    logprobs = tuple(min(0.0, value + rng.gauss(0, 0.05)) for value in trained)
    states = tuple(ClipState.CLIPPED if n == 1 else ClipState.KEPT for n in range(len(trained)))
    return sample, LearnerValues((logprobs,), (tuple(math.exp(value) for value in logprobs),), (states,))


def finished_run(folder: Path, name: str = "finished") -> MadeRun:
    """Four steps, a failed group, two evaluations."""
    made = MadeRun(folder, name)
    with made.begin() as ledger:
        made.evaluate(ledger, 0.3)
        for _ in range(4):
            made.make_step(ledger)
        made.fail_group(ledger)
        made.evaluate(ledger, 0.8)
    (folder / "finished").write_text("{}")
    (folder / "log.txt").write_text(
        "2026-01-01 10:00:00,000 WARNING step 2: sampler and learner differ; above alarm.warn_drift\n"
    )
    return made


def crashed_run(folder: Path, name: str = "crashed") -> MadeRun:
    """Killed in its third step: no end of the process, a batch without its update, a rollout in flight."""
    made = MadeRun(folder, name)
    with made.begin() as ledger:
        for number in range(3):
            made.make_step(ledger, commit=number < 2)
        ledger.dispatched(made.group, (0, made.group), "in flight", "countdown", SIZE, 2)
        ledger.started(made.group, 0, 0, 1)
        ledger.flush()
    with closing(sqlite3.connect(folder / "ledger.sqlite", isolation_level=None)) as connection:
        connection.execute("UPDATE processes SET ended_at = NULL")
    (folder / "lock").write_text(json.dumps({"pid": 2**22 + 1, "host": __import__("socket").gethostname()}))
    return made
