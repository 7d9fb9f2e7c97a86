"""Tests what is refused before Ray starts, although the recipe alone is valid."""

import dataclasses
import importlib.util
import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from huggingface_hub import constants

from nemo_offload_rl.config import load
from nemo_offload_rl.hf_config import hf_config
from nemo_offload_rl.placement import cluster
from nemo_offload_rl.placement.rates import H200_RATES
from nemo_offload_rl.plan.decisions import Machine
from nemo_offload_rl.plan.host_budget import HostBudgetError
from nemo_offload_rl.run import preflight, runner
from nemo_offload_rl.run.failures import Restarts
from nemo_offload_rl.run.job import Job
from nemo_offload_rl.run.preflight import check_environment, machine_here, machine_of, resolve_for
from nemo_offload_rl.run.runner import EXIT_WRONG_RECIPE, run

ROOT = Path(__file__).parents[3]
DENSE = ROOT / "benchmarks" / "activation_cases" / "dense.yaml"
GRPO_1_5B = ROOT / "benchmarks" / "recipes" / "grpo_1_5B_random.yaml"
TINY = ROOT / "examples" / "configs" / "grpo_tiny_cpu.yaml"
MEGATRON = "policy.megatron_cfg"
OFFLOAD = [f"{MEGATRON}.fine_grained_activation_offloading=true", f"{MEGATRON}.offload_modules=[core_attn]"]
CAPTURE = [f"{MEGATRON}.cuda_graph_impl=transformer_engine", f"{MEGATRON}.cuda_graph_modules=[attn]"]
LIMIT = "++policy.residency.host_memory_limit_gib"
EXPANDS = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
# With this key the plan does not know the sizes of activations.
UNKNOWN = f"+{MEGATRON}.softmax_type=learnable"


def has_room_for(monkeypatch, nbytes):
    host = SimpleNamespace(hostname="here", available_bytes=nbytes, cgroup_free_bytes=None, memlock_bytes=None)
    monkeypatch.setattr(preflight, "host_facts", lambda: host)


