"""NeMo-RL's recipes: which of their keys load, and what is refused."""

import pytest
import yaml

from nemo_offload_rl.config import RecipeError, load, load_recipe
from nemo_offload_rl.config.algorithms import ALGORITHMS
from nemo_offload_rl.config.installed.declared_fields import SECTIONS, megatron_fields
from nemo_offload_rl.config.key_table.row import Kind
from nemo_offload_rl.config.key_table.table import NEMO_RL_SECTIONS, accepted_paths, nemo_rl_paths, rows_of
from nemo_offload_rl.config.keys.schema_problems import value_at
from nemo_offload_rl.config.keys.tree import alternatives, find_key, nearest_key
from tests.unit.config.conftest import CONFIGS, DATA

EXEMPLAR = CONFIGS / "grpo_math_1B_megatron.yaml"
MEGATRON_RECIPE = DATA / "nemo_rl_grpo_math_1B_megatron.yaml"
OUR_SECTIONS = ["policy.generation.backend=transformers"]
NULL_FOR_NEMO_GYM = {"data.max_input_seq_length", "grpo.max_val_samples", "grpo.val_batch_size"}


def test_the_megatron_recipe_validates_with_transformers_as_generation():
    validated = load(MEGATRON_RECIPE, OUR_SECTIONS)
    assert validated.algorithm == "grpo"
    math = {"num_workers": 8, "math_verify_impl": "hf_math_verify", "time_limit_s": 10.0}
    assert validated.config["env"] == {"math": math}
    dataset = {"dataset_name": "OpenMathInstruct-2", "split_validation_size": 0.05}
    assert validated.config["data"]["train"].items() >= dataset.items()
    policy = validated.config["policy"]
    assert policy["train_global_batch_size"] == 512
    assert policy["megatron_cfg"]["optimizer"]["adam_eps"] == 1e-8
    assert "dtensor_cfg" not in policy
    assert validated.recipe.config["policy"]["dtensor_cfg"]["enabled"] is False
    notes = "\n".join(validated.notes)
    assert "policy.scheduler has no effect: only the DTensor policy reads it" in notes
    assert "data.default.processor" not in notes  # what it asks for happens
    assert "policy.optimizer" not in notes  # null in this recipe


def leaves(config, path=""):
    for name, value in config.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}"


@pytest.mark.parametrize(
    "name", ["nemo_rl_grpo_math_1B_megatron.yaml", "nemo_rl_grpo_math_1B.yaml", "nemo_rl_sft.yaml", "nemo_rl_dpo.yaml"]
)
def test_every_key_of_upstreams_recipes_is_in_the_schema_or_in_a_table(name):
    config = load_recipe(DATA / name).config
    root = next(spec.schema for algorithm, spec in ALGORITHMS.items() if algorithm in config)
    in_tables = nemo_rl_paths()
    unknown = [
        path
        for path in leaves(config)
        if find_key(root, path) is None
        and path.rpartition(".")[2] not in megatron_fields_of(path)
        and not any(path.replace("env.math", "env.*") == row or path.startswith(f"{row}.") for row in in_tables)
    ]
    assert unknown == []


def megatron_fields_of(path):
    section = path.rpartition(".")[0]
    return megatron_fields(section) if section in SECTIONS else {}


def test_upstreams_sft_and_dpo_recipes_need_megatron():
    megatron = ["policy.dtensor_cfg.enabled=false", "policy.megatron_cfg.enabled=true"]
    config = load(DATA / "nemo_rl_sft.yaml", [*megatron, "policy.megatron_cfg.optimizer.min_lr=0.0"]).config
    assert config["sft"]["max_num_steps"] == 60
    assert config["data"]["validation"].items() >= {"dataset_name": "squad", "split": "validation"}.items()
    assert config["policy"]["tokenizer"]["chat_template"].startswith("{% for message in messages %}")
    parallel = ["tensor_model_parallel_size=1", "sequence_parallel=false"]
    overrides = [*megatron, *(f"policy.megatron_cfg.{one}" for one in parallel)]
    config = load(DATA / "nemo_rl_dpo.yaml", overrides).config
    assert config["dpo"]["reference_policy_kl_penalty"] == 0.05
    assert config["data"]["train"]["dataset_name"] == "HelpSteer3"
    tokens = {"add_bos": True, "add_eos": True, "add_generation_prompt": False}  # as NeMo-RL has them
    assert tokens.items() <= config["data"].items()


