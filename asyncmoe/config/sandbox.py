"""The sandbox of the tool python."""

from __future__ import annotations

import re
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from asyncmoe.config.fields import Section, refused

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class SandboxSection(Section):
    """Where the programs of the tool python run: on this machine in bubblewrap, in containers of an image, or on a server of your own."""

    image: str | None = Field(
        None,
        description="An image with Python 3.9 or newer and the program timeout, for containers. It must be there: nothing is pulled "
        "during a run.",
    )
    runtime: Literal["docker", "podman"] = Field("docker", description="The command line that starts containers.")
    python: str = Field(
        "python3", description="The Python that runs programs: for bubblewrap one of the system, or any by its path; else the image's."
    )
    url: str | None = Field(None, description="Address of a server; a program is posted to it.")
    token_env: str | None = Field(None, description="With url: variable of the rollout worker's environment with a bearer token.")

    @model_validator(mode="after")
    def _check(self) -> SandboxSection:
        if self.image is not None and (not self.image or self.image.startswith("-")):
            raise refused("environment.sandbox.image", f"{self.image!r}", "an image")
        if not self.python or self.python.startswith("-"):
            raise refused("environment.sandbox.python", f"{self.python!r}", "a Python")
        if self.url is not None:
            self._check_url(self.url)
        if self.token_env is not None and (self.url is None or not _VARIABLE.fullmatch(self.token_env)):
            raise refused("environment.sandbox.token_env", f"{self.token_env!r}", "with url: the name of an environment variable")
        return self

    def _check_url(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise refused("environment.sandbox.url", f"{url!r}", "http://... or https://...")
        if parts.username is not None or parts.password is not None:
            raise refused("environment.sandbox.url", "one with a user's name or password", "none; use token_env")
        if self.image is not None:
            raise refused("environment.sandbox.url", "a server, and an image", "one of them")
