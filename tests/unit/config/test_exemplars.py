"""The recipes in examples/: they load, say every offload key, and repeat nothing that they inherit."""

import pytest
import yaml

from nemo_offload_rl.config import load
from nemo_offload_rl.config.keys.schema_problems import value_at
from nemo_offload_rl.config.recipe import load_recipe
from nemo_offload_rl.config.source.yaml_source import read_yaml
from tests.unit.config.conftest import CONFIGS

EXAMPLES = CONFIGS.parent
EVERY_YAML = sorted(path for path in EXAMPLES.rglob("*.yaml") if path.parent.name != "cluster")  # no recipes
RECIPES = sorted(CONFIGS.glob("*.yaml"))
LONG_ROWS = [path for path in RECIPES if "long_rows" in path.name]

MEGATRON_KEYS = (
    "fine_grained_activation_offloading offload_modules activation_offload_fraction min_offloaded_tensor_size "
    "delta_offload_bytes_across_pp_ranks delay_offload_until_cuda_graph fine_grained_offloading_max_inflight_offloads "
    "cuda_graph_impl cuda_graph_modules cuda_graph_warmup_steps optimizer.optimizer_cpu_offload "
    "optimizer.optimizer_offload_fraction optimizer.overlap_cpu_optimizer_d2h_h2d"
)
POLICY_KEYS = (
    "offload_optimizer_for_refit offload_optimizer_for_logprob use_pinned_optimizer_offload residency.verify "
    "residency.huge_pages residency.host_memory_limit_gib residency.table numa activation_offload.strict "
    "activation_offload.host_memory_limit_gib"
)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_an_exemplar_is_valid_and_shows_each_offload_key(path):
    validated = load(path)
    assert yaml.safe_load(yaml.safe_dump(validated.recipe.config)) == validated.recipe.config
    written = load_recipe(path).config["policy"]
    for key in POLICY_KEYS.split():
        value_at(written, key)
    for key in MEGATRON_KEYS.split():
        value_at(written["megatron_cfg"], key)
    policy = validated.config["policy"]
    assert policy["use_pinned_optimizer_offload"] is True  # optimizer state moves at link speed
    off = {"fine_grained_activation_offloading": False, "offload_modules": None, "cuda_graph_impl": "none"}
    if path not in LONG_ROWS:
        assert policy["megatron_cfg"].items() >= (off | {"delay_offload_until_cuda_graph": False}).items()


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


def written(value, path=""):
    """Each leaf of a file as it is written, before interpolation."""
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from written(item, f"{path}.{name}" if path else name)
    else:
        yield path, value


def parts_of(path):
    """Returns what a file writes itself, and what its defaults do, by key."""
    root, problems = read_yaml(path)
    assert problems == []
    own = root.plain()
    defaults, inherited = own.pop("defaults", []), {}
    for parent in [defaults] if isinstance(defaults, str) else defaults:
        of_parent, further = parts_of(path.parent / parent)
        inherited |= further | of_parent
    return dict(written(own)), inherited


@pytest.mark.parametrize("path", EVERY_YAML, ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_a_file_repeats_no_value_that_it_inherits(path):
    own, inherited = parts_of(path)
    assert [key for key, value in own.items() if key in inherited and inherited[key] == value] == []