@pytest.fixture
def check(monkeypatch):
    """Returns a function that checks a recipe as on a machine with GPUs, without their environment variables."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    has_room_for(monkeypatch, 1 << 35)
    for name in ("RAY_ADDRESS", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "NCCL_GRAPH_REGISTER"):
        monkeypatch.delenv(name, raising=False)

    def on_a_gpu(*overrides, environ=(), recipe=DENSE):
        for name, value in dict(environ).items():
            monkeypatch.setenv(name, value)
        validated = load(recipe, list(overrides))
        check_environment(resolve_for(machine_here(), validated.config, validated.algorithm).config["policy"])

    return on_a_gpu


def test_a_limit_that_is_too_small_is_said_with_what_is_missing(check):
    with pytest.raises(HostBudgetError, match=r"policy.residency.host_memory_limit_gib is 0\.1\.(.|\n)*are missing"):
        check(*OFFLOAD, f"{LIMIT}=0.1")
    check(*OFFLOAD, f"{LIMIT}=100")


def test_a_host_without_room_for_a_checkpoint_beside_the_run_is_said_before_ray_starts(check, monkeypatch):
    has_room_for(monkeypatch, 5 << 30)
    on = ["++policy.megatron_cfg.checkpoint.async_save=true", "checkpointing.enabled=true"]
    stays = ["policy.offload_optimizer_for_refit=false", "policy.offload_optimizer_for_logprob=false"]
    check(*stays)
    with pytest.raises(HostBudgetError, match=r"of here needs .*nothing was page-locked(.|\n)*async_save=false"):
        check(*stays, *on)


def test_vllm_has_to_be_installed(check):
    if importlib.util.find_spec("vllm") is not None:
        pytest.skip("vLLM is installed")
    with pytest.raises(ValueError, match='installed; run make setup EXTRAS="te vllm", or set it to transformers'):
        check("policy.generation.backend=vllm", recipe=TINY)


def test_packed_rows_of_the_longest_sequence_have_to_fit(check, monkeypatch):
    has_room_for(monkeypatch, 1 << 36)
    monkeypatch.setattr(preflight, "gpu_facts", lambda: [SimpleNamespace(total_bytes=23 << 30)])
    with pytest.raises(ValueError, match=r"policy\.sequence_packing\.train_mb_tokens .* 1\.78 GiB"):
        check(recipe=GRPO_1_5B)
    check(*(f"policy.sequence_packing.{name}_mb_tokens=512" for name in ("train", "logprob")), recipe=GRPO_1_5B)


def test_activations_of_unknown_sizes_need_a_limit(check):
    message = (
        rf"cannot be computed \({MEGATRON}.softmax_type changes the model's sizes in a way that the plan does not know "
        r"\(found 'learnable'\).*\); give it in policy\.activation_offload\.host_memory_limit_gib\.$"
    )
    with pytest.raises(ValueError, match=message):
        check(*OFFLOAD, UNKNOWN)
    check(*OFFLOAD, UNKNOWN, "++policy.activation_offload.host_memory_limit_gib=4")
    check(UNKNOWN)


def test_a_model_of_a_hub_that_is_out_of_reach_is_refused(check, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"'org/model', which is neither a folder nor in the cache of the hub"):
        check("policy.model_name=org/model", "policy.hf_config=null")


def test_a_model_of_the_hubs_cache_is_planned_as_one_in_the_recipe(tmp_path, monkeypatch):
    fields = yaml.safe_load(GRPO_1_5B.read_text())["policy"]["hf_config"]
    for path, text in (("snapshots/0123/config.json", json.dumps(fields)), ("refs/main", "0123")):
        (tmp_path / "models--org--model" / path).parent.mkdir(parents=True)
        (tmp_path / "models--org--model" / path).write_text(text)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    configs = [load(GRPO_1_5B, more).config for more in ([], ["policy.model_name=org/model", "policy.hf_config=null"])]
    in_recipe, of_hub = (resolve_for(Machine(has_gpus=True), config, "grpo").run for config in configs)
    assert of_hub.plan == in_recipe.plan
    assert of_hub.engine == in_recipe.engine


def test_a_models_folder_is_read(check, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "olmoe"}))
    with pytest.raises(ValueError, match=r"cannot be computed \(The model's model_type is 'olmoe'"):
        check(*OFFLOAD, f"policy.model_name={tmp_path}", "policy.hf_config=null")


IMPOSSIBLE = [
    ([], "The config of policy.model_name '.*' has an invalid value: "),
    ({"rms_norm_eps": "x"}, "The config of policy.model_name '.*' has an invalid value: "),
    ({"num_attention_heads": 0}, "The config of policy.model_name '.*' has an invalid value: ZeroDivisionError"),
    ({"num_attention_heads": 4, "head_dim": -1}, "has head_dim -1, but it must be an integer of at least 1; give"),
    ({"num_attention_heads": 4, "vocab_size": -1}, "has vocab_size -1, but it must be an integer of at least 1"),
    ({"intermediate_size": -1}, "has intermediate_size -1, but it must be an integer of at least 1; give"),
]


@pytest.mark.parametrize(("fields", "error"), IMPOSSIBLE)
def test_what_no_model_of_a_folder_can_have_is_said(check, tmp_path, fields, error):
    llama = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(fields and llama | fields))
    with pytest.raises(ValueError, match=error):
        check(*OFFLOAD, f"policy.model_name={tmp_path}", "policy.hf_config=null")


def test_graphs_do_not_go_with_expandable_segments_of_the_shell(check):
    check(*CAPTURE, environ=EXPANDS | {"NCCL_GRAPH_REGISTER": "0"})
    for environ in (EXPANDS | {"NCCL_GRAPH_REGISTER": "1"}, EXPANDS):
        check(environ=environ)
        with pytest.raises(ValueError, match=r"PYTORCH_CUDA_ALLOC_CONF has expandable_segments:True, with which CUDA"):
            check(*CAPTURE, environ=environ)
    check(*CAPTURE, f"{MEGATRON}.env_vars={{NCCL_GRAPH_REGISTER: '0'}}", environ=EXPANDS)


@pytest.mark.parametrize("has_gpus", [True, False])
def test_of_a_cluster_that_is_joined_the_nodes_count(monkeypatch, has_gpus):
    """Its nodes' sizes count; its environment is not this machine's."""
    host = SimpleNamespace(hostname="there", available_bytes=1 << 40, cgroup_free_bytes=None, memlock_bytes=None)
    rates = dataclasses.replace(H200_RATES, source="measured there")
    nodes = [(host, [8, 6], rates), (host, [7], H200_RATES)]
    monkeypatch.setattr(cluster, "starts_ray_here", lambda: False)
    joined = SimpleNamespace(has_gpus=has_gpus, on_each_node=lambda function: nodes)
    monkeypatch.setattr(cluster, "Cluster", lambda **_: nullcontext(joined))
    monkeypatch.setattr(preflight, "machine_here", lambda: pytest.fail("Ray is not started here"))
    monkeypatch.setattr(Job, "for_machine", lambda job, machine: machine)
    job = Job("grpo", load(TINY, []).config, [], None, None)
    with runner._start_cluster([job, job], Restarts(0)) as (_, jobs):
        assert jobs == [Machine(has_gpus, 6 if has_gpus else None, (host, host), rates)] * 2
    nodes.append((host, [None], rates))
    assert machine_of(joined).gpu_bytes is None  # one GPU's memory is not known


def test_a_value_that_the_model_cannot_have_is_said():
    """transformers itself refuses it; the recipe's schema accepts it."""
    policy = load(TINY, []).config["policy"]
    with pytest.raises(ValueError, match=r"policy.hf_config has an invalid value: (.|\n)*rms_norm_eps"):
        hf_config(policy | {"hf_config": {"model_type": "qwen3", "rms_norm_eps": "abc"}})
    with pytest.raises(ValueError, match=r"policy.hf_config_overrides.rms_norm_eps has a"):
        hf_config(policy | {"hf_config_overrides": {"rms_norm_eps": "abc"}})
    with pytest.raises(ValueError, match=r"model_type is 'vit', of which transformers has no causal language model"):
        hf_config(policy | {"hf_config": {"model_type": "vit"}})


