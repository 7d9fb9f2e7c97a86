"""Mistakes in recipes, and what the user is told about each."""

import pytest

from nemo_offload_rl.config import load
from tests.unit.config.conftest import CONFIGS

MEGATRON = "policy.megatron_cfg"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        # Unknown keys: the nearest one, here, elsewhere, in Megatron's configs.
        (
            "+grpo.num_prompts_per_stp=1",
            "grpo.num_prompts_per_stp: unknown key; nearest valid key: grpo.num_prompts_per_step",
        ),
        ("+policy.lr=1", "policy.lr: unknown key; nearest valid key: policy.megatron_cfg.optimizer.lr"),
        ("+gpro.x=1", "gpro: unknown key; nearest valid key: grpo"),
        ("+env.arithmetic.rewrd=1", "env.arithmetic.rewrd: unknown key; nearest valid key: env.arithmetic.reward"),
        ("+data.train.num_digit=1", "data.train.num_digit: unknown key; nearest valid key: data.train.num_digits"),
        (f"+{MEGATRON}.moe_z_los_coeff=1", f"unknown key; nearest valid key: {MEGATRON}.moe_z_loss_coeff"),
        (f"+{MEGATRON}.optimizer.log_num_zeros=1", f"nearest valid key: {MEGATRON}.optimizer.log_num_zeros_in_grad"),
        # No hint: keys that only share a word, and keys that are refused themselves.
        (f"+{MEGATRON}.cp_normalize=1", f"{MEGATRON}.cp_normalize: unknown key\n"),
        (f"+{MEGATRON}.optimizer.lion_beta=1", f"{MEGATRON}.optimizer.lion_beta: unknown key\n"),
        ("+checkpointing.latest_k=1", "checkpointing.latest_k: unknown key\n"),
        ("+grpo.invalid_tool_call_strategy=1", "grpo.invalid_tool_call_strategy: unknown key\n"),
        (
            f"+{MEGATRON}.distributed_data_parallel_config.bucket_sizes=1",
            f"unknown key; nearest valid key: {MEGATRON}.distributed_data_parallel_config.bucket_size",
        ),
        (
            f"+{MEGATRON}.scheduler.lr_decay_step=1",
            f"unknown key; nearest valid key: {MEGATRON}.scheduler.lr_decay_style",
        ),
        ("+policy.zzzzz=1", "policy.zzzzz: unknown key\n"),
        # Wrong types.
        ("grpo.max_num_steps=ten", "grpo.max_num_steps: must be an integer; found 'ten'\n"),
        ("grpo.max_num_steps='10'", "must be an integer; found '10'; write it without quotes"),
        ("grpo.max_num_steps=1.5", "must be an integer; found 1.5"),
        ("grpo.max_num_steps=true", "must be an integer; found true"),
        ("grpo.max_num_steps=null", "must be an integer; found null"),
        ("grpo.normalize_rewards=1", "must be true or false; found 1"),
        ("grpo.normalize_rewards='true'", "must be true or false; found 'true'; write it without quotes"),
        ("policy.model_name=3", "policy.model_name: must be text; found 3"),
        ("policy.model_name=''", "must be text that is not empty; found ''"),
        (f"{MEGATRON}.offload_modules=core_attn", "must be a list; found 'core_attn'; write [core_attn]"),
        (f"{MEGATRON}.recompute_modules=[1]", "recompute_modules.0: must be text; found 1"),
        ("warm_start=null", "warm_start: must be a section (a mapping); found null"),
        ("policy.tokenizer=arithmetic", "policy.tokenizer: must be a section (a mapping); found 'arithmetic'"),
        ("loss_fn.ratio_clip_max=inf", "must be a finite number; found inf"),
        (
            f"+{MEGATRON}.layernorm_epsilon=small",
            f"{MEGATRON}.layernorm_epsilon: must be float, as megatron-core's TransformerConfig says; found 'small'",
        ),
        (
            f"+{MEGATRON}.optimizer.decoupled_lr='1e-3'",
            "must be Optional[float], as megatron-core's OptimizerConfig says",
        ),
        (
            f"+{MEGATRON}.init_method=normal",
            "cannot be set in a recipe: it is a function in megatron-core's TransformerConfig",
        ),
        (f"+{MEGATRON}.moe_router_score_function=soft", "must be Literal['softmax', 'sigmoid', 'sqrtsoftplus']"),
        # Values out of range.
        ("grpo.num_prompts_per_step=0", "must be at least 1; found 0"),
        ("loss_fn.ratio_clip_c=1.0", "loss_fn.ratio_clip_c: must be above 1.0; found 1.0"),
        ("policy.generation.top_p=1.5", "must be at most 1.0; found 1.5"),
        ("policy.generation.temperature=0", "must be above 0.0; found 0"),
        ("loss_fn.reference_policy_kl_type=k4", "must be 'k1', 'k2' or 'k3'; found 'k4'\n"),
        # Missing keys.
        (
            "~cluster.num_nodes",
            "cluster.num_nodes: missing (its meaning: Number of nodes. 1 or more.)",
        ),
        ("~loss_fn", "loss_fn: missing (its meaning: The policy-gradient loss.)"),
        (
            "~data.train.dataset_name",
            "data.train.dataset_name: missing; it is 'arithmetic', 'ResponseDataset', 'HFDataset', 'Open",
        ),
        ("~data.train.num_digits", "data.train.num_digits: missing (its meaning: Digits of each summand."),
        ("data.train=3", "data.train: must be a section (a mapping); found 3"),
        # What upstream has and this package has not.
        (
            "policy.generation.backend=sglang",
            "is not supported here (found 'sglang'); set policy.generation.backend=vllm, or transformers",
        ),
        ("policy.precision=float16", "is not supported here (found 'float16'); set policy.precision=bfloat16"),
        (f"{MEGATRON}.enabled=false", "is not supported here (found false); set policy.megatron_cfg.enabled=true"),
        ("data.train.dataset_name=squad", "data.train.dataset_name: 'squad' is not supported here; give your data as"),
        ("+rm.seed=1", "rm: reward-model training is not supported here; delete the section"),
        ("+sft.seed=1", "sft: a recipe has one of the sections 'grpo', 'sft' or 'dpo', found grpo and sft; delete one"),
        # Fields that this package owns or does not support yet.
        (f"+{MEGATRON}.moe_paged_stash=true", "name expert_fc1 and moe_act in policy.megatron_cfg.offload_modules"),
        (f"++{MEGATRON}.hybrid_context_parallel=true", "this kind of context parallelism is not supported here"),
        (f"{MEGATRON}.cuda_graph_impl=local", "(found 'local'); use transformer_engine or none"),
        (f"{MEGATRON}.cuda_graph_impl=full_iteration", "full_iteration graphs fix the number of micro-batches (found"),
        (f"+{MEGATRON}.enable_cuda_graph=true", "set policy.megatron_cfg.cuda_graph_impl to transformer_engine"),
        (f"+{MEGATRON}.external_cuda_graph=true", "set policy.megatron_cfg.cuda_graph_impl to transformer_engine"),
        (
            f"+{MEGATRON}.cuda_graph_scope=[attn]",
            "old name (found ['attn']); list the modules in policy.megatron_cfg.cuda_graph_modules",
        ),
        (
            f"+{MEGATRON}.inference_cuda_graph_scope=block",
            "graphs of Megatron's inference are not supported here (found 'block'); leave it at null",
        ),
        (f"+{MEGATRON}.optimizer.optimizer_cuda_graph=true", "the optimizer's step is not captured here"),
        (f"+{MEGATRON}.fp8=e4m3", "fp8 and fp4 are not supported here yet"),
        (f"+{MEGATRON}.fp4=e2m1", "fp8 and fp4 are not supported here yet"),
        (
            f"+{MEGATRON}.cpu_offloading=true",
            "cpu_offloading is not supported here (found true); leave it at false or delete the key, and use "
            "policy.megatron_cfg.fine_grained_activation_offloading",
        ),
        (f"+{MEGATRON}.hidden_size=8", "comes from the model's Hugging Face config (found 8); set it there"),
        (
            f"+{MEGATRON}.params_dtype=bfloat16",
            "follows from policy.precision (found 'bfloat16'); set that key instead",
        ),
        (f"+{MEGATRON}.optimizer.pin_cpu_grads=false", "host memory of the CPU optimizer is always page-locked here"),
        (
            f"+{MEGATRON}.num_microbatches_with_partial_activation_checkpoints=1",
            "is not supported here (found 1); leave it at null",
        ),
        (f"{MEGATRON}.optimizer.fp16=true", "float16 training is not supported here (found true); use bfloat16"),
        (f"+{MEGATRON}.distributed_data_parallel_config.use_megatron_fsdp=true", "Megatron-FSDP is not supported here"),
        # Activation offloading and graphs, as far as single values tell.
        (f"{MEGATRON}.activation_offload_fraction=1.5", "must be at most 1.0; found 1.5"),
        (f"{MEGATRON}.activation_offload_fraction=-0.1", "must be at least 0.0; found -0.1"),
        (f"{MEGATRON}.min_offloaded_tensor_size=-1", "must be at least 0; found -1"),
        (f"{MEGATRON}.min_offloaded_tensor_size=1.5", "must be an integer; found 1.5"),
        (f"{MEGATRON}.delta_offload_bytes_across_pp_ranks=-1", "must be at least 0; found -1"),
        (f"{MEGATRON}.fine_grained_offloading_max_inflight_offloads=-1", "must be at least 0; found -1"),
        (f"{MEGATRON}.cuda_graph_warmup_steps=0", "must be at least 1; found 0"),
        (f"{MEGATRON}.offload_modules=[1]", "offload_modules.0: must be text; found 1"),
        (f"{MEGATRON}.cuda_graph_modules=attn", "must be a list; found 'attn'; write [attn]"),
        (f"{MEGATRON}.cuda_graph_modules=null", "must be a list; found null; write []"),
        ("policy.activation_offload.strict=1", "policy.activation_offload.strict: must be true or false; found 1"),
        ("policy.activation_offload.host_memory_limit_gib=0", "must be above 0.0; found 0"),
        (
            "+policy.activation_offload.modules=[core_attn]",
            "unknown key; policy.activation_offload has strict, host_memory_limit_gib\n",
        ),
        # Sizes of the model.
        (
            "+policy.hf_config_overrides={num_hidden_layers: 0}",
            "_overrides.num_hidden_layers: must be at least 1; found 0",
        ),
        ("+policy.hf_config_overrides={head_dim: '32'}", "must be an integer; found '32'; write it without quotes"),
        ("+policy.hf_config_overrides={num_experts: 8.0}", "num_experts: must be an integer; found 8.0"),
        ("+policy.hf_config_overrides={vocab_size: -1}", "policy.hf_config_overrides.vocab_size: must be at least 1"),
        ("+policy.hf_config_overrides={model_type: [a]}", "model_type: must be text; found ['a']"),
        # Residency.
        (
            "policy.residency=automatic",
            "policy.residency: must be auto or a section (a mapping): write auto to give every key the value "
            "that it has when absent; found 'automatic'\n",
        ),
        ("policy.residency=null", "policy.residency: must be a section (a mapping); found null"),
        (
            "policy.residency.table={generat: {params: keep}}",
            "residency.table.generat: unknown key; nearest valid key: policy.residency.table.generate\n",
        ),
        (
            "policy.residency.table={inference: {params: keep}}",
            "table.inference: unknown key; policy.residency.table has train, logprob, refit, generate\n",
        ),
        (
            "+policy.residency.table.refit.weights=gpu",
            "unknown key; policy.residency.table.refit has params, grads, optimizer_state, reference_weights\n",
        ),
        (
            "+policy.residency.numa=auto",
            "unknown key; nearest valid key: policy.numa\n",
        ),
        (
            "+policy.residency.table.refit.optimiser_state=gpu",
            "optimiser_state: unknown key; nearest valid key: policy.residency.table.refit.optimizer_state\n",
        ),
        (
            "+policy.residency.table.generate.grads=host",
            "policy.residency.table.generate.grads: must be 'gpu', 'dropped' or 'keep'; found 'host'\n",
        ),
        (
            "+policy.residency.table.generate.params=hots",
            "must be 'gpu', 'host', 'keep' or 'auto'; found 'hots'; did you mean",
        ),
        ("+policy.residency.table.train.reference_weights=gpu", "must be 'host'; found 'gpu'"),
        ("policy.residency.table={generate: null}", "table.generate: must be a section (a mapping); found null"),
        ("policy.residency.host_memory_limit_gib=0", "must be above 0.0; found 0"),
        ("~policy.model_name", "policy.model_name: missing (its meaning: "),
        ("policy.numa=atuo", "policy.numa: must be auto, none or a number (0 or more); found 'atuo'"),
        ("policy.numa=-1", "(0 or more); found -1"),
        (
            "policy.sequence_packing.train_mb_tokens=most",
            "must be auto or a number (1 or more); found 'most'",
        ),
        ("policy.generation.stop_strings=['']", "policy.generation.stop_strings.0: "),
        ("policy.generation.stop_strings=x", "policy.generation.stop_strings: must be a list"),
        ("+policy.generation.bad_words=['']", "policy.generation.bad_words.0: "),
        ("+policy.generation.ignore_eos=1", "policy.generation.ignore_eos: must be true or false"),
        ("policy.sequence_packing.logprob_mb_tokens=0", "must be auto or a number (1 or more); found 0"),
        ("policy.numa=true", "(0 or more); found true"),
        ("policy.numa=[0]", "(0 or more); found [0]"),
        ("policy.numa='0'", "(0 or more); found '0'"),
    ],
)
def test_a_mistake_is_answered_by_one_message(error_of, override, message):
    error = f"{error_of(override)}\n"
    assert message in error
    assert ": 1 problem\n" in error


