"""Tests vLLM generation without a GPU: arguments, seeds, answers, and which weights are loaded."""

import contextlib
import gc
import os
import pickle
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from huggingface_hub import constants
from support import engine_conformance
from support.ranks import run_ranks

from nemo_offload_rl.generation import vllm_arguments, vllm_generator
from nemo_offload_rl.generation.interface import GenerationOutput, GenerationRequest, InFlightUpdates, SamplingParams
from nemo_offload_rl.generation.sampling import row_seed, row_uniforms
from nemo_offload_rl.generation.saved_memory import SavedMemory
from nemo_offload_rl.generation.vllm_arguments import engine_arguments, engine_environment, sampling_arguments
from nemo_offload_rl.generation.vllm_backend import ENGINE, VllmActor, VllmGeneration
from nemo_offload_rl.generation.vllm_generator import VllmGenerator, read_answer
from nemo_offload_rl.generation.vllm_worker import RefitExtension
from nemo_offload_rl.placement.network import LOOPBACK, reserve_port
from nemo_offload_rl.refit.plan import ExportPlan

SAMPLING = SamplingParams(10, 0.8, 0.9, None, (2, 3), 11)


def request(sampling: SamplingParams = SAMPLING) -> GenerationRequest:
    return GenerationRequest([[5, 6, 7], [5, 6, 7], [8] * 60], [0, 1, 0], 3, sampling)


def vllm_policy(**section):
    """Returns a recipe's policy section; `section` overrides keys of vllm_cfg."""
    policy = engine_conformance.policy("vllm")
    policy["generation"]["vllm_cfg"] |= section
    return policy


def arguments_of(policy, **options):
    return engine_arguments(policy, Path("/folder"), **options)


def test_an_engine_is_started_with_the_recipes_settings():
    policy = vllm_policy()
    section = policy["generation"]["vllm_cfg"]
    alone = arguments_of(policy)
    expected = {
        "model": "/folder", "load_format": "dummy", "dtype": "float32", "tensor_parallel_size": 1,
        "enable_expert_parallel": False, "gpu_memory_utilization": 0.2, "max_model_len": 64, "enforce_eager": True,
        "logprobs_mode": "processed_logprobs", "distributed_executor_backend": "uni",
    }  # fmt: skip
    assert alone.items() >= expected.items()
    assert "enable_prefix_caching" not in alone  # as vLLM has it
    section |= {"tensor_parallel_size": 2, "expert_parallel_size": 2, "enable_prefix_caching": False}
    policy["generation"]["vllm_kwargs"] = {"max_num_batched_tokens": 4096}
    split = arguments_of(policy)
    assert (split["distributed_executor_backend"], split["enable_expert_parallel"]) == ("external_launcher", True)
    assert (split["enable_prefix_caching"], split["max_num_batched_tokens"]) == (False, 4096)
    assert not {"data_parallel_size", "async_scheduling"} & set(split)
    section["expert_parallel_size"] = 6
    assert arguments_of(policy) == split | {"data_parallel_size": 3, "async_scheduling": False}
    section |= {"tensor_parallel_size": 1, "expert_parallel_size": 2}
    assert arguments_of(policy)["distributed_executor_backend"] == "external_launcher"


def test_an_engine_that_is_built_beside_the_policy_starts_whatever_is_free():
    behind, beside = vllm_policy(build_beside_policy=False), vllm_policy(build_beside_policy=True)
    assert not vllm_arguments.is_built_beside_policy(behind)
    assert vllm_arguments.is_built_beside_policy(beside)
    assert arguments_of(behind)["gpu_memory_utilization"] == 0.2
    assert 0 < arguments_of(beside)["gpu_memory_utilization"] < 0.01
    assert arguments_of(beside) | {"gpu_memory_utilization": 0.2} == arguments_of(behind)


