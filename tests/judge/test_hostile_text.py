"""Replies made to be slow: whatever is done with them on the event loop takes time in proportion to their length.

All of it runs in a process with a hard limit: code that takes for ever fails its test, and does not hang it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import unicodedata
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import ROOT, examples
from headrace.data.episode import Episode, Step, Trajectory
from headrace.data.split import prompt_key
from headrace.data.task import Task
from headrace.data.untrusted import enclosed, is_deeper, normalized
from headrace.judge.code import solution_in
from headrace.judge.countdown import evaluate, last_answer
from headrace.judge.extract import marked
from headrace.judge.llm import _parsed, _prompt
from headrace.judge.text import choice_in, last_number, squad_tokens
from headrace.rollout.chat import ChatTemplate
from headrace.rollout.messages import normal, split_tool_calls

PATHS = os.environ | {"PYTHONPATH": str(ROOT / "tests")}

SIZES = (1_000, 30_000, 200_000, 1_000_000)
LIMIT_S = 300.0  # for all kinds and sizes, on a busy machine; quadratic code takes minutes for one
TOOLS = [{"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}]


def repeated(unit: str, begin: str = "", end: str = "") -> Callable[[int], str]:
    return lambda size: begin + unit * (size // len(unit)) + end


HOSTILE: dict[str, Callable[[int], str]] = {
    "spaces after a fence": repeated(" ", "```"),
    "tabs and spaces after python": repeated(" \t", "```python", "x"),
    "open fences": repeated("```python\n"),
    "fences without a line": repeated("``` "),
    "fences of another language": repeated("```c\nx\n"),
    "marks on one letter": repeated("\u0301\u0323", "a"),
    "marks of many classes": repeated("\u0345\u0335\u0327\u0591\u0592\u302a", "a"),
    "marks that hide as letters": repeated("\u0f73\u0f71", "a"),
    "letters with marks": repeated("e\u0301"),
    "ligatures": repeated("\ufdfa"),
    "hangul": repeated("\u1100\u1161\u11a8"),
    "open tool calls": repeated("<tool_call>"),
    "tool calls in tool calls": repeated("<tool_call>", end="</tool_call>" * 1000),
    "closed tool calls": repeated("<tool_call>{}</tool_call>"),
    "open answers": repeated("<answer>"),
    "closed answers": repeated("</answer>"),
    "answers": repeated("<answer>1</answer>"),
    "open boxes": repeated("\\boxed{"),
    "closed braces": repeated("}", "\\boxed{"),
    "nested lists": repeated("["),
    "nested objects": repeated('{"a":', end="1"),
    "a nested call": repeated("[", '<tool_call>{"name": "look", "arguments": {"a": ', "</tool_call>"),
    "digits": repeated("1"),
    "thousands": repeated("1,234,567,"),
    "numbers": repeated("1.5e3 / 7 % "),
    "signs": repeated("$-+. "),
    "fractions": repeated("\\frac{1}{"),
    "fractions of digits": repeated("\\frac{" + "9" * 400),
    "choices": repeated("answer is (("),
    "choices apart": repeated("answer     :   \t "),
    "white space": repeated(" \n\t\r"),
    "parentheses": repeated("(", "<answer>", "</answer>"),
    "powers": repeated("9**", "<answer>", "9</answer>"),
    "marks of templates": repeated("[AAAAAAAA"),
    "one mark of a template": repeated("A", "["),
    "hashes": repeated("#### "),
    "think": repeated("<think>", end="</think>"),
    "lines": repeated("\r\n"),
    "zeros": repeated("\0"),
    "half a character": repeated("\ud800"),
}


def work(text: str) -> None:
    """All that is done with a reply outside of killable workers."""
    solution_in(text)
    evaluate(last_answer(text))
    for places in (("box", "marks", "tags"), ("text",)):
        marked(text, places)
    last_number(text[-200_000:])
    choice_in(text)
    squad_tokens(marked(text, ("tags", "text")) or "")
    split_tool_calls(text, TOOLS, 0)
    normal([{"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": text}}]}])
    ChatTemplate._split_reasoning(ChatTemplate.__new__(ChatTemplate), f"<think>{text}", ())
    prompt_key(Task("t", ({"role": "user", "content": text},)))
    _prompt("Is it good?", {"ANSWER": text}, "SCORE: N")
    _parsed("score", text)
    Episode("t", (Trajectory((Step((1,), (2,), text=text),)),)).to_json()


@pytest.fixture(scope="module")
def timings() -> dict[str, Any]:
    """Seconds by kind, for every size: of one process, which prints them as it goes."""
    command = [sys.executable, "-u", "-c", "import test_hostile_text as t; t.main()"]
    folder = __file__.rpartition("/")[0]
    try:
        done = subprocess.run(
            command, cwd=folder, env=PATHS, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        printed, failed = done.stdout, done.stderr[-2000:]
    except subprocess.TimeoutExpired as late:
        printed, failed = (late.stdout or b"").decode(), "too slow"
    return {"failed": failed, **dict(map(json.loads, printed.splitlines()))}


@pytest.mark.parametrize("kind", HOSTILE)
def test_work_on_a_hostile_reply_is_linear(timings: dict[str, Any], kind: str) -> None:
    assert kind in timings, timings["failed"]
    took = timings[kind]
    # from 200,000 to a million is 5 times; what is quadratic takes 25. Below a second nothing can be told apart
    assert took[-1] < max(15 * took[-2], 5.0), dict(zip(SIZES, took, strict=True))


def main() -> None:
    for kind, make in HOSTILE.items():
        took = []
        for size in SIZES:
            text, start = make(size), time.process_time()
            work(text)
            took.append(time.process_time() - start)
        print(json.dumps([kind, took]))


# ---- what the linear ways give --------------------------------------------------------------------------------------


@given(st.text(alphabet="<>ab", max_size=40))
@examples
def test_enclosed_text_is_what_the_pattern_finds(text: str) -> None:
    wanted = [match.span() for match in re.finditer(r"<a>.*?<b>", text, re.DOTALL)]
    assert list(enclosed(text, "<a>", "<b>")) == wanted


@given(st.text(alphabet="aé\u0301\u0323\u0345\u0f73가\ufb01 ", max_size=15))  # of 30 marks at most
@examples
def test_text_without_long_runs_of_marks_is_normalised_as_ever(text: str) -> None:
    assert normalized("NFC", text) == unicodedata.normalize("NFC", text)
    assert normalized("NFKC", text) == unicodedata.normalize("NFKC", text)


def test_two_spellings_of_a_word_are_the_same_and_a_run_of_marks_is_not_lost() -> None:
    assert squad_tokens("Cafe\u0301") == squad_tokens("café")
    assert normalized("NFC", "a" + "\u0301" * 100).count("\u0301") == 99  # one is in the letter


def test_what_is_nested_too_deep_stays_text() -> None:
    for depth, is_call in ((90, True), (200, False), (100_000, False)):
        text = '<tool_call>{"name": "look", "arguments": {"a": ' + "[" * depth + "]" * depth + "}}</tool_call>"
        kept, calls = split_tool_calls(text, TOOLS, 0)
        assert (len(calls) == 1) is is_call and (kept == "") is is_call
    assert is_deeper([[[]]], 2) and not is_deeper([[[]]], 3) and not is_deeper([1, {"a": 2}], 2)


def test_a_call_whose_name_is_no_text_stays_text() -> None:
    text = '<tool_call>{"name": ["look"]}</tool_call>'
    assert split_tool_calls(text, TOOLS, 0) == (text, ())
