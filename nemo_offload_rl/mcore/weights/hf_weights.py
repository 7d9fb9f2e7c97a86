"""Exports a policy's weights under their Hugging Face names."""

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.utils import unwrap_model
from torch import Tensor

from nemo_offload_rl.mcore.patches.weight_export import make_exports_fast


class HfWeights:
    """Exports the weights of one model any number of times; builds Megatron-Bridge's conversion tasks only once.

    Args:
        bridge: the `AutoBridge` that the model was made with.
        model: this rank's chunks, whose parameters stay the same objects.
        vocab_size: number of real tokens; ranks hold padding beyond it if their number does not divide it.
    """

    def __init__(self, bridge: Any, model: list[Any], vocab_size: int) -> None:
        make_exports_fast()
        self._bridge = bridge
        self._model = model
        self._vocab_size = vocab_size
        self._with_row_per_token = _names_with_row_per_token(bridge)
        self._tasks: list[Any] | None = None

    def __call__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, whole tensor) one after the other; collective, the same order on every rank."""
        if self._tasks is None:
            # This gathers every rank's names as pickled objects, which takes half of an export's time.
            self._tasks = self._bridge._model_bridge.build_conversion_tasks(
                self._bridge.hf_pretrained, unwrap_model(self._model)
            )
        for name, tensor in self._bridge.export_hf_weights(
            self._model, show_progress=False, conversion_tasks=self._tasks, merge_adapter_weights=False
        ):
            yield name, tensor[: self._vocab_size] if name in self._with_row_per_token else tensor

    def tensors(self) -> list[Tensor]:
        """Return all tensors that an export reads, the same objects each time; none before the first export."""
        return [task.param_weight for task in self._tasks or () if task.param_weight is not None]

    def collectives(self) -> str:
        """Return the kinds of parallelism over which ranks exchange weights in an export; "" if there are none."""
        sizes = {
            "tensor": mpu.get_tensor_model_parallel_world_size(),
            "pipeline": mpu.get_pipeline_model_parallel_world_size(),
            "expert": mpu.get_expert_model_parallel_world_size(),
            "expert tensor": mpu.get_expert_tensor_parallel_world_size(),
        }
        return ", ".join(f"{kind} parallelism of {size}" for kind, size in sizes.items() if size > 1)

    def agree(self, yes: bool) -> bool:
        """Return whether all ranks say yes; collective if ranks exchange weights in an export."""
        if not self.collectives():
            return yes
        answer = torch.tensor(int(yes), device="cuda" if torch.cuda.is_available() else "cpu")
        torch.distributed.all_reduce(answer, op=torch.distributed.ReduceOp.MIN)
        return bool(answer.item())


def _names_with_row_per_token(bridge: Any) -> frozenset[str]:
    """Returns the Hugging Face names of the embedding and of the output layer's weight and bias."""
    registry = bridge._model_bridge.mapping_registry()
    names = ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias")
    mappings = [registry.megatron_to_hf_lookup(name) for name in names]
    return frozenset(mapping.hf_param for mapping in mappings if mapping and isinstance(mapping.hf_param, str))
