"""Keys of generation with vLLM: what is refused, what loads, and what counts without a GPU or with another backend."""

import pytest

from nemo_offload_rl.config import for_machine, load
from nemo_offload_rl.config.installed import vllm_arguments
from nemo_offload_rl.config.rules import RULES, vllm
from nemo_offload_rl.generation.vllm_arguments import ENVIRONMENT
from tests.unit.config.conftest import CONFIGS, each_of
from tests.unit.config.test_upstream import MEGATRON_RECIPE, OUR_SECTIONS

TINY = CONFIGS / "grpo_tiny_cpu.yaml"
VLLM = "policy.generation.vllm_cfg"
KWARGS = "policy.generation.vllm_kwargs"
ON = "policy.generation.backend=vllm"
NODE = "cluster.gpus_per_node=8"
EXPERTS = (
    "policy.hf_config.model_type=qwen3_moe", "++policy.hf_config.num_experts=4",
    "++policy.hf_config.num_experts_per_tok=2", "++policy.hf_config.moe_intermediate_size=64",
)  # fmt: skip

SOURCE = """
class EngineArgs:
    async_scheduling: bool | None = None
    block_size: int | None = None
    enable_chunked_prefill: bool | None = None
    kv_cache_memory_bytes: int | None = CacheConfig.kv_cache_memory_bytes
    max_logprobs: int = ModelConfig.max_logprobs
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    moe_backend: MoEBackend = "auto"
    swap_space: float = 4
"""


@pytest.fixture(autouse=True)
def installed_vllm(tmp_path, monkeypatch):
    """Replaces the installed vLLM, if there is one, by a source with a few arguments."""
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "arg_utils.py").write_text(SOURCE)
    monkeypatch.setattr(vllm_arguments, "source_folder", lambda: tmp_path)


