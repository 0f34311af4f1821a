"""Puts data, plot library, scripts and styles into one HTML file.

The library and the data are gzip in base64, which a browser decompresses: the file is less than half as large, and no text of a run can
end a script. The page's security policy allows exactly the scripts that are in it, and no connection.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
from collections.abc import Mapping
from functools import cache
from html import escape
from importlib.resources import files

from asyncmoe import installed

_SCRIPTS = ("colours.js", "figures.js", "timeline.js", "samples.js", "settings.js", "page.js")
"""In the order in which they are put together."""


def pack(data: bytes) -> bytes:
    """Return gzip in base64; the same for the same data."""
    return base64.b64encode(gzip.compress(data, 9, mtime=0))


def html(title: str, data: bytes, groups: Mapping[tuple[int, int], bytes]) -> str:
    """Return the page.

    Args:
        data: the packed JSON of a list of `run_page.RunPage`.
        groups: packed groups (`sample_groups.GroupPage`) by number of the run and place.

    Raises:
        UserError: plotly is not installed.
    """
    script, library, packed = _script(), *_library()
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}' '{_hash(library)}'; style-src 'unsafe-inline'; img-src data: blob:; "
        "connect-src 'none'; base-uri 'none'; form-action 'none'"
    )
    parts = [_inert("data", data), *(_inert(f"group-{run}-{place}", group) for (run, place), group in groups.items())]
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}"><meta name="referrer" content="no-referrer">',
            f"<title>{escape(title)} · asyncmoe</title><style>{_asset('page.css')}</style></head>",
            "<body><noscript>This page draws with JavaScript.</noscript>",
            _asset("page.html"),
            *parts,
            _inert("library", packed),
            f"<script>{script}</script></body></html>\n",
        ]
    )


def _inert(name: str, data: bytes) -> str:
    return f'<script type="text/plain" id="{name}">{data.decode()}</script>'


@cache
def _script() -> str:
    return "\n".join(_asset(name) for name in _SCRIPTS)


@cache
def _library() -> tuple[str, bytes]:
    """Return plotly.js, and the same packed."""
    installed.need("plotly", "report.html")
    from plotly.offline import get_plotlyjs

    text: str = get_plotlyjs()
    return text, pack(text.encode())


def _asset(name: str) -> str:
    return (files("asyncmoe.telemetry.report") / "assets" / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"