class Started:
    """Replaces an actor: notes how it was built, and answers a request with its own number."""

    def __init__(self, number):
        self.number, self.built, self.meets, self.rows, self.verbs = number, {}, None, None, []
        for verb in ("build", "meeting", "process", "call"):
            setattr(self, verb, SimpleNamespace(remote=getattr(self, f"on_{verb}")))

    def on_process(self):
        return ("127.0.0.1", self.number)

    def on_meeting(self, port_range, *, on_one_node):
        self.meets = (port_range, on_one_node)
        return ("meeting of", self.number)

    def on_build(self, policy, **how):
        self.built = how
        return ("built", self.number)

    def on_call(self, pickled, shards, part):
        verb, _ = pickle.loads(pickled)
        self.verbs.append(verb)
        self.rows = len(pickle.loads(shards[part.shard]).prompt_ids) if verb == "generate" else None
        self.is_asked = part.wants_result
        return ("answer of", self.number)

    def answer(self):
        if self.rows is None:
            return [True]
        output = GenerationOutput([[self.number]] * self.rows, [[0.0]] * self.rows, ["stop"] * self.rows)
        return [output] if self.is_asked else []


def a_cluster(*, apart=False):
    return SimpleNamespace(
        engines_are_apart=apart, engine_share=0.5, threads_per_engine_bundle=1, master_port_range=(5000, 5010),
        actor_options=lambda bundle, share: {}, are_on_one_node=lambda bundles: max(bundles) < 2,
        node_of=lambda bundle: SimpleNamespace(id=0), wait=lambda refs, timeout: (refs, []), has_gpus=True,
    )  # fmt: skip


@pytest.fixture
def actors(monkeypatch):
    """Returns the actors that are started, in their order."""
    actors = []

    def start():
        actors.append(Started(len(actors)))
        return actors[-1]

    def get(refs):
        return [actors[number].answer() if kind == "answer of" else None for kind, number in refs]

    remote = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=start))
    monkeypatch.setattr("nemo_offload_rl.generation.vllm_backend.ray.remote", lambda _: remote)
    monkeypatch.setattr("nemo_offload_rl.placement.gather.ray.get", get)
    monkeypatch.setattr("nemo_offload_rl.placement.relay.ray.put", lambda value: value)
    return actors


@pytest.mark.parametrize(
    ("decided", "apart", "alone"), [(False, False, True), (True, False, False), (False, True, False)]
)
def test_the_policy_waits_for_an_engine_on_its_gpus_that_is_not_built_beside_it(actors, decided, apart, alone):
    generation = VllmGeneration(a_cluster(apart=apart), [(0,)], vllm_policy(build_beside_policy=decided))
    assert generation.capabilities.built_alone is alone
    assert VllmGeneration.capabilities.built_alone  # for any engine


ENGINES = [
    (1, 1, [(0,), (1,), (2,), (3,)], [0, 1, 2, 3]), (2, 1, [(0, 1), (2, 3)], [0, 2]), (4, 4, [(0, 1, 2, 3)], [0]),
    (1, 2, [(0, 1), (2, 3)], [0, 1, 2, 3]), (2, 4, [(0, 1, 2, 3)], [0, 2]),
]  # fmt: skip


