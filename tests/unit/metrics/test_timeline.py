import pytest
from matplotlib.image import imread

from nemo_offload_rl.metrics import plot
from tests.unit.metrics.test_logger import write

STEP = {
    "timing/train/refit": 1.0, "timing/train/sampling": 4.0, "timing/train/logprobs": 2.0,
    "timing/train/training": 2.5, "timing/train/total_step_time": 10.0, "performance/tflops_per_gpu/training": 400.0,
    "performance/model_flop_utilization/training": 0.404, "residency/refit/optimizer_state/gb": 6.25,
    "residency/refit/optimizer_state/copy_s": 0.5, "residency/refit/optimizer_state/exposed_s": 0.0,
    "residency/generate/params/gb": 0.003, "residency/generate/params/copy_s": 0.25,
    "residency/generate/params/exposed_s": 0.25, "residency/train/grads/exposed_s": 0.01,
    "residency/train/optimizer_state/gb": 6.25, "residency/train/optimizer_state/copy_s": 0.5,
    "residency/train/optimizer_state/exposed_s": 0.1,
}  # fmt: skip


def test_phases_follow_one_another_and_fill_the_step():
    bars = plot.phase_bars(STEP)
    assert [(bar.label, bar.start_s, bar.seconds) for bar in bars] == [
        ("refit", 0.0, 1.0), ("sampling", 1.0, 4.0), ("logprobs", 5.0, 2.0), ("training", 7.0, 2.5),
        (plot.OUTSIDE, 9.5, 0.5),
    ]  # fmt: skip
    assert bars[3].note == "2.50 s (25%), 400 TFLOP/s a GPU (40% of its peak)"


def test_copies_begin_where_their_phase_is_entered():
    bars = plot.copy_bars(STEP)
    assert [(bar.label, bar.start_s, bar.seconds) for bar in bars] == [
        ("optimizer state, for refit", 0.0, 0.5),
        ("params, for generate", 0.75, 0.25),  # at the end of the refit, once the weights have been sent
        ("optimizer state, for train", 7.0, 0.5),
    ]
    assert bars[0].note == "6.25 GB in 500 ms, 0 ms waited"
    assert bars[1].note == "3 MB in 250 ms, 250 ms waited"


def test_a_step_without_copies_or_a_gpu_has_phases_alone():
    row = {"timing/train/data": 1.0, "timing/train/training": 1.0, "timing/train/total_step_time": 2.0}
    assert [bar.label for bar in plot.phase_bars(row)] == ["data", "training"]
    assert plot.copy_bars(row) == []
    assert plot.memory_bars(row) == []


def test_rollouts_that_were_sampled_ahead_may_take_longer_than_the_step(tmp_path):
    assert plot.rollout_bars(STEP) == []
    seconds = {"waiting": 1.0, "sampling": 9.0, "rewards": 2.5}
    row = STEP | {f"timing/rollouts/{phase}": value for phase, value in seconds.items()}
    assert [(bar.label, bar.start_s, bar.end_s) for bar in plot.rollout_bars(row)] == [
        ("waiting", 0.0, 1.0), ("sampling", 1.0, 10.0), ("rewards", 10.0, 12.5),
    ]  # fmt: skip
    picture_of(tmp_path, row)


def test_the_typical_step_is_not_the_first_where_there_are_others():
    rows = [{"step": step, "timing/train/total_step_time": seconds} for step, seconds in ((1, 3.0), (2, 1.0), (3, 9.0))]
    row = plot.typical_step([{"step": 0, "timing/train/validation": 1.0}, *rows])
    assert row is not None and row["step"] == 2
    assert plot.typical_step(rows[:1]) == rows[0]
    assert plot.typical_step([{"step": 0}]) is None


def picture_of(folder, row):
    write(folder, {1: row})
    assert plot.plot_step(folder) == folder / "step_timeline.png"
    picture = imread(folder / "step_timeline.png")
    assert picture[..., :3].std() > 0.02  # not a blank sheet
    return picture


def test_a_run_gets_its_picture_and_one_with_a_gpu_a_taller_one(tmp_path):
    on_gpu = STEP | {"performance/memory/policy/gpu_peak_train_gib": 70.0}
    assert [(bar.label, gib) for bar, gib in plot.memory_bars(on_gpu)] == [("training", 70.0)]
    assert picture_of(tmp_path / "gpu", on_gpu).shape[0] > picture_of(tmp_path / "cpu", STEP).shape[0]
    with pytest.raises(ValueError, match="run at least one step"):
        plot.plot_step(tmp_path)


def test_a_reward_run_has_two_panels_and_a_loss_run_without_validation_one(tmp_path):
    assert plot.smoothed([1.0, 3.0, 5.0, 7.0], num_steps=2) == [1.0, 2.0, 4.0, 6.0]
    with pytest.raises(ValueError, match="run at least one step"):
        plot.plot_training(tmp_path, "grpo")
    answers = {"train/reward": 0.6, "train/loss": 0.1}
    write(tmp_path / "grpo", {0: {"validation/accuracy": 0.4}, 1: answers, 2: answers | {"validation/accuracy": 0.5}})
    write(tmp_path / "sft", {step + 1: {"train/loss": loss} for step, loss in enumerate((2.0, float("nan"), 1.0))})
    grpo = imread(plot.plot_training(tmp_path / "grpo", "grpo"))
    sft = imread(plot.plot_training(tmp_path / "sft", "sft"))
    assert (tmp_path / "grpo" / "grpo.png").is_file()
    assert (tmp_path / "sft" / "sft.png").is_file()
    assert grpo.shape[1] == 2 * sft.shape[1]
    write(tmp_path / "ahead", {1: {"train/reward": 0.5, "train/avg_trajectory_age": 1.0}})
    assert imread(plot.plot_training(tmp_path / "ahead", "grpo")).shape[1] == grpo.shape[1]  # reward and age
    assert grpo[..., :3].std() > 0.02  # not a blank sheet
