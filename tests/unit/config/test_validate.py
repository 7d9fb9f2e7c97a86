"""Mistakes in recipes, and what the user is told about each."""

import pytest

from nemo_offload_rl.config import load
from tests.unit.config.conftest import CONFIGS

MEGATRON = "policy.megatron_cfg"


# One mistake each; the golden file has the message, and that it is the only one.
MISTAKES = {
    "unknown": "+grpo.num_prompts_per_stp=1 +policy.lr=1 +gpro.x=1 +env.arithmetic.rewrd=1 +data.train.num_digit=1 "
    "+checkpointing.latest_k=1 +grpo.invalid_tool_call_strategy=1 +policy.zzzzz=1 "
    "+policy.activation_offload.modules=[core_attn]",
    "of another type": "grpo.max_num_steps=ten grpo.max_num_steps='10' grpo.max_num_steps=1.5 grpo.max_num_steps=true "
    "grpo.max_num_steps=null grpo.normalize_rewards=1 grpo.normalize_rewards='true' policy.model_name=3 "
    "policy.model_name='' warm_start=null policy.tokenizer=arithmetic loss_fn.ratio_clip_max=inf data.train=3 "
    "policy.activation_offload.strict=1",
    "out of range": "grpo.num_prompts_per_step=0 loss_fn.ratio_clip_c=1.0 policy.generation.top_p=1.5 "
    "policy.generation.temperature=0 loss_fn.reference_policy_kl_type=k4 "
    "policy.activation_offload.host_memory_limit_gib=0 policy.residency.host_memory_limit_gib=0",
    "missing": "~cluster.num_nodes ~loss_fn ~data.train.dataset_name ~data.train.num_digits ~policy.model_name",
    "of upstream alone": "policy.generation.backend=sglang policy.precision=float16 data.train.dataset_name=squad "
    "+rm.seed=1 +sft.seed=1",
    "of the model": "+policy.hf_config_overrides={num_hidden_layers:0} +policy.hf_config_overrides={head_dim:'32'} "
    "+policy.hf_config_overrides={num_experts:8.0} +policy.hf_config_overrides={vocab_size:-1} "
    "+policy.hf_config_overrides={model_type:[a]}",
    "of residency": "policy.residency=automatic policy.residency=null policy.residency.table={generat:{params:keep}} "
    "policy.residency.table={inference:{params:keep}} +policy.residency.table.refit.weights=gpu "
    "+policy.residency.numa=auto +policy.residency.table.refit.optimiser_state=gpu "
    "+policy.residency.table.generate.grads=host +policy.residency.table.generate.params=hots "
    "+policy.residency.table.train.reference_weights=gpu policy.residency.table={generate:null}",
    "auto or a number": "policy.numa=atuo policy.numa=-1 policy.numa=true policy.numa=[0] policy.numa='0' "
    "policy.sequence_packing.train_mb_tokens=most policy.sequence_packing.logprob_mb_tokens=0",
    "of generation": "policy.generation.stop_strings=[''] policy.generation.stop_strings=x "
    "+policy.generation.bad_words=[''] +policy.generation.ignore_eos=1 ++policy.logprob_chunk_size=0",
}
# The same, below policy.megatron_cfg.
MEGATRON_MISTAKES = {
    "unknown": "moe_z_los_coeff=1 optimizer.log_num_zeros=1 cp_normalize=1 optimizer.lion_beta=1 "
    "distributed_data_parallel_config.bucket_sizes=1 scheduler.lr_decay_step=1",
    "of another type": "offload_modules=core_attn recompute_modules=[1] cuda_graph_modules=null init_method=normal "
    "use_fused_linear_logprobs=1 layernorm_epsilon=small optimizer.decoupled_lr='1e-3' moe_router_score_function=soft",
    "out of range": "activation_offload_fraction=1.5 activation_offload_fraction=-0.1 min_offloaded_tensor_size=-1 "
    "min_offloaded_tensor_size=1.5 delta_offload_bytes_across_pp_ranks=-1 cuda_graph_warmup_steps=0 "
    "fine_grained_offloading_max_inflight_offloads=-1",
    "not supported": "enabled=false moe_paged_stash=true hybrid_context_parallel=true cuda_graph_impl=local "
    "cuda_graph_impl=full_iteration enable_cuda_graph=true external_cuda_graph=true cuda_graph_scope=[attn] "
    "inference_cuda_graph_scope=block optimizer.optimizer_cuda_graph=true fp8=e4m3 fp4=e2m1 cpu_offloading=true "
    "hidden_size=8 params_dtype=bfloat16 optimizer.pin_cpu_grads=false optimizer.fp16=true "
    "num_microbatches_with_partial_activation_checkpoints=1 distributed_data_parallel_config.use_megatron_fsdp=true",
}


