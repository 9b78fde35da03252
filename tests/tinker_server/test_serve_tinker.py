"""`headrace serve tinker` under the official SDK: training, sampling, saving, restarts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from tinker import types
from torch import Tensor

from headrace.config import LoraSection, ModelSection
from headrace.models.causal import CausalModel, build_causal_model
from headrace.models.load import add_adapters, load_model
from headrace.models.packed import PackedRows
from headrace.tinker_server.options import ServeOptions
from headrace.tinker_server.run import running
from tiny import saved_model

KEY = "tml-test"
PROMPT = [5, 17, 42, 99]
RNG = np.random.default_rng(0)
LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "gspo", "dro")
SGD_LIKE = types.AdamParams(learning_rate=2.0, eps=1e3)


@contextmanager
def serving(folder: Path, *words: str, killed: bool = False) -> Iterator[str]:
    """The URL of a server in a process of its own, which must end cleanly when interrupted, unless it is killed."""
    command = [sys.executable, "-m", "headrace", "serve", "tinker", "--port", "0", "--dir", str(folder)]
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen([*command, *words], stdout=subprocess.PIPE, text=True, env=settings)
    assert process.stdout is not None
    line = process.stdout.readline()
    try:
        yield line.split(" at ")[1].split(";")[0]
        assert process.poll() is None, "the server ended on its own"
    finally:
        process.send_signal(signal.SIGKILL if killed else signal.SIGINT)
        rest = process.communicate(timeout=20)[0]
    assert killed or (process.returncode == 0 and rest.endswith("stopped\n"))


@contextmanager
def client(url: str, key: str = KEY) -> Iterator[tinker.ServiceClient]:
    os.environ["TINKER_TELEMETRY"] = "0"
    with tinker.ServiceClient(base_url=url, api_key=key) as made:
        yield made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tinker")


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    # in float64, so that what is compared differs by the wire's float32 and nothing else
    with serving(folder, "--max-models", "64", "--dtype", "float64") as found:
        yield found


@pytest.fixture(scope="module")
def service(url: str) -> Iterator[tinker.ServiceClient]:
    with client(url) as made:
        yield made


def new_model(service: tinker.ServiceClient, seed: int = 1, **options: Any) -> tinker.TrainingClient:
    return service.create_lora_training_client("bundled", rank=4, seed=seed, **options)


def tokens(count: int) -> list[int]:
    return RNG.integers(3, 500, count).tolist()


def row(ids: list[int], **inputs: Any) -> types.Datum:
    """A datum that is to predict each next token, or what is given as `target_tokens`."""
    given: Any = {"target_tokens": ids[1:], **inputs}
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=given)


def imitation(count: int = 9) -> types.Datum:
    return row(tokens(count + 1), weights=RNG.uniform(-1, 1, count).astype(np.float32))


def sampled(loss: str, count: int = 9) -> types.Datum:
    inputs: dict[str, Any] = {
        "logprobs": RNG.uniform(-8, -4, count).astype(np.float32),
        "advantages": RNG.uniform(-1, 1, count).astype(np.float32),
    }
    if loss == "gspo":
        inputs["sequence_ratio_mask"] = [0.0, 0.0] + [1.0] * (count - 2)
    return row(tokens(count + 1), **inputs)


def batch(loss: str) -> list[types.Datum]:
    return [imitation(n) if loss == "cross_entropy" else sampled(loss, n) for n in (9, 5, 12)]


def step(model: tinker.TrainingClient, params: types.AdamParams) -> float:
    """The norm of the gradient that was applied."""
    metrics = model.optim_step(params).result().metrics
    assert metrics is not None
    return metrics["grad_norm"]


def logprobs_of(result: types.ForwardBackwardOutput) -> list[np.ndarray]:
    return [output["logprobs"].to_numpy() for output in result.loss_fn_outputs]


def sample(sampler: tinker.SamplingClient, count: int = 1, **params: Any) -> list[types.SampledSequence]:
    wanted = types.SamplingParams(**{"max_tokens": 8, "seed": 3, **params})
    return list(sampler.sample(types.ModelInput.from_ints(PROMPT), count, wanted).result().sequences)


# ---- training, against plain torch ----------------------------------------------------------------------------------


def plain_logprobs(model: CausalModel, datum: types.Datum) -> Tensor:
    # not transformers' own forward, which normalises in float32 whatever the type
    logits = model.logits(model.hidden(PackedRows.from_rows([datum.model_input.to_ints()])))
    return torch.log_softmax(logits, -1).gather(1, array(datum, "target_tokens").long()[:, None]).squeeze(1)


def array(datum: types.Datum, name: str) -> Tensor:
    return torch.from_numpy(datum.loss_fn_inputs[name].to_numpy().astype(np.float64))


def plain_loss(loss: str, datum: types.Datum, logprobs: Tensor) -> Tensor:
    """The formulas of the API's documentation, written down once more."""
    if loss == "cross_entropy":
        return -(array(datum, "weights") * logprobs).sum()
    mu, advantages = array(datum, "logprobs"), array(datum, "advantages")
    ratio = torch.exp(logprobs - mu)
    match loss:
        case "importance_sampling":
            return -(ratio * advantages).sum()
        case "ppo":
            return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum()
        case "cispo":
            return -(ratio.clamp(0.0, 4.0).detach() * advantages * logprobs).sum()
        case "gspo":
            marked = array(datum, "sequence_ratio_mask") != 0
            whole = torch.exp((logprobs.detach() - mu)[marked].mean() + logprobs - logprobs.detach())
            return -torch.min(whole * advantages, whole.clamp(0.8, 1.2) * advantages).sum()
        case _:
            return -(logprobs * advantages - 0.5 * 0.05 * (logprobs - mu) ** 2).sum()


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_gradients_and_steps_agree_with_plain_torch(service: tinker.ServiceClient, loss: Any) -> None:
    found: list[np.ndarray] = []
    base = load_model(ModelSection(name="bundled", dtype="float64"))
    torch.manual_seed(7)
    adapted = add_adapters(base, LoraSection(rank=4))
    plain = build_causal_model(adapted)
    adam = torch.optim.AdamW(
        [p for p in adapted.parameters() if p.requires_grad], lr=2.0, eps=1e3, betas=(0.9, 0.95), weight_decay=0.0
    )
    served = new_model(service, seed=7, train_unembed=False)
    data = batch(loss)
    for _ in range(3):
        expected = [plain_logprobs(plain, datum) for datum in data]
        total = torch.stack([plain_loss(loss, d, lp) for d, lp in zip(data, expected, strict=True)]).sum()
        adam.zero_grad()
        total.backward()
        answers = [served.forward_backward(data[:1], loss), served.forward_backward(data[1:], loss)]
        served.optim_step(SGD_LIKE).result()
        adam.step()
        found = [array for answer in answers for array in logprobs_of(answer.result())]
        for ours, theirs in zip(expected, found, strict=True):
            np.testing.assert_allclose(theirs, ours.detach().numpy(), atol=5e-6)
        assert sum(a.result().metrics["loss:sum"] for a in answers) == pytest.approx(total.item(), rel=1e-5, abs=1e-5)
    moved = [plain_logprobs(plain, datum).detach().numpy() for datum in data]
    after = logprobs_of(served.forward(data, loss).result())
    for ours, theirs in zip(moved, after, strict=True):
        np.testing.assert_allclose(theirs, ours, atol=5e-6)
    assert max(abs(a - b).max() for a, b in zip(after, found, strict=True)) > 1e-3, "nothing was learned"


