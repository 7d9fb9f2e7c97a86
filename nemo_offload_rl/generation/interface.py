"""Defines the interface between the algorithms and a generation engine of any backend."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from nemo_offload_rl.config.schema.policy import GRPOPolicyConfig
from nemo_offload_rl.placement.cluster import Cluster
from nemo_offload_rl.refit.interface import Receiver
from nemo_offload_rl.refit.plan import ExportPlan

# The parts that a sleeping engine wakes up, by vLLM's names.
WakeUpTag = Literal["weights", "kv_cache"]


@dataclass(frozen=True)
class SamplingParams:
    """Holds the sampling settings.

    Attributes:
        max_new_tokens: Largest number of new tokens in a sequence, including its stop token or stop string.
        temperature: Divides the logits; 0 takes the most probable token.
        top_p: Keeps the fewest most probable tokens whose probabilities sum to at least this; in (0, 1], 1 keeps all.
        top_k: Keeps this many most probable tokens, before top_p; None keeps all.
        stop_token_ids: All tokens that end a sequence, the model's own ends among them; they are part of its output.
        seed: With a request's step and a row's prompt and sample id, the only source of randomness.
        stop_strings: Texts that end a sequence as soon as its text has one; the token that completes it is the last.
            Only the answer's text counts, with special tokens as they are written. Needs an engine that was built from
            a recipe with stop strings.
        bad_words: Texts that a sequence must not contain (see `bad_words.bad_word_ids`). Needs an engine that was built
            from a recipe with bad words.
    """

    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int | None
    stop_token_ids: tuple[int, ...]
    seed: int
    stop_strings: tuple[str, ...] = ()
    bad_words: tuple[str, ...] = ()

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
            raise ValueError("stop_strings has an empty string, which every text contains; leave it out.")
        if not all(word.strip() for word in self.bad_words):
            raise ValueError("bad_words has an empty word, which every text contains; leave it out.")


@dataclass
class GenerationRequest:
    """Holds the prompts to continue, one row for each sample.

    Attributes:
        prompt_ids: Token ids of each row's prompt, not padded; a prompt with n samples is repeated n times.
        sample_ids: Distinguish the rows of one prompt within a step: 0 .. n-1, further ones in further requests.
        step: The training step, so that a prompt gets new samples in a later step.
        sampling: The sampling settings.
    """

    prompt_ids: list[list[int]]
    sample_ids: list[int]
    step: int
    sampling: SamplingParams

    def __post_init__(self) -> None:
        if len(self.prompt_ids) != len(self.sample_ids):
            raise ValueError(
                f"A generation request has {len(self.prompt_ids)} prompts and {len(self.sample_ids)} sample ids; it "
                "needs one sample id per prompt."
            )
        empty = [row for row, prompt in enumerate(self.prompt_ids) if not prompt]
        if empty:
            raise ValueError(f"Row {empty[0]} of a generation request has an empty prompt; it needs at least 1 token.")


@dataclass
class GenerationOutput:
    """Holds the generated tokens, in the order of the request's rows.

    Attributes:
        output_ids: New tokens, including the stop token, or the whole token that completes a stop string.
        logprobs: Log-prob of each new token under the temperature-scaled distribution (temperature 1 if greedy) of the
            tokens that complete no bad word. Those of `transformers` are before top_k and top_p, those of `vllm` after
            them; training's own log-probs follow the engine (`worker.logprob_passes`), but for bad words.
        finish_reasons: "stop" after a stop token or a stop string, even at the limit; otherwise "length".
        num_updates: For each new token, how often its engine's weights had changed since the call began when its
            log-prob was computed; None from engines whose weights never change meanwhile.
        held_s: Seconds for which new weights held the generation, of the engine that waited longest.
    """

    output_ids: list[list[int]]
    logprobs: list[list[float]]
    finish_reasons: list[str]
    num_updates: list[list[int]] | None = None
    held_s: float = 0.0


class GenerationError(RuntimeError):
    """Says that the generation engine failed; the message includes its traceback.

    Attributes:
        verb: The name of the method that failed.
        cause: The exception that it raised, or Ray's error if the process died.
        place: A policy rank whose GPU the engine shares (None if it has its own) and the node; None if all ranks are
            on one node.
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
class InFlightUpdates:
    """Describes how weights change while answers are being generated: between two steps of an engine.

    Attributes:
        recomputes_kv_cache: Whether answers under way get keys and values of the new weights.
    """

    recomputes_kv_cache: bool


