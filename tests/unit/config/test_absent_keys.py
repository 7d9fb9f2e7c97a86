"""What absent keys stand for is resolved once, and is what the recipe then prints."""

import ast
from functools import cache
from pathlib import Path

import pytest
import yaml

from nemo_offload_rl.config import load
from nemo_offload_rl.config.keys.schema_problems import value_at
from nemo_offload_rl.config.keys.tree import RESIDENCY, if_absent, resolve_absent_keys, schema_keys
from nemo_offload_rl.config.problems import show
from nemo_offload_rl.config.schema import DPOMasterConfig, GRPOMasterConfig, SFTMasterConfig
from nemo_offload_rl.config.source.yaml_source import as_yaml
from nemo_offload_rl.plan.plan import settings
from tests.unit.config.conftest import CONFIGS, DATA

TINY = CONFIGS / "grpo_tiny_cpu.yaml"
ALGORITHM_OF = {"grpo": GRPOMasterConfig, "sft": SFTMasterConfig, "dpo": DPOMasterConfig}
# What other keys of the recipe refer to, in numbers.
INSTEAD = {"grpo": ["policy.train_global_batch_size=512"], "sft": [], "dpo": []}


DATASETS = ("data.train.", "data.validation.")
NEEDED = ("policy.hf_config", "data.validation", "data.default", "warm_start.overrides", "env.*")  # by the tiny recipes


def may_be_absent(algorithm):
    keys = schema_keys(ALGORITHM_OF[algorithm])  # a dataset's keys depend on its kind, and have tests of their own
    others = (key for path, key in keys.items() if not path.startswith(DATASETS + NEEDED))
    absent = {key.path: if_absent(key.annotation) for key in others}
    return {path: found.value for path, found in absent.items() if found is not None}


@cache
def without_them(algorithm):
    """Returns an algorithm's tiny recipe without any key that may be absent and has a default."""
    recipe = CONFIGS / f"{algorithm}_tiny_cpu.yaml"
    written = load(recipe).recipe.origins
    paths = [path for path in may_be_absent(algorithm) if any(f"{key}.".startswith(f"{path}.") for key in written)]
    outer = [f"~{path}" for path in paths if not any(path.startswith(f"{other}.") for other in paths)]
    return load(recipe, ["policy.megatron_cfg.optimizer.clip_grad=1.0", *INSTEAD[algorithm], *outer])


SECTIONS = {
    "policy.activation_offload": {"strict": False, "host_memory_limit_gib": None},
    "policy.residency": {"verify": False, "huge_pages": True, "host_memory_limit_gib": None}
    | {"stream_window_mib": 512, "generation_weights": None, "table": None},
    "policy.megatron_cfg.checkpoint": {"async_save": False, "ckpt_assume_constant_structure": False},
    "policy.generation.colocated": {"enabled": True, "resources": {"gpus_per_node": None, "num_nodes": None}},
    "policy.generation.colocated.resources": {"gpus_per_node": None, "num_nodes": None},
    "grpo.async_grpo": {"enabled": False, "max_trajectory_age_steps": 1, "in_flight_weight_updates": False}
    | {"recompute_kv_cache_after_weight_updates": False, "max_generation_failures": 0},
    "grpo.debug": {"save_rollouts": None, "replay_rollouts": None},
    "logger.gpu_monitoring": {"collection_interval": 10, "flush_interval": 10},
}


OF_PROFILE = [path for path in may_be_absent("grpo") if path.startswith("logger.profile.")]  # null is no section
OF_VLLM = [path for path in may_be_absent("grpo") if path.startswith("policy.generation.vllm_cfg.")]


@pytest.mark.parametrize("algorithm", ALGORITHM_OF)
def test_absent_keys_are_in_the_resolved_recipe_with_their_values(algorithm):
    loaded, keys = without_them(algorithm), schema_keys(ALGORITHM_OF[algorithm])
    for path, value in may_be_absent(algorithm).items():
        if path not in OF_VLLM + OF_PROFILE:
            assert not keys[path].required, path
            wanted = SECTIONS.get(path, value)
            assert value_at(loaded.config, path) == value_at(loaded.recipe.config, path) == wanted, path
            assert path not in loaded.recipe.origins


@pytest.mark.parametrize("algorithm", ALGORITHM_OF)
def test_absent_keys_have_nemo_rls_defaults(algorithm):
    wanted = yaml.safe_load((DATA / "nemo_rl_defaults.yaml").read_text())[algorithm]
    assert {path: value_at(without_them(algorithm).config, path) for path in wanted} == wanted


NO_SECTION_OF_A_RECIPE = {"hf_config.py", "cli.py", "tree.py", "model_config.py"}
"""These read a model's source, the command line, what is not filled in yet, or fields for Megatron."""


