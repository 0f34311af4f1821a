"""Models and data sets on the Hugging Face hub: recognise an id, see whether the hub can be reached, download a model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from asyncmoe.config import Config
from asyncmoe.errors import ConfigError, DataError

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_TIMEOUT_S = 5.0
_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.tiktoken")
_CODE = ("*.py",)


def is_id(path: Path) -> bool:
    """Return whether a path that does not exist may be an id on the hub: org/name."""
    return _ID.fullmatch(str(path)) is not None and not path.parent.exists()


def check_reachable(kind: Literal["model", "dataset"], name: str, key: str) -> None:
    """Ask the hub for a repository, so that a missing network is reported within seconds. With HF_HUB_OFFLINE=1 nothing is asked.

    Args:
        key: configuration key of the id, for messages.

    Raises:
        ConfigError: huggingface_hub is not installed.
        DataError: the hub cannot be reached, does not have the repository, or does not show it.
    """
    try:
        from huggingface_hub import HfApi, constants
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError as error:
        hint = "pip install huggingface_hub, or give a local directory"
        raise ConfigError(key, got=f"{name} without huggingface_hub", expected="a directory that exists", hint=hint) from error
    if constants.HF_HUB_OFFLINE:
        return
    try:
        HfApi().repo_info(name, repo_type=kind, timeout=_TIMEOUT_S)
    except HfHubHTTPError as error:
        # Of a repository that is private or does not exist the hub says the same.
        got = f"{name}: no such path here, and as an id the hub answered {' '.join(str(error).split())[:200]}"
        raise DataError(
            key, got=got, expected=f"a local path, or a {kind} that you may read", hint="check the name, or HF_TOKEN"
        ) from error
    except Exception as error:
        got = f"{name}: no such path here, and {constants.ENDPOINT} cannot be reached ({' '.join(str(error).split())[:200]})"
        hint = "give a local path, or HF_HUB_OFFLINE=1 to use a copy in the cache"
        raise DataError(key, got=got, expected=f"a local path, or the id of a {kind} and a network", hint=hint) from error


def with_local_model(config: Config, *, download: bool = True) -> Config:
    """Return the configuration with `model.path` as a local directory: an id is downloaded into the hub's cache, or found there.

    Args:
        download: false: only look into the cache. A trainer rank does, because all ranks of a run must not ask the hub.

    Raises:
        ConfigError, DataError: see `check_reachable`; or the download failed, or the cache does not have the model.
    """
    path = config.model.path
    if path.exists() or config.model.make is not None or not is_id(path):
        return config
    if download:
        check_reachable("model", str(path), "model.path")
    from huggingface_hub import snapshot_download

    patterns = [*_FILES, *(_CODE if config.model.trust_remote_code else ())]
    try:
        found = snapshot_download(str(path), allow_patterns=patterns, local_files_only=not download)
    except Exception as error:
        got = f"{path}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise DataError("model.path", got=got, expected="a model that can be downloaded, or a local directory") from error
    return config.model_copy(update={"model": config.model.model_copy(update={"path": Path(found)})})
