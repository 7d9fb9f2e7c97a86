"""Runs what most users run, with numbers worked out from NeMo-RL's definitions.

Several optimizer steps a training step, epochs that end, schedules without a length, a BPE tokenizer with a chat
template, texts from 3 to 300 tokens, a model with two ends, and a resume on other ranks. The tiny recipes have none of
these.
"""

from pathlib import Path
from typing import Any

import pytest
import yaml
from support import everyday
from support.examples import ROOT, run_example

from nemo_offload_rl.algorithms.sft import example_batch
from nemo_offload_rl.data.problem import Problem
from nemo_offload_rl.data.prompts import PromptFormat
from nemo_offload_rl.run.setup import read_tokenizer

pytestmark = pytest.mark.slow

LONGEST = 340  # tokens; max_total_sequence_length


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("everyday")
    everyday.make_tokenizer(folder / "model", pad=everyday.END_OF_TEXT)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    ends = tokenizer.convert_tokens_to_ids([everyday.TURN_END, everyday.END_OF_TEXT])
    everyday.make_model(folder / "model", ends=ends)
    everyday.write_rows(folder / "train.jsonl", [(question, "the sum") for question in everyday.texts(16, 1, 150)])
    everyday.write_rows(folder / "validation.jsonl", [(question, "the sum") for question in everyday.texts(7, 2, 60)])
    answers = ["", *everyday.texts(23, 1, 40)]
    everyday.write_rows(folder / "sft.jsonl", list(zip(everyday.texts(24, 1, 100), answers, strict=True)))
    return folder


def _recipe(inputs: Path, algorithm: str, train: str, *, style: str, warmup: int) -> dict[str, Any]:
    def dataset(name: str) -> dict[str, str]:
        keys = {"input_key": "question", "output_key": "reply"}
        return {"dataset_name": "ResponseDataset", "data_path": str(inputs / name)} | keys

    return {
        "defaults": str(ROOT / "examples/configs/common" / f"{algorithm}.yaml"),
        "policy": {
            "model_name": str(inputs / "model"), "precision": "float32", "max_total_sequence_length": LONGEST,
            "train_global_batch_size": 4, "train_micro_batch_size": 2,
            "megatron_cfg": {
                "apply_rope_fusion": False,
                "bias_activation_fusion": False,
                "optimizer": {"lr": 1e-3, "min_lr": 1e-4, "bf16": False, "use_precision_aware_optimizer": False},
                "scheduler": {"lr_decay_style": style, "lr_warmup_iters": warmup, "lr_warmup_init": 1e-5},
                "distributed_data_parallel_config": {"overlap_grad_reduce": False, "overlap_param_gather": False},
            },
        },
        "data": {"train": dataset(train), "validation": dataset("validation.jsonl")},
        "checkpointing": {"checkpoint_dir": "overridden"},
    }  # fmt: skip


def _write(folder: Path, recipe: dict[str, Any]) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


@pytest.fixture(scope="module")
def grpo(inputs, tmp_path_factory):
    """A packed GRPO run over two epochs of two steps each, with four optimizer steps a step."""
    folder = tmp_path_factory.mktemp("grpo")
    recipe = _recipe(inputs, "grpo", "train.jsonl", style="linear", warmup=2)
    recipe["grpo"] = {
        "num_prompts_per_step": 8, "num_generations_per_prompt": 2, "max_num_epochs": 2, "val_period": 1,
        "max_val_samples": 7, "val_batch_size": 4,
    }  # fmt: skip
    recipe["policy"] |= {
        "sequence_packing": {"enabled": True}, "generation": {"max_new_tokens": 16}, "refit_buffer_size_gb": 0.01,
    }  # fmt: skip
    recipe["data"]["default"] = {"env_name": "vowels"}
    recipe["env"] = {"vowels": {"reward": "python", "reward_function": "support.rewards:share_of_vowels"}}
    recipe["checkpointing"] |= {"save_period": 1, "keep_top_k": 1, "metric_name": "val:accuracy"}
    return run_example("run_grpo.py", folder, [], recipe=_write(folder, recipe))


def require_schedule(metrics, steps, **shape):
    for step in steps:
        rate = everyday.upstream_learning_rate(step - 1, init=1e-5, peak=1e-3, floor=1e-4, **shape)
        assert metrics[step]["train/lr"] == pytest.approx(rate), step


def test_grpo_of_several_updates_follows_the_schedule_to_the_last_epochs_end(grpo):
    metrics = grpo.metrics()
    assert [step for step in metrics if step] == [1, 2, 3, 4]
    require_schedule(metrics, range(1, 5), style="linear", warmup=2, decay=4)
    for step in range(1, 5):
        assert metrics[step]["train/num_skipped"] == 0
        assert metrics[step]["train/token_mult_prob_error"] < 1.001


