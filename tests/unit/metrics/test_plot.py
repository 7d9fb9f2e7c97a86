import pytest
from matplotlib.image import imread

from nemo_offload_rl.metrics.logger import RunLogger
from nemo_offload_rl.metrics.plot import plot_training, smoothed


def write_run(run_dir, rows):
    logger = RunLogger(run_dir, tensorboard=False)
    for step, metrics in rows:
        logger.log(step, metrics)
    logger.close()


def test_a_reward_run_has_two_panels_and_a_loss_run_without_validation_one(tmp_path):
    assert smoothed([1.0, 3.0, 5.0, 7.0], num_steps=2) == [1.0, 2.0, 4.0, 6.0]
    with pytest.raises(ValueError, match="run at least one step"):
        plot_training(tmp_path, "grpo")
    write_run(tmp_path / "grpo", [
        (0, {"validation/accuracy": 0.4}),
        (1, {"train/reward": 0.5, "train/loss": 0.1}),
        (2, {"train/reward": 0.6, "train/loss": 0.1, "validation/accuracy": 0.5}),
    ])  # fmt: skip
    write_run(tmp_path / "sft", [(1, {"train/loss": 2.0}), (2, {"train/loss": float("nan")}), (3, {"train/loss": 1.0})])
    grpo = imread(plot_training(tmp_path / "grpo", "grpo"))
    sft = imread(plot_training(tmp_path / "sft", "sft"))
    assert (tmp_path / "grpo" / "grpo.png").is_file()
    assert (tmp_path / "sft" / "sft.png").is_file()
    assert grpo.shape[1] == 2 * sft.shape[1]
    write_run(tmp_path / "ahead", [(1, {"train/reward": 0.5, "train/avg_trajectory_age": 1.0})])
    assert imread(plot_training(tmp_path / "ahead", "grpo")).shape[1] == grpo.shape[1]  # reward and age
    assert grpo[..., :3].std() > 0.02  # not a blank sheet
