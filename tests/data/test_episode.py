"""Tasks, model outputs, steps, trajectories, episodes and groups as data: exact, frozen, whole."""

from __future__ import annotations

import copy
import json
import math
import tempfile
from dataclasses import FrozenInstanceError, dataclass, fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import examples, step, trajectory
from headrace.data.codec import JsonData, altered
from headrace.data.episode import Episode, FinishReason, ModelOutput, Step, Trajectory, TrajectoryGroup
from headrace.data.sample import Sample
from headrace.data.task import Task, load_tasks
from headrace.errors import ConfigError, DataError

IMAGE = {"type": "image", "data": "aGVhZHJhY2U="}
OUTPUT = ModelOutput(
    text="hi", prompt_ids=(1, IMAGE, 2), completion_ids=(3, 4), logprobs=(-0.5, -0.25), model_logprobs=(-0.75, -1.0),
    versions=(6, 7), finish_reason=FinishReason.LENGTH, temperature=0.5, content="hi", reasoning="hm",
    tool_calls=({"name": "add", "arguments": {"a": [1]}},),
)  # fmt: skip

# ---- what the data may hold ------------------------------------------------------------------------------------------

numbers = st.floats(allow_nan=False)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | numbers | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": json_values}),
    max_size=3,
).map(tuple)
images = st.fixed_dictionaries({"type": st.just("image"), "data": st.text(max_size=8)})
prompts = st.lists(st.integers(0, 200_000) | images, max_size=6).map(tuple)
rewards = st.none() | numbers
names = st.text(max_size=8)


def lists_of(element: st.SearchStrategy[Any], length: int) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(element, min_size=length, max_size=length).map(tuple)


@st.composite
def model_outputs(draw: st.DrawFn) -> ModelOutput:
    size = draw(st.integers(0, 5))
    return ModelOutput(
        text=draw(st.text()),
        prompt_ids=draw(prompts),
        completion_ids=draw(lists_of(st.integers(0, 200_000), size)),
        logprobs=draw(lists_of(numbers, size)),
        model_logprobs=draw(lists_of(numbers, size)),
        versions=draw(lists_of(st.integers(), size)),
        finish_reason=draw(st.sampled_from(list(FinishReason))),
        temperature=draw(numbers),
        content=draw(st.text()),
        reasoning=draw(st.none() | st.text()),
        tool_calls=draw(st.lists(st.dictionaries(st.text(), json_values, max_size=2), max_size=2).map(tuple)),
    )


@st.composite
def steps(draw: st.DrawFn) -> Step:
    size = draw(st.integers(0, 5))
    logprobs = draw(st.none() | lists_of(numbers, size))
    return Step(
        prompt_ids=draw(prompts),
        response_ids=draw(lists_of(st.integers(0, 200_000), size)),
        logprobs=logprobs,
        versions=draw(st.none() | lists_of(st.integers(), size)) if logprobs is not None else None,
        messages=draw(messages),
        text=draw(st.text()),
        reward=draw(rewards),
        advantage=draw(st.none() | lists_of(numbers, size)),
        temperature=draw(numbers),
        teacher_messages=draw(st.none() | messages),
        call=draw(st.integers(0, 9)),
    )


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    tokens = draw(st.lists(st.integers(0, 200_000) | images, min_size=1, max_size=6).map(tuple))
    size = len(tokens) - 1
    return Sample(
        tokens=tokens,
        loss_mask=draw(lists_of(st.integers(0, 1), size)),
        logprobs=draw(lists_of(numbers, size)),
        versions=draw(lists_of(st.integers(), size)),
        advantages=draw(lists_of(numbers, size)),
        role=draw(names),
        task_id=draw(names),
        reward=draw(rewards),
    )


trajectories = st.builds(Trajectory, st.lists(steps(), max_size=2).map(tuple), names, rewards)
several = st.lists(trajectories, max_size=2).map(tuple)
episodes = st.builds(
    Episode, names, several, st.integers(0), st.integers(0), seed=st.integers(0), is_correct=st.none() | st.booleans(),
    metrics=st.dictionaries(names, numbers, max_size=2), error=st.none() | st.text(),
)  # fmt: skip
groups = st.builds(TrajectoryGroup, names, names, several, st.integers(0))
tasks = st.builds(
    Task, names, messages, st.text(), json_values, names, st.dictionaries(st.text(), json_values, max_size=3)
)
anything = st.one_of(model_outputs(), steps(), samples(), trajectories, episodes, groups, tasks)


