"""Checks, before weights are loaded, that Megatron-Bridge will find every one of them.

Megatron-Bridge 0.6.2 only warns of a weight that is not in the files, and leaves the parameter's memory as it is. At a
weight that it has no name for it fails without saying which.
"""

from typing import Any

from nemo_offload_rl.mcore.weights.export import hf_config_of


def check_weights(bridge: Any, where: str, chunks: list[Any]) -> list[Any]:
    """Check that all of a model's weights can be loaded; collective over pipeline stages.

    Args:
        bridge: an `AutoBridge` with weights.
        where: where the weights are, for messages.
        chunks: this rank's model chunks.

    Returns:
        The chunks.

    Raises:
        ValueError: a weight is missing, or Megatron-Bridge has no name for it.
    """
    loader = bridge._model_bridge
    names = loader._megatron_global_param_names_all_pp_ranks(chunks)
    if loader._share_embeddings_and_output_weights(chunks[0].config):
        names = [name for name in names if "output_layer" not in name]
    registry, there = loader.mapping_registry(), set(bridge.hf_pretrained.state.source.get_all_keys())
    nameless, missing = [], []
    for name in names:
        mapping = registry.megatron_to_hf_lookup(name)
        if mapping is None:
            nameless.append(name)
        elif not mapping.allow_hf_name_mismatch:
            wanted = [mapping.hf_param] if isinstance(mapping.hf_param, str) else mapping.hf_param.values()
            missing += [one for one in wanted if one not in there]
    family = hf_config_of(bridge).model_type
    if nameless:
        raise ValueError(
            f"Megatron-Bridge has no names for {len(nameless)} weights of this model, such as {nameless[0]!r}, and "
            f"cannot load it; choose other config flags for the family {family}, or another family."
        )
    if missing:
        raise ValueError(
            f"{where} lacks {len(missing)} weights that a model of its config (model_type {family}) has, such as "
            f"{missing[0]!r}; use all files of one model."
        )
    return chunks
