"""NeMo-RL's recipes: which of their keys load, and what is refused."""

import pytest

from nemo_offload_rl.config import load, load_recipe
from nemo_offload_rl.config.algorithms import ALGORITHMS
from nemo_offload_rl.config.keys import find_key
from nemo_offload_rl.config.megatron_fields import SECTIONS, megatron_fields
from nemo_offload_rl.config.upstream import OFF_ONLY, SWITCHED_OFF, upstream_paths
from tests.unit.config.conftest import CONFIGS, DATA

MEGATRON_RECIPE = DATA / "nemo_rl_grpo_math_1B_megatron.yaml"
# The sections that a NeMo-RL user has to change: generation backend, data, env.
OUR_SECTIONS = [
    "policy.generation.backend=transformers",
    "~data.train",
    "+data.train={dataset_name: ResponseDataset, data_path: train.jsonl, input_key: problem, output_key: answer}",
    "data.validation={dataset_name: ResponseDataset, data_path: val.jsonl, input_key: problem, output_key: answer}",
    "~env.math",
    "+env.math.reward=numeric_match",
]


def test_the_megatron_recipe_validates_with_generation_data_and_env_changed():
    validated = load(MEGATRON_RECIPE, OUR_SECTIONS)
    assert validated.algorithm == "grpo"
    policy = validated.config["policy"]
    assert policy["train_global_batch_size"] == 512
    assert policy["megatron_cfg"]["optimizer"]["adam_eps"] == 1e-8
    assert "dtensor_cfg" not in policy
    assert validated.recipe.config["policy"]["dtensor_cfg"]["enabled"] is False


def test_what_has_no_effect_is_said():
    notes = "\n".join(load(MEGATRON_RECIPE, OUR_SECTIONS).notes)
    assert "policy.scheduler has no effect: only the DTensor policy reads it" in notes
    assert "data.default.processor has no effect" in notes
    assert "policy.optimizer" not in notes  # null in this recipe


def leaves(config, path=""):
    for name, value in config.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}"


@pytest.mark.parametrize(
    "name",
    ["nemo_rl_grpo_math_1B_megatron.yaml", "nemo_rl_grpo_math_1B.yaml", "nemo_rl_sft.yaml", "nemo_rl_dpo.yaml"],
)
def test_every_key_of_upstreams_recipes_is_in_the_schema_or_in_a_table(name):
    config = load_recipe(DATA / name).config
    root = next(spec.schema for algorithm, spec in ALGORITHMS.items() if algorithm in config)
    in_tables = upstream_paths()
    # The data set that NeMo-RL downloads is not here, and the keys of ours depend on dataset_name.
    ours_differs = ("data.train.", "data.validation.")
    unknown = [
        path
        for path in leaves(config)
        if not path.startswith(ours_differs)
        and find_key(root, path) is None
        and path.rpartition(".")[2] not in megatron_fields_of(path)
        and not any(path.replace("env.math", "env.*") == row or path.startswith(f"{row}.") for row in in_tables)
    ]
    assert unknown == []


def megatron_fields_of(path):
    section = path.rpartition(".")[0]
    return megatron_fields(section) if section in SECTIONS else {}


def test_upstreams_sft_recipe_needs_megatron_and_data():
    overrides = [
        "policy.dtensor_cfg.enabled=false",
        "policy.megatron_cfg.enabled=true",
        "logger.monitor_gpus=false",
        "~data.train",
        "+data.train={dataset_name: HFDataset, data_path: squad, split: train, input_key: q, output_key: a}",
        "~data.validation",
        "policy.megatron_cfg.optimizer.min_lr=0.0",
        "sft.val_period=0",
        "sft.val_at_start=false",
    ]
    config = load(DATA / "nemo_rl_sft.yaml", overrides).config
    assert config["sft"]["max_num_steps"] == 60
    assert config["policy"]["tokenizer"]["chat_template"].startswith("{% for message in messages %}")


