"""The ledger: what goes in comes out exactly, and every episode is accounted for."""

from __future__ import annotations

import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fakes import examples
from headrace.config import LedgerSection
from headrace.data.episode import Episode, ModelOutput, Step, Trajectory
from headrace.errors import LedgerError
from headrace.ledger import Account, Ledger, LedgerReader, digest
from headrace.ledger.pack import from_json, to_json
from ledger_data import Played, dispatch, messages, play, plays, simple_episode, tokens, train, values


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger.open(tmp_path) as opened:
        yield opened


def text_of(value: Any) -> str:
    """With every float spelled out: 0.0 is not -0.0, and 1.0 is not 1."""
    return repr(value)


# ---- exactness -------------------------------------------------------------------------------------------------------


@given(values)
@examples
@example({"$exact": [1]})
@example([float("inf"), (1, [2]), {3: b"\xff"}, "\ud800", {"a": {"$exact": ()}}])
def test_a_value_comes_back_as_it_was(value: Any):
    assert text_of(from_json(to_json(value))) == text_of(value)


@given(st.data())
@settings(examples, max_examples=25)
def test_everything_of_an_episode_comes_back_as_it_was(data: st.DataObject):
    prompt, task = data.draw(tokens), data.draw(messages)
    group = [data.draw(plays(prompt, task, rollout)) for rollout in range(2)]
    with tempfile.TemporaryDirectory() as folder:
        with Ledger.open(Path(folder)) as ledger:
            dispatch(ledger, 0, size=2)
            for played in group:
                play(ledger, played)
        with LedgerReader.read(Path(folder)) as reader:
            found = reader.group(0)
            assert found == [played.episode for played in group]
            assert [e.to_dict() for e in found] == [played.episode.to_dict() for played in group]
            for rollout, played in enumerate(group):
                assert tuple(reader.calls(0, rollout)) == played.calls
                assert tuple(reader.results(0, rollout)) == played.results
                assert text_of(reader.calls(0, rollout)) == text_of([_with_plain_reason(r) for r in played.calls])


def _with_plain_reason(record: Any) -> Any:
    return replace(record, output=replace(record.output, finish_reason=str(record.output.finish_reason)))


@given(st.data())
@settings(examples, max_examples=10)
def test_evaluation_episodes_come_back_as_they_were(data: st.DataObject):
    episodes = [data.draw(plays((1,), {"role": "user", "content": ""}, n)).episode for n in range(2)]
    with tempfile.TemporaryDirectory() as folder, Ledger.open(Path(folder)) as ledger:
        ledger.evaluated(3, "held out", {"pass@1": 0.25}, episodes)
        assert [record.episode for record in ledger.episodes("eval")] == episodes
        assert ledger.account() == Account()


def test_a_signed_zero_among_the_logprobs_is_kept(ledger: Ledger):
    output = ModelOutput("", (1,), (2, 3), (0.0, -0.0), (-0.0, 0.0), (0, 0))
    changed = replace(Step.from_model_output(output), logprobs=(-0.0, 0.0))
    dispatch(ledger, 0)
    ledger.called(0, 0, 0, output, role="agent", seed=0, request_digest="", messages=())
    ledger.finished(Episode("task 0", (Trajectory((changed,)),)))
    (record,) = ledger.calls(0, 0)
    assert repr(record.output.logprobs + record.output.model_logprobs) == "(0.0, -0.0, -0.0, 0.0)"
    assert repr(ledger.group(0)[0].trajectories[0].steps[0].logprobs) == "(-0.0, 0.0)"


def test_what_the_workflow_changes_later_is_not_recorded(ledger: Ledger):
    said = [{"role": "user", "content": "before"}]
    call = {"name": "search", "arguments": {"query": "before"}}
    payload = {"found": ["before"]}
    dispatch(ledger, 0)
    output = ModelOutput("", (1,), (), (), (), (), tool_calls=(call,))
    ledger.called(0, 0, 0, output, role="agent", seed=0, request_digest="", messages=said)
    ledger.resulted(0, 0, 0, 0, kind="tool", name="search", request_digest="", payload=payload)
    said[0]["content"] = call["arguments"]["query"] = payload["found"][0] = "after"
    assert "after" not in repr((ledger.calls(0, 0), ledger.results(0, 0)))