@pytest.mark.parametrize(
    "override",
    [
        *" ".join(MISTAKES.values()).split(),
        *(f"++{MEGATRON}.{override}" for override in " ".join(MEGATRON_MISTAKES.values()).split()),
    ],
)
def test_a_mistake_is_answered_by_one_message(override, error_of):
    error_of(override)


OTHER = "data.train={_override_:true,dataset_name:ResponseDataset,data_path:x,input_key:q,output_key:a,"


@pytest.mark.parametrize(
    "overrides",
    [
        # A dataset is checked as the kind that it names.
        "data.train.dataset_name=ResponseDataset ~data.train.num_problems ~data.train.seed",
        "data.train.dataset_name=HFDataset",
        "+data.train.data_path=x",
        f"{OTHER}splt:x}}",
        f"{OTHER}input_kye:x}}",
        "~warm_start policy.hf_config.num_attention_heads=0",
        # All mistakes of all kinds, and every rule that a key breaks.
        f"nope.key=1 +grpo.nope=1 +policy.draft.enabled=true grpo.seed=x policy.generation.backend=sglang "
        f"+{MEGATRON}.moe_z_loss_coeff=x {MEGATRON}.context_parallel_size=2 data.default.env_name=math "
        "warm_start.recipe=nope.yaml logger.log_dir=${nope} ~policy.generation.stop_token_ids",
        f"{MEGATRON}.fine_grained_activation_offloading=true {MEGATRON}.offload_modules=[attn_proj,core_atn]",
        # No consequence of one: train_global_batch_size, logprob_mb_tokens and more are computed from these.
        "grpo.num_prompts_per_step=ten policy.max_total_sequence_length=1.5",
        r"policy.generation.colocated='\${policy}'",
        f"policy.max_grad_norm=${{policy.model_name}} {MEGATRON}.optimizer.clip_grad=1.0",
        # The recipe of a warm start.
        "warm_start.recipe=nope.yaml",
        f"warm_start.recipe={CONFIGS}/grpo_math_1B_megatron.yaml",
        "+warm_start.overrides=['sft.seed=x','nope=1']",
        "+warm_start.overrides=['sft.export_hf=false']",
        "policy.hf_config.hidden_size=64",
        "+policy.hf_config.attention_bias=true",
        "~policy.hf_config.tie_word_embeddings",
        "cluster.gpus_per_node=2 ++warm_start.overrides=['cluster.gpus_per_node=4']",
        "cluster.gpus_per_node=0",
    ],
)
def test_mistakes_are_told_together_and_without_their_consequences(overrides, error_of):
    error_of(*overrides.split())


def test_mistakes_in_a_file_have_its_lines_in_its_order(tmp_path, error_of):
    recipe, grpo, sft = tmp_path / "recipe.yaml", CONFIGS / "grpo_tiny_cpu.yaml", CONFIGS / "sft_tiny_cpu.yaml"
    for text, *overrides in (
        ("policy: {}",),
        ("gpro: {}",),
        ("a: 1\nrm: {}",),
        (f"defaults: {sft}\ndata: {{train: {{dataset_name: oasst, split: train}}}}",),
        (f"defaults: {grpo}\nwarm_start:\n  recipe: {sft}\n  overrides:\n    - sft.seed=x\n    - nope=1\n",),
        (f"defaults: {grpo}\nwarm_start: {{recipe: {sft}}}\ngrpo:\n  seed: x\n  nope: 1", "loss_fn.ratio_clip_min=x"),
    ):
        recipe.write_text(text)
        error_of(*overrides, recipe=recipe)


