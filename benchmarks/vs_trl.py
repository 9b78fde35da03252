"""The same GRPO work in Headrace and in TRL: seconds per step, tokens per second, memory.

    python benchmarks/vs_trl.py [--rounds 2] [--steps 4] [--models smollm2-135m,bundled] [--json FILE] [--quick]

Prints a table in Markdown. Both sides have the same weights, prompts (the same ids), group size, number of sampled
tokens (an end of sequence ends nothing), reward, loss and optimizer, in float32 on two threads; on-policy, one update
per batch. Each round is one process of Headrace and one of TRL, one after the other; the first step of each is warm-up.
The bundled model, whose steps are short, makes ten times as many.
Headrace runs as a user runs it, with ledger and metrics, engine and learner in one process. TRL gets the settings that
are fastest for it: the whole batch at once, the fused optimizer, no logging, and no gradient checkpointing, which it
has on by default (--trl-gradient-checkpointing). TRL needs an environment of its own, which is made in .venv-trl unless
--trl-python names one. `--quick` takes the bundled model and one round of two steps.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from _arguments import parsed
from _trl_side import Figures, Work, distinct_share, peak_mb
from tokenizers import Tokenizer

from headrace import Model, Task
from headrace.errors import HeadraceError
from headrace.models.catalog import resolve_model
from headrace.runfile import build_config

HERE = Path(__file__).parent
REQUIREMENTS = HERE / "trl_requirements.txt"
TRL_ENVIRONMENT = HERE.parent / ".venv-trl"
PROMPT_TOKENS = 60
WARM_UP = 1
SHORT_STEPS = 10
WORDS = (
    "say in your own words why a river is slow where it is wide and fast where it is narrow , then make 24 of 3 and 8"
)


def make_prompts(folder: str, count: int, tokens: int = PROMPT_TOKENS) -> tuple[list[str], list[list[int]]]:
    """Different texts of exactly so many tokens, so that neither side pads, with their ids."""
    tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    texts: list[str] = []
    rows: list[list[int]] = []
    rng = random.Random(0)
    while len(texts) < count:
        ids = tokenizer.encode(" ".join(rng.choices(WORDS.split(), k=tokens))).ids[:tokens]
        text = tokenizer.decode(ids, skip_special_tokens=False)
        if tokenizer.encode(text).ids == ids:  # a word that was cut may be other tokens
            texts.append(text)
            rows.append(ids)
    return texts, rows


def train_headrace(work: Work, place: Path) -> Figures:
    """Train with UnifiedTrainer."""
    import torch

    from headrace.trainer import UnifiedTrainer

    async def answer(task: Task, model: Model) -> float:
        output = await model.complete(task.metadata["ids"], ignore_eos=True)
        return distinct_share(output.completion_ids)

    tasks = [
        Task(id=str(number), instruction=text, metadata={"ids": ids})
        for number, (text, ids) in enumerate(zip(work.prompts, work.prompt_ids, strict=True))
    ]
    result = UnifiedTrainer(_headrace_config(work, place), workflow=answer, tasks=tasks).fit()
    rows = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["step"]]
    return Figures(
        step_s=[row["time/step_s"] for row in steps],
        generate_s=[row["time/generate_s"] for row in steps],
        generated_tokens=[round(row["tokens/generated"]) for row in steps],
        rewards=[row["reward/mean"] for row in steps],
        peak_mb=peak_mb(),
        notes={"torch": torch.__version__, "threads": torch.get_num_threads(), "last_step": steps[-1]},
    )


def _headrace_config(work: Work, place: Path) -> Any:
    return build_config(
        {
            "run": {"name": "headrace", "dir": place, "seed": work.seed},
            "model": {"name": work.model},
            "data": {"shuffle": False},
            "rollout": {"group_size": work.group_size, "max_tokens": work.new_tokens},
            "backend": {"threads": work.threads},
            "optimizer": {"lr": work.learning_rate},
            "trainer": {"steps": work.steps, "batch_size": work.prompts_per_step, "save_last": False},
            "track": {"plot": False},
        }
    )


@dataclass(frozen=True)
class Side:
    """One of the two, over all measured steps of its processes."""

    step_s: list[float]
    generate_s: list[float]
    peak_mb: list[float]
    generated: int
    """Tokens sampled in a step."""
    trained: int
    """Tokens of a step's rows, prompts included."""

    @classmethod
    def of(cls, work: Work, processes: list[Figures]) -> Side:
        step_s = [value for figures in processes for value in figures.step_s[WARM_UP:]]
        generate_s = [value for figures in processes for value in figures.generate_s[WARM_UP:]]
        generated = work.rows * work.new_tokens
        trained = generated + work.rows * PROMPT_TOKENS
        return cls(step_s, generate_s, [figures.peak_mb for figures in processes], generated, trained)

    @property
    def train_s(self) -> list[float]:
        """What is left of each step."""
        return [step - generate for step, generate in zip(self.step_s, self.generate_s, strict=True)]


