"""Put data, plot library, scripts and styles into one HTML file.

The library and the data are gzip in base64, which a browser decompresses: this halves the file, and text of a run cannot end a
script. The page's security policy allows only its own scripts, and no connections.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
from collections.abc import Sequence
from functools import cache
from html import escape
from importlib.resources import files

from asyncmoe import installed


def html(title: str, data: bytes, groups: Sequence[bytes]) -> str:
    """Return the page.

    Args:
        data: the JSON of a `run_page.Page`.
        groups: each run's groups, a list in JSON.

    Raises:
        UserError: plotly is not installed.
    """
    script, library = "\n".join(_asset(name) for name in ("elements.js", "samples.js", "page.js")), _library()
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}' '{_hash(library)}'; style-src 'unsafe-inline'; img-src data: blob:; "
        "connect-src 'none'; base-uri 'none'; form-action 'none'"
    )
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}"><meta name="referrer" content="no-referrer">',
            f"<title>{escape(title)} · asyncmoe</title><style>{_asset('page.css')}</style></head>",
            "<body><noscript>This page draws with JavaScript.</noscript>",
            _asset("page.html"),
            _packed("data", data),
            *(_packed(f"groups-{run}", each) for run, each in enumerate(groups)),
            _packed("library", library.encode()),
            f"<script>{script}</script></body></html>\n",
        ]
    )


def _packed(name: str, data: bytes) -> str:
    """Return data in a script element that no browser runs; deterministic."""
    text = base64.b64encode(gzip.compress(data, 9, mtime=0)).decode()
    return f'<script type="text/plain" id="{name}">{text}</script>'


@cache
def _library() -> str:
    """Return plotly.js."""
    installed.need("plotly", "report.html")
    from plotly.offline import get_plotlyjs

    text: str = get_plotlyjs()
    return text


def _asset(name: str) -> str:
    return (files("asyncmoe.telemetry.report") / "assets" / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"