def test_a_dataset_is_checked_as_the_kind_that_it_names(error_of):
    error = error_of("data.train.dataset_name=ResponseDataset", "~data.train.num_problems", "~data.train.seed")
    assert ": 2 problems\n" in error
    assert (
        "data.train.num_digits: is a key of dataset_name 'arithmetic', but data.train.dataset_name is "
        "'ResponseDataset', whose keys are data_path, input_key, output_key, split_validation_size, seed, prompt_file, "
        "system_prompt_file; delete it "
        "(on the command line: ~data.train.num_digits)\n" in f"{error}\n"
    )
    assert "data.train.data_path: missing (its meaning: The file, relative to" in error
    assert "nearest valid key" not in error
    assert "data.train.data_path: missing (its meaning: The folder, relative to" in error_of(
        "data.train.dataset_name=HFDataset"
    )
    assert "'ResponseDataset' or 'HFDataset', but data.train.dataset_name is 'arithmetic'" in error_of(
        "+data.train.data_path=x"
    )
    wrong = "data.train={_override_: true, dataset_name: ResponseDataset, data_path: x, input_key: q, output_key: a"
    assert error_of(f"{wrong}, splt: x}}").endswith(
        "data.train.splt: unknown key; data.train with dataset_name 'ResponseDataset' has data_path, input_key, "
        "output_key, split_validation_size, seed, prompt_file, system_prompt_file"
    )
    assert error_of(f"{wrong}, input_kye: x}}").endswith(
        "data.train.input_kye: unknown key; nearest valid key: data.train.input_key"
    )


