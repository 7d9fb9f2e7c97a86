"""Mistakes in files and warm starts, and what a valid recipe becomes."""

import pytest
import yaml

from nemo_offload_rl.config import load
from nemo_offload_rl.config.keys.schema_problems import ABSENT, value_at
from tests.unit.config.conftest import CONFIGS, DATA, MEGATRON


def test_mistakes_in_a_file_have_its_lines_in_its_order(tmp_path, error_of):
    recipe, grpo, sft = tmp_path / "recipe.yaml", CONFIGS / "grpo_tiny_cpu.yaml", CONFIGS / "sft_tiny_cpu.yaml"
    for text, *overrides in (
        ("policy: {}",),
        ("gpro: {}",),
        ("a: 1\nrm: {}",),
        (f"defaults: {sft}\ndata: {{train: {{dataset_name: oasst, split: train}}}}",),
        (f"defaults: {grpo}\nwarm_start:\n  recipe: {sft}\n  overrides:\n    - sft.seed=x\n    - nope=1\n",),
        (f"defaults: {grpo}\ngrpo:\n  max_num_steps: ${{oc.env:NO_SUCH_VARIABLE, 7}}",),
        (f"defaults: {grpo}\nwarm_start: {{recipe: {sft}}}\ngrpo:\n  seed: x\n  nope: 1", "loss_fn.ratio_clip_min=x"),
    ):
        recipe.write_text(text)
        error_of(*overrides, recipe=recipe)


def test_a_warm_start_is_checked_for_the_ranks_that_it_runs_on():
    three = ["cluster.gpus_per_node=3", "grpo.num_prompts_per_step=48", "policy.train_micro_batch_size=128"]
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


CASES = yaml.safe_load((DATA / "resolved.yaml").read_text())


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("installed_vllm")
def test_a_recipe_resolves_to_its_values(name):
    case = CASES[name]
    recipe, *overrides = case["recipe"].split()
    validated = load(CONFIGS / recipe, overrides)
    for config, values in ((validated.config, "values"), (validated.recipe.config, "printed")):
        assert {path: value_at(config, path) for path in case.get(values, {})} == case.get(values, {})
    assert all(value_at(validated.config, path) is ABSENT for path in case.get("absent", ()))
    for begin in case.get("notes", ()):
        assert any(note.startswith(begin) for note in validated.notes), begin
    assert not [note for note in validated.notes if any(words in note for words in case.get("unsaid", ()))]
