"""The recipes in examples/: they load, say every offload key, and repeat nothing that they inherit."""

from pathlib import Path

import pytest
import yaml

from nemo_offload_rl.config import load
from nemo_offload_rl.config.recipe import load_recipe
from nemo_offload_rl.config.source.yaml_source import read_yaml
from tests.unit.config.conftest import CONFIGS

EXAMPLES = CONFIGS.parent
EVERY_YAML = sorted(path for path in EXAMPLES.rglob("*.yaml") if path.parent.name != "cluster")  # no recipes
RECIPES = sorted(CONFIGS.glob("*.yaml"))
LONG_ROWS = [path for path in RECIPES if "long_rows" in path.name]

OFFLOAD_KEYS = (
    "policy.offload_optimizer_for_refit",
    "policy.offload_optimizer_for_logprob",
    "policy.use_pinned_optimizer_offload",
    "policy.residency.verify",
    "policy.residency.huge_pages",
    "policy.residency.host_memory_limit_gib",
    "policy.residency.table",
    "policy.numa",
    "policy.megatron_cfg.fine_grained_activation_offloading",
    "policy.megatron_cfg.offload_modules",
    "policy.megatron_cfg.activation_offload_fraction",
    "policy.megatron_cfg.min_offloaded_tensor_size",
    "policy.megatron_cfg.delta_offload_bytes_across_pp_ranks",
    "policy.megatron_cfg.delay_offload_until_cuda_graph",
    "policy.megatron_cfg.fine_grained_offloading_max_inflight_offloads",
    "policy.megatron_cfg.cuda_graph_impl",
    "policy.megatron_cfg.cuda_graph_modules",
    "policy.megatron_cfg.cuda_graph_warmup_steps",
    "policy.activation_offload.strict",
    "policy.activation_offload.host_memory_limit_gib",
    "policy.megatron_cfg.optimizer.optimizer_cpu_offload",
    "policy.megatron_cfg.optimizer.optimizer_offload_fraction",
    "policy.megatron_cfg.optimizer.overlap_cpu_optimizer_d2h_h2d",
)


def test_the_exemplars_are_there():
    names = {"grpo_tiny_cpu.yaml", "grpo_math_1B_megatron.yaml", "sft_tiny_cpu.yaml", "sft.yaml"}
    assert names <= {path.name for path in RECIPES}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_an_exemplar_is_valid(path):
    validated = load(path)
    assert yaml.safe_load(yaml.safe_dump(validated.recipe.config)) == validated.recipe.config


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_an_exemplar_shows_each_offload_key(path):
    config = load_recipe(path).config
    for key in OFFLOAD_KEYS:
        node = config
        for name in key.split("."):
            assert name in node, key
            node = node[name]


@pytest.mark.parametrize("path", [path for path in RECIPES if path not in LONG_ROWS], ids=lambda path: path.name)
def test_an_exemplar_neither_offloads_activations_nor_captures_graphs(path):
    megatron = load(path).config["policy"]["megatron_cfg"]
    assert megatron["fine_grained_activation_offloading"] is False
    assert megatron["offload_modules"] is None
    assert megatron["delay_offload_until_cuda_graph"] is False
    assert megatron["cuda_graph_impl"] == "none"


@pytest.mark.parametrize("path", LONG_ROWS, ids=lambda path: path.name)
def test_long_rows_keep_layer_inputs_on_the_host_and_compute_the_rest_in_parts(path):
    policy = load(path).config["policy"]
    megatron = policy["megatron_cfg"]
    assert policy["residency"]["table"]["train"] == {"optimizer_state": "streamed"}
    assert policy["residency"]["table"]["generate"] == {"params": "keep"}  # what is inherited is still there
    assert (megatron["fine_grained_activation_offloading"], megatron["offload_modules"]) == (True, ["layer_input"])
    assert (megatron["activation_checkpointing"], megatron["recompute_granularity"]) == (True, "full")
    assert megatron["use_fused_linear_logprobs"] is True
    assert megatron["mlp_tile_tokens"] is not None


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_an_exemplar_moves_optimizer_state_at_link_speed(path):
    assert load(path).config["policy"]["use_pinned_optimizer_offload"] is True


def test_optimizer_state_is_page_locked_where_a_recipe_does_not_say_and_the_printed_recipe_says_so():
    validated = load(CONFIGS / "grpo_tiny_cpu.yaml", ["~policy.use_pinned_optimizer_offload"])
    assert validated.config["policy"]["use_pinned_optimizer_offload"] is True
    assert validated.recipe.config["policy"]["use_pinned_optimizer_offload"] is True


def written(value, path=""):
    """Each leaf of a file as it is written, before interpolation."""
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from written(item, f"{path}.{name}" if path else name)
    else:
        yield path, value


@pytest.mark.parametrize("path", EVERY_YAML, ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_a_file_repeats_no_value_that_it_inherits(path: Path, tmp_path):
    root, problems = read_yaml(path)
    assert root is not None
    assert problems == []
    own = root.plain()
    defaults = own.pop("defaults", None)
    if defaults is None:
        return
    parents = [defaults] if isinstance(defaults, str) else defaults
    inherited = {}
    for parent in parents:
        inherited |= everything_written(path.parent / parent)
    repeated = [key for key, value in written(own) if key in inherited and inherited[key] == value]
    assert repeated == []


def everything_written(path: Path):
    root, _ = read_yaml(path)
    own = root.plain()
    defaults = own.pop("defaults", [])
    found = {}
    for parent in [defaults] if isinstance(defaults, str) else defaults:
        found |= everything_written(path.parent / parent)
    return found | dict(written(own))
