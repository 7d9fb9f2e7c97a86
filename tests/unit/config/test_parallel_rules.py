"""Parallel sizes in recipes: the micro-batches of virtual stages, and packed rows of experts on several ranks."""

import pytest

from nemo_offload_rl.config import load
from tests.unit.config.conftest import CONFIGS
from tests.unit.config.test_activation_rules import EXPERTS
from tests.unit.config.test_rules import EP, MEGATRON, PACKED, TENSOR_PARALLEL, VIRTUAL_STAGES

DISPATCHER = f"++{MEGATRON}.moe_token_dispatcher_type"
ETP = f"{MEGATRON}.expert_tensor_parallel_size"
GATHERED = [*EXPERTS, *PACKED, f"{DISPATCHER}=allgather"]
GROUPS_OF_3 = f"+{MEGATRON}.microbatch_group_size_per_vp_stage=3"


def of_samples(number: int, mbs: int = 1) -> list[str]:
    """Returns overrides for a training step of this many samples."""
    batch = [f"policy.train_global_batch_size={number}", f"policy.train_micro_batch_size={mbs}"]
    return ["grpo.num_prompts_per_step=1", f"grpo.num_generations_per_prompt={number}", *batch]


@pytest.mark.parametrize("size", [EP, ETP])
def test_packed_rows_of_data_parallel_ranks_are_not_gathered(size, one_problem_of):
    error = one_problem_of(*GATHERED, f"{size}=2", "cluster.gpus_per_node=2")
    assert (
        f"{MEGATRON}.moe_token_dispatcher_type: is allgather, which does not support packed rows of different" in error
    )
    assert error.count("set it to alltoall") == 1


@pytest.mark.parametrize(
    "overrides",
    [
        GATHERED,
        [*GATHERED, *TENSOR_PARALLEL, f"{EP}=2"],
        [*EXPERTS, f"{DISPATCHER}=allgather", f"{EP}=2", "cluster.gpus_per_node=2"],
        [*EXPERTS, *PACKED, f"{DISPATCHER}=alltoall", f"{EP}=2", "cluster.gpus_per_node=2"],
    ],
    ids=["one rank", "tensor-parallel ranks have the same rows", "padded", "alltoall"],
)
def test_rows_of_one_length_are_gathered(overrides):
    load(CONFIGS / "grpo_tiny_cpu.yaml", overrides)


def test_one_virtual_stage_is_none(one_problem_of):
    overrides = [*VIRTUAL_STAGES[:-1], f"+{MEGATRON}.virtual_pipeline_model_parallel_size=1"]
    assert "is 1, which leaves pipeline stages whole; set it to null, or to 2 or more" in one_problem_of(*overrides)


@pytest.mark.parametrize(
    ("overrides", "refused"),
    [
        (of_samples(6), None),
        (of_samples(6, mbs=2), "needs 4 micro-batches on each data-parallel rank; found 3: set it to 8, or"),
        ([*PACKED, *of_samples(6, mbs=2)], None),
        ([*PACKED, *of_samples(5)], "needs 6 samples on each data-parallel rank; found 5: set it to 6, or"),
        ([GROUPS_OF_3, *of_samples(5)], None),
        ([GROUPS_OF_3, *of_samples(4)], "needs 5 micro-batches on each data-parallel rank; found 4: set it to 5, or"),
    ],
)
def test_virtual_stages_train_whole_groups(overrides, refused, one_problem_of):
    if refused is None:
        load(CONFIGS / "grpo_tiny_cpu.yaml", [*VIRTUAL_STAGES, *overrides])
    else:
        assert refused in one_problem_of(*VIRTUAL_STAGES, *overrides)
