"""Tests how many tokens of a packed row `auto` chooses."""

import copy
from types import SimpleNamespace

import pytest

from benchmarks.model_shapes import QWEN2_1_5B, QWEN3_30B_A3B
from nemo_offload_rl.config import load
from nemo_offload_rl.hf_config import hf_config
from nemo_offload_rl.memory.units import GIB, MIB
from nemo_offload_rl.plan.activations import activation_facts
from nemo_offload_rl.plan.decisions import without_replayed_engine
from nemo_offload_rl.plan.plan import settings
from nemo_offload_rl.plan.planner import Planner
from nemo_offload_rl.plan.row_tokens import MARGIN, MOST_TOKENS, with_context_ranks, with_row_tokens
from nemo_offload_rl.plan.training_memory import forward_pass_bytes, least_activation_bytes, training_pass_bytes
from tests.unit.config.conftest import CONFIGS

ROOT = CONFIGS.parents[1]
GRPO = ROOT / "benchmarks" / "recipes" / "grpo_1_5B_random.yaml"
MEGATRON = "policy.megatron_cfg"
OFFLOAD = [f"{MEGATRON}.fine_grained_activation_offloading=true"]
OFFLOAD += [f"{MEGATRON}.offload_modules=[qkv_linear,core_attn,attn_proj]"]
N = 1_543_714_304
WORKSPACES = 96 * MIB
HOST = SimpleNamespace(hostname="here", available_bytes=1 << 38, cgroup_free_bytes=None, memlock_bytes=None)


def chosen(gpu_gib, *overrides, recipe=GRPO, model=QWEN2_1_5B, host=None):
    validated = load(recipe, list(overrides))
    before = copy.deepcopy(validated.config)
    planner = Planner(model, validated.algorithm, gpu_gib and int(gpu_gib * GIB), () if host is None else (host,))
    config, lines = with_row_tokens(validated.config, planner)
    assert validated.config == before
    packing = config["policy"]["sequence_packing"]
    return packing["train_mb_tokens"], packing["logprob_mb_tokens"], lines


def of_rows(tokens, *overrides, ranks=1):
    """Returns the policy with rows of so many tokens, as it is without a replayed engine, and their activations."""
    config = load(GRPO, [f"policy.sequence_packing.train_mb_tokens={tokens}", *overrides]).config
    policy = without_replayed_engine(config)[0]["policy"]
    return policy, activation_facts(QWEN2_1_5B, policy, world_size=ranks)


def test_the_estimate_of_a_training_pass_and_of_one_that_computes_log_probs():
    policy, facts = of_rows(16384)
    tokens, residual, logits = 16384, 16384 * 1536 * 2, 16384 * 151_936 * 2
    statistics = tokens * 4 * (1 + 12)
    layer = tokens * 2 * (2 * 1536 + 2 * 1536 + 2 * 256 + 2 * 1536 + 3 * 8960) + statistics
    # The logits' gradient, which is written over them, and then that of the weight and of the hidden states.
    output_layer = 2 * residual + logits + 151_936 * 1536 * 2 + residual
    [training] = training_pass_bytes(QWEN2_1_5B, policy, facts, None)
    assert training == 28 * layer + output_layer + WORKSPACES
    [forward] = forward_pass_bytes(QWEN2_1_5B, policy, facts)
    assert forward == 2 * residual + logits + WORKSPACES


GENERATION = "policy.generation"
VLLM = f"{GENERATION}.backend=vllm"
REPLAY = "++grpo.debug.replay_rollouts=rollouts"


COPIES = [
    ([f"{GENERATION}.top_k=5"], 0, 0, 0),  # the engine of transformers reports log-probs before filters
    ([f"{GENERATION}.temperature=0.7"], 1, 3, 3),
    ([f"{GENERATION}.temperature=0.7", REPLAY], 1, 3, 3),
    ([VLLM, f"{GENERATION}.top_k=5"], 2, 3, 3),
    ([VLLM, f"{GENERATION}.top_k=5", REPLAY], 2, 3, 3),
    ([VLLM, f"{GENERATION}.top_p=0.9"], 2, 3, 8),
]


