"""Models and data sets on the Hugging Face hub: recognise an id, check that the hub can be reached, download or describe a model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal

from asyncmoe.config import Config
from asyncmoe.errors import DataError
from asyncmoe.storage import size

_NO_NAMES = ("models", "datasets", "spaces")
"""First parts of the hub's own URLs: no organisation has such a name, but local folders often do."""
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_TIMEOUT_S = 5.0
_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.tiktoken")
_CODE = ("*.py",)
_WEIGHTS = "*.safetensors"


def is_id(path: Path) -> bool:
    """Return whether a path that does not exist may be an id on the hub: org/name."""
    return _ID.fullmatch(str(path)) is not None and path.parts[0] not in _NO_NAMES and not path.parent.exists()


def check_reachable(kind: Literal["model", "dataset"], name: str, key: str) -> Any:
    """Ask the hub for a repository, so that a missing network is reported within seconds. With HF_HUB_OFFLINE=1 the hub is not asked.

    Return the repository's ModelInfo, with file sizes, or DatasetInfo; None if the hub was not asked.

    Args:
        key: configuration key of the id, for messages.

    Raises:
        DataError: the hub cannot be reached, or the repository is missing or not accessible.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError

    if constants.HF_HUB_OFFLINE:
        return None
    try:
        return HfApi().repo_info(name, repo_type=kind, timeout=_TIMEOUT_S, files_metadata=kind == "model")
    except HfHubHTTPError as error:
        # The hub gives the same reply for a private repository and a missing one.
        got = f"{name}: no such path here, and for this id the hub answered {' '.join(str(error).split())[:200]}"
        raise DataError(
            key, got=got, expected=f"a local path, or a {kind} that you may read", hint="check the name, or HF_TOKEN"
        ) from error
    except Exception as error:
        got = f"{name}: no such path here, and {constants.ENDPOINT} cannot be reached ({' '.join(str(error).split())[:200]})"
        hint = "HF_HUB_OFFLINE=1 uses a copy in the cache"
        raise DataError(key, got=got, expected=f"a local path, or a {kind} id and a network connection", hint=hint) from error


def with_local_model(config: Config, *, download: bool = True) -> Config:
    """Return the configuration with `model.path` as a local directory: an id is downloaded into the hub's cache, or found there.

    Args:
        download: false: use only the cache, as trainer ranks do, so that not every rank of a run asks the hub.

    Raises:
        DataError: see `check_reachable`; the repository has no model; the download failed; or the cache lacks part of the model.
    """
    path = config.model.path
    if not _on_hub(config):
        return config
    info = check_reachable("model", str(path), "model.path") if download else None
    if info is not None:
        _wanted(config, info)
    return _at(config, _snapshot(str(path), allow_patterns=_patterns(config), local_files_only=not download))


def described(config: Config, scratch: Path) -> tuple[Config, str | None]:
    """Return the configuration with a local directory of the model, perhaps without weights, for checking a run.

    A model that is completely in the hub's cache is used from there; otherwise only the files besides its weights are fetched, into
    `scratch`. The second value describes what a run would download; None if there is nothing to download.

    Args:
        scratch: a directory that does not exist yet.

    Raises:
        DataError: as `with_local_model` for the same configuration.
    """
    if not _on_hub(config):
        return config, None
    name = str(config.model.path)
    info = check_reachable("model", name, "model.path")
    if info is None:
        return with_local_model(config), None
    wanted = _wanted(config, info)
    missing = [file for file in wanted if not _cached(name, file.rfilename, info.sha)]
    if not missing:
        return _at(config, _snapshot(name, revision=info.sha, allow_patterns=_patterns(config), local_files_only=True)), None
    small = [file for file in wanted if not fnmatch(file.rfilename, _WEIGHTS)]
    found = _snapshot(name, revision=info.sha, local_dir=scratch, allow_patterns=[file.rfilename for file in small])
    total = size(sum(file.size or 0 for file in missing))
    return _at(config, found), f"a run first downloads {len(missing)} file{'s' if len(missing) > 1 else ''} of {name}, {total}"


def _on_hub(config: Config) -> bool:
    path = config.model.path
    return not path.exists() and config.model.make is None and is_id(path)


def _at(config: Config, path: Path) -> Config:
    return config.model_copy(update={"model": config.model.model_copy(update={"path": path})})


def _patterns(config: Config) -> list[str]:
    return [*_FILES, *(_CODE if config.model.trust_remote_code else ())]


def _wanted(config: Config, info: Any) -> Sequence[Any]:
    """Return the files of a repository that a run needs (`RepoSibling`). Raises DataError if there is no model among them."""
    files = [file for file in info.siblings or () if any(fnmatch(file.rfilename, pattern) for pattern in _patterns(config))]
    for what, there in (
        ("config.json", any(file.rfilename == "config.json" for file in files)),
        ("safetensors files", any(fnmatch(file.rfilename, _WEIGHTS) for file in files)),
    ):
        if not there:
            expected = "a repository with config.json, safetensors files and a tokenizer"
            raise DataError("model.path", got=f"{config.model.path} without {what}", expected=expected)
    return files


def _cached(name: str, file: str, commit: str) -> bool:
    from huggingface_hub import constants, try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name, file, cache_dir=constants.HF_HUB_CACHE, revision=commit), str)


def _snapshot(name: str, **arguments: Any) -> Path:
    """Call `huggingface_hub.snapshot_download`. Raises DataError for any exception, because its errors have no common class."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, **arguments))
    except Exception as error:
        got = f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise DataError("model.path", got=got, expected="a model that can be downloaded, or a local directory") from error