def test_a_model_from_scratch_has_sizes_that_can_be(error_of):
    error = error_of("~warm_start", "policy.hf_config.num_attention_heads=0")
    assert error.endswith("policy.hf_config.num_attention_heads: must be at least 1; found 0")


def test_an_unknown_data_set_in_a_file_is_all_that_is_said(tmp_path, error_of):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"defaults: {CONFIGS / 'sft_tiny_cpu.yaml'}\ndata: {{train: {{dataset_name: oasst, split: train}}}}\n"
    )
    assert error_of(recipe=recipe).endswith("'tulu3_sft_mixture' or 'Nemotron-Cascade-2-SFT-Math'")


def test_a_recipe_without_an_algorithm(tmp_path, error_of):
    (tmp_path / "recipe.yaml").write_text("policy: {}\n")
    error = error_of(recipe=tmp_path / "recipe.yaml")
    assert "recipe.yaml: no section says which algorithm to run; a recipe has one of 'grpo', 'sft' or 'dpo'" in error
    (tmp_path / "recipe.yaml").write_text("gpro: {}\n")
    assert "did you mean grpo?" in error_of(recipe=tmp_path / "recipe.yaml")
    (tmp_path / "recipe.yaml").write_text("a: 1\nrm: {}\n")
    assert "recipe.yaml:2: rm: reward-model training is not supported here" in error_of(recipe=tmp_path / "recipe.yaml")