# ---- JSON ------------------------------------------------------------------------------------------------------------


@examples
@given(anything)
def test_json_gives_the_same_object_back(thing: JsonData) -> None:
    text = thing.to_json()
    assert "\n" not in text
    again = type(thing).from_json(text)
    assert again == thing
    assert again.to_json() == text


@examples
@given(anything)
def test_a_dict_is_plain_json_and_gives_the_same_object_back(thing: JsonData) -> None:
    plain = thing.to_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert type(thing).from_dict(plain) == thing


def test_infinite_logprobs_survive_json() -> None:
    one = step([1], [2], logprobs=(-math.inf,))
    assert Step.from_json(one.to_json()) == one


def test_an_image_block_stays_where_it_is_among_the_ids() -> None:
    again = ModelOutput.from_json(OUTPUT.to_json())
    assert again.prompt_ids == (1, IMAGE, 2)


def test_an_unknown_field_is_an_error_that_names_it() -> None:
    with pytest.raises(DataError, match="Step has no field respones_ids; its fields are prompt_ids, response_ids"):
        Step.from_dict({"prompt_ids": [1], "respones_ids": [2]})


def test_a_missing_field_is_an_error_that_names_it() -> None:
    with pytest.raises(DataError, match="Step needs the field response_ids, which is missing"):
        Step.from_dict({"prompt_ids": [1]})


def test_a_field_of_a_wrong_kind_is_an_error_that_names_it() -> None:
    with pytest.raises(DataError, match="Trajectory: steps cannot be 3"):
        Trajectory.from_dict({"steps": 3})


# ---- frozen, and with copies of their own ----------------------------------------------------------------------------

EXAMPLES = [
    OUTPUT,
    step([1], [2]),
    trajectory(1.0),
    Episode("t"),
    TrajectoryGroup("t", "agent", (trajectory(1.0),)),
    Task("t", instruction="Do it."),
    Sample((1, 2), (1,), (-1.0,), (0,), (1.0,)),
]


@pytest.mark.parametrize("thing", EXAMPLES, ids=lambda thing: type(thing).__name__)
def test_no_field_can_be_changed(thing: Any) -> None:
    for field in fields(thing):
        with pytest.raises(FrozenInstanceError):
            setattr(thing, field.name, getattr(thing, field.name))


def test_a_step_keeps_its_own_messages() -> None:
    conversation: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": "2 + 2?"}, IMAGE]}]
    before = copy.deepcopy(conversation)
    kept = Step((1,), (2,), messages=tuple(conversation), teacher_messages=tuple(conversation))
    asked = Step.from_model_output(OUTPUT, conversation)
    conversation[0]["content"][0]["text"] = "3 + 3?"
    conversation[0]["role"] = "system"
    conversation.append(OUTPUT.message)
    assert list(asked.messages) == list(kept.messages) == list(kept.teacher_messages or ()) == before


def test_a_task_keeps_its_own_messages() -> None:
    conversation = [{"role": "user", "content": ["look", IMAGE]}]
    task = Task("t", tuple(conversation))
    conversation[0]["content"].clear()  # type: ignore[union-attr]
    assert task.messages == ({"role": "user", "content": ["look", IMAGE]},)


def test_a_changed_copy_of_a_step_shares_its_messages() -> None:
    one = Step((1,), (2,), messages=({"role": "user", "content": "a"},), teacher_messages=({"role": "user"},))
    other = replace(replace(one, reward=1.0), advantage=(0.5,))
    assert other.messages is one.messages and other.teacher_messages is one.teacher_messages


def test_a_step_copies_the_messages_of_a_task() -> None:
    task = Task("t", instruction="Do it.")
    asked = Step((1,), (2,), messages=task.messages)
    task.messages[0]["content"] = "Do something else."
    assert asked.messages == ({"role": "user", "content": "Do it."},)


def test_changing_a_reply_leaves_the_output_as_it_was() -> None:
    OUTPUT.message["tool_calls"][0]["arguments"]["a"].append(2)
    assert OUTPUT.tool_calls == ({"name": "add", "arguments": {"a": [1]}},)


def test_lists_become_tuples() -> None:
    built = Step([1], [2, 3], [-1.0, -2.0], [0, 0], advantage=[0.5, 0.5])  # type: ignore[arg-type]
    assert built == Step((1,), (2, 3), (-1.0, -2.0), (0, 0), advantage=(0.5, 0.5))
    assert Trajectory([built]) == Trajectory((built,))  # type: ignore[arg-type]
    things: list[Any] = [OUTPUT, Sample((1, 2), (1,), (-1.0,), (0,), (1.0,), (-2.0,), (0.5,))]
    for thing in things:
        values = {field.name: getattr(thing, field.name) for field in fields(thing)}
        lists = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
        assert type(thing)(**lists) == thing


