"""Which trajectories are compared is the user's to say: grouping hooks in whole runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from headrace import Task, Trajectory
from headrace.data.sample import Sample
from headrace.errors import ConfigError
from headrace.rollout.model_client import Model
from recording_backend import scattered_reward, trained, watched_run

HOOK = '''
from headrace.data.episode import TrajectoryGroup


def in_pairs(episodes):
    """Rollouts 0 and 1 are compared with each other, and 2 and 3."""
    trajectories = [trajectory for episode in episodes for trajectory in episode.trajectories]
    pairs = [tuple(trajectories[:2]), tuple(trajectories[2:])]
    return [TrajectoryGroup(episodes[0].task_id, "agent", pair, episodes[0].group_id) for pair in pairs]
'''
CENTRED = {"normalize_by_std": False}


def assert_centred(group: list[Sample]) -> None:
    """Every row's advantage is its reward minus the mean of these rows."""
    mean = sum(sample.reward or 0.0 for sample in group) / len(group)
    for sample in group:
        wanted = (sample.reward or 0.0) - mean
        assert trained(sample, sample.advantages) == pytest.approx([wanted] * sample.trained_tokens)


def test_a_hook_of_a_file_says_who_is_compared(tmp_path: Path) -> None:
    path = tmp_path / "hooks.py"
    path.write_text(HOOK)
    result, backend = watched_run(
        tmp_path, scattered_reward, algorithm=CENTRED, workflow={"grouping": f"{path}:in_pairs"}
    )
    assert len(backend.samples) == 8
    for start in range(0, 8, 2):
        assert_centred(backend.samples[start : start + 2])
    four = [sample.reward or 0.0 for sample in backend.samples[:4]]
    assert sum(four[:2]) != sum(four[2:])  # in one group of four the advantages would be others
    assert result.metrics["episodes/trained"] == 8


def test_a_hook_that_is_not_there_is_an_error_at_start_up(tmp_path: Path) -> None:
    path = tmp_path / "hooks.py"
    path.write_text(HOOK)
    with pytest.raises(ConfigError, match='has no "in_pair" \\(did you mean "in_pairs"'):
        watched_run(tmp_path, scattered_reward, workflow={"grouping": f"{path}:in_pair"})


async def three_turns(task: Task, model: Model) -> Trajectory:
    """Up to three turns, each with a reward of its own; a reply with an even sum ends the talk."""
    messages, rewards = list(task.messages), []
    for _ in range(3):
        reply = await model.chat(messages, max_tokens=4)
        rewards.append(float(sum(reply.completion_ids) % 7))
        messages += [reply.message, {"role": "user", "content": "Go on."}]
        if sum(reply.completion_ids) % 2 == 0:
            break
    (made,) = model.trajectories()
    steps = [replace(step, reward=reward) for step, reward in zip(made.steps, rewards, strict=True)]
    return replace(made, steps=tuple(steps))


@pytest.mark.filterwarnings("ignore:a group of one")
def test_by_step_compares_the_same_turn_of_all_rollouts(tmp_path: Path) -> None:
    _, backend = watched_run(tmp_path, three_turns, algorithm=CENTRED, workflow={"grouping": "by_step"})
    turns: dict[tuple[str, int], list[Sample]] = {}
    for sample in backend.samples:
        turn = backend.tokenizer.decode(list(sample.tokens)).count("Go on.")
        assert sum(sample.loss_mask) <= 4  # one turn each: a row is not merged with the turn before
        turns.setdefault((sample.task_id, turn), []).append(sample)
    for group in turns.values():
        assert_centred(group)
    firsts = [group for (_, turn), group in turns.items() if turn == 0]
    assert [len(group) for group in firsts] == [4, 4]
    assert len(turns) > 3 and any(len(group) < 4 for group in turns.values())  # some talks were shorter
    assert len({sample.reward for sample in backend.samples}) > 2


def test_without_a_hook_the_last_turns_reward_is_given_to_all(tmp_path: Path) -> None:
    _, backend = watched_run(tmp_path, three_turns, algorithm=CENTRED)
    for start in (0, 4):
        assert_centred(backend.samples[start : start + 4])
    assert any("Go on." in backend.tokenizer.decode(list(sample.tokens)) for sample in backend.samples)