def test_all_mistakes_of_all_kinds_are_reported_at_once(error_of):
    error = error_of(
        "nope.key=1",
        "+grpo.nope=1",
        "+policy.draft.enabled=true",
        "grpo.seed=x",
        "policy.generation.backend=sglang",
        f"+{MEGATRON}.moe_z_loss_coeff=x",
        f"{MEGATRON}.context_parallel_size=2",
        "data.default.env_name=math",
        "warm_start.recipe=nope.yaml",
        "logger.log_dir=${nope}",
        "~policy.generation.stop_token_ids",
    )
    assert ": 11 problems\n" in error


def test_every_rule_that_a_key_breaks_is_reported(error_of):
    error = error_of(
        f"{MEGATRON}.fine_grained_activation_offloading=true", f"{MEGATRON}.offload_modules=[attn_proj, core_atn]"
    )
    assert "must name some of" in error
    assert "has attn_proj, whose input is the output of core_attn" in error
    assert ": 2 problems\n" in error


def test_a_consequence_of_a_mistake_is_not_reported_beside_it(error_of):
    # train_global_batch_size, sequence_packing.logprob_mb_tokens and more are computed from these.
    error = error_of("grpo.num_prompts_per_step=ten", "policy.max_total_sequence_length=1.5")
    assert ": 2 problems\n" in error