# ---- Step ------------------------------------------------------------------------------------------------------------


@examples
@given(model_outputs())
def test_a_step_has_exactly_what_was_sampled(output: ModelOutput) -> None:
    made = Step.from_model_output(output, reward=0.5)
    assert made.prompt_ids == output.prompt_ids
    assert made.response_ids == output.completion_ids
    assert made.logprobs == output.logprobs
    assert made.versions == output.versions
    assert (made.text, made.temperature, made.finish_reason) == (output.text, output.temperature, output.finish_reason)
    assert made.reward == 0.5 and made.advantage is None


def wrong_lengths() -> list[Any]:
    output = {
        "text": "", "prompt_ids": (1,), "completion_ids": (2, 3, 4), "logprobs": (0.0,) * 3,
        "model_logprobs": (0.0,) * 3, "versions": (0,) * 3,
    }  # fmt: skip
    made = {"prompt_ids": (1,), "response_ids": (2, 3, 4)}
    sample = {
        "tokens": (1, 2, 3, 4), "loss_mask": (1,) * 3, "logprobs": (0.0,) * 3, "versions": (0,) * 3,
        "advantages": (0.0,) * 3,
    }  # fmt: skip
    return [
        *(pytest.param(ModelOutput, output, name, id=f"ModelOutput.{name}") for name in list(output)[3:]),
        *(pytest.param(Step, made, name, id=f"Step.{name}") for name in ("logprobs", "versions")),
        *(pytest.param(Sample, sample, name, id=f"Sample.{name}") for name in list(sample)[1:]),
    ]


@pytest.mark.parametrize(("kind", "good", "name"), wrong_lengths())
@pytest.mark.parametrize("length", [0, 2, 5])
def test_a_wrong_length_is_an_error_that_names_both(kind: Any, good: dict[str, Any], name: str, length: int) -> None:
    kind(**good)
    changed = {**good, name: (0,) * length}
    if (name, length) == ("model_logprobs", 0):  # an engine may not know them
        assert kind(**changed).model_logprobs == ()
        return
    with pytest.raises(DataError) as raised:
        kind(**changed)
    assert f"{kind.__name__}: {name} has length {length}" in str(raised.value)
    assert "3" in str(raised.value)


@pytest.mark.parametrize("scalar", [1.0, 0, -2.5, np.float32(0.5), np.array(2.0)])
def test_a_scalar_advantage_is_an_error_that_says_what_is_wanted(scalar: Any) -> None:
    for make in (lambda: Step((1,), (2,), advantage=scalar), lambda: Step.from_model_output(OUTPUT, advantage=scalar)):
        with pytest.raises(DataError, match=f"one number per response token, got the scalar {scalar}"):
            make()


def test_an_advantage_list_is_kept_whatever_its_length() -> None:
    for values in ([0.5, -0.5], [0.5], [0.5] * 3, []):
        made = Step.from_model_output(OUTPUT, advantage=values)
        assert made.advantage == tuple(values)
        assert Step.from_json(made.to_json()) == made


def test_versions_without_logprobs_are_an_error() -> None:
    with pytest.raises(DataError, match="Step: versions without logprobs"):
        Step((1,), (2, 3), versions=(0, 0))


# ---- rewards ---------------------------------------------------------------------------------------------------------


def rewarded(reward: float | None, *step_rewards: float | None) -> Trajectory:
    return Trajectory(tuple(step([1], [2], reward=r) for r in step_rewards), reward=reward)


def group(*members: Trajectory) -> TrajectoryGroup:
    return TrajectoryGroup("task 7", "solver", members)


def test_group_rewards_are_those_of_the_trajectories() -> None:
    assert group(rewarded(1.0, 0.25), rewarded(0.0), rewarded(0.5, None)).rewards() == (1.0, 0.0, 0.5)


def test_missing_group_rewards_are_those_of_the_last_steps() -> None:
    assert group(rewarded(None, 9.0, 0.25), rewarded(None, None, 0.0)).rewards() == (0.25, 0.0)