def fallbacks(source, names):
    """Yields the code that reads a key so that its absence would have a value of its own."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Attribute(attr="get" | "setdefault"), args=[ast.Constant(value=name), *_]):
                found = name
            case ast.Compare(left=ast.Constant(value=name), ops=[ast.In() | ast.NotIn()], comparators=[ast.Name()]):
                found = name
            case _:
                continue
        if found in names:
            yield ast.unparse(node)


def test_no_reader_supplies_a_default_that_the_schema_has():
    names = {path.rpartition(".")[2] for algorithm in ALGORITHM_OF for path in may_be_absent(algorithm)}
    names -= {"export_hf"}  # which the section of GRPO lacks
    sources = [path for path in Path("nemo_offload_rl").rglob("*.py") if path.name not in NO_SECTION_OF_A_RECIPE]
    assert [found for path in sources for found in fallbacks(path.read_text(), names)] == []
    found = fallbacks("policy.get('numa', 'auto') if 'numa' in policy else policy['numa']", {"numa"})
    assert sorted(found) == ["'numa' in policy", "policy.get('numa', 'auto')"]


def test_no_comment_repeats_a_default():
    """Words after `Absent:` are those of a section, or say which other key decides."""
    for algorithm in ALGORITHM_OF:
        for path, value in may_be_absent(algorithm).items():
            comment = schema_keys(ALGORITHM_OF[algorithm])[path].comment
            shown = value if isinstance(value, str) else show(value)
            in_words = isinstance(value, dict) or "Absent: that of adv_estimator" in comment
            assert comment.count("bsent: ") == 1, path
            assert in_words or comment.endswith(f" Absent: {shown}."), path


def test_keys_of_vllm_are_resolved_in_recipes_that_have_it():
    loaded = load("benchmarks/recipes/grpo_1_5B_random.yaml", ["policy.generation.backend=vllm"])
    for path in OF_VLLM:
        assert not schema_keys(GRPOMasterConfig)[path].required
        assert value_at(loaded.config, path) == may_be_absent("grpo")[path], path
        assert path not in loaded.recipe.origins


def test_what_is_printed_is_the_same_recipe(tmp_path):
    printed = without_them("grpo")
    (tmp_path / "printed.yaml").write_text(as_yaml(printed.recipe.config))
    again = load(tmp_path / "printed.yaml", ["~warm_start"])
    assert again.config == {name: value for name, value in printed.config.items() if name != "warm_start"}


def test_what_a_recipe_says_stays_and_sections_that_it_lacks_are_not_made():
    config = {"policy": {"numa": 1, "activation_offload": {"strict": True}}, "sft": {}}
    resolve_absent_keys(config)
    assert config["policy"]["numa"] == 1
    assert config["policy"]["activation_offload"] == {"strict": True, "host_memory_limit_gib": None}
    assert config.keys() == {"policy", "sft"}


AUTO = SECTIONS["policy.residency"] | {"table": {"generate": {"params": "auto", "optimizer_state": "auto"}}}


@pytest.mark.parametrize("backend", ["vllm", "transformers"])
def test_a_section_written_as_auto_is_written_out_in_the_resolved_recipe(backend, tmp_path):
    (tmp_path / "auto.yaml").write_text(f"defaults: {TINY}\npolicy:\n  residency: auto\n")
    validated = load(tmp_path / "auto.yaml", [f"policy.generation.backend={backend}", "~warm_start"])
    assert validated.config["policy"]["residency"] == validated.recipe.config["policy"]["residency"] == AUTO
    absent = load(TINY, [f"policy.generation.backend={backend}", "~policy.residency"])
    assert settings(validated.config["policy"]) == settings(absent.config["policy"])


def test_auto_is_a_section_whose_single_keys_later_overrides_change():
    def of(*overrides, recipe=TINY):
        validated = load(recipe, overrides)
        return validated.config["policy"]["residency"], validated.recipe.origins

    auto = "policy.residency=auto"
    assert of(auto, recipe=CONFIGS / "sft_tiny_cpu.yaml")[0] == AUTO
    assert of("policy.residency=${policy.numa}")[0] == of(auto, auto)[0] == AUTO
    verify, params = "policy.residency.verify=true", "policy.residency.table.generate.params=host"
    changed, origins = of(auto, verify, params, "+policy.residency.table.refit.grads=keep")
    cells = {"generate": {"params": "host", "optimizer_state": "auto"}, "refit": {"grads": "keep"}}
    assert changed == AUTO | {"verify": True, "table": cells}
    assert origins["policy.residency.huge_pages"].override == auto
    assert origins["policy.residency.verify"].override == verify
    assert of(auto, "~policy.residency.table")[0] == SECTIONS["policy.residency"]


def test_what_may_be_auto_is_a_section_that_may_be_absent():
    assert RESIDENCY in may_be_absent("grpo")
