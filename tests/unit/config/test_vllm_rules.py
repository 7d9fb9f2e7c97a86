"""Keys of generation with vLLM: what is refused, what loads, and what counts without a GPU or with another backend."""

import pytest

from nemo_offload_rl.config import for_machine, load
from nemo_offload_rl.config.installed import declared_fields
from nemo_offload_rl.config.rules import vllm
from nemo_offload_rl.generation.vllm_arguments import ENVIRONMENT
from tests.unit.config.conftest import CONFIGS, each_of, names_of
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
    enable_chunked_prefill: bool | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    moe_backend: MoEBackend = "auto"
"""


@pytest.fixture(autouse=True)
def installed_vllm(tmp_path, monkeypatch):
    """Replaces the installed vLLM, if there is one, by a source with a few arguments."""
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "arg_utils.py").write_text(SOURCE)
    monkeypatch.setattr(declared_fields, "source_folder", lambda: tmp_path)


BROKEN = {
    "vllm_section": [[f"~{VLLM}"]],
    "vllm_precision": [[f"{VLLM}.precision=bfloat16"]],
    "vllm_engine_gpus": [
        ["cluster.gpus_per_node=6", f"{VLLM}.tensor_parallel_size=4"],
        ["cluster.gpus_per_node=2", "cluster.num_nodes=3", *EXPERTS, f"{VLLM}.expert_parallel_size=4"],
    ],
    "vllm_expert_parallel_size": [
        [NODE, f"{VLLM}.tensor_parallel_size=4", f"{VLLM}.expert_parallel_size=2"],
        [NODE, f"{VLLM}.expert_parallel_size=8"],
        [NODE, *EXPERTS, f"{VLLM}.expert_parallel_size=8"],
    ],
    "vllm_async_scheduling": [
        [NODE, *EXPERTS, f"{VLLM}.expert_parallel_size=4", f"+{KWARGS}.async_scheduling=true"],
    ],
    "vllm_in_flight_replicas": [
        [
            *("cluster.gpus_per_node=8", "policy.generation.colocated.enabled=false", *EXPERTS),
            "policy.generation.colocated.resources.gpus_per_node=4",
            f"{VLLM}.expert_parallel_size=4",
            "grpo.async_grpo.enabled=true",
            "loss_fn.use_importance_sampling_correction=true",
            "grpo.async_grpo.in_flight_weight_updates=true",
        ],
    ],
    "vllm_verify_refit": [
        ["cluster.gpus_per_node=2", *EXPERTS, f"{VLLM}.expert_parallel_size=2", "++policy.verify_refit=true"],
    ],
    "vllm_temperature": [
        ["policy.generation.val_temperature=0.001"],
    ],
    "vllm_env_vars": [[f"+{VLLM}.env_vars.VLLM_HOST_IP=1.2.3.4"]],
    "vllm_kwargs": [
        [f"+{KWARGS}.quantization=fp8"],
        [f"+{KWARGS}.tensor_parallel_size=2"],
        [f"+{KWARGS}.kv_cache_memory_bytes=0.5"],
        [f"+{KWARGS}.max_num_seq=5"],
        [f"+{KWARGS}.enable_chunked_prefill=nein"],
        [f"+{KWARGS}.max_num_seqs=many"],
    ],
}


@each_of(BROKEN)
def test_what_cannot_be_is_refused_with_its_remedy(overrides, error_of):
    error_of(ON, *overrides)


def test_every_rule_has_a_broken_recipe():
    assert {*BROKEN, "colocated_resources", "colocated_refit_transport"} == names_of(vllm)


@pytest.mark.parametrize(
    ("name", "off", "on"),
    [("pipeline_parallel_size", "1", "2"), ("logprobs_mode", "processed_logprobs", "raw_logprobs")],
)
def test_a_key_of_nemo_rls_engine_may_have_the_value_that_this_one_has(name, off, on, error_of):
    assert name not in load(TINY, [ON, f"++{VLLM}.{name}={off}"]).config["policy"]["generation"]["vllm_cfg"]
    assert f"{name}: this package does not support" in error_of(ON, f"++{VLLM}.{name}={on}")


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
    given = [f"+{KWARGS}.moe_backend=triton", f"+{KWARGS}.enable_chunked_prefill=true"]
    assert load(TINY, [ON, *given]).config["policy"]["generation"]["vllm_kwargs"]["moe_backend"] == "triton"
    monkeypatch.setattr(declared_fields, "source_folder", lambda: None)  # workers may have vLLM
    assert load(TINY, [ON, f"+{KWARGS}.zzz=5"]).config["policy"]["generation"]["vllm_kwargs"]["zzz"] == 5


def test_an_engine_splits_whole_heads(error_of):
    error = error_of(ON, NODE, f"{VLLM}.tensor_parallel_size=8")
    assert f"{VLLM}.tensor_parallel_size: is 8, which does not divide the model's 4 attention heads" in error


@pytest.mark.parametrize("name", ["max_num_seqs", "kv_cache_memory_bytes", "dtype", "data_parallel_size"])
def test_an_argument_of_the_wrong_type_is_one_problem(name, one_problem_of):
    assert f"{KWARGS}.{name}: " in one_problem_of(ON, f"+{KWARGS}.{name}=abc")


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
    overrides = [f"++{VLLM}.pipeline_parallel_size=two", f"+{VLLM}.nope=1", f"+{KWARGS}.quantization=fp8"]
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
