"""Tests the adapter in a double of NeMo-RL's Megatron worker, whose phases make the calls of the named commit."""

import copy
import importlib
import json
import runpy
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.jobs import assert_equal
from support.phases import delay_moves
from support.tiny_megatron import TinyMegatron, tiny_megatron

from nemo_offload_rl.residency.table import Target

LAUNCHER = Path(__file__).parents[3] / "examples" / "nemo_rl_launcher.py"
WORKER = "nemo_rl.models.policy.workers.megatron_policy_worker"
THEIRS, OURS = f"{WORKER}.MegatronPolicyWorker", "nemo_offload_rl.adapters.nemo_rl.MegatronPolicyWorker"


class WorkerDouble:
    """Has what the adapter uses of NeMo-RL's worker: settings, the two methods that move state, and their callers."""

    def __init__(self, *, async_save: bool = False, shares_grad_buffer: bool = False, **settings: bool) -> None:
        self.optimizer_cpu_offload = settings.get("optimizer_cpu_offload", False)
        self.offload_optimizer_for_refit = settings.get("offload_optimizer_for_refit", True)
        self.offload_optimizer_for_logprob = settings.get("offload_optimizer_for_logprob", False)
        checkpoint = types.SimpleNamespace(async_save=async_save)
        self.mcore_state = types.SimpleNamespace(cfg=types.SimpleNamespace(checkpoint=checkpoint))
        self.shares_grad_buffer = shares_grad_buffer
        self.keep_params_for_generation = settings.get("keep_params_for_generation", False)
        self.job: TinyMegatron = tiny_megatron()
        self.model, self.optimizer = self.job.model, self.job.optimizer
        self.reference_state_dict = copy.deepcopy(self.model.state_dict())
        self.own_moves: list[str] = []
        self.model = self.move_model(self.model, "cpu")  # makes room to load the reference weights
        self.model = self.move_model(self.model, "cuda")

    def _uses_mxfp8_overlap_shared_param_buffer(self) -> bool:
        return self.shares_grad_buffer

    def move_model(self, model: Any, device: str, move_params: bool = True, move_grads: bool = True) -> Any:
        self.own_moves.append(f"model {device}")
        return model

    def move_optimizer(self, device: str) -> None:
        self.own_moves.append(f"optimizer {device}")

    def _moves_optimizer(self) -> bool:
        return self.optimizer is not None and not self.optimizer_cpu_offload

    def prepare_for_training(self) -> None:
        self.model = self.move_model(self.model, "cuda", move_grads=True, move_params=True)
        self.model.train()
        if self._moves_optimizer():
            self.move_optimizer("cuda")

    def prepare_for_lp_inference(self, keep_train_buffers: bool = False) -> None:
        self.model = self.move_model(self.model, "cuda", move_grads=False)
        self.model.eval()
        if not keep_train_buffers:
            self.model = self.move_model(self.model, "cpu", move_params=False, move_grads=True)
        if not keep_train_buffers and self._moves_optimizer() and self.offload_optimizer_for_logprob:
            self.move_optimizer("cpu")

    def finish_inference(self) -> None:
        self.model.eval()
        self.model = self.move_model(self.model, "cpu", move_params=True, move_grads=False)

    @contextmanager
    def use_reference_model(self) -> Iterator[None]:
        with torch.no_grad():
            own = {name: tensor.detach().to("cpu", copy=True) for name, tensor in self._weights().items()}
            self._fill(self.reference_state_dict)
            yield
            self._fill(own)

    def _weights(self) -> dict[str, torch.Tensor]:
        return {name: value for name, value in self.model.state_dict().items() if torch.is_tensor(value)}

    def _fill(self, source: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in self._weights().items():
            tensor.copy_(source[name])

    def offload_before_refit(self) -> None:
        self.model = self.move_model(self.model, "cpu", move_params=False, move_grads=True)
        if self._moves_optimizer() and self.offload_optimizer_for_refit:
            self.move_optimizer("cpu")

    def offload_after_refit(self) -> None:
        self.model.eval()
        moves_params = not self.keep_params_for_generation
        self.model = self.move_model(self.model, "cpu", move_params=moves_params, move_grads=True)
        self.offload_before_refit()

    def save_checkpoint(self) -> dict[str, torch.Tensor]:
        self.model = self.move_model(self.model, "cuda", move_params=True, move_grads=False)
        if self._moves_optimizer():
            self.move_optimizer("cuda")
        self.optimizer.state_dict()
        return self.job.everything()

    def _iter_sglang_hf_weight_buckets(self, *, target_precision: str) -> Iterator[list[tuple[str, torch.Tensor]]]:
        yield [(name, parameter.data) for name, parameter in self.model.named_parameters()]


@pytest.fixture
def adapter(monkeypatch):
    """Imports the adapter's module with the double in NeMo-RL's place."""
    contents = {
        WORKER: {"MegatronPolicyWorkerImpl": WorkerDouble},
        "nemo_rl.models.policy.utils": {"get_runtime_env_for_policy_worker": lambda name: {"env_vars": {"OF": name}}},
        "nemo_rl.distributed.ray_actor_environment_registry": {"ACTOR_ENVIRONMENT_REGISTRY": {THEIRS: "its python"}},
    }
    for name, members in contents.items():
        parts = name.split(".")
        for length in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:length]), types.ModuleType(parts[length - 1]))
        module = types.ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "nemo_offload_rl.adapters.nemo_rl", raising=False)
    yield importlib.import_module("nemo_offload_rl.adapters.nemo_rl")
    sys.modules.pop("nemo_offload_rl.adapters.nemo_rl", None)


@pytest.fixture
def ranged(adapter, rank):
    """Makes workers whose state is in ranges; closes it when the test ends."""
    made = []

    def make(**settings: bool) -> Any:
        made.append(adapter.RangeOffload(**settings))
        return made[-1]

    yield make
    for worker in made:
        worker._adopted.close()


def where(worker: Any) -> dict[str, str]:
    residency = worker._adopted.offloader.residency
    return {str(target): str(residency.where(target)) for target in worker._adopted.offloader.targets}


def steps(worker: Any, num_steps: int = 10) -> list[Any]:
    """Returns the reports of GRPO steps: log-probs, training, refit."""
    reports: list[Any] = []
    for seed in range(num_steps):
        worker.prepare_for_lp_inference()
        logits = worker.job.logits(seed)
        worker.prepare_for_training()
        reports.append((logits.tolist(), worker.job.step(seed)))
        worker.offload_before_refit()
        reports.append([parameter.tolist() for parameter in worker.model.parameters()])
        worker.offload_after_refit()
    return reports


@pytest.mark.parametrize(
    ("settings", "params"),
    [
        ({"offload_optimizer_for_logprob": False}, "host"),
        ({"offload_optimizer_for_logprob": True}, "host"),
        ({"keep_params_for_generation": True}, "gpu"),
    ],
)
def test_ten_steps_equal_those_without_any_moves(ranged, monkeypatch, settings, params):
    plain = steps(WorkerDouble())
    delay_moves(monkeypatch, seconds=0.002)
    worker = ranged(**settings)
    assert steps(worker) == plain
    assert where(worker) == {"params": params, "grads": "dropped", "optimizer_state": "host"}
    assert (worker._adopted.offloader.mapped_bytes == 0) == (params == "host")
    assert worker.own_moves == ["model cpu", "model cuda"]  # the moves while it was built
    inference_model = torch.nn.Linear(1, 1)  # another model moves in NeMo-RL's own way
    assert worker.move_model(inference_model, "cpu") is inference_model
    assert worker.own_moves[-1] == "model cpu"


def streamed_steps(worker: Any, num_steps: int = 5) -> list[Any]:
    reports: list[Any] = []
    for step in range(num_steps):
        worker.prepare_for_training()
        worker.model.zero_grad_buffer()
        worker.optimizer.zero_grad()
        reports.append(worker.job.forward_backward(2 * step))
        grads = worker.model.buffers[0].grad_data.clone()
        worker.prepare_for_lp_inference(keep_train_buffers=True)
        reports.append(worker.job.logits(step).tolist())
        worker.prepare_for_training()
        assert grads.any() and torch.equal(worker.model.buffers[0].grad_data, grads)
        reports.append(worker.job.forward_backward(2 * step + 1))
        reports.append(float(worker.optimizer.step()[1]))
        worker.offload_before_refit()
        worker.offload_after_refit()
    return reports


def test_gradients_that_are_kept_through_log_probs_survive_the_preparation_for_training(ranged, monkeypatch):
    plain = streamed_steps(WorkerDouble())
    delay_moves(monkeypatch, seconds=0.002)
    worker = ranged(offload_optimizer_for_logprob=True)
    assert streamed_steps(worker) == plain
    worker.prepare_for_training()
    worker.prepare_for_lp_inference(keep_train_buffers=True)
    assert where(worker) == {"params": "gpu", "grads": "gpu", "optimizer_state": "gpu"}


def steps_with_reference(worker: Any, num_steps: int = 5) -> list[Any]:
    """Returns the reports of PPO steps: log-probs of the policy and of its reference, training."""
    reports: list[Any] = []
    for seed in range(num_steps):
        worker.prepare_for_lp_inference()
        reports.append(worker.job.logits(seed).tolist())
        with worker.use_reference_model():
            reports.append(worker.job.logits(seed).tolist())
        worker.finish_inference()
        worker.prepare_for_training()
        reports.append(worker.job.step(seed))
    return reports


def test_steps_with_a_reference_model_and_an_end_of_inference_equal_those_without_any_moves(ranged, monkeypatch):
    plain = steps_with_reference(WorkerDouble())
    assert plain[0] == plain[1]
    assert plain[-3] != plain[-2]
    delay_moves(monkeypatch, seconds=0.002)
    worker = ranged()
    assert steps_with_reference(worker) == plain
    worker.finish_inference()
    assert where(worker) == {"params": "host", "grads": "gpu", "optimizer_state": "gpu"}


def test_optimizer_state_that_never_leaves_takes_no_host_memory(ranged):
    for settings in ({"optimizer_cpu_offload": True}, {"offload_optimizer_for_refit": False}):
        worker = ranged(**settings)
        worker.offload_after_refit()
        assert where(worker) == {"params": "host", "grads": "dropped", "optimizer_state": "gpu"}
        offloader = worker._adopted.offloader
        assert offloader.context.arena.allocated_bytes < 1.1 * offloader.nbytes()["params"]
        worker.prepare_for_training()


def test_a_checkpoint_of_state_that_is_away_has_its_contents(ranged, monkeypatch):
    plain = WorkerDouble()
    plain.job.step(0)
    worker = ranged()
    worker.job.step(0)
    worker.offload_after_refit()
    delay_moves(monkeypatch, seconds=0.05)
    assert_equal(worker.save_checkpoint(), plain.save_checkpoint())


def test_sglang_gets_memory_that_it_can_open(ranged):
    worker = ranged()
    params = worker._adopted.offloader.targets[Target.PARAMS].flat_buffer
    (bucket,) = worker._iter_sglang_hf_weight_buckets(target_precision="bf16")
    for (name, tensor), (wanted, parameter) in zip(bucket, worker.model.named_parameters(), strict=True):
        assert name == wanted
        assert torch.equal(tensor, parameter)
        assert params.holds(parameter)
        assert not params.holds(tensor)


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"async_save": True}, "async_save: true"), ({"shares_grad_buffer": True}, "reuse_grad_buf_for_mxfp8_param_ag")],
)
def test_what_ranges_cannot_do_is_refused(adapter, rank, settings, words):
    with pytest.raises(ValueError, match=words):
        adapter.RangeOffload(**settings)


def test_the_launcher_gives_our_actor_the_environment_of_theirs(adapter, monkeypatch, tmp_path, capsys):
    script = tmp_path / "run_grpo.py"
    script.write_text("import json, sys; print(json.dumps(sys.argv))")
    monkeypatch.setattr(sys, "argv", ["nemo_rl_launcher.py", str(script), "--config", "x.yaml"])
    launcher = runpy.run_path(str(LAUNCHER), run_name="__main__")
    assert launcher["ENVIRONMENTS"][OURS] == "its python"
    assert json.loads(capsys.readouterr().out) == [str(script), "--config", "x.yaml"]
    actor = getattr(adapter, OURS.rpartition(".")[2])
    assert actor._default_options["runtime_env"]["env_vars"] == {"OF": "megatron_policy_worker"}
    assert issubclass(actor.__ray_metadata__.modified_class, adapter.RangeOffload)
