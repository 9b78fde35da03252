"""The environment of programs that a run starts: named variables, without the run's keys and tokens."""

from __future__ import annotations

import os
from collections.abc import Mapping

from headrace.errors import ConfigError

_PASSED_ON = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TMP", "TEMP",
    "VIRTUAL_ENV", "PYTHONPATH", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "OMP_NUM_THREADS",
)  # fmt: skip


def child_environment(named: Mapping[str, str] | None = None, setting: str = "the settings") -> dict[str, str]:
    """The variables that every program needs, plus the named ones.

    A value "$NAME" stands for the run's variable NAME, so that no secret is written into the run folder. `setting`
    is for the error message.
    """
    passed = {name: value for name, value in os.environ.items() if name in _PASSED_ON or name.startswith("LC_")}
    return passed | expanded(named or {}, setting)


def expanded(named: Mapping[str, str], setting: str) -> dict[str, str]:
    """The variables, with the run's own values where they name one."""
    return {name: _value(name, str(value), setting) for name, value in named.items()}


def _value(name: str, value: str, setting: str) -> str:
    if not (value.startswith("$") and value[1:].isidentifier()):
        return value
    if value[1:] not in os.environ:
        raise ConfigError(f'{setting} gives {name} the value of "{value}", which is not in the environment; set it')
    return os.environ[value[1:]]