@pytest.mark.parametrize(("tp", "ep", "engines", "replicas"), ENGINES)
def test_the_processes_of_an_engine_meet_and_its_replicas_share_out_the_rows(actors, tp, ep, engines, replicas):
    policy = vllm_policy(tensor_parallel_size=tp, expert_parallel_size=ep)
    size = ENGINE.bundles_per_engine(policy, a_cluster())
    assert {len(bundles) for bundles in engines} == {size}
    generation = VllmGeneration(a_cluster(), engines, policy)
    for bundles in engines:
        first, meets = bundles[0], size > 1
        assert actors[first].meets == (((5000, 5010), max(bundles) < 2) if meets else None)
        assert [actors[bundle].built["rank"] for bundle in bundles] == list(range(size))
        assert {actors[bundle].built["meeting"] for bundle in bundles} == {("meeting of", first) if meets else None}
    output = generation.generate(GenerationRequest([[5]] * 5, list(range(5)), 0, SAMPLING))
    answered = [row[0] for row in output.output_ids]
    assert (sorted(set(answered)), answered) == (replicas, sorted(answered))
    rows_of = [answered.count(number) for number in replicas]
    assert max(rows_of) - min(rows_of) <= 1
    assert [actor.rows for actor in actors] == [rows_of[number // tp] for number in range(4)]


def test_the_first_process_of_an_engine_keeps_the_port_where_they_meet(monkeypatch):
    monkeypatch.setattr("nemo_offload_rl.generation.actor_engines.ignore_ending_signals", lambda: None)
    with reserve_port(LOOPBACK, None) as reserved:
        low = reserved.getsockname()[1]
    actors = [VllmActor(), VllmActor()]
    first, second = (actor.meeting((low, low + 50), on_one_node=True) for actor in actors)
    assert first.address == second.address == LOOPBACK
    assert first.port != second.port
    assert {first.port, second.port} <= set(range(low, low + 51))
    for actor in actors:
        actor._reserved.close()


def test_a_node_reads_the_model_from_the_hub_and_its_vllm_only_the_folder(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    offline = []

    def note(*arguments, **more):
        offline.append((constants.HF_HUB_OFFLINE, os.environ["HF_HUB_OFFLINE"]))
        return MagicMock()

    monkeypatch.setattr("nemo_offload_rl.generation.actor_engines.ignore_ending_signals", lambda: None)
    monkeypatch.setattr("nemo_offload_rl.hf_config.hf_config", note)
    monkeypatch.setattr("nemo_offload_rl.data.tokenizer.load_tokenizer", note)
    monkeypatch.setattr("nemo_offload_rl.data.tokenizer.save_tokenizer", lambda *_: None)
    monkeypatch.setattr("nemo_offload_rl.generation.vllm_generator.VllmGenerator", MagicMock())
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=note))
    policy = vllm_policy()
    policy["generation"]["stop_strings"] = ["end"]
    assert "HF_HUB_OFFLINE" not in engine_environment(policy, num_threads=1)
    VllmActor().build(policy, rank=0, meeting=None, sleeps=True, in_flight=None)
    assert offline == [(False, ""), (False, ""), (True, "1")]


@pytest.mark.parametrize(("where", "sleeps"), [(None, True), ("discard", True), ("host", True), ("gpu", False)])
def test_an_engine_that_stays_awake_is_built_so_and_not_asked_to_sleep(actors, where, sleeps):
    policy = vllm_policy()
    policy["residency"]["generation_weights"] = where
    generation = VllmGeneration(a_cluster(), [(0,)], policy)
    [actor] = actors
    assert actor.built["sleeps"] is sleeps
    assert generation.capabilities.keeps_weights is (where in ("host", "gpu"))
    assert len(generation.start_finish_generation()) == (1 if sleeps else 0)
    generation.finish_generation()
    assert generation.prepare_for_generation(["kv_cache"]) is sleeps  # as the actor answers, if it is asked
    assert actor.verbs == ["finish_generation", "prepare_for_generation"] * sleeps


def test_an_engines_environment_has_the_recipes_variables():
    own = {"OMP_NUM_THREADS": "1", "PYTORCH_CUDA_ALLOC_CONF": "x"}
    assert engine_environment(vllm_policy(), num_threads=5) == {"OMP_NUM_THREADS": "5"} | vllm_arguments.ENVIRONMENT
    assert engine_environment(vllm_policy(env_vars=own), num_threads=5) == own | vllm_arguments.ENVIRONMENT


def test_each_row_has_its_limit_its_stops_and_its_seed():
    rows = [sampling_arguments(request(), row, 64) for row in range(3)]
    assert [row["max_tokens"] for row in rows] == [10, 10, 4]
    assert rows[0]["seed"] == row_seed(11, 3, [5, 6, 7], 0)
    assert len({row["seed"] for row in rows}) == 3
    # All ends that count are among the stop tokens.
    wanted = {"temperature": 0.8, "top_p": 0.9, "top_k": 0, "stop_token_ids": [2, 3], "ignore_eos": True}
    assert rows[0].items() >= {**wanted, "bad_words": []}.items()
    greedy = sampling_arguments(request(SamplingParams(10, 0.0, 0.9, 5, (), 11)), 0, 64)
    assert greedy.items() >= {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": None}.items()


WHOLE_TEXT = {"include_stop_str_in_output": True, "skip_special_tokens": False}


@pytest.mark.parametrize(
    ("key", "words", "given"),
    [
        ("stop_strings", ("\n\n", "<|end|>"), {"stop": ["\n\n", "<|end|>"], "detokenize": True, **WHOLE_TEXT}),
        ("bad_words", ("<image>", "tea"), {"bad_words": ["<image>", "tea"], "detokenize": False}),
    ],
)
def test_stop_strings_and_bad_words_need_a_tokenizer_and_go_to_vllm_as_they_are(key, words, given):
    plain = sampling_arguments(request(), 0, 64)
    assert "stop" not in plain and plain["detokenize"] is False
    row = sampling_arguments(request(replace(SAMPLING, **{key: words})), 0, 64)
    assert row.items() >= {"stop_token_ids": [2, 3], **given}.items()
    policy = vllm_policy()
    assert arguments_of(policy)["skip_tokenizer_init"] is True
    policy["generation"][key] = list(words)
    assert arguments_of(policy)["skip_tokenizer_init"] is False


def test_a_seed_depends_on_what_the_uniforms_depend_on():
    seeds = {row_seed(*key) for key in [(3, 9, [5, 6], 0), (4, 9, [5, 6], 0), (3, 8, [5, 6], 0), (3, 9, [6, 5], 0)]}
    assert len(seeds | {row_seed(3, 9, [5, 6], 1)}) == 5
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert row_uniforms(3, 9, [[5, 6]], [0], 1) == row_uniforms(3, 9, [[5, 6]], [0], 1)


def answer(reason: str):
    """Returns an object like `vllm.RequestOutput` whose second token is not the most likely one."""
    of_tokens = ({5: -0.5}, {9: -0.1, 2: -3.0})
    logprobs = [{token: SimpleNamespace(logprob=one) for token, one in given.items()} for given in of_tokens]
    return SimpleNamespace(outputs=[SimpleNamespace(token_ids=[5, 2], logprobs=logprobs, finish_reason=reason)])


def test_an_answer_has_the_log_probs_of_its_tokens():
    assert read_answer(answer("stop")) == ([5, 2], [-0.5, -3.0], "stop")
    with pytest.raises(RuntimeError, match="ended a request with 'abort'"):
        read_answer(answer("abort"))


class StandIn(RefitExtension):
    """Replaces `vllm.LLM` and its worker: a model whose weights load, and an engine that answers no request."""

    def __init__(self):
        self.model = torch.nn.Linear(3, 2)
        self.state_of_requests = torch.arange(4)
        self.refit_saved = SavedMemory([self.state_of_requests])
        self.calls = []

    def get_model(self):
        return self.model

    def refit_load(self, named_tensors):
        for name, tensor in named_tensors:
            if name == "unknown":
                raise ValueError("vLLM's model cannot load the weight 'unknown'")
            self.model.get_parameter(name).data.copy_(tensor)
            self.refit_unfilled_names.discard(name)

    def collective_rpc(self, method, args):
        return [getattr(self, method)(*args)]

    def sleep(self, level):
        self.calls.append(("sleep", level))
        if level == 2:
            self.state_of_requests.fill_(-1)

    def wake_up(self, tags):
        self.calls.append(("wake_up", tags))

    def reset_prefix_cache(self):
        self.calls.append("reset_prefix_cache")
        return True


WEIGHTS = {"weight": torch.ones(2, 3), "bias": torch.zeros(2)}
TOO_LONG = GenerationRequest([[1] * 64], [0], 0, SAMPLING)


@pytest.fixture(autouse=True)
def no_pools(monkeypatch):
    monkeypatch.setattr(vllm_generator, "vllm_pools", dict)


def make_generator(engine=None, *, loaded=False, **options):
    generator = VllmGenerator(engine or StandIn(), precision="float32", max_sequence_length=64, **options)
    generator.prepare_refit_info(ExportPlan.of(WEIGHTS.items()))
    if loaded:
        generator.load_weights(list(WEIGHTS.items()))
    return generator


@pytest.fixture
def generator():
    return make_generator()


@pytest.mark.parametrize("fails", [False, True])
def test_no_garbage_is_collected_while_it_generates(generator, monkeypatch, fails):
    def generate(prompts, parameters, *, use_tqdm):
        assert not gc.isenabled()
        if fails:
            raise RuntimeError("no answer")
        return [answer("stop") for _ in prompts]

    monkeypatch.setattr(vllm_generator, "_sampling_params", list)
    monkeypatch.setattr(generator._llm, "generate", generate, raising=False)
    generator.load_weights(list(WEIGHTS.items()))
    with pytest.raises(RuntimeError, match="no answer") if fails else contextlib.nullcontext():
        assert generator.generate(request()).output_ids == [[5, 2]] * 3
    assert gc.isenabled()


def test_it_waits_for_every_weight_of_each_refit(generator):
    with pytest.raises(RuntimeError, match=r"have not been loaded, 2 are missing \(bias, weight\)"):
        generator.generate(TOO_LONG)
    generator.load_weights(list(WEIGHTS.items())[:1])
    with pytest.raises(RuntimeError, match=r"have not been loaded, 1 are missing \(bias\)"):
        generator.generate(TOO_LONG)
    generator.load_weights(list(WEIGHTS.items())[1:])
    assert generator.generate(TOO_LONG).finish_reasons == ["length"]
    assert generator.weights_checksum().keys() == WEIGHTS.keys()
    generator.finish_generation()
    assert ("sleep", 2) in generator._llm.calls
    generator.finish_generation()  # it is asleep already
    assert generator._llm.state_of_requests.tolist() == [-1] * 4
    generator.prepare_for_generation(["weights"])
    assert generator._llm.state_of_requests.tolist() == [0, 1, 2, 3]  # no refit would restore them
    with pytest.raises(RuntimeError, match="have not been loaded, 2 are missing"):
        generator.generate(TOO_LONG)


def test_a_bias_that_vllm_would_ignore_is_refused_before_the_first_refit():
    generator = make_generator()
    named = {f"{layer}.{name}": tensor for layer in "ab" for name, tensor in WEIGHTS.items()}
    generator._llm.model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 2), "b": torch.nn.Linear(3, 2, bias=False)})
    with pytest.raises(ValueError, match=r"no parameter for 1 of the biases that the policy sends \(b\.bias\), and"):
        generator.prepare_refit_info(ExportPlan.of(named.items()))
    del named["b.bias"]
    generator.prepare_refit_info(ExportPlan.of(named.items()))


