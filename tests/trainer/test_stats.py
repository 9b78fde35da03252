"""What a training batch looked like."""

from __future__ import annotations

from fakes import episode, step
from headrace.algorithms.batching import to_samples
from headrace.config import RunConfig
from headrace.data.episode import Episode, Step, Trajectory
from headrace.scheduling.batch_metrics import batch_metrics
from headrace.scheduling.buffer import FinishedGroup, TrajectoryGroupBuffer


def metrics(*episodes: Episode) -> dict[str, float]:
    finished: FinishedGroup = TrajectoryGroupBuffer(RunConfig()).add(0, episodes)
    return batch_metrics([finished], to_samples(finished.groups), 0).reduce()


def given(reward: float) -> Trajectory:
    """A demonstration, or one of a given pair: nobody sampled it."""
    return Trajectory((Step((1,), (2, 3, 4)),), reward=reward)


def test_what_was_sampled_counts_as_generated() -> None:
    found = metrics(episode(1.0), episode(0.0))
    assert (found["tokens/generated"], found["response/length_mean"], found["reward/mean"]) == (6.0, 3.0, 0.5)


def test_demonstrations_are_not_generated_and_their_reward_says_nothing() -> None:
    found = metrics(Episode("t", (given(1.0), given(0.0))))
    assert (found["tokens/generated"], found["response/length_mean"]) == (0.0, 6.0)
    assert not any(key.startswith(("reward/", "staleness/")) for key in found)


def test_in_a_conversation_that_was_partly_given_only_the_sampled_turns_are_generated() -> None:
    both = Trajectory((Step((1,), (2, 3, 4)), step([1, 2, 3, 4, 5], [6, 7])), reward=0.25)
    found = metrics(Episode("t", (both,)))
    assert (found["tokens/generated"], found["response/length_mean"], found["reward/mean"]) == (2.0, 5.0, 0.25)
