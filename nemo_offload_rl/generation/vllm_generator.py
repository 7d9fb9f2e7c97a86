"""Samples with vLLM's engine, and loads its weights."""

import bisect
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from nemo_offload_rl.generation.interface import GenerationOutput, GenerationRequest, InFlightUpdates, WakeUpTag
from nemo_offload_rl.generation.step_gate import StepGate
from nemo_offload_rl.generation.vllm_arguments import sampling_arguments
from nemo_offload_rl.generation.vllm_memory import engine_memory_stats, vllm_pools
from nemo_offload_rl.memory.units import GIB
from nemo_offload_rl.metrics.memory import memory_stats, reset_gpu_peak
from nemo_offload_rl.refit.plan import ExportPlan, NamedTensor
from nemo_offload_rl.refit.recorder import no_garbage_collection

logger = logging.getLogger(__name__)

_MARGIN_BYTES = 2 * GIB  # memory that the policy may still allocate while generation begins
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# The bias by which routers choose experts: both Megatron and vLLM's models have it in float32.
_ALWAYS_FLOAT32 = "e_score_correction_bias"


class VllmGenerator:
    """Holds one process's `vllm.LLM` with the worker extension of `vllm_worker`, which runs in this process, too.

    Args:
        llm: The engine, awake and with random weights.
        precision: "bfloat16" or "float32", the dtype of its weights.
        max_sequence_length: Largest number of tokens of a prompt and its continuation together.
        sleeps: Whether it frees its GPU memory for the policy between generations; if not, it keeps its weights.
        keeps_weights: Whether its weights wait in host memory while it sleeps, and are complete when it wakes up.
        shares_experts: Whether other replicas have some of its experts, so that all of them generate together.
        in_flight: How weights change while another thread generates; None if they do not.

    Raises:
        ValueError: If vLLM changes weights after it has loaded them, which no refit does.
    """

    def __init__(
        self,
        llm: Any,
        *,
        precision: str,
        max_sequence_length: int,
        sleeps: bool = True,
        keeps_weights: bool = False,
        shares_experts: bool = False,
        in_flight: InFlightUpdates | None = None,
    ) -> None:
        self._llm = llm
        self._in_flight = in_flight
        self._gate = None if in_flight is None else StepGate(_agreed)
        self._is_updating = False
        self._tokens_at_updates: list[Mapping[str, int]] = []  # of the requests under way, since `generate` began
        if in_flight is not None:
            self._step = llm.llm_engine.step
            llm.llm_engine.step = self._step_with_newest_weights
        self._shares_experts = shares_experts
        self._dtype = _DTYPES[precision]
        self._max_sequence_length = max_sequence_length
        self._plan = ExportPlan(())
        self._missing: set[str] = set()  # names of the plan that have not been loaded
        self._has_weights = False
        self._prefixes_are_stale = False
        [transformed] = self._on_worker("refit_transformed")
        if transformed:
            raise ValueError(
                "vLLM transforms weights after it has loaded them, which a refit does not repeat: "
                f"{len(transformed)} modules would compute with weights other than the policy's "
                f"({'; '.join(transformed[:3])}{'; ...' if len(transformed) > 3 else ''}); set "
                "policy.generation.backend to transformers, or, if these are experts, "
                "policy.generation.vllm_kwargs.moe_backend to triton."
            )
        # Level 2 discards the weights, which the next refit brings again; level 1 backs them up; 0 means no sleep.
        self._asleep: set[WakeUpTag] = set()
        self._has_generated = False  # since the engine woke up
        self._activation_bytes = 0  # largest use of a generation outside the pools of weights and KV cache
        self._sleep_level = 0
        if sleeps:
            self._sleep_level = 1 if keeps_weights else 2

    # ---- weights

    def prepare_refit_info(self, plan: ExportPlan) -> None:
        """Stores the plan of a refit (see `GenerationInterface`).

        Only loading shows whether all other names and shapes fit vLLM's model, so the first refit checks that.

        Raises:
            ValueError: If a tensor has another dtype than the engine, or vLLM's model has no such bias.
        """
        for spec in plan.tensors:
            if spec.dtype != self._dtype and not spec.name.endswith(_ALWAYS_FLOAT32):
                raise ValueError(
                    f"The policy sends {spec}, but vLLM's weights are {self._dtype}; set policy.generation.vllm_cfg."
                    "precision to policy.precision."
                )
        [dropped] = self._on_worker("refit_dropped", list(plan.tensors))
        if dropped:
            raise ValueError(
                f"vLLM's model has no parameter for {len(dropped)} of the biases that the policy sends "
                f"({', '.join(dropped[:3])}{', ...' if len(dropped) > 3 else ''}), and would ignore them without an "
                "error; set policy.generation.backend to transformers, or train a model without these biases."
            )
        self._plan = plan
        self._forget_weights()

    def load_weights(self, named_tensors: Sequence[NamedTensor]) -> None:
        """Loads some tensors; on return, they have been read.

        A generation under way holds from the first ones, which have been received, to the last ones.

        Raises:
            ValueError: If vLLM's model has no such weight, or has it with another shape.
        """
        if self._gate is not None and named_tensors and not self._is_updating:
            self._begin_update()
        self._prefixes_are_stale = True
        try:
            self._on_worker("refit_load", named_tensors)
        except ValueError:
            self._forget_weights()  # the weights loaded before the error are an incomplete set
            raise
        self._missing -= {name for name, _ in named_tensors}
        self._has_weights = self._has_weights or bool(named_tensors)
        if self._is_updating and not self._missing:
            self._end_update()

    def weights_checksum(self) -> dict[str, int]:
        """Returns `tensor_checksum` of the weights that a refit brings, read back from vLLM's own parameters."""
        [checksums] = self._on_worker("refit_checksums", list(self._plan.tensors))
        return checksums

    def _forget_weights(self) -> None:
        self._missing = {spec.name for spec in self._plan.tensors}
        self._has_weights = False
        self._on_worker("refit_begin")

    # ---- phases

    def prepare_for_generation(self, tags: Sequence[WakeUpTag]) -> bool:
        """Allocates the memory of weights or KV cache again; weights alone precede a refit, which fills them.

        Returns:
            Whether there is now room for the KV cache and twice the largest memory that a generation took besides it;
            also true for an engine that never sleeps.

        Raises:
            RuntimeError: If the GPU does not have enough memory.
        """
        if self._gate is not None and list(tags) == ["weights"]:
            self._is_updating = False
            # NCCL may run the broadcast beside the steps of one GPU, but not beside exchanges between several.
            if _replica().world_size > 1:
                self._begin_update()
            return True
        if self._sleep_level:
            self._wake_up([tag for tag in tags if tag in self._asleep])
        if self._is_updating and "kv_cache" in tags:
            self._end_update()
        if list(tags) == ["weights"]:
            self._forget_weights()
            return not self._sleep_level or ("kv_cache" in self._asleep and self._has_room_for_cache())
        return False

    def _begin_update(self) -> None:
        """Holds generation between two steps until all weights have come."""
        assert self._gate is not None
        self._gate.hold()
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the last step may still read weights on its thread's stream
        self._forget_weights()
        self._is_updating = True

    def _end_update(self) -> None:
        assert self._gate is not None
        self._is_updating = False
        self._gate.release()

    def _wake_up(self, tags: Sequence[WakeUpTag]) -> None:
        if tags:
            try:
                self._llm.wake_up(list(tags))
            except RuntimeError as error:
                if "out of memory" not in str(error):
                    raise
                raise RuntimeError(
                    f"The GPU has too little memory to wake up vLLM ({', '.join(tags)}; {error}); lower "
                    "policy.generation.vllm_cfg.gpu_memory_utilization, or offload more of the policy during "
                    "generation (policy.residency.table.generate)."
                ) from error
            self._asleep -= set(tags)
        if "weights" in tags and self._sleep_level > 1:
            self._on_worker("refit_restore")

    def _has_room_for_cache(self) -> bool:
        if not self._activation_bytes:  # no generation yet
            return False
        cache = sum(block.handle[1] for block in vllm_pools().values() if block.tag == "kv_cache")
        return bool(torch.cuda.mem_get_info()[0] >= cache + 2 * self._activation_bytes + _MARGIN_BYTES)

    def finish_generation(self) -> None:
        """Frees the memory of weights and KV cache."""
        if not self._sleep_level:
            return
        if self._has_generated:  # torch's allocator still caches the memory of that generation
            beside_pools = torch.cuda.memory_reserved() - sum(block.handle[1] for block in vllm_pools().values())
            self._activation_bytes = max(self._activation_bytes, beside_pools)
            self._has_generated = False
        if self._sleep_level > 1 and "weights" not in self._asleep:
            self._on_worker("refit_save")
        self._llm.sleep(level=self._sleep_level)
        self._asleep = {"weights", "kv_cache"}
        self._prefixes_are_stale = True  # the KV cache is gone
        if self._sleep_level > 1:
            self._forget_weights()

    def memory_stats(self) -> dict[str, float]:
        """Returns this process's memory in GiB, with peaks since the last call, and what recorded loads keep.

        Sleeping blocks do not count (see `vllm_memory.engine_memory_stats`).
        """
        [of_graphs] = self._on_worker("refit_memory_stats")
        stats = engine_memory_stats(vllm_pools()) if self._sleep_level else memory_stats()
        reset_gpu_peak()
        return stats | of_graphs

    # ---- sampling

    def generate(self, request: GenerationRequest) -> GenerationOutput:
        """Continues every prompt; one that already fills the sequence gets no token and ends with "length".

        Raises:
            RuntimeError: If weights are missing, or vLLM aborted a request.
        """
        if self._gate is None:
            return self._generate(request)
        with self._gate.generating():
            self._tokens_at_updates = []
            output = self._generate(request)
        output.held_s = self._gate.held_s
        return output

    def _generate(self, request: GenerationRequest) -> GenerationOutput:
        self._require_weights()
        if self._prefixes_are_stale:
            if not self._llm.reset_prefix_cache():
                raise RuntimeError("vLLM did not reset its prefix cache, which holds keys and values of other weights.")
            self._prefixes_are_stale = False
        num_rows = len(request.prompt_ids)
        self._has_generated = True
        output = GenerationOutput([[] for _ in range(num_rows)], [[] for _ in range(num_rows)], ["length"] * num_rows)
        rows = [row for row in range(num_rows) if len(request.prompt_ids[row]) < self._max_sequence_length]
        if not rows and not self._shares_experts:  # other replicas need its experts, whatever rows it has
            return output
        with no_garbage_collection():  # vLLM keeps objects for each token, and each collection would traverse them
            finished = self._llm.generate(
                [{"prompt_token_ids": request.prompt_ids[row]} for row in rows],
                _sampling_params([sampling_arguments(request, row, self._max_sequence_length) for row in rows]),
                use_tqdm=False,
            )
        for row, answer in zip(rows, finished, strict=True):
            tokens, logprobs, reason = read_answer(answer)
            output.output_ids[row], output.logprobs[row], output.finish_reasons[row] = tokens, logprobs, reason
        if self._in_flight is not None:
            output.num_updates = [[] for _ in range(num_rows)]
            for row, answer in zip(rows, finished, strict=True):
                starts = [at[answer.request_id] for at in self._tokens_at_updates if answer.request_id in at]
                output.num_updates[row] = [
                    bisect.bisect_right(starts, token) for token in range(len(output.output_ids[row]))
                ]
        return output

    def _step_with_newest_weights(self) -> Any:
        """Runs a step of vLLM's engine, before which weights may change.

        With vLLM's asynchronous scheduling a step is under way on the GPU then: its tokens come from the old weights,
        and are thrown away where keys and values are recomputed.
        """
        assert self._gate is not None and self._in_flight is not None
        if self._gate.between_steps():
            engine, recomputes = self._llm.llm_engine, self._in_flight.recomputes_kv_cache
            states, requests = engine.output_processor.request_states, engine.engine_core.engine_core.scheduler.requests
            self._tokens_at_updates.append(
                {
                    states[name].external_req_id: request.num_output_tokens
                    + (0 if recomputes else request.num_output_placeholders)
                    for name, request in requests.items()
                    if name in states
                }
            )
            if recomputes:
                engine.reset_prefix_cache(reset_running_requests=True)
                self._prefixes_are_stale = False
        return self._step()

    def _require_weights(self) -> None:
        if self._missing or not self._has_weights:
            raise RuntimeError(
                f"vLLM's weights have not been loaded, {len(self._missing)} are missing "
                f"({', '.join(sorted(self._missing)[:3])}); refit it before generating."
            )
        [unfilled] = self._on_worker("refit_unfilled")
        if unfilled:
            raise ValueError(
                f"The policy sends no weight for {len(unfilled)} of the parameters of vLLM's model "
                f"({', '.join(unfilled[:3])}{', ...' if len(unfilled) > 3 else ''}); both must have the same "
                "architecture."
            )

    def _on_worker(self, method: str, *arguments: Any) -> list[Any]:
        return self._llm.collective_rpc(method, args=arguments)


def _replica() -> Any:
    """Returns vLLM's group of the processes of this replica."""
    from vllm.distributed.parallel_state import get_tp_group

    return get_tp_group()


def _agreed(wanted: bool) -> bool:
    """Returns whether any process of this replica passes True: they must take every step with equal weights."""
    group = _replica()
    if group.world_size == 1:
        return wanted
    flag = torch.tensor([int(wanted)])
    torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group=group.cpu_group)
    return bool(flag)


def read_answer(answer: Any) -> tuple[list[int], list[float], str]:
    """Returns tokens, log-probs of the sampled tokens, and finish reason of a `vllm.RequestOutput`.

    Raises:
        RuntimeError: If the request ended for another reason than a stop or its limit.
    """
    [completion] = answer.outputs
    if completion.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM ended a request with {completion.finish_reason!r} instead of 'stop' or 'length'.")
    tokens = list(completion.token_ids)
    of_tokens: Iterable[Mapping[int, Any]] = completion.logprobs
    logprobs = [of_token[token].logprob for token, of_token in zip(tokens, of_tokens, strict=True)]
    return tokens, logprobs, completion.finish_reason


def _sampling_params(rows: Sequence[Mapping[str, Any]]) -> list[Any]:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return [SamplingParams(**row, output_kind=RequestOutputKind.FINAL_ONLY) for row in rows]