def test_a_warm_start_is_checked_for_the_ranks_that_it_runs_on(error_of):
    three = ["cluster.gpus_per_node=3", "grpo.num_prompts_per_step=48", "policy.train_micro_batch_size=128"]
    error_of(*three)
    error_of(*three, "++warm_start.overrides=['sft.seed=x']")
    sizes = "'policy.train_global_batch_size=192','policy.train_micro_batch_size=64','sft.val_micro_batch_size=64'"
    fits = f"++warm_start.overrides=[{sizes},'sft.val_global_batch_size=192']"
    assert load(CONFIGS / "grpo_tiny_cpu.yaml", [*three, fits]).warm_start.config["cluster"]["gpus_per_node"] == 3


def test_a_warm_start_runs_as_the_policy_does():
    def warm(*overrides):
        config = load(CONFIGS / "grpo_tiny_cpu.yaml", overrides).warm_start.config
        return config["cluster"]["gpus_per_node"], config["policy"], config["policy"]["megatron_cfg"]

    two, megatron = "cluster.gpus_per_node=2", f"{MEGATRON}.tensor_model_parallel_size=2"
    assert (warm()[1]["train_micro_batch_size"], warm(two)[1]["train_micro_batch_size"]) == (128, 64)
    _, policy, fields = warm("policy.precision=bfloat16", f"{MEGATRON}.optimizer.bf16=true")
    assert (policy["precision"], fields["optimizer"]["bf16"]) == ("bfloat16", True)
    apart = ["policy.generation.colocated.enabled=false", "++policy.generation.colocated.resources.gpus_per_node=1"]
    assert warm(two, *apart)[0] == 1
    warm(two, "++warm_start.overrides=['cluster.gpus_per_node=2']")
    divided = [megatron, f"{MEGATRON}.sequence_parallel=true", "policy.make_sequence_length_divisible_by=2", two]
    assert warm(*divided)[2].items() >= {"tensor_model_parallel_size": 2, "sequence_parallel": True}.items()


def test_the_warm_start_recipe_lies_beside_the_file_that_names_it(tmp_path, monkeypatch):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"defaults: {CONFIGS / 'grpo_tiny_cpu.yaml'}\n")
    monkeypatch.chdir(tmp_path)
    warm_start = load(recipe).warm_start
    assert warm_start is not None
    assert warm_start.algorithm == "sft"
    assert warm_start.recipe.path == CONFIGS / "sft_tiny_cpu.yaml"


def test_fields_of_megatron_reach_the_config():
    fields = {"moe_z_loss_coeff": 1e-3, "attention_backend": "flash", "window_size": [128, 0]}
    overrides = [f"+{MEGATRON}.{name}={value}" for name, value in fields.items()]
    overrides += [f"{MEGATRON}.optimizer.use_precision_aware_optimizer=true"]
    overrides += [f"+{MEGATRON}.optimizer.exp_avg_dtype=bfloat16"]
    overrides += [f"+{MEGATRON}.distributed_data_parallel_config.bucket_size=40000000"]
    megatron = load(CONFIGS / "grpo_tiny_cpu.yaml", overrides).config["policy"]["megatron_cfg"]
    assert megatron.items() >= fields.items()
    assert megatron["optimizer"]["exp_avg_dtype"] == "bfloat16"
    assert megatron["distributed_data_parallel_config"]["bucket_size"] == 40000000
    assert load(CONFIGS / "dpo_tiny_cpu.yaml", ["++policy.logprob_chunk_size=64"]).config["policy"][
        "logprob_chunk_size"
    ]


def test_sequence_parallel_alone_is_off_and_says_so():
    validated = load(CONFIGS / "grpo_tiny_cpu.yaml", [f"{MEGATRON}.sequence_parallel=true"])
    assert validated.config["policy"]["megatron_cfg"]["sequence_parallel"] is False
    assert f"{MEGATRON}.sequence_parallel is off, since {MEGATRON}.tensor_model_parallel_size is 1" in validated.notes
