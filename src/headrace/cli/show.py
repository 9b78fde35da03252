"""`headrace show`: what the viewer shows, in a terminal."""

from __future__ import annotations

import json as json_text
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from headrace.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from headrace.viewer.store import RunView

Colour = Literal["advantage", "logprob", "learner_logprob", "ratio", "entropy", "clip", "version", "none"]
_NARROWEST = 110  # columns where the output is no terminal
_STATE_STYLES = {
    "trained": "green", "filtered": "dim", "failed": "red", "stale": "yellow", "crashed": "red", "running": "green",
    "done": "green",
}  # fmt: skip


def show(
    run: Annotated[Path, Parameter(help="Run folder.")],
    step: Annotated[int | None, Parameter(help="A step, counted from 1: its groups.")] = None,
    group: Annotated[int | None, Parameter(help="A group, by its id: its rollouts.")] = None,
    rollout: Annotated[int | None, Parameter(help="A rollout, counted from 0: the episode, with its tokens.")] = None,
    /,
    *,
    colour: Annotated[
        Colour | None,
        Parameter(name=["--colour", "--color"], help="What colours the tokens; advantage, if it is known."),
    ] = None,
    tokens: Annotated[
        bool, Parameter(negative="", show_default=False, help="List the tokens, one per line with all that is known.")
    ] = False,
    all: Annotated[
        bool, Parameter(negative="", show_default=False, help="Show every step, and long messages in full.")
    ] = False,
    json: Annotated[bool, Parameter(negative="", show_default=False, help="Print what is shown as JSON.")] = False,
) -> None:
    """Show a run in the terminal: its steps, the groups of a step, the rollouts of a group, an episode.

    The run may still be training. `headrace view` shows the same in the browser.
    """
    if rollout is None and (colour is not None or tokens):
        raise ConfigError(
            f"{'--tokens' if tokens else '--colour'} is about the tokens of an episode; name one: "
            f"headrace show {run} STEP GROUP ROLLOUT"
        )
    from headrace.viewer.store import Missing

    try:
        page = _page(_opened(run), step, group, rollout, all)
    except Missing as error:
        raise ConfigError(f"{run}: {error}") from None
    if json:
        from headrace.ledger.export import plain

        print(json_text.dumps(plain(page), indent=1))  # ASCII: no letter of it does anything to a terminal
        return
    console = _console()
    if colour is None and console.color_system is None:
        colour = "none"
    for part in _shown(page, rollout, colour, tokens, all):
        console.print(part)


def _opened(run: Path) -> RunView:
    from headrace.viewer.folders import is_run
    from headrace.viewer.store import RunView

    if not is_run(run):
        raise ConfigError(f"{run} is not the folder of a run; name one that holds ledger.sqlite")
    return RunView(run.name, run)


def _page(view: RunView, step: int | None, group: int | None, rollout: int | None, everything: bool) -> dict[str, Any]:
    """The page of the viewer that the arguments name."""
    from headrace.viewer.batches import group_page, step_page, steps_page
    from headrace.viewer.episodes import episode_page
    from headrace.viewer.overview import run_page

    if step is None:
        found = run_page(view)
        listed = steps_page(view, None, 500 if everything else 20)
        while everything and listed["next"] is not None:
            more = steps_page(view, listed["next"], 500)
            listed = {"steps": [*listed["steps"], *more["steps"]], "next": more["next"]}
        return {**found, "recorded_steps": listed["steps"], "more_steps": listed["next"] is not None}
    if group is None:
        return step_page(view, step)
    found = group_page(view, group)
    at = {*found["steps"], found["group"]["step"]} - {None}
    if step not in at:
        where = f"of step {', '.join(map(str, sorted(at)))}" if at else "not decided yet"
        raise ConfigError(
            f"group {group} is not of step {step}, it is {where}; headrace show RUN {step} lists its groups"
        )
    return found if rollout is None else episode_page(view, group, rollout, None)


def _console() -> Console:
    from headrace.tracking.terminal import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=max(console.width, _NARROWEST))


def _shown(
    page: dict[str, Any], rollout: int | None, colour: Colour | None, tokens: bool, everything: bool
) -> Iterable[RenderableType]:
    if rollout is not None:
        from headrace.cli.show_episode import episode_parts

        return episode_parts(page, colour, tokens, everything)
    if "recorded_steps" in page:
        return _run_parts(page)
    return _group_parts(page, everything) if "rollouts" in page else _step_parts(page)


# ---- tables ----------------------------------------------------------------------------------------------------------


def visible(text: Any) -> str:
    """Text that does nothing to a terminal: control and format characters, and halves of others, as escapes."""
    import unicodedata

    said = str(text)
    if said.isascii() and said.isprintable():
        return said
    return "".join(
        letter
        if letter == "\n" or unicodedata.category(letter) not in ("Cc", "Cf", "Cs", "Zl", "Zp")
        else _escaped(letter)
        for letter in said
    )


def _escaped(letter: str) -> str:
    return letter.encode("unicode_escape", "surrogatepass").decode("ascii")


def _line(value: Any, most: int = 60) -> str:
    said = visible(value).replace("\n", "⏎")
    return said if len(said) <= most else f"{said[: most - 1]}…"


def _number(value: Any) -> str:
    from headrace.tracking.formats import number

    return "" if value is None else number(float(value))


