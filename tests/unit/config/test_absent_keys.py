"""What absent keys stand for is resolved once, and is what the recipe then prints."""

import pytest

from nemo_offload_rl.config import load
from nemo_offload_rl.config.keys.absent_keys import AUTO_SECTIONS, IF_ABSENT, resolve_absent_keys
from nemo_offload_rl.config.keys.tree import schema_keys
from nemo_offload_rl.config.schema import GRPOMasterConfig
from nemo_offload_rl.config.source.yaml_source import as_yaml
from nemo_offload_rl.plan.plan import settings
from tests.unit.config.conftest import CONFIGS


def at(config, path):
    for name in path.split("."):
        config = config[name]
    return config


@pytest.fixture(scope="module")
def without_them():
    """The tiny recipe without any key that may be absent and has a default."""
    written = load(CONFIGS / "grpo_tiny_cpu.yaml").recipe.origins
    sections = [path for path in IF_ABSENT if path in written or f"{path}.verify" in written]
    return load(
        CONFIGS / "grpo_tiny_cpu.yaml",
        [f"~{path}" for path in sections if not any(path.startswith(f"{other}.") for other in sections)],
    )


SECTIONS = {
    "policy.activation_offload": {"strict": False, "host_memory_limit_gib": None},
    "policy.residency": {
        "verify": False,
        "huge_pages": True,
        "host_memory_limit_gib": None,
        "stream_window_mib": 512,
        "generation_weights": None,
        "table": None,
    },
}


OF_VLLM = [path for path in IF_ABSENT if path.startswith("policy.generation.vllm_cfg.")]


@pytest.mark.parametrize("path", [path for path in IF_ABSENT if path not in OF_VLLM])
def test_an_absent_key_is_in_the_resolved_recipe_with_its_value(without_them, path):
    assert not schema_keys(GRPOMasterConfig)[path].required
    expected = SECTIONS.get(path, IF_ABSENT[path])
    assert at(without_them.config, path) == at(without_them.recipe.config, path) == expected
    assert path not in without_them.recipe.origins


@pytest.mark.parametrize("path", OF_VLLM)
def test_keys_of_vllm_are_resolved_in_recipes_that_have_it(path):
    assert not schema_keys(GRPOMasterConfig)[path].required
    loaded = load("benchmarks/recipes/grpo_1_5B_random.yaml", ["policy.generation.backend=vllm"])
    assert at(loaded.config, path) == IF_ABSENT[path]
    assert path not in loaded.recipe.origins


def test_what_is_printed_is_the_same_recipe(without_them, tmp_path):
    (tmp_path / "printed.yaml").write_text(as_yaml(without_them.recipe.config))
    again = load(tmp_path / "printed.yaml", ["~warm_start"])
    assert again.config == {name: value for name, value in without_them.config.items() if name != "warm_start"}


def test_what_a_recipe_says_stays_and_sections_that_it_lacks_are_not_made():
    config = {"policy": {"numa": 1, "activation_offload": {"strict": True}}, "sft": {}}
    resolve_absent_keys(config)
    assert config["policy"]["numa"] == 1
    assert config["policy"]["activation_offload"] == {"strict": True, "host_memory_limit_gib": None}
    assert config.keys() == {"policy", "sft"}


def test_a_recipe_without_a_section_takes_one_key_of_it(tmp_path):
    """As those of NeMo-RL, which have no policy.residency."""
    overrides = ["~policy.residency", "+policy.residency.table={generate: {params: keep}}"]
    residency = load(CONFIGS / "grpo_tiny_cpu.yaml", overrides).config["policy"]["residency"]
    assert residency == SECTIONS["policy.residency"] | {"table": {"generate": {"params": "keep"}}}


AUTO = SECTIONS["policy.residency"] | {"table": {"generate": {"params": "auto", "optimizer_state": "auto"}}}


@pytest.mark.parametrize("backend", ["vllm", "transformers"])
def test_a_section_written_as_auto_is_written_out_in_the_resolved_recipe(backend, tmp_path):
    (tmp_path / "auto.yaml").write_text(f"defaults: {CONFIGS / 'grpo_tiny_cpu.yaml'}\npolicy:\n  residency: auto\n")
    validated = load(tmp_path / "auto.yaml", [f"policy.generation.backend={backend}", "~warm_start"])
    assert validated.config["policy"]["residency"] == validated.recipe.config["policy"]["residency"] == AUTO
    absent = load(CONFIGS / "grpo_tiny_cpu.yaml", [f"policy.generation.backend={backend}", "~policy.residency"])
    plans = [settings(each.config["policy"]) for each in (validated, absent)]
    assert plans[0] == plans[1]


def test_auto_is_a_section_of_every_algorithm_also_through_a_reference():
    assert load(CONFIGS / "sft_tiny_cpu.yaml", ["policy.residency=auto"]).config["policy"]["residency"] == AUTO
    referred = load(CONFIGS / "grpo_tiny_cpu.yaml", ["policy.residency=${policy.numa}"])
    assert referred.config["policy"]["residency"] == AUTO


def test_overrides_behind_auto_change_single_keys_of_it():
    changes = [
        "policy.residency.verify=true",
        "policy.residency.table.generate.params=host",
        "+policy.residency.table.refit.grads=keep",
    ]
    validated = load(CONFIGS / "grpo_tiny_cpu.yaml", ["policy.residency=auto", *changes])
    cells = {"generate": {"params": "host", "optimizer_state": "auto"}, "refit": {"grads": "keep"}}
    assert validated.config["policy"]["residency"] == AUTO | {"verify": True, "table": cells}
    assert validated.recipe.origins["policy.residency.huge_pages"].override == "policy.residency=auto"
    assert validated.recipe.origins["policy.residency.verify"].override == changes[0]
    without = load(CONFIGS / "grpo_tiny_cpu.yaml", ["policy.residency=auto", "~policy.residency.table"])
    assert without.config["policy"]["residency"] == SECTIONS["policy.residency"]


def test_auto_behind_the_override_of_one_of_its_keys_is_refused(one_problem_of):
    overrides = ["policy.residency.verify=true", "policy.residency=auto"]
    assert (
        "policy.residency: replaces the whole section, which would undo policy.residency.verify=true; write it before "
        "that" in one_problem_of(*overrides)
    )
    twice = ["policy.residency=auto", "policy.residency=auto"]
    assert load(CONFIGS / "grpo_tiny_cpu.yaml", twice).config["policy"]["residency"] == AUTO


def test_what_may_be_auto_is_a_section_that_may_be_absent():
    assert set(AUTO_SECTIONS) <= set(IF_ABSENT)
