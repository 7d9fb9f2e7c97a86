"""Detects steps that change no parameter: of an optimizer that gets no learning rate, or that steps copies."""

from collections.abc import Iterable, Sequence

import torch

_NUM_STEPS = 10
"""First steps of a worker that are checked: phases and a resumed checkpoint come before the first or between them."""
_PATIENCE = 3
"""Unchanged steps in a row that raise: a small learning rate may by chance change no sampled bf16 value in one step."""
_MOST_PARAMETERS, _MOST_ELEMENTS = 16, 65_536
_LEAST_NORM = 1e-6
"""A smaller gradient is not checked: Adam's epsilon may leave bf16 parameters unchanged, as with equal advantages."""


class UnchangedParametersError(RuntimeError):
    """Says that steps with gradients have changed no parameter."""


class ParameterWatch:
    """Compares a sample of the parameters before and after each of the first steps.

    Up to 16 matrices of all sizes, with up to 65,536 elements each, are copied and compared on their device. Norms'
    weights are left out: a small learning rate does not change a bf16 number near 1.

    Args:
        parameters: this rank's parameters; those that are not trained are left out.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        matrices = sorted((one for one in trained if one.ndim > 1), key=torch.Tensor.numel) or trained
        self._parameters = matrices[:: -(-len(matrices) // _MOST_PARAMETERS) or 1]
        self._num_left = _NUM_STEPS
        self._num_unchanged = 0
        self._before: list[torch.Tensor] = []

    def before_step(self) -> None:
        """Copy the sample."""
        self._before = [sample.clone() for sample in self._samples()] if self._num_left else []

    def after_step(self, grad_norm: float, learning_rates: Sequence[float], device: torch.device) -> None:
        """Compare the sample with its copy, on all ranks together; collective.

        Args:
            grad_norm: norm of the whole gradient, the same on every rank.
            learning_rates: learning rates of the optimizer's groups on this rank.
            device: where the model computes.

        Raises:
            UnchangedParametersError: on every rank, if the last three steps with gradients and a learning rate have
                changed nothing on any rank.
        """
        if not self._num_left or grad_norm < _LEAST_NORM:
            return
        self._num_left -= 1
        before, self._before = self._before, []
        changed = torch.zeros((), dtype=torch.float64, device=device)
        for sample, was in zip(self._samples(), before, strict=True):
            changed += (sample != was).any()
        found = torch.stack([changed, changed.new_tensor(max(learning_rates, default=0.0))])
        torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MAX)
        num_changed, learning_rate = found.tolist()
        if num_changed or not learning_rate:
            self._num_unchanged = 0
            return
        self._num_unchanged += 1
        if self._num_unchanged == _PATIENCE:
            dtype = str(self._parameters[0].dtype).removeprefix("torch.") if self._parameters else "float32"
            raise UnchangedParametersError(
                f"The last {_PATIENCE} training steps changed none of the sampled parameters. The gradient's norm is "
                f"{grad_norm:.3g} and the learning rate {learning_rate:.3g}: the learning rate is too small for "
                f"{dtype} parameters, or it does not reach the optimizer; raise policy.megatron_cfg.optimizer.lr, or "
                "if it is not small, report this."
            )

    def _samples(self) -> list[torch.Tensor]:
        flat = [parameter.detach().view(-1) for parameter in self._parameters]
        return [one[:: -(-one.numel() // _MOST_ELEMENTS) or 1] for one in flat]
