"""Settings that backend "verl" cannot honour are refused at start-up; those of verl are checked by its own classes."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.backends.verl.backend import VerlBackend
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
        (
            {"engine": {"strategy": "megatron", "tensor_model_paralel_size": 2}},
            r'McoreEngineConfig has no .* \(did you mean "tensor_model_parallel_size"\?\)',
        ),
        ({"engine": {"strategy": "megatron", "tensor_model_parallel_size": 2}}, 'FSDP2 only; set it to "fsdp2"'),
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
