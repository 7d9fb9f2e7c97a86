"""Keeps the generation engine's weights those of the policy."""

from __future__ import annotations

from typing import Protocol

from nemo_offload_rl.generation.interface import GenerationInterface, RefitInfo
from nemo_offload_rl.refit.checksum import require_equal_checksums
from nemo_offload_rl.refit.interface import RefitReport, RefitTransport


class WeightSource(Protocol):
    """The part of a policy that sends weights."""

    def prepare_refit_info(self) -> RefitInfo:
        """Names, shapes and dtypes of what will be sent."""
        ...

    def offload_before_refit(self) -> None:
        """Makes room for the engine's weights."""
        ...

    def send_weights(self, transport: RefitTransport) -> RefitReport:
        """Sends every weight."""
        ...

    def offload_after_refit(self) -> None:
        """Makes room for generation."""
        ...


class WeightSync:
    """Refits the engine when the policy has changed since the last time.

    Args:
        policy: where the weights come from.
        generation: where they go.
        transport: how they go there; with ``verify`` it has to report checksums.
        verify: compare checksums of both sides after each refit.
    """

    def __init__(
        self, policy: WeightSource, generation: GenerationInterface, transport: RefitTransport, *, verify: bool
    ) -> None:
        self._policy = policy
        self._generation = generation
        self._transport = transport
        self._verify = verify
        self._stale = True
        generation.prepare_refit_info(policy.prepare_refit_info())

    def mark_stale(self) -> None:
        """Says that the policy has changed."""
        self._stale = True

    def refresh(self) -> None:
        """Makes the engine ready to generate with the policy's weights.

        Raises:
            RuntimeError: the checksums of the two sides differ.
        """
        if not self._stale:
            self._policy.offload_after_refit()
            self._generation.prepare_for_generation()
            return
        self._policy.offload_before_refit()
        self._generation.prepare_for_generation()
        report = self._policy.send_weights(self._transport)
        if self._verify:
            assert report.checksums is not None
            require_equal_checksums(report.checksums, self._generation.weights_checksum())
        self._policy.offload_after_refit()
        self._stale = False