def test_upstreams_dpo_recipe_needs_megatron_and_pairs():
    overrides = [
        "policy.dtensor_cfg.enabled=false",
        "policy.megatron_cfg.enabled=true",
        "policy.megatron_cfg.tensor_model_parallel_size=1",
        "policy.megatron_cfg.sequence_parallel=false",
        "logger.monitor_gpus=false",
        "~data.train",
        "+data.train={dataset_name: PreferenceDataset, data_path: pairs.jsonl}",
        "~data.validation",
        "dpo.val_period=0",
        "dpo.val_at_start=false",
    ]
    config = load(DATA / "nemo_rl_dpo.yaml", overrides).config
    assert config["dpo"]["reference_policy_kl_penalty"] == 0.05
    assert config["data"]["train"]["dataset_name"] == "PreferenceDataset"
    tokens = {"add_bos": True, "add_eos": True, "add_generation_prompt": False}  # as NeMo-RL has them
    assert tokens.items() <= config["data"].items()


@pytest.mark.parametrize("row", OFF_ONLY, ids=lambda row: row.path)
def test_a_feature_that_is_not_here_is_refused_by_name(row, error_of):
    recipe = CONFIGS / ("sft_tiny_cpu.yaml" if row.path.startswith("sft") else "grpo_tiny_cpu.yaml")
    path = row.path.replace("*", "arithmetic")
    parent_section = ["+logger.wandb={project: p, name: n}"] if path.startswith("logger.wandb.") else []
    off = str(row.off[0]).lower().replace("none", "null")
    assert load(recipe, [*parent_section, f"++{path}={off}"]).recipe.config is not None
    on = f"++{path}=7"
    error = error_of(*parent_section, on, recipe=recipe)
    assert f"command line: {on}: {path}: {row.feature} is not supported here (found 7)" in error
    assert ": 1 problem\n" in error


@pytest.mark.parametrize("feature", SWITCHED_OFF, ids=lambda feature: feature.section)
def test_a_section_loads_while_its_switch_is_off(feature, error_of):
    recipe = CONFIGS / "grpo_tiny_cpu.yaml"
    inner = [f"++{feature.section}.{key}=1" for key in feature.keys]
    switch = f"++{feature.section}.{feature.switch}"
    config = load(recipe, [*inner, f"{switch}=false"]).config
    assert feature.section.rpartition(".")[2] not in str(config)
    error = error_of(*inner, f"{switch}=true")
    assert f"{feature.section}.{feature.switch}: {feature.feature} is not supported here (found true)" in error
    assert ": 1 problem\n" in error
    misspelt = f"{feature.section}.{feature.keys[0]}x"
    assert f"{misspelt}: unknown key; nearest valid key: {feature.section}." in error_of(
        f"++{misspelt}=1", f"{switch}=false"
    )


def test_a_recipe_without_gradient_clipping_may_have_no_norm_to_refer_to():
    overrides = ["policy.max_grad_norm=null", "policy.megatron_cfg.optimizer.clip_grad=0.0"]
    recipe = load(CONFIGS / "grpo_tiny_cpu.yaml", [*overrides, "+policy.megatron_cfg.converter_type=LlamaForCausalLM"])
    assert recipe.config["policy"]["max_grad_norm"] is None
    assert not any("max_grad_norm" in note for note in recipe.notes)
    why = "policy.megatron_cfg.converter_type has no effect: the model's own config names its architecture"
    assert why in recipe.notes


def test_an_unknown_key_in_a_section_that_only_upstream_has(error_of):
    error = error_of("+reward_penalties.penalize_unwanted_token=true")
    assert "unknown key; nearest valid key: reward_penalties.penalize_unwanted_tokens" in error


def test_two_names_of_one_setting_must_agree(error_of):
    error = error_of("grpo.adv_estimator.normalize_rewards=false")
    assert "is false, but grpo.normalize_rewards is true" in error
