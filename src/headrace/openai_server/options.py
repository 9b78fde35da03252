"""The options of `headrace serve openai`."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.errors import ConfigError
from headrace.utils.loopback import is_loopback

DTYPES = ("float32", "bfloat16", "float64")


@dataclass(frozen=True, slots=True)
class OpenAIOptions:
    """What is served, where, and with which limits."""

    target: str = "bundled"
    """A run folder (its newest checkpoint), a checkpoint, or a model: a name, a folder or a hub id."""
    name: str | None = None
    """What clients call the model; by default the target."""
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    public_host: str | None = None
    """Name under which clients reach the server, beside its address: a proxy's, say."""
    dtype: str | None = None
    """Type of a model's weights; a run has its own."""
    threads: int = 0
    """Threads of the tensor library; 0 for its own choice."""
    max_batch: int = 128
    """Sequences that are decoded together."""
    max_waiting: int = 1024
    """Sequences that may wait. With more, requests are refused with 429, and clients try again."""
    max_model_length: int | None = None
    max_tokens: int = 1024
    """Tokens of a reply whose request sets no limit."""
    max_body_mb: float = 64.0
    keep_alive_s: float = 10.0
    """A stream that has nothing to say for so long gets a comment, so that no proxy takes it for dead."""

    def __post_init__(self) -> None:
        if self.api_key is None and not is_loopback(self.host):
            raise ConfigError(
                f"--host {self.host} can be reached from other machines, and no API key is set; "
                "give --api-key SECRET, or keep to 127.0.0.1"
            )
        if self.api_key is not None and not self.api_key.strip():
            raise ConfigError("--api-key is empty; give a key, or leave it out")
        for name in ("max_batch", "max_waiting", "max_tokens", "max_body_mb", "keep_alive_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"--{name.replace('_', '-')} must be above 0, got {getattr(self, name)}")
        if self.max_model_length is not None and self.max_model_length < 2:
            raise ConfigError(f"--max-model-length must be at least 2, got {self.max_model_length}")
        if self.threads < 0:
            raise ConfigError(f"--threads must be 0 (the library's own choice) or above, got {self.threads}")
        if not 0 <= self.port < 65536:
            raise ConfigError(f"--port must be between 0 (any free one) and 65535, got {self.port}")
