"""Checks verl's real Megatron engine with a tiny model, GPU or CPU; verl changes logging, so use a new process."""

import functools
import importlib.util
import sys
import tempfile
import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.utils import unwrap_model
from support.phases import checkpoint_entries, delay_moves, differing
from support.tiny_megatron import TinyMegatron, one_rank, tiny_megatron

from nemo_offload_rl.mcore.patches.torch_distributed import pass_results_in_process
from nemo_offload_rl.memory.pinned import PinnedArena
from nemo_offload_rl.residency.table import Placement, Target

SCENARIOS: dict[str, Callable[[], None]] = {}


def scenario(function: Callable[[], None]) -> Callable[[], None]:
    SCENARIOS[function.__name__] = function
    return function


def run_scenarios(rank: int, world_size: int, ports: list[int]) -> dict[str, str]:
    """Runs all scenarios; returns, by name, the traceback of the error with which it ended, or an empty text."""
    results = dict.fromkeys(SCENARIOS, "")
    pass_results_in_process()  # megatron-core's checkpoint writer would start another process
    if not torch.cuda.is_available():
        torch.cuda.mem_get_info = lambda *_: (0, 0)  # for verl's log, which assumes a GPU on every machine
    with one_rank():
        for name, function in SCENARIOS.items():
            try:
                function()
            except (Exception, pytest.fail.Exception):  # noqa: BLE001  (the test of that name fails with it)
                results[name] = traceback.format_exc()
    return results


def registered() -> dict[str, str]:
    from verl.workers.engine import EngineRegistry

    kinds = [("language_model", "megatron"), ("value_model", "megatron"), ("language_model", "fsdp2")]
    return {
        f"{model_type} {backend}": EngineRegistry.get_engine_cls(model_type, backend).__name__
        for model_type, backend in kinds
    }


@scenario
def with_external_lib_the_registry_hands_out_our_engines() -> None:
    """Runs first, before anything has imported the adapter."""
    from verl.utils.import_utils import import_external_libs

    kinds = {"language_model megatron": "LM", "value_model megatron": "Value"}
    theirs = {kind: f"MegatronEngineWith{head}Head" for kind, head in kinds.items()}
    assert registered() == theirs | {"language_model fsdp2": "FSDPEngineWithLMHead"}
    import_external_libs("nemo_offload_rl.adapters.verl")  # as a model's configuration does
    ours = {kind: f"RangeOffloadWith{head}Head" for kind, head in kinds.items()}
    assert registered() == ours | {"language_model fsdp2": "RefusedEngine"}


