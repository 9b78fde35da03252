"""Requests of every form, right and wrong, and answers in every API: without a server."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import examples
from headrace.data.episode import ModelOutput
from headrace.rollout.gateway.anthropic import Messages
from headrace.rollout.gateway.chat import ChatCompletions
from headrace.rollout.gateway.completions import Completions
from headrace.rollout.gateway.responses import Responses
from headrace.rollout.gateway.wire import ApiFormat, Call, Fields, Refusal, Reply, parse_json, pieces

API_FORMATS: list[ApiFormat] = [ChatCompletions(), Completions(), Responses(), Messages()]
each_api = pytest.mark.parametrize("api", API_FORMATS, ids=lambda api: api.path)
NAMES = [
    "messages", "prompt", "input", "instructions", "system", "model", "tools", "tool_choice", "parallel_tool_calls",
    "max_tokens", "max_completion_tokens", "max_output_tokens", "temperature", "top_p", "top_k", "stop", "n", "stream",
    "stop_sequences", "stream_options", "logprobs", "top_logprobs", "response_format", "previous_response_id", "echo",
    "role", "content", "type", "text", "tool_calls", "function", "name", "arguments", "id", "call_id", "output",
    "tool_use_id", "parameters", "input_schema", "thinking", "reasoning_content", "return_token_ids", "summary",
]  # fmt: skip
WORDS = ["user", "assistant", "tool", "system", "text", "function", "message", "function_call", "tool_use", "auto",
         "function_call_output", "tool_result", "input_text", "reasoning", "thinking", "none", "any", ""]  # fmt: skip
numbers = st.integers(-3, 3) | st.floats(allow_nan=False, allow_infinity=False)
values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | numbers | st.sampled_from(WORDS) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=12,
)
parts = st.fixed_dictionaries(
    {"type": st.sampled_from(WORDS)}, optional={name: values for name in NAMES[25:] if name != "type"}
)
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "system"])},
    optional={"content": st.text(max_size=4) | st.lists(parts, max_size=3), "type": values, "tool_calls": values},
)


class Nothing:
    """No conversation before this one."""

    def conversation(self, response_id: str) -> None:
        return None


@each_api
@settings(examples, max_examples=150)
@given(
    st.lists(messages | parts, min_size=1, max_size=3) | values,
    st.dictionaries(st.sampled_from(NAMES), values, max_size=2),
    st.booleans(),
)
def test_whatever_is_asked_is_read_or_refused_with_a_sentence(
    api: ApiFormat, asked: Any, more: dict[str, Any], lenient: bool
) -> None:
    warned: list[str] = []
    field = {"/v1/completions": "prompt", "/v1/responses": "input"}.get(api.path, "messages")
    body = {field: asked, **more}
    try:
        call = api.read(Fields(body, warn=warned.append if lenient else None), Nothing())
    except Refusal as refusal:
        assert 400 <= refusal.status < 500 and 10 < len(str(refusal)) < 700
        assert json.loads(json.dumps(api.error(refusal)))["error"]["message"] == str(refusal)
        return
    json.dumps(call.messages)
    assert call.prompt is not None or all(isinstance(message["content"], str) for message in call.messages)


@settings(examples)
@given(st.binary(max_size=30) | values.map(lambda value: json.dumps(value).encode()))
def test_a_body_is_json_or_is_refused(raw: bytes) -> None:
    try:
        json.dumps(parse_json(raw), ensure_ascii=False).encode()
    except Refusal as refusal:
        assert refusal.status == 400 and str(refusal).startswith("the body is not valid JSON")


@settings(examples)
@given(st.text(max_size=50))
def test_pieces_join_to_the_text(text: str) -> None:
    found = list(pieces(text))
    assert "".join(found) == text and len(found) <= 4 and all(found)


def reply(**fields: Any) -> Reply:
    made = {"text": "all", "content": "The answer.", "prompt_ids": (1, 2), "completion_ids": (3,), "logprobs": (-1.0,)}
    return Reply("ab", 7, ModelOutput(**{**made, "model_logprobs": (-1.0,), "versions": (0,), **fields}), ("x",))


ASKED = {"id": "call_0_0", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


@each_api
@pytest.mark.parametrize(
    "fields",
    [{}, {"content": ""}, {"tool_calls": (ASKED, ASKED)}, {"reasoning": "Hm."}, {"finish_reason": "length"},
     {"reasoning": "", "content": "", "tool_calls": (ASKED,)}],
)  # fmt: skip
def test_every_answer_can_be_written_at_once_and_as_events(api: ApiFormat, fields: dict[str, Any]) -> None:
    call = Call("m", token_ids=True, logprobs=True, usage_in_stream=True)
    answer = api.response(call, reply(**fields))
    events = list(api.events(call, reply(**fields)))
    assert answer["headrace"]["completion_token_ids"] == [3] and "headrace" in json.dumps(events)
    assert json.loads(json.dumps(answer)) == answer


@pytest.mark.parametrize(("api", "key"), [(API_FORMATS[0], "reasoning_content"), (API_FORMATS[2], "reasoning_text"),
                                              (API_FORMATS[3], "thinking")])  # fmt: skip
def test_reasoning_is_separate_from_the_answer(api: ApiFormat, key: str) -> None:
    written = json.dumps(api.response(Call("m"), reply(reasoning="Hm, hm.")))
    assert key in written and "Hm, hm." in written and "<think>" not in written


def test_the_gateway_loads_no_server_until_a_session_is_opened() -> None:
    code = "import sys, headrace.rollout.gateway; sys.exit('starlette' in sys.modules or 'uvicorn' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
