"""The same GRPO work in Headrace and in TRL: seconds per step, tokens per second, memory.

    python benchmarks/vs_trl.py [--rounds 2] [--steps 4] [--models smollm2-135m,bundled] [--trl-vllm] [--json FILE]
                                [--quick]

Prints a Markdown table. Both sides have the same weights, prompts (the same ids), group size, number of sampled tokens
(the end of sequence is ignored), reward, loss and optimizer, in float32 on two threads; on-policy, one update per
batch. Each round runs one process of each side, one after the other; the first step of each is warm-up. The bundled
model, whose steps are short, runs ten times as many. Generated tokens are those of the replies. Trained tokens are
those of the rows, including prompts, over the time of the step without sampling.

Headrace runs as for a user, with ledger and metrics, engine and learner in one process. TRL gets the complete batch in
one piece, the fused optimizer and no logging. It runs with its defaults, which include gradient checkpointing, and
without checkpointing, which is faster and takes more memory. TRL has its own environment, created in .venv-trl unless
--trl-python names one. `--transformers-forward` adds a side: Headrace with the forward pass of transformers, which is
the one of accelerators. `--quick` runs the bundled model and one round of two steps.

`--trl-vllm` compares with vLLM instead: Headrace with its own engine, Headrace with a vLLM server, and TRL with its
vLLM server mode and its defaults. Both servers are the same build (in .venv-vllm, or of --vllm-python), started
with the same arguments, on as many threads as the learner: they take turns. TRL sends weights to its server by NCCL and
refuses to without CUDA; here it sends them as Headrace does, by a file in memory (_trl_vllm.py).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any
from urllib.request import urlopen

from _arguments import STOPPED, parsed
from _environments import HERE, checked, environment, with_module
from _trl_side import Measurements, Work, distinct_share, peak_mb
from tokenizers import Tokenizer

from headrace import Model, Task
from headrace.config.loading import build_config
from headrace.engines.servers.server import free_port
from headrace.engines.vllm.command import Launch
from headrace.errors import HeadraceError
from headrace.models.catalog import resolve_model
from headrace.utils.child_process import ChildProcess

HEADRACE, AS_IT_COMES, FASTER = "Headrace", "TRL", "TRL, no checkpointing"
THROUGH_TRANSFORMERS = "Headrace, forward pass of transformers"
WITH_VLLM, TRL_WITH_VLLM = "Headrace, vLLM server", "TRL, vLLM server"
PROMPT_TOKENS = 60
WARM_UP = 1
SHORT_STEPS = 10
ON_THE_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
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


def train_headrace(work: Work, scratch: Path) -> Measurements:
    """Train with UnifiedTrainer."""
    import torch

    from headrace.trainer.trainer import UnifiedTrainer

    async def answer(task: Task, model: Model) -> float:
        output = await model.complete(task.metadata["ids"], ignore_eos=True)
        return distinct_share(output.completion_ids)

    tasks = [
        Task(id=str(number), instruction=text, metadata={"ids": ids})
        for number, (text, ids) in enumerate(zip(work.prompts, work.prompt_ids, strict=True))
    ]
    result = UnifiedTrainer(_headrace_config(work, scratch), workflow=answer, tasks=tasks).fit()
    if result.interrupted:
        raise SystemExit(STOPPED)
    rows = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["step"]]
    return Measurements(
        step_s=[row["time/step_s"] for row in steps],
        generate_s=[row["time/generate_s"] for row in steps],
        generated_tokens=[round(row["tokens/generated"]) for row in steps],
        rewards=[row["reward/mean"] for row in steps],
        peak_mb=peak_mb(),
        notes={"torch": torch.__version__, "threads": torch.get_num_threads(), "last_step": steps[-1]},
    )


def _headrace_config(work: Work, scratch: Path) -> Any:
    return build_config(
        {
            "run": {"name": "headrace", "dir": scratch, "seed": work.seed},
            "model": {"name": work.model, "device": "cpu", "fast_path": work.fast_path},
            "data": {"shuffle": False},
            "rollout": {"group_size": work.group_size, "max_tokens": work.new_tokens},
            "backend": {"threads": work.threads},
            "optimizer": {"lr": work.learning_rate},
            "trainer": {"steps": work.steps, "batch_size": work.prompts_per_step, "save_last": False},
            "track": {"plot": False},
            **({"engine": _vllm_section(work)} if work.vllm_python else {}),
        }
    )


def _vllm_section(work: Work) -> dict[str, Any]:
    length = PROMPT_TOKENS + work.new_tokens + 1
    section = {"name": "vllm", "python": work.vllm_python, "threads": work.threads, "max_model_length": length}
    return {**section, "server_env": ON_THE_CPU}


@contextmanager
def vllm_server(work: Work, scratch: Path) -> Iterator[str]:
    """The URL of a server that is started as Headrace's side starts its own."""
    section = build_config({"engine": _vllm_section(work)}).engine
    launch = Launch(
        python=section.python, model=work.model, dtype="float32", transport="file",
        max_length=(section.max_model_length or 0) + 1, max_batch=section.max_batch,
        prefill_tokens=section.prefill_tokens, sleeps=False, threads=section.threads,
        arguments=("--enforce-eager",), variables=ON_THE_CPU,
    )  # fmt: skip
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    child = ChildProcess(launch.command(port), launch.environment(), scratch / "vllm.log")
    try:
        end = time.monotonic() + 300
        while True:
            with suppress(OSError), urlopen(f"{url}/health", timeout=5):
                break
            if child.exit_code() is not None or time.monotonic() > end:
                raise SystemExit(f"the vLLM server did not start:\n{child.last_output()}")
            time.sleep(0.5)
        yield url
    finally:
        child.end()


