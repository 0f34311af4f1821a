"""Adapt to a site's environment: no home for the caches of libraries, and proxies, which requests within a machine must bypass."""

from __future__ import annotations

import ipaddress
import logging
import os
import pwd
import socket
import tempfile
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from asyncmoe.scratch import own_folder
from asyncmoe.storage import writing

log = logging.getLogger(__name__)
_EVERYWHERE = ("localhost", "127.0.0.1", "::1", "0.0.0.0")


def settle() -> None:
    """Complete the environment of this process and its children. Call it before the imports that read it.

    - Libraries place their caches by the user's name and home; `docker run --user` gives neither, or another user's home.
    - Requests of libraries to this machine bypass any proxy: SGLang's first one to itself, agents' to their rollout worker.

    Raises:
        StorageError: there is no home, and none can be made.
    """
    uid = os.geteuid()
    try:
        pwd.getpwuid(uid)
    except KeyError:
        for variable in ("LOGNAME", "USER"):
            os.environ.setdefault(variable, str(uid))
    if not _is_home(home := Path(os.path.expanduser("~")), uid):
        with writing("folder in place of a home", Path(tempfile.gettempdir())):
            os.environ["HOME"] = str(own_folder(f"asyncmoe-home-{uid}") or tempfile.mkdtemp(prefix="asyncmoe-home-"))
        log.warning("HOME: got %s, expected a folder that this user may write to; libraries get %s", home, os.environ["HOME"])
    given = [name for variable in ("no_proxy", "NO_PROXY") for name in os.environ.get(variable, "").replace(" ", "").split(",") if name]
    if not {"http", "https", "all"}.isdisjoint(getproxies()) and "*" not in given:
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(dict.fromkeys((*given, *_EVERYWHERE, *_own_names())))


def proxy_for(url: str) -> str | None:
    """Return the environment's proxy for a URL, "http://[user:password@]host:port"; None: connect directly.

    For requests to other services; requests within a run use no proxy. As with curl, no_proxy may contain networks.
    """
    parts, found = urlsplit(url), getproxies()
    proxy, host = found.get(parts.scheme) or found.get("all"), parts.hostname or ""
    if not proxy or proxy_bypass(host) or proxy_bypass(parts.netloc) or _in_networks(host, found.get("no", "")):
        return None
    proxy = proxy if "://" in proxy else f"http://{proxy}"
    if (kind := urlsplit(proxy).scheme) not in ("http", "https"):
        log.warning("%s: got a proxy of kind %s in the environment, expected http; the host is reached directly", host, kind)
        return None
    return proxy


def _is_home(path: Path, uid: int) -> bool:
    with suppress(OSError):
        return path.is_absolute() and path.is_dir() and (path.stat().st_uid == uid or os.access(path, os.W_OK | os.X_OK))
    return False


def _own_names() -> list[str]:
    import psutil

    found = [one for addresses in psutil.net_if_addrs().values() for one in addresses if one.family in (socket.AF_INET, socket.AF_INET6)]
    return [socket.gethostname(), *(one.address.partition("%")[0] for one in found)]


def _in_networks(host: str, names: str) -> bool:
    for name in names.split(","):
        with suppress(ValueError):
            if "/" in name and ipaddress.ip_address(host) in ipaddress.ip_network(name.strip(), strict=False):
                return True
    return False
