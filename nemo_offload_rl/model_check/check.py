"""Checks a run's model: takes the result from the cache, or runs the check in a process in the background."""

import contextlib
import logging
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Self

import torch

from nemo_offload_rl.config.problems import show
from nemo_offload_rl.config.schema.policy import PolicyConfig
from nemo_offload_rl.hf_config import hf_config as read_hf_config
from nemo_offload_rl.model_check import cache
from nemo_offload_rl.model_check.alone import alone
from nemo_offload_rl.model_check.process import TIMEOUT_S, CheckProcess, CheckTimeoutError, ModelCheckError
from nemo_offload_rl.model_check.result import CheckResult, describe, refusal
from nemo_offload_rl.model_check.twin import SIZE_KEYS, TwinlessError, twin_config

# Keys that do not change what a model computes.
_BESIDE = frozenset(
    (
        "transformers_version", "architectures", "dtype", "torch_dtype", "_name_or_path", "name_or_path", "id2label",
        "label2id", "problem_type", "use_cache", "initializer_range", "output_hidden_states", "output_attentions",
        "output_router_logits", "return_dict", "model_type", "pretraining_tp", "quantization_config", "auto_map",
        "attention_dropout", "router_aux_loss_coef", "is_encoder_decoder", "chunk_size_feed_forward"
    )
)  # fmt: skip


def changed_flags(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the flags of a config that differ from the family's.

    Args:
        config: the model's config, complete (`to_dict()`).
        defaults: a config of the same class without arguments, complete.

    Returns:
        Dotted keys with their values, in the config's order; sizes are left out.
    """
    usual = dict(_flat(defaults))
    absent = object()
    return {
        key: value
        for key, value in _flat(config)
        if (key not in usual or usual[key] != value) and not _same_kinds(value, usual.get(key, absent))
    }


def show_flags(flags: Mapping[str, Any]) -> list[str]:
    """Returns each flag as `key value`."""
    return [f"{key} {show(value)}" for key, value in flags.items()]


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if not prefix and (key in SIZE_KEYS or key in _BESIDE):
            continue
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _same_kinds(value: Any, other: Any) -> bool:
    """Returns whether two lists of unequal length, from models of unequal depth, name the same kinds of layers."""
    if not (isinstance(value, list) and isinstance(other, list) and value and other):
        return False
    return len(value) != len(other) and {repr(item) for item in value} == {repr(item) for item in other}


logger = logging.getLogger(__name__)


@contextlib.contextmanager
def checked_model(policy: PolicyConfig) -> Iterator[None]:
    """Checks a policy's model while the `with` block builds it on this process's GPU; then waits and logs the result.

    Raises:
        ValueError: the model is refused; see `ModelCheck`.
    """
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    with ModelCheck(policy, read_hf_config(policy), device=device) as check:
        yield
        message = check.finish()
        logger.log(check.level, "%s", message)


class ModelCheck:
    """Checks one model in the background while the `with` block of this context manager runs.

    If the block raises an error that is not meant for users, the check's result comes first: it may explain the error.

    Attributes:
        level: the level at which the message of `finish` is to be logged.
    """

    def __init__(self, policy: PolicyConfig, hf_config: Any, *, device: str) -> None:
        """Starts the check, unless its result is cached or the recipe skips it.

        Args:
            policy: a recipe's policy section, validated.
            hf_config: the model's Hugging Face config.
            device: the name of the GPU that the model runs on, or cpu.

        Raises:
            ModelCheckError: a cached result says that Megatron computes the model wrongly.
            TwinlessError: no small twin can be made of the model's Hugging Face config.
        """
        self.level = logging.INFO
        self._config = hf_config
        self._skips = policy["skip_model_check"]
        self._known: CheckResult | None = None
        try:
            self._key = cache.key_of(alone(policy, twin_config(self._config).to_dict()), device=device)
            self._known = cache.read(self._key)
        except TwinlessError:
            if not self._skips:
                raise
        self._process = None if self._known or self._skips else CheckProcess(policy)
        if self._known is not None and not self._skips:
            self._refuse_wrong(self._known)

    def finish(self, timeout_s: float = TIMEOUT_S) -> str:
        """Waits for the result; without one within `timeout_s`, the model is not checked.

        Returns:
            The message for the user.

        Raises:
            ModelCheckError: Megatron computes the model wrongly, or cannot compute it.
        """
        result = self._known
        if self._process is not None:
            try:
                result = self._process.result(timeout_s)
            except CheckTimeoutError as error:
                self.level = logging.WARNING
                return f"The model was not checked against transformers: {error}. The run goes on."
            except ModelCheckError as error:
                raise ModelCheckError(f"{error}; policy.skip_model_check: true trains without the check") from error
            cache.write(self._key, result)
        if result is None:
            return "The model was not checked against transformers: policy.skip_model_check is true."
        if self._skips and not result.is_right:
            self.level = logging.WARNING
            return f"The model is trained although Megatron's results differ from transformers': {describe(result)}."
        self._refuse_wrong(result)
        return f"Megatron's results for the model agree with transformers': {describe(result)}."

    def close(self) -> None:
        """Ends the process if it is still running."""
        if self._process is not None:
            self._process.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if isinstance(error, Exception) and not isinstance(error, ValueError) and self._process is not None:
                self.finish()
        finally:
            self.close()

    def _refuse_wrong(self, result: CheckResult) -> None:
        if not result.is_right:
            defaults = type(self._config)().to_dict()
            flags = changed_flags(self._config.to_dict(), defaults)
            raise ModelCheckError(refusal(result, self._config.model_type, show_flags(flags)))