def test_an_escaped_reference_is_text_and_has_problems_of_its_own(error_of):
    error = error_of(r"policy.generation.colocated='\${policy}'")
    assert "policy.generation.colocated: must be a section (a mapping)" in error


def test_a_value_that_was_interpolated_says_from_where(error_of):
    error = error_of("policy.max_grad_norm=${policy.model_name}", "policy.megatron_cfg.optimizer.clip_grad=1.0")
    assert "must be a number; found 'tiny-qwen3' (from '${policy.model_name}')" in error


def test_problems_stand_in_the_order_of_the_files(tmp_path, error_of):
    recipe = tmp_path / "recipe.yaml"
    base = CONFIGS / "grpo_tiny_cpu.yaml"
    recipe.write_text(
        f"defaults: {base}\nwarm_start: {{recipe: {CONFIGS / 'sft_tiny_cpu.yaml'}}}\ngrpo:\n  seed: x\n  nope: 1\n"
    )
    lines = error_of("loss_fn.ratio_clip_min=x", recipe=recipe).splitlines()
    assert [line.strip().split(": ")[0] for line in lines[1:]] == ["command line", f"{recipe}:4", f"{recipe}:5"]


def test_the_warm_start_recipe_is_checked_too(tmp_path, error_of):
    assert "warm_start.recipe: there is no recipe" in error_of("warm_start.recipe=nope.yaml")
    error = error_of("+warm_start.overrides=['sft.seed=x', 'nope=1']")
    assert "warm_start.overrides: sft.seed=x: sft.seed: must be an integer" in error
    assert "warm_start.overrides: nope=1: nope: the recipe has no such key" in error
    assert "must be an sft recipe; found one of grpo" in error_of(
        f"warm_start.recipe={CONFIGS}/grpo_math_1B_megatron.yaml"
    )
    assert "its sft.export_hf must be true" in error_of("+warm_start.overrides=['sft.export_hf=false']")
    same = "must be the same as in the warm_start recipe, which trains the initial weights; there it is"
    size = error_of("policy.hf_config.hidden_size=64")
    assert f"command line: policy.hf_config.hidden_size=64: policy.hf_config.hidden_size: is 64, but {same} 128" in size
    added = error_of("+policy.hf_config.attention_bias=true")
    assert f"policy.hf_config.attention_bias: is true, but {same} absent" in added
    deleted = error_of("~policy.hf_config.tie_word_embeddings")
    assert f"policy.hf_config.tie_word_embeddings: is absent, but {same} true" in deleted


def test_a_mistake_in_an_override_of_the_warm_start_has_its_file_and_line(tmp_path, error_of):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"defaults: {CONFIGS / 'grpo_tiny_cpu.yaml'}\nwarm_start:\n  recipe: {CONFIGS / 'sft_tiny_cpu.yaml'}\n"
        "  overrides:\n    - sft.seed=x\n    - nope=1\n"
    )
    error = error_of(recipe=recipe)
    assert f"\n  {recipe}:5: warm_start.overrides: sft.seed=x: sft.seed: must be an integer" in error
    assert f"\n  {recipe}:6: warm_start.overrides: nope=1: nope: the recipe has no such key" in error


def test_a_warm_start_is_checked_for_the_ranks_that_it_runs_on(error_of):
    three = ["cluster.gpus_per_node=3", "grpo.num_prompts_per_step=48", "policy.train_micro_batch_size=128"]
    message = (
        "sft_tiny_cpu.yaml:19: policy.train_global_batch_size: is 128, which is not a multiple of "
        "data-parallel size 3 x micro-batch size 128; change either; the warm start trains on the run's ranks "
        "(cluster.gpus_per_node 3)"
    )
    assert message in error_of(*three)
    error = error_of(*three, "++warm_start.overrides=['sft.seed=x']")
    assert error.count("trains on the run's ranks") == 2
    first = error.splitlines()[1]  # overrides come before files
    assert first.endswith("warm_start.overrides: sft.seed=x: sft.seed: must be an integer; found 'x'")
    sizes = "'policy.train_global_batch_size=192','policy.train_micro_batch_size=64','sft.val_micro_batch_size=64'"
    fits = f"++warm_start.overrides=[{sizes},'sft.val_global_batch_size=192']"
    assert load(CONFIGS / "grpo_tiny_cpu.yaml", [*three, fits]).warm_start.config["cluster"]["gpus_per_node"] == 3


