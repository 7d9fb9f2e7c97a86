"""Tests the parts of the benchmark of the switch between trainer and generator, without Ray."""

from types import SimpleNamespace

import pytest
from colocated_ways.planned import planned_gib
from colocated_ways.policy import MarkedWorker, UpstreamWorker
from colocated_ways.run import RECIPES, overrides
from colocated_ways.settings import OURS, SETTINGS
from ports import free_port
from support.machine import planner_of

from nemo_offload_rl import config
from nemo_offload_rl.algorithms.losses import NLLLoss
from nemo_offload_rl.data.batch import response_batch
from nemo_offload_rl.hf_config import hf_config
from nemo_offload_rl.plan.decisions import Resolved
from nemo_offload_rl.plan.planner import worker_plan
from nemo_offload_rl.residency.table import Phase
from nemo_offload_rl.run.setup import with_run_length

ARGUMENTS = SimpleNamespace(
    scale="full", config=None, model=None, backend="vllm", enforce_eager=False, overrides=[], cycles=0,
    deterministic=False,
)  # fmt: skip


def test_a_worker_that_moves_its_state_as_nemo_rl_does_trains_as_ours():
    recipe, _ = config.for_machine(config.load(RECIPES["tiny"], []).config, has_gpus=False)
    policy = with_run_length(recipe["policy"], 4)
    rows = [list(range(8))] * 4
    batch = response_batch([row[:4] for row in rows], [row[4:] for row in rows], 0)

    def losses(worker_cls):
        worker = worker_cls(
            policy, plan=worker_plan(policy, hf_config(policy).to_dict(), world_size=1),
            rank=0, world_size=1, local_rank=0, master_addr="localhost", master_port=free_port(), seed=0,
            init_reference_model=False,
        )  # fmt: skip
        found = []
        try:
            for _ in range(2):
                worker.offload_before_refit()
                worker.offload_after_refit()
                worker.start_return(logprobs=False)
                found.append(worker.train(batch, NLLLoss(), gbs=4, mbs=2)["loss"])
                assert worker.residency.phase is Phase.TRAIN
        finally:
            worker.shutdown()
        return found

    first, second = losses(UpstreamWorker)
    assert first > second
    assert losses(MarkedWorker) == [first, second]


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_setting_is_a_recipe_without_a_gpu_too(setting):
    arguments = SimpleNamespace(**vars(ARGUMENTS) | {"scale": "tiny", "backend": "transformers", "cycles": 20})
    recipe = config.load(RECIPES["tiny"], overrides(setting, arguments)).config
    assert recipe["policy"]["generation"]["backend"] == "transformers"


def test_the_plan_of_the_full_recipe_names_every_phase():
    recipe = config.load(RECIPES["full"], overrides(OURS, ARGUMENTS)).config
    resolved = Resolved(recipe, planner_of(recipe, None).plan(recipe))
    planned = planned_gib(resolved, 140 * 2**30)
    assert set(planned) == {"refit", "sampling", "logprobs", "reference_logprobs", "training"}
    assert 30 < planned["sampling"] < 0.6 * 140  # a KV cache for 1024 sequences of 512 tokens, 20 GiB of state
    assert planned["sampling"] < planned["refit"] < 140
    assert planned_gib(resolved, 24 * 2**30)["refit"] < 24  # not enough for both at once
    assert 140 > planned["training"] > planned["logprobs"] > 25  # rows of 16,384 tokens beside 20 GiB of state
