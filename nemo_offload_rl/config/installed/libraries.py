"""Versions of what is installed here; what is not is not asked, since workers may have it."""

import importlib.metadata
import re

TORCH_2_9 = ("torch", "torch", (2, 9))
TRANSFORMER_ENGINE_2_14 = ("Transformer Engine", "transformer-engine", (2, 14))
# Of megatron-core: how its layers call the manager of activations, and what they expect of it, is no public interface.
TESTED_MEGATRON_CORE = ("0.19.2",)


def too_old(*libraries: tuple[str, str, tuple[int, int]]) -> list[str]:
    """Returns the libraries of which an older version is installed: the needed and the found version.

    Args:
        libraries: name, distribution, and the first release that will do.
    """
    return [
        f"{title} {'.'.join(map(str, least))} or newer, found {found}"
        for title, distribution, least in libraries
        if (found := _installed(distribution)) is not None and _release(found) < least
    ]


def untested_megatron_core() -> str | None:
    """Why activations cannot be offloaded with the megatron-core that is installed; None where they can."""
    found = _installed("megatron-core")  # its own __version__ ends in a commit of whatever folder it is run in
    if found is None or found in TESTED_MEGATRON_CORE:
        return None
    return (
        "takes the place of a private part of megatron-core and was tested with "
        f"{', '.join(TESTED_MEGATRON_CORE)}, but {found} is installed; install a tested version, or set the key to "
        "false"
    )


def _installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _release(version: str) -> tuple[int, ...]:
    """Major and minor: (2, 9) of 2.9.0a0+git."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
