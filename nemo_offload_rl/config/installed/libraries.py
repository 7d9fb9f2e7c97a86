"""Checks the version of megatron-core if it is installed here; workers may have it elsewhere."""

# Versions of megatron-core that activation offloading was tested with: the calls of its layers to the manager of
# activations are not a public interface.
TESTED_MEGATRON_CORE = ("0.19.2",)


def untested_megatron_core() -> str | None:
    """Returns why activations cannot be offloaded with the installed megatron-core; None if they can."""
    import importlib.metadata  # takes 0.03 s

    try:
        # Its own __version__ ends in a commit of the folder that the process runs in.
        found = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return None
    if found in TESTED_MEGATRON_CORE:
        return None
    return (
        f"replaces a private part of megatron-core and was tested only with {', '.join(TESTED_MEGATRON_CORE)}, "
        f"but {found} is installed; install a tested version, or set the key to false"
    )
