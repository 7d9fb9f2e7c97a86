"""Defines a transformers engine that records its moments, for a trial without a GPU; importing it takes seconds."""

from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

from colocated_ways.engines import MarkedCalls
from colocated_ways.marks import Marks
from nemo_offload_rl.generation.interface import GenerationOutput, GenerationRequest, WakeUpTag
from nemo_offload_rl.generation.transformers_backend import GeneratorActor
from nemo_offload_rl.generation.transformers_generator import TransformersGenerator


class MarkedGeneratorActor(MarkedCalls, GeneratorActor):
    """Runs a run's actor with a generator that records its moments."""

    def build(self, model: Mapping[str, Any], **arguments: Any) -> None:
        """See `GeneratorActor.build`."""
        self._marks = Marks("engine")
        module = "nemo_offload_rl.generation.transformers_generator.TransformersGenerator"
        with mock.patch(module, MarkedTransformersGenerator):
            super().build(model, **arguments)
        self._marks.note("engine_built")

    def complete_refit(self) -> None:
        """Does nothing: this engine uses weights as they arrive."""


class MarkedTransformersGenerator(TransformersGenerator):
    """Records the same moments as `marked_llm`."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._marks = Marks("engine")
        self._is_first_batch = False

    def generate(self, request: GenerationRequest) -> GenerationOutput:
        """See `TransformersGenerator.generate`."""
        self._is_first_batch = True
        output = super().generate(request)
        self._marks.note("last_token")
        return output

    def _prefill(self, prompts: list[list[int]]) -> Any:
        is_first, self._is_first_batch = self._is_first_batch, False
        if is_first:
            self._marks.note("first_prefill_kernel")
        batch = super()._prefill(prompts)
        if is_first:
            self._marks.note("first_token")
        return batch

    def prepare_for_generation(self, tags: Sequence[WakeUpTag] = ("weights", "kv_cache")) -> None:
        """See `TransformersGenerator.prepare_for_generation`."""
        with self._marks.span("wake_up weights"):
            super().prepare_for_generation(tags)

    def finish_generation(self) -> None:
        """See `TransformersGenerator.finish_generation`."""
        with self._marks.span("sleep"):
            super().finish_generation()
