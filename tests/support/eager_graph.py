"""Replaces the graphs that Transformer Engine captures of megatron-core's layers, on machines without a GPU."""

from typing import Any

import pytest
from megatron.core.transformer import cuda_graphs as mcore_graphs


class EagerGraph:
    """Replaces a graphed layer: accepts inputs of the captured shapes, and computes eagerly, as it was captured."""

    def __init__(self, layer: Any, sample_args: tuple[Any, ...], sample_kwargs: dict[str, Any]) -> None:
        self.layer = layer
        self.shapes = [tensor.shape for tensor in sample_args]
        self.keys = list(sample_kwargs)
        self.captured = {name: vars(layer)[name] for name in ("_forward_mlp",) if name in vars(layer)}
        self.was_reset = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        assert not self.was_reset
        assert [tensor.shape for tensor in args] == self.shapes
        with pytest.MonkeyPatch.context() as patch:
            for name, value in self.captured.items():
                patch.setattr(self.layer, name, value)
            mcore_graphs._set_capture_start()  # makes a mixture of experts end after its router, as in a capture
            try:
                return self.layer._te_cuda_graph_capture(*args, **{key: kwargs[key] for key in self.keys})
            finally:
                mcore_graphs._set_capture_end()

    def reset(self) -> None:
        self.was_reset = True

    def backward_dw(self) -> None:
        pass
