"""Versions of what is installed here; what is not is not asked, since workers may have it."""

import importlib.metadata
import re

TORCH_2_9 = ("torch", "torch", (2, 9))
TRANSFORMER_ENGINE_2_14 = ("Transformer Engine", "transformer-engine", (2, 14))


def too_old(*libraries: tuple[str, str, tuple[int, int]]) -> list[str]:
    """Those of which an older version is installed: what is needed, and what was found.

    Args:
        libraries: name, distribution, and the first release that will do.
    """
    return [
        f"{title} {'.'.join(map(str, least))} or newer, found {found}"
        for title, distribution, least in libraries
        if (found := _installed(distribution)) is not None and _release(found) < least
    ]


def _installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _release(version: str) -> tuple[int, ...]:
    """Major and minor: (2, 9) of 2.9.0a0+git."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
