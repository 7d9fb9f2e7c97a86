"""Keeps the generation engine's weights equal to the policy's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from nemo_offload_rl.generation.interface import GenerationInterface, HasWeightsChecksum
from nemo_offload_rl.refit.checksum import require_equal_checksums
from nemo_offload_rl.refit.interface import RefitTransport
from nemo_offload_rl.refit.plan import ExportPlan


class WeightSource(Protocol):
    """Defines the part of a policy that sends weights."""

    def prepare_refit_info(self, transport: RefitTransport) -> ExportPlan:
        """Connects the policy to a transport; returns the plan of the weights that each refit sends."""

    def offload_before_refit(self) -> None:
        """Offloads policy state to make room on the GPU for the engine's weights."""

    def send_weights(self) -> dict[str, int]:
        """Sends all weights; returns their checksums by name if the transport verifies."""

    def offload_after_refit(self, *, wait: bool = True) -> None:
        """Offloads policy state to make room for generation.

        Args:
            wait: wait for the copies; False where generation already has the memory that it needs.
        """


class WeightSync:
    """Refits the engine when the policy has changed since the last time.

    Args:
        policy: the policy that sends the weights.
        generation: the engines that load them.
        transport: carries the weights from policy to engines; with ``verify`` it has to compute checksums.
        verify: whether to compare the checksums of both sides after each refit.

    Raises:
        ValueError: ``verify`` is true, but the engine has no checksums.
    """

    def __init__(
        self, policy: WeightSource, generation: GenerationInterface, transport: RefitTransport, *, verify: bool
    ) -> None:
        self._policy = policy
        self._generation = generation
        self._received_checksums: Callable[[], dict[str, int]] | None = None
        if verify:
            if not isinstance(generation, HasWeightsChecksum):
                raise ValueError(
                    "policy.verify_refit is true, but the engines of policy.generation.backend give no checksums of "
                    "their weights; set it to false."
                )
            self._received_checksums = generation.weights_checksum
        self._stale = True
        generation.prepare_refit_info(policy.prepare_refit_info(transport))

    def mark_stale(self) -> None:
        """Records that the policy has changed, so that the next `refresh` sends its weights."""
        self._stale = True

    def refresh(self) -> None:
        """Makes the engine ready to generate with the policy's weights.

        Raises:
            RuntimeError: the checksums of the two sides differ.
        """
        if not self._stale and self._generation.capabilities.keeps_weights:
            self._policy.offload_after_refit()
            self._generation.prepare_for_generation(["weights", "kv_cache"])
            return
        self._policy.offload_before_refit()
        has_room = self._generation.prepare_for_generation(["weights"])
        sent = self._policy.send_weights()
        if self._received_checksums is not None:
            require_equal_checksums(sent, self._received_checksums())
        # The policy frees its weights before the KV cache is allocated in their place, unless there is room for both.
        self._policy.offload_after_refit(wait=not has_room)
        self._generation.prepare_for_generation(["kv_cache"])
        self._stale = False


class NoWeightSync:
    """Stands for `WeightSync` in a run without an engine."""

    def mark_stale(self) -> None:
        """Does nothing."""

    def refresh(self) -> None:
        """Does nothing."""