def _table(title: str, columns: Sequence[str], right: Sequence[str] = ()) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold", header_style="dim")
    return table


def _state(word: Any) -> Any:
    from rich.text import Text

    return Text(_line(word), _STATE_STYLES.get(str(word), ""))


def _run_parts(page: dict[str, Any]) -> Iterable[RenderableType]:
    from rich.text import Text

    from headrace.tracking.formats import sparkline

    head = Text.assemble((_line(page["path"], 200), "bold"), "  ", _state(page["state"]))
    if page["why"]:
        head.append(f": {_line(page['why'], 300)}")
    yield head
    facts = [f"{page[key]}" for key in ("model", "workflow", "algorithm") if page.get(key)]
    yield Text(_line(", ".join([*facts, f"step {page['step'] or 0} of {page['steps']}"]), 200), "dim")
    if page["account"]:
        yield Text("episodes: " + ", ".join(f"{count:,} {name}" for name, count in page["account"].items()))
    curve = [value for value in page.get("sparkline") or () if value is not None]
    if curve:
        yield Text(f"reward    {sparkline(curve, 40)}  {_number(page['reward'])}")
    for one in page["evaluations"][-3:]:
        rate = one["metrics"].get("pass@1")
        yield Text(f"evaluated {_line(one['set'])} at step {one['step']}: pass@1 {_number(rate)}")
    for warning in page["warnings"][:3]:
        yield Text(f"{warning['level']}: {_line(warning['text'], 300)}", "yellow")
    rights = ("step", "version", "groups", "again", "reward", "tokens")
    table = _table("\nSteps", ("step", "version", "groups", "again", "reward", "update"), rights)
    for row in page["recorded_steps"]:
        update = "made" if row["committed_at"] else "not finished"
        again = str(row["again"]) if row["again"] else ""
        table.add_row(str(row["step"]), str(row["version"]), str(row["groups"]), again, _number(row["reward"]), update)
    yield table
    if page["more_steps"]:
        yield Text("the newest steps; --all shows every one", "dim")
    yield Text(f"headrace show {_line(page['path'], 200)} STEP shows the groups of a step", "dim")


def _step_parts(page: dict[str, Any]) -> Iterable[RenderableType]:
    from rich.text import Text

    trained = "" if page["trained_tokens"] is None else f", {page['trained_tokens']:,} tokens trained"
    masked = f", {page['masked_tokens']:,} masked" if page["masked_tokens"] else ""
    version = "nothing trained" if page["version"] is None else f"trained version {page['version']}"
    yield Text(f"step {page['step']} of {page['last']}: {version}{trained}{masked}", "bold")
    names = ("group", "task", "source", "state", "reward", "rewards", "tokens", "why")
    table = _table("", names, ("group", "reward", "tokens"))
    for group in page["groups"]:
        rewards = [reward for reward in group["rewards"] if reward is not None]
        mean = sum(rewards) / len(rewards) if rewards else None
        each = " ".join("×" if reward is None else _short(reward) for reward in group["rewards"][:16])
        state = Text.assemble(_state(group["state"]), " again" if group["again"] else "")
        table.add_row(
            str(group["group_id"]), _line(group["task_id"], 30), _line(group["source"], 16), state, _number(mean), each,
            f"{group['tokens']:,}", _line(group["reason"] or "", 50),
        )  # fmt: skip
    yield table
    if page["cut"]:
        yield Text("more groups ended at this step than are shown", "yellow")


def _short(value: float) -> str:
    return f"{value:.2g}"


def _group_parts(page: dict[str, Any], everything: bool) -> Iterable[RenderableType]:
    from rich.text import Text

    from headrace.cli.show_episode import message_parts

    group = page["group"]
    why = f": {_line(group['reason'], 200)}" if group["reason"] else ""
    yield Text.assemble(
        (f"group {group['group_id']}, task {_line(group['task_id'])} ({_line(group['source'])})  ", "bold"),
        _state(group["state"]), f"{why}, step {', '.join(map(str, page['steps'])) or group['step'] or 'not yet'}",
    )  # fmt: skip
    yield from message_parts(page["messages"], everything)
    names = ("rollout", "reward", "correct", "advantage", "ended", "turns", "tokens", "parts at", "last reply")
    table = _table(
        "\nRollouts, the best first", names, ("rollout", "reward", "advantage", "turns", "tokens", "parts at")
    )
    for row in page["rollouts"]:
        correct = {None: "", True: "right", False: "wrong"}[row["is_correct"]]
        advantage = row["advantage"]
        table.add_row(
            str(row["rollout_idx"]), _number(row["reward"]), correct,
            _number(advantage) if isinstance(advantage, int | float) else "",
            _line(row["error"] or row["termination"] or row["state"], 40), str(row.get("turns") or ""),
            str(row["generated_tokens"] or ""), "" if row.get("parts_at") is None else str(row["parts_at"]),
            _line(row.get("text") or "", 40),
        )  # fmt: skip
    yield table
    if len(page["same_task"]) > 1:
        other = _table("\nThe same task at other steps", ("group", "step", "state", "rewards"), ("group", "step"))
        for row in page["same_task"]:
            rewards = " ".join("×" if reward is None else _short(reward) for reward in row["rewards"][:16])
            other.add_row(str(row["group_id"]), str(row["step"] or ""), _state(row["state"]), rewards)
        yield other