def test_calls_side_by_side_are_ordered_as_they_began(ledger: Ledger):
    dispatch(ledger, 0)
    for call in (2, 0, 1):
        output = ModelOutput(str(call), (1, call), (2,), (0.0,), (0.0,), (0,), call=call)
        ledger.called(0, 0, 0, output, role="agent", seed=call, request_digest="", messages=())
    assert [record.output.text for record in ledger.calls(0, 0)] == ["0", "1", "2"]


def test_an_episode_resumes_in_another_process_where_it_was(tmp_path: Path):
    turns = [ModelOutput("a", tuple(range(3 * n + 3)), (n,), (-1.5,), (-1.5,), (n,), call=n) for n in range(3)]
    for output in turns:  # each in a process of its own, as far as the ledger knows
        with Ledger.open(tmp_path) as ledger:
            dispatch(ledger, 0)
            ledger.started(0, 0, 0, seed=1)
            ledger.called(0, 0, 0, output, role="agent", seed=0, request_digest="", messages=())
    episode = Episode("task 0", (Trajectory(tuple(Step.from_model_output(output) for output in turns)),))
    with Ledger.open(tmp_path) as ledger:
        ledger.finished(episode)
        assert ledger.group(0) == [episode]
        assert [record.output for record in ledger.calls(0, 0)] == turns


def test_a_long_conversation_is_not_stored_again_with_every_turn(tmp_path: Path):
    def size_of(turns: int) -> int:
        folder = tmp_path / str(turns)
        folder.mkdir()
        with Ledger.open(folder) as ledger:
            dispatch(ledger, 0)
            prompt: tuple[int, ...] = tuple(hash(str(n)) % 50_000 for n in range(500))
            said = [{"role": "user", "content": digest(n)} for n in range(30)]
            for call in range(turns):
                output = ModelOutput("reply", prompt, (call,), (-0.5,), (-0.5,), (0,), content="reply", call=call)
                ledger.called(0, 0, 0, output, role="agent", seed=0, request_digest="", messages=said)
                prompt, said = (*prompt, call, 7), [*said, output.message, {"role": "user", "content": "more"}]
            ledger.flush()
            return ledger.size_bytes()

    assert size_of(200) - size_of(1) < 200 * 250


def test_what_json_cannot_hold_is_refused_with_the_remedy(ledger: Ledger):
    dispatch(ledger, 0)
    with pytest.raises(LedgerError, match=r"cannot record \{1\}, a set.*ledger.enabled = false"):
        ledger.resulted(0, 0, 0, 0, kind="tool", name="x", request_digest="", payload={"found": {1}})
    ledger.flush()  # nothing was handed over: the ledger is sound


# ---- the account -----------------------------------------------------------------------------------------------------

FATES = {
    "pending": [],
    "whole": [("whole", {"failed": 1})],
    "trained": [("whole", {"failed": 1, "filtered": 1}), ("trained", {"trained": 2})],
    "stale": [("whole", {}), ("stale", {"stale": 4})],
    "filtered": [("filtered", {"filtered": 3, "failed": 1})],
    "skipped": [("whole", {"filtered": 1}), ("filtered", {"filtered": 3})],
    "failed": [("failed", {"failed": 4})],
}


@given(st.lists(st.tuples(st.sampled_from(list(FATES)), st.sampled_from("ab")), max_size=8), st.randoms())
@examples
def test_the_account_is_what_was_handed_over(fates: list[tuple[str, str]], rng: Any):
    events = [[("dispatch", {})] + FATES[fate] for fate, _ in fates]
    expected: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger.open(Path(folder))
        while any(events):
            group_id = rng.choice([group for group, left in enumerate(events) if left])
            state, settled = events[group_id].pop(0)
            for _ in range(rng.choice((1, 1, 2))):  # a replay repeats what is known
                if state == "dispatch":
                    dispatch(ledger, group_id, 4, fates[group_id][1])
                else:
                    ledger.decided(group_id, state, **settled)
            expected.update({"dispatched": 4} if state == "dispatch" else settled)
            if rng.random() < 0.1:
                ledger.close()
                ledger = Ledger.open(Path(folder))
            if rng.random() < 0.3:
                assert ledger.account() == _account(expected)
        assert ledger.account() == _account(expected)
        by_source = ledger.accounts().values()
        assert sum(account.pending for account in by_source) == ledger.account().pending
        unfinished = [item.group for item in ledger.unfinished()]
        assert sum(group.pending for group in unfinished) == ledger.account().pending
        assert [g.group_id for g in unfinished] == [n for n, f in enumerate(fates) if f[0] in ("pending", "whole")]
        ledger.close()


