"""`headrace simulate`: a grid of settings as a table, and nonsense refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_simulate import small

from headrace.cli.main import run
from headrace.scheduling.simulation.grid import grid_points, simulate_grid
from headrace.scheduling.simulation.simulator import simulate


def test_a_grid_is_every_combination_of_its_values() -> None:
    grid = '{ trainer.max_staleness = [0, 3], "trainer.staleness" = ["wait", "trust"] }'
    points = grid_points(small(f"--simulate.grid={grid}"))
    chosen = [(point.config.trainer.max_staleness, point.config.trainer.staleness) for point in points]
    assert chosen == [(0, "wait"), (0, "trust"), (3, "wait"), (3, "trust")]
    assert points[3].label == "max_staleness=3, staleness=trust"
    assert [point.settings for point in grid_points(small())] == [{}]
    assert [item.outcome for item in simulate_grid(points[:1])] == [simulate(points[0].config)]


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(
        "[rollout]\ngroup_size = 2\n[trainer]\nbatch_size = 4\n[simulate]\nsteps = 20\nslow_share = 0.1\n"
        '[simulate.grid]\ntrainer.max_staleness = [0, 2]\n"trainer.staleness" = ["wait", "trust"]\n'
    )
    return path


def test_the_command_prints_a_row_per_combination_and_how_fast_it_was(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures, chart = tmp_path / "figures.json", tmp_path / "chart.png"
    assert run(["simulate", str(run_file), "--json", str(figures), "--chart", str(chart)]) == 0
    out = capsys.readouterr().out
    assert out.count("trust") == 2 and out.count("wait") == 2
    assert "80 steps of" in out and "times faster than real time" in out
    rows = json.loads(figures.read_text())
    assert [row["settings"]["trainer.max_staleness"] for row in rows] == [0, 0, 2, 2]
    assert rows[0]["staleness_max"] == 0 and sum(rows[3]["ages"]) > 0
    assert chart.read_bytes().startswith(b"\x89PNG")


def test_a_simulation_that_is_shorter_than_its_slow_groups_says_so(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--simulate.slow_factor", "60", "--simulate.warmup", "2", "--simulate.steps", "40"]
    assert run(["simulate", str(run_file), *words]) == 0
    assert "raise simulate.steps" in capsys.readouterr().out


FROM_RUN = ["--simulate.from_run", "runs/none"]
MISTAKES = {
    "unknown key in the grid": (
        ["--simulate.grid", '{ trainer.max_stalenes = [1] }'],
        'simulate.grid: "trainer.max_stalenes" is no setting (did you mean "trainer.max_staleness"?)',
    ),
    "key without effect in the grid": (
        ["--simulate.grid", "{ optimizer.lr = [1e-4, 1e-5] }"],
        'simulate.grid: "optimizer.lr" changes nothing in a simulation; what can vary is trainer.batch_size',
    ),
    "no values": (["--simulate.grid", "{ trainer.max_staleness = [] }"], "has no values; give a list"),
    "value of the wrong kind": (
        ["--simulate.grid", '{ trainer.max_staleness = ["many"] }'],
        'simulate.grid --trainer.max_staleness="many": trainer.max_staleness: input should be a valid integer',
    ),
    "no list": (["--simulate.grid", "{ trainer.max_staleness = 3 }"], "simulate.grid.trainer.max_staleness: input"),
    "unknown policy": (
        ["--simulate.grid", '{ trainer.max_staleness = [1], "trainer.staleness" = ["truts"] }'],
        'did you mean "trust"?',
    ),
    "no such run": ([*FROM_RUN, "--simulate.slow_share", "0"], "holds no step with time/group_s"),
    "durations twice": (FROM_RUN, "simulate.slow_share = 0.1 has no effect: simulate.from_run has measured it"),
    "places of a recorded run": (
        [*FROM_RUN, "--simulate.slow_share", "0", "--simulate.grid", "{ rollout.max_concurrent = [8] }"],
        "durations include the wait for a slot",
    ),
    "filtered without a filter": (["--simulate.filtered_share", "0.5"], "or set filters.drop_uniform = true"),
    "only warm-up": (["--simulate.warmup", "20"], "leaves none to count"),
    "no rollouts": (
        ["--algorithm.objective", "sft", "--rollout.group_size", "8", "--simulate.grid", "{}"],
        'got algorithm.objective = "sft"; use "rl"',
    ),
    "not simulated": (["--filters.min_partial_tasks", "2"], "filters.min_partial_tasks is not simulated"),
    "no such picture": (["--chart", "chart.txt"], "--chart must end in .png, .svg or .pdf, got chart.txt"),
    "misspelt option": (["--chrat", "x.png"], 'did you mean "--chart"?'),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_nonsense_is_refused_in_one_line(run_file: Path, capsys: pytest.CaptureFixture[str], mistake: str) -> None:
    words, says = MISTAKES[mistake]
    assert run(["simulate", str(run_file), *words]) == 2
    out, err = capsys.readouterr()
    assert says in err and err.count("\n") == 1 and out == ""