@pytest.mark.parametrize(("sampling", "gradients", "copies", "copies_of_log_probs"), COPIES)
def test_where_no_kernel_reads_logits_they_have_gradients_and_copies(sampling, gradients, copies, copies_of_log_probs):
    """With a filter a step has log-probs of the whole vocabulary, too; top_p sorts it."""

    def passes(*overrides):
        policy, facts = of_rows(16384, *overrides)
        [training] = training_pass_bytes(QWEN2_1_5B, policy, facts, None)
        return training, *forward_pass_bytes(QWEN2_1_5B, policy, facts)

    (training, forward), (plain_training, plain_forward) = passes(*sampling), passes()
    logits, in_float32, of_weight = 16384 * 151_936 * 2, 1024 * 151_936 * 4, 151_936 * 1536 * 2
    assert forward - plain_forward == copies_of_log_probs * in_float32
    assert training - plain_training == max(0, gradients * logits + copies * in_float32 - of_weight)


def test_attention_of_ranks_that_share_a_row_takes_more_in_passes_without_gradients_too():
    tiles = [*FEW_LOGITS, f"++{MEGATRON}.mlp_tile_tokens=4096"]

    def forward(tokens, ranks):
        split = [f"{MEGATRON}.context_parallel_size={ranks}", f"cluster.gpus_per_node={ranks}"]
        return forward_pass_bytes(QWEN2_1_5B, *of_rows(tokens, *tiles, *split, ranks=ranks))[0]

    queries = 65_536 * 1536 * 2
    assert forward(131_072, 2) - forward(65_536, 1) == 2 * queries


FEW_LOGITS = [f"{MEGATRON}.use_fused_linear_logprobs=true", f"{MEGATRON}.fused_linear_logprobs_chunk_size=16"]
TILES = f"++{MEGATRON}.mlp_tile_tokens=16384"


def pass_bytes(tokens, *overrides):
    """Returns the least bytes of a training step, the most of its longest pass, and the most of log-probs."""
    policy, facts = of_rows(tokens, *FEW_LOGITS, *overrides)
    [least] = least_activation_bytes(QWEN2_1_5B, policy, facts)
    [training] = training_pass_bytes(QWEN2_1_5B, policy, facts, None)
    [forward] = forward_pass_bytes(QWEN2_1_5B, policy, facts)
    return least, training, forward


def test_in_tiles_an_mlp_saves_its_input_and_its_intermediates_are_those_of_a_tile():
    tokens = 131_072
    whole, tiled = pass_bytes(tokens), pass_bytes(tokens, TILES)
    residual, ffn = tokens * 1536 * 2, tokens * 8960 * 2
    assert whole[0] - tiled[0] == 28 * (residual + 3 * ffn)
    of_weights = 3 * 1536 * 8960 * (2 + 4)
    gradients, with_tiles = 2 * ffn + 2 * residual, 7 * residual + of_weights  # of the layer that is differentiated
    assert whole[1] - tiled[1] == 28 * (residual + 3 * ffn) + gradients - with_tiles
    # Without gradients it is the MLP that takes most, then attention, and again an MLP in large tiles.
    statistics = tokens * 4 * (1 + 12)
    attention = tokens * 2 * (2 * 1536 + 1536 + 2 * 256 + 1536) + statistics + tokens * 2 * (1536 + 2 * 256)
    assert whole[2] == residual + 2 * residual + 3 * ffn + WORKSPACES
    assert tiled[2] == residual + attention + WORKSPACES
    in_halves = 65_536 * (2 * 1536 + 3 * 8960) * 2
    large = pass_bytes(tokens, f"++{MEGATRON}.mlp_tile_tokens=65536")
    assert large[2] == residual + 2 * residual + in_halves + WORKSPACES
    # A tile of a short row is the row; its sums of gradients take more than the layer's other tensors.
    short = 8192
    in_one = short * (2 * 1536 + 3 * 8960) * 2
    saved = short * 2 * (2 * 1536 + 1536 + 2 * 256 + 1536 + 1536) + short * 4 * (1 + 12)
    working = short * 1536 * 2 + 2 * in_one + of_weights
    assert pass_bytes(short, TILES)[1] == 28 * saved + working + WORKSPACES


def test_megatrons_recomputation_holds_all_layers_of_a_segment():
    tokens, full = 131_072, f"{MEGATRON}.activation_checkpointing=true"
    one, two = (pass_bytes(tokens, TILES, full, f"+{MEGATRON}.recompute_num_layers={n}")[1] for n in (1, 2))
    layer = tokens * 2 * (4 * 1536 + 2 * 256 + 1536)
    assert two - one == pytest.approx(layer - 14 * tokens * 1536 * 2, rel=0.01)


FULL = [f"{MEGATRON}.activation_checkpointing=true", f"{MEGATRON}.use_fused_linear_logprobs=true"]


