"""What others must not see in a configuration. No key of asyncmoe holds a secret, but options of a user's parts and addresses may."""

from __future__ import annotations

import re

HIDDEN = "(hidden)"
_SECRET = re.compile(r"(?:^|[._-])(?:\w*key|token|secret|password|passwd|credentials?|authorization|cookie)$", re.IGNORECASE)
_USER = re.compile(r"(?<=://)[^/@]*@")


def is_secret(key: str) -> bool:
    """Return whether text under a key, or under a path of keys, is a secret, such as under `api_key`."""
    return _SECRET.search(key) is not None


def without_users(text: str) -> str:
    """Return a text with users and passwords in addresses hidden."""
    return _USER.sub(f"{HIDDEN}@", text)
