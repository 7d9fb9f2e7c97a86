"""Runs verl's real Megatron engine with a tiny model, GPU or CPU; verl changes logging, so use a new process."""

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

SCENARIOS: dict[str, Callable[[], Any]] = {}


def scenario(function: Callable[[], Any]) -> Callable[[], Any]:
    SCENARIOS[function.__name__] = function
    return function


def run_scenarios(rank: int, world_size: int, ports: list[int]) -> dict[str, tuple[bool, Any]]:
    """Runs all scenarios; returns, by name, whether it ended without an error, and its result or the traceback."""
    results = {}
    pass_results_in_process()  # megatron-core's checkpoint writer would start another process
    if not torch.cuda.is_available():
        torch.cuda.mem_get_info = lambda *_: (0, 0)  # for verl's log, which assumes a GPU on every machine
    with one_rank():
        for name, function in SCENARIOS.items():
            try:
                results[name] = True, function()
            except Exception:  # noqa: BLE001  (the test of that name fails with it)
                results[name] = False, traceback.format_exc()
    return results


def registered() -> dict[str, str]:
    from verl.workers.engine import EngineRegistry

    kinds = [("language_model", "megatron"), ("value_model", "megatron"), ("language_model", "fsdp2")]
    return {
        f"{model_type} {backend}": EngineRegistry.get_engine_cls(model_type, backend).__name__
        for model_type, backend in kinds
    }


@scenario
def registry() -> dict[str, dict[str, str]]:
    """Runs first, before anything has imported the adapter; returns the registered classes before and after."""
    from verl.utils.import_utils import import_external_libs

    before = registered()
    import_external_libs("nemo_offload_rl.adapters.verl")  # as a model's configuration does
    return {"before": before, "after": registered()}


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
def training() -> dict[str, dict[str, Any]]:
    found = {"resident": steps("resident")}
    with without_pinning():
        found["verl"] = steps("verl")
    with pytest.MonkeyPatch.context() as patch:
        delay_moves(patch, seconds=0.002)
        found["ours"] = steps("ours")
        found["ours, optimizer alone"] = steps("ours", param_offload=False)
    return found


@scenario
def without_distributed_optimizer() -> dict[str, dict[str, Any]]:
    """Compares ours with no moves, since verl's own moves raise AttributeError without the distributed optimizer."""
    with pytest.MonkeyPatch.context() as patch:
        delay_moves(patch, seconds=0.002)
        return {way: steps(way, use_distributed_optimizer=False) for way in ("resident", "ours")}


@scenario
def exported_shards() -> dict[str, Any]:
    """Returns the shards after a step, exported while all state is on the host."""
    found: dict[str, Any] = {}
    for way in ("resident", "ours"):
        engine = engine_of(way)
        engine.lefts = []
        step(engine, 0)
        with pytest.MonkeyPatch.context() as patch:
            delay_moves(patch, seconds=0.02)
            shards, _ = engine.get_per_tensor_param_shard()
            found[way] = sums((name, shard) for name, shard, _ in shards)
    found["left before"] = engine.lefts
    params = engine._state.offloader.targets[Target.PARAMS]
    found["in ranges"] = [name for name, one in engine.get_per_tensor_param()[0] if params.flat_buffer.holds(one)]
    engine._state.close()
    return found


@scenario
def reference_policy() -> dict[str, Any]:
    """Runs an engine without gradients and optimizer."""
    found = {}
    for way in ("resident", "ours"):
        engine = engine_of(way, forward_only=True, optimizer_offload=False)
        with engine.eval_mode():
            logits = engine.job.logits(0)
        found[way] = sums(iter([("logits", logits)]))
    found["left"] = engine._state.offloader.mapped_bytes
    engine._state.close()
    return found


@scenario
def checkpoint() -> dict[str, Any]:
    """Saves while all state is on the host, and loads into another engine whose state is on the host, too."""
    found: dict[str, Any] = {}
    entries, reports = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for way in ("resident", "ours"):
            engine, path = engine_of(way), Path(folder) / way
            engine.lefts = []
            for seed in range(2):
                reports["saved"] = step(engine, seed)["weights"]
            torch.use_deterministic_algorithms(True, warn_only=True)  # fills megatron-core's uninitialised padding
            engine.save_checkpoint(str(path))
            torch.use_deterministic_algorithms(False)
            if way == "ours":
                found["where"] = {
                    str(target): str(engine._state.offloader.residency.where(target))
                    for target in Target
                    if target in engine._state.offloader.targets
                }
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
        found["loaded is away"] = loaded._state.offloader.residency.where(Target.PARAMS) is Placement.HOST
        found["loaded"] = sums(loaded.get_per_tensor_param()[0])
        loaded._state.close()
    found["resident"] = reports["saved"]
    found["differing"] = differing(entries["ours"], entries["resident"])
    found["num entries"] = len(entries["resident"])
    found["next steps equal"] = reports["ours"] == reports["resident"]
    return found


@scenario
def reset() -> dict[str, Any]:
    engine = engine_of("ours")
    engine.lefts = []
    first, before = step(engine, 0), PinnedArena.live_bytes()
    engine.initialize()
    again = step(engine, 0)
    found = {"equal": first == again, "bytes": (before, PinnedArena.live_bytes())}
    engine._state.close()
    return found | {"bytes at the end": PinnedArena.live_bytes()}


@scenario
def kept_state() -> dict[str, Any]:
    """Returns what verl's `to("cpu")` reports if only one kind of state is offloaded, and where the state is then."""
    found: dict[str, Any] = {}
    for key in ("param_offload", "optimizer_offload"):
        engine = engine_of("ours", **{key: False})
        engine.to("cuda")
        with pytest.raises(ValueError) as caught:  # noqa: PT011  (the test reads the message)
            engine.to("cpu")
        found[key] = str(caught.value)
        residency = engine._state.offloader.residency
        found[f"{key}: where"] = sorted({str(residency.where(target)) for target in engine._state.offloader.targets})
        engine._state.close()
    return found


@scenario
def refusals() -> dict[str, str]:
    from verl.workers.config import QATEngineConfig
    from verl.workers.engine import EngineRegistry

    def message(backend: str = "megatron", **changes: Any) -> str:
        made = arguments(**changes)
        if backend != "megatron":
            made["engine_config"] = types.SimpleNamespace(strategy=backend)
        with pytest.raises(ValueError) as caught:  # noqa: PT011  (the test reads the message)
            EngineRegistry.new("language_model", backend, **made)
        return str(caught.value)

    found = {
        "strategy is fsdp2; set it to megatron": message("fsdp2"),
        "use_megatron_fsdp: true": message(use_megatron_fsdp=True),
        "qat.enable: true": message(qat=QATEngineConfig(enable=True)),
        "without lora.merge: true": message(lora={"rank": 8}),
        "async_save: true": message(async_save=True),
    }
    # Modules that a detached worker's process has imported; it uses packages that are not installed here.
    detached = "verl.experimental.separation.engine_workers"
    assert importlib.util.find_spec(detached) is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, detached, types.ModuleType(detached))
        return found | {"fully asynchronous": message()}