def test_a_warm_start_has_the_runs_precision_and_micro_batches_that_its_ranks_can_fill():
    recipe = CONFIGS / "grpo_tiny_cpu.yaml"
    sizes = {
        ranks: load(recipe, [f"cluster.gpus_per_node={ranks}"]).warm_start.config["policy"]["train_micro_batch_size"]
        for ranks in (1, 2)
    }
    assert sizes == {1: 128, 2: 64}
    in_bf16 = ["policy.precision=bfloat16", f"{MEGATRON}.optimizer.bf16=true"]
    policy = load(recipe, in_bf16).warm_start.config["policy"]
    assert (policy["precision"], policy["megatron_cfg"]["optimizer"]["bf16"]) == ("bfloat16", True)


def test_a_warm_start_runs_on_the_policys_part_of_a_cluster(error_of):
    apart = ["policy.generation.colocated.enabled=false", "++policy.generation.colocated.resources.gpus_per_node=1"]
    recipe = CONFIGS / "grpo_tiny_cpu.yaml"
    assert load(recipe, ["cluster.gpus_per_node=2", *apart]).warm_start.config["cluster"]["gpus_per_node"] == 1
    error = error_of("cluster.gpus_per_node=2", "++warm_start.overrides=['cluster.gpus_per_node=4']")
    assert (
        "warm_start.overrides: sets cluster.gpus_per_node, but a warm start uses that of the run (2); delete it"
        in error
    )
    load(recipe, ["cluster.gpus_per_node=2", "++warm_start.overrides=['cluster.gpus_per_node=2']"])
    # It divides the model as the run does.
    divided = [f"{MEGATRON}.tensor_model_parallel_size=2", f"{MEGATRON}.sequence_parallel=true"]
    divided += ["policy.make_sequence_length_divisible_by=2", "cluster.gpus_per_node=2"]
    of_warm_start = load(recipe, divided).warm_start.config["policy"]["megatron_cfg"]
    assert (of_warm_start["tensor_model_parallel_size"], of_warm_start["sequence_parallel"]) == (2, True)
    # A mistake of the run's own is told alone.
    assert ": 1 problem\n" in error_of("cluster.gpus_per_node=0")


def test_the_warm_start_recipe_lies_beside_the_file_that_names_it(tmp_path, monkeypatch):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"defaults: {CONFIGS / 'grpo_tiny_cpu.yaml'}\n")
    monkeypatch.chdir(tmp_path)
    warm_start = load(recipe).warm_start
    assert warm_start is not None
    assert warm_start.algorithm == "sft"
    assert warm_start.recipe.path == CONFIGS / "sft_tiny_cpu.yaml"


def test_fields_of_megatron_reach_the_config():
    overrides = [
        f"+{MEGATRON}.moe_z_loss_coeff=1e-3",
        f"+{MEGATRON}.attention_backend=flash",
        f"+{MEGATRON}.window_size=[128,0]",
        f"{MEGATRON}.optimizer.use_precision_aware_optimizer=true",
        f"+{MEGATRON}.optimizer.exp_avg_dtype=bfloat16",
        f"+{MEGATRON}.distributed_data_parallel_config.bucket_size=40000000",
    ]
    megatron = load(CONFIGS / "grpo_tiny_cpu.yaml", overrides).config["policy"]["megatron_cfg"]
    assert megatron["moe_z_loss_coeff"] == 1e-3
    assert megatron["attention_backend"] == "flash"
    assert megatron["window_size"] == [128, 0]
    assert megatron["optimizer"]["exp_avg_dtype"] == "bfloat16"
    assert megatron["distributed_data_parallel_config"]["bucket_size"] == 40000000


def test_sequence_parallel_alone_is_off_and_says_so():
    validated = load(CONFIGS / "grpo_tiny_cpu.yaml", [f"{MEGATRON}.sequence_parallel=true"])
    assert validated.config["policy"]["megatron_cfg"]["sequence_parallel"] is False
    assert f"{MEGATRON}.sequence_parallel is off, since {MEGATRON}.tensor_model_parallel_size is 1" in validated.notes
