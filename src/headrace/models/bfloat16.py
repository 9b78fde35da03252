"""bfloat16 on processors that say they multiply it in hardware, and do not."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from functools import cache
from pathlib import Path

import torch

_PROBE = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); torch.nn.functional.linear(a, a)"
_WITHOUT_AMX = "AVX512_CORE_BF16"


@cache
def make_bfloat16_safe() -> None:
    """Some virtual machines report matrix units (AMX) whose instructions end the process; find out in another one.

    Where that is so, products are computed without them.
    """
    if "ONEDNN_MAX_CPU_ISA" in os.environ or not _reports_amx():
        return
    tried = subprocess.run([sys.executable, "-c", _PROBE], stderr=subprocess.DEVNULL)
    if tried.returncode >= 0:
        return
    os.environ["ONEDNN_MAX_CPU_ISA"] = _WITHOUT_AMX  # for processes that are started from here
    torch.backends.mkldnn.set_flags(False)  # it may be too late for this one to read the variable
    warnings.warn(
        "this machine reports matrix units (AMX) that it does not have: bfloat16 is computed without them, slowly; "
        f"set ONEDNN_MAX_CPU_ISA={_WITHOUT_AMX} before starting for more speed",
        stacklevel=2,
    )


def _reports_amx() -> bool:
    processor = Path("/proc/cpuinfo")
    return processor.exists() and "amx_bf16" in processor.read_text()