@dataclass(frozen=True)
class Side:
    """One side, over all measured steps of its processes."""

    step_s: list[float]
    generate_s: list[float]
    peak_mb: list[float]
    generated: int
    """Tokens sampled in a step."""
    trained: int
    """Tokens of a step's rows, prompts included."""

    @classmethod
    def of(cls, work: Work, processes: list[Measurements]) -> Side:
        step_s = [value for measurements in processes for value in measurements.step_s[WARM_UP:]]
        generate_s = [value for measurements in processes for value in measurements.generate_s[WARM_UP:]]
        generated = work.rows * work.new_tokens
        trained = generated + work.rows * PROMPT_TOKENS
        return cls(step_s, generate_s, [measurements.peak_mb for measurements in processes], generated, trained)

    @property
    def train_s(self) -> list[float]:
        """What is left of each step."""
        return [step - generate for step, generate in zip(self.step_s, self.generate_s, strict=True)]


@dataclass(frozen=True)
class Row:
    """A line of the table, with the values of each side."""

    name: str
    values: dict[str, list[float]]
    digits: int
    more_is_better: bool

    @property
    def medians(self) -> dict[str, float]:
        return {side: median(values) for side, values in self.values.items()}

    @property
    def better(self) -> dict[str, float]:
        """What Headrace has over the others, as a ratio of medians."""
        ours, *_ = self.medians.values()
        ratios = {side: ours / theirs for side, theirs in self.medians.items() if side != HEADRACE}
        return ratios if self.more_is_better else {side: 1 / ratio for side, ratio in ratios.items()}

    def line(self, model: str) -> str:
        cells = [self._cell(self.values[HEADRACE])]
        for side, ratio in self.better.items():
            cells += [self._cell(self.values[side]), f"{ratio:.2f}"]
        return f"| {model} | {self.name} | {' | '.join(cells)} |"

    def _cell(self, values: list[float]) -> str:
        if len(values) == 1:
            return f"{values[0]:.{self.digits}f}"
        return f"{median(values):.{self.digits}f} ({min(values):.{self.digits}f}–{max(values):.{self.digits}f})"


def rows_of(sides: dict[str, Side]) -> list[Row]:
    """What is compared."""

    def per_second(tokens: int, seconds: list[float]) -> list[float]:
        return [tokens / value for value in seconds]

    def row(name: str, of: Callable[[Side], list[float]], digits: int, more_is_better: bool) -> Row:
        return Row(name, {side: of(measurements) for side, measurements in sides.items()}, digits, more_is_better)

    return [
        row("seconds per step", lambda side: side.step_s, 2, False),
        row("generated tokens/s", lambda side: per_second(side.generated, side.generate_s), 0, True),
        row("trained tokens/s", lambda side: per_second(side.trained, side.train_s), 0, True),
        row("peak memory (MB)", lambda side: side.peak_mb, 0, False),
    ]


