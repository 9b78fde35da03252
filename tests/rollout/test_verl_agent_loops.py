"""verl's own agent loops as workflows, and workflows as its agent loops. Runs where verl is installed."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from fakes import FakeEngine, bundled_tokenizer
from headrace.config.loading import build_config
from headrace.data.episode import Episode
from headrace.data.sample import merge_steps
from headrace.data.task import Task
from headrace.engines.base import Generation, SamplingParams
from headrace.errors import ConfigError, WorkflowError
from headrace.registry import resolve
from headrace.rollout.chat import ChatTemplate
from headrace.rollout.model_client import Model
from headrace.verl import as_agent_loop

pytest.importorskip("verl", reason="verl is not installed; run this with .venv-verl/bin/python -m pytest")

LOOPS = "verl.experimental.agent_loop"
SINGLE, TOOL = f"{LOOPS}.single_turn_agent_loop:SingleTurnAgentLoop", f"{LOOPS}.tool_agent_loop:ToolAgentLoop"
SIZES = ["data.max_prompt_length=600", "data.max_response_length=160"]
TASK = Task(id="7", instruction="What is 2 plus 3?", answer="5", metadata={"extra_info": {"index": 3}})
SAMPLING = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_tokens=96, stop=())
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
TOOLS = '''
from verl.tools.function_tool import function_tool

@function_tool
def add(a: int, b: int) -> str:
    """Adds two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return str(a + b)
