import pytest
import torch
from ray.exceptions import ActorDiedError, OutOfMemoryError

from nemo_offload_rl.generation.interface import GenerationError
from nemo_offload_rl.placement.nodes import NodeLostError
from nemo_offload_rl.run.failures import Restarts, add_failure_summary
from nemo_offload_rl.worker.errors import WorkerError

NODE = "10.0.0.2 (0123abcd)"


def test_the_loss_of_a_process_or_a_node_is_followed_by_so_many_restarts():
    restarts = Restarts(2)
    assert restarts.take(WorkerError(1, "train", ActorDiedError(), "", NODE))
    assert restarts.take(GenerationError("generate", NodeLostError("gone"), ""))
    assert str(restarts) == "Restart 2 of at most 2 (cluster.max_restarts)"
    assert not restarts.take(WorkerError(1, "train", ActorDiedError(), ""))
    assert not Restarts(0).take(WorkerError(1, "train", ActorDiedError(), ""))


@pytest.mark.parametrize(
    "cause", [RuntimeError("shapes differ"), torch.OutOfMemoryError("CUDA"), OutOfMemoryError("of the host")]
)
def test_what_would_be_raised_again_is_not(cause):
    assert not Restarts(2).take(WorkerError(0, "train", cause, ""))


def test_the_summary_names_the_node_that_is_gone():
    lost = NodeLostError(f"node {NODE} has not answered for 30 s")
    error = WorkerError(1, "train", lost, "", NODE)
    assert str(error).startswith(f"Rank 1 on node {NODE} failed in train: NodeLostError: node")
    add_failure_summary(error, None)
    output, reason = error.__notes__
    assert output.startswith("The output of the workers is in Ray's session folder on their node (/tmp/ray/session_lat")
    assert reason.startswith(f"The run failed: rank 1 of the policy, on node {NODE}, failed in train: node {NODE} has")


def test_the_summary_of_a_lost_engine_names_the_rank_beside_it():
    error = GenerationError("generate", NodeLostError(f"node {NODE} does not answer"), "", (1, NODE))
    assert str(error).startswith(f"Generation beside rank 1 on node {NODE} failed in generate: NodeLostError: ")
    add_failure_summary(error, None)
    assert error.__notes__[1].startswith(
        f"The run failed: generation beside rank 1, on node {NODE}, failed in generate: "
    )