@dataclass(frozen=True)
class Capabilities:
    """Declares the properties of an engine; one that implements `HasWeightsChecksum` can be verified, too.

    Attributes:
        refit_transport: The key of `refit.TRANSPORTS` that brings its weights.
        keeps_weights: Whether its weights survive `finish_generation`; if not, a refit must precede each generation.
        batch_independent_sampling: Whether a row's output depends only on that row, the step and the seed.
        built_alone: Whether other processes may take GPU memory only after `wait_until_ready`, because the engine
            measures the free memory, or because the GPU has no room for both.
    """

    refit_transport: str
    keeps_weights: bool
    batch_independent_sampling: bool
    built_alone: bool = False


class GenerationInterface(Protocol):
    """Defines the driver's handle on all engines of a run, which divide its requests among themselves."""

    @property
    def capabilities(self) -> Capabilities:
        """Properties of the engine that training loops may rely on."""
        ...

    @property
    def receivers(self) -> Sequence[Receiver]:
        """Returns the processes that a weight transport sends to."""
        ...

    def wait_until_ready(self) -> None:
        """Waits until the engines, which start in the background, are built.

        Raises:
            GenerationError: If an engine could not be built.
        """
        ...

    def generate(self, request: GenerationRequest) -> GenerationOutput:
        """Continues every prompt."""
        ...

    def prepare_for_generation(self, tags: Sequence[WakeUpTag]) -> bool:
        """Wakes up the parts of the engine that generation needs on the GPU.

        Args:
            tags: "weights" before a refit; "kv_cache" once the policy has left the GPU. Both together only if the
                engine keeps its weights.

        Returns:
            Whether the GPU has room for everything that generation needs in addition to the policy's current memory, so
            that generation need not wait until the policy has left.
        """
        ...

    def start_finish_generation(self) -> Sequence[Any]:
        """Starts to free the engine's GPU memory; `finish_generation` waits for it, and raises its errors.

        Returns:
            References that `run.algorithm.Policy.start_return` waits for.
        """
        ...

    def finish_generation(self) -> None:
        """Frees the engine's GPU memory, whether or not `start_finish_generation` was called."""
        ...

    def prepare_refit_info(self, plan: ExportPlan) -> None:
        """Checks, before the first refit, that its tensors match the model's.

        Raises:
            ValueError: If a name is missing or unknown, or a shape or dtype differs.
        """
        ...

    def memory_stats(self) -> dict[str, float]:
        """Returns the memory of the engine's process in GiB; for several processes, the largest value of each."""
        ...

    def shutdown(self) -> None:
        """Ends the engine's processes."""
        ...


@runtime_checkable
class HasWeightsChecksum(Protocol):
    """Defines an engine whose weights can be compared with those sent, as `policy.verify_refit` needs."""

    def weights_checksum(self) -> dict[str, int]:
        """Returns `tensor_checksum` of every weight, by the Hugging Face names of `prepare_refit_info`."""
        ...


@dataclass(frozen=True)
class EngineSpec:
    """Describes a generation backend.

    Attributes:
        bundles_per_engine: Returns an engine's number of bundles (GPUs), given the recipe's `policy` and the cluster.
        start: Starts the engines, before the policy's ranks, and returns before they are built; takes the recipe's
            `policy`, the cluster and the bundles of each engine: those of the ranks with the same numbers, or others.
            An engine has bundles of one node, or all bundles of several nodes. The last argument says how weights
            change while engines generate, None if they do not.
    """

    bundles_per_engine: Callable[[GRPOPolicyConfig, Cluster], int]
    start: Callable[[GRPOPolicyConfig, Cluster, Sequence[tuple[int, ...]], InFlightUpdates | None], GenerationInterface]