def _account(counted: Counter[str]) -> Account:
    settled = sum(counted[name] for name in ("trained", "filtered", "failed", "stale"))
    return Account(**counted, pending=counted["dispatched"] - settled)


@pytest.mark.parametrize(
    ("decisions", "problem"),
    [
        ([("trained", {"trained": 3})], "does not add up: it has 2 episodes, of which 2 had no end"),
        ([("trained", {"trained": 1})], "does not add up"),
        ([("whole", {"failed": 1}), ("trained", {"trained": 2})], "of which 1 had no end"),
        ([("trained", {"trained": 2}), ("stale", {"stale": 2})], "group 0 was trained and cannot be stale"),
    ],
)
def test_an_episode_cannot_have_two_ends_or_none(tmp_path: Path, decisions: list, problem: str):
    with Ledger.open(tmp_path) as ledger:
        dispatch(ledger, 0, size=2)
        for state, settled in decisions:
            ledger.decided(0, state, **settled)
        with pytest.raises(LedgerError, match=problem):
            ledger.flush()
    with LedgerReader.read(tmp_path) as reader:
        assert reader.account().dispatched in (0, 2)  # a prefix


def test_a_group_that_is_dispatched_as_another_task_is_refused(ledger: Ledger):
    dispatch(ledger, 0)
    ledger.dispatched(0, (0, 1), "task 1", "default", 1, 0)
    with pytest.raises(LedgerError, match=r"was dispatched as .* the same tasks, seed and rollout.group_size"):
        ledger.flush()


def test_a_second_attempt_gives_up_the_first_and_is_counted(ledger: Ledger):
    dispatch(ledger, 0, size=2)
    for attempt in (0, 1):
        ledger.started(0, 0, attempt, seed=4)
    assert (ledger.unfinished()[0].running, ledger.restarted()) == ({0: 1}, 1)
    second = simple_episode(0, attempt=1)
    play(ledger, second)
    (unfinished,) = ledger.unfinished()
    assert (unfinished.running, unfinished.episodes) == ({}, {0: second.episode})


def test_a_call_is_recorded_once_per_attempt(ledger: Ledger):
    played = simple_episode(0)
    dispatch(ledger, 0)
    play(ledger, played)
    play(ledger, played)
    with pytest.raises(LedgerError, match="call 0 of group 0, rollout 0, attempt 0 was recorded before"):
        ledger.flush()


# ---- training and evaluation -----------------------------------------------------------------------------------------


def test_batches_come_back_in_order_with_what_is_not_committed(ledger: Ledger):
    for group_id in range(4):
        dispatch(ledger, group_id)
    train(ledger, 0, [0, 1])
    ledger.batch(1, 1, [3, 2], again=[1])
    ledger.batch(1, 1, [3, 2], again=[1])  # a replay
    first, second = ledger.batches_from(0)
    assert (first.group_ids, first.steps) == ((0, 1), 1)
    assert (second.group_ids, second.again, second.steps) == ((3, 2), (1,), None)
    assert ledger.batches_from(1) == [second]
    assert ledger.last_position() == (0, 3) and ledger.last_group_id() == 3
    assert ledger.last_weight_sync() == ledger.weight_sync(1)


def test_a_recorded_batch_cannot_become_another(ledger: Ledger):
    ledger.batch(0, 0, [1, 2])
    ledger.batch(0, 0, [1, 3])
    with pytest.raises(LedgerError, match="batch of step 1 was recorded with groups"):
        ledger.flush()


def test_an_evaluation_made_again_replaces_the_first(ledger: Ledger):
    episode = simple_episode(0).episode
    ledger.evaluated(0, "a", {"pass@1": 0.1}, [episode])
    ledger.evaluated(0, "b", {"pass@1": 0.2})
    ledger.evaluated(0, "a", {"pass@1": 0.3}, [episode, episode])
    found = [(record.step, record.name, record.metrics["pass@1"]) for record in ledger.evaluations()]
    assert found == [(0, "b", 0.2), (0, "a", 0.3)]
    assert len(list(ledger.episodes("eval"))) == 2