def test_a_mixture_of_set_and_missing_rewards_names_the_group() -> None:
    with pytest.raises(DataError, match='group of task "task 7", role "solver": 1 of 3 trajectories have no reward'):
        group(rewarded(1.0, 1.0), rewarded(None, 1.0), rewarded(0.0)).rewards()


@pytest.mark.parametrize("lacking", [rewarded(None, 1.0, None), rewarded(None)])
def test_a_group_without_any_reward_is_an_error_that_names_it(lacking: Trajectory) -> None:
    with pytest.raises(DataError, match='group of task "task 7", role "solver": neither'):
        group(rewarded(None, 1.0), lacking).rewards()


def test_the_reward_of_an_episode_is_the_mean_of_its_trajectories() -> None:
    assert Episode("t", (rewarded(1.0), rewarded(0.0), rewarded(None))).reward == 0.5
    assert Episode("t").reward == 0.0


def test_an_episode_whose_reward_stands_on_its_last_step_has_that_reward() -> None:
    assert Episode("t", (rewarded(None, 0.0, 1.0),)).reward == 1.0


@pytest.mark.parametrize("reward", [1, True, np.float32(1), np.int64(1), np.bool_(True), np.array(1.0), Fraction(1)])
def test_whatever_is_a_number_is_a_reward_and_can_be_written_as_json(reward: Any) -> None:
    for thing in (Trajectory((), reward=reward), Step((1,), (2,), reward=reward)):
        assert thing.reward == 1.0 and type(thing.reward) is float
        assert type(thing).from_json(thing.to_json()) == thing


@pytest.mark.parametrize("reward", ["1", [1.0], np.array([1.0]), np.str_("1"), {}])
def test_what_is_no_number_is_no_reward(reward: Any) -> None:
    with pytest.raises(DataError, match="Trajectory: reward must be a number, got "):
        Trajectory((), reward=reward)


def test_the_text_of_an_episode_is_that_of_the_last_call_of_any_role() -> None:
    def said(*calls: int) -> Trajectory:
        return Trajectory(tuple(step([1], [2], text=f"reply {call}", call=call) for call in calls))

    assert Episode("t", (said(0, 2), said(1))).text == "reply 2"
    assert Episode("t", (said(0, 1), said(2))).text == "reply 2"
    assert Episode("t", (said(0), Trajectory(()))).text == "reply 0"
    assert Episode("t").text == ""


def test_of_calls_that_nobody_numbered_the_last_trajectorys_last_counts() -> None:
    written = [Trajectory((step([1], [2], text=text),)) for text in ("one", "two")]
    assert Episode("t", tuple(written)).text == "two"


def test_an_episode_counts_response_tokens_and_those_of_them_that_were_sampled() -> None:
    one = Trajectory((step([1, 2, 3], [4, 5]), step([1, 2, 3, 4, 5, 6], [7])))
    given = Trajectory((Step((1,), (2, 3, 4, 5)),))
    said = Episode("t", (one, given, trajectory()))
    assert (said.response_tokens, said.generated_tokens) == (10, 6)


# ---- Task ------------------------------------------------------------------------------------------------------------


def test_an_instruction_becomes_one_user_message() -> None:
    assert Task("t", instruction="Do it.").messages == ({"role": "user", "content": "Do it."},)


def test_a_task_needs_messages_or_an_instruction() -> None:
    with pytest.raises(DataError, match='task "t" has neither messages nor an instruction'):
        Task("t")


@examples
@given(st.lists(tasks, min_size=1, max_size=4, unique_by=lambda task: task.id))
def test_a_file_of_tasks_gives_the_tasks_back(written: list[Task]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tasks.jsonl"
        path.write_text("\n".join(task.to_json() for task in written) + "\n\n", encoding="utf-8", newline="")
        assert load_tasks(str(path)) == written


def test_a_line_separator_inside_a_text_does_not_end_the_line(tmp_path: Path) -> None:
    task = Task("t", instruction="one\u2028two\x85three")
    path = tmp_path / "tasks.jsonl"
    path.write_text(task.to_json(), encoding="utf-8")
    assert load_tasks(str(path)) == [task]


def test_a_task_without_an_id_is_named_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"instruction": "a"}\r\n\r\n{"instruction": "b"}\r\n')
    assert [task.id for task in load_tasks(str(path))] == ["1", "3"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"instruction": "a"}\n{"instruction"', "line 2: not valid JSON"),
        ('{"instruction": "a"}\n[1]', r"line 2: expected an object with messages or an instruction, got \[1\]"),
        ('{"id": "x"}', 'line 1: task "x" has neither messages nor an instruction'),
        ('{"instructon": "a"}', "line 1: Task has no field instructon"),
        ('{"id": "x", "instruction": "a"}\n{"id": "x", "instruction": "b"}', 'two tasks with the id "x"'),
        ("\n", "has no tasks"),
        ('{"messages": 5}', "line 1: Task: messages cannot be 5"),
        ('{"messages": "Do it."}', "line 1: task \"1\": messages must be objects with a role, and one is 'D'"),
        ('{"messages": [{"content": "a"}]}', 'line 1: task "1": messages must be objects with a role'),
        ('{"instruction": 5}', 'line 1: task "1": instruction must be text, got 5'),
        ('{"instruction": "a", "source": null}', 'line 1: task "1": source must be text, got None'),
        ('{"instruction": "a", "metadata": [1]}', r'line 1: task "1": metadata must be an object, got \[1\]'),
    ],
)
def test_a_bad_file_of_tasks_is_an_error_that_names_the_place(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=says) as raised:
        load_tasks(str(path))
    assert str(path) in str(raised.value)


