"""One episode in the terminal: the conversation, and the tokens of every reply in colour."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from headrace.cli.show import visible
from headrace.data.sample import ClipState
from headrace.tracking.formats import number

_MOST_TEXT = 4000  # characters of a message, unless all is asked for
_ROLE_STYLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}
_CLIP_COLOURS = {ClipState.CLIPPED: (255, 190, 90), ClipState.DROPPED: (255, 140, 140)}
_CLIP_COLOURS |= {ClipState.MASKED: (200, 170, 255), ClipState.REJECTED: (255, 110, 110)}
_VERSIONS = ((200, 225, 255), (205, 240, 205), (255, 230, 190), (240, 210, 240))
Rgb = tuple[int, int, int]
_GOOD, _BAD, _STRONG = (120, 220, 130), (255, 130, 120), (255, 165, 80)
_WHITE = (255, 255, 255)
_FULL = {
    "ratio": 0.2,
    "entropy": 1.0,
    "logprob": 1.0,
    "learner_logprob": 1.0,
}  # what is at least needed for full colour
_LISTED = ("logprob", "learner_logprob", "ratio", "advantage", "entropy", "clip", "version", "trained")


def episode_parts(page: dict[str, Any], colour: str | None, tokens: bool, everything: bool) -> Iterable[RenderableType]:
    """All of an episode, as the viewer's page has it."""
    yield _head(page)
    for problem in (page["error"], "its messages were deleted (ledger.keep_steps)" if page["pruned"] else None):
        if problem:
            yield Text(visible(problem), "red")
    for trajectory in page["trajectories"]:
        yield Text(f"\n{visible(trajectory['name'])}, reward {_number(trajectory['reward'])}", "bold")
        for turn in trajectory["turns"]:
            yield from _turn(turn, colour, tokens, everything)
    for result in page["results"]:
        yield Text(
            f"\n{visible(result['kind'])} {visible(result['name'])}: {_cut(result['payload'], everything)}", "yellow"
        )


def _head(page: dict[str, Any]) -> Text:
    facts = [
        f"group {page['group_id']}, rollout {page['rollout_idx']}"
        + (f", attempt {page['attempt']}" if page["attempt"] else ""),
        f"task {visible(page['task_id'])}",
        f"reward {_number(page['reward'])}",
        {None: "", True: "right", False: "wrong"}[page["is_correct"]],
        visible(page["decision"] or page["state"]) + (f" at step {page['step']}" if page["step"] else ""),
        f"ended: {visible(page['termination'])}" if page["termination"] else "",
        "" if page["duration_s"] is None else f"{page['duration_s']:.1f} s",
    ]
    return Text("   ".join(fact for fact in facts if fact), "bold")


def message_parts(messages: Sequence[dict[str, Any]], everything: bool) -> Iterator[Text]:
    """Messages as they were, by role."""
    for message in messages:
        role = visible(message.get("role", ""))
        yield Text.assemble((f"{role}: ", _ROLE_STYLES.get(role, "bold")), _cut(message.get("content"), everything))
        for name in ("tool_calls", "reasoning_content"):
            if message.get(name):
                yield Text(f"  {name}: {_cut(message[name], everything)}", "yellow")


def _turn(turn: dict[str, Any], colour: str | None, tokens: bool, everything: bool) -> Iterator[RenderableType]:
    if turn["broken_prefix"]:
        yield Text("the prompt does not begin with what was said before: a row of its own begins here", "yellow")
    yield from message_parts(turn["messages"][turn["known_messages"] :], everything)
    reply = turn["reply"]
    columns: dict[str, list[Any]] = reply.get("columns") or {}
    chosen = colour or ("advantage" if columns.get("advantage") else "logprob")
    if tokens:
        yield _token_table(reply, columns)
    else:
        yield Text.assemble(("assistant: ", _ROLE_STYLES["assistant"]), _coloured(turn, reply, columns, chosen))
        legend = _legend(chosen, columns)
        if legend:
            yield Text(legend, "dim")
    for call in turn["tool_calls"]:
        yield Text(f"  calls {_cut(call, everything)}", "yellow")


# ---- tokens ----------------------------------------------------------------------------------------------------------