@pytest.mark.parametrize("row", rows_of(Kind.OFF_ONLY), ids=lambda row: row.key)
def test_a_feature_that_is_not_here_is_refused_by_name(row, error_of):
    recipe = CONFIGS / "grpo_tiny_cpu.yaml"
    path = row.key.replace("*", "arithmetic")
    parent_section = ["+logger.wandb={project: p, name: n}"] if path.startswith("logger.wandb.") else []
    if path.startswith("policy.generation.vllm_cfg."):
        recipe, parent_section = EXEMPLAR, ["policy.generation.backend=vllm"]
        assert load(recipe, [f"++{path}=7"]).config["policy"]["generation"]["backend"] == "transformers"
    off = str(row.values[0]).lower().replace("none", "null")
    assert load(recipe, [*parent_section, f"++{path}={off}"]).recipe.config is not None
    on = f"++{path}=7"
    assert f": {path}: {row.refusal(7)}" in error_of(*parent_section, on, recipe=recipe)


@pytest.mark.parametrize("section", NEMO_RL_SECTIONS)
def test_a_section_loads_while_its_switch_is_off(section, error_of):
    names = [path.removeprefix(f"{section}.") for path in nemo_rl_paths() if path.startswith(f"{section}.")]
    keys = [f"++{section}.{name}={'null' if f'{section}.{name}' not in accepted_paths() else 1}" for name in names]
    assert section.rpartition(".")[2] not in str(load(CONFIGS / "grpo_tiny_cpu.yaml", keys).config)
    for empty in ("{}", "null"):
        load(CONFIGS / "grpo_tiny_cpu.yaml", [f"++{section}={empty}"])
    assert not any(find_key(spec.schema, section) for spec in ALGORITHMS.values())
    error_of(*keys, f"++{section}.{names[-1]}x=1")


def test_a_recipe_without_gradient_clipping_may_have_no_norm_to_refer_to():
    overrides = ["policy.max_grad_norm=null", "policy.megatron_cfg.optimizer.clip_grad=0.0"]
    recipe = load(CONFIGS / "grpo_tiny_cpu.yaml", [*overrides, "+policy.megatron_cfg.converter_type=LlamaForCausalLM"])
    assert recipe.config["policy"]["max_grad_norm"] is None
    assert not any("max_grad_norm" in note for note in recipe.notes)
    assert any(note.startswith("policy.megatron_cfg.converter_type has no effect: ") for note in recipe.notes)


# The keys that may be null by the annotations of NeMo-RL's config classes, by section.
NULLABLE = {
    "checkpointing": "checkpoint_must_save_by ft_keep_latest_k metric_name",
    "cluster": "segment_size",
    "data": "default max_input_seq_length validation",
    "data.train": "prompt_file system_prompt_file",
    "env.math": "math_verify_impl",
    "grpo": "advantage_clip_high advantage_clip_low max_val_samples seq_logprob_error_threshold "
    "stop_at_validation_metric stop_at_validation_threshold val_batch_size",
    "grpo.reward_shaping": "max_response_length overlong_buffer_length overlong_buffer_penalty "
    "stop_properly_penalty_coef",
    "loss_fn": "kl_input_clamp_value kl_output_clamp_value ratio_clip_c truncated_importance_sampling_ratio "
    "truncated_importance_sampling_ratio_min truncated_importance_sampling_type",
    "policy": "logprob_chunk_size max_grad_norm",
    "policy.generation": "bad_words refit_transport stop_strings stop_token_ids top_k val_top_k",
    "policy.generation.colocated.resources": "gpus_per_node num_nodes",
    "policy.megatron_cfg": "env_vars moe_router_group_topk moe_router_num_groups num_layers_in_first_pipeline_stage "
    "num_layers_in_last_pipeline_stage offload_modules recompute_modules",
    "policy.megatron_cfg.scheduler": "lr_decay_iters",
    "policy.tokenizer": "chat_template chat_template_kwargs",
}


@pytest.mark.parametrize("section", NULLABLE)
def test_what_may_be_null_upstream_may_be_null(section):
    paths = [f"{section}.{name}" for name in NULLABLE[section].split()]
    keys = [(path, key) for path in paths for spec in ALGORITHMS.values() if (key := find_key(spec.schema, path))]
    assert keys
    refused = {path for path, key in keys if type(None) not in alternatives(key.annotation)}
    assert refused == NULL_FOR_NEMO_GYM.intersection(paths)