def test_answers_end_at_either_of_the_models_ends(grpo):
    """The model ends an answer after two tokens in the mean, with the end that is not the tokenizer's."""
    for step, row in grpo.metrics().items():
        if step:
            assert row["train/mean_gen_tokens_per_sample"] < 6
            assert row["train/truncation_rate"] < 0.2
        assert row.get("validation/mean_gen_tokens_per_sample", 0) < 6


def test_the_best_checkpoint_and_the_newest_are_kept(grpo):
    rewards = {step: row["validation/accuracy"] for step, row in grpo.metrics().items() if step}
    best = max(rewards, key=lambda step: (rewards[step], step))
    kept = {path.name for path in (grpo.folder / "checkpoints").iterdir()}
    assert kept == {f"step_{best}", "step_4"}


def test_a_run_goes_on_with_another_number_of_ranks(grpo):
    """The schedule's length is that of three epochs now."""
    more = ["grpo.max_num_epochs=3", "cluster.gpus_per_node=2"]
    resumed = run_example("run_grpo.py", grpo.folder, more, recipe=grpo.folder / "recipe.yaml")
    metrics = resumed.metrics()
    assert [step for step in metrics if step] == [1, 2, 3, 4, 5, 6]
    require_schedule(metrics, (5, 6), style="linear", warmup=2, decay=6)
    # Each epoch reads each prompt once, whatever the number of ranks.
    answers = {step: 16 * metrics[step]["train/mean_gen_tokens_per_sample"] for step in metrics if step}
    prompts = [metrics[step]["train/num_tokens"] - answers[step] for step in answers]
    epochs = [first + second for first, second in zip(prompts[::2], prompts[1::2], strict=True)]
    assert epochs == pytest.approx([epochs[0]] * 3)


def test_sft_over_one_epoch_decays_to_its_end_packed_or_padded(inputs, tmp_path):
    recipe = _recipe(inputs, "sft", "sft.jsonl", style="cosine", warmup=1)
    recipe["sft"] = {
        "max_num_steps": 1_000_000, "val_batches": 2, "val_global_batch_size": 4, "val_micro_batch_size": 2,
    }  # fmt: skip
    recipe["checkpointing"]["enabled"] = False
    runs = []
    for packed in ("false", "true"):
        folder = tmp_path / packed
        folder.mkdir()
        overrides = [f"policy.sequence_packing.enabled={packed}"]
        done = run_example("run_sft.py", folder, overrides, recipe=_write(folder, recipe))
        runs.append(done.metrics())
    padded, packed_rows = runs
    steps = [step for step in padded if step]
    assert steps == [1, 2, 3, 4, 5, 6]
    require_schedule(padded, steps, style="cosine", warmup=1, decay=6)
    for step in steps:
        for name in ("train/loss", "train/grad_norm"):
            assert packed_rows[step][name] == pytest.approx(padded[step][name], rel=1e-4), (step, name)
    assert padded[6]["validation/val_loss"] < padded[0]["validation/val_loss"]


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize(("bos", "pad"), [(None, None), ("<s>", "<pad>"), (None, everyday.END_OF_TEXT)])
def test_trained_tokens_are_those_of_nemo_rl(tmp_path, bos, pad, add_generation_prompt):
    """Answers of 0 to 60 words, one of them as long as the limit and one longer: both are left out of the loss."""
    everyday.make_tokenizer(tmp_path, bos=bos, pad=pad)
    tokenizer = read_tokenizer({"name": str(tmp_path)})
    special = {"add_bos": True, "add_eos": True, "add_generation_prompt": add_generation_prompt}
    problems = [
        Problem(prompt, answer)
        for prompt, answer in zip(everyday.texts(12, 1, 60), ["", *everyday.texts(11, 1, 60)], strict=True)
    ]
    wanted = [everyday.upstream_tokens(tokenizer, problem.prompt, problem.answer, **special) for problem in problems]
    limit = sorted(len(prompt) + len(answer) for prompt, answer in wanted)[-2]
    batch = example_batch(PromptFormat(tokenizer, limit, **special), problems)
    for row, (prompt, answer) in enumerate(wanted):
        fits = len(prompt) + len(answer) < limit
        assert batch["sample_mask"][row] == fits
        if fits:
            length = int(batch["input_lengths"][row])
            assert batch["input_ids"][row, :length].tolist() == prompt + answer
            trained = [0.0] * len(prompt) + [1.0] * len(answer)
            assert batch["token_mask"][row].tolist() == trained + [0.0] * (batch["token_mask"].shape[1] - length)
    assert batch["sample_mask"].sum() == 10
