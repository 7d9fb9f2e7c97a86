"""Tests that a recipe cannot turn on a field of Megatron that nothing reads here, and what the refusals say."""

import re
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import nemo_offload_rl
from nemo_offload_rl.config.installed.megatron_fields import SECTIONS, megatron_fields
from nemo_offload_rl.config.megatron.owned_fields import OWNED_FIELDS, refuse

MEGATRON = "policy.megatron_cfg"
OPTIMIZER = f"{MEGATRON}.optimizer"
DDP = f"{MEGATRON}.distributed_data_parallel_config"

# Fields that a config's own `__post_init__` puts into effect, most of them by setting other fields.
READ_IN_POST_INIT = {
    *("init_method_std", "embedding_init_method_std"),
    *("mup_width_mult", "mup_base_hidden_size", "mup_base_head_dim", "mup_attn_scale_power"),
    *("moe_router_topk_limited_devices", "moe_enable_deepep", "moe_deepep_num_sms", "moe_hybridep_num_sms"),
    "disable_bf16_reduced_precision_matmul",
}


def words_read(files: Iterable[Path]) -> set[str]:
    """Returns every attribute, and every word in quotes, since some code reads fields with `getattr`."""
    return {word for file in files for word in re.findall(r"""[."'](\w+)""", file.read_text(encoding="utf-8"))}


def test_every_field_that_is_not_refused_is_read_somewhere() -> None:
    spec = find_spec("megatron")
    assert spec is not None
    (core,) = (Path(folder) / "core" for folder in spec.submodule_search_locations or ())
    unused = {"fsdp", "inference", "export"}  # parts of megatron-core that are not used here
    config_files = {core.parent / file for source in SECTIONS.values() for file, _ in source.classes}
    provider = core.parent / "bridge" / "models" / "gpt_provider.py"
    own = Path(nemo_offload_rl.__file__).parent
    read = words_read(
        [
            provider,
            *(one for one in core.rglob("*.py") if one not in config_files and not unused & set(one.parts)),
            *(one for one in own.rglob("*.py") if "config" not in one.relative_to(own).parts),
        ]
    )
    for section in SECTIONS:
        assert set(megatron_fields(section)) - set(OWNED_FIELDS[section]) - READ_IN_POST_INIT <= read, section


@pytest.mark.parametrize(
    ("section", "name", "on", "off", "message"),
    [
        (MEGATRON, "qk_clip", True, False, "is done by Megatron's own training loop, which is not used here"),
        (MEGATRON, "log_max_attention_logit", True, False, "is done by Megatron's own training loop"),
        (MEGATRON, "apply_residual_connection_post_layernorm", True, False, "is not read by megatron-core 0.19.2;"),
        (MEGATRON, "use_grouped_gemm_for_dense_mlp", True, False, "is not read by megatron-core 0.19.2; leave it off"),
        (MEGATRON, "pipeline_model_parallel_comm_backend", "ucc", "nccl", "pipeline stages send with the backend of"),
        (MEGATRON, "moe_token_dropping", True, False, "set policy.megatron_cfg.moe_expert_capacity_factor to drop"),
        (MEGATRON, "tensor_parallel_num_weight_shards", 2, None, "more shards of a weight than tensor_model_parallel"),
        (MEGATRON, "tp_comm_overlap_cfg", "a.yaml", None, "is for tp_comm_overlap, which is not supported here"),
        (MEGATRON, "tp_comm_bootstrap_backend", "mpi", "nccl", "is for tp_comm_overlap, which is not supported here"),
        (MEGATRON, "nccl_all_reduce_for_prefill", True, False, "has an effect in Megatron's inference only"),
        (MEGATRON, "cuda_graph_use_single_mempool", False, True, "is not read by megatron-core 0.19.2; delete it"),
        (OPTIMIZER, "main_grads_dtype", "bfloat16", "float32", "set the gradients' type with policy.megatron_cfg.dist"),
        (DDP, "nccl_ub", True, False, "they would take the memory twice, and NCCL would use none of it; leave it off"),
        (DDP, "num_buckets", 4, None, "which is not used here; delete it, and set bucket_size"),
    ],
)
def test_what_would_have_no_effect_is_refused_with_the_reason(
    section: str, name: str, on: Any, off: Any, message: str
) -> None:
    assert message in (refuse(section, name, on) or "")
    assert refuse(section, name, off) is None
