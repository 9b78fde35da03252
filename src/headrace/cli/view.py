"""`headrace view`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from headrace.errors import ConfigError


def view(
    folder: Annotated[Path, Parameter(help="Folder of a run, or one that holds runs.")] = Path("runs"),
    /,
    *,
    host: Annotated[str, Parameter(help="Address to listen at; beyond loopback a token is needed.")] = "127.0.0.1",
    port: Annotated[int, Parameter(help="Port; 0 takes a free one.")] = 8123,
    token: Annotated[
        str | None, Parameter(help="What browsers must know to see anything.", env_var="HEADRACE_VIEW_TOKEN")
    ] = None,
    public_host: Annotated[
        str | None, Parameter(help="Name by which browsers reach the viewer, beside its address: a proxy's, say.")
    ] = None,
    browser: Annotated[bool, Parameter(help="Open the page in the browser, where there is one.")] = True,
    export: Annotated[Path | None, Parameter(help="Write one self-contained FILE.html instead, to share.")] = None,
    steps: Annotated[str | None, Parameter(help="For --export: steps A to B in detail, as A:B.")] = None,
    limit_mb: Annotated[float, Parameter(help="For --export: largest size; the newest steps come first.")] = 20.0,
) -> None:
    """Show runs in the browser: curves, batches, rollouts, every token. Works during a run; changes no file of it."""
    from headrace.registry import load_object

    if export is not None:
        _export(folder, export, steps, limit_mb)
        return
    if steps is not None:
        raise ConfigError(f"--steps {steps} is for --export FILE.html; leave it out")
    serve_view = load_object("headrace.viewer.run:serve_view")
    options = load_object("headrace.viewer.options:ViewOptions")(
        root=folder, host=host, port=port, token=token, public_host=public_host
    )
    serve_view(options, partial(print, flush=True), browser)


def _export(folder: Path, out: Path, steps: str | None, limit_mb: float) -> None:
    from headrace.registry import load_object
    from headrace.tracking.terminal import working

    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}; give the folder of a run, or one that holds runs")
    if not limit_mb > 0:
        raise ConfigError(f"--limit-mb must be above 0, got {limit_mb:g}")
    chosen = _range(steps) if steps is not None else None
    export_html = load_object("headrace.viewer.export:export_html")
    shelf = load_object("headrace.viewer.store:RunShelf")(folder)
    try:
        with working(f"writing {out}"):
            made = export_html(shelf, out, chosen, limit_mb)
    finally:
        shelf.close()
    more = f"; {made.left_out} pages had no room: raise --limit-mb, or choose --steps" if made.left_out else ""
    for run, why in made.skipped.items():
        print(f"left out {run}: {why}")
    print(f"wrote {out}: {made.pages} pages, {made.size / 1e6:.1f} MB{more}")


def _range(text: str) -> tuple[int, int]:
    first, colon, last = text.partition(":")
    try:
        found = (int(first or 1), int(last or 2**62)) if colon else (int(first), int(first))
    except ValueError:
        raise ConfigError(f'--steps is A:B, such as 10:20, got "{text}"') from None
    if not 1 <= found[0] <= found[1]:
        raise ConfigError(f'--steps is A:B with 1 <= A <= B, such as 10:20, got "{text}"')
    return found