def test_an_engine_on_gpus_of_its_own_never_sleeps_and_waits_for_whole_refits():
    generator = make_generator(sleeps=False)
    assert generator.prepare_for_generation(["weights"])  # all of its memory is mapped already
    generator.load_weights(list(WEIGHTS.items()))
    generator.prepare_for_generation(["kv_cache"])
    generator.finish_generation()
    generator.prepare_for_generation(["weights", "kv_cache"])  # no refit: the policy has not changed
    assert generator.generate(TOO_LONG).finish_reasons == ["length"]
    generator.prepare_for_generation(["weights"])  # starts a refit
    generator.load_weights(list(WEIGHTS.items())[:1])
    with pytest.raises(RuntimeError, match=r"have not been loaded, 1 are missing \(bias\)"):
        generator.generate(TOO_LONG)
    assert generator._llm.calls == ["reset_prefix_cache"]
    assert arguments_of(vllm_policy(), sleeps=False)["enable_sleep_mode"] is False


def test_weights_that_wait_on_the_host_are_whole_after_sleep_and_gone_when_a_refit_begins():
    generator = make_generator(keeps_weights=True, loaded=True)
    generator.finish_generation()
    generator.prepare_for_generation(["weights", "kv_cache"])  # no refit: the policy has not changed
    assert generator.generate(TOO_LONG).finish_reasons == ["length"]
    assert generator._llm.calls == [("sleep", 1), ("wake_up", ["weights", "kv_cache"]), "reset_prefix_cache"]
    generator.finish_generation()
    generator.prepare_for_generation(["weights"])
    with pytest.raises(RuntimeError, match="have not been loaded, 2 are missing"):
        generator.generate(TOO_LONG)


