"""Defines generation engines that record their moments; for `upstream_way` vLLM sleeps and wakes as in NeMo-RL.

Each replayed call names its file in NeMo-RL, below nemo_rl/models/generation/vllm/.
"""

import gc
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch

from colocated_ways.marks import Marks, with_tags
from nemo_offload_rl.generation.vllm_backend import VllmActor
from nemo_offload_rl.refit.interface import WeightBucket


class MarkedCalls:
    """Records the calls of an engine's actor; `build` sets `_marks`."""

    _marks: Marks

    def load_weights(self, bucket: WeightBucket) -> float:
        """See `WeightLoader.load_weights`."""
        with self._marks.span("load_weights"):
            return float(super().load_weights(bucket))  # type: ignore[misc]

    def run(self, verb: str, *arguments: Any) -> Any:
        """See `GeneratorProcess.run`."""
        with self._marks.span(_call_name(verb, arguments)):
            return super().run(verb, *arguments)  # type: ignore[misc]


class MarkedVllmActor(MarkedCalls, VllmActor):
    """Runs a run's actor with a `vllm.LLM` that records its own moments."""

    like_upstream = False

    def build(self, policy: Any, *, rank: int, **arguments: Any) -> None:
        """See `VllmActor.build`."""
        self._marks = marks = Marks(f"engine-{rank}")
        try:
            with marks.span("vllm_import"):
                import vllm

                llm = vllm.LLM
        except ImportError:  # the actor says what to do about it
            super().build(policy, rank=rank, **arguments)
            return
        with mock.patch.object(vllm, "LLM", marked_llm(llm, marks, like_upstream=self.like_upstream)):
            super().build(policy, rank=rank, **arguments)
        marks.note("engine_built")


class UpstreamVllmActor(MarkedVllmActor):
    """Runs an engine that sleeps at level 1."""

    like_upstream = True

    def run(self, verb: str, *arguments: Any) -> Any:
        """See `GeneratorProcess.run`; NeMo-RL's policy always leaves the GPU before the KV cache is mapped."""
        result = super().run(verb, *arguments)
        return False if verb == "prepare_for_generation" else result

    def complete_refit(self) -> None:
        """Replays vllm_backend.py, update_weights_via_ipc_zmq, at the message that all weights have been sent."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.utils import process_weights_after_loading

        worker = _vllm_worker(self._generator._llm)
        with self._marks.span("complete_refit"), set_current_vllm_config(worker.vllm_config):
            process_weights_after_loading(worker.get_model(), worker.model_config, worker.device)


def marked_llm(base: Any, marks: Marks, *, like_upstream: bool) -> Any:
    """Derives a class from `vllm.LLM` that records its moments.

    Args:
        base: the class.
        marks: gets `first_prefill_kernel`, `first_token` and `last_token` of each generation, and how long sleep,
            wake-up and calls of the worker take.
        like_upstream: whether it sleeps as in NeMo-RL.
    """

    class MarkedLLM(base):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            with marks.span("vllm_build"):
                super().__init__(*arguments, **named)
            self.awaited: list[str] = []
            _vllm_worker(self).get_model().register_forward_pre_hook(lambda *_: self.reach("first_prefill_kernel"))
            step = self.llm_engine.step

            def marked_step(*of_step: Any, **named_of_step: Any) -> Any:
                outputs = step(*of_step, **named_of_step)
                self.reach("first_token")
                return outputs

            self.llm_engine.step = marked_step

        def reach(self, name: str) -> None:
            if name in self.awaited:
                self.awaited.remove(name)
                marks.note(name)

        def generate(self, *arguments: Any, **named: Any) -> Any:
            self.awaited = ["first_prefill_kernel", "first_token"]
            outputs = super().generate(*arguments, **named)
            marks.note("last_token")
            return outputs

        def sleep(self, level: int = 1, **named: Any) -> Any:
            if like_upstream:  # vllm_worker.py, `sleep`, all of it
                self.reset_prefix_cache()
                level = 1
            with marks.span("sleep"):
                result = super().sleep(level=level, **named)
            if like_upstream:
                gc.collect()
                torch.cuda.empty_cache()
            return result

        def collective_rpc(self, method: Any, *arguments: Any, **named: Any) -> Any:
            if like_upstream and method in ("refit_save", "refit_restore"):  # level 1 keeps it with the weights
                return [None]
            if method == "refit_load":  # `load_weights` is noted
                return super().collective_rpc(method, *arguments, **named)
            with marks.span(str(method)):
                return super().collective_rpc(method, *arguments, **named)

        def reset_prefix_cache(self, *arguments: Any, **named: Any) -> Any:
            with marks.span("reset_prefix_cache"):
                return super().reset_prefix_cache(*arguments, **named)

        def wake_up(self, tags: list[str] | None = None) -> Any:
            # vllm_worker.py, `wake_up`, is this call, too.
            with marks.span(with_tags("wake_up", tags)):
                return super().wake_up(tags)

    return MarkedLLM


def _call_name(verb: str, arguments: Sequence[Any]) -> str:
    return with_tags(verb, arguments[0]) if verb == "prepare_for_generation" and arguments else verb


def _vllm_worker(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker
