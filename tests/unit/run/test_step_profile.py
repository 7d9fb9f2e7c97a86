"""Tests the files that logger.profile leaves, with the toy policy's verbs called as a rank's are."""

import gzip
import json
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from ray import cloudpickle

from nemo_offload_rl.config import for_machine, load
from nemo_offload_rl.metrics.timer import Recording
from nemo_offload_rl.placement.relay import Part
from nemo_offload_rl.run.step_profile import step_profile
from nemo_offload_rl.run.train_loop import no_profile
from nemo_offload_rl.worker.actor import WorkerActor
from tests.unit.algorithms.test_grpo import SCHEDULE, Setting

RECIPE = "examples/configs/grpo_tiny_cpu.yaml"
SECTION = {"steps": [2, 3], "ranks": [0], "trace": True, "memory": False, "nvtx": False}


class Rank(WorkerActor):
    """Is a rank in this process, whose own log and signals stay."""

    def __init__(self, worker):
        self._worker, self._recording = worker, None

    def call(self, function):
        [result] = super().call(cloudpickle.dumps(function), None, Part(0, wants_result=True))
        return result


class Group:
    """Calls a toy policy's `train` through an actor, as `PolicyWorkerGroup` does; passes other verbs on."""

    def __init__(self, policy):
        self.policy, self.rank = policy, Rank(policy)

    def __getattr__(self, name):
        return getattr(self.policy, name)

    def train(self, data, loss_fn, gbs, mbs):
        return self.rank.call(lambda worker, _: worker.train(data, loss_fn, gbs, mbs))

    def start_profile(self, options, prefix):
        # A process has one tracer: here it is the driver's.
        self.rank.start_profile(f"{prefix}_rank_0", trace=False, memory=options.memory, nvtx=options.nvtx)

    def stop_profile(self):
        self.rank.stop_profile()


def names_in(path):
    with gzip.open(path) as file:
        return {event["name"] for event in json.load(file)["traceEvents"]}


def run_profiled(folder, section):
    setting = Setting()
    setting.grpo._policy = Group(setting.policy)
    profile = step_profile(section, folder, setting.grpo, range(1, 5))
    _, outputs, _ = setting.run(replace(SCHEDULE, max_num_steps=4), profile=profile)
    return outputs.without_timings()


def test_the_chosen_steps_and_they_alone_have_traces_with_their_phases(tmp_path):
    rows = run_profiled(tmp_path / "profile", SECTION)
    assert rows == run_profiled(tmp_path / "none", None)
    assert not (tmp_path / "none").exists()
    files = sorted((tmp_path / "profile").iterdir())
    assert [path.name for path in files] == ["step_2_driver.json.gz", "step_3_driver.json.gz"]
    for path in files:
        assert {"refit", "sampling", "rewards", "logprobs", "training"} <= names_in(path)


@pytest.mark.parametrize(
    ("steps", "warns"), [(range(1, 5), False), (range(3, 9), False), (range(4, 9), True), (range(1, 2), True)]
)
def test_a_profile_without_a_step_of_the_run_is_warned_of(steps, warns, tmp_path, caplog):
    step_profile(SECTION, tmp_path, None, steps)
    assert ["logger.profile" in record.getMessage() for record in caplog.records] == [True] * warns


def test_a_ranks_trace_has_its_verbs_and_what_they_run(tmp_path):
    rank = Rank(torch.nn.Linear(2, 2))
    rank.call(lambda worker, _: worker.requires_grad_())
    rank.start_profile(str(tmp_path / "step_1_rank_0"), trace=True, memory=False, nvtx=False)
    rank.call(lambda worker, _: worker.forward(torch.ones(1, 2)))
    rank.call(lambda worker, _: worker.zero_grad())
    rank.stop_profile()
    rank.call(lambda worker, _: worker.eval())
    names = names_in(tmp_path / "step_1_rank_0.json.gz")
    assert {"forward", "aten::linear", "zero_grad"} <= names
    assert not {"eval", "requires_grad_"} & names
    rank.start_profile(None, trace=True, memory=False, nvtx=False)  # a rank that is not among those chosen
    rank.stop_profile()
    assert len(list(tmp_path.iterdir())) == 1


@pytest.fixture
def cuda(monkeypatch):
    """Records calls of torch's functions that need CUDA."""
    calls = []

    @contextmanager
    def nvtx_range(name):
        calls.append(f"<{name}>")
        yield
        calls.append(f"</{name}>")

    def dump(path):
        calls.append("dump")
        torch.save({}, path)

    def record(enabled="all", max_entries=None):
        calls.append(f"record {enabled}")

    monkeypatch.setattr(torch.cuda.nvtx, "range", nvtx_range)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    return calls


def test_memory_and_ranges_without_a_trace(cuda, tmp_path):
    run_profiled(tmp_path / "profile", SECTION | {"steps": [3, 3], "trace": False, "memory": True, "nvtx": True})
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["step_3_rank_0_memory.pickle"]
    assert [cuda[0], *cuda[-2:]] == ["record all", "dump", "record None"]
    training = cuda.index("<training>")  # the driver's phase, around the rank's verb
    assert cuda[training : training + 4] == ["<training>", "<train>", "</train>", "</training>"]
    assert {"<refit>", "<sampling>", "<logprobs>"} <= set(cuda)


def test_a_snapshot_is_written_where_memory_runs_out(cuda, tmp_path):
    recording = Recording(tmp_path / "step_1_rank_0", trace=False, memory=True, nvtx=False)
    with pytest.raises(torch.OutOfMemoryError), recording.range("train"):
        raise torch.OutOfMemoryError("no room")
    assert cuda == ["record all", "dump"]
    assert (tmp_path / "step_1_rank_0_memory.pickle").exists()


def test_a_profile_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    (tmp_path / "profile").write_text("a file in the way")
    recording = Recording(tmp_path / "profile" / "step_1_rank_0", trace=True, memory=False, nvtx=False)
    recording.stop()
    assert "step_1_rank_0.json.gz cannot be written" in caplog.text


def test_what_needs_a_gpu_is_off_without_one_and_said():
    overrides = ["++logger.profile={steps: [1, 2], memory: true, nvtx: true}"]
    config = load(RECIPE, ["~warm_start", *overrides]).config
    assert config["logger"]["profile"] == SECTION | {"steps": [1, 2], "memory": True, "nvtx": True}
    adapted, lines = for_machine(config, has_gpus=False)
    assert adapted["logger"]["profile"] == SECTION | {"steps": [1, 2]}
    off = [line.partition(" is off")[0] for line in lines if "profile" in line]
    assert off == ["logger.profile.memory", "logger.profile.nvtx"]
    assert for_machine(config, has_gpus=True)[0] == config
    assert step_profile(load(RECIPE).config["logger"]["profile"], None, None, range(1, 5)) is no_profile