@dataclass(frozen=True)
class Row:
    """A line of the table; `better` is what Headrace has over TRL, as a ratio of medians."""

    name: str
    headrace: list[float]
    trl: list[float]
    digits: int
    more_is_better: bool

    @property
    def better(self) -> float:
        ratio = median(self.headrace) / median(self.trl)
        return ratio if self.more_is_better else 1 / ratio

    def line(self, model: str) -> str:
        return f"| {model} | {self.name} | {self._cell(self.headrace)} | {self._cell(self.trl)} | {self.better:.2f} |"

    def _cell(self, values: list[float]) -> str:
        if len(values) == 1:
            return f"{values[0]:.{self.digits}f}"
        return f"{median(values):.{self.digits}f} ({min(values):.{self.digits}f}–{max(values):.{self.digits}f})"


def rows_of(headrace: Side, trl: Side) -> list[Row]:
    """What is compared."""

    def per_second(tokens: int, seconds: list[float]) -> list[float]:
        return [tokens / value for value in seconds]

    def row(name: str, of: Callable[[Side], list[float]], digits: int, more_is_better: bool) -> Row:
        return Row(name, of(headrace), of(trl), digits, more_is_better)

    return [
        row("seconds per step", lambda side: side.step_s, 2, False),
        row("generated tokens/s", lambda side: per_second(side.generated, side.generate_s), 0, True),
        row("trained tokens/s", lambda side: per_second(side.trained, side.train_s), 0, True),
        row("peak memory (MB)", lambda side: side.peak_mb, 0, False),
    ]


def trl_python() -> Path:
    """The interpreter of TRL's environment, which is made if it is not there or has other versions."""
    python, stamp = TRL_ENVIRONMENT / "bin" / "python", TRL_ENVIRONMENT / ".stamp"
    wanted = REQUIREMENTS.read_text()
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"installing TRL into {TRL_ENVIRONMENT.name}: some minutes ...", file=sys.stderr, flush=True)
    torch = next(line for line in wanted.splitlines() if line.startswith("torch=="))
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    remedy = "check the network, or name an environment that has TRL with --trl-python"
    _checked([sys.executable, "-m", "venv", "--clear", str(TRL_ENVIRONMENT)], "cannot make TRL's environment", remedy)
    _checked([*install, torch], f"cannot install {torch}", remedy)
    _checked([*install, "-r", str(REQUIREMENTS)], f"cannot install {REQUIREMENTS.name}", remedy)
    stamp.write_text(wanted)
    return python


def _with_trl(python: Path) -> Path:
    """An interpreter that the user named, if it has TRL."""
    remedy = f"name the interpreter of an environment that has {REQUIREMENTS.name}, or leave --trl-python out"
    if not python.exists():
        raise SystemExit(f"there is no {python}; {remedy}")
    if subprocess.run([python, "-c", "import trl"], capture_output=True, check=False).returncode:
        raise SystemExit(f"{python} cannot import trl; {remedy}")
    return python