BROKEN = {
    "vllm_has_its_section": [([f"~{VLLM}"], "backend: is vllm, which needs the section policy.generation.v")],
    "vllm_is_asked_for_what_it_does_here": [
        ([f"{VLLM}.pipeline_parallel_size=2"], "pipeline_parallel_size: must be 1, since pipeline parallelism"),
        (
            [f"+{VLLM}.load_format=auto"],
            "load_format: must be 'dummy', since the first refit loads the policy's weights",
        ),
        ([f"+{VLLM}.kv_cache_dtype=fp8"], "kv_cache_dtype: must be 'auto', since a quantised KV cache is not"),
        ([f"+{VLLM}.skip_tokenizer_init=false"], "skip_tokenizer_init: must be true, since prompts"),
        ([f"+{VLLM}.logprobs_mode=raw_logprobs"], "logprobs_mode: must be 'processed_logprobs', since training"),
        ([f"+{VLLM}.num_first_layers_in_bf16=1"], "num_first_layers_in_bf16: must be 0, since fp8"),
        ([f"+{VLLM}.num_last_layers_in_bf16=1"], "num_last_layers_in_bf16: must be 0, since fp8"),
        ([f"+{VLLM}.use_deep_gemm=true"], "use_deep_gemm: must be false, since fp8"),
        ([f"+{VLLM}.http_refit_server_port=9000"], "http_refit_server_port: must be null, since refits over HTTP"),
        ([f"+{VLLM}.zmq_refit_server_port=9000"], "zmq_refit_server_port: must be null, since refits over ZeroMQ"),
        ([f"+{VLLM}.reset_encoder_cache_after_weight_update=true"], "must be false, since multimodal models"),
    ],
    "vllm_computes_in_the_policys_type": [
        ([f"{VLLM}.precision=bfloat16"], "is bfloat16, but refits send weights in policy.prec"),
    ],
    "vllm_takes_whole_sequences": [([f"{VLLM}.max_model_len=15"], "is 15, below policy.max_total_sequence_length (1")],
    "vllm_engines_share_out_the_nodes": [
        (
            [f"{VLLM}.tensor_parallel_size=2"],
            "tensor_parallel_size: is 2, so an engine has 2 GPUs, which neither divides cluster.gpus_per_node (1) nor "
            "is a multiple of it that divides generation's 1 GPUs; change one of the two",
        ),
        (["cluster.gpus_per_node=6", f"{VLLM}.tensor_parallel_size=4"], "which neither divides cluster.gpus_"),
        (
            ["cluster.gpus_per_node=2", "cluster.num_nodes=3", *EXPERTS, f"{VLLM}.expert_parallel_size=4"],
            "expert_parallel_size: is 4, so an engine has 4 GPUs, which neither divides cluster.gpus_per_node (2) nor "
            "is a multiple of it that divides generation's 6 GPUs",
        ),
    ],
    "vllm_splits_whole_heads": [
        (
            [NODE, f"{VLLM}.tensor_parallel_size=8"],
            "tensor_parallel_size: is 8, which does not divide the model's 4 attention heads; choose a divisor",
        ),
        (
            ["cluster.gpus_per_node=2", f"{VLLM}.tensor_parallel_size=2", "policy.hf_config.num_attention_heads=6",
             "policy.hf_config.num_key_value_heads=3"],
            "is 2, but the model has 3 key-value heads, and one of the two must divide the other",
        ),
    ],
    "vllm_divides_experts_among_its_gpus": [
        (
            [NODE, f"{VLLM}.tensor_parallel_size=4", f"{VLLM}.expert_parallel_size=2"],
            "must be 1, policy.generation.vllm_cfg.tensor_parallel_size (4) or a multiple of it, since vLLM",
        ),
        ([NODE, f"{VLLM}.expert_parallel_size=8"], "is 8, but policy.hf_config is a dense model, which has no experts"),
        ([NODE, *EXPERTS, f"{VLLM}.expert_parallel_size=8"], "is 8, but the model has 4 experts, at least one "),
    ],
    "vllms_replicas_wait_for_each_other": [
        (
            [NODE, *EXPERTS, f"{VLLM}.expert_parallel_size=4", f"+{KWARGS}.async_scheduling=true"],
            f"async_scheduling: is true, but {VLLM}.expert_parallel_size (4) is above {VLLM}.tensor_parallel_size (1), "
            "and replicas that share experts run every pass together; delete it",
        ),
    ],
    "vllm_checksums_are_of_whole_weights": [
        (
            ["cluster.gpus_per_node=2", f"{VLLM}.tensor_parallel_size=2", "++policy.verify_refit=true"],
            "verify_refit: is true, which needs policy.generation.vllm_cfg.tensor_parallel_size 1 and "
            "policy.generation.vllm_cfg.expert_parallel_size 1 with vllm",
        ),
        (
            ["cluster.gpus_per_node=2", *EXPERTS, f"{VLLM}.expert_parallel_size=2", "++policy.verify_refit=true"],
            "verify_refit: is true, which needs",
        ),
    ],
    "vllm_has_a_least_temperature": [
        (
            ["policy.generation.val_temperature=0.001"],
            "val_temperature: is 0.001, but vLLM raises temperatures below 0.01 to 0.01; set it to 0.01 or more",
        ),
    ],
    "vllms_own_variables_stay": [
        (
            [f"+{VLLM}.env_vars.VLLM_HOST_IP=1.2.3.4"],
            "env_vars.VLLM_HOST_IP: cannot be set: this package sets it for vLLM",
        ),
    ],
    "vllms_kv_cache_has_a_size": [
        ([f"+{KWARGS}.kv_cache_memory_bytes=0.5"], "kv_cache_memory_bytes: is 0.5, but must be a number of bytes"),
        ([f"+{KWARGS}.kv_cache_memory_bytes=0"], "kv_cache_memory_bytes: is 0, but must be a number of bytes per GPU"),
    ],
    "vllms_limits_are_numbers": [
        ([f"+{KWARGS}.max_num_seqs=0"], "max_num_seqs: is 0, but must be an integer of 1 or more, or null"),
        ([f"+{KWARGS}.max_num_batched_tokens=many"], "max_num_batched_tokens: is 'many', but must be an integer"),
    ],
    "vllm_arguments_are_not_the_recipes": [
        ([f"+{KWARGS}.quantization=fp8"], "quantization: cannot be set: refits load the policy's weights unquantised"),
        ([f"+{KWARGS}.disable_custom_all_reduce=false"], "disable_custom_all_reduce: cannot be set: this package sets"),
        ([f"+{KWARGS}.data_parallel_size=2"], f"cannot be set: {VLLM}.expert_parallel_size above tensor_paral"),
        ([f"+{KWARGS}.enable_eplb=true"], "enable_eplb: cannot be set: it moves experts between GPUs"),
        ([f"+{KWARGS}.kv_offloading_size=8"], "kv_offloading_size: cannot be set: keys and values kept"),
        ([f"+{KWARGS}.tensor_parallel_size=2"], "tensor_parallel_size: is set by policy.generation.vllm_cfg.tensor_p"),
    ],
    "vllm_knows_its_arguments": [
        ([f"+{KWARGS}.max_num_seq=5"], "max_num_seq: is not an argument of the installed vLLM; did you mean max_num_s"),
        ([f"+{KWARGS}.zzz=5"], "zzz: is not an argument of the installed vLLM; delete it"),
        (
            [f"+{KWARGS}.enable_chunked_prefill=nein"],
            "enable_chunked_prefill: is 'nein', but must be true or false or null for the installed vLLM",
        ),
        ([f"+{KWARGS}.max_logprobs=2.5"], "max_logprobs: is 2.5, but must be an integer for the installed vLLM"),
    ],
}  # fmt: skip


@each_of(BROKEN)
def test_what_cannot_be_is_refused_with_its_remedy(overrides, message, error_of):
    assert message in error_of(ON, *overrides)


def test_every_rule_has_a_broken_recipe():
    assert set(BROKEN) == {rule.check.__name__ for rule in RULES if rule.check.__module__ == vllm.__name__}


