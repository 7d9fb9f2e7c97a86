"""Starts moves of a rank's state before the phase that needs them, to overlap them with other work."""

from nemo_offload_rl.config.schema.policy import PolicyConfig, has_logprob_batches, sequence_multiple
from nemo_offload_rl.mcore.model.model_config import packs
from nemo_offload_rl.memory.units import GIB, round_up
from nemo_offload_rl.plan.activations import LOGPROB_TOKENS
from nemo_offload_rl.plan.plan import OffloadPlan
from nemo_offload_rl.residency.residency import Residency
from nemo_offload_rl.residency.table import Phase, Placement, Target

_MARGIN = 1.1
"""Memory reserved for a log-prob pass, relative to the most that any earlier pass took per token."""


class EarlyMoves:
    """Starts moves before the phase that needs them, if they leave enough memory for a log-prob pass.

    This changes only when copies begin, not where state is once a phase has been entered.

    Args:
        residency: moves the state.
        config: the recipe's policy section, validated.
        plan: where everything lives in each phase.
    """

    def __init__(self, residency: Residency, config: PolicyConfig, plan: OffloadPlan) -> None:
        self._residency = residency
        self._refit_follows = "generation" in config
        self._state_may_return = plan.table[Phase.LOGPROB][Target.OPTIMIZER_STATE] is Placement.UNCHANGED
        self._most_tokens = _most_tokens(config)
        self._gib_per_token = 0.0  # of a log-prob micro-batch; the largest of all passes so far

    def after_training(self) -> None:
        """Start to move gradients and optimizer state off the GPU, if a refit comes next."""
        if self._refit_follows:
            self._residency.start_leaving(Phase.REFIT)

    def after_generation(self, *, logprobs: bool) -> None:
        """Start to bring parameters back to the GPU, and optimizer state after them, as far as memory allows.

        If training comes next, gradients get their memory before optimizer state is copied.

        Args:
            logprobs: whether log-prob passes come before training.
        """
        if logprobs:
            self._residency.prefetch(Phase.LOGPROB)
            self.beside_logprobs(self._most_tokens)
        else:
            self._residency.prefetch(Phase.TRAIN, with_dropped=True)

    def beside_logprobs(self, num_tokens: int) -> None:
        """Start to bring optimizer state back, if the GPU has memory for it and for a log-prob pass.

        The memory of a pass is known once one has run; before that nothing is started.

        Args:
            num_tokens: tokens of the largest micro-batch, padding included.
        """
        if self._state_may_return and self._gib_per_token:
            reserve = _MARGIN * self._gib_per_token * num_tokens
            self._residency.prefetch(Phase.TRAIN, reserve_bytes=int(reserve * GIB))

    def note_logprobs(self, num_tokens: int, gib: float) -> None:
        """Record the GPU memory that a log-prob pass of `num_tokens` tokens took."""
        self._gib_per_token = max(self._gib_per_token, gib / num_tokens)


def _most_tokens(config: PolicyConfig) -> int:
    """Returns the most tokens of a log-prob micro-batch, padding included; 0 without policy.logprob_batch_size."""
    if not has_logprob_batches(config):
        return 0
    if packs(config):
        return int(config["sequence_packing"][LOGPROB_TOKENS])
    longest = round_up(config["max_total_sequence_length"], sequence_multiple(config))
    return int(config["logprob_batch_size"]) * longest
