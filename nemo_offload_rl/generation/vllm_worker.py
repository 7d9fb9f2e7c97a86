"""The extension of vLLM's worker that loads the weights of a refit; vLLM adds the class to its worker's bases."""

import functools
import gc
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from nemo_offload_rl.generation.recorded_loads import Loaded, RecordedLoads
from nemo_offload_rl.generation.saved_memory import SavedMemory
from nemo_offload_rl.generation.vllm_weights import (
    dropped_biases,
    find_experts_on_host,
    outside_of_parameters,
    parameters_filled,
    read_back,
    transformed_after_loading,
)
from nemo_offload_rl.memory.units import MIB
from nemo_offload_rl.refit.checksum import tensor_checksum
from nemo_offload_rl.refit.fixed_buckets import FixedTensors
from nemo_offload_rl.refit.plan import NamedTensor, TensorSpec
from nemo_offload_rl.refit.recorder import CaptureError, CudaRecorder

logger = logging.getLogger(__name__)


class RefitExtension:
    """Adds methods to `vllm.v1.worker.gpu_worker.Worker`, which `LLM.collective_rpc` calls by name.

    vLLM rejects an extension with an attribute that its worker has, too, so all names here begin with `refit`.
    """

    def refit_begin(self) -> None:
        """Marks all parameters as not filled."""
        self.refit_unfilled_names = set(self.refit_parameter_names)

    @functools.cached_property
    def refit_parameter_names(self) -> frozenset[str]:
        """Returns the names of the model's parameters."""
        return frozenset(name for name, _ in _worker(self).get_model().named_parameters())

    @functools.cached_property
    def refit_model(self) -> Any:
        """Returns vLLM's model; with the first load, when its weights are mapped, it finds its experts on the host."""
        model = _worker(self).get_model()
        find_experts_on_host(model.modules())
        return model

    @functools.cached_property
    def refit_recorded(self) -> RecordedLoads:
        """Returns the loads that are replayed from CUDA graphs; the parameters must stay the same objects."""
        return RecordedLoads(list(_worker(self).get_model().parameters()), CudaRecorder)

    @torch.no_grad()
    def refit_load(self, named_tensors: Sequence[NamedTensor]) -> None:
        """Loads whole weights of a Hugging Face checkpoint from any device; on return, they are loaded.

        Raises:
            ValueError: If the model has no such weight, or has it with another shape.
        """
        load = functools.partial(_load, _worker(self), self.refit_model, named_tensors)
        loaded = self.refit_recorded.load(named_tensors, load) if isinstance(named_tensors, FixedTensors) else load()
        torch.cuda.synchronize(_worker(self).device)
        if loaded is None:  # the model does not report what it loaded
            self.refit_unfilled_names = set()
        else:
            self.refit_unfilled_names -= loaded

    def refit_memory_stats(self) -> dict[str, float]:
        """Returns the memory that recorded loads keep (see `RecordedLoads.memory_stats`)."""
        return self.refit_recorded.memory_stats

    def refit_transformed(self) -> list[str]:
        """Returns, one line each, the changes that vLLM makes to weights after loading, but not after a refit."""
        return transformed_after_loading(_worker(self).get_model().named_modules())

    def refit_dropped(self, specs: Sequence[TensorSpec]) -> list[str]:
        """Returns the names of biases of a checkpoint that the model would ignore (see `dropped_biases`)."""
        return dropped_biases(dict(_worker(self).get_model().named_parameters()), specs)

    def refit_unfilled(self) -> list[str]:
        """Returns the names of vLLM's parameters that no weight has been loaded into since `refit_begin`."""
        return sorted(self.refit_unfilled_names)

    def refit_checksums(self, specs: Sequence[TensorSpec]) -> dict[str, int]:
        """Returns `tensor_checksum` of each weight, read from vLLM's parameters."""
        found = read_back(dict(_worker(self).get_model().named_parameters()), specs)
        return {name: tensor_checksum(tensor) for name, tensor in found.items()}

    @functools.cached_property
    def refit_saved(self) -> SavedMemory:
        """Returns the tensors in vLLM's weight memory besides parameters and buffers, such as its sampler's state."""
        from vllm.device_allocator import get_mem_allocator_instance

        model = _worker(self).get_model()
        blocks = [
            (address, data.handle[1])
            for address, data in get_mem_allocator_instance().pointer_to_data.items()
            if data.tag == "weights"
        ]
        gc.unfreeze()  # vLLM has frozen all live objects, and the collector does not list frozen ones
        # isinstance reads `__class__`, which warns for some of torch.distributed's objects.
        alive = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor) and item.is_cuda]
        gc.freeze()
        saved = SavedMemory(outside_of_parameters(alive, [*model.parameters(), *model.buffers()], blocks))
        logger.info(
            "vLLM keeps %.1f MiB of other tensors in its weights' memory; while it sleeps, those that are not zero "
            "are kept in host memory.",
            saved.nbytes / MIB,
        )
        return saved

    def refit_save(self) -> None:
        """Saves to host memory what sleep level 2 discards from the weight memory and no refit brings back."""
        self.refit_saved.save()

    def refit_restore(self) -> None:
        """Restores what `refit_save` has saved, once the memory is allocated again."""
        self.refit_saved.restore()


def _worker(extension: RefitExtension) -> Any:
    """Returns the extension typed as the worker that it is part of."""
    return extension


def _load(worker: Any, model: Any, named_tensors: Sequence[NamedTensor]) -> Loaded:
    """Loads weights with vLLM's model of this worker.

    Raises:
        CaptureError: If the load is being recorded, and cannot be.
        ValueError: If the model has no such weight, or has it with another shape.
    """
    from vllm.config import set_current_vllm_config

    name = ""

    def on_device() -> Iterator[NamedTensor]:
        nonlocal name
        for name, tensor in named_tensors:
            yield name, tensor.to(worker.device)

    with set_current_vllm_config(worker.vllm_config):
        try:
            loaded = model.load_weights(on_device())
        except CaptureError:
            raise
        except (AssertionError, AttributeError, KeyError, RuntimeError, ValueError) as error:
            raise ValueError(
                f"vLLM's model cannot load the weight {name!r} that the policy sends ({type(error).__name__}: "
                f"{error}); both must have the same architecture, and vLLM must support it."
            ) from error
    if loaded is None:
        return None
    return frozenset(parameters_filled(loaded, worker.refit_parameter_names))
