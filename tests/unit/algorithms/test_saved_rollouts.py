import json
from dataclasses import replace

import pytest
import torch
from support.limits import files_of_at_most

from nemo_offload_rl.algorithms.advantages import RewardScaling
from nemo_offload_rl.algorithms.grpo import prepare
from nemo_offload_rl.algorithms.reward_shaping import OverlongPenalty
from nemo_offload_rl.algorithms.saved_rollouts import HEADER_FILE, RolloutFolder, save_tensors
from nemo_offload_rl.config import RecipeError, check_named_files, load
from nemo_offload_rl.data.problem import DataError
from nemo_offload_rl.metrics.timer import Timer
from nemo_offload_rl.run.checkpoints import CheckpointFolder
from nemo_offload_rl.run.train_loop import StopReason
from tests.unit.algorithms.test_grpo import PLAIN, SCHEDULE, SETTINGS, Setting

RECIPE = "examples/configs/grpo_tiny_cpu.yaml"
DYNAMIC = replace(SETTINGS, num_prompts_per_step=4, use_dynamic_sampling=True, batch_multiplier=1.25)
# Everything that a step computes from rollouts, with several generation batches in a step.
HARD = {
    "loss": replace(PLAIN, reference_policy_kl_penalty=0.1),
    "settings": DYNAMIC,
    "train_global": 16,
    "scale": RewardScaling(source_min=0.0, source_max=1.0, target_min=-1.0, target_max=1.0),
    "shape": OverlongPenalty(buffer_length=2, penalty=0.5, max_response_length=3),
    "overlong_filtering": True,
    "sequence_error_limit": 1.5,
}


def training_rows(outputs):
    rows = {step: row for step, row in outputs.without_timings().items() if step > 0}
    return {step: {name: row[name] for name in row if name.startswith("train/")} for step, row in rows.items()}


@pytest.fixture
def folder(tmp_path):
    return RolloutFolder(tmp_path / "rollouts", {"grpo.seed": 7})


def replaying(folder):
    return replace(SCHEDULE, val_period=0, val_at_start=False, val_at_end=False, last_replayed=folder.steps[-1])


@pytest.mark.parametrize("arguments", [{}, HARD], ids=["plain", "hard"])
def test_a_replay_trains_as_the_run_that_saved_bit_for_bit(folder, arguments):
    saving = Setting(save=folder, **arguments)
    _, saved, _ = saving.run()
    _, unsaved, _ = Setting(**arguments).run()
    assert saved.without_timings() == unsaved.without_timings()
    if arguments:
        assert max(row["train/num_generation_batches"] for row in training_rows(saved).values()) > 1

    setting = Setting(replay=folder, **arguments)
    reason, replayed, _ = setting.run(replaying(folder))
    assert reason is StopReason.STEPS
    assert training_rows(replayed) == training_rows(saved)
    assert torch.equal(setting.policy.table, saving.policy.table)
    assert not {"generate", "send_weights", "offload_before_refit"} & set(setting.policy.calls)


def test_a_replay_resumes_and_ends_with_the_saved_steps(folder, tmp_path):
    _, saved, _ = Setting(save=folder).run(replace(SCHEDULE, max_num_steps=4))

    def checkpoints():
        return CheckpointFolder(tmp_path / "checkpoints", "validation/accuracy", higher_is_better=True, keep_top_k=2)

    _, before, _ = Setting(replay=folder).run(replace(replaying(folder), max_num_steps=2), checkpoints())
    setting = Setting(replay=folder)
    state = setting.resume(checkpoints().newest_first()[0])
    reason, after, run = setting.run(replaying(folder), checkpoints(), state)
    assert (reason, run.state.step) == (StopReason.REPLAYED, 4)
    assert training_rows(before) | training_rows(after) == training_rows(saved)


def test_a_file_has_what_the_engine_and_the_environment_returned(folder):
    Setting(save=folder, overlong_filtering=True).run(replace(SCHEDULE, max_num_steps=1))
    assert sorted(path.name for path in folder.path.iterdir()) == [HEADER_FILE, "step_1.pt"]
    content = torch.load(folder.path / "step_1.pt", weights_only=True)
    (batch,) = content["batches"]
    columns = {"input_ids", "input_lengths", "token_mask", "sample_mask", "generation_logprobs"}
    assert set(batch["columns"]) == columns
    assert batch["columns"]["sample_mask"].all()  # filtering comes later
    assert batch["rewards"].shape == (5, 8)
    assert len(batch["cases"]) == 40


