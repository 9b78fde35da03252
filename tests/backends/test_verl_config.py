"""Settings that backend "verl" cannot honour are refused at start-up; those of verl are checked by its own classes."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import pytest

from headrace.backends.verl.backend import VerlBackend
from headrace.backends.verl.platform import choose_platform
from headrace.config.loading import build_config
from headrace.errors import ConfigError, MissingExtraError
from verl_pool import WHY, has_verl, verl_sections

needs_verl = pytest.mark.skipif(not has_verl(), reason=WHY)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"cluster": {"address": ""}}, 'cluster.address is empty; set cluster.address = "local"'),
        ({"algorithm": {"estimator": "distill"}}, 'asks no teacher; .* or backend "fsdp"'),
        ({"run": {"deterministic": True}}, 'set it to false, or use backend "fsdp"'),
        ({"model": {"dtype": "float64"}}, "verl knows float32 and bfloat16"),
        ({"model": {"lora": {"rank": 4, "dropout": 0.1}}}, "verl's adapters have none; set it to 0"),
        ({"trainer": {"placement": "colocate"}}, 'backend "verl" holds the model in shards'),
        ({"backend": {"shard": 3}}, "no multiple of it"),
        ({"cluster": {"learner": {"GPU": 1}}, "model": {"device": "cpu"}}, 'set model.device = "cuda", or remove GPU'),
    ],
)
def test_what_verl_cannot_do_is_refused_with_the_remedy(changes: dict[str, Any], says: str) -> None:
    given = verl_sections(2, **changes)
    if not given["cluster"]["address"]:
        given["cluster"] = {}
    with pytest.raises(ConfigError, match=says):
        VerlBackend.check(build_config(given))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"algorithm": {"estimator": "gae", "value_head": True}}, "value head"),
        ({"backend": {"logits_chunk": 7}}, "backend.logits_chunk = 7 has no effect"),
        ({"backend": {"share_prefixes": False}}, "backend.share_prefixes = false has no effect"),
        ({"backend": {"cpu_offload": True}}, "backend.cpu_offload = true has no effect"),
        ({"optimizer": {"master_dtype": "float32"}}, "optimizer.master_dtype"),
        ({"model": {"attention": "sdpa"}}, "model.attention"),
        ({"backend": {"name": "fsdp", "verl": {"engine": {}}}}, 'it is for backend "verl"'),
    ],
)
def test_a_setting_that_does_nothing_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        VerlBackend.check(build_config(verl_sections(2, **changes)))


@pytest.mark.skipif(has_verl(), reason="verl is installed")
def test_without_verl_the_error_says_how_to_get_it() -> None:
    with pytest.raises(MissingExtraError, match=r'"verl" is not installed.* make verl'):
        VerlBackend.check(build_config(verl_sections(2)))


@needs_verl
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"engin": {}}, r'no table engin \(did you mean "engine"\?\)'),
        ({"engine": {"forward_prefech": True}}, r'FSDPEngineConfig has no forward_prefech \(did you mean "forward_pre'),
        ({"engine": {"forward_prefetch": 1}}, "forward_prefetch must be a bool, as false is; got 1"),
        ({"engine": {"strategy": "fsdp3"}}, r'"fsdp3" \(did you mean "fsdp2"\?\)'),
        ({"engine": {"mixed_precision": {}}}, "is decided by model.dtype; set that"),
        ({"engine": {"ulysses_sequence_parallel_size": 2}}, "data-parallel ranks only; remove it"),
        ({"model": {"use_remove_paddin": True}}, r'HFModelConfig has no .* \(did you mean "use_remove_padding"\?\)'),
        ({"model": {"lora_rank": 8}}, "is decided by model.lora.rank"),
        ({"optimizer": {"lr": 1.0}}, "is decided by optimizer.lr"),
        ({"optimizer": {"optimzer": "AdamW"}}, r'\(did you mean "optimizer"\?\)'),
        ({"engine": {"wrap_policy": []}}, "wrap_policy must be a dict"),
        ({"model": {"lora": {"rank": 4}}}, "it is for adapters with Megatron"),
    ],
)
def test_a_wrong_key_of_verls_names_the_nearest(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        VerlBackend.check(build_config(verl_sections(2, backend={"verl": settings})))


@needs_verl
def test_settings_of_verls_reach_its_configuration() -> None:
    from headrace.registry import load_object

    given = {"engine": {"reshard_after_forward": False}, "optimizer": {"override_optimizer_config": {"amsgrad": True}}}
    config = build_config(verl_sections(2, backend={"verl": given}))
    VerlBackend.check(config)
    found = load_object("headrace.backends.verl.settings:worker_config")(config, 2)
    assert found.engine_config.reshard_after_forward is False and found.engine_config.fsdp_size == 2
    assert found.engine_config.mixed_precision["param_dtype"] == "fp32"
    assert found.optimizer_config.override_optimizer_config == {"eps": 1e-8, "amsgrad": True}
    assert found.model_config.use_remove_padding is False


@needs_verl
def test_verl_may_have_been_imported_before_its_platform_is_chosen() -> None:
    """As where a workflow is an agent loop of verl's."""
    platforms = importlib.import_module("verl.plugin.platform")
    platforms.set_platform(platforms.PlatformRegistry.get("nvidia")())
    choose_platform(build_config(verl_sections(1)))
    assert platforms.get_platform().device_name == "cpu"


