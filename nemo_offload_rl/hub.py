"""Tests whether the Hugging Face hub is reachable, before its library is used, which would retry for a minute."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

TIMEOUT_S = 5.0
_PORTS = {"http": 80, "https": 443}


def cache_only(name: str) -> bool:
    """Returns whether a model or tokenizer must be loaded from the hub's cache because the hub is unreachable.

    If so, it sets HF_HUB_OFFLINE, so that processes started later do not contact the hub either.

    Args:
        name: the model's name; a folder needs no hub.
    """
    if Path(name).is_dir() or why_unreachable() is None:
        return False
    os.environ["HF_HUB_OFFLINE"] = "1"
    return True


@contextmanager
def offline_if_hub_unreachable(name: str) -> Iterator[None]:
    """Makes the hub's library use only its cache inside this context if the hub is unreachable, without any retry.

    Args:
        name: the model, tokenizer or dataset that is loaded.
    """
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or cache_only(name)
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def needs_code(error: Exception) -> bool:
    """Returns whether transformers raised an error because it may not run code of a repository or folder."""
    return "trust_remote_code=True" in str(error)


def go_offline() -> None:
    """Keeps the hub's library from contacting the hub from now on, in this process and in those that it starts."""
    from huggingface_hub import constants

    os.environ["HF_HUB_OFFLINE"] = "1"
    constants.HF_HUB_OFFLINE = True  # the library has read the variable when it was imported


def why_missing(name: str) -> str | None:
    """Returns why a model or tokenizer of this name is neither a folder nor available from the hub.

    Args:
        name: the name that could not be loaded.

    Returns:
        A clause that begins with "which is"; None if the hub is reachable, or if the file or folder exists.
    """
    reason = why_unreachable()
    if reason is None or Path(name).exists():
        return None
    return f"which is neither a folder{folder_hint(name)} nor in the cache of the hub, and {reason}"


def folder_hint(name: str) -> str:
    """Returns a remark, in brackets, if the parent of this name is an existing folder; otherwise empty."""
    path = Path(name)
    if path.exists() or len(path.parts) < 2 or not path.parent.is_dir():
        return ""
    near = get_close_matches(path.name, [entry.name for entry in path.parent.iterdir() if entry.is_dir()], 1)
    suggestion = f"; did you mean {path.parent / near[0]}?" if near else ""
    return f" ({path.parent} is one, and has no {path.name}{suggestion})"


def why_unreachable() -> str | None:
    """Returns why the hub, or the proxy in front of it, is unreachable; None if it is reachable."""
    from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE

    if HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    hub = urlsplit(ENDPOINT)
    proxies = getproxies()
    proxy = proxies.get(hub.scheme) or proxies.get("all")
    asked = hub
    if proxy and not proxy_bypass(hub.hostname or ""):
        asked = urlsplit(proxy if "//" in proxy else f"http://{proxy}")
    through = "" if asked is hub else f" through {asked.hostname}"
    refusal = _refusal(asked.hostname or "", asked.port or _PORTS.get(asked.scheme, 1080))
    return None if refusal is None else f"{ENDPOINT} cannot be reached{through}: {refusal}"


@cache
def _refusal(host: str, port: int) -> str | None:
    try:
        socket.create_connection((host, port), timeout=TIMEOUT_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return None
