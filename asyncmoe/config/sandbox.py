"""The sandbox of the tool python."""

from __future__ import annotations

import re
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from asyncmoe.config.fields import NonNegative, Section, refused

Backend = Literal["asyncmoe", "bubblewrap", "container", "http"]
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class SandboxSection(Section):
    """Where the programs of the tool python run."""

    backend: Backend = Field(
        "asyncmoe",
        description="asyncmoe: Linux's own mechanisms, nothing to install, other files are hidden; bubblewrap: the same by bwrap; "
        "container: in an image (needs docker or podman); http: on a server of your own.",
    )
    runtime: Literal["docker", "podman"] = Field("docker", description="For backend container: the command line that starts one.")
    image: str | None = Field(
        None, description="For backend container: an image with Python 3.9 or newer. It must be there: nothing is pulled during a run."
    )
    python: str = Field("python3", description="For backend container: Python in the image.")
    url: str | None = Field(None, description="For backend http: address of the server; a program is posted to it.")
    token_env: str | None = Field(None, description="For backend http: variable of the controller's environment with a bearer token.")
    retries: NonNegative = Field(
        2, description="For backend http: further attempts where no program has begun: no connection, status 429 or 503."
    )

    @model_validator(mode="after")
    def _check(self) -> SandboxSection:
        for name, value, backend in (("image", self.image, "container"), ("url", self.url, "http"), ("token_env", self.token_env, "http")):
            if value is not None and self.backend != backend:
                raise refused(f"environment.sandbox.{name}", value, f"null because environment.sandbox.backend is not {backend}")
        if self.backend == "container" and (not self.image or self.image.startswith("-")):
            raise refused("environment.sandbox.image", f"{self.image!r}", "an image because the backend is container")
        if not self.python or self.python.startswith("-"):
            raise refused("environment.sandbox.python", f"{self.python!r}", "a program of the image")
        if self.backend == "http":
            self._check_url(self.url)
        if self.token_env is not None and not _VARIABLE.fullmatch(self.token_env):
            raise refused("environment.sandbox.token_env", f"{self.token_env!r}", "the name of an environment variable")
        return self

    @staticmethod
    def _check_url(url: str | None) -> None:
        parts = urlsplit(url or "")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise refused("environment.sandbox.url", f"{url!r}", "http://... or https://... because the backend is http")
        if parts.username is not None or parts.password is not None:
            raise refused("environment.sandbox.url", "one with a user's name or password", "none; use token_env")
