"""The random states that a process has in common: of `random`, of numpy, and of torch where it is loaded."""

from __future__ import annotations

import base64
import random
import sys
from typing import Any

import numpy as np

from headrace.errors import DataError, boundary


def random_states() -> dict[str, Any]:
    """All of them, as JSON can hold them."""
    version, words, gauss = random.getstate()
    states: dict[str, Any] = {
        "python": [version, _pack(np.array(words, np.uint32)), gauss],
        "numpy": _encode(np.random.get_state(legacy=False)),
    }
    torch: Any = sys.modules.get("torch")  # never imported here: who has not loaded it draws nothing from it
    if torch is not None:
        states["torch"] = _pack(torch.get_rng_state().numpy())
        if torch.cuda.is_initialized():
            states["cuda"] = [_pack(state.numpy()) for state in torch.cuda.get_rng_state_all()]
    return states


def restore_random_states(states: dict[str, Any]) -> None:
    """The inverse. What the states do not mention stays as it is."""
    with boundary(DataError, "the random states of the checkpoint cannot be set"):
        if "python" in states:
            version, words, gauss = states["python"]
            random.setstate((version, tuple(_unpack(words).tolist()), gauss))
        if "numpy" in states:
            np.random.set_state(_decode(states["numpy"]))
        torch: Any = sys.modules.get("torch")
        if torch is not None and "torch" in states:
            torch.set_rng_state(torch.from_numpy(_unpack(states["torch"])))
        if torch is not None and "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state_all([torch.from_numpy(_unpack(state)) for state in states["cuda"]])


def _pack(array: np.ndarray) -> dict[str, str]:
    return {"dtype": array.dtype.str, "base64": base64.b64encode(array.tobytes()).decode()}


def _unpack(packed: dict[str, str]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(packed["base64"]), packed["dtype"]).copy()


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return _pack(value)
    return {key: _encode(item) for key, item in value.items()} if isinstance(value, dict) else value


def _decode(value: Any) -> Any:
    if isinstance(value, dict):
        return _unpack(value) if "base64" in value else {key: _decode(item) for key, item in value.items()}
    return value
