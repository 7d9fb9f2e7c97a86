"""Tests the plan of a run that replays rollouts: nothing of it is for generation."""

from support.machine import resolved_for

from nemo_offload_rl.config import load
from nemo_offload_rl.residency.table import Phase
from nemo_offload_rl.worker.logprob_passes import sampling_filter, sampling_temperature

RECIPE = "benchmarks/recipes/grpo_1_5B_random.yaml"
SAMPLING = ["policy.generation.backend=vllm", "policy.generation.temperature=0.7", "policy.generation.top_k=5"]
REPLAY = "++grpo.debug.replay_rollouts=rollouts"


def test_nothing_is_planned_for_generation_and_log_probs_stay_those_of_the_sampler():
    generating = load(RECIPE, SAMPLING).config
    resolved, other = resolved_for(load(RECIPE, [*SAMPLING, REPLAY]).config, 80), resolved_for(generating, 80)
    assert resolved.lines[0].startswith("grpo.debug.replay_rollouts is rollouts: the run starts no engine")
    assert resolved.run.engine is None
    assert other.run.engine is not None
    assert not resolved.run.plan.engine_table
    assert not any("KV cache" in line for line in resolved.lines)
    (rank,) = resolved.run.plan.ranks
    assert set(rank.gpu_bytes) == {Phase.LOGPROB, Phase.TRAIN}
    policy = resolved.config["policy"]
    assert sampling_temperature(policy) == sampling_temperature(generating["policy"]) == 0.7
    assert sampling_filter(policy) == sampling_filter(generating["policy"])
    assert sampling_filter(policy).top_k == 5
