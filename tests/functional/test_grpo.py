"""Runs a shortened GRPO recipe as a user does."""

import re
import shutil
import subprocess

import pytest
import torch
from support.examples import SHORT_GRPO, command, environment, run_example
from support.forked_python import forked_python

pytestmark = pytest.mark.slow


def require_same(got, want, *kinds):
    for step, row in got.items():
        for name in want[step]:
            assert not name.startswith(kinds) or row[name] == want[step][name], (step, name)


def test_a_run_logs_every_step_and_leaves_what_it_promises(grpo_run):
    metrics = grpo_run.metrics()
    assert list(metrics) == [0, 1, 2, 3, 4]
    for step in range(1, 5):
        row = metrics[step]
        assert {"train/reward", "train/loss", "train/grad_norm", "train/kl_penalty", "train/lr"} <= set(row)
        # Sampler and trainer compute the same log-probs of the sampled tokens.
        assert 1.0 <= row["train/token_mult_prob_error"] < 1.02
        assert row["train/grad_norm"] > 0
    assert {step for step, row in metrics.items() if "validation/accuracy" in row} == {0, 2, 4}
    assert metrics[1]["train/kl_penalty"] == pytest.approx(0.0, abs=1e-6)  # the policy still has its initial weights
    assert metrics[4]["train/kl_penalty"] > 0
    run = grpo_run.folder / "logs" / "exp_001"
    assert (run / "grpo.png").stat().st_size > 10_000
    assert (run / "step_timeline.png").stat().st_size > 10_000
    assert (run / "report.html").stat().st_size > 50_000  # with both pictures
    assert (run / "run.log").is_file()
    assert list(run.rglob("events.out.tfevents.*"))
    assert sorted(path.name for path in (grpo_run.folder / "checkpoints").iterdir()) == ["step_2", "step_4"]
    assert "Where the time went" in grpo_run.output


def test_a_replay_of_its_rollouts_trains_the_same_without_an_engine(grpo_run, tmp_path):
    replay = f"grpo.debug.replay_rollouts={grpo_run.folder / 'rollouts'}"
    done = run_example("run_grpo.py", tmp_path, [*SHORT_GRPO, "grpo.max_num_steps=4", replay])
    assert "the run starts no engine" in done.output
    want, got = grpo_run.metrics(), done.metrics()
    assert list(got) == [1, 2, 3, 4]
    require_same(got, want, "train/")
    assert not any(name.startswith("validation/") for row in got.values() for name in row)


def test_four_ranks_of_two_parallel_kinds_with_packed_rows_take_the_same_first_step(grpo_run, tmp_path):
    """Runs two data-parallel ranks of two tensor-parallel ranks each."""
    layout = ["cluster.gpus_per_node=4", "policy.megatron_cfg.tensor_model_parallel_size=2"]
    packing = "policy.sequence_packing"
    packed = [f"{packing}.enabled=true", f"{packing}.train_mb_tokens=auto", f"{packing}.logprob_mb_tokens=1024"]
    four = run_example("run_grpo.py", tmp_path, [*SHORT_GRPO, "grpo.max_num_steps=1", *layout, *packed])
    assert "since no GPU's memory is known here; policy.sequence_packing.train_mb_tokens" in four.output
    want, got = grpo_run.metrics()[1], four.metrics()[1]
    for name in ("train/reward", "train/loss", "train/grad_norm", "train/num_tokens"):
        assert got[name] == pytest.approx(want[name], rel=1e-3, abs=1e-5), name


def test_stop_strings_end_the_answers_of_training_and_validation(tmp_path):
    """Each token is a stop string here, so every answer has one token and none is truncated."""
    strings = ",".join(f"'{token}'" for token in [*"0123456789+=", "<eos>", "<pad>"])
    stops = [f"policy.generation.stop_strings=[{strings}]", "policy.generation.stop_token_ids=[]"]
    overrides = [*SHORT_GRPO, "grpo.max_num_steps=1", "checkpointing.enabled=false", *stops]
    done = run_example("run_grpo.py", tmp_path, overrides)
    metrics = done.metrics()
    assert metrics[0]["validation/mean_gen_tokens_per_sample"] == 1.0
    assert metrics[1]["train/mean_gen_tokens_per_sample"] == 1.0
    assert metrics[1]["train/truncation_rate"] == 0.0