def test_a_missing_file_of_tasks_is_an_error() -> None:
    with pytest.raises(DataError, match=r"there is no task file nowhere\.jsonl"):
        load_tasks("nowhere.jsonl")


def test_a_file_of_tasks_takes_no_arguments(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"instruction": "a"}')
    with pytest.raises(ConfigError, match=r"tasks\.jsonl takes no arguments, got count, split; remove args"):
        load_tasks(str(path), split="train", count=3)


@pytest.mark.parametrize(
    ("source", "args", "reason"),
    [
        ("countdown", {"cuont": 3}, "got an unexpected keyword argument 'cuont'"),
        ("own_tasks.py:sums", {}, "missing a required argument: 'most'"),
        ("own_tasks.py:sums", {"most": 2, "source": "x"}, "got an unexpected keyword argument 'source'"),
    ],
)
def test_arguments_that_a_source_does_not_take_are_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, args: dict[str, Any], reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own_tasks.py").write_text("def sums(most):\n    yield {'instruction': f'{most}+1='}\n")
    with pytest.raises(ConfigError) as raised:
        load_tasks(source, **args)
    assert f'the task source "{source}"' in str(raised.value) and reason in str(raised.value)


def test_an_error_inside_a_source_names_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken_tasks.py").write_text("def tasks():\n    return [1 + 'a']\n")
    with pytest.raises(DataError, match=r"unsupported operand .*broken_tasks\.py:2: return \[1 \+ 'a'\]"):
        load_tasks("broken_tasks.py:tasks")


def test_tasks_may_be_given_as_dicts() -> None:
    assert load_tasks([{"id": "a", "instruction": "x"}]) == [Task("a", instruction="x")]


def test_a_dict_without_an_id_is_named_by_its_row() -> None:
    rows = [
        {"instruction": "a"},
        {"id": 7, "instruction": "b"},
        Task("x", instruction="c"),
        {"id": None, "instruction": "d"},
    ]
    assert [task.id for task in load_tasks(rows)] == ["1", "7", "x", "4"]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"id": "a"}, 'tasks, row 2: task "a" has neither messages nor an instruction'),
        ({"instructon": "a"}, "tasks, row 2: Task has no field instructon; its fields are id, messages"),
        ({"messages": 5}, "tasks, row 2: Task: messages cannot be 5"),
        ("Do it.", "tasks, row 2: expected an object with messages or an instruction, got 'Do it.'"),
    ],
)
def test_a_bad_row_is_an_error_that_names_row_and_field(row: Any, says: str) -> None:
    with pytest.raises(DataError) as raised:
        load_tasks([{"instruction": "a"}, row])
    assert str(raised.value).startswith(says) and "__init__" not in str(raised.value)


@dataclass(frozen=True, slots=True)
class LabelledStep(Step):
    label: str = ""


@pytest.mark.parametrize("before", [step([1], [2, 3]), LabelledStep((1,), (2, 3), (-0.5, -1.0), (0, 0), label="own")])
def test_altered_gives_what_replace_gives_and_leaves_the_original(before: Step) -> None:
    advantage = (0.5,) * len(before.response_ids)
    expected = replace(before, advantage=advantage)
    after = altered(before, advantage=advantage)
    assert type(after) is type(before) and after == expected and before.advantage is None
    with pytest.raises(FrozenInstanceError):
        after.advantage = None  # type: ignore[misc]
