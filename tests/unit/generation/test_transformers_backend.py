from concurrent.futures import ThreadPoolExecutor
from typing import get_args

import pytest
import ray
import torch
from support import engine_conformance
from support.actors import kill_and_wait
from support.toy_group import ApartCluster, NamedNodes

from nemo_offload_rl.config.schema.generation import GenerationConfig
from nemo_offload_rl.generation import ENGINES, make_generation
from nemo_offload_rl.generation.hf_model import build_model, weights_by_name
from nemo_offload_rl.generation.interface import GenerationError, GenerationRequest, InFlightUpdates, SamplingParams
from nemo_offload_rl.generation.transformers_backend import TransformersGeneration
from nemo_offload_rl.generation.transformers_generator import TransformersGenerator
from nemo_offload_rl.placement.cluster import Cluster
from nemo_offload_rl.refit import TRANSPORTS, make_transport
from nemo_offload_rl.refit.checksum import require_equal_checksums, tensor_checksum
from nemo_offload_rl.refit.loads import EngineLostError
from nemo_offload_rl.refit.object_store import ObjectStoreTransport
from nemo_offload_rl.refit.plan import ExportPlan

QWEN3 = engine_conformance.QWEN3 | {"vocab_size": 30, "hidden_size": 32, "head_dim": 8, "intermediate_size": 48}
POLICY = {
    "model_name": "a label", "hf_config": QWEN3 | {"intermediate_size": 64},
    "hf_config_overrides": {"intermediate_size": 48}, "precision": "float32", "generation_batch_size": 8,
    "max_total_sequence_length": 64, "residency": {"generation_weights": None},
    "generation": {"backend": "transformers", "stop_strings": None, "bad_words": None},
}  # fmt: skip
REQUEST = GenerationRequest(
    prompt_ids=[[5, 6, 7], [5, 6, 7], [8], [9, 10], [9, 10]], sample_ids=[0, 1, 0, 0, 1], step=3,
    sampling=SamplingParams(10, 1.0, 1.0, None, (2,), 11),
)  # fmt: skip


@pytest.fixture(scope="module")
def model():
    model = build_model("tiny", QWEN3, "float32")
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.fixture(scope="module")
def weights(model):
    weights = weights_by_name(model)
    del weights["lm_head.weight"]  # tied
    return weights


@pytest.fixture(scope="module")
def local(model):
    return TransformersGenerator(model, device="cpu", generation_batch_size=8, max_sequence_length=64, has_weights=True)


@pytest.fixture
def generation(ray_cluster):
    """Starts an engine that has no weights yet."""
    generation = make_generation(POLICY, ray_cluster)
    yield generation
    generation.shutdown()


def _send(weights, receivers, *, verify=False, bucket_bytes=10_000):
    plan = ExportPlan.of(weights.items())
    sender = ObjectStoreTransport(receivers, verify=verify).connect(plan, rank=0, bucket_bytes=bucket_bytes)
    return sender.send(weights.items())


def test_generation_waits_for_weights_which_a_refit_brings(generation, local, weights):
    with pytest.raises(GenerationError, match="24 weights of the generation model have not been loaded") as caught:
        generation.generate(REQUEST)
    assert (caught.value.verb, type(caught.value.cause)) == ("generate", RuntimeError)
    generation.prepare_refit_info(ExportPlan.of(weights.items()))
    checksums = _send(weights, generation.receivers, verify=True)
    require_equal_checksums(checksums, generation.weights_checksum())
    generation.prepare_for_generation(["weights", "kv_cache"])
    output, expected = generation.generate(REQUEST), local.generate(REQUEST)
    begun = generation.start_finish_generation()
    assert generation.start_finish_generation() == begun  # the release is already under way
    generation.finish_generation()
    ray.get(list(begun), timeout=0)  # `finish_generation` has waited for it
    assert output.output_ids == expected.output_ids
    assert output.finish_reasons == expected.finish_reasons
    for row, expected_row in zip(output.logprobs, expected.logprobs, strict=True):
        torch.testing.assert_close(torch.tensor(row), torch.tensor(expected_row), atol=1e-5, rtol=0)
    assert 0.05 < generation.memory_stats()["host_rss_gib"] < 5


def test_a_lost_bit_shows_in_the_checksums(generation, weights):
    _send(weights, generation.receivers)
    broken = weights["model.norm.weight"].clone()
    broken.view(torch.int32)[3] ^= 1
    _send({"model.norm.weight": broken}, generation.receivers)
    sums = _send(dict(list(weights.items())[:3]), generation.receivers, verify=True)
    received = generation.weights_checksum()
    require_equal_checksums(sums, {name: received[name] for name in sums})
    with pytest.raises(RuntimeError, match=r"1 different \(model.norm.weight\)"):
        require_equal_checksums({name: tensor_checksum(tensor) for name, tensor in weights.items()}, received)


def test_a_wrong_architecture_is_named_before_anything_is_sent(generation, weights):
    plan = ExportPlan.of((name, tensor.bfloat16()) for name, tensor in weights.items())
    with pytest.raises(GenerationError, match=r"policy\.precision") as caught:
        generation.prepare_refit_info(plan)
    assert isinstance(caught.value.cause, ValueError)