def test_targets_may_be_many_per_position(service: tinker.ServiceClient) -> None:
    model = new_model(service)
    ids = tokens(6)
    every = np.tile(np.arange(511), (5, 1))
    datum = row(ids, target_tokens=every, weights=np.full(every.shape, 0.5, dtype=np.float32))
    single = row(ids, target_tokens=[4] * 5)
    whole, one = logprobs_of(model.forward_backward([datum, single], "cross_entropy").result())
    np.testing.assert_allclose(np.exp(whole).sum(-1), np.ones(5), rtol=1e-5)
    np.testing.assert_array_equal(whole[:, 4], one)


def test_a_custom_loss_trains_as_its_built_in_twin(service: tinker.ServiceClient) -> None:
    data = batch("cross_entropy")
    built_in, custom = new_model(service), new_model(service)

    def twin(given: list[types.Datum], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        pairs = zip(given, logprobs, strict=True)
        return sum(-(array(datum, "weights").float() * lp).sum() for datum, lp in pairs), {"pairs:sum": 3.0}

    first = built_in.forward_backward(data, "cross_entropy").result()
    second = custom.forward_backward_custom(data, twin).result()
    assert second.metrics["loss:sum"] == pytest.approx(first.metrics["loss:sum"], rel=1e-4)
    norms = [step(model, SGD_LIKE) for model in (built_in, custom)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    for one, two in zip(
        *(logprobs_of(m.forward(data, "cross_entropy").result()) for m in (built_in, custom)), strict=True
    ):
        np.testing.assert_allclose(one, two, atol=1e-5)


def test_a_batch_in_many_chunks_is_put_together_in_order(service: tinker.ServiceClient) -> None:
    model = new_model(service)
    data = [imitation(2) for _ in range(2100)]  # the SDK sends 1024 at a time, the first last
    whole = logprobs_of(model.forward_backward(data, "cross_entropy").result())
    few = logprobs_of(model.forward([data[0], data[1500], data[2099]], "cross_entropy").result())
    for place, found in zip((0, 1500, 2099), few, strict=True):
        np.testing.assert_allclose(whole[place], found, atol=1e-5)
    assert step(model, SGD_LIKE) > 0


def test_forward_leaves_the_gradients_alone_and_a_step_without_any_is_refused(service: tinker.ServiceClient) -> None:
    model = new_model(service)
    model.forward([imitation()], "cross_entropy").result()
    with pytest.raises(tinker.RequestFailedError, match="no accumulated gradient"):
        model.optim_step(SGD_LIKE).result()
    model.forward_backward([imitation()], "cross_entropy").result()
    assert step(model, SGD_LIKE) > 0


def test_clipping_bounds_the_step(service: tinker.ServiceClient) -> None:
    free, clipped = new_model(service), new_model(service)
    data = batch("cross_entropy")
    before = logprobs_of(free.forward(data, "cross_entropy").result())
    moved = []
    for model, clip in ((free, 0.0), (clipped, 1e-3)):
        model.forward_backward(data, "cross_entropy").result()
        params = types.AdamParams(learning_rate=2.0, eps=1e3, grad_clip_norm=clip)
        assert step(model, params) > 1
        after = logprobs_of(model.forward(data, "cross_entropy").result())
        moved.append(max(abs(a - b).max() for a, b in zip(after, before, strict=True)))
    assert moved[1] < 0.01 * moved[0]


# ---- models beside each other ---------------------------------------------------------------------------------------


def test_two_models_do_not_disturb_each_other(service: tinker.ServiceClient) -> None:
    data = batch("cross_entropy")
    alone, first, second = (new_model(service) for _ in range(3))
    still = service.create_sampling_client(base_model="bundled")
    said = [s.tokens for s in sample(still, 4)]
    for _ in range(2):
        waiting = []
        for model, given in ((alone, data), (first, data), (second, batch("cross_entropy"))):
            waiting += [model.forward_backward(given, "cross_entropy"), model.optim_step(SGD_LIKE)]
        for one in waiting:
            one.result()
    found = [logprobs_of(m.forward(data, "cross_entropy").result()) for m in (alone, first, second)]
    np.testing.assert_array_equal(np.concatenate(found[0]), np.concatenate(found[1]))
    assert abs(np.concatenate(found[0]) - np.concatenate(found[2])).max() > 1e-3
    assert [s.tokens for s in sample(still, 4)] == said, "the base model has changed"


def trained(service: tinker.ServiceClient) -> tinker.TrainingClient:
    model = new_model(service)
    for _ in range(2):
        model.forward_backward(batch("cross_entropy"), "cross_entropy").result()
        model.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    return model


# ---- sampling -------------------------------------------------------------------------------------------------------


def test_sampled_logprobs_are_those_of_training(service: tinker.ServiceClient) -> None:
    model = trained(service)
    sampler = model.save_weights_and_get_sampling_client()
    for sequence in sample(sampler, 3):
        ids = PROMPT + list(sequence.tokens)
        (scored,) = logprobs_of(model.forward([row(ids)], "cross_entropy").result())
        np.testing.assert_allclose(np.array(sequence.logprobs), scored[len(PROMPT) - 1 :], atol=1e-4)
        again = sampler.compute_logprobs(types.ModelInput.from_ints(ids)).result()
        assert again[0] is None
        np.testing.assert_allclose(np.array(again[1:], dtype=float), scored, atol=1e-4)


def test_a_sampler_keeps_the_weights_of_its_moment(service: tinker.ServiceClient) -> None:
    model = trained(service)
    sampler = model.save_weights_and_get_sampling_client()
    before = [(s.tokens, s.logprobs) for s in sample(sampler, 4)]
    model.forward_backward(batch("cross_entropy"), "cross_entropy").result()
    model.optim_step(types.AdamParams(learning_rate=0.1)).result()
    assert [(s.tokens, s.logprobs) for s in sample(sampler, 4)] == before
    after = model.save_weights_and_get_sampling_client()
    assert [(s.tokens, s.logprobs) for s in sample(after, 4)] != before


def test_sixteen_samplers_at_once(service: tinker.ServiceClient) -> None:
    models = [new_model(service, seed=n) for n in range(2)]
    for model in models:
        model.forward_backward(batch("cross_entropy"), "cross_entropy").result()
        model.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    samplers = [models[n % 2].save_weights_and_get_sampling_client() for n in range(16)]
    prompt, params = types.ModelInput.from_ints(PROMPT), types.SamplingParams(max_tokens=16, seed=1, stop=[])
    waiting = [sampler.sample(prompt, 4, params) for sampler in samplers for _ in range(2)]
    found = [tuple(tuple(s.tokens) for s in one.result().sequences) for one in waiting]
    assert len(set(found[0])) > 1 and all(len(tokens) == 16 for one in found for tokens in one)
    for place, one in enumerate(found):
        assert one == found[(place // 2 % 2) * 2], "neighbours changed a sample"


def test_random_numbers_come_from_the_seed_and_else_from_nowhere(service: tinker.ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model="bundled")
    twice = [[s.tokens for s in sample(sampler, 2)] for _ in range(2)]
    assert twice[0] == twice[1] and twice[0][0] != twice[0][1]
    free = [sample(sampler, 1, seed=None, stop=[], max_tokens=16)[0].tokens for _ in range(3)]
    assert len({tuple(tokens) for tokens in free}) > 1


def test_stops_lengths_and_greed(service: tinker.ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model="bundled")
    (whole,) = sample(sampler, temperature=0.0, stop=[], max_tokens=12)
    assert whole.stop_reason == "length" and len(whole.tokens) == 12
    stop = whole.tokens[3]
    (cut,) = sample(sampler, temperature=0.0, stop=[stop], max_tokens=12)
    assert cut.stop_reason == "stop"
    assert cut.tokens == whole.tokens[: list(whole.tokens).index(stop) + 1]
    text = str(sampler.get_tokenizer().decode(whole.tokens[2:4])).strip()
    (said,) = sample(sampler, temperature=0.0, stop=[text], max_tokens=12)
    assert said.stop_reason == "stop" and len(said.tokens) <= 4
    (top,) = sample(sampler, top_k=1, stop=[], max_tokens=12)
    assert top.tokens == whole.tokens


def test_the_likeliest_tokens_are_returned(service: tinker.ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model="bundled")
    result = sampler.sample(
        types.ModelInput.from_ints(PROMPT), 1, types.SamplingParams(max_tokens=4, temperature=0.0, stop=[]),
        include_prompt_logprobs=True, topk_prompt_logprobs=3, topk_sample_logprobs=2, prompt_logprobs_last_n=2,
    ).result()  # fmt: skip
    assert result.prompt_logprobs is not None and result.topk_prompt_logprobs is not None
    assert [logprob is None for logprob in result.prompt_logprobs] == [True, True, False, False]
    assert [entry is None for entry in result.topk_prompt_logprobs] == [True, True, False, False]
    top = result.sequences[0].topk_logprobs
    assert top is not None
    assert [entry[0][0] for entry in top if entry] == list(result.sequences[0].tokens)


# ---- saving ---------------------------------------------------------------------------------------------------------


def loss_after_a_step(model: tinker.TrainingClient, data: list[types.Datum]) -> list[float]:
    losses = []
    for _ in range(2):
        losses.append(model.forward_backward(data, "cross_entropy").result().metrics["loss:sum"])
        model.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    return losses


def test_a_state_continues_exactly_where_it_was_saved(service: tinker.ServiceClient) -> None:
    model, data = trained(service), batch("cross_entropy")
    path = model.save_state("half-way").result().path
    resumed = service.create_training_client_from_state_with_optimizer(path)
    fresh = service.create_training_client_from_state(path)
    went_on = loss_after_a_step(model, data)
    assert loss_after_a_step(resumed, data) == went_on
    without = loss_after_a_step(fresh, data)
    assert without[0] == went_on[0] and without[1] != went_on[1], "the optimizer was to begin anew"


def test_checkpoints_are_listed_described_and_deleted(service: tinker.ServiceClient, url: str) -> None:
    model = new_model(service, user_metadata={"what": "test"})
    state, weights = model.save_state("one").result().path, model.save_weights_for_sampler("two").result().path
    rest = tinker.RestClient(base_url=url, api_key=KEY)
    run = rest.get_training_run(model.model_id).result()
    assert run.lora_rank == 4 and run.user_metadata == {"what": "test"}
    assert run.last_checkpoint is not None and run.last_checkpoint.tinker_path == state
    listed = rest.list_checkpoints(model.model_id).result().checkpoints
    assert {one.tinker_path: one.checkpoint_type for one in listed} == {state: "training", weights: "sampler"}
    assert model.model_id in [one.training_run_id for one in rest.list_training_runs().result().training_runs]
    assert rest.get_weights_info_by_tinker_path(state).result().lora_rank == 4
    rest.delete_checkpoint_from_tinker_path(state).result()
    assert [one.tinker_path for one in rest.list_checkpoints(model.model_id).result().checkpoints] == [weights]
    with pytest.raises(tinker.NotFoundError, match="no checkpoint"):
        service.create_sampling_client(model_path=state)


def test_a_name_is_not_saved_over_unless_asked(service: tinker.ServiceClient) -> None:
    model = new_model(service)
    model.save_state("same").result()
    with pytest.raises(tinker.RequestFailedError, match="exists"):
        model.save_state("same").result()
    assert model.save_state("same", overwrite=True).result().path.endswith("/weights/same")


def test_a_server_that_was_killed_and_started_again_has_what_was_saved(tmp_path: Path) -> None:
    data = batch("cross_entropy")
    with serving(tmp_path, killed=True) as url, client(url) as service:
        model = trained(service)
        state, weights = model.save_state("a").result().path, model.save_weights_for_sampler("b").result().path
        said = [s.tokens for s in sample(service.create_sampling_client(model_path=weights), 4)]
        went_on = loss_after_a_step(model, data)
        lost = model.model_id
    with running(ServeOptions(port=0, folder=tmp_path)) as url, client(url) as service:
        assert [s.tokens for s in sample(service.create_sampling_client(model_path=weights), 4)] == said
        resumed = loss_after_a_step(service.create_training_client_from_state_with_optimizer(state), data)
        assert resumed == pytest.approx(went_on, rel=1e-6)
        orphan = tinker.TrainingClient(service.holder, model_seq_id=0, model_id=lost)
        with pytest.raises(tinker.NotFoundError, match=f"from_state_with_optimizer.{state}"):
            orphan.forward(data, "cross_entropy").result()


# ---- other models ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_models_of_other_families_are_trained_and_sampled_too(tmp_path: Path, family: str) -> None:
    folder = saved_model(family, tmp_path / "model")
    options = ServeOptions(model=str(folder), name="mine", port=0, folder=tmp_path)
    with running(options) as url, client(url) as service:
        model = service.create_lora_training_client("mine", rank=4)
        first, *_, last = (loss_after_a_step(model, [row([5, 6, 7, 8, 9])])[0] for _ in range(3))
        assert last < first
        prompt = types.ModelInput.from_ints([5, 6, 7])
        sampler, params = model.save_weights_and_get_sampling_client(), types.SamplingParams(max_tokens=6, stop=[])
        (said,) = sampler.sample(prompt, 1, params).result().sequences
        (scored,) = logprobs_of(model.forward([row([5, 6, 7, *said.tokens])], "cross_entropy").result())
        np.testing.assert_allclose(np.array(said.logprobs), scored[2:], atol=1e-4)


def test_a_model_without_fitting_layers_says_so(tmp_path: Path) -> None:
    folder = saved_model("gpt2", tmp_path / "model")
    with running(ServeOptions(model=str(folder), port=0, folder=tmp_path)) as url, client(url) as service:
        with pytest.raises(tinker.RequestFailedError, match="train_attn, train_mlp; set that to false"):
            service.create_lora_training_client(str(folder), rank=4)
        assert service.create_lora_training_client(str(folder), rank=4, train_attn=False, train_mlp=False)