RECOMPUTED = [
    (["recompute_num_layers=3"], 10, 0, 3),
    (["recompute_num_layers=99"], 1, 0, 28),
    (["recompute_method=block", "recompute_num_layers=20"], 20, 0, 8 + 1),
    (["offload_modules=[layer_input,core_attn]"], 2, 2, 1),
    (["offload_modules=[layer_input,core_attn]", "activation_offload_fraction=0"], 28, 28, 1),
    (["offload_modules=[layer_input,core_attn]", "recompute_num_layers=3"], 2 + 2, 2 + 2, 1),
]


@pytest.mark.parametrize(("recipe", "inputs", "attentions", "layers"), RECOMPUTED)
def test_what_recomputation_keeps(recipe, inputs, attentions, layers):
    offloads = any("offload_modules" in one for one in recipe)
    on = [f"{MEGATRON}.fine_grained_activation_offloading=true"] if offloads else []
    policy, facts = of_rows(131072, *FULL, *on, *(f"++{MEGATRON}.{one}" for one in recipe))
    [taken] = training_pass_bytes(QWEN2_1_5B, policy, facts, settings(policy).activations)
    residual, attention = 131072 * 1536 * 2, 131072 * (1536 * 2 + 12 * 4)
    layer = 131072 * 2 * (2 * 1536 + 2 * 1536 + 2 * 256 + 2 * 1536 + 3 * 8960)
    gradients = 131072 * 2 * (2 * 8960 + 2 * 1536)
    kept = inputs * residual + attentions * attention
    assert taken == pytest.approx(kept + layers * layer + gradients, rel=0.01)
    [least] = least_activation_bytes(QWEN2_1_5B, policy, facts)
    assert least < taken


@pytest.mark.parametrize(("gpu_gib", "samples", "says"), [(139.8, 512, True), (24, 512, False), (139.8, 1, False)])
def test_a_line_says_where_rows_need_no_context_parallelism(gpu_gib, samples, says):
    sizes = [f"{MEGATRON}.context_parallel_size=2", "cluster.gpus_per_node=2"]
    length = ["policy.max_total_sequence_length=32768", "policy.train_micro_batch_size=1"]
    steps = [f"policy.train_global_batch_size={samples}", "grpo.num_generations_per_prompt=512"]
    config = load(GRPO, [*sizes, *length, *steps]).config
    found, lines = with_context_ranks(config, Planner(QWEN2_1_5B, "grpo", int(gpu_gib * GIB), ()))
    assert found is config
    assert [line.partition(",")[0] for line in lines] == says * [f"{MEGATRON}.context_parallel_size is 2"]


def test_a_larger_gpu_has_longer_rows_and_they_fit():
    sizes = [26, 30, 40, 60, 79.6, 139.8]
    found = [chosen(size)[0] for size in sizes]
    assert found == sorted(found)
    assert found[0] < found[2] < found[4] < found[5] == MOST_TOKENS
    for size, tokens in zip(sizes, found, strict=True):
        assert tokens % 1024 == 0 or tokens == 512
        for more, fits in ((0, True), (1024, tokens == MOST_TOKENS)):
            [taken] = training_pass_bytes(QWEN2_1_5B, *of_rows(tokens + more), None)
            assert (14 * N + MARGIN * taken + 3 * GIB <= size * GIB) is fits  # its own process and generation's


