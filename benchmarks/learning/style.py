"""Colours and fonts of the plots; needs matplotlib."""

from __future__ import annotations

from typing import Any

import matplotlib

# Okabe and Ito's palette, which colour-blind readers can distinguish.
BLUE, GREEN, ORANGE, RED, PURPLE = "#0072B2", "#009E73", "#E69F00", "#D55E00", "#CC79A7"
INK, FAINT = "#30363d", "#e6e9ed"

_STYLE = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.axisbelow": True,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": FAINT,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "svg.hashsalt": "asyncmoe",
}


def style() -> Any:
    """Return a context manager with the style of all plots."""
    return matplotlib.rc_context(_STYLE)
