"""Defines what the algorithms ask of a generation engine, whatever runs behind it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from nemo_offload_rl.placement.cluster import Cluster
from nemo_offload_rl.refit.interface import Receiver
from nemo_offload_rl.refit.plan import ExportPlan

# What a sleeping engine wakes up, in vLLM's words.
WakeUpTag = Literal["weights", "kv_cache"]


@dataclass(frozen=True)
class SamplingParams:
    """Holds the settings of sampling.

    Attributes:
        max_new_tokens: The most tokens a sequence gets, its stop token or stop string included.
        temperature: Divides the logits; 0 takes the most probable token.
        top_p: Keeps the fewest most probable tokens whose probabilities sum to at least this; in (0, 1], 1 keeps all.
        top_k: Keeps this many most probable tokens, before top_p; None keeps all.
        stop_token_ids: Tokens that end a sequence; they are part of its output.
        seed: With a request's step and a row's prompt and sample id, the only source of randomness.
        stop_strings: Texts that end a sequence as soon as its text has one; the token that completes it is the last. It
            is that of the answer alone, special tokens as they are written. For engines of a recipe with stop strings.
    """

    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int | None
    stop_token_ids: tuple[int, ...]
    seed: int
    stop_strings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 1.")
        if self.temperature < 0:
            raise ValueError(f"temperature is {self.temperature}; it must be 0 (greedy) or positive.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be above 0 and at most 1 (1 keeps every token).")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}; it must be at least 1, or null to keep every token.")
        if "" in self.stop_strings:
            raise ValueError("stop_strings has an empty string, which every text has; leave it out.")


@dataclass
class GenerationRequest:
    """Holds the prompts to continue, one row a sample.

    Attributes:
        prompt_ids: Token ids of each row's prompt, not padded; a prompt asked for n times is there n times.
        sample_ids: Tells apart the rows of one prompt: 0 .. n-1.
        step: The training step, so that a prompt met again is sampled afresh.
        sampling: How tokens are chosen.
    """

    prompt_ids: list[list[int]]
    sample_ids: list[int]
    step: int
    sampling: SamplingParams

    def __post_init__(self) -> None:
        if len(self.prompt_ids) != len(self.sample_ids):
            raise ValueError(
                f"A generation request has {len(self.prompt_ids)} prompts and {len(self.sample_ids)} sample ids; "
                "it needs one sample id a prompt."
            )
        empty = [row for row, prompt in enumerate(self.prompt_ids) if not prompt]
        if empty:
            raise ValueError(f"Row {empty[0]} of a generation request has an empty prompt; it needs at least 1 token.")


@dataclass
class GenerationOutput:
    """Holds the generated tokens, row by row of the request.

    Attributes:
        output_ids: New tokens, the stop token included, and all of the token that completes a stop string.
        logprobs: Of each new token, under the temperature-scaled distribution (temperature 1 where greedy). Those of
            `transformers` are before top_k and top_p, those of `vllm` after them; what training compares its own with
            follows the engine (`worker.sampling`).
        finish_reasons: "stop" after a stop token or a stop string, also at the limit; "length" at the limit else.
    """

    output_ids: list[list[int]]
    logprobs: list[list[float]]
    finish_reasons: list[str]


class GenerationError(RuntimeError):
    """Says that the generation engine failed; the message has its traceback.

    Attributes:
        verb: The name of the method that failed.
        cause: The exception that it raised, or Ray's error where the process died.
        place: A policy rank whose GPU the engine shares, None where it has its own, and the node; None where all ranks
            are on one node.
    """

    def __init__(
        self, verb: str, cause: BaseException, detail: str, place: tuple[int | None, str] | None = None
    ) -> None:
        where = "" if place is None else f"{_beside(place[0])} on node {place[1]}"
        super().__init__(f"Generation{where} failed in {verb}: {type(cause).__name__}: {cause}\n{detail}".rstrip())
        self.verb = verb
        self.cause = cause
        self.place = place


def _beside(rank: int | None) -> str:
    return "" if rank is None else f" beside rank {rank}"


@dataclass(frozen=True)
class Capabilities:
    """Declares the properties of an engine; one with the method of `HasWeightsChecksum` can be verified, too.

    Attributes:
        refit_transport: Which of `refit.TRANSPORTS` brings its weights.
        keeps_weights: Whether its weights survive `finish_generation`; where not, a refit precedes each generation.
        batch_independent_sampling: Whether a row's output depends on that row, the step and the seed alone.
        built_alone: Whether others may take GPU memory only after `wait_until_ready`: it measures what is free,
            or there is no room for both.
    """

    refit_transport: str
    keeps_weights: bool
    batch_independent_sampling: bool
    built_alone: bool = False


class GenerationInterface(Protocol):
    """Defines the driver's handle on all engines of a run, which share its requests."""

    @property
    def capabilities(self) -> Capabilities:
        """Properties that loops may rely on."""
        ...

    @property
    def receivers(self) -> Sequence[Receiver]:
        """The processes that a weight transport sends to."""
        ...

    def wait_until_ready(self) -> None:
        """Wait until the engines, which start in the background, are built.

        Raises:
            GenerationError: If one could not be.
        """
        ...

    def generate(self, request: GenerationRequest) -> GenerationOutput:
        """Continue every prompt."""
        ...

    def prepare_for_generation(self, tags: Sequence[WakeUpTag]) -> bool:
        """Wake up a part of what generation needs on the GPU.

        Args:
            tags: "weights" before a refit; "kv_cache" once the policy has left the GPU. Both together only where
                the engine keeps its weights.

        Returns:
            Whether generation finds room for all that it needs beside what the policy has on the GPU now, so that it
            need not wait until the policy has left.
        """
        ...

    def start_finish_generation(self) -> Sequence[Any]:
        """Begin to give the GPU memory back; `finish_generation` waits for it, and raises what fails.

        Returns:
            What `run.policy_interface.Policy.start_return` waits for.
        """
        ...

    def finish_generation(self) -> None:
        """Give the GPU memory back; whether or not that has begun."""
        ...

    def prepare_refit_info(self, plan: ExportPlan) -> None:
        """Check, before the first refit, that the tensors to come are the ones the model has.

        Raises:
            ValueError: If a name is missing or unknown, or a shape or dtype differs.
        """
        ...

    def memory_stats(self) -> dict[str, float]:
        """Memory of the engine's process in GiB; of several processes, the largest value of each."""
        ...

    def shutdown(self) -> None:
        """End the engine's processes."""
        ...


@runtime_checkable
class HasWeightsChecksum(Protocol):
    """Defines an engine whose weights can be compared with those sent, as `policy.verify_refit` needs."""

    def weights_checksum(self) -> dict[str, int]:
        """`tensor_checksum` of every weight, by the Hugging Face names of `prepare_refit_info`."""
        ...


@dataclass(frozen=True)
class EngineSpec:
    """Describes a generation backend.

    Attributes:
        bundles_per_engine: From the recipe's `policy` and the cluster, how many bundles (GPUs) an engine spans.
        start: Starts the engines, before the policy's ranks, and returns before they are built; takes the recipe's
            `policy`, the cluster and, for each engine, its bundles: those of the ranks with their numbers, or others.
    """

    bundles_per_engine: Callable[[Mapping[str, Any], Cluster], int]
    start: Callable[[Mapping[str, Any], Cluster, Sequence[tuple[int, ...]]], GenerationInterface]
