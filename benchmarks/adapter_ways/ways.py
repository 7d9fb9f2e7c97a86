"""How trainers move a model's and an optimizer's state: theirs as it is called there, and the engine in its place."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from offload_ways.memory_saver import WAYS as SAVER_WAYS

from adapter_ways.nemo_rl_moves import move_model, move_optimizer, release
from nemo_offload_rl.adapters.adopt import AdoptedState, adopt
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
        """Move to the host and give the memory back, as the trainer does before it calls its generator."""

    def come_back(self) -> None:
        """Move to the GPU, as the trainer does before it trains."""

    def arrive(self) -> None:
        """Wait until the optimizer's step could begin."""

    def close(self) -> None:
        """Give back what the way has taken; the model is of no use afterwards."""

    @property
    def pinned_bytes(self) -> int | None:
        """Host memory that is page-locked; None where that is not known."""
        return _torch_pinned_bytes()


class Resident(Way):
    """Moves nothing; what the other ways are compared with."""

    moves = False


class Verl(Way):
    """verl's engine: what its training context does at its end and at its beginning."""

    adapter: ClassVar[bool] = False
    imports = ("verl.trainer.config", "verl.workers.engine.megatron")

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
    """megatron-core's methods; parameters stay."""

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
    """NeMo-RL's calls around a refit, written anew: buffers by megatron-core's methods, moments one by one."""

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
    """The engine, however it was put there."""

    state: AdoptedState

    def arrive(self) -> None:
        """See `Way`."""
        self.state.engine.residency.require(Target.OPTIMIZER_STATE)

    def close(self) -> None:
        """See `Way`."""
        self.state.close()

    @property
    def pinned_bytes(self) -> int | None:
        """See `Way`."""
        return self.state.engine.context.arena.pinned_bytes + (_torch_pinned_bytes() or 0)


class OursInVerl(Engine, Verl):
    """The same calls of the adapter's engine."""

    adapter = True
    imports = (*Verl.imports, "nemo_offload_rl.adapters.verl")

    def __init__(self, model: list[torch.nn.Module], optimizer: Any) -> None:
        Verl.__init__(self, model, optimizer)
        self.state = self.engine._state


class OursInMegatronCore(Engine, MegatronCore):
    """The same calls of megatron-core's methods, which the adapter has replaced."""

    def __init__(self, model: list[torch.nn.Module], optimizer: Any) -> None:
        super().__init__(model, optimizer)
        self.state = adopt_own_methods(model, optimizer)


class OursInNemoRl(Engine):
    """What NeMo-RL's worker calls, of the facade that its adapter calls."""

    def __init__(self, model: list[torch.nn.Module], optimizer: Any) -> None:
        super().__init__(model, optimizer)
        self.state = adopt(model, optimizer)

    def leave(self) -> None:
        """See `Way`."""
        self.state.move_grads("cpu")
        self.state.move_optimizer("cpu")
        release()
        self.state.move_params("cpu")
        release()

    def come_back(self) -> None:
        """See `Way`."""
        self.state.move("cuda", [Target.PARAMS, Target.GRADS])
        self.state.move_optimizer("cuda")


class MemorySaver(Way):
    """torch_memory_saver: everything that was allocated while the model was built, gradients among it."""

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
        """See `Way`; its library does not say."""
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
