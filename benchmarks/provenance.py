"""Date and machine of a measurement."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from typing import Any


def today() -> str:
    """The day, in UTC."""
    return datetime.now(UTC).strftime("%Y-%m-%d")


def here() -> dict[str, Any]:
    """Return the common fields of results; call it before anything is measured.

    Returns:
        {"date", "machine", "load"}; load: average number of running or runnable processes over the last minute.
    """
    machine = f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}"
    return {"date": today(), "machine": machine, "load": os.getloadavg()[0]}