'''
USED = {
    f"{LOOPS}.agent_loop:AgentLoopBase.__init__": (
        "trainer_config", "server_manager", "tokenizer", "processor", "dataset_cls", "data_config", "hf_model_type",
    ),
    f"{LOOPS}.agent_loop:AgentLoopBase.run": ("sampling_params", "kwargs"),
    f"{LOOPS}.agent_loop:DictConfigWrap": ("config",),
    f"{LOOPS}.agent_loop:ToolListWrap": ("tools",),
    f"{LOOPS}.agent_loop:AgentLoopOutput": (
        "prompt_ids", "response_ids", "response_mask", "response_logprobs", "multi_modal_data", "reward_score",
        "num_turns", "metrics", "extra_fields",
    ),
    "verl.tools.tool_registry:load_all_tools": ("tool_config_path", "function_tool_path"),
    "verl.utils.dataset.rl_dataset:get_dataset_class": ("data_config",),
    "verl.utils.import_utils:resolve_config_path": ("config_path",),
    "verl.workers.rollout.replica:TokenOutput": ("token_ids", "log_probs", "stop_reason", "extra_fields"),
    "verl.workers.rollout.llm_server:LLMServerClient.generate": ("request_id", "prompt_ids", "sampling_params"),
}  # fmt: skip


class Watched:
    """An engine that remembers what it sampled. Its first answer may come from another one."""

    def __init__(self, engine: Any, first: Any = None) -> None:
        self._engine, self._first = engine, first
        self.made: list[Generation] = []

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, seed: int) -> Generation:
        engine = self._first if self._first is not None and not self.made else self._engine
        self.made.append(await engine.generate(prompt_ids, params, seed))
        return self.made[-1]


def workflow(loop: str, *overrides: str, seen: list[Any] | None = None, **arguments: Any) -> Any:
    """The workflow of an agent loop, which keeps what the loop returned."""
    made = resolve("workflow", f"verl:{loop}")(overrides=[*SIZES, *overrides], **arguments)
    if seen is not None:

        class Kept(made.loop_class):
            async def run(self, *given: Any, **others: Any) -> Any:
                seen.append(await super().run(*given, **others))
                return seen[-1]

        made.loop_class = Kept
    return made


def scripted(*replies: str) -> FakeEngine:
    """Answers with one reply after the other."""
    engine = FakeEngine(lambda _: replies[len(engine.requests) - 1], bundled_tokenizer())
    return engine


def model_of(engine: Any, tokenizer: Any = None) -> Model:
    return Model(engine, ChatTemplate(tokenizer or bundled_tokenizer()), SAMPLING, seed=3)


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One file for all tests: verl registers the tools of a process once."""
    file = tmp_path_factory.mktemp("tools") / "tools.py"
    file.write_text(TOOLS)
    return f"actor_rollout_ref.rollout.multi_turn.function_tool_path={file}"


def assert_same(episode: Episode, output: Any, made: Sequence[Generation]) -> None:
    """The row that is trained is the loop's, token by token, and all of its trained tokens are the engine's."""
    (row,) = merge_steps(episode.trajectories[0])
    start = len(output.prompt_ids)
    assert list(row.tokens) == [*output.prompt_ids, *output.response_ids][: len(row.tokens)]
    mask = output.response_mask[: len(row.tokens) - start]
    assert not any(output.response_mask[len(mask) :])  # what follows the last trained token is not a target
    assert list(row.loss_mask) == [0] * (start - 1) + mask
    kept = [value for value, on in zip(output.response_logprobs, output.response_mask, strict=True) if on]
    assert [value for value, on in zip(row.logprobs, row.loss_mask, strict=True) if on] == kept
    sampled = [token for one in made for token in one.completion_ids]
    trained = [token for token, on in zip(row.tokens[1:], row.loss_mask, strict=True) if on]
    assert trained == sampled[: len(trained)] and len(trained) > 0
    assert kept == [value for one in made for value in one.logprobs][: len(kept)]


def test_what_is_used_of_verl_is_as_it_was() -> None:
    """Fails with a readable list when a version of verl changes what the agent loops are built on."""
    changed: list[str] = []
    for path, wanted in USED.items():
        module, _, name = path.partition(":")
        try:
            found: Any = importlib.import_module(module)
            for part in name.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError) as error:
            changed.append(f"{path} is gone: {error}")
            continue
        fields = getattr(found, "model_fields", None)
        known = set(fields) if fields else set(inspect.signature(found).parameters)
        changed += [f"{path} has no {name}" for name in wanted if name not in known]
    assert changed == []


async def test_the_single_turn_loop_runs_unmodified() -> None:
    seen: list[Any] = []
    engine = Watched(scripted("The answer is 5."))
    episode = await workflow(SINGLE, seen=seen).run(TASK, model_of(engine))
    assert_same(episode, seen[0], engine.made)
    assert episode.text == "The answer is 5." and episode.metrics == {"num_turns": 2.0}


async def test_the_tool_loop_calls_tools_and_masks_their_tokens(tools: str) -> None:
    seen: list[Any] = []
    engine = Watched(scripted(CALL, "It is 5."))
    episode = await workflow(TOOL, tools, seen=seen).run(TASK, model_of(engine))
    assert_same(episode, seen[0], engine.made)
    assert len(engine.made) == 2 and 0 in seen[0].response_mask
    assert "5" in bundled_tokenizer().decode(list(episode.trajectories[0].steps[1].prompt_ids))
    assert [step.text for step in episode.trajectories[0].steps][-1] == "It is 5."


async def test_a_response_longer_than_verl_allows_is_cut(tools: str) -> None:
    seen: list[Any] = []
    engine = Watched(scripted("word " * 60))
    episode = await workflow(SINGLE, "data.max_response_length=9", seen=seen).run(TASK, model_of(engine))
    assert_same(episode, seen[0], engine.made)
    assert len(seen[0].response_ids) == 9 and episode.termination == "length"


async def test_the_runs_own_limit_holds() -> None:
    engine = FakeEngine(lambda _: "word " * 60, bundled_tokenizer())
    await workflow(SINGLE).run(TASK, model_of(engine))
    assert engine.requests[0].params.max_tokens == SAMPLING.max_tokens


@pytest.mark.parametrize("extra", [{"repetition_penalty": 1.2}, {"logit_bias": {3: 1.0}}, {"min_p": 0.1}])
async def test_sampling_that_the_engine_cannot_do_is_refused(extra: dict[str, Any]) -> None:
    server = importlib.import_module("headrace.verl.agent_loops").EngineServer
    wanted = workflow(SINGLE)._config.actor_rollout_ref.rollout
    asked = {"temperature": 1.0, **extra}
    with pytest.raises(WorkflowError, match="cannot do"):
        await server(model_of(scripted("no")), wanted).generate("r", prompt_ids=[1, 2], sampling_params=asked)
    with pytest.raises(WorkflowError, match="image_data"):
        await server(model_of(scripted("no")), wanted).generate(
            "r", prompt_ids=[1], sampling_params={}, image_data=["picture"]
        )


def test_a_wrong_override_is_refused_at_the_start(tmp_path: Path) -> None:
    at = "actor_rollout_ref.rollout.multi_turn"
    with pytest.raises(
        ConfigError, match=rf'verl has no {at}.max_paralel_calls \(did you mean "{at}.max_parallel_calls"'
    ):
        workflow(TOOL, f"{at}.max_paralel_calls=3")
    with pytest.raises(ConfigError, match=r'"data\.max_response_length" has no value; write data'):
        workflow(TOOL, "data.max_response_length")
    (tmp_path / "verl.yaml").write_text("data: {max_response_length: 7}\nactor_rollout_ref: {rollout: {n: 1}}")
    with pytest.raises(ConfigError, match=r'no data.max_respnse_length \(did you mean "data.max_response_length"\?\)'):
        resolve("workflow", f"verl:{SINGLE}")(
            config=str(tmp_path / "verl.yaml"), overrides=["data.max_respnse_length=8"]
        )
    with pytest.raises(ConfigError, match="there is no verl configuration"):
        resolve("workflow", f"verl:{SINGLE}")(config=str(tmp_path / "none.yaml"))
    with pytest.raises(ConfigError, match="cannot load the tools"):
        workflow(TOOL, f"actor_rollout_ref.rollout.multi_turn.function_tool_path={tmp_path / 'none.py'}")


# ---- the other way ------------------------------------------------------------------------------------------------


async def ask_twice(task: Task, model: Model) -> float | None:
    messages = list(task.messages)
    reply = await model.chat(messages)
    await model.chat([*messages, reply.message, {"role": "user", "content": "Sure?"}])
    return None if task.metadata.get("ask_verl") else 0.5


async def two_roles(task: Task, model: Model) -> float:
    await model.chat(task.messages, role="solver")
    await model.chat(task.messages, role="critic")
    return 1.0


class Servers:
    """verl's client over one of our engines: the two meet in the middle."""

    def __init__(self, engine: FakeEngine, logprobs: bool = True) -> None:
        self.engine, self._logprobs = engine, logprobs

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Any:
        output = importlib.import_module("verl.workers.rollout.replica").TokenOutput
        params = SamplingParams(temperature=sampling_params["temperature"], max_tokens=sampling_params["max_tokens"])
        made = await self.engine.generate(prompt_ids, params, 0)
        return output(
            token_ids=list(made.completion_ids),
            log_probs=list(made.logprobs) if self._logprobs else None,
            extra_fields={"global_steps": 4, "min_global_steps": 4, "max_global_steps": 4},
        )


def loop_of(made: type[Any], servers: Servers, **arguments: Any) -> Any:
    base = importlib.import_module(f"{LOOPS}.agent_loop")
    config = workflow(SINGLE)._config
    return made(
        trainer_config=base.DictConfigWrap(config=config), server_manager=servers, tokenizer=bundled_tokenizer(),
        processor=None, dataset_cls=None, data_config=base.DictConfigWrap(config.data), tools=base.ToolListWrap([]),
        **arguments,
    )  # fmt: skip


ROW = {
    "raw_prompt": [{"role": "user", "content": "2+3?"}],
    "data_source": "sums",
    "reward_model": {"ground_truth": "5"},
}
PARAMS = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}


async def test_a_workflow_is_an_agent_loop() -> None:
    servers = Servers(scripted("5.", "Yes, 5."))
    output = await loop_of(as_agent_loop(ask_twice), servers).run(PARAMS, **ROW)
    first, second = servers.engine.requests
    assert output.prompt_ids == list(first.prompt_ids) and output.reward_score == 0.5
    assert [*output.prompt_ids, *output.response_ids][: len(second.prompt_ids)] == list(second.prompt_ids)
    assert len(output.response_ids) == len(output.response_mask) == len(output.response_logprobs)
    said = [token for token, on in zip(output.response_ids, output.response_mask, strict=True) if on]
    assert bundled_tokenizer().decode(said, skip_special_tokens=True) == "5.Yes, 5."
    assert output.extra_fields["max_global_steps"] == 4 and output.num_turns == 4


async def test_verl_is_asked_for_a_reward_unless_there_is_a_judger() -> None:
    row = {**ROW, "ask_verl": True}
    output = await loop_of(as_agent_loop(ask_twice), Servers(scripted("4", "5"))).run(PARAMS, **row)
    assert output.reward_score is None
    judged = as_agent_loop(ask_twice, judger="exact")
    output = await loop_of(judged, Servers(scripted("4", "5"))).run(PARAMS, **row)
    assert output.reward_score == 1.0


async def test_the_class_for_verls_own_file_takes_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    hydra = importlib.import_module("hydra.utils")
    (tmp_path / "my_flow.py").write_text("async def ask(task, model):\n    await model.chat(task.messages)\n")
    base = importlib.import_module(f"{LOOPS}.agent_loop")
    config = workflow(SINGLE)._config
    servers = Servers(scripted("5"))
    loop = hydra.instantiate(
        {"_target_": "headrace.verl.workflow_loop.WorkflowLoop", "workflow": "my_flow.py:ask", "judger": "exact"},
        trainer_config=base.DictConfigWrap(config=config), server_manager=servers, tokenizer=bundled_tokenizer(),
        processor=None, dataset_cls=None, data_config=base.DictConfigWrap(config.data), hf_model_type=None,
        tools=base.ToolListWrap([]),
    )  # fmt: skip
    assert (await loop.run(PARAMS, **ROW)).reward_score == 1.0


async def test_what_verl_cannot_train_is_refused() -> None:
    with pytest.raises(WorkflowError, match="one trajectory per rollout"):
        await loop_of(as_agent_loop(two_roles), Servers(scripted("a", "b"))).run(PARAMS, **ROW)
    with pytest.raises(Exception, match="calculate_log_probs"):
        await loop_of(as_agent_loop(ask_twice), Servers(scripted("a"), logprobs=False)).run(PARAMS, **ROW)


# ---- the bundled model ---------------------------------------------------------------------------------------------


@pytest.fixture
async def bundled() -> AsyncIterator[tuple[Any, Any]]:
    """The bundled model's engine and tokenizer."""
    setup = importlib.import_module("headrace.backends.setup")
    config = build_config({"backend": {"threads": 1}})
    backend = importlib.import_module("headrace.backends.local.backend").LocalBackend(config)
    engine = setup.attach_engine(config, backend, setup.choose(config)).engine
    yield engine, backend.tokenizer
    await engine.close()
    await backend.close()


@pytest.mark.slow
@pytest.mark.parametrize("loop", [SINGLE, TOOL])
async def test_on_the_bundled_model_every_id_is_equal(loop: str, tools: str, bundled: tuple[Any, Any]) -> None:
    """Four rollouts of each; in those of the tool loop, a tool has answered before the model goes on."""
    engine, tokenizer = bundled
    for seed in range(4):
        seen: list[Any] = []
        watched = Watched(engine, FakeEngine(lambda _: CALL, tokenizer) if loop == TOOL else None)
        model = Model(watched, ChatTemplate(tokenizer), SAMPLING, seed=seed)
        given = (tools, "data.max_response_length=300") if loop == TOOL else ()
        episode = await workflow(loop, *given, seen=seen).run(TASK, model)
        assert_same(episode, seen[0], watched.made)
        assert len(watched.made) >= (2 if loop == TOOL else 1)


@pytest.mark.slow
@pytest.mark.parametrize("loop", [SINGLE, TOOL])
def test_a_run_trains_on_an_agent_loop(loop: str, tools: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = importlib.import_module("headrace.trainer.trainer").UnifiedTrainer
    config = build_config(
        {
            "workflow": {
                "name": f"verl:{loop}",
                "args": {"overrides": [*SIZES, *((tools,) if loop == TOOL else ())]},
                "judger": "countdown",
            },
            "rollout": {"group_size": 4, "max_tokens": 16},
            "trainer": {"steps": 2, "batch_size": 2},
            "track": {"trackers": ["jsonl"]},
        }
    )
    result = trainer(config).fit()
    rows = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert result.steps == 2 and rows[-1]["episodes/failed"] == 0
    assert rows[-1]["drift/same_version_max"] < 1e-3  # the learner reads the very tokens, with these probabilities