def test_beside_vllm_its_context_and_graphs_and_those_of_a_refit_count():
    [taken] = training_pass_bytes(QWEN2_1_5B, *of_rows(4096, VLLM), None)
    graphs = 28 * MIB
    needed = 14 * N + int(MARGIN * taken) + 4 * GIB + graphs  # 2 GiB of the policy's process, 2 of vLLM's
    assert chosen(needed / GIB, VLLM)[0] == 4096
    assert chosen((needed - graphs // 2) / GIB, VLLM)[0] < 4096


def test_the_lines_say_what_is_taken():
    train, logprob, [of_train, of_logprob] = chosen(40)
    assert of_train.startswith(f"packed rows of training have up to {train:,} tokens: they take an estimated ")
    assert of_train.partition("of the GPU's 40.00 GiB, and training state takes ")[2].startswith("20.13 GiB; ")
    assert of_logprob.startswith(f"packed rows of log-prob passes have up to {logprob:,} tokens: they take")
    assert of_logprob.partition("and training state takes ")[2].startswith("17.25")  # gradients come after these passes
    assert logprob > train


def test_one_key_alone_and_none():
    train, logprob = (f"policy.sequence_packing.{name}_mb_tokens=4096" for name in ("train", "logprob"))
    *tokens, lines = chosen(139.8, train)
    assert (tokens, len(lines)) == ([4096, MOST_TOKENS], 1)
    assert chosen(139.8, train, logprob) == (4096, 4096, [])
    assert chosen(139.8, "policy.sequence_packing.enabled=false") == ("auto", "auto", [])


def test_no_more_than_brings_something_and_no_less_than_a_sample():
    samples = "policy.train_micro_batch_size=1"
    for tokens, *overrides in (
        # All samples of a rank's optimizer step.
        (16 * 512, samples, "grpo.num_prompts_per_step=1"),
        (8 * 512, samples, "grpo.num_prompts_per_step=2", "cluster.gpus_per_node=4"),
        # The longest sample.
        (40_000, "policy.max_total_sequence_length=40000"),
        (40_064, "policy.max_total_sequence_length=40001"),
    ):
        assert chosen(139.8, *overrides)[:2] == (tokens, tokens)


def test_tensor_parallel_ranks_get_equal_parts():
    parallel = [f"{MEGATRON}.tensor_model_parallel_size=2", f"{MEGATRON}.sequence_parallel=true"]
    overrides = [*parallel, "cluster.gpus_per_node=2", "policy.sequence_packing.sequence_length_round=6"]
    train, _, _ = chosen(20, *overrides)
    assert train % 6 == 0
    assert 512 < train < MOST_TOKENS


def test_a_pair_stays_together():
    packed = [f"policy.sequence_packing.{key}" for key in ("enabled=true", "train_mb_tokens=auto")]
    recipe = CONFIGS / "dpo_tiny_cpu.yaml"
    pair = 2 * load(recipe).config["policy"]["max_total_sequence_length"]
    model = hf_config(load(recipe).config["policy"]).to_dict()
    small = chosen(2.2, *packed, recipe=recipe, model=model)
    assert small[0] >= pair
    unknown, same, lines = chosen(None, *packed, recipe=recipe, model=model)
    assert unknown == same == pair * load(recipe).config["policy"]["train_micro_batch_size"]
    assert len(lines) == 2


def test_a_gpu_too_small_for_the_longest_sample_is_an_error_but_the_margin_alone_refuses_nothing():
    """State, two processes and the estimate are 24.78 GiB."""
    assert chosen(24.9)[0] == 512
    with pytest.raises(ValueError, match=r"policy\.sequence_packing\.train_mb_tokens"):
        chosen(24.7)
    with pytest.raises(ValueError, match=r"policy\.sequence_packing\.train_mb_tokens .* 1\.78 GiB"):
        chosen(23)


@pytest.mark.parametrize(
    ("gpu_gib", "overrides", "why"),
    [
        (None, [], "no GPU's memory is known here"),
        (80, [f"+{MEGATRON}.softmax_type=learnable"], "the model's sizes are not known before it is built"),
    ],
)
def test_where_sizes_are_not_known_it_is_that_of_padded_micro_batches(gpu_gib, overrides, why):
    train, logprob, lines = chosen(gpu_gib, *overrides, "policy.logprob_batch_size=8")
    assert (train, logprob) == (4 * 512, 8 * 512)
    assert [why in line for line in lines] == [True, True]


def test_offloaded_activations_make_rows_longer_as_far_as_the_host_holds_them():
    plain = chosen(60)[0]
    offloaded = chosen(60, *OFFLOAD, host=HOST)[0]
    assert plain < offloaded < MOST_TOKENS
    small = SimpleNamespace(**{**vars(HOST), "available_bytes": 24 << 30})
    assert 512 < chosen(60, *OFFLOAD, host=small)[0] < offloaded
    limited = [*OFFLOAD, "++policy.residency.host_memory_limit_gib=23"]
    assert 512 < chosen(60, *limited)[0] < offloaded


def test_recomputation_and_logits_in_chunks_make_rows_longer():
    plain = chosen(28)[0]
    again = chosen(28, f"{MEGATRON}.activation_checkpointing=true")[0]
    chunks = chosen(28, f"{MEGATRON}.activation_checkpointing=true", f"{MEGATRON}.use_fused_linear_logprobs=true")[0]
    assert plain < again < chunks
    assert chosen(26)[1] < chosen(26, "policy.logprob_chunk_size=512")[1]


def test_experts_and_pipeline_stages_are_counted():
    experts = ["policy.hf_config=null", "cluster.gpus_per_node=8", f"{MEGATRON}.expert_model_parallel_size=8"]
    stages = [f"{MEGATRON}.pipeline_model_parallel_size=2", "cluster.num_nodes=2"]
    assert 512 < chosen(139.8, *experts, model=QWEN3_30B_A3B)[0] < MOST_TOKENS
    assert 512 < chosen(100, *experts, *stages, model=QWEN3_30B_A3B)[0] < MOST_TOKENS