def test_what_would_be_computed_otherwise_than_by_transformers_is_refused(check):
    gelu = "+policy.hf_config_overrides.hidden_act=gelu"
    with pytest.raises(ValueError, match=r"bias_activation_fusion is true, but the model's hidden_act is 'gelu'"):
        check(gelu, f"++{MEGATRON}.bias_activation_fusion=true")
    check(gelu, f"++{MEGATRON}.bias_activation_fusion=false")


@pytest.mark.parametrize("family", ["gemma", "gemma3_text", "gemma4_text"])
def test_the_gelu_of_gemma_is_not_fused(check, family):
    """megatron-core would refuse it after building the model, with a message that names no key of a recipe."""
    model = f"policy.hf_config={{_override_: true, model_type: {family}, num_hidden_layers: 2}}"
    with pytest.raises(ValueError, match=rf"bias_activation_fusion is true, but models of the family {family} compute"):
        check(model, f"++{MEGATRON}.bias_activation_fusion=true")
    check(model, f"++{MEGATRON}.bias_activation_fusion=false")


def test_nothing_is_refused_that_is_off_without_a_gpu(check, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    check(*OFFLOAD, *CAPTURE, UNKNOWN, environ=EXPANDS)


def test_a_model_that_is_larger_than_a_machine_without_gpus_is_refused(check, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    message = r"^Without GPUs, parameters, gradients and optimizer state take [\d,.]+ GiB of host memory .*, but [\d.]+"
    million, billion = ("hidden_size", "num_attention_heads"), ("intermediate_size", "vocab_size")
    for size in (*(f"{name}=1000000" for name in million), *(f"{name}=1000000000" for name in billion)):
        with pytest.raises(HostBudgetError, match=message):
            check("~warm_start", f"policy.hf_config.{size}", recipe=TINY)


def test_ray_is_not_started_for_it(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("ray.init", lambda *args, **kwargs: pytest.fail("Ray was started"))
    monkeypatch.chdir(tmp_path)  # locks the checkpoint folder, which tests in other processes also do
    overrides = [f"{LIMIT}=0.0001"]
    assert run(TINY, overrides, "grpo") == EXIT_WRONG_RECIPE
    assert "of host memory for offloading, but policy.residency.host_memory" in capsys.readouterr().err