GIB = 2**30


def test_the_kv_cache_is_mapped_behind_the_refit(generator):
    generator.finish_generation()
    assert not generator.prepare_for_generation(["weights"])  # no generation has been measured yet
    generator.load_weights(list(WEIGHTS.items()))
    assert generator._llm.calls == [("sleep", 2), ("wake_up", ["weights"])]
    generator.prepare_for_generation(["kv_cache"])
    assert generator._llm.calls[2:] == [("wake_up", ["kv_cache"])]
    assert generator.generate(TOO_LONG).finish_reasons == ["length"]


def test_no_room_for_the_kv_cache_names_the_keys_and_other_errors_stay_as_they_are(generator):
    def fail(tags):
        raise RuntimeError(message)

    generator.finish_generation()
    generator._llm.wake_up = fail
    message = "CUDA Error: out of memory at cumem_allocator.cpp:137"
    told = r"wake up vLLM \(kv_cache; CUDA Error: out of memory .* lower policy\.generation"
    with pytest.raises(RuntimeError, match=told):
        generator.prepare_for_generation(["kv_cache"])
    message = "CUDA Error: invalid argument"
    with pytest.raises(RuntimeError, match=r"^CUDA Error: invalid argument$"):
        generator.prepare_for_generation(["kv_cache"])


