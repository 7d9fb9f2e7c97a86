"""Builds Hugging Face causal language models whose weights arrive by refit."""

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from nemo_offload_rl.config.schema.policy import HfConfigFields
from nemo_offload_rl.hf_config import ModelSource
from nemo_offload_rl.hf_config import hf_config as read_hf_config

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def build_model(
    model_name: str,
    hf_config: HfConfigFields | None,
    precision: str,
    hf_config_overrides: HfConfigFields | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Builds a model on the host with uninitialized weights.

    Args:
        model_name: Folder or hub name of the configuration; only a label if `hf_config` is given.
        hf_config: A Hugging Face configuration as a mapping, with its `model_type`; None takes `model_name`'s.
        precision: "float32", "bfloat16" or "float16".
        hf_config_overrides: Fields of the configuration to override.
        trust_remote_code: Whether code in the files of `model_name` may run.

    Raises:
        ValueError: If the precision is unknown, or for the reasons of `nemo_offload_rl.hf_config.hf_config`, which the
            policy's model uses, too.
    """
    if precision not in _DTYPES:
        raise ValueError(f"policy.precision is {precision!r}; generation supports {', '.join(_DTYPES)}.")
    source: ModelSource = {
        "model_name": model_name,
        "hf_config": hf_config,
        "hf_config_overrides": hf_config_overrides or {},
        "trust_remote_code": trust_remote_code,
    }
    config = read_hf_config(source)
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(
            config, trust_remote_code=trust_remote_code, dtype=_DTYPES[precision], attn_implementation="sdpa"
        )
    model.tie_weights()
    return model.eval().requires_grad_(False)


def weights_by_name(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Returns the model's weights under their names in a Hugging Face checkpoint, as views that can be written to.

    Transformers keeps the experts of a layer in two fused parameters, `gate_up_proj` [experts, 2 x ffn, hidden] and
    `down_proj` [experts, hidden, ffn], which a checkpoint has expert by expert. Tied weights appear under each name.
    """
    weights = {}
    for name, tensor in model.state_dict().items():
        module_name, _, parameter = name.rpartition(".")
        if module_name.endswith(".experts") and tensor.dim() == 3 and parameter in ("gate_up_proj", "down_proj"):
            weights.update(_expert_weights(module_name, parameter, tensor))
        else:
            weights[name] = tensor
    return weights


def optional_names(model: PreTrainedModel) -> set[str]:
    """Returns names whose tensor also has another name, and which a checkpoint may leave out."""
    first_names: dict[int, str] = {}
    optional = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first_names.setdefault(id(parameter), name) != name:
            optional.add(name)
    return optional


def _expert_weights(module_name: str, parameter: str, fused: nn.Parameter | torch.Tensor) -> dict[str, torch.Tensor]:
    weights = {}
    for expert, tensor in enumerate(fused):
        if parameter == "gate_up_proj":
            gate, up = tensor.chunk(2, dim=0)
            weights[f"{module_name}.{expert}.gate_proj.weight"] = gate
            weights[f"{module_name}.{expert}.up_proj.weight"] = up
        else:
            weights[f"{module_name}.{expert}.down_proj.weight"] = tensor
    return weights