def test_episodes_are_reported_with_their_outcome(ledger: Ledger):
    failed = replace(simple_episode(0, 1).episode, error="broke", termination="error")
    dispatch(ledger, 0, size=2)
    play(ledger, simple_episode(0))
    ledger.finished(failed)
    ledger.decided(0, "whole", failed=1)
    dispatch(ledger, 1)
    play(ledger, simple_episode(1))
    ledger.decided(1, "filtered", reason="uniform rewards", step=7, filtered=1)
    train(ledger, 0, [0])
    first, second, third = ledger.episodes()
    assert (first.decision, first.step, first.oldest_version, first.newest_version) == ("trained", 0, 0, 1)
    assert (second.decision, second.episode) == ("failed", failed)
    assert (third.decision, third.reason) == ("filtered", "uniform rewards")
    assert [record.episode.group_id for record in ledger.episodes(first_step=5)] == [1]
    assert [record.episode.group_id for record in ledger.episodes(end_step=5)] == [0, 0]


# ---- retention -------------------------------------------------------------------------------------------------------


def record_steps(ledger: Ledger, first: int, end: int, groups: int = 2) -> None:
    """Steps of so many trained groups each, and one that is thrown away; pruned after each."""
    for step in range(first, end):
        ids = [step * 10 + n for n in range(groups + 1)]
        for group_id in ids:
            dispatch(ledger, group_id)
            play(ledger, simple_episode(group_id, words=400))
        ledger.decided(ids[-1], "filtered", filtered=1)
        train(ledger, step, ids[:-1])
        ledger.prune(before_step=step)


def pruned_groups(ledger: LedgerReader) -> set[int]:
    return {record.episode.group_id for record in ledger.episodes() if record.pruned}


def test_retention_bounds_the_size_and_keeps_the_metrics(tmp_path: Path):
    sizes = {}
    with Ledger.open(tmp_path, LedgerSection(keep_steps=2)) as ledger:
        for end in (20, 40, 60):
            record_steps(ledger, end - 20, end)
            ledger.flush()
            sizes[end] = ledger.size_bytes()
        assert sizes[60] < sizes[20] * 1.5
        assert ledger.account() == Account(dispatched=180, trained=120, filtered=60)
        records = list(ledger.episodes())
        assert len(records) == 180 and all(record.generated_tokens == 4 for record in records)
        with pytest.raises(LedgerError, match=r"group 0 are no longer in .*raise ledger.keep_steps"):
            ledger.group(0)
        assert pruned_groups(ledger) == {n for n in range(580) if n % 10 < 3}


def test_retention_spares_what_may_be_needed(tmp_path: Path):
    with Ledger.open(tmp_path, LedgerSection(keep_steps=1)) as ledger:
        for group_id in range(6):
            dispatch(ledger, group_id)
            play(ledger, simple_episode(group_id))
        for step in range(4):
            train(ledger, step, [step])  # groups 4 and 5 have no decision
        ledger.batch(4, 4, [], again=[0])  # group 0 is used again
        ledger.prune(before_step=3, keep=[1])
        assert pruned_groups(ledger) == {2}
        assert [len(item.episodes) for item in ledger.unfinished()] == [1, 1]
        ledger.prune(before_step=0)
        assert pruned_groups(ledger) == {2}


def test_without_retention_nothing_is_deleted(ledger: Ledger):
    record_steps(ledger, 0, 5)
    assert pruned_groups(ledger) == set()


# ---- several at once -------------------------------------------------------------------------------------------------


def test_a_reader_sees_a_consistent_ledger_while_it_is_written(tmp_path: Path):
    with Ledger.open(tmp_path) as ledger:
        done = threading.Event()

        def write() -> None:
            for step in range(60):
                dispatch(ledger, step)
                play(ledger, simple_episode(step))
                train(ledger, step, [step])
            done.set()

        writing = threading.Thread(target=write)
        writing.start()
        seen = 0
        with LedgerReader.read(tmp_path) as reader:
            while not done.is_set() or seen < 60:
                records = list(reader.episodes())
                assert all(record.episode == expected(record.episode).episode for record in records)
                assert seen <= len(records) <= reader.account().dispatched
                seen = len(records)
        writing.join()


def expected(episode: Episode) -> Played:
    return simple_episode(episode.group_id)


async def test_flushed_waits_in_an_event_loop(tmp_path: Path):
    with Ledger.open(tmp_path) as ledger:
        dispatch(ledger, 0)
        await ledger.flushed()
        with LedgerReader.read(tmp_path) as reader:
            assert reader.account().dispatched == 1


def test_a_closed_ledger_records_no_more(tmp_path: Path):
    ledger = Ledger.open(tmp_path)
    ledger.close()
    ledger.close()
    with pytest.raises(LedgerError, match="was closed"):
        dispatch(ledger, 0)
