"""Replays NeMo-RL's moves of training state around generation, in place of the offloader.

Each method names the method that it replays, all from nemo_rl/models/policy/workers/megatron_policy_worker.py (class
MegatronPolicyWorkerImpl) at NeMo-RL's commit 001759a9acf020907d76e61ffd27baa9c8ae9a90.
"""

import contextlib
import gc
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from nemo_offload_rl.mcore.build import TrainingState
from nemo_offload_rl.memory.pinned import PinnedArena
from nemo_offload_rl.plan.plan import OffloadPlan
from nemo_offload_rl.residency.metrics import Meter
from nemo_offload_rl.residency.table import Phase, Placement, Target


class UpstreamResidency:
    """Enters phases as NeMo-RL's worker does: everything moves, one thing after the other.

    Args:
        state: model and optimizer.
        offload_for_refit: whether optimizer state leaves for the refit (`offload_optimizer_for_refit`).
        offload_for_logprob: whether it leaves for log-probs (`offload_optimizer_for_logprob`).
    """

    def __init__(self, state: TrainingState, *, offload_for_refit: bool, offload_for_logprob: bool) -> None:
        self._model = state.model
        self._optimizer = state.optimizer
        self._offload_for_refit = offload_for_refit
        self._offload_for_logprob = offload_for_logprob
        self.phase: Phase | None = None

    def enter(self, phase: Phase, *, wait: bool = True) -> None:
        """Makes the calls of a phase; NeMo-RL's driver makes them once a phase, so a repeated call does nothing."""
        if phase is self.phase:
            return
        moves = {
            Phase.TRAIN: self._prepare_for_training,
            Phase.LOGPROB: self._prepare_for_lp_inference,
            Phase.REFIT: self._offload_before_refit,
            Phase.GENERATE: self._offload_after_refit,
        }
        with torch.no_grad():
            if phase is Phase.REFIT and self.phase is Phase.GENERATE:  # only where nothing was trained in between
                move_model(self._model, "cuda", move_params=True, move_grads=False)
            moves[phase]()
        self.phase = phase

    def prefetch(self, phase: Phase, reserve_bytes: int = 0, *, with_dropped: bool = False) -> None:
        """Does nothing: NeMo-RL starts no copies to the GPU early."""

    def start_leaving(self, phase: Phase) -> None:
        """Does nothing: NeMo-RL starts no copies to the host early."""

    def wait_until_released(self) -> None:
        """Does nothing: every call returns with its moves complete."""

    def _prepare_for_training(self) -> None:
        """Replays `prepare_for_training`: parameters and gradients, then moments."""
        move_model(self._model, "cuda", move_params=True, move_grads=True)
        self._move_optimizer("cuda")

    def _prepare_for_lp_inference(self) -> None:
        """Replays `prepare_for_lp_inference`."""
        move_model(self._model, "cuda", move_params=True, move_grads=False)
        move_model(self._model, "cpu", move_params=False, move_grads=True)
        if self._offload_for_logprob:
            self._move_optimizer("cpu")
        release()

    def _offload_before_refit(self) -> None:
        """Replays `offload_before_refit`: gradients are dropped, moments leave."""
        move_model(self._model, "cpu", move_params=False, move_grads=True)
        if self._offload_for_refit:
            self._move_optimizer("cpu")
        release()

    def _offload_after_refit(self) -> None:
        """Replays `offload_after_refit`: parameters leave, then all of `offload_before_refit` again."""
        move_model(self._model, "cpu", move_params=True, move_grads=True)
        self._offload_before_refit()

    def _move_optimizer(self, device: str) -> None:
        if self._optimizer is not None and torch.cuda.is_available():
            move_optimizer(self._optimizer, device)


class UpstreamReference:
    """Keeps the initial weights, which `use_reference_model` copies over the policy's own and back.

    Args:
        model: the chunks, with the weights that are kept.
    """

    def __init__(self, model: Sequence[torch.nn.Module]) -> None:
        self._model = model
        self._weights = self._copies()

    @contextlib.contextmanager
    @torch.no_grad()
    def swapped_in(self) -> Iterator[None]:
        """Replays `use_reference_model`: the policy's own weights wait in host memory meanwhile."""
        own = self._copies()
        self._load(self._weights)
        try:
            yield
        finally:
            self._load(own)

    def _copies(self) -> list[dict[str, torch.Tensor]]:
        return [
            {name: tensor.detach().to("cpu", copy=True) for name, tensor in _tensors(chunk)} for chunk in self._model
        ]

    def _load(self, weights: Sequence[Mapping[str, torch.Tensor]]) -> None:
        for chunk, of_chunk in zip(self._model, weights, strict=True):
            for name, tensor in _tensors(chunk):
                tensor.copy_(of_chunk[name])


def _tensors(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, value) for name, value in chunk.state_dict().items() if isinstance(value, torch.Tensor))


class UpstreamEngine:
    """Takes the place of the worker's offloader.

    Args:
        state: model and optimizer.
        plan: what the recipe asks for.
        node: the NUMA node of the GPU.
        with_reference: whether the weights of now are kept.
        fixed_bytes: host memory of what never moves, by name.
        generator_bytes: of no use here, as torch's cache is given back with each move.
    """

    mapped_bytes = 0

    def __init__(
        self,
        state: TrainingState,
        plan: OffloadPlan,
        *,
        node: int | None,
        with_reference: bool,
        fixed_bytes: Mapping[str, int],
        generator_bytes: int | None,
    ) -> None:
        assert not any(fixed_bytes.values()), "activations stay on the GPU in this benchmark"
        on_host = (Placement.HOST, Placement.DROPPED)
        leaves = {phase: plan.table[phase][Target.OPTIMIZER_STATE] in on_host for phase in Phase}
        self.residency = UpstreamResidency(
            state, offload_for_refit=leaves[Phase.REFIT], offload_for_logprob=leaves[Phase.LOGPROB]
        )
        device = next(state.model[0].parameters()).device
        self.meter = Meter(device)
        self.context = SimpleNamespace(arena=PinnedArena(numa_node=node, huge_pages=False), device=device)
        self.reference = UpstreamReference(state.model) if with_reference else None

    def load_all_to_gpu(self) -> None:
        """Brings everything to the GPU."""
        self.residency.enter(Phase.TRAIN)

    def close(self) -> None:
        """Does nothing: the engine holds no memory."""
        self.context.arena.close()


def move_model(model: Sequence[Any], device: str, *, move_params: bool, move_grads: bool) -> None:
    """Moves buffers to "cpu", which drops gradients, or to "cuda", where gradients come back as zeros.

    Without a GPU parameters stay: megatron-core would ask for page-locked memory.
    """
    for buffer in _buffers(model):
        move = buffer.offload_to_cpu if device == "cpu" else buffer.reload_from_cpu
        move(move_params=move_params and torch.cuda.is_available(), move_grads=move_grads)


def _buffers(model: Sequence[Any]) -> Iterator[Any]:
    for chunk in model:
        yield from (*chunk.buffers, *chunk.expert_parallel_buffers)


def move_optimizer(optimizer: Any, device: str) -> None:
    """Moves moments to "cpu" or "cuda", synchronously and through pageable memory; fp32 masters stay, as in NeMo-RL."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for state in part.optimizer.state.values():
            for name, value in state.items():
                if torch.is_tensor(value) and value.ndim:
                    state[name] = value.to(device)


def release() -> None:
    """Empties the cache of torch's allocator."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
