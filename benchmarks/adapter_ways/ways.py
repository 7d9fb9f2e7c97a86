"""Moves training state as each trainer does, with the trainer's own calls and with the engine in their place."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from offload_ways.memory_saver import WAYS as SAVER_WAYS

from adapter_ways.nemo_rl_moves import move_model, move_optimizer, release
from adapter_ways.nemo_rl_worker import worker
from nemo_offload_rl.adapters.adopt import AdoptedState
from nemo_offload_rl.adapters.megatron_core import adopt_own_methods
from nemo_offload_rl.residency.table import Target


class Way:
    """Leaves everything where it is; a trainer's way overrides what the trainer does.

    Attributes:
        moves: whether anything leaves the GPU.
        imports: modules that take long to import and that this way alone needs.
    """

    moves: ClassVar[bool] = True
    imports: ClassVar[Sequence[str]] = ()

    def __init__(self, model: list[torch.nn.Module], optimizer: Any) -> None:
        self.model: list[Any] = model
        self.optimizer = optimizer

    def leave(self) -> None:
        """Moves state to the host and frees GPU memory, as the trainer does before it calls its generator."""

    def come_back(self) -> None:
        """Moves state to the GPU, as the trainer does before it trains."""

    def arrive(self) -> None:
        """Waits until the optimizer's step could begin."""

    def close(self) -> None:
        """Frees what the way has allocated; the model is unusable afterwards."""

    @property
    def pinned_bytes(self) -> int | None:
        """Returns the page-locked host memory; None where it is not known."""
        return _torch_pinned_bytes()


class Resident(Way):
    """Moves nothing; the other ways are compared with it."""

    moves = False


class Verl(Way):
    """Calls verl's engine as its training context does at its beginning and end."""

    adapter: ClassVar[bool] = False
    imports: ClassVar[Sequence[str]] = ("verl.trainer.config", "verl.workers.engine.megatron")

    def __init__(self, model: list[torch.nn.Module], optimizer: Any) -> None:
        from adapter_ways.verl_engine import engine

        super().__init__(model, optimizer)
        self.engine = engine(model, optimizer, adapter=self.adapter)

    def leave(self) -> None:
        """See `Way`."""
        self.engine.to("cpu", model=True, optimizer=True, grad=True)

    def come_back(self) -> None:
        """See `Way`."""
        self.engine.to("cuda", model=True, optimizer=True, grad=True)


class MegatronCore(Way):
    """Calls megatron-core's own methods, which leave parameters on the GPU."""

    def leave(self) -> None:
        """See `Way`."""
        self.optimizer.offload_to_cpu()
        for chunk in self.model:
            chunk.offload_grad_buffers()

    def come_back(self) -> None:
        """See `Way`."""
        for chunk in self.model:
            chunk.restore_grad_buffers()
        self.optimizer.restore_from_cpu()


class NemoRl(Way):
    """Repeats NeMo-RL's calls around a refit: buffers by megatron-core's methods, moments one by one."""

    def leave(self) -> None:
        """See `Way`."""
        move_model(self.model, "cpu", move_params=False, move_grads=True)
        move_optimizer(self.optimizer, "cpu")
        release()
        move_model(self.model, "cpu", move_params=True, move_grads=True)
        release()

    def come_back(self) -> None:
        """See `Way`."""
        move_model(self.model, "cuda", move_params=True, move_grads=True)
        move_optimizer(self.optimizer, "cuda")


class Engine(Way):
    """Moves state with the engine, whichever adapter installed it."""

    state: AdoptedState

    def arrive(self) -> None:
        """See `Way`."""
        self.state.offloader.residency.require(Target.OPTIMIZER_STATE)

    def close(self) -> None:
        """See `Way`."""
        self.state.close()

    @property
    def pinned_bytes(self) -> int | None:
        """See `Way`."""
        return self.state.offloader.context.arena.pinned_bytes + (_torch_pinned_bytes() or 0)


class OursInVerl(Engine, Verl):
    """Makes verl's calls on the adapter's engine."""

    adapter = True
    imports = (*Verl.imports, "nemo_offload_rl.adapters.verl")

    def __init__(self, model: list[torch.nn.Module], optimizer: Any) -> None:
        Verl.__init__(self, model, optimizer)
        self.state = self.engine._state


class OursInMegatronCore(Engine, MegatronCore):
    """Calls megatron-core's methods after the adapter has replaced them."""

    def __init__(self, model: list[torch.nn.Module], optimizer: Any) -> None:
        super().__init__(model, optimizer)
        self.state = adopt_own_methods(model, optimizer)


class OursInNemoRl(Engine):
    """Makes NeMo-RL's calls around a refit on the adapter's worker."""

    def __init__(self, model: list[torch.nn.Module], optimizer: Any) -> None:
        super().__init__(model, optimizer)
        self.worker = worker(model, optimizer)
        self.state = self.worker._adopted

    def leave(self) -> None:
        """See `Way`."""
        self.worker.move_model(self.worker.model, "cpu", move_params=False, move_grads=True)
        self.worker.move_optimizer("cpu")
        release()
        self.worker.move_model(self.worker.model, "cpu", move_params=True, move_grads=True)
        release()

    def come_back(self) -> None:
        """See `Way`."""
        self.worker.move_model(self.worker.model, "cuda", move_params=True, move_grads=True)
        self.worker.move_optimizer("cuda")


class MemorySaver(Way):
    """Uses torch_memory_saver for everything allocated while the model was built, including gradients."""

    def leave(self) -> None:
        """See `Way`."""
        from torch_memory_saver import torch_memory_saver

        torch_memory_saver.pause()

    def come_back(self) -> None:
        """See `Way`."""
        from torch_memory_saver import torch_memory_saver

        torch_memory_saver.resume()

    @property
    def pinned_bytes(self) -> None:
        """Returns None: torch_memory_saver does not report it (see `Way`)."""
        return


def _torch_pinned_bytes() -> int | None:
    if not torch.cuda.is_available():
        return 0
    return int(torch.cuda.host_memory_stats()["allocated_bytes.current"])


WAYS: Mapping[str, type[Way]] = {
    "resident": Resident,
    "resident, again": Resident,
    "verl": Verl,
    "ours in verl": OursInVerl,
    "megatron_core": MegatronCore,
    "ours in megatron_core": OursInMegatronCore,
    "nemo_rl, written anew": NemoRl,
    "ours in nemo_rl": OursInNemoRl,
    **dict.fromkeys(SAVER_WAYS, MemorySaver),
}
"""In the order in which they are measured: what is compared comes together, so that a run that is cut off compares."""
NEED_CUDA = frozenset({"verl", "megatron_core", "nemo_rl, written anew", *SAVER_WAYS})
"""Without it they move nothing, or ask for page-locked memory."""
