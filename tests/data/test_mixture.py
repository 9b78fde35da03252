"""Mixtures, splits and overlaps: what is drawn how often, and what never stands on both sides."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import examples
from headrace.config import DataSection
from headrace.config.loading import build_config
from headrace.data.mixture import MixtureOrder, shares
from headrace.data.sampler import TaskSampler
from headrace.data.split import overlaps, prompt_key, split_tasks
from headrace.data.task import Task
from headrace.data.training import TrainingData, check_overlap, load_evaluation, load_training, make_sampler
from headrace.errors import ConfigError, DataError

sizes_and_weights = st.lists(st.tuples(st.integers(1, 12), st.floats(0.05, 20)), min_size=1, max_size=4)


def texts(*instructions: str) -> list[Task]:
    return [Task(str(number), instruction=text) for number, text in enumerate(instructions)]


def numbered(count: int, word: str = "What is") -> list[Task]:
    return texts(*(f"{word} {number}?" for number in range(count)))


def ids(tasks: Sequence[Task]) -> set[str]:
    return {task.id for task in tasks}


# ---- the order -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "weights", "expected"),
    [(10, [1, 1], [5, 5]), (10, [3, 1], [8, 2]), (9, [1, 1], [5, 4]), (10, [1000, 1], [9, 1]), (7, [2.0], [7])],
)
def test_an_epoch_is_divided_by_weight(count: int, weights: list[float], expected: list[int]) -> None:
    assert shares(count, weights) == expected


@examples
@given(sizes_and_weights)
def test_every_source_has_a_share_and_the_shares_are_the_whole(given: list[tuple[int, float]]) -> None:
    count, weights = sum(size for size, _ in given), [weight for _, weight in given]
    found = shares(count, weights)
    assert sum(found) == count and min(found) >= 1


def of_source(order: Sequence[int], sizes: Sequence[int], source: int) -> list[int]:
    first = sum(sizes[:source])
    return [task for task in order if first <= task < first + sizes[source]]


@examples
@given(sizes_and_weights, st.integers(0, 99), st.booleans())
def test_a_source_goes_through_all_its_tasks_before_any_comes_again(
    given: list[tuple[int, float]], seed: int, shuffle: bool
) -> None:
    sizes, weights = [size for size, _ in given], [weight for _, weight in given]
    order = MixtureOrder(sizes, weights, seed, shuffle)
    epochs = [order(epoch) for epoch in range(6)]
    assert all(len(epoch) == sum(sizes) for epoch in epochs)
    for source, size in enumerate(sizes):
        assert {len(of_source(epoch, sizes, source)) for epoch in epochs} == {order.draws[source]}
        drawn = [task for epoch in epochs for task in of_source(epoch, sizes, source)]
        passes = [drawn[start : start + size] for start in range(0, len(drawn) - size + 1, size)]
        assert all(len(set(one)) == size for one in passes)


@examples
@given(sizes_and_weights, st.integers(0, 99), st.integers(0, 20))
def test_an_epoch_depends_on_seed_and_number_only(given: list[tuple[int, float]], seed: int, epoch: int) -> None:
    sizes, weights = [size for size, _ in given], [weight for _, weight in given]
    walked = MixtureOrder(sizes, weights, seed)
    for number in range(3):
        walked(number)
    assert walked(epoch) == MixtureOrder(sizes, weights, seed)(epoch)


def test_without_shuffling_the_sources_take_turns() -> None:
    assert MixtureOrder([4, 4], [1.0, 1.0], shuffle=False)(0) == [0, 4, 1, 5, 2, 6, 3, 7]
    assert MixtureOrder([4, 2], [2.0, 1.0], shuffle=False)(0) == [0, 4, 1, 2, 5, 3]


def test_seeds_and_epochs_give_different_orders() -> None:
    orders = {tuple(MixtureOrder([20, 20], [1.0, 2.0], seed)(epoch)) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


@pytest.mark.parametrize("cut", [0, 1, 7, 20])
def test_a_mixture_continues_at_any_position(cut: int) -> None:
    def stream() -> TaskSampler:
        return TaskSampler(numbered(13), 3, 5, order=MixtureOrder([5, 8], [3.0, 1.0], 5))

    whole, first, second = stream(), stream(), stream()
    drawn = [whole.next_batch() for _ in range(30)]
    for _ in range(cut):
        first.next_batch()
    second.position = first.position
    assert [second.next_batch() for _ in range(30 - cut)] == drawn[cut:]
    assert [whole.draw_at(draw.position) for batch in drawn for draw in batch] == [d for batch in drawn for d in batch]


# ---- from a run file -------------------------------------------------------------------------------------------------


def section(**values: Any) -> DataSection:
    overlap = {"eval": {"sets": {"dev": {"tasks": "words"}}}} if "on_overlap" in values else {}
    return build_config({"data": values, **overlap}).data


def small() -> list[Task]:
    return numbered(6, "Small")


def large() -> list[dict[str, Any]]:
    said = [{"id": str(number), "instruction": f"Large {number}"} for number in range(12)]
    return [*said, {"id": "own", "instruction": "My own", "source": "elsewhere"}]


MIXTURE = {"a": {"tasks": "test_mixture:small", "weight": 3}, "b": {"tasks": "test_mixture:large"}}


def test_a_task_has_the_source_that_its_row_says_or_the_name_in_the_mixture() -> None:
    found = load_training(section(mixture=MIXTURE))
    assert Counter(task.source for task in found.tasks) == {"a": 6, "b": 12, "elsewhere": 1}


def test_ids_that_two_sources_share_are_kept_apart() -> None:
    found = load_training(section(mixture=MIXTURE))
    assert len(ids(found.tasks)) == 19 and {"a/0", "b/0", "b/own"} <= ids(found.tasks)


def test_weights_say_how_often_a_source_is_drawn() -> None:
    data = section(mixture=MIXTURE)
    sampler = make_sampler(data, 19)
    drawn = Counter(draw.task.id.startswith("a/") for _ in range(40) for draw in sampler.next_batch())
    assert len(sampler) == 1 and drawn[True] / drawn.total() == pytest.approx(0.75, abs=0.03)


def test_the_system_prompt_is_put_before_the_tasks_of_every_source_that_has_none() -> None:
    mixture = {"a": MIXTURE["a"], "b": {**MIXTURE["b"], "system": "Be brief."}}
    found = load_training(section(mixture=mixture, system="Be kind."))
    said = {task.id[0]: task.messages[0]["content"] for task in found.tasks}
    assert said == {"a": "Be kind.", "b": "Be brief."}


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"mixture": MIXTURE, "args": {"count": 3}}, "data.mixture says where tasks come from; set it in"),
        ({"mixture": MIXTURE, "tasks": "x.jsonl"}, 'tasks = "x.jsonl" has no effect'),
        ({"mixture": {"a": {"tasks": "b", "weight": 0}}}, "data.mixture.a.weight"),
        ({"mixture": {"a": {}}}, "data.mixture.a.tasks"),
        ({"holdout": 1.0}, "a share is below 1"),
        ({"columns": {"question": "x"}}, "a task has no field question"),
        ({"columns": {"instruction": "x"}, "template": "{x}"}, "both say what the model is asked"),
    ],
)
def test_a_mistake_in_the_data_section_is_reported(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        section(**values)
    assert says in str(raised.value)


# ---- the split -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("What is 2+2?", "  what is\n2+2? ", True),
        ("ﬁve", "five", True),
        ("What is 2+2?", "What is 2+3?", False),
        ("", "x", False),
    ],
)
def test_spacing_and_case_do_not_make_another_question(one: str, other: str, same: bool) -> None:
    first, second = texts(one, other)
    assert (prompt_key(first) == prompt_key(second)) == same


def test_a_system_prompt_and_the_reply_do_not_make_another_question() -> None:
    talk = ({"role": "system", "content": "S"}, {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"})
    assert prompt_key(Task("a", talk)) == prompt_key(Task("b", instruction="q"))


@examples
@given(st.lists(st.integers(0, 30), min_size=2, max_size=60), st.randoms(use_true_random=False), st.booleans())
def test_the_same_question_never_stands_on_both_sides_in_whatever_order(
    numbers: list[int], rng: random.Random, as_share: bool
) -> None:
    tasks = texts(*(f"{'  ' * rng.randint(0, 2)}Question {number}" for number in numbers))
    holdout = 0.3 if as_share else 3
    try:
        split = split_tasks(tasks, holdout)
    except DataError:  # all of them are held out
        return
    assert not {prompt_key(task) for task in split.train} & {prompt_key(task) for task in split.held_out}
    assert overlaps(split.train, {"held out": split.held_out}) == {"held out": []}
    assert ids(split.train) | ids(split.held_out) == ids(tasks)
    mixed = rng.sample(tasks, len(tasks))
    assert ids(split_tasks(mixed, holdout).held_out) == ids(split.held_out)


@pytest.mark.parametrize(("holdout", "low", "high"), [(0.1, 70, 130), (0.5, 450, 550), (200, 200, 200), (0, 0, 0)])
def test_a_share_or_a_number_is_held_out(holdout: int | float, low: int, high: int) -> None:
    split = split_tasks(numbered(1000), holdout)
    assert low <= len(split.held_out) <= high and len(split.train) + len(split.held_out) == 1000


def test_more_tasks_do_not_move_a_question_to_the_other_side() -> None:
    few, many = split_tasks(numbered(100), 0.2), split_tasks(numbered(1000), 0.2)
    assert ids(few.held_out) <= ids(many.held_out)


def test_holding_everything_out_is_an_error() -> None:
    with pytest.raises(DataError, match="leaves nothing to train of 3 tasks; lower it"):
        split_tasks(numbered(3), 3)


def test_a_mixture_is_split_together_and_keeps_its_sources() -> None:
    data = section(mixture=MIXTURE, holdout=4)
    found = load_training(data)
    assert len(found.held_out) == 4 and found.sizes is not None and sum(found.sizes.values()) == 15
    assert len(make_sampler(data, 5, data=found).next_batch()) == 5


# ---- evaluation sets -------------------------------------------------------------------------------------------------


def held_out(args: dict[str, Any], tasks: list[Task], **more: Any) -> list[Task]:
    config = build_config({"eval": {"sets": {"dev": {"tasks": "holdout", "args": args, **more}}}})
    return load_evaluation(config.eval.sets["dev"], config.data, tasks, "dev").tasks


def test_an_evaluation_set_is_what_training_leaves_out() -> None:
    assert held_out({}, numbered(3)) == numbered(3)
    few = held_out({"count": 20}, numbered(60))
    assert len(few) == 20 and few == [task for task in numbered(60) if task in few]
    assert few[-1] not in numbered(30)  # from all over


@pytest.mark.parametrize(
    ("args", "tasks", "more", "says"),
    [
        ({}, 0, {}, "nothing is held out; set data.holdout"),
        ({"count": 4}, 3, {}, "args.count must be a number from 1 to 3, got 4"),
        ({"cuont": 4}, 3, {}, "args.cuont has no effect"),
        ({}, 3, {"template": "{x}"}, 'template = "{x}" has no effect'),
    ],
)
def test_a_mistake_in_a_held_out_set_is_reported(
    args: dict[str, Any], tasks: int, more: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        held_out(args, numbered(tasks), **more)
    assert 'eval.sets.dev.tasks = "holdout"' in str(raised.value) and says in str(raised.value)


SHARED = 'evaluation set "dev" ask what is also trained: "0", "1", "2", …; evaluate other tasks'


def test_tasks_that_are_trained_and_evaluated_are_reported() -> None:
    train, sets = numbered(8), {"dev": numbered(5), "other": numbered(5, "Else")}
    with pytest.warns(UserWarning, match="5 of 5 tasks") as warned:
        check_overlap(section(), train, sets)
    assert len(warned) == 1 and SHARED in str(warned[0].message)
    with pytest.raises(DataError) as raised:
        check_overlap(section(on_overlap="stop"), train, sets)
    assert SHARED in str(raised.value)


@pytest.mark.filterwarnings("error")
def test_nothing_is_said_where_nothing_is_shared_or_where_it_is_wanted() -> None:
    check_overlap(section(), numbered(8), {"dev": numbered(8, "Else")})
    check_overlap(section(on_overlap="ignore"), numbered(8), {"dev": numbered(8)})


def test_bad_rows_of_every_source_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"instruction": "a"}\n{"x": 1}\n')
    found = load_training(section(mixture={**MIXTURE, "c": {"tasks": str(path)}}, on_bad_row="skip"))
    assert isinstance(found, TrainingData) and len(found.bad_rows) == 1 and f"{path}, line 2" in found.bad_rows[0]
