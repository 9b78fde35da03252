"""The engine's process, on the strict device."""

from __future__ import annotations

import sys

import sim_device  # noqa: F401  (the device is there once this is imported)
from headrace.engines.process.worker import main

if __name__ == "__main__":
    main(int(sys.argv[1]), list(map(int, sys.argv[2:])))