class Bridge:
    """Exports weights as Megatron-Bridge does on one rank: views of parameters, and one that is assembled."""

    def get_conversion_tasks(self, module: list[torch.nn.Module]) -> list[str]:
        return [name for name, _ in unwrap_model(module)[0].named_parameters()]

    def export_hf_weights(
        self, module: list[torch.nn.Module], conversion_tasks: list[str]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        parameters = dict(unwrap_model(module)[0].named_parameters())
        for name in conversion_tasks:
            yield name, parameters[name].data
        yield "all", torch.cat([parameters[name].data.flatten() for name in conversion_tasks])


class TinyParts:
    """Overrides what an engine builds, as its first base class, with a tiny model."""

    def _build_tf_config(self) -> None:
        self.is_value_model, self.vanilla_bridge, self.share_embeddings_and_output_weights = False, False, False
        self.tf_config, self.provider, self.peft_cls, self.bridge = None, None, None, Bridge()
        self.param_dtype = torch.bfloat16

    def _build_megatron_module(self) -> list[torch.nn.Module]:
        config = self.engine_config
        self.job: TinyMegatron = tiny_megatron(
            forward_only=config.forward_only, use_distributed_optimizer=config.use_distributed_optimizer
        )
        return [self.job.model]

    def _build_optimizer(self) -> Any:
        return self.job.optimizer

    def _build_lr_scheduler(self) -> None:
        return None

    def _mcore_export_index(self) -> list[Any]:
        """Returns records of whole parameters, which verl otherwise makes from Megatron-Bridge's mappings."""
        from verl.workers.engine.megatron.delta_export import McoreParamExport
        from verl.workers.engine.spec import ShardSpec

        parameters = unwrap_model(self.module)[0].named_parameters()
        return [
            McoreParamExport(name, parameter, ShardSpec(tuple(parameter.shape)), probe=None, module=None)
            for name, parameter in parameters
        ]


def arguments(*, lora: dict[str, Any] | None = None, async_save: bool = False, **engine: Any) -> dict[str, Any]:
    """Returns an engine's arguments; `engine` overrides keys of its section."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import McoreEngineConfig

    keys = {"param_offload": True, "optimizer_offload": True, "use_dist_checkpointing": True} | engine
    # megatron-core loads no optimizer state without Transformer Engine.
    contents = {"save_contents": ["model", "optimizer"], "load_contents": ["model"]}
    return {
        "model_config": types.SimpleNamespace(
            lora=lora or {}, mtp=types.SimpleNamespace(enable=False), local_path="tiny", hf_config=None,
            architectures=["Tiny"], get_processor=lambda: None, model_type="language_model",
        ),
        "engine_config": McoreEngineConfig(**keys),
        "optimizer_config": types.SimpleNamespace(use_checkpoint_opt_param_scheduler=False),
        "checkpoint_config": CheckpointConfig(**contents, async_save=async_save),
    }  # fmt: skip


def engine_of(way: str, **changes: Any) -> Any:
    """Returns an initialised engine: "ours", "verl" (verl's own moves) or "resident" (verl's own, without moves)."""
    from verl.workers.engine.megatron import MegatronEngineWithLMHead

    from nemo_offload_rl.adapters.verl import RangeOffloadWithLMHead

    kind = RangeOffloadWithLMHead if way == "ours" else MegatronEngineWithLMHead
    if way == "resident":
        changes |= {"param_offload": False, "optimizer_offload": False}
    engine = type("Tiny", (TinyParts, kind), {})(**arguments(**changes))
    engine.initialize()
    return engine


@contextmanager
def without_pinning() -> Iterator[None]:
    """Lets verl's own moves request page-locked memory on a machine without CUDA."""
    import verl.utils.megatron_utils as moves

    view: Any = types.ModuleType("torch")
    view.__getattr__ = functools.partial(getattr, torch)
    if not torch.cuda.is_available():
        view.empty = lambda *args, pin_memory=False, **kwargs: torch.empty(*args, **kwargs)
    original, moves.torch = moves.torch, view
    try:
        yield
    finally:
        moves.torch = original


def sums(weights: Iterator[tuple[str, torch.Tensor]]) -> dict[str, int]:
    return {
        name: int(weight.contiguous().view(torch.uint8).long().flatten().mul(31).add(7).cumsum(0).sum())
        for name, weight in weights
    }


def step(engine: Any, seed: int) -> dict[str, Any]:
    """Runs a step as verl's workers do: training, the weights' export, log-probs.

    verl exports weights only with the distributed optimizer: without it, it takes the storage of a buffer that is None.
    """
    with engine.train_mode():
        engine.optimizer_zero_grad()
        loss = engine.job.forward_backward(seed)
        norm = float(engine.optimizer_step())
    left = bytes_left(engine)
    report: dict[str, Any] = {"loss": loss, "norm": norm}
    if engine.engine_config.use_distributed_optimizer:
        report["weights"] = sums(engine.get_per_tensor_param()[0])
    if engine.is_param_offload_enabled:
        engine.to("cpu", model=True, optimizer=False, grad=False)
    with engine.eval_mode():
        logits = engine.job.logits(seed)
    engine.lefts.append(left)
    return report | {"logits": sums(iter([("logits", logits)]))}


def bytes_left(engine: Any) -> int:
    """Returns the bytes of parameters and gradients (with ranges, also of optimizer state) left on the GPU."""
    state = getattr(engine, "_state", None)
    if state is not None:
        return state.offloader.mapped_bytes
    buffers = engine.module[0].buffers
    held = (data for one in buffers for data in (one.param_data, one.grad_data) if data is not None)
    return sum(data.untyped_storage().nbytes() for data in held)


def steps(way: str, num_steps: int = 10, **changes: Any) -> dict[str, Any]:
    engine = engine_of(way, **changes)
    engine.lefts = []
    reports = [step(engine, seed) for seed in range(num_steps)]
    with engine.train_mode():
        if way == "ours":
            engine._state.offloader.residency.require(Target.OPTIMIZER_STATE)
        state = sums(iter(engine.job.everything().items()))
    left = engine.lefts
    if way == "ours":
        engine._state.close()
    return {"reports": reports, "state": state, "left": left}


@scenario
def ten_steps_equal_those_without_any_moves() -> None:
    """Compares loss, gradient norm, exported weights and log-probs of each step, and the final parameters and state."""
    resident = steps("resident")
    with without_pinning():
        verls = steps("verl")
    with pytest.MonkeyPatch.context() as patch:
        delay_moves(patch, seconds=0.002)
        ours, optimizer_alone = steps("ours"), steps("ours", param_offload=False)
    for moved in (verls, ours, optimizer_alone):
        assert moved["reports"] == resident["reports"]
        assert moved["state"] == resident["state"]
    assert len({report["loss"] for report in resident["reports"]}) == 10
    assert set(verls["left"]) == set(ours["left"]) == {0}
    assert min(resident["left"]) > 0
    assert min(optimizer_alone["left"]) > 0  # parameters and gradients


@scenario
def ten_steps_without_the_distributed_optimizer_equal_those_without_any_moves() -> None:
    """Compares ours with no moves, since verl's own moves raise AttributeError without the distributed optimizer."""
    with pytest.MonkeyPatch.context() as patch:
        delay_moves(patch, seconds=0.002)
        resident, ours = (steps(way, use_distributed_optimizer=False) for way in ("resident", "ours"))
    assert ours["reports"] == resident["reports"]
    assert ours["state"] == resident["state"]
    assert set(ours["left"]) == {0}


@scenario
def shards_are_exported_while_away() -> None:
    """Exports the shards after a step, while all state is on the host."""
    found: dict[str, Any] = {}
    for way in ("resident", "ours"):
        engine = engine_of(way)
        engine.lefts = []
        step(engine, 0)
        with pytest.MonkeyPatch.context() as patch:
            delay_moves(patch, seconds=0.02)
            shards, _ = engine.get_per_tensor_param_shard()
            found[way] = sums((name, shard) for name, shard, _ in shards)
    assert found["ours"] == found["resident"]
    assert len(found["ours"]) > 20
    assert engine.lefts == [0]
    params = engine._state.offloader.targets[Target.PARAMS]
    # Another process could not open what is in a range.
    assert not [name for name, one in engine.get_per_tensor_param()[0] if params.flat_buffer.holds(one)]
    engine._state.close()


@scenario
def a_reference_policy_has_its_parameters_moved() -> None:
    """Runs an engine without gradients and optimizer."""
    found = []
    for way in ("resident", "ours"):
        engine = engine_of(way, forward_only=True, optimizer_offload=False)
        with engine.eval_mode():
            logits = engine.job.logits(0)
        found.append(sums(iter([("logits", logits)])))
    assert found[0] == found[1]
    assert engine._state.offloader.mapped_bytes == 0
    engine._state.close()


@scenario
def a_checkpoint_made_while_away_has_the_same_bytes_and_leaves_everything_away() -> None:
    """Saves while all state is on the host, and loads into another engine whose state is on the host, too."""
    entries, reports = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for way in ("resident", "ours"):
            engine, path = engine_of(way), Path(folder) / way
            engine.lefts = []
            for seed in range(2):
                saved = step(engine, seed)["weights"]
            torch.use_deterministic_algorithms(True, warn_only=True)  # fills megatron-core's uninitialised padding
            engine.save_checkpoint(str(path))
            torch.use_deterministic_algorithms(False)
            if way == "ours":
                offloader = engine._state.offloader
                where = {str(target): str(offloader.residency.where(target)) for target in offloader.targets}
                assert where == {"params": "host", "grads": "dropped", "optimizer_state": "host"}
            entries[way] = {
                f"{part}: {name}": data
                for part in ("model", "optimizer")
                for name, data in checkpoint_entries(path / part / "dist_ckpt").items()
            }
            reports[way] = step(engine, 2)
            if way == "ours":
                engine._state.close()
        loaded = engine_of("ours")
        loaded.load_checkpoint(str(Path(folder) / "resident"))
        assert loaded._state.offloader.residency.where(Target.PARAMS) is Placement.HOST
        assert sums(loaded.get_per_tensor_param()[0]) == saved
        loaded._state.close()
    assert len(entries["resident"]) > 20
    assert differing(entries["ours"], entries["resident"]) == []
    assert reports["ours"] == reports["resident"]


@scenario
def a_second_initialization_gives_the_memory_of_the_first_back() -> None:
    engine = engine_of("ours")
    engine.lefts = []
    first, before = step(engine, 0), PinnedArena.live_bytes()
    engine.initialize()
    assert step(engine, 0) == first
    assert PinnedArena.live_bytes() == before
    engine._state.close()
    assert PinnedArena.live_bytes() == 0


@scenario
def state_without_host_memory_does_not_leave_and_its_key_is_named() -> None:
    for key, kind in (("param_offload", "params"), ("optimizer_offload", "optimizer_state")):
        engine = engine_of("ours", **{key: False})
        engine.to("cuda")
        named = f"verl moves {kind} to the CPU, but {key} of the engine is false.*set {key}: true"
        with pytest.raises(ValueError, match=named):
            engine.to("cpu")
        offloader = engine._state.offloader
        assert {offloader.residency.where(target) for target in offloader.targets} == {Placement.GPU}
        engine._state.close()


@scenario
def what_ranges_cannot_do_is_refused() -> None:
    from verl.workers.config import QATEngineConfig
    from verl.workers.engine import EngineRegistry

    def refused(words: str, backend: str = "megatron", **changes: Any) -> None:
        made = arguments(**changes)
        if backend != "megatron":
            made["engine_config"] = types.SimpleNamespace(strategy=backend)
        leave_out = r".*leave external_lib=nemo_offload_rl\.adapters\.verl out\.$"
        with pytest.raises(ValueError, match=f"(?s){words}{leave_out}"):
            EngineRegistry.new("language_model", backend, **made)

    refused("strategy is fsdp2; set it to megatron", "fsdp2")
    refused("use_megatron_fsdp: true", use_megatron_fsdp=True)
    refused("qat.enable: true", qat=QATEngineConfig(enable=True))
    refused("without lora.merge: true", lora={"rank": 8})
    refused("async_save: true", async_save=True)
    # Modules that a detached worker's process has imported; it uses packages that are not installed here.
    detached = "verl.experimental.separation.engine_workers"
    assert importlib.util.find_spec(detached) is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, detached, types.ModuleType(detached))
        refused("fully asynchronous")
