"""Conversations and token ids: what was sampled is never tokenised again."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import FakeEngine, bundled_tokenizer, char_chat, examples
from headrace.data.episode import FinishReason, ModelOutput, Trajectory
from headrace.data.sample import merge_steps
from headrace.data.task import Message
from headrace.engines.base import Generation, SamplingParams
from headrace.errors import DataError, ModelError
from headrace.rollout.chat import ChatTemplate
from headrace.rollout.model_client import Model, hit_limit

USER: list[Message] = [{"role": "user", "content": "Make 24 from 3 4 2."}]
MORE: Message = {"role": "user", "content": "Once more."}


def tokenizer() -> Any:
    return bundled_tokenizer()


def chat() -> ChatTemplate:
    return ChatTemplate(tokenizer())


def text_of(ids: Sequence[int]) -> str:
    """Text with the special tokens shown."""
    return tokenizer().decode(list(ids))


def letter_by_letter(text: str) -> tuple[int, ...]:
    """Ids of the text split as the tokenizer itself never would."""
    return tuple(i for letter in text for i in tokenizer().encode(letter, add_special_tokens=False))


def reply_with(completion: Sequence[int], prompt: Sequence[int] | None = None, stop: Sequence[str] = ()) -> ModelOutput:
    size = len(completion)
    ended = completion[-1:] == (tokenizer().eos_token_id,)
    generation = Generation(
        tuple(chat().render(USER) if prompt is None else prompt), tuple(completion), (-1.0,) * size, (-1.0,) * size,
        (0,) * size, FinishReason.STOP if ended else FinishReason.LENGTH, 1.0,
    )  # fmt: skip
    return chat().parse(generation, stop)


def ended(text: str) -> ModelOutput:
    return reply_with((*letter_by_letter(text), tokenizer().eos_token_id))


def next_prompt(output: ModelOutput, *later: Message, before: list[Message] = USER) -> tuple[int, ...]:
    ids = chat().extend(before, output, [*before, *later])
    assert ids is not None
    return ids


# ---- extend ----------------------------------------------------------------------------------------------------------


def test_a_sampled_reply_stays_as_it_was_split() -> None:
    output = ended("I guess <answer>")
    ids = next_prompt(output, output.message, MORE)
    sampled = (*output.prompt_ids, *output.completion_ids)
    assert ids[: len(sampled)] == sampled
    rendered = chat().render([*USER, output.message, MORE])
    assert text_of(ids) == text_of(rendered) and ids != rendered  # the same text, which a tokenizer would split anew


def test_the_end_token_is_not_repeated() -> None:
    ids = next_prompt(ended("hm"), ended("hm").message, MORE)
    assert text_of(ids).count("<|im_end|>") == 3
    assert text_of(ids).endswith("hm<|im_end|>\n<|im_start|>user\nOnce more.<|im_end|>\n<|im_start|>assistant\n")


def test_a_reply_cut_by_its_length_is_closed() -> None:
    output = reply_with(letter_by_letter("I gue"))
    ids = next_prompt(output, output.message, MORE)
    assert hit_limit(output)
    assert ids[: len(output.prompt_ids) + 5] == (*output.prompt_ids, *output.completion_ids)
    assert text_of(ids) == text_of(chat().render([*USER, output.message, MORE]))


def test_a_reply_cut_inside_a_character_is_kept() -> None:
    output = reply_with(tokenizer().encode("é", add_special_tokens=False)[:1])
    ids = next_prompt(output, output.message, MORE)
    assert ids[len(output.prompt_ids)] == output.completion_ids[0]
    assert text_of(ids) == text_of(chat().render([*USER, output.message, MORE]))


def test_an_empty_reply_is_extended() -> None:
    output = ended("")
    assert text_of(next_prompt(output, output.message, MORE)) == text_of(chat().render([*USER, output.message, MORE]))


def test_a_reply_that_another_token_ended_is_kept_and_closed() -> None:
    output = reply_with((*letter_by_letter("hm"), tokenizer().pad_token_id))
    ids = next_prompt(output, output.message, MORE)
    assert "hm<|endoftext|><|im_end|>\n<|im_start|>user" in text_of(ids)


def test_an_end_of_turn_that_is_not_the_tokenizers_end_token_is_not_repeated() -> None:
    other = copy.deepcopy(tokenizer())
    other.eos_token = "<|endoftext|>"  # as with models that end turns and texts with different tokens
    output = ended("hm")
    ids = ChatTemplate(other).extend(USER, output, [*USER, output.message, MORE])
    assert ids == next_prompt(output, output.message, MORE)


def test_a_stop_string_stays_in_the_ids_and_leaves_the_text() -> None:
    output = reply_with(letter_by_letter("one STOP"), stop=("STOP", "never"))
    assert (output.text, output.content) == ("one ", "one ")
    ids = next_prompt(output, output.message, MORE)
    assert "one STOP<|im_end|>\n<|im_start|>user" in text_of(ids)


CHANGES: dict[str, Callable[[Message], list[Message]]] = {
    "earlier message changed": lambda reply: [{**USER[0], "content": "Make 25."}, reply, MORE],
    "earlier message dropped": lambda reply: [reply, MORE],
    "changed where the template does not show it": lambda reply: [{**USER[0], "image": "b"}, reply, MORE],
    "nothing new": lambda reply: [*USER],
    "reply left out": lambda reply: [*USER, MORE],
    "reply rewritten": lambda reply: [*USER, {**reply, "content": "ah"}, MORE],
    "reply shortened": lambda reply: [*USER, {**reply, "content": "h"}, MORE],
    "written on after its end": lambda reply: [*USER, {**reply, "content": "hm, wait"}, MORE],
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_history_is_not_extended(change: str) -> None:
    output = ended("hm")
    assert chat().extend(USER, output, CHANGES[change](output.message)) is None


def test_an_empty_reply_that_was_filled_in_is_not_extended() -> None:
    assert chat().extend(USER, ended(""), [*USER, ended("hm").message, MORE]) is None


def test_a_cut_reply_may_be_written_on() -> None:
    output = reply_with(letter_by_letter("I gue"))
    written_on = {"role": "assistant", "content": "I guess so."}
    ids = next_prompt(output, written_on, MORE)
    assert ids[: len(output.prompt_ids) + 5] == (*output.prompt_ids, *output.completion_ids)
    assert text_of(ids) == text_of(chat().render([*USER, written_on, MORE]))


words = st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=8)


@examples
@given(st.lists(st.tuples(words, st.booleans(), words), min_size=1, max_size=4))
def test_a_conversation_of_any_texts_is_one_row_and_reads_as_rendered(turns: list[tuple[str, bool, str]]) -> None:
    messages, ids, steps = list(USER), chat().render(USER), []
    for reply, cut, question in turns:
        completion = letter_by_letter(reply)
        output = reply_with(completion if cut else (*completion, tokenizer().eos_token_id), ids)
        steps.append((output.prompt_ids, output.completion_ids))
        later = [output.message, {"role": "user", "content": question}]
        ids = next_prompt(output, *later, before=messages)
        messages += later
    assert text_of(ids) == text_of(chat().render(messages))
    for prompt, completion in steps:
        assert ids[: len(prompt) + len(completion)] == (*prompt, *completion)


# ---- parse -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\nhm\n</think>\n\n42", "hm", "42"),
        ("<think></think>42", "", "42"),
        ("42 <think>hm</think>", None, "42 <think>hm</think>"),
        ("<think>never ends", None, "<think>never ends"),
    ],
)
def test_reasoning_is_separated_from_content(text: str, reasoning: str | None, content: str) -> None:
    output = ended(text)
    assert (output.text, output.reasoning, output.content) == (text, reasoning, content)
    assert output.message.get("reasoning_content") == reasoning


@pytest.mark.parametrize(
    ("opening", "text", "reasoning", "content"),
    [
        ("<think>", "hm</think>42", "hm", "42"),
        ("<think>\n", "hm\n</think>\n\n42", "hm", "42"),
        ("<think>\n", "</think>42", "", "42"),
        ("<think>\n", "<think>hm</think>42", "hm", "42"),
        ("<think>\n", "never ends", None, "never ends"),
        ("<think>\n\n</think>\n\n", "42</think>", None, "42</think>"),
        ("Do not <think> ", "hm</think>42", None, "hm</think>42"),
    ],
)
def test_reasoning_that_the_template_began_is_separated_from_content(
    opening: str, text: str, reasoning: str | None, content: str
) -> None:
    opened = copy.deepcopy(tokenizer())
    opened.chat_template += "{% if add_generation_prompt %}{{ " + repr(opening) + " }}{% endif %}"
    output = reply_with((*letter_by_letter(text), tokenizer().eos_token_id), ChatTemplate(opened).render(USER))
    assert (output.text, output.reasoning, output.content) == (text, reasoning, content)


def test_an_image_at_the_end_of_a_prompt_begins_no_reasoning() -> None:
    prompt: list[Any] = [*chat().render(USER), {"type": "image"}]
    assert reply_with(letter_by_letter("hm</think>42"), prompt).reasoning is None


def test_a_tokenizer_without_a_chat_template_is_refused() -> None:
    bare = copy.deepcopy(tokenizer())
    bare.chat_template = None
    with pytest.raises(ModelError, match="no chat template; use an instruction-tuned model"):
        ChatTemplate(bare)


def test_messages_that_the_template_cannot_render_are_an_error() -> None:
    strict = copy.deepcopy(tokenizer())
    strict.chat_template = "{{ raise_exception('only the roles user and assistant') }}"
    with pytest.raises(DataError, match=r"the chat template cannot render the messages: .*only the roles"):
        ChatTemplate(strict).render(USER)


# ---- Model -----------------------------------------------------------------------------------------------------------


def model(*replies: str | Sequence[int]) -> tuple[Model, FakeEngine]:
    said = iter(replies)
    engine = FakeEngine(lambda seed: next(said), tokenizer())
    return Model(engine, chat(), SamplingParams(temperature=1.0, max_tokens=64), seed=3), engine


async def test_a_conversation_becomes_one_row_with_only_the_replies_trained() -> None:
    asked, engine = model((*letter_by_letter("I guess"), tokenizer().eos_token_id), "I guess 3")
    messages = list(USER)
    for _ in range(2):
        output = await asked.chat(messages)
        messages += [output.message, MORE]
    (row,) = merge_steps(asked.trajectories(1.0)[0])
    trained = [token for token, mask in zip(row.tokens[1:], row.loss_mask, strict=True) if mask]
    assert text_of(trained) == "I guess<|im_end|>I guess 3<|im_end|>"
    assert row.tokens[: len(engine.requests[1].prompt_ids)] == engine.requests[1].prompt_ids
    assert asked.diverged_prefixes == 0


async def test_a_changed_history_begins_a_new_row_and_is_counted() -> None:
    asked, engine = model("one", "two", "three")
    first = await asked.chat(USER)
    await asked.chat([{"role": "user", "content": "In short: go on."}])
    assert asked.diverged_prefixes == 1
    await asked.chat([*USER, first.message, MORE])  # goes on with the first again
    assert asked.diverged_prefixes == 1
    assert engine.requests[1].prompt_ids == chat().render([{"role": "user", "content": "In short: go on."}])
    assert len(merge_steps(asked.trajectories()[0])) == 2


async def test_a_history_changed_in_place_is_noticed() -> None:
    asked, engine = model("one", "two")
    messages: list[Message] = [{"role": "user", "content": [{"type": "text", "text": "Look."}]}]
    output = await asked.chat(messages)
    messages[0]["content"][0]["text"] = "Look again."
    messages.append(output.message)
    await asked.chat(messages)
    assert asked.diverged_prefixes == 1
    assert engine.requests[1].prompt_ids == chat().render(messages)
    assert asked.trajectories()[0].steps[0].messages[0]["content"][0]["text"] == "Look."


async def test_roles_have_conversations_of_their_own() -> None:
    asked, _ = model("one", "two", "three")
    first = await asked.chat(USER, role="solver")
    await asked.chat([MORE], role="critic")
    await asked.chat([*USER, first.message, MORE], role="solver")
    assert asked.diverged_prefixes == 0
    assert [(t.name, [s.text for s in t.steps]) for t in asked.trajectories()] == [
        ("solver", ["one", "three"]),
        ("critic", ["two"]),
    ]


async def test_calls_side_by_side_stand_in_the_order_in_which_they_were_made() -> None:
    for takes_s in ((0.03, 0.02, 0.01), (0.01, 0.02, 0.03)):
        engine = FakeEngine(lambda seed: f"reply {seed % 1000}", tokenizer(), takes_s)
        asked = Model(engine, chat(), SamplingParams(max_tokens=64), seed=3)
        first, second, third = await asyncio.gather(
            asked.chat(USER, role="late"), asked.chat(USER), asked.chat(USER, role="late")
        )
        said = [(t.name, [s.text for s in t.steps]) for t in asked.trajectories()]
        assert said == [("late", [first.text, third.text]), ("agent", [second.text])]
        assert [output.call for output in (first, second, third)] == [0, 1, 2]


@pytest.mark.parametrize("takes_s", [(0.02, 0.01, 0), (0.01, 0.02, 0)])
async def test_after_calls_side_by_side_the_conversation_continues_from_the_last_that_was_made(
    takes_s: tuple[float, ...],
) -> None:
    engine = FakeEngine(lambda seed: f"reply {seed % 1000}", tokenizer(), takes_s)
    asked = Model(engine, chat(), SamplingParams(max_tokens=64), seed=3)
    _, second = await asyncio.gather(asked.chat(USER), asked.chat(USER))
    await asked.chat([*USER, second.message, MORE])
    assert asked.diverged_prefixes == 1  # the second of the two; the third extends it
    sampled = (*second.prompt_ids, *second.completion_ids)
    assert engine.requests[2].prompt_ids[: len(sampled)] == sampled


async def test_while_the_last_call_is_not_answered_nothing_is_extended() -> None:
    async def prompt_of_the_third(takes_s: tuple[float, ...]) -> tuple[tuple[int, ...], int]:
        engine = FakeEngine(lambda seed: letter_by_letter(f"I guess {seed % 1000}"), tokenizer(), takes_s)
        asked = Model(engine, chat(), SamplingParams(max_tokens=64), seed=3)
        first, second = asyncio.create_task(asked.chat(USER)), asyncio.create_task(asked.chat([MORE]))
        output = await first
        await asyncio.sleep(0.02)
        await asked.chat([*USER, output.message, MORE])
        await second
        return engine.requests[2].prompt_ids, asked.diverged_prefixes

    assert await prompt_of_the_third((0, 0, 0)) == await prompt_of_the_third((0, 0.05, 0))


async def test_after_a_call_that_was_given_up_the_conversation_continues_from_the_answer_before() -> None:
    engine = FakeEngine(lambda seed: "hm", tokenizer(), (0, 10, 0))
    asked = Model(engine, chat(), SamplingParams(max_tokens=64), seed=3)
    first = await asked.chat(USER)
    messages = [*USER, first.message, MORE]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asked.chat(messages), 0.01)
    await asked.chat(messages)
    assert asked.diverged_prefixes == 0
    assert engine.requests[1].prompt_ids == engine.requests[2].prompt_ids
    assert [step.call for step in asked.trajectories()[0].steps] == [0, 2]


async def test_a_call_may_have_its_own_sampling() -> None:
    asked, engine = model("one END", "two")
    assert (await asked.chat(USER, temperature=0.5, stop="END")).text == "one "
    await asked.chat(USER)
    assert [(r.params.temperature, r.params.stop, r.params.max_tokens) for r in engine.requests] == [
        (0.5, ("END",), 64),
        (1.0, None, 64),
    ]


async def test_every_call_of_an_episode_has_a_seed_of_its_own_that_depends_on_the_episodes() -> None:
    seeds = []
    for _ in range(2):
        asked, engine = model("one", "two")
        await asked.chat(USER)
        await asked.chat(USER)
        seeds.append([request.seed for request in engine.requests])
    assert seeds[0] == seeds[1] and seeds[0][0] != seeds[0][1]


# ---- demonstrations --------------------------------------------------------------------------------------------------

DEMONSTRATION: list[Message] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Make 5 from 2 3."},
    {"role": "assistant", "content": "I guess 2 + 3"},
    {"role": "user", "content": "And 6?"},
    {"role": "assistant", "content": "2 * 3"},
]


def test_a_demonstration_is_one_row_that_trains_the_assistants_turns_and_their_end() -> None:
    steps = chat().demonstration(DEMONSTRATION)
    assert [text_of(step.response_ids) for step in steps] == ["I guess 2 + 3<|im_end|>", "2 * 3<|im_end|>"]
    (row,) = merge_steps(Trajectory(tuple(steps)))
    trained = [token for token, mask in zip(row.tokens[1:], row.loss_mask, strict=True) if mask]
    assert text_of(trained) == "I guess 2 + 3<|im_end|>2 * 3<|im_end|>"
    rendered = tokenizer().apply_chat_template(DEMONSTRATION, tokenize=False)
    assert text_of(row.tokens) == rendered.removesuffix("\n")


def test_a_demonstrations_prompt_is_what_the_model_would_be_asked() -> None:
    first, second = chat().demonstration(DEMONSTRATION)
    assert first.prompt_ids == chat().render(DEMONSTRATION[:2])
    assert text_of(second.prompt_ids) == text_of(chat().render(DEMONSTRATION[:4]))
    assert list(second.messages) == DEMONSTRATION[:4]
    assert (first.logprobs, first.versions) == (None, None)  # nobody sampled it


def test_what_follows_the_last_assistant_turn_is_left_out() -> None:
    assert chat().demonstration([*DEMONSTRATION, MORE]) == chat().demonstration(DEMONSTRATION)


def test_a_demonstration_without_an_assistant_is_an_error() -> None:
    with pytest.raises(DataError, match="at least one assistant message"):
        chat().demonstration(USER)


def test_a_template_that_rewrites_earlier_turns_is_an_error() -> None:
    rewriting = copy.deepcopy(tokenizer())
    rewriting.chat_template = "{{ messages | length }}" + tokenizer().chat_template
    with pytest.raises(DataError, match="rewrites earlier turns"):
        ChatTemplate(rewriting).demonstration(DEMONSTRATION)


def test_the_tokenizer_of_characters_that_other_tests_use_behaves_the_same() -> None:
    small = char_chat()
    assert small.decode(small.render(DEMONSTRATION)) == chat().decode(chat().render(DEMONSTRATION))
    assert [s.text for s in small.demonstration(DEMONSTRATION)] == [s.text for s in chat().demonstration(DEMONSTRATION)]
