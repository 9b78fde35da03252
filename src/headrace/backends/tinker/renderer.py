"""Prompts written by a renderer of tinker-cookbook, where the tokenizer's own chat template is not wanted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.config import RunConfig
from headrace.data.task import Message
from headrace.errors import ConfigError, DataError, MissingExtraError, boundary


class RenderedTokenizer:
    """A tokenizer with a renderer for its chat template. `stop_ids` are the tokens that end a reply."""

    def __init__(self, tokenizer: Any, renderer: Any, name: str) -> None:
        self._tokenizer = tokenizer
        self._renderer = renderer
        self.chat_template = f"renderer {name}"
        stop: Sequence[str | int] = renderer.get_stop_sequences()
        self.stop_ids = [word for word in stop if isinstance(word, int)]
        self.stop_words = [word for word in stop if isinstance(word, str)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __len__(self) -> int:
        return len(self._tokenizer)

    def apply_chat_template(
        self, messages: Sequence[Message], tokenize: bool = False, add_generation_prompt: bool = True
    ) -> str:
        """The conversation as text; an error if its ids would not be the renderer's again."""
        with boundary(DataError, f"{self.chat_template} cannot render the messages"):
            if add_generation_prompt:
                ids = self._renderer.build_generation_prompt(list(messages)).to_ints()
            else:
                ids = self._renderer.build_supervised_example(list(messages))[0].to_ints()
        text = self._tokenizer.decode(ids)
        if list(self._tokenizer.encode(text, add_special_tokens=False)) != list(ids):
            raise DataError(
                f"{self.chat_template} makes ids that the tokenizer does not make of their text; leave "
                f"tinker.renderer_name empty, or set tinker.tokenizer to the one that the renderer is for"
            )
        return text


def with_renderer(config: RunConfig, tokenizer: Any) -> Any:
    """The tokenizer, with the renderer that the run names."""
    name = config.tinker.renderer_name
    if not name:
        return tokenizer
    try:
        from tinker_cookbook.renderers import get_renderer  # type: ignore[import-not-found]
    except ImportError as missing:
        raise MissingExtraError(
            f'tinker.renderer_name is "{name}", which needs tinker-cookbook; pip install tinker-cookbook, or leave it '
            f"empty to use the tokenizer's chat template"
        ) from missing
    with boundary(ConfigError, f'there is no renderer "{name}" for this tokenizer'):
        made = RenderedTokenizer(tokenizer, get_renderer(name, tokenizer), name)
    missing_words = [word for word in made.stop_words if word not in config.rollout.stop]
    if missing_words:
        raise ConfigError(f'renderer "{name}" ends replies with {missing_words}; add them to rollout.stop')
    return made
