"""Tests that a long run uses no more memory, files or threads at its end than near its beginning."""

import json
from dataclasses import dataclass
from statistics import median

import psutil
import pytest
from support.reliability import LiveRun, running

NUM_STEPS = 2000
WARM_STEPS = 100
MAX_GROWTH = 0.02
MAX_MORE_THREADS = 4  # Ray's pools sometimes start one or two more

SOAK = [
    f"grpo.max_num_steps={NUM_STEPS}", "grpo.max_num_epochs=1000", "grpo.num_prompts_per_step=2",
    "grpo.num_generations_per_prompt=2", "grpo.val_period=50", "grpo.stop_at_validation_metric=null",
    "grpo.stop_at_validation_threshold=null", "policy.train_global_batch_size=4", "policy.train_micro_batch_size=4",
    "policy.generation.max_new_tokens=4", "policy.max_total_sequence_length=16",
    "policy.megatron_cfg.scheduler.lr_decay_iters=3000", "logger.tensorboard_enabled=true",
    "checkpointing.save_period=200",
]  # fmt: skip


@dataclass(frozen=True)
class Sample:
    step: int
    rss_bytes: int
    num_fds: int
    num_threads: int


def sample(process: psutil.Process, step: int) -> Sample:
    with process.oneshot():
        return Sample(step, process.memory_info().rss, process.num_fds(), process.num_threads())


def watch(run: LiveRun) -> dict[str, list[Sample]]:
    run.wait_until(lambda: run.num_rows() >= WARM_STEPS)
    processes = {
        "driver": psutil.Process(run.process.pid),
        "policy": run.actor("ray::WorkerActor"),
        "generation": run.actor("ray::GeneratorActor"),
    }
    samples: dict[str, list[Sample]] = {name: [] for name in processes}
    for step in range(WARM_STEPS, NUM_STEPS - 20, 20):
        run.wait_until(lambda step=step: run.num_rows() >= step)
        for name, process in processes.items():
            samples[name].append(sample(process, step))
    return samples


@pytest.mark.slow
@pytest.mark.reliability
def test_two_thousand_steps_hold_no_more_than_a_hundred(tmp_path, record_property):
    with running(tmp_path, SOAK, timeout_s=3 * 3600) as run:
        samples = watch(run)
        assert run.end() == 0, run.output
    as_json = json.dumps({name: [vars(one) for one in rows] for name, rows in samples.items()})
    (tmp_path / "samples.json").write_text(as_json)
    for name, rows in samples.items():
        quarter = len(rows) // 4
        begin, end = rows[:quarter], rows[-quarter:]
        rss = [median(row.rss_bytes for row in part) / 2**20 for part in (begin, end)]
        fds = [min(row.num_fds for row in part) for part in (begin, end)]  # a refit opens two more while it lasts
        threads = [max(row.num_threads for row in part) for part in (begin, end)]
        record_property(name, f"MiB {rss[0]:.1f} -> {rss[1]:.1f}, files {fds}, threads {threads}")
        assert rss[1] <= rss[0] * (1 + MAX_GROWTH), (name, rss)
        assert fds[1] <= fds[0], (name, fds)
        assert threads[1] <= threads[0] + MAX_MORE_THREADS, (name, threads)
