"""Tests how far copies may lag and lead: on a link that keeps up on average, the compute stream never waits."""

from collections.abc import Iterable, Iterator, Sequence

import pytest
import torch
from megatron.core.pipeline_parallel.fine_grained_activation_offload import (
    FineGrainedActivationOffloadingInterface as Interface,
)
from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager
from support.late_copies import LateCopies, LateTicket
from support.marked_layers import Layer, Model, batches

from nemo_offload_rl.activation_offload.copies import CopyHandle, Span
from nemo_offload_rl.activation_offload.manager import ActivationOffloader
from nemo_offload_rl.activation_offload.schedule import ActivationOptions
from nemo_offload_rl.mcore.patches import activation_offload

MODULES = ("qkv_linear", "core_attn", "attn_proj")
NUM_LAYERS = 16


class Link(LateCopies):
    """Makes copies at once, and records when a link of some speed would have, by a clock that `run` advances."""

    def __init__(self) -> None:
        super().__init__(eager_share=1.0)
        self.speed = 1.0  # bytes per unit of time
        self.now = 0.0
        self.waited = 0.0
        self._free_at = {"out": 0.0, "back": 0.0}
        self._done_at: dict[CopyHandle, float] = {}

    def run(self, time: float) -> None:
        self.now += time

    def rest(self) -> None:
        """Advances the clock until both directions are idle."""
        self.now = max(self.now, *self._free_at.values())

    def out(self, spans: Sequence[Span], after: Iterable[CopyHandle]) -> CopyHandle:
        after = list(after)
        return self._timed("out", super().out(spans, after), spans, after)

    def back(self, spans: Sequence[Span], after: Iterable[CopyHandle]) -> CopyHandle:
        after = list(after)
        return self._timed("back", super().back(spans, after), spans, after)

    def wait(self, handle: CopyHandle) -> None:
        assert isinstance(handle, LateTicket) and handle.reached()
        self.waited += max(0.0, self._done_at[handle] - self.now)
        self.now = max(self.now, self._done_at[handle])

    def _timed(
        self, direction: str, handle: CopyHandle, spans: Sequence[Span], after: Sequence[CopyHandle]
    ) -> CopyHandle:
        begin = max(self.now, self._free_at[direction], *(self._done_at[other] for other in after))
        self._free_at[direction] = self._done_at[handle] = begin + sum(span.nbytes for span in spans) / self.speed
        return handle


@pytest.fixture
def link() -> Iterator[Link]:
    yield Link()
    activation_offload.uninstall(PipelineOffloadManager.OFFLOAD_MGR)


def clocked_model(link: Link) -> Model:
    """Makes a model whose layers take one unit of time forward, 0.4 of it in attention, and two backward."""
    torch.manual_seed(0)
    model = Model(MODULES)
    model.layers = torch.nn.ModuleList(Layer(MODULES) for _ in range(NUM_LAYERS))
    for layer in model.layers:
        for module, time in ((layer.proj, 0.4), (layer.mlp, 0.6)):
            module.register_forward_hook(lambda *_, time=time: link.run(time))
            module.register_full_backward_hook(lambda *_, time=time: link.run(2 * time))
    return model


@pytest.mark.parametrize("fraction", [0.3, 0.4, 0.5, 0.6, 0.65, 0.7, 0.75, 1.0])
def test_no_wait_for_a_link_that_is_idle_for_a_fifth_of_the_forward_pass(link, fraction):
    """With fractions, a layer that is offloaded whole keeps the link busy for longer than a layer takes."""
    model = clocked_model(link)
    options = ActivationOptions(MODULES, fraction=fraction, min_elements=0)
    keep = [parameter.untyped_storage() for parameter in model.parameters()]
    made = ActivationOffloader(options, torch.zeros(1 << 20, dtype=torch.uint8), link, keep)
    activation_offload.take_place(made)
    waited: list[float] = []
    in_flight: list[int] = []
    for layer in model.layers:
        layer.register_forward_hook(lambda *_: in_flight.append(len(made._inflight)))
    for seed in range(4):
        (x,) = batches([8], seed)
        link.rest()
        loss = model(x)
        loss.backward()
        Interface.reset()
        moved, late = made.report.total().moved_bytes, made.report.total().late_bytes
        assert moved > 0
        assert late == 0 or seed == 0  # the first pass does not know the last layer yet, which has to stay
        waited.append(link.waited)
        link.waited = 0.0
        link.speed = moved / (0.8 * NUM_LAYERS)
    assert waited[2:] == [0.0, 0.0]  # the first two passes measure the pass and the speed
    num_groups = 2  # per layer; attn_proj saves the storage that core_attn saves
    assert max(in_flight[2 * NUM_LAYERS :]) <= (num_groups if fraction == 1 else 2 * num_groups)
