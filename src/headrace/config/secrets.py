"""Settings that must not hold a secret."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.config import RunConfig, flatten

_SECRET = {"api_key", "apikey", "password", "secret", "authorization", "x-api-key", "access_token", "auth_token"}


def exposed_secrets(config: RunConfig) -> Iterator[str]:
    """What is in a run file is also in config.json, in checkpoints and on screens. The value itself is not shown."""
    for key, value in flatten(config.model_dump(mode="json")):
        if key.rpartition(".")[2].lower() in _SECRET and isinstance(value, str) and value and value[0] != "$":
            yield (
                f"{key} looks like a secret, and settings are copied into the run's folder; put it into an environment "
                f"variable, and give its name (api_key_env, or a key of your own)"
            )
