"""Tests the rows of benchmarks/async_grpo.py."""

import async_grpo


def test_a_row_has_the_steps_after_the_first_without_validation():
    def step(number, **seconds):
        timings = {f"timing/train/{name}": value for name, value in seconds.items()}
        memory = {f"performance/memory/{owner}/host_rss_gib": 1.0 * number for owner in ("policy", "generation")}
        return {"step": number, "timing/rollouts/sampling": 3.0, "train/avg_trajectory_age": 1.0} | timings | memory

    rows = [
        {"step": 0, "validation/accuracy": 0.1},
        step(1, training=9.0, total_step_time=20.0),
        step(2, training=2.0, refit=0.02, total_step_time=4.0),
        step(3, training=2.0, refit=0.02, validation=5.0, total_step_time=9.0) | {"validation/accuracy": 0.5},
    ]
    assert async_grpo.row_of("1", rows) == {
        "setting": "async, age 1", "steps": 3, "accuracy": 0.5, "whole_s": 33.0, "step_s": 4.0, "generation_s": 3.0,
        "training_s": 2.0, "wait_s": 0.0, "pause_ms": 20.0, "mean_age": 1.0,
        "host_growth_mib": 2048.0, "gpu_growth_mib": 0.0,
    }  # fmt: skip
