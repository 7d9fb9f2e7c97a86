"""Checks versions of the libraries installed here; skips libraries that are not, since workers may have them."""

import importlib.metadata
import re

TORCH_2_9 = ("torch", "torch", (2, 9))
TRANSFORMER_ENGINE_2_14 = ("Transformer Engine", "transformer-engine", (2, 14))
# Versions of megatron-core that activation offloading was tested with: the calls of its layers to the manager of
# activations are not a public interface.
TESTED_MEGATRON_CORE = ("0.19.2",)


def too_old(*libraries: tuple[str, str, tuple[int, int]]) -> list[str]:
    """Returns the libraries that are installed in too old a version, each with the needed and the found version.

    Args:
        libraries: name, distribution, and the oldest supported release of each.
    """
    return [
        f"{title} {'.'.join(map(str, least))} or newer, found {found}"
        for title, distribution, least in libraries
        if (found := _installed(distribution)) is not None and _release(found) < least
    ]


def untested_megatron_core() -> str | None:
    """Returns why activations cannot be offloaded with the installed megatron-core; None if they can."""
    found = _installed("megatron-core")  # its own __version__ ends in a commit of the folder that the process runs in
    if found is None or found in TESTED_MEGATRON_CORE:
        return None
    return (
        f"replaces a private part of megatron-core and was tested only with {', '.join(TESTED_MEGATRON_CORE)}, "
        f"but {found} is installed; install a tested version, or set the key to false"
    )


def _installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _release(version: str) -> tuple[int, ...]:
    """Returns major and minor version: (2, 9) for 2.9.0a0+git."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