@pytest.mark.parametrize("recipe", ["sft_tiny_cpu.yaml", "dpo_tiny_cpu.yaml"])
def test_no_defaults_of_data_may_be_said(recipe):
    assert load(CONFIGS / recipe, ["++data.default=null"]).config["data"]["default"] == {}


def test_no_hint_names_a_key_that_is_refused_itself():
    paths = [row.key for row in rows_of(Kind.OFF_ONLY, Kind.FIXED)]
    # Those in the schema may be written.
    for refused in (path for path in paths if find_key(ALGORITHMS["sft"].schema, path) is None):
        for misspelt in (f"{refused}x", refused[:-1]):
            assert all(nearest_key(spec.schema, misspelt, accepted_paths()) != refused for spec in ALGORITHMS.values())


@pytest.mark.parametrize("key", ["policy.megatron_cfg.defer_fp32_logits", "policy.sequence_packing.fuse_loss"])
@pytest.mark.parametrize("value", ["true", "false", "null"])
def test_what_always_happens_may_be_asked_for_and_a_note_says_so(key, value):
    recipe = load(CONFIGS / "grpo_tiny_cpu.yaml", [f"++{key}={value}"])
    said = [note for note in recipe.notes if key in note]
    assert len(said) == (value != "null")
    assert all(note.startswith(f"{key} has no effect: its memory saving is always on here: ") for note in said)
    assert key.rpartition(".")[2] not in str(recipe.config)


def test_every_key_that_refuses_a_recipe_of_upstreams_is_refused_with_what_to_do(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"defaults: {EXEMPLAR}\n{(DATA / 'nemo_rl_other_features.yaml').read_text()}")
    with pytest.raises(RecipeError) as refusal:
        load(recipe, ["policy.generation.backend=vllm"])
    problems = {problem.path: problem.message for problem in refusal.value.problems}
    assert not [path for path, message in problems.items() if "unknown key" in message]
    assert not [path for path, message in problems.items() if "; " not in message]  # after which the remedy stands
    keys = set(leaves(yaml.safe_load((DATA / "nemo_rl_other_features.yaml").read_text())))
    unmentioned = {key for key in keys if not any(f"{key}.".startswith(f"{path}.") for path in problems)}
    assert unmentioned == SILENT


# Of that file, what only tunes a feature that another of its keys turns on, and what happens here always.
SILENT = {
    "policy.disable_modelopt_layer_spec",
    "policy.generation.real_quant_ignore",
    "policy.generation.trtllm_cfg.tensor_parallel_size",
    "policy.generation.trtllm_kwargs.batch_wait_timeout_iters",
    "policy.generation.vllm_cfg.cap_max_tokens_to_context",
    "policy.generation.vllm_cfg.http_server_serving_chat_kwargs.enable_auto_tools",
    "policy.generation.vllm_cfg.quantization_ignored_layer_kws",
    "policy.generation.vllm_cfg.reasoning_parser_plugin",
}


@pytest.mark.parametrize("section", ["policy.generation.vllm_cfg", "policy.megatron_cfg"])
def test_numbers_and_booleans_are_text_for_the_environment(section):
    values = "{A: 1, B: true, C: 0.5, D: 'off', E: -3}"
    recipe = load(EXEMPLAR, ["policy.generation.backend=vllm", f"++{section}.env_vars={values}"])
    read = value_at(recipe.config, f"{section}.env_vars")
    assert read == {"A": "1", "B": "true", "C": "0.5", "D": "off", "E": "-3"}
    notes = [note for note in recipe.notes if "env_vars" in note]
    assert notes[0] == f'{section}.env_vars.A is read as the text "1"; writing it in quotes means the same'
    assert len(notes) == 4


def test_keys_that_nemo_rl_does_not_read_either_have_no_effect():
    key = "grpo.zero_variance_prompt_filtering"
    loaded = load("benchmarks/recipes/grpo_1_5B_random.yaml", ["policy.generation.backend=vllm", f"++{key}=true"])
    assert any(note.startswith(f"{key} has no effect: NeMo-RL does not read it either") for note in loaded.notes)
    section, _, name = key.rpartition(".")
    assert name not in value_at(loaded.config, section)
