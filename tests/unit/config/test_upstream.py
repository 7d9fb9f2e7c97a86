"""NeMo-RL's recipes: which of their keys load, and what is refused."""

import pytest
import yaml

from nemo_offload_rl.config import RecipeError, load, load_recipe
from nemo_offload_rl.config.algorithms import ALGORITHMS
from nemo_offload_rl.config.installed.declared_fields import SECTIONS, megatron_fields
from nemo_offload_rl.config.key_table.row import Kind
from nemo_offload_rl.config.key_table.table import NEMO_RL_SECTIONS, accepted_paths, nemo_rl_paths, rows_of
from nemo_offload_rl.config.keys.tree import alternatives, find_key, nearest_key
from tests.unit.config.conftest import CONFIGS, DATA

OF_NEMO_RL = yaml.safe_load((DATA / "nemo_rl_keys.yaml").read_text())
EXEMPLAR = CONFIGS / "grpo_math_1B_megatron.yaml"
NULL_FOR_NEMO_GYM = {"data.max_input_seq_length", "grpo.max_val_samples", "grpo.val_batch_size"}


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


@pytest.mark.parametrize("section", OF_NEMO_RL["nullable"])
def test_what_may_be_null_upstream_may_be_null(section):
    paths = [f"{section}.{name}" for name in OF_NEMO_RL["nullable"][section]]
    keys = [(path, key) for path in paths for spec in ALGORITHMS.values() if (key := find_key(spec.schema, path))]
    assert keys
    refused = {path for path, key in keys if type(None) not in alternatives(key.annotation)}
    assert refused == NULL_FOR_NEMO_GYM.intersection(paths)


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
    assert unmentioned == set(OF_NEMO_RL["silent"])
