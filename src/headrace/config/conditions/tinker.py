"""When the settings of [tinker] have effect."""

from __future__ import annotations

from headrace.config.derived import has_own
from headrace.config.effect import Condition

TINKER = Condition(
    lambda s: s.c.backend.name == "tinker" or has_own({s.c.backend.name}, "backend"),
    'it is for backend "tinker", and backend.name is "{c.backend.name}"',
)
TINKER_STATE = Condition(lambda s: bool(s.own.state), "tinker.state is empty", "remove it, or set tinker.state")
