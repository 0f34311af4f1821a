"""The sandbox of the tool python."""

from __future__ import annotations

from pydantic import model_validator

from asyncmoe.config.fields import Section, refused, wrong_address


class SandboxSection(Section):
    """Where the programs of the tool python run: on this machine in bubblewrap, in containers of an image, or on a server of your own."""

    image: str | None = None
    """Container image with python3 (3.9 or newer) and the command `timeout`, run by docker or, if it is missing, podman. The image must be
    on the machine: nothing is pulled during a run."""
    url: str | None = None
    """Address of a server to which programs are posted; null: programs run in containers of the image or, without one, in bubblewrap."""
    token_env: str | None = None
    """With url: environment variable of the rollout worker that holds a bearer token."""

    @model_validator(mode="after")
    def _check(self) -> SandboxSection:
        if self.url is not None and (wrong := wrong_address(self.url)) is not None:
            raise refused("environment.sandbox.url", *wrong)
        if self.url is not None and self.image is not None:
            raise refused("environment.sandbox.url", "a url, beside environment.sandbox.image", "only one of the two")
        if self.url is None and self.token_env is not None:
            raise refused("environment.sandbox.token_env", f"{self.token_env!r}", "null because there is no environment.sandbox.url")
        return self
