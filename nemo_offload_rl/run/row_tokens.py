"""Replaces `auto` in policy.sequence_packing by a number, from this machine's GPU memory and the plan."""

from collections.abc import Mapping
from typing import Any

from nemo_offload_rl.hf_config import hf_config
from nemo_offload_rl.placement.machine import host_facts
from nemo_offload_rl.plan.activation_facts import AUTO, with_tokens
from nemo_offload_rl.plan.row_tokens import open_keys, with_row_tokens


def with_row_tokens_here(
    config: Mapping[str, Any], algorithm: str, gpu_bytes: int | None
) -> tuple[Mapping[str, Any], list[str]]:
    """Chooses the length of packed rows, where the recipe leaves that open.

    Args:
        config: a validated recipe, resolved for this machine; not modified.
        algorithm: a key of `ALGORITHMS`, the section that marks the recipe.
        gpu_bytes: memory of the smallest GPU; None where that is not known.

    Returns:
        The config with numbers, and a line for the user for each of them; the config itself if none is open.

    Raises:
        HostBudgetError: a rank needs more host memory than the recipe's limit, with the shortest rows.
        ValueError: not even a row of the longest sequence fits, or the model's config cannot be read.
    """
    if not open_keys(config):
        return config, []
    host = host_facts() if config["cluster"]["num_nodes"] == 1 else None
    fields = {} if gpu_bytes is None else hf_config(config["policy"]).to_dict()
    return with_row_tokens(config, fields, algorithm=algorithm, gpu_bytes=gpu_bytes, host=host)


def with_numbers_of(resolved: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of `config` in which the numbers that it leaves open are taken from `resolved`."""
    packing = resolved["policy"]["sequence_packing"]
    return with_tokens(config, {key: packing[key] for key in open_keys(config)})


def as_left_open(written: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a checkpoint's recipe (may be empty) with `auto` for the numbers that this run's recipe leaves open."""
    keys = open_keys(config)
    return with_tokens(written, dict.fromkeys(keys, AUTO)) if keys and written else dict(written)