def test_a_policy_need_not_leave_first_where_there_is_room_for_twice_what_generations_took(monkeypatch):
    pools = {
        1: SimpleNamespace(tag="weights", handle=(0, 3 * GIB, 0, 0)),
        2: SimpleNamespace(tag="kv_cache", handle=(0, 10 * GIB, 0, 0)),
    }
    monkeypatch.setattr(vllm_generator, "vllm_pools", lambda: pools)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 16 * GIB)  # 3 more than the pools of 13
    generator = make_generator()

    def has_room(free_gib):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (int(free_gib * GIB), 0))
        generator.finish_generation()
        return generator.prepare_for_generation(["weights"])

    assert not has_room(20)  # no generation has been measured yet
    generator.load_weights(list(WEIGHTS.items()))
    generator.prepare_for_generation(["kv_cache"])
    generator.generate(TOO_LONG)
    assert has_room(18)  # the cache of 10, twice 3, and a margin of 2
    assert not has_room(17.9)


def _votes(rank, world_size, ports):
    torch.distributed.init_process_group("gloo", f"tcp://localhost:{ports[0]}", rank=rank, world_size=world_size)
    group = SimpleNamespace(world_size=world_size, cpu_group=torch.distributed.group.WORLD)
    vllm_generator._replica = lambda: group
    return [vllm_generator._agreed(wanted) for wanted in (False, rank == 0, rank == 1, True)]


def test_all_processes_of_a_replica_hold_once_weights_wait_in_one():
    assert run_ranks(_votes, 2, num_ports=1) == [[False, True, True, True]] * 2


@pytest.mark.parametrize("shares_experts", [False, True])
def test_a_replica_without_rows_runs_if_others_need_its_experts(monkeypatch, shares_experts):
    monkeypatch.setattr(vllm_generator, "_sampling_params", list)
    engine = StandIn()
    engine.generate = lambda prompts, params, use_tqdm: engine.calls.append(("generate", prompts)) or []
    generator = make_generator(engine, shares_experts=shares_experts, loaded=True)
    nothing = generator.generate(GenerationRequest([], [], 0, SAMPLING))
    too_long = generator.generate(TOO_LONG)
    assert (nothing.output_ids, too_long.output_ids) == ([], [[]])
    assert [call for call in engine.calls if call[0] == "generate"] == [("generate", [])] * 2 * shares_experts


def test_the_prefix_cache_is_reset_after_each_refit_and_a_weight_not_taken_leaves_no_half_loaded_engine(generator):
    for _ in range(2):
        generator.load_weights(list(WEIGHTS.items()))
        generator.generate(TOO_LONG)
        generator.generate(TOO_LONG)
    assert generator._llm.calls == ["reset_prefix_cache"] * 2
    with pytest.raises(ValueError, match="'unknown'"):
        generator.load_weights([("unknown", torch.zeros(1))])
    with pytest.raises(RuntimeError, match="have not been loaded, 2 are missing"):
        generator.generate(TOO_LONG)


