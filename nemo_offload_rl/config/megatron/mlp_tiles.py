"""The tiles of tokens in which dense MLPs are computed."""

from typing import Literal

MLP_TILES_KEY = "policy.megatron_cfg.mlp_tile_tokens"
# The least tile of `auto`. A tile's weight gradients are added up in float32, which moves as many bytes for a small
# tile as for a large one: by calculation, on an H100 2% of the time of its products at this size, 20% at 1,536 tokens.
_LEAST_AUTO_TOKENS = 16_384


def tokens_of_tile(value: int | Literal["auto"] | None, hidden_size: int) -> int | None:
    """Returns the number of tokens of a tile; None if MLPs are not tiled.

    Args:
        value: `policy.megatron_cfg.mlp_tile_tokens`. `auto` is the rule of Arctic Long Sequence Training, the hidden
            size, from a size on at which tiles cost little.
        hidden_size: the model's hidden size.
    """
    return max(hidden_size, _LEAST_AUTO_TOKENS) if value == "auto" else value


def check_tiles_fit_model(value: int | Literal["auto"] | None, *, is_moe: bool) -> None:
    """Checks the key against the model.

    Args:
        value: `policy.megatron_cfg.mlp_tile_tokens`.
        is_moe: whether some layer of the model is a mixture of experts.

    Raises:
        ValueError: the model has experts. A tile that is routed on its own has other auxiliary losses and capacities
            than its micro-batch.
    """
    if value is not None and is_moe:
        raise ValueError(
            f"{MLP_TILES_KEY} is {value}, but the model has layers with experts, whose router needs all tokens of a "
            "micro-batch at once; set it to null, and list moe in policy.megatron_cfg.recompute_modules to save memory."
        )