@pytest.mark.parametrize("row", vllm.ONLY_VALUES.items(), ids=lambda row: row[0])
def test_what_means_off_loads(row):
    name, (only, _) = row
    value = str(only).lower().replace("none", "null")
    assert load(TINY, [ON, f"++{VLLM}.{name}={value}"]).config["policy"]["generation"]["vllm_cfg"][name] == only


@pytest.mark.parametrize(
    ("nodes", "tp", "ep"), [(2, 4, 1), (4, 4, 1), (2, 4, 4), (2, 2, 4), (2, 1, 4), (1, 1, 2), (4, 2, 8)]
)
def test_an_engine_has_a_part_of_a_node_or_whole_nodes(nodes, tp, ep):
    sizes = [f"{VLLM}.tensor_parallel_size={tp}", f"{VLLM}.expert_parallel_size={ep}"]
    cluster = ["cluster.gpus_per_node=2", f"cluster.num_nodes={nodes}"]
    model = [*EXPERTS, "policy.hf_config.num_experts=8"]
    batches = ["~warm_start", "policy.train_micro_batch_size=16"]
    section = load(TINY, [ON, *sizes, *cluster, *model, *batches]).config["policy"]["generation"]["vllm_cfg"]
    assert (section["tensor_parallel_size"], section["expert_parallel_size"]) == (tp, ep)


def test_arguments_of_vllms_own_are_passed_on():
    generation = load(TINY, [ON, f"+{KWARGS}.max_num_batched_tokens=4096"]).config["policy"]["generation"]
    assert generation["vllm_kwargs"] == {"max_num_seqs": 512, "max_num_batched_tokens": 4096}


def test_arguments_of_vllms_own_types_are_left_to_vllm(monkeypatch):
    values = ["moe_backend=triton", "swap_space=4", "max_logprobs=null", "enable_chunked_prefill=true"]
    given = [f"+{KWARGS}.{value}" for value in values]
    assert load(TINY, [ON, *given]).config["policy"]["generation"]["vllm_kwargs"]["moe_backend"] == "triton"
    unknown = f"+{KWARGS}.zzz=5"
    monkeypatch.setattr(vllm_arguments, "source_folder", lambda: None)  # workers may have vLLM
    assert load(TINY, [ON, unknown]).config["policy"]["generation"]["vllm_kwargs"]["zzz"] == 5


@pytest.mark.parametrize("name", ["max_num_seqs", "kv_cache_memory_bytes", "dtype", "data_parallel_size"])
def test_an_argument_of_the_wrong_type_is_one_problem(name, one_problem_of):
    assert f"{KWARGS}.{name}: " in one_problem_of(ON, f"+{KWARGS}.{name}=abc")


@pytest.mark.parametrize("limit", ["-1", "abc", "true", "2.5"])
def test_limits_are_numbers_of_1_or_more(limit):
    with pytest.raises(ValueError, match=r"vllm_kwargs\.block_size: is .*, but must be an integer of 1 or more"):
        load(TINY, [ON, f"+{KWARGS}.block_size={limit}"])


def test_an_engine_has_as_many_sequences_under_way_as_vllm_has_graphs_for():
    def limit(*overrides):
        return load(TINY, overrides).config["policy"]["generation"].get("vllm_kwargs")

    assert limit(ON) == {"max_num_seqs": 512}
    assert limit(ON, f"+{KWARGS}.max_num_seqs=4") == {"max_num_seqs": 4}
    assert limit(ON, f"+{KWARGS}.max_num_seqs=null") == {"max_num_seqs": None}  # vLLM's own number
    assert not limit()  # transformers


def test_variables_that_the_engine_sets_are_those_that_are_refused():
    assert set(vllm.OWN_VARIABLES) == set(ENVIRONMENT)


def test_nemo_rls_recipe_keeps_its_generation():
    generation = load(MEGATRON_RECIPE, OUR_SECTIONS[1:]).config["policy"]["generation"]
    assert generation["backend"] == "vllm"
    assert generation["vllm_cfg"]["gpu_memory_utilization"] == 0.6


def test_with_another_backend_nothing_of_it_counts():
    overrides = [f"{VLLM}.pipeline_parallel_size=two", f"+{VLLM}.nope=1", f"+{KWARGS}.quantization=fp8"]
    assert "vllm_cfg" not in load(TINY, overrides).config["policy"]["generation"]


def test_an_unknown_key_is_one_with_vllm(one_problem_of):
    error = one_problem_of(ON, f"+{VLLM}.tensor_paralel_size=1")
    assert f"unknown key; nearest valid key: {VLLM}.tensor_parallel_size" in error


def test_without_a_gpu_the_hugging_face_model_generates():
    config = load(TINY, [ON]).config
    adapted, lines = for_machine(config, has_gpus=False)
    assert adapted["policy"]["generation"]["backend"] == "transformers"
    assert "policy.generation.backend is transformers on this machine: vllm needs a GPU" in lines
    assert for_machine(config, has_gpus=True)[0]["policy"]["generation"]["backend"] == "vllm"
