"""The bundled model behind the gateway: what clients are told is, to the token, what was sampled and is trained."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import torch

from fakes import FakeEngine, char_chat
from headrace.backends.local.backend import LocalBackend
from headrace.backends.setup import attach_engine, choose
from headrace.config.loading import build_config
from headrace.data.sample import merge_steps
from headrace.data.sources.countdown import countdown_tasks
from headrace.data.task import Task
from headrace.engines.base import Generation, SamplingParams
from headrace.rollout.chat import ChatTemplate
from headrace.rollout.gateway import ModelSession, close_gateway, model_session
from headrace.rollout.model_client import Model
from headrace.trainer.trainer import UnifiedTrainer

TASK = countdown_tasks(count=1)[0]
IDS = {"return_token_ids": True}


class Watched:
    """An engine that remembers what it sampled."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.made: list[Generation] = []

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, seed: int) -> Generation:
        self.made.append(await self._engine.generate(prompt_ids, params, seed))
        return self.made[-1]


@pytest.fixture
async def bundled() -> AsyncIterator[tuple[Watched, Model]]:
    """The bundled model and its real engine."""
    torch.set_num_threads(1)
    config = build_config({})
    backend = LocalBackend(config)
    engine = attach_engine(config, backend, choose(config)).engine
    watched = Watched(engine)
    sampling = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_tokens=24)
    yield watched, Model(watched, ChatTemplate(backend.tokenizer), sampling, seed=3)
    await close_gateway()
    await engine.close()
    await backend.close()


def async_client(session: ModelSession) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=session.base_url, api_key="x")


async def talk(session: ModelSession) -> list[dict[str, Any]]:
    """Two turns with each API; the ids that each answer came with."""
    messages: list[Any] = list(TASK.messages)
    told: list[dict[str, Any]] = []
    async with async_client(session) as client:
        for _ in range(2):
            reply: Any = await client.chat.completions.create(model="headrace/chat", messages=messages, extra_body=IDS)
            told.append(reply.headrace)
            messages += [reply.choices[0].message.model_dump(), {"role": "user", "content": "Again!"}]
        items: list[Any] = list(TASK.messages)
        for _ in range(2):
            answer: Any = await client.responses.create(model="headrace/respond", input=items, extra_body=IDS)
            told.append(answer.headrace)
            items += [*(item.model_dump() for item in answer.output), {"role": "user", "content": "Again!"}]
        prompt = "Make 6 from"
        for _ in range(2):
            done: Any = await client.completions.create(model="headrace/complete", prompt=prompt, extra_body=IDS)
            told.append(done.headrace)
            prompt += done.choices[0].text + " and"
    async with anthropic.AsyncAnthropic(base_url=session.root_url, api_key="x") as client:
        turns: list[Any] = list(TASK.messages)
        for _ in range(2):
            said: Any = await client.messages.create(
                model="headrace/claude", messages=turns, max_tokens=99, extra_body=IDS
            )
            told.append(said.headrace)
            turns += [{"role": "assistant", "content": said.content}, {"role": "user", "content": "Again!"}]
    return told


async def test_what_was_sampled_is_what_is_recorded_and_what_clients_get(bundled: tuple[Watched, Model]) -> None:
    engine, model = bundled
    async with model_session(model) as session:
        told = await talk(session)
    sampled = [(made.prompt_ids, made.completion_ids, made.logprobs, made.versions) for made in engine.made]
    steps = [step for trajectory in model.trajectories() for step in trajectory.steps]
    assert [(s.prompt_ids, s.response_ids, s.logprobs, s.versions) for s in steps] == sampled
    names = ("prompt_token_ids", "completion_token_ids", "logprobs", "versions")
    assert [tuple(tuple(one[name]) for name in names) for one in told] == sampled
    assert len(sampled) == 8 and model.diverged_prefixes == 0
    assert [len(merge_steps(trajectory)) for trajectory in model.trajectories()] == [1, 1, 1, 1]


async def test_over_http_the_model_says_what_it_says_without(bundled: tuple[Watched, Model]) -> None:
    engine, model = bundled
    async with model_session(model) as session, async_client(session) as client:
        await client.chat.completions.create(model="any", messages=list(TASK.messages))  # type: ignore[arg-type]
    direct = Model(engine, model.template, model.sampling, seed=3)
    await direct.chat(TASK.messages)
    assert engine.made[0] == engine.made[1] and model.trajectories() == direct.trajectories()


def test_a_run_trains_an_agent_behind_the_gateway(tmp_path: Path) -> None:
    async def two_turns(task: Task, model: Model) -> float:
        messages: Any = list(task.messages)
        async with model_session(model) as session, async_client(session) as client:
            for _ in range(2):
                reply = await client.chat.completions.create(model="any", messages=messages)
                messages += [reply.choices[0].message.model_dump(), {"role": "user", "content": "Again!"}]
        return float(len(messages[-2]["content"]))

    torch.set_num_threads(1)
    config = build_config(
        {
            "run": {"dir": str(tmp_path)},
            "rollout": {"group_size": 4, "max_tokens": 8},
            "trainer": {"steps": 2, "batch_size": 2},
            "track": {"trackers": ["jsonl"], "plot": False},
        }
    )
    result = UnifiedTrainer(config, workflow=two_turns).fit()
    assert result.metrics["episodes/failed"] == 0 and result.metrics["tokens/trained"] > 0
    assert result.metrics["batch/rows"] == 8  # both turns of an episode are one row


async def test_an_agent_of_langgraph_is_recorded_with_its_tools() -> None:
    pytest.importorskip("langgraph")
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.graph import END, START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition

    @tool
    def search(text: str) -> str:
        """Look it up."""
        return f"{text} is 42"

    replies = iter(['<tool_call>{"name": "search", "arguments": {"text": "it"}}</tool_call>', "It is 42."])
    roomy = SamplingParams(temperature=1.0, max_tokens=200)
    model = Model(FakeEngine(lambda seed: next(replies)), char_chat(), roomy, seed=1)
    async with model_session(model) as session:
        llm = ChatOpenAI(model="any", base_url=session.base_url, api_key="x").bind_tools([search])  # type: ignore[arg-type]

        async def ask(state: MessagesState) -> dict[str, Any]:
            return {"messages": [await llm.ainvoke(state["messages"])]}

        graph = StateGraph(MessagesState)
        graph.add_node("ask", ask)
        graph.add_node("tools", ToolNode([search]))
        graph.add_edge(START, "ask")
        graph.add_conditional_edges("ask", tools_condition, {"tools": "tools", END: END})
        graph.add_edge("tools", "ask")
        ended = await graph.compile().ainvoke({"messages": [("user", "What is it?")]})  # type: ignore[arg-type]
    assert [type(message).__name__ for message in ended["messages"]] == [
        "HumanMessage", "AIMessage", "ToolMessage", "AIMessage",
    ]  # fmt: skip
    assert ended["messages"][-1].content == "It is 42." and model.diverged_prefixes == 0
    await close_gateway()
    assert len(model.trajectories()[0].steps) == 2 and len(merge_steps(model.trajectories()[0])) == 1