def test_a_checkpoint_exports_to_a_folder_that_transformers_loads(grpo_run, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    checkpoint = shutil.copytree(grpo_run.folder / "checkpoints" / "step_4", tmp_path / "step_4")
    # As in a checkpoint of a model whose folder has this file.
    (checkpoint / "policy/hf_config/generation_config.json").write_text('{"eos_token_id": [12, 13]}')
    arguments = [forked_python(), "-m", "nemo_offload_rl.cli", "export", checkpoint, tmp_path / "hf"]
    done = subprocess.run(arguments, env=environment(), capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"wrote {tmp_path / 'hf'}\n", "")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    ids = tokenizer("07+85=", return_tensors="pt").input_ids
    assert ids.shape == (1, 6)
    assert torch.isfinite(model(ids).logits).all()
    assert model.generation_config.eos_token_id == [12, 13]


def test_a_reward_that_is_no_number_ends_the_run_with_one_sentence(tmp_path):
    function = "++env.arithmetic.reward_function=support.rewards:not_a_number"
    overrides = [*SHORT_GRPO, function, "grpo.val_at_start=false", "grpo.max_num_steps=1"]
    done = run_example("run_grpo.py", tmp_path, overrides, status=1)
    assert "Traceback" not in done.output
    named = r"support\.rewards:not_a_number must return a finite number.* found nan for the answer '.*' to the prompt"
    assert re.search(named, done.output), done.output
    assert not list((tmp_path / "checkpoints").glob("step_*"))


def test_a_wrong_recipe_ends_with_status_2_and_no_traceback(tmp_path):
    overrides = ["grpo.num_prompts_per_step=0", "policy.precison=float32"]
    started = command("run_grpo.py", tmp_path, overrides)
    done = subprocess.run(started, env=environment(), capture_output=True, text=True, timeout=300, check=False)
    output = done.stdout + done.stderr
    assert done.returncode == 2
    assert "Traceback" not in output
    assert "policy.precision" in output  # the nearest valid key
    assert not (tmp_path / "logs").exists()


COLOCATED = "policy.generation.colocated"
APART = ["cluster.gpus_per_node=2", f"{COLOCATED}.enabled=false", f"{COLOCATED}.resources.gpus_per_node=1"]
NO_STEP_AHEAD = ["grpo.async_grpo.enabled=true", "grpo.async_grpo.max_trajectory_age_steps=0"]


@pytest.mark.parametrize("ahead", [[], NO_STEP_AHEAD], ids=["", "no step sampled ahead"])
def test_generation_on_devices_of_its_own_is_the_same_run(grpo_run, tmp_path, ahead):
    overrides = [*SHORT_GRPO, "grpo.max_num_steps=4", "policy.verify_refit=true", *APART, *ahead]
    done = run_example("run_grpo.py", tmp_path, overrides)
    want, got = grpo_run.metrics(), done.metrics()
    assert list(want) == list(got)
    require_same(got, want, "train/", "validation/")
    assert got[4]["train/grad_norm"] > 0


def test_a_step_is_sampled_while_another_trains(tmp_path):
    """Engines on devices of their own and those on the policy's give the same run."""
    settings = [*SHORT_GRPO, *("grpo.max_num_steps=4", "grpo.async_grpo.enabled=true", "policy.verify_refit=true")]
    settings += ["loss_fn.use_importance_sampling_correction=true"]
    done = run_example("run_grpo.py", tmp_path / "apart", [*settings, *APART])
    rows = done.metrics()
    shared = run_example("run_grpo.py", tmp_path / "shared", settings)
    require_same(rows, shared.metrics(), "train/", "validation/")
    assert [rows[step]["train/avg_trajectory_age"] for step in range(1, 5)] == [0, 1, 1, 1]
    assert rows[1]["train/token_mult_prob_error"] == pytest.approx(1, abs=0.02)
    assert all(rows[step]["train/grad_norm"] > 0 for step in range(1, 5))
    assert "wait_for_rollouts" in done.output


def test_weights_are_sent_while_answers_are_generated(tmp_path):
    """Generation is slower than training, so that weights come within the answers of steps 2 and 3."""
    ahead = ["grpo.async_grpo.enabled=true", "loss_fn.use_importance_sampling_correction=true"]
    in_flight = [
        "grpo.async_grpo.in_flight_weight_updates=true",
        "grpo.async_grpo.recompute_kv_cache_after_weight_updates=true",
        "grpo.val_period=3",  # before a validation no weights are in flight
        "grpo.val_at_start=false", "grpo.max_val_samples=8", "checkpointing.enabled=false",
        "policy.generation_batch_size=4", "policy.generation.stop_token_ids=[]", "policy.generation.max_new_tokens=60",
        "policy.max_total_sequence_length=68", "policy.hf_config.max_position_embeddings=68",
    ]  # fmt: skip
    done = run_example("run_grpo.py", tmp_path, [*SHORT_GRPO, "grpo.max_num_steps=3", *APART, *ahead, *in_flight])
    rows = done.metrics()
    ages = [rows[step]["train/avg_trajectory_age"] for step in range(1, 4)]
    assert ages[0] == 0 and all(0 <= age <= 1 for age in ages)
    assert any(0 < age < 1 for age in ages), ages
