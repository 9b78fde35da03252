"""Two tokenisations of one text: what a teacher with another tokenizer says of the student's tokens."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from fakes import bundled_tokenizer, examples
from headrace.backends.local.teacher import Teacher
from headrace.config.loading import build_config
from headrace.data.episode import Step
from headrace.errors import ModelError
from headrace.models.align import UNREADABLE, TokenBytes, align_logprobs
from recording_backend import plain_logprobs, plain_model, watched_run

EOS = "</s>"
TEXTS = ["Make 12 from 3 4 5.", "the answer is <answer>3*4</answer>", "naïve café, 漢字 and 😀😀", "once or twice"]
CHAT = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)

# ---- alignment alone ------------------------------------------------------------------------------------------------


def cut(text: bytes, ends: Sequence[int]) -> list[bytes]:
    """The text in tokens that end there."""
    places = [0, *sorted({end % (len(text) + 1) for end in ends} - {0, len(text)}), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(places)]


def ends_of(tokens: Sequence[bytes]) -> list[int]:
    return list(itertools.accumulate(map(len, tokens)))


@st.composite
def tokenised(draw: st.DrawFn, text: bytes) -> tuple[list[bytes], list[float]]:
    tokens = cut(text, draw(st.lists(st.integers(0, 100), max_size=12)))
    floats = st.floats(-20, 0, allow_nan=False)
    return tokens, draw(st.lists(floats, min_size=len(tokens), max_size=len(tokens)))


@st.composite
def one_text_twice(draw: st.DrawFn) -> tuple[tuple[list[bytes], list[float]], tuple[list[bytes], list[float]]]:
    text = draw(st.text(min_size=1, max_size=20)).encode()
    return draw(tokenised(text)), draw(tokenised(text))


@examples
@given(one_text_twice())
def test_the_sum_over_every_shared_span_is_the_teachers(case: Any) -> None:
    (student, ours), (teacher, theirs) = case
    aligned = align_logprobs(student, ours, teacher, theirs)
    assert len(aligned) == len(student)
    shared = sorted({0, *ends_of(student)} & {0, *ends_of(teacher)})
    for start, end in itertools.pairwise(shared):
        mine = [place for place, at in enumerate(ends_of(student)) if start < at <= end]
        got = sum(aligned[place] for place in mine)
        want = sum(logprob for logprob, at in zip(theirs, ends_of(teacher), strict=True) if start < at <= end)
        assert got == pytest.approx(want, abs=1e-9)
        gaps = [aligned[place] - ours[place] for place in mine]
        assert max(gaps) - min(gaps) < 1e-9  # evenly


@examples
@given(st.data())
def test_the_same_tokens_give_the_teachers_own_numbers(data: st.DataObject) -> None:
    text = data.draw(st.text(min_size=1, max_size=20)).encode()
    tokens, theirs = data.draw(tokenised(text))
    ours = data.draw(st.lists(st.floats(-20, 0), min_size=len(tokens), max_size=len(tokens)))
    assert align_logprobs(tokens, ours, tokens, theirs) == pytest.approx(theirs, abs=1e-9)


def test_only_the_end_is_shared() -> None:
    aligned = align_logprobs([b"ab", b"cd", b"ef"], [-1.0, -2.0, -3.0], [b"abc", b"def"], [-4.0, -5.0])
    assert aligned == pytest.approx([-2.0, -3.0, -4.0]) and sum(aligned) == pytest.approx(-9.0)


@examples
@given(st.data())
def test_texts_that_differ_are_aligned_as_far_as_they_agree(data: st.DataObject) -> None:
    texts = [data.draw(st.binary(min_size=1, max_size=16)) for _ in range(2)]
    (student, ours), (teacher, theirs) = (data.draw(tokenised(text)) for text in texts)
    aligned = align_logprobs(student, ours, teacher, theirs)
    assert len(aligned) == len(student)
    assert sum(aligned) == pytest.approx(sum(theirs), abs=1e-9)  # whatever happens, nothing is lost


def test_a_difference_stays_inside_its_span() -> None:
    student, teacher = [b"one ", b"\xf0\x9f", b"\x98", b" two"], [b"one ", UNREADABLE.encode(), b" two"]
    aligned = align_logprobs(student, [-1.0] * 4, teacher, [-2.0, -6.0, -3.0])
    assert aligned == pytest.approx([-2.0, -3.0, -3.0, -3.0])


def test_a_space_that_the_teachers_tokenizer_puts_in_front_goes_with_the_first_word() -> None:
    assert align_logprobs([b"on", b"e", b" two"], [-1.0] * 3, [b" one", b" two"], [-4.0, -3.0]) == [-2.0, -2.0, -3.0]


def test_a_reply_that_the_teacher_cannot_read_at_all_is_an_error() -> None:
    with pytest.raises(ModelError, match="the student's reply has 1 tokens, and to the teacher's tokenizer it has 0"):
        align_logprobs([b"x"], [-1.0], [], [])
    assert align_logprobs([], [], [], []) == []


# ---- bytes of tokens ------------------------------------------------------------------------------------------------


def wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens([EOS])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=EOS)
    wrapped.chat_template = CHAT
    return wrapped


def byte_level(normalizer: Any = None) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with other merges than the bundled one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizer  # type: ignore[assignment]
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(TEXTS * 3, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet))
    return wrap(tokenizer)


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """Words begin with ▁, one more space is put in front, and characters that it does not know fall back to bytes."""
    pieces = [*(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefghijklmnopqrstuvwxyz0123456789.,<>/*+-=é", "▁the"]
    vocabulary = {piece: number for number, piece in enumerate(["<unk>", *pieces])}
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he")]
    vocabulary |= {piece: len(vocabulary) + i for i, piece in enumerate(["▁t", "he"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(  # type: ignore[assignment]
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(  # type: ignore[assignment]
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return wrap(tokenizer)


@pytest.mark.parametrize("text", [*TEXTS, "é", "漢字", "😀", "a\n\tb\x00"])
@pytest.mark.parametrize("make", [bundled_tokenizer, byte_level], ids=["bundled", "other"])
def test_tokens_of_a_byte_level_tokenizer_stand_for_the_bytes_of_the_text(make: Any, text: str) -> None:
    tokenizer = make()
    found = [TokenBytes(tokenizer)(token) for token in tokenizer.encode(text, add_special_tokens=False)]
    assert b"".join(found) == text.encode() and all(found)


@pytest.mark.parametrize("text", [*TEXTS, "é", "漢字", "😀 the é"])
def test_tokens_of_a_sentencepiece_tokenizer_stand_for_the_text_after_a_space(text: str) -> None:
    tokenizer = sentencepiece_like()
    found = [TokenBytes(tokenizer)(token) for token in tokenizer.encode(text, add_special_tokens=False)]
    assert b"".join(found) == b" " + text.encode()


def test_a_letter_of_a_sentencepiece_tokenizer_is_no_stand_in_for_a_byte() -> None:
    tokenizer = sentencepiece_like()
    number = tokenizer.convert_tokens_to_ids("é")
    assert isinstance(number, int) and TokenBytes(tokenizer)(number) == "é".encode()


def test_special_tokens_are_read_as_they_are_written_and_unknown_ids_as_unreadable() -> None:
    tokenizer = bundled_tokenizer()
    read = TokenBytes(tokenizer)
    assert [read(token) for token in (0, 1, 2)] == [b"<|endoftext|>", b"<|im_start|>", b"<|im_end|>"]
    assert read(len(tokenizer) + 5) == UNREADABLE.encode()


# ---- a teacher with another tokenizer -------------------------------------------------------------------------------


def save_model(tokenizer: PreTrainedTokenizerFast, folder: Path) -> str:
    ends: Any = tokenizer.eos_token_id
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            eos_token_id=ends, initializer_range=0.3, max_position_embeddings=512,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


TEACHERS = {
    "byte level": byte_level,
    "normalising": lambda: byte_level(normalizers.NFC()),
    "sentencepiece": sentencepiece_like,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    home = tmp_path_factory.mktemp("teachers")
    return {name: save_model(make(), home / name.replace(" ", "_")) for name, make in TEACHERS.items()}


def make_teacher(folder: str) -> Teacher:
    torch.set_num_threads(1)
    tokenizer = bundled_tokenizer()
    config = build_config({"algorithm": {"estimator": "distill"}, "distill": {"teacher": folder}})
    return Teacher(config, tokenizer, [tokenizer.eos_token_id])


MESSAGES = ({"role": "user", "content": "Say naïve 漢字."},)


def said(ids: Sequence[int], ended: bool) -> Step:
    """A Step with these ids of the bundled tokenizer."""
    response = (*ids, bundled_tokenizer().eos_token_id) if ended else tuple(ids)
    logprobs = tuple(-0.5 - 0.1 * place for place in range(len(response)))
    return Step((5, 6), response, logprobs, (0,) * len(response), MESSAGES)


def teachers_view(folder: str, teacher: Teacher, text: str, ended: bool) -> list[float]:
    """What the teacher gives its own tokens of the text, through transformers."""
    prompt = teacher.tokenizer.apply_chat_template(list(MESSAGES), tokenize=False, add_generation_prompt=True)
    head = teacher.tokenizer.encode(prompt, add_special_tokens=False)
    tail = teacher.tokenizer.encode(text, add_special_tokens=False) + [teacher.tokenizer.eos_token_id] * ended
    return plain_logprobs(plain_model(folder), [*head, *tail]).tolist()[len(head) - 1 :]


@pytest.mark.parametrize("name", list(TEACHERS))
@pytest.mark.parametrize("text", ["Make 12 the end", "naïve café é", "漢字", "😀 the 😀", "e\u0301 decomposed"])
def test_nothing_of_what_the_teacher_says_is_lost(name: str, text: str, folders: dict[str, str]) -> None:
    teacher = make_teacher(folders[name])
    ids = bundled_tokenizer().encode(text, add_special_tokens=False)
    for ended in (True, False):
        asked = said(ids, ended)
        (aligned,) = teacher.logprobs([asked])
        theirs = teachers_view(folders[name], teacher, text, ended)
        assert len(aligned) == len(asked.response_ids)
        assert sum(aligned) == pytest.approx(sum(theirs), abs=1e-3)
        if ended:  # the end of the reply is a token of its own in both
            assert aligned[-1] == pytest.approx(theirs[-1], abs=1e-4)


@pytest.mark.parametrize("name", list(TEACHERS))
@pytest.mark.parametrize(
    "torn",
    [["Ã"], ["ð", "Ł"], ["Ã", "Ã", "æ"], ["a", "ð", "Ł", "ĺ", "b"], ["ĺ", "ĺ", "Ġ", "Ã"]],
    ids=["half a letter", "half an emoji", "three starts", "inside", "continuations"],
)
def test_a_torn_character_is_read_as_unreadable_and_ends_no_run(
    name: str, torn: list[str], folders: dict[str, str]
) -> None:
    tokenizer, teacher = bundled_tokenizer(), make_teacher(folders[name])
    ids = [tokenizer.convert_tokens_to_ids(token) for token in ["Ġ1", *torn, "Ġ2"]]
    text = b"".join(map(TokenBytes(tokenizer), ids)).decode(errors="replace")
    assert UNREADABLE in text
    (aligned,) = teacher.logprobs([said(ids, True)])
    assert len(aligned) == len(ids) + 1 and all(map(math.isfinite, aligned))
    theirs = teachers_view(folders[name], teacher, text, True)
    assert sum(aligned) == pytest.approx(sum(theirs), abs=1e-3) and aligned[-1] == pytest.approx(theirs[-1], abs=1e-4)


def test_special_tokens_inside_a_reply_cost_what_the_teacher_thinks_of_them(folders: dict[str, str]) -> None:
    """Were they nothing to the teacher, a student would be paid for writing them."""
    teacher = make_teacher(folders["byte level"])
    ids = bundled_tokenizer().encode("Make 1", add_special_tokens=False)
    (aligned,) = teacher.logprobs([said([*ids, 1, 0], True)])
    theirs = teachers_view(folders["byte level"], teacher, "Make 1<|im_start|><|endoftext|>", True)
    assert sum(aligned) == pytest.approx(sum(theirs), abs=1e-3)
    assert all(value < -3 for value in aligned[-3:-1])


@pytest.mark.parametrize("name", list(TEACHERS))
def test_a_run_is_taught_by_a_teacher_with_another_tokenizer(
    name: str, folders: dict[str, str], tmp_path: Path
) -> None:
    result, backend = watched_run(
        tmp_path,
        algorithm={"estimator": "distill", "loss": "importance_sampling"},
        distill={"teacher": folders[name], "coef": 0.1},
        rollout={"group_size": 1, "max_tokens": 12, "temperature": 2.0},  # hot: torn characters are sampled, too
        trainer={"steps": 1, "batch_size": 8, "save_last": False},
    )
    assert result.steps == 1
    ((steps, scores),) = backend.taught
    assert all(len(told) == len(asked.response_ids) for asked, told in zip(steps, scores, strict=True))
    assert any(UNREADABLE in asked.text for asked in steps)
    assert any(value for sample in backend.samples for value in sample.advantages)


def test_a_teacher_without_an_end_token_is_refused(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.eos_token = None
    folder = save_model(tokenizer, tmp_path / "endless")
    with pytest.raises(ModelError, match="has no end-of-sequence token"):
        make_teacher(folder)
