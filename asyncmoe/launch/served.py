"""What a teacher's server says of itself."""

from __future__ import annotations

import json
import os
import urllib.request
from http.client import HTTPException

from asyncmoe.config.scoring import TeacherSection

_ANSWER_S = 5.0


def served(teacher: TeacherSection | None) -> str:
    """Return a teacher's address and the model that it names (GET /v1/models, as SGLang answers it), "ADDRESS serves MODEL"; without an
    answer the address alone; "none" without a teacher."""
    if teacher is None:
        return "none"
    headers = {"Authorization": f"Bearer {key}"} if (key := os.environ.get(teacher.key_variable or "")) else {}
    try:
        request = urllib.request.Request(f"{teacher.url.rstrip('/')}/v1/models", headers=headers)
        with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
            return f"{teacher.url} serves {json.load(answer)['data'][0]['id']}"
    except (OSError, ValueError, LookupError, TypeError, HTTPException):
        return teacher.url