# ---- Megatron ------------------------------------------------------------------------------------------------------

GPUS = {"cluster": {"learner": {"CPU": 1, "GPU": 1}}, "model": {"dtype": "bfloat16"}}


def megatron(ranks: int, changes: dict[str, Any] | None = None, **tables: dict[str, Any]) -> Any:
    """A run on verl's Megatron engine."""
    tables["engine"] = {"strategy": "megatron", **tables.get("engine", {})}
    more = {**GPUS, **(changes or {})}
    return build_config(verl_sections(ranks, **{**more, "backend": {"verl": tables, **more.get("backend", {})}}))


@needs_verl
@pytest.mark.parametrize(
    ("engine", "says"),
    [
        (
            {"tensor_model_paralel_size": 2},
            r'McoreEngineConfig has no .* \(did you mean "tensor_model_parallel_size"\?\)',
        ),
        ({"fsdp_size": 2}, "McoreEngineConfig has no fsdp_size"),
        ({"sequence_parallel": "yes"}, 'must be a bool, as true is; got "yes"'),
        ({"expert_tensor_parallel_size": "two"}, 'must be a int; got "two"'),
        ({"dtype": "float16"}, "is decided by model.dtype"),
        ({"use_mbridge": False}, "by a bridge always"),
        ({"tensor_model_parallel_size": 0}, "must be at least 1"),
        (
            {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
            r"= 4 ranks hold one model, and backend.ranks = 6 is no multiple of it; set it to 8",
        ),
    ],
)
def test_megatrons_settings_are_checked_by_verls_classes(engine: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        VerlBackend.check(megatron(6, engine=engine))


@needs_verl
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": {"dtype": "float32"}}, 'Megatron computes in bfloat16; set model.dtype = "bfloat16"'),
        ({"cluster": {"learner": {"CPU": 1}}}, "runs on GPUs only"),
        ({"model": {"dtype": "bfloat16", "lora": {"rank": 4}}}, "adapters are trained with FSDP2 only"),
        ({"backend": {"shard": 2}}, "backend.shard = 2 is for FSDP2"),
    ],
)
def test_what_does_not_fit_megatron_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        VerlBackend.check(megatron(2, changes))


@needs_verl
def test_megatrons_settings_are_accepted_and_reach_verls_configuration() -> None:
    from headrace.registry import load_object

    config = megatron(
        8,
        {"backend": {"gradient_checkpointing": True}, "optimizer": {"lr": 3e-6, "grad_clip": 0.5}, "run": {"seed": 7}},
        engine={
            "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "param_offload": True,
            "override_transformer_config": {"attention_backend": "flash"},
        },
        optimizer={"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16"},
        model={"use_remove_padding": True},
    )  # fmt: skip
    with pytest.warns(UserWarning, match="was not run on hardware"):
        VerlBackend.check(config)
    found = load_object("headrace.backends.verl.settings:worker_config")(config, 8)
    engine, optimizer = found.engine_config, found.optimizer_config
    assert type(engine).__name__ == "McoreEngineConfig" and engine.strategy == "megatron"
    assert (engine.tensor_model_parallel_size, engine.pipeline_model_parallel_size) == (2, 2)
    assert (engine.dtype, engine.seed, engine.param_offload, engine.sequence_parallel) == ("bfloat16", 7, True, True)
    assert engine.override_transformer_config == {
        "attention_dropout": 0.0, "hidden_dropout": 0.0, "recompute_granularity": "full",
        "recompute_method": "uniform", "recompute_num_layers": 1, "attention_backend": "flash",
    }  # fmt: skip
    assert type(optimizer).__name__ == "McoreOptimizerConfig" and optimizer.lr_decay_style == "constant"
    assert (optimizer.lr, optimizer.clip_grad, optimizer.exp_avg_dtype) == (3e-6, 0.5, "bf16")
    assert optimizer.override_optimizer_config["adam_eps"] == config.optimizer.eps
    assert found.model_config.use_remove_padding is True


@needs_verl
def test_what_verls_class_finds_wrong_is_said_as_such() -> None:
    with pytest.raises(ConfigError, match=r"verl refuses backend.verl.optimizer: .*exp_avg_dtype"):
        VerlBackend.check(megatron(2, optimizer={"exp_avg_dtype": "int8"}))


def test_a_start_with_megatron_says_first_what_the_machine_lacks() -> None:
    wrong = megatron(3, {"model": {"dtype": "float32"}}, engine={"tensor_model_paralel_size": 2})
    with pytest.raises(ConfigError, match=r"megatron\.core is not installed.* or set it to .fsdp2.*--dry-run"):
        VerlBackend.check_machine(wrong)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        VerlBackend.check_machine(build_config(verl_sections(2)))