def _checked(command: list[str], problem: str, remedy: str, **environment: str) -> None:
    """Run a command that must succeed; the user is told the last that it said."""
    done = subprocess.run(
        command, env=os.environ | environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode:
        said = "\n".join(done.stdout.strip().splitlines()[-5:]) or "nothing"
        raise SystemExit(f"{problem}; {remedy}. It ended with {done.returncode} and said:\n{said}")


def run_side(name: str, command: list[str], work: Work) -> Figures:
    """One process of one side."""
    with tempfile.TemporaryDirectory() as place:
        given, wanted = Path(place) / "work.json", Path(place) / "figures.json"
        given.write_text(json.dumps(asdict(work)))
        threads = str(work.threads)
        _checked(
            [*command, str(given), str(wanted)], f"{name} failed on {work.model}", "see what it said",
            OMP_NUM_THREADS=threads, HF_HUB_OFFLINE="1",
        )  # fmt: skip
        figures = Figures(**json.loads(wanted.read_text()))
    expected = [work.rows * work.new_tokens] * work.steps
    if figures.generated_tokens != expected:
        raise SystemExit(f"{name} sampled {figures.generated_tokens} tokens in its steps, and was to sample {expected}")
    return figures


def compare(model: str, python: Path, given: argparse.Namespace) -> dict[str, Any]:
    """All rounds with one model: prints its lines, returns all figures."""
    measured = given.steps * (SHORT_STEPS if model == "bundled" and not given.quick else 1)
    folder, steps = resolve_model(model), WARM_UP + measured
    prompts, ids = make_prompts(folder, steps * Work.prompts_per_step)
    work = Work(folder, prompts, ids, steps, gradient_checkpointing=given.trl_gradient_checkpointing)
    commands = {
        "Headrace": [sys.executable, __file__, "--headrace-side"],
        "TRL": [str(python), str(HERE / "_trl_side.py")],
    }
    processes: dict[str, list[Figures]] = {name: [] for name in commands}
    for _ in range(given.rounds):
        for name, command in commands.items():
            processes[name].append(run_side(name, command, work))
    rows = rows_of(*(Side.of(work, processes[name]) for name in commands))
    for row in rows:
        print(row.line(model), flush=True)
    return {
        "ratios": {row.name: row.better for row in rows},
        "medians": {row.name: {"Headrace": median(row.headrace), "TRL": median(row.trl)} for row in rows},
        "processes": {name: [asdict(figures) for figures in made] for name, made in processes.items()},
        "work": asdict(work),
    }


def main() -> None:
    """Compare and print; or be Headrace's side of a comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="smollm2-135m,bundled", help="comma-separated")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4, help="measured steps of each process")
    parser.add_argument("--trl-python", type=Path, help="interpreter of an environment that has TRL")
    parser.add_argument("--trl-gradient-checkpointing", action="store_true", help="as TRL has it by default")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--headrace-side", nargs=2, type=Path, help=argparse.SUPPRESS)
    given = parsed(parser, {"models": "bundled", "rounds": 1, "steps": 2})
    if given.headrace_side:
        source, target = given.headrace_side
        target.write_text(json.dumps(asdict(train_headrace(Work(**json.loads(source.read_text())), target.parent))))
        return
    models = given.models.split(",")
    try:
        for model in models:  # before anything is installed or measured
            resolve_model(model)
    except HeadraceError as error:
        raise SystemExit(str(error)) from None
    python = _with_trl(given.trl_python) if given.trl_python else trl_python()
    print("| model | | Headrace | TRL | Headrace better by |")
    print("| --- | --- | --- | --- | --- |")
    found = {model: compare(model, python, given) for model in models}
    if given.json:
        given.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
