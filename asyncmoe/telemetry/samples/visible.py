"""Make model output harmless for a terminal: no control character or escape sequence reaches it."""

from __future__ import annotations

import re

_HARMFUL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]")
"""C0 and C1 controls except tab and line feed, marks of text direction or zero width, line separators, surrogates."""
_PICTURES = 0x2400
_DELETE = 0x7F


def visible(text: str) -> str:
    """Replace each harmful character with a visible sign; a tab gets one too, a line feed stays."""
    return _HARMFUL.sub(_sign, text).replace("\t", "␉")


def _sign(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code == _DELETE:
        return "␡"
    return chr(_PICTURES + code) if code < 0x20 else f"⟨{code:04X}⟩"
