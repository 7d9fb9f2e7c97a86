"""Starts moves of a rank's state before the phase that asks for them, beside other work."""

from collections.abc import Mapping
from typing import Any

from nemo_offload_rl.mcore.model.model_config import packs
from nemo_offload_rl.memory.units import GIB, round_up
from nemo_offload_rl.plan.activation_facts import LOGPROB_TOKENS
from nemo_offload_rl.plan.plan import OffloadPlan
from nemo_offload_rl.residency.residency import Residency
from nemo_offload_rl.residency.table import Phase, Placement, Target

_MARGIN = 1.1
"""What a log-prob pass may take over the most that one took."""


class EarlyMoves:
    """Starts moves before the phase that needs them, where memory for a log-prob pass is left beside them.

    Nothing here changes what a phase finds when it is entered, only when copies begin.

    Args:
        residency: moves the state.
        config: the recipe's policy section, validated.
        plan: where everything lives in each phase.
    """

    def __init__(self, residency: Residency, config: Mapping[str, Any], plan: OffloadPlan) -> None:
        self._residency = residency
        self._refit_follows = "generation" in config
        self._state_may_return = plan.table[Phase.LOGPROB][Target.OPTIMIZER_STATE] is Placement.UNCHANGED
        self._most_tokens = _most_tokens(config)
        self._gib_per_token = 0.0  # of a log-prob micro-batch; the most that any pass took

    def after_training(self) -> None:
        """Gradients and optimizer state begin to leave, where the next thing is a refit."""
        if self._refit_follows:
            self._residency.start_leaving(Phase.REFIT)

    def after_generation(self, *, logprobs: bool) -> None:
        """Parameters begin to come back, and behind them optimizer state, as far as there is room.

        Gradients have their memory before optimizer state is copied, where training comes next.

        Args:
            logprobs: whether log-prob passes come before training.
        """
        if logprobs:
            self._residency.prefetch(Phase.LOGPROB)
            self.beside_logprobs(self._most_tokens)
        else:
            self._residency.prefetch(Phase.TRAIN, with_dropped=True)

    def beside_logprobs(self, num_tokens: int) -> None:
        """Optimizer state begins to come back, if there is room for it and for the pass, known from the first one on.

        Args:
            num_tokens: of the largest micro-batch, its padding included.
        """
        if self._state_may_return and self._gib_per_token:
            reserve = _MARGIN * self._gib_per_token * num_tokens
            self._residency.prefetch(Phase.TRAIN, reserve_bytes=int(reserve * GIB))

    def note_logprobs(self, num_tokens: int, gib: float) -> None:
        """Take notice of the memory that a pass took."""
        self._gib_per_token = max(self._gib_per_token, gib / num_tokens)


def _most_tokens(config: Mapping[str, Any]) -> int:
    """Of a log-prob micro-batch, its padding included."""
    if "logprob_batch_size" not in config:
        return 0
    if packs(config):
        return int(config["sequence_packing"][LOGPROB_TOKENS])
    longest = round_up(config["max_total_sequence_length"], config["make_sequence_length_divisible_by"])
    return int(config["logprob_batch_size"]) * longest