def _coloured(turn: dict[str, Any], reply: dict[str, Any], columns: dict[str, list[Any]], chosen: str) -> Text:
    """The reply, token by token; without a tokenizer, its text. Tokens that were not trained are dim."""
    texts = reply.get("texts")
    if not texts:
        return Text(visible(turn["text"]))
    paint = _painter(chosen, columns.get(chosen))
    trained = columns.get("trained") or [None] * len(texts)
    clip = columns.get("clip") or [None] * len(texts)
    said = Text()
    for place, text in enumerate(texts):
        rgb = paint(place)
        style = "" if rgb is None else f"black on rgb({rgb[0]},{rgb[1]},{rgb[2]})"
        style += " dim" if trained[place] == 0 else ""
        style += " underline" if clip[place] else ""
        said.append(_token(text), style.strip())
    if reply.get("cut"):
        said.append(f" … {reply['cut']:,} more tokens", "dim")
    return said


def _token(text: str) -> str:
    """A line break is seen, and breaks the line."""
    return visible(text).replace("\n", "⏎\n")


def _painter(chosen: str, values: Sequence[Any] | None) -> Callable[[int], Rgb | None]:
    """The colour of a token, by its place; None for none."""
    if values is None or chosen == "none":
        return lambda place: None
    if chosen == "clip":
        return lambda place: _CLIP_COLOURS.get(values[place])
    if chosen == "version":
        return lambda place: None if values[place] is None else _VERSIONS[values[place] % len(_VERSIONS)]
    scaled = [None if value is None else _scaled(chosen, value) for value in values]
    least = _FULL.get(chosen, 0.0)  # or differences of rounding would be as strong as real ones
    largest = max((abs(value) for value in scaled if value is not None), default=0.0)
    largest = max(largest, least) or 1.0

    def paint(place: int) -> Rgb | None:
        value = scaled[place]
        if value is None:
            return None
        share = min(1.0, abs(value) / largest)
        return _between(_WHITE, _STRONG if chosen in ("entropy", *_LOGPROBS) else _GOOD if value > 0 else _BAD, share)

    return paint


_LOGPROBS = ("logprob", "learner_logprob")


def _scaled(chosen: str, value: float) -> float | None:
    """What its strength shows: of a ratio how far it is from 1, of a log-probability how unlikely the token was."""
    if not math.isfinite(value):
        return None
    if chosen == "ratio":
        return math.log(value) if value > 0 else None
    return min(-value, 10.0) if chosen in _LOGPROBS else value


def _between(one: Rgb, other: Rgb, share: float) -> Rgb:
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(one, other, strict=True))
    return red, green, blue


def _legend(chosen: str, columns: dict[str, list[Any]]) -> str:
    values = [value for value in columns.get(chosen) or () if value is not None]
    if not values or chosen == "none":
        return ""
    if chosen == "clip":
        counts = {state.name.lower(): values.count(state) for state in ClipState}
        return "  colour: clip state, " + ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    meaning = {
        "advantage": "green above 0, red below",
        "ratio": "green above 1, red below",
        "entropy": "the stronger, the higher",
        "version": "one colour for each version",
    }.get(chosen, "the stronger, the less likely")
    low, high = (number(float(bound)) for bound in (min(values), max(values)))
    return (
        f"  colour: {chosen.replace('_', ' ')} from {low} to {high} ({meaning}); underlined: clipped; dim: not trained"
    )


def _token_table(reply: dict[str, Any], columns: dict[str, list[Any]]) -> Table:
    names = [name for name in _LISTED if name in columns]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("#", "id", "token", *names):
        table.add_column(name.replace("_", " "), justify="left" if name in ("token", "clip") else "right", no_wrap=True)
    texts = reply.get("texts") or [""] * len(reply["ids"])
    for place, (token, text) in enumerate(zip(reply["ids"], texts, strict=True)):
        cells = [_cell(name, columns[name][place]) for name in names]
        shown = visible(text).replace("\n", "⏎").replace(" ", "·")
        table.add_row(str(place), visible(token)[:12], Text(shown[:24]), *cells)
    return table


def _cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name == "clip":
        return ClipState(value).name.lower()
    if name == "trained":
        return "yes" if value else "no"
    return str(value) if name == "version" else number(float(value))


def _cut(content: Any, everything: bool) -> str:
    said = visible(content if isinstance(content, str) else "" if content is None else content)
    if everything or len(said) <= _MOST_TEXT:
        return said
    return f"{said[:_MOST_TEXT]} … {len(said):,} characters in all; --all shows them"


def _number(value: Any) -> str:
    return "none" if value is None else number(float(value))
