"""Whether the Hugging Face hub can be reached, asked once and before its library, which tries again for a minute."""

import os
import socket
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

TIMEOUT_S = 5.0
_PORTS = {"http": 80, "https": 443}


def cache_only(name: str) -> bool:
    """Whether a model or tokenizer can come from the hub's cache alone.

    Where that is so, processes that are started later do not ask the hub either.

    Args:
        name: of the model; a folder needs no hub.
    """
    if Path(name).is_dir() or why_unreachable() is None:
        return False
    os.environ["HF_HUB_OFFLINE"] = "1"
    return True


def why_unreachable() -> str | None:
    """What the network answers where the hub, or the proxy in front of it, cannot be reached; None where it can."""
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