def test_a_parameter_that_the_policy_does_not_send_is_named(generator):
    generator.prepare_refit_info(ExportPlan.of([("weight", WEIGHTS["weight"])]))
    generator.load_weights([("weight", WEIGHTS["weight"])])
    with pytest.raises(ValueError, match=r"no weight for 1 of the parameters of vLLM's model \(bias\)"):
        generator.generate(TOO_LONG)


def test_another_type_is_refused_before_anything_is_sent(generator):
    with pytest.raises(ValueError, match=r"'weight' as torch\.bfloat16 \[2, 3\], but vLLM's weights"):
        generator.prepare_refit_info(ExportPlan.of([("weight", WEIGHTS["weight"].bfloat16())]))


def test_a_routers_bias_is_float32_whatever_the_other_weights_are():
    weights = {"weight": WEIGHTS["weight"].bfloat16(), "mlp.gate.e_score_correction_bias": torch.zeros(2)}
    generator = VllmGenerator(StandIn(), precision="bfloat16", max_sequence_length=64)
    generator.prepare_refit_info(ExportPlan.of(weights.items()))


def test_an_engine_that_changes_loaded_weights_is_refused():
    engine = StandIn()
    engine.model.process_weights_after_loading = lambda: None
    message = r"1 modules would compute with weights other than the policy's \( computes other ten"
    with pytest.raises(ValueError, match=message):
        make_generator(engine)


def test_it_needs_gpus(ray_cluster):
    if ray_cluster.has_gpus:
        pytest.skip("is for machines without a GPU")
    with pytest.raises(ValueError, match="backend is vllm, which needs GPUs, and the ranks have none"):
        ENGINE.bundles_per_engine(vllm_policy(), ray_cluster)


@pytest.mark.parametrize("recomputes", [False, True])
def test_tokens_know_how_often_the_weights_had_changed(monkeypatch, recomputes):
    """Weights come before the second step: row 0 has ended then, row 1 has two tokens, one of them under way."""
    llm, steps, resets = StandIn(), [], []
    states = {name: SimpleNamespace(external_req_id=name[0]) for name in ("0-a", "1-b")}
    running = {"1-b": SimpleNamespace(num_output_tokens=1, num_output_placeholders=1)}
    core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=SimpleNamespace(requests=running)))
    llm.llm_engine = SimpleNamespace(
        step=lambda: steps.append("a step") or "a step",
        output_processor=SimpleNamespace(request_states=states),
        engine_core=core,
        reset_prefix_cache=lambda *, reset_running_requests: resets.append(reset_running_requests),
    )

    def generate(prompts, parameters, *, use_tqdm):
        assert llm.llm_engine.step() == "a step"
        updates = threading.Thread(target=update)
        updates.start()
        while generator._gate.num_updates == 1:  # the first ones came before
            assert llm.llm_engine.step() == "a step"
        updates.join()
        return [SimpleNamespace(**vars(answer("stop")), request_id=str(row)) for row in range(2)]

    def update():
        generator.prepare_for_generation(["weights"])
        taken = len(steps)
        while steps and len(steps) < taken + 3:  # the replica generates until weights have been received
            time.sleep(0.001)
        first, *others = WEIGHTS.items()
        generator.load_weights([])  # such as a message that registers buckets
        generator.load_weights([first])
        if steps:
            assert generator._gate._is_holding
        generator.load_weights(others)
        generator.prepare_for_generation(["kv_cache"])

    monkeypatch.setattr(vllm_generator, "_sampling_params", list)
    monkeypatch.setattr(vllm_generator, "_replica", lambda: SimpleNamespace(world_size=1))
    llm.generate = generate
    generator = make_generator(llm, sleeps=False, in_flight=InFlightUpdates(recomputes))
    update()
    output = generator.generate(GenerationRequest([[5], [6]], [0, 0], 0, SAMPLING))
    assert output.held_s > 0
    assert output.num_updates == [[0, 0], [0, 1] if recomputes else [0, 0]]
    assert resets == [True] * recomputes
