"""Training through the Tinker API, for backend "tinker"."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

import headrace.config.conditions.tinker as when
from headrace.config.base import LONGEST_S, MOST_TOKENS, Section
from headrace.config.conditions import shared
from headrace.config.effect import declare


class TinkerSection(Section):
    """The service, and what is trained there; for backend "tinker"."""

    base_url: str = ""
    """Address of the service; empty takes the environment variable TINKER_BASE_URL, then the SDK's own."""
    api_key_env: str = "TINKER_API_KEY"
    """Environment variable that holds the key; a service on this machine may need none."""
    model: str = ""
    """What the service calls the base model; empty takes model.name."""
    tokenizer: str = ""
    """Tokenizer: a name from `headrace model list`, a folder or a hub id. Empty takes what the service names, then the
    base model's."""
    renderer_name: str = ""
    """A renderer of tinker-cookbook that writes prompts; empty takes the tokenizer's chat template."""
    rank: int = Field(default=32, ge=1, le=65_536)
    """Rank of the adapters."""
    train_attn: bool = True
    """Adapters on the attention layers."""
    train_mlp: bool = True
    """Adapters on the MLP layers."""
    train_unembed: bool = True
    """An adapter on the output layer."""
    state: str = ""
    """A saved state that a new run starts from, tinker://RUN/weights/NAME; empty starts with fresh adapters."""
    state_optimizer: bool = True
    """Take the optimizer's moments from tinker.state, too."""
    ttl_s: int | None = Field(default=None, ge=3600, le=LONGEST_S)
    """Seconds after which the service may delete the states of checkpoints; empty keeps them."""
    segment_tokens: int | None = Field(default=None, ge=1, le=MOST_TOKENS)
    """Sample replies in requests of so many tokens. A reply then continues with new weights, and pauses take effect, at
    its next request. Empty: one request per reply, which keeps the weights that it began with."""
    vocabulary: int | None = Field(default=None, ge=2, le=MOST_TOKENS)
    """Size of the model's vocabulary. If it is set, the service is asked for the log-probability of every token of it
    wherever one is scored, as temperatures other than 1 and an entropy bonus need. Only for small vocabularies."""

    effects: ClassVar = declare(
        when.TINKER("base_url", "api_key_env", "model", "tokenizer", "renderer_name", "rank", "train_attn"),
        when.TINKER("train_mlp", "train_unembed", "state", "state_optimizer", "ttl_s", "segment_tokens", "vocabulary"),
        when.TINKER_STATE("state_optimizer"),
        shared.AHEAD("segment_tokens"),
    )
