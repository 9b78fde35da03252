"""An unmodified recipe of tinker-cookbook against `headrace serve tinker`, in an environment of its own.

    python tests/interop/tinker_cookbook.py [--work DIR] [--steps 5]

Makes a virtual environment in DIR (some minutes the first time), starts the server on the bundled model, and runs the
recipe "math_rl" on its arithmetic problems. It ends with the recipe's metrics, and fails if the recipe does.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.models.catalog import resolve_model

COOKBOOK, TORCH = "tinker-cookbook[math-rl]==0.5.8", "torch==2.13.0"
MODEL = "headrace/bundled"
RECIPE = "tinker_cookbook.recipes.math_rl.train"
SHOWN = ("env/all/reward/total", "env/all/correct", "optim/kl_sample_train_v1", "loss:sum")


def environment(work: Path) -> Path:
    """The interpreter of the cookbook's environment."""
    python = work / "venv" / "bin" / "python"
    if not (work / "venv" / "ready").exists():
        print(f"installing {COOKBOOK} into {work / 'venv'} ...", flush=True)
        subprocess.run([sys.executable, "-m", "venv", work / "venv"], check=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, TORCH], check=True)  # first: another's open range would pull a larger build
        subprocess.run([*pip, TORCH, COOKBOOK], check=True)
        (work / "venv" / "ready").touch()
    return python


@contextmanager
def server(work: Path) -> Iterator[str]:
    """Its URL."""
    command = [sys.executable, "-m", "headrace", "serve", "tinker", "--model", MODEL, "--port", "0"]
    started = subprocess.Popen(
        [*command, "--dir", str(work / "server")], cwd=work, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert started.stdout is not None
    try:
        for line in started.stdout:
            found = re.search(r"http://\S+?:\d+", line)
            if found:
                yield found[0]
                return
        raise SystemExit("the server did not start")
    finally:
        started.terminate()
        started.wait(30)


def main() -> None:
    """Set up, serve, run, show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "headrace-tinker-cookbook")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    work: Path = args.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    python = environment(work)
    if not (work / MODEL).exists():  # where both sides find the tokenizer under the model's name
        shutil.copytree(resolve_model("bundled"), work / MODEL)
    log = work / "log"
    shutil.rmtree(log, ignore_errors=True)
    with server(work) as url:
        settings = {
            "env": "arithmetic", "model_name": MODEL, "renderer_name": "role_colon", "lora_rank": 8, "group_size": 8,
            "groups_per_batch": 16, "learning_rate": 1e-3, "max_tokens": 16, "max_steps": args.steps, "eval_every": 0,
            "save_every": args.steps, "log_path": log, "behavior_if_log_dir_exists": "delete", "base_url": url,
        }  # fmt: skip
        offline = {"HF_HUB_OFFLINE": "1", "TINKER_API_KEY": "tml-none", "TINKER_BASE_URL": url, "TINKER_TELEMETRY": "0"}
        words = [f"{name}={value}" for name, value in settings.items()]
        subprocess.run([python, "-m", RECIPE, *words], cwd=work, env={**os.environ, **offline}, check=True)
    print("| step | " + " | ".join(SHOWN) + " |\n| --- |" + " --- |" * len(SHOWN))
    for line in (log / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        cells = (f"{row[name]:.4g}" if name in row else "" for name in SHOWN)
        print(f"| {row.get('step', row.get('progress/batch', ''))} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