def run_side(name: str, command: list[str], work: Work) -> Measurements:
    """One process of one side."""
    with tempfile.TemporaryDirectory() as scratch:
        given, wanted = Path(scratch) / "work.json", Path(scratch) / "measurements.json"
        with vllm_server(work, Path(scratch)) if work.vllm_packages else nullcontext() as url:
            given.write_text(json.dumps(asdict(replace(work, vllm_url=url))))
            checked(
                [*command, str(given), str(wanted)], f"{name} failed on {work.model}", "see what it said",
                OMP_NUM_THREADS=str(work.threads), HF_HUB_OFFLINE="1",
            )  # fmt: skip
        measurements = Measurements(**json.loads(wanted.read_text()))
    expected = [work.rows * work.new_tokens] * work.steps
    if measurements.generated_tokens != expected:
        raise SystemExit(
            f"{name} sampled {measurements.generated_tokens} tokens in its steps, and was to sample {expected}"
        )
    return measurements


def sides_of(work: Work, python: Path, given: argparse.Namespace) -> dict[str, tuple[list[str], Work]]:
    """The command and the work of every side, ours first."""
    ours, trl = [sys.executable, __file__, "--headrace-side"], [str(python), str(HERE / "_trl_side.py")]
    if given.trl_vllm:
        with_vllm = replace(work, vllm_python=str(given.vllm_python))
        packages = next((given.vllm_python.parents[1] / "lib").glob("python3*")) / "site-packages"
        theirs = replace(with_vllm, vllm_packages=str(packages), gradient_checkpointing=True)
        return {HEADRACE: (ours, work), WITH_VLLM: (ours, with_vllm), TRL_WITH_VLLM: (trl, theirs)}
    sides = {
        HEADRACE: (ours, work),
        AS_IT_COMES: (trl, replace(work, gradient_checkpointing=True)),
        FASTER: (trl, work),
    }
    if given.transformers_forward:
        sides[THROUGH_TRANSFORMERS] = (ours, replace(work, fast_path=False))
    return sides


def compare(model: str, python: Path, given: argparse.Namespace) -> dict[str, Any]:
    """All rounds with one model: prints its rows, returns all measurements."""
    measured = given.steps * (SHORT_STEPS if model == "bundled" and not given.quick else 1)
    folder, steps = resolve_model(model), WARM_UP + measured
    prompts, ids = make_prompts(folder, steps * Work.prompts_per_step)
    work = Work(folder, prompts, ids, steps)
    sides = sides_of(work, python, given)
    processes: dict[str, list[Measurements]] = {name: [] for name in sides}
    for _ in range(given.rounds):
        for name, (command, its_work) in sides.items():
            processes[name].append(run_side(name, command, its_work))
    rows = rows_of({name: Side.of(work, made) for name, made in processes.items()})
    for row in rows:
        print(row.line(model), flush=True)
    return {
        "ratios": {row.name: row.better for row in rows},
        "medians": {row.name: row.medians for row in rows},
        "processes": {name: [asdict(measurements) for measurements in made] for name, made in processes.items()},
        "work": asdict(work),
    }


def main() -> None:
    """Compare and print; or be Headrace's side of a comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="smollm2-135m,bundled", help="comma-separated")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4, help="measured steps of each process")
    parser.add_argument("--trl-python", type=Path, help="interpreter of an environment with TRL")
    parser.add_argument(
        "--transformers-forward", action="store_true", help="also Headrace with model.fast_path = false, as on a GPU"
    )
    parser.add_argument("--trl-vllm", action="store_true", help="both sides with vLLM servers")
    parser.add_argument("--vllm-python", type=Path, help="interpreter of an environment with vLLM")
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
    option = "--trl-python"
    python = with_module(given.trl_python, "trl", option) if given.trl_python else environment("trl", option)
    if given.trl_vllm:
        chosen, name = given.vllm_python, "--vllm-python"
        # not resolved: a link to the interpreter shows Python where its environment is
        given.vllm_python = with_module(chosen, "vllm", name) if chosen else environment("vllm", name, exact=True)
        others = [WITH_VLLM, TRL_WITH_VLLM]
    else:
        others = [AS_IT_COMES, FASTER, *([THROUGH_TRANSFORMERS] if given.transformers_forward else [])]
    print(f"| model | | {HEADRACE} | {' | '.join(f'{side} | {HEADRACE} better by' for side in others)} |")
    print("| --- " * (3 + 2 * len(others)) + "|")
    found = {model: compare(model, python, given) for model in models}
    if given.json:
        given.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