def test_what_cannot_be_replayed_is_said(folder):
    Setting(save=folder).run(replace(SCHEDULE, max_num_steps=3))
    with pytest.raises(DataError, match=r"steps 1 to 3, but the run is at step 4"):
        folder.load(4)
    other = Setting(replay=folder, problems=[*reversed(Setting().grpo._sample.prompts.problems)])
    with pytest.raises(DataError, match=r"prompt 0 of step 1 is '.=' in the saved rollouts, but '.=' in data\.train"):
        other.grpo.step(1, Timer())
    torch.save({}, folder.path / "step_2.pt")
    for spoilt in ((folder.path / "step_2.pt").read_bytes(), b"PK"):
        (folder.path / "step_2.pt").write_bytes(spoilt)
        with pytest.raises(DataError, match=r"step_2\.pt cannot be read as saved rollouts"):
            folder.load(2)
    assert folder.check_to_replay() == ["grpo.debug.replay_rollouts: the run ends after step 3, the last with rollouts"]
    (folder.path / "step_2.pt").unlink()
    with pytest.raises(DataError, match="lacks those of step 2"):
        folder.check_to_replay()
    header = folder.path / HEADER_FILE
    header.write_text(json.dumps({"version": 99, "made_with": {}}))
    with pytest.raises(DataError, match="has format 99"):
        folder.check_to_replay()
    header.unlink()
    with pytest.raises(DataError, match="has no rollouts"):
        folder.check_to_replay()


def test_dynamic_sampling_of_other_rewards_may_need_batches_that_were_not_saved(folder):
    Setting(save=folder, settings=DYNAMIC, train_global=32).run(replace(SCHEDULE, max_num_steps=1))
    constant = RewardScaling(source_min=0.0, source_max=1.0, target_min=0.5, target_max=0.5)
    settings = replace(DYNAMIC, dynamic_sampling_max_gen_batches=20)
    setting = Setting(replay=folder, settings=settings, train_global=32, scale=constant)
    with pytest.raises(DataError, match="generation batches of step 1 do not fill its batch"):
        setting.grpo.step(1, Timer())


def test_a_full_disk_costs_the_rollouts_and_not_the_run(folder, caplog):
    with files_of_at_most(2000):
        reason, _, _ = Setting(save=folder).run(replace(SCHEDULE, max_num_steps=2))
    assert reason is StopReason.STEPS
    assert "The rollouts of step 2 are not saved" in caplog.text
    assert folder.steps == []
    with files_of_at_most(100_000), pytest.raises(OSError, match="File too large"):
        save_tensors(folder.path / "large.pt", torch.zeros(100_000))
    assert [path.name for path in folder.path.iterdir()] == [HEADER_FILE]


def prepared(*overrides):
    return prepare(load(RECIPE, ["~warm_start", *overrides]).config)


def test_a_recipe_replays_only_rollouts_made_with_the_same_values(tmp_path):
    save = f"grpo.debug.save_rollouts={tmp_path}"
    assert not any("rollouts" in note for note in prepared(save).notes)
    config = load(RECIPE, ["~warm_start", save]).config
    assert config["grpo"]["debug"]["replay_rollouts"] is None
    captured = prepare(config)
    assert captured.schedule.last_replayed is None
    made = json.loads((saved_by(config, tmp_path).path / HEADER_FILE).read_text())["made_with"]
    assert made["grpo.num_prompts_per_step"] == 64
    assert [note for note in prepared(save).notes if "replaced step by step" in note]

    replay = f"grpo.debug.replay_rollouts={tmp_path}"
    schedule = prepared(replay).schedule
    assert (schedule.last_replayed, schedule.val_period, schedule.val_at_start, schedule.target) == (1, 0, False, None)
    assert schedule.max_num_steps == captured.schedule.max_num_steps  # the learning rate's schedule follows it
    for override, name in (
        ("grpo.num_generations_per_prompt=4", "grpo.num_generations_per_prompt 8"),
        ("grpo.seed=3", "grpo.seed 42"),
        ("policy.generation.temperature=0.5", r"policy\.generation\.temperature 1\.0"),
        ("data.train.num_problems=700", r"data\.train \(number of problems\)"),
        ("data.train.seed=5", r"data\.train \(checksum of the first 100\)"),
    ):
        for key in (replay, save):
            with pytest.raises(DataError, match=f"were made with {name}.*, but the recipe has"):
                prepared(key, override)


def saved_by(config, path):
    """Saves one empty step as a run of the recipe would."""
    from nemo_offload_rl.algorithms.grpo import _rollout_folder
    from nemo_offload_rl.run.setup import read_data, read_tokenizer

    train, _ = read_data(config["data"], 42)
    tokenizer = read_tokenizer(config["policy"]["tokenizer"])
    folder = _rollout_folder(config, "save_rollouts", train.problems, tokenizer)
    assert folder.path == path
    folder.save(1, [])
    return folder


def test_a_missing_folder_is_named_before_anything_is_loaded(tmp_path):
    recipe = load(RECIPE, ["~warm_start", f"grpo.debug.replay_rollouts={tmp_path / 'absent'}"])
    with pytest.raises(RecipeError, match=r"grpo\.debug\.replay_rollouts: there is no folder .*absent"):
        check_named_files(recipe)
