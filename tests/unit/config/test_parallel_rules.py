"""The micro-batches of virtual pipeline stages."""

import pytest

from nemo_offload_rl.config import load
from tests.unit.config.conftest import CONFIGS
from tests.unit.config.test_rules import MEGATRON, PACKED, PP, VIRTUAL_STAGES

GROUPS_OF_3 = f"+{MEGATRON}.microbatch_group_size_per_vp_stage=3"


def of_samples(number: int, mbs: int = 1) -> list[str]:
    """Returns overrides for a training step of this many samples."""
    batch = [f"policy.train_global_batch_size={number}", f"policy.train_micro_batch_size={mbs}"]
    return ["grpo.num_prompts_per_step=1", f"grpo.num_generations_per_prompt={number}", *batch]


def test_one_virtual_stage_is_none(one_problem_of):
    overrides = [*VIRTUAL_STAGES[:-1], f"+{MEGATRON}.virtual_pipeline_model_parallel_size=1"]
    assert f"is 1 with {PP} 2, but both must be 2 or more" in one_problem_of(*overrides)


@pytest.mark.parametrize(
    ("overrides", "refused"),
    [
        (of_samples(6), None),
        (of_samples(6, mbs=2), "3 micro-batches for each data-parallel rank, but"),
        ([*PACKED, *of_samples(6, mbs=2)], None),
        ([*PACKED, *of_samples(5)], "5 samples for each data-parallel rank, but"),
        ([GROUPS_OF_3, *of_samples(5)], None),
        ([GROUPS_OF_3, *of_samples(4)], "needs 5; set it to 5, or use no virtual stages"),
    ],
)
def test_virtual_stages_train_whole_groups(overrides, refused, one_problem_of):
    if refused is None:
        load(CONFIGS / "grpo_tiny_cpu.yaml", [*VIRTUAL_STAGES, *overrides])
    else:
        assert refused in one_problem_of(*VIRTUAL_STAGES, *overrides)