@pytest.fixture
def start_pair(ray_cluster):
    """Starts an engine on each bundle of a cluster."""
    made = []

    def start(cluster=ray_cluster, in_flight=None):
        made.append(
            TransformersGeneration(
                cluster, cluster.bundles_by_engine(1), model_name="a label", hf_config=QWEN3, hf_config_overrides=None,
                precision="float32", generation_batch_size=8, max_sequence_length=64, in_flight=in_flight,
            )
        )  # fmt: skip
        return made[-1]

    yield start
    for pair in made:
        pair.shutdown()


@pytest.fixture(params=[lambda cluster: cluster, ApartCluster], ids=["one node", "two nodes"])
def pair(request, ray_cluster, start_pair):
    return start_pair(request.param(ray_cluster))


def test_replicas_share_a_request_out(pair, local, weights):
    _send(weights, pair.receivers)
    whole = pair.generate(REQUEST)
    assert len(whole.output_ids) == len(whole.logprobs) == len(whole.finish_reasons) == 5
    assert whole.output_ids == local.generate(REQUEST).output_ids
    alone = GenerationRequest([[8]], [0], 3, REQUEST.sampling)  # one row for two replicas
    assert pair.generate(alone).output_ids == whole.output_ids[2:3]
    _send({"model.norm.weight": torch.zeros(32)}, pair.receivers[:1])
    with pytest.raises(RuntimeError, match=r"model\.norm\.weight"):
        pair.weights_checksum()


def test_an_engine_that_dies_and_a_relay_that_dies_are_errors_of_their_bundle(ray_cluster, start_pair, weights):
    pair = start_pair(NamedNodes(ray_cluster))
    _send(weights, pair.receivers)
    pair.memory_stats()
    kill_and_wait(pair.receivers[1].actor)
    with pytest.raises(GenerationError, match="beside rank 1 on node node 1 failed in generate: ActorDied") as caught:
        pair.generate(REQUEST)
    assert caught.value.place == (1, "node 1")
    kill_and_wait(pair._relays.actors[0])
    with pytest.raises(GenerationError, match="beside rank 0 on node node 0 failed in memory_stats: ActorDied"):
        pair.memory_stats()


def test_weights_change_in_flight_on_several_nodes(ray_cluster, start_pair, weights):
    pair = start_pair(ApartCluster(ray_cluster), InFlightUpdates(recomputes_kv_cache=False))
    _send(weights, pair.receivers)
    num_rows = 160
    sampling = SamplingParams(50, 1.0, 1.0, None, (), 11)
    request = GenerationRequest([[5, 6, 7]] * num_rows, list(range(num_rows)), 3, sampling)
    with ThreadPoolExecutor(1) as thread:
        generating = thread.submit(pair.generate, request)
        while not generating.done():
            pair.prepare_for_generation(["weights"])
            _send(weights, pair.receivers)
            pair.prepare_for_generation(["kv_cache"])
        output = generating.result()
    assert [len(row) for row in output.output_ids] == [50] * num_rows
    for rows in (output.num_updates[: num_rows // 2], output.num_updates[num_rows // 2 :]):
        assert max(row[-1] for row in rows) > 0  # both engines went on with newer weights


def test_engines_apart_take_weights_by_broadcast_and_the_one_that_dies_is_named(ray_cluster, start_pair, weights):
    with Cluster(num_nodes=1, gpus_per_node=3, num_engine_devices=2) as cluster:
        apart = start_pair(cluster)
        assert (apart.capabilities.refit_transport, apart.capabilities.keeps_weights) == ("broadcast", True)
        transport = make_transport("broadcast", apart.receivers, verify=True)
        sender = transport.connect(ExportPlan.of(weights.items()), rank=0, bucket_bytes=1 << 14)
        assert sender.send(weights.items()) == apart.weights_checksum()
        kill_and_wait(apart.receivers[1].actor)
        with pytest.raises(EngineLostError, match=r"has lost generation engine 1 \(device 2\) with the weights model"):
            sender.send(weights.items())
        apart.shutdown()


def test_an_unknown_model_type_is_an_error_of_the_construction(ray_cluster):
    generation = make_generation(POLICY | {"hf_config": QWEN3 | {"model_type": "qwen99"}}, ray_cluster)
    with pytest.raises(GenerationError, match=r"failed in its construction: ValueError: .*qwen99"):
        generation.wait_until_ready()
    generation.shutdown()


def test_recipes_may_name_the_registered_engines_and_these_registered_transports():
    assert get_args(GenerationConfig.__annotations__["backend"]) == tuple(ENGINES)
    assert TransformersGeneration.capabilities.refit_transport in TRANSPORTS


def test_an_unknown_backend_is_refused(ray_cluster):
    with pytest.raises(ValueError, match=r"policy\.generation\.backend is 'sglang', which is not supported here"):
        make_generation(POLICY | {"generation": {"backend": "sglang"}}, ray_cluster)
