"""`headrace view`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


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
) -> None:
    """Show runs in the browser: curves, batches, rollouts, every token. Works while a run goes on; changes nothing."""
    from headrace.registry import load_object

    serve_view = load_object("headrace.viewer.run:serve_view")
    options = load_object("headrace.viewer.options:ViewOptions")(
        root=folder, host=host, port=port, token=token, public_host=public_host
    )
    serve_view(options, partial(print, flush=True), browser)
