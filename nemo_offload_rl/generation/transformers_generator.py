"""Samples in batches from a Hugging Face model with a KV cache."""

import gc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from transformers import DynamicCache, PreTrainedModel

from nemo_offload_rl.generation.bad_words import bad_word_ids, without_bad_words
from nemo_offload_rl.generation.hf_model import optional_names, weights_by_name
from nemo_offload_rl.generation.interface import (
    GenerationOutput,
    GenerationRequest,
    InFlightUpdates,
    SamplingParams,
    WakeUpTag,
)
from nemo_offload_rl.generation.sampling import choose_tokens, row_uniforms
from nemo_offload_rl.generation.step_gate import StepGate
from nemo_offload_rl.generation.stop_strings import AnswerText
from nemo_offload_rl.metrics.memory import memory_stats, reset_gpu_peak
from nemo_offload_rl.refit.checksum import tensor_checksum
from nemo_offload_rl.refit.plan import ExportPlan, NamedTensor, TensorSpec


@dataclass
class _Batch:
    """Holds the rows that are still being generated: row i is row `rows[i]` of the output.

    Attributes:
        rows: int64 [n].
        logits: [n, vocabulary], of the next token.
        attention_mask: int64 [n, length so far], 0 at left padding.
        cache: Keys and values of these n rows.
    """

    rows: torch.Tensor
    logits: torch.Tensor
    attention_mask: torch.Tensor
    cache: DynamicCache

    def keep(self, indices: torch.Tensor) -> None:
        """Reduces the batch to the rows at `indices` (int64), which may repeat."""
        self.rows = self.rows[indices]
        self.logits = self.logits[indices]
        self.attention_mask = self.attention_mask[indices]
        self.cache.batch_select_indices(indices)


class TransformersGenerator:
    """Holds a Hugging Face model, loads its weights by name and samples from it."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        device: str | torch.device,
        generation_batch_size: int,
        max_sequence_length: int,
        has_weights: bool,
        tokenizer: Tokenizer | None = None,
        in_flight: InFlightUpdates | None = None,
    ) -> None:
        """Takes over a model, which stays on the host until `prepare_for_generation`.

        Args:
            model: A causal language model on the host, in eval mode.
            device: The device to generate on.
            generation_batch_size: Largest number of rows in one batch.
            max_sequence_length: Largest number of tokens of a prompt and its continuation together.
            has_weights: Whether the model's weights are already initialized; if not, `generate` requires a refit first.
            tokenizer: For requests with stop strings or bad words; None if no request has any.
            in_flight: How weights change while another thread generates; None if they do not.

        Raises:
            ValueError: If a size is not positive.
        """
        for name, size in (
            ("policy.generation_batch_size", generation_batch_size),
            ("policy.max_total_sequence_length", max_sequence_length),
        ):
            if size < 1:
                raise ValueError(f"{name} is {size}; it must be at least 1.")
        self._model = model
        self._device = torch.device(device)
        self._generation_batch_size = generation_batch_size
        self._max_sequence_length = max_sequence_length
        self._tokenizer = tokenizer
        self._recomputes_kv_cache = in_flight is not None and in_flight.recomputes_kv_cache
        self._gate = None if in_flight is None else StepGate()
        self._optional_names = optional_names(model)
        self._refit_names = sorted(set(weights_by_name(model)) - self._optional_names)
        self._missing = set() if has_weights else set(self._refit_names)

    # ---- weights

    def prepare_refit_info(self, plan: ExportPlan) -> None:
        """Checks that names, shapes and dtypes of a refit match the model's (see `GenerationInterface`)."""
        weights = weights_by_name(self._model)
        names = [spec.name for spec in plan.tensors]
        missing = sorted(set(weights) - self._optional_names - set(names))
        if missing:
            raise ValueError(
                f"The policy sends no weight for {len(missing)} of the generation model's parameters "
                f"({', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}); both must have the same "
                "architecture."
            )
        for spec in plan.tensors:
            _require_fits(spec, weights)
        self._refit_names = names

    @torch.no_grad()
    def load_weights(self, named_tensors: Iterable[NamedTensor]) -> None:
        """Copies tensors into the model's parameters in place.

        Args:
            named_tensors: (Hugging Face name, tensor on any device).

        Raises:
            ValueError: If a name is unknown, or a shape or dtype differs.
        """
        weights = weights_by_name(self._model)
        for name, tensor in named_tensors:
            try:
                _require_fits(TensorSpec.of(name, tensor), weights)
            except ValueError:
                self._missing = set(self._refit_names)  # the weights loaded before the error are an incomplete set
                raise
            weights[name].copy_(tensor)
            self._missing.discard(name)

    def weights_checksum(self, names: Sequence[str] | None = None) -> dict[str, int]:
        """Returns `tensor_checksum` of the named weights; None stands for those that a refit brings."""
        weights = weights_by_name(self._model)
        return {name: tensor_checksum(weights[name]) for name in (self._refit_names if names is None else names)}

    # ---- phases

    def prepare_for_generation(self, tags: Sequence[WakeUpTag] = ("weights", "kv_cache")) -> None:
        """Moves the model to the device it generates on.

        Weights alone precede a refit, which brings all of them: of those that are elsewhere, no old values are copied.
        """
        if list(tags) == ["weights"]:
            if self._gate is not None:
                self._gate.hold()
            self._missing = set(self._refit_names)
            if self._model.device.type != self._device.type:
                values = dict(self._model.named_buffers(remove_duplicate=False))  # most come with no refit
                self._model.to_empty(device=self._device)
                for name, buffer in self._model.named_buffers(remove_duplicate=False):
                    buffer.copy_(values[name])
        self._model.to(self._device)
        if self._gate is not None and "kv_cache" in tags:
            self._gate.release()

    def finish_generation(self) -> None:
        """Moves the model to the host and frees its GPU memory; does nothing on a CPU."""
        if self._device.type == "cuda":
            self._model.to("cpu")
            gc.collect()
            torch.cuda.empty_cache()

    def memory_stats(self) -> dict[str, float]:
        """Returns this process's memory in GiB (see `metrics.memory.memory_stats`), with peaks since the last call."""
        stats = memory_stats()
        reset_gpu_peak()
        return stats

    # ---- sampling

    @torch.inference_mode()
    def generate(self, request: GenerationRequest) -> GenerationOutput:
        """Continues every prompt of a request.

        A token depends on its row alone, except for the last bits of the logits, which can vary with the batch's shape.

        Raises:
            RuntimeError: If weights are missing, or the model is not on the device it generates on.
        """
        if self._gate is None:
            return self._generate(request)
        with self._gate.generating():
            output = self._generate(request)
        output.held_s = self._gate.held_s
        return output

    def _generate(self, request: GenerationRequest) -> GenerationOutput:
        self._require_ready()
        num_rows, before = len(request.prompt_ids), self._num_updates
        output = GenerationOutput([[] for _ in range(num_rows)], [[] for _ in range(num_rows)], ["length"] * num_rows)
        changes: list[list[int]] = [[] for _ in range(num_rows)]
        # Sorted, rows of similar length need little padding, and rows with the same prompt share its prefill.
        order = sorted(
            (row for row, prompt in enumerate(request.prompt_ids) if len(prompt) < self._max_sequence_length),
            key=lambda row: (len(request.prompt_ids[row]), request.prompt_ids[row]),
        )
        for start in range(0, len(order), self._generation_batch_size):
            rows = order[start : start + self._generation_batch_size]
            prompts = [request.prompt_ids[row] for row in rows]
            sample_ids = [request.sample_ids[row] for row in rows]
            columns = self._generate_batch(prompts, sample_ids, request.step, request.sampling)
            values = (column.tolist() for column in columns)
            for row, tokens, logprobs, updates, length, stopped in zip(rows, *values, strict=True):
                output.output_ids[row] = tokens[:length]
                output.logprobs[row] = logprobs[:length]
                changes[row] = [number - before for number in updates[:length]]
                output.finish_reasons[row] = "stop" if stopped else "length"
        if self._gate is not None:
            output.num_updates = changes
        return output

    def _generate_batch(
        self, prompts: list[list[int]], sample_ids: list[int], step: int, sampling: SamplingParams
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns tokens, log-probs and numbers of updates [rows, new tokens], lengths and stopped [rows]."""
        device, num_rows = self._device, len(prompts)
        limits = torch.tensor(
            [min(sampling.max_new_tokens, self._max_sequence_length - len(prompt)) for prompt in prompts], device=device
        )
        max_tokens = int(limits.max())
        uniforms = torch.from_numpy(row_uniforms(sampling.seed, step, prompts, sample_ids, max_tokens)).to(device)
        stop_ids = torch.tensor(sampling.stop_token_ids, dtype=torch.int64, device=device)
        tokens = torch.zeros((num_rows, max_tokens), dtype=torch.int64, device=device)
        logprobs = torch.zeros((num_rows, max_tokens), dtype=torch.float32, device=device)
        updates = torch.zeros((num_rows, max_tokens), dtype=torch.int64, device=device)
        lengths = torch.zeros(num_rows, dtype=torch.int64, device=device)
        stopped = torch.zeros(num_rows, dtype=torch.bool, device=device)
        texts = self._texts(prompts, sampling)
        bad_words = bad_word_ids(self._require_tokenizer(), sampling.bad_words) if sampling.bad_words else []
        active = torch.ones(num_rows, dtype=torch.bool, device=device)

        self._has_newer_weights()
        batch = self._prefill(prompts)
        for position in range(max_tokens):
            rows = batch.rows
            updates[:, position] = self._num_updates
            if bad_words:
                batch.logits = without_bad_words(batch.logits, tokens[rows, :position], bad_words)
            tokens[rows, position], logprobs[rows, position] = choose_tokens(
                batch.logits,
                uniforms[rows, position],
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
            )
            lengths += active
            stopped |= active & torch.isin(tokens[:, position], stop_ids)
            if texts:
                stopped[_with_stop_string(texts, tokens[:, position], active)] = True
            active = ~stopped & (lengths < limits)
            num_active = int(active.sum())
            if num_active == 0:
                break
            if num_active <= rows.numel() // 2:
                batch.keep(active[rows].nonzero().squeeze(-1))
            if self._has_newer_weights() and self._recomputes_kv_cache:
                self._prefill_again(batch, prompts, tokens[:, :position])
            self._decode(batch, tokens[batch.rows, position])
        return tokens, logprobs, updates, lengths, stopped

    def _has_newer_weights(self) -> bool:
        """Lets weights come that wait for the end of a step; returns whether they have."""
        return self._gate is not None and self._gate.between_steps()

    @property
    def _num_updates(self) -> int:
        return 0 if self._gate is None else self._gate.num_updates

    def _texts(self, prompts: list[list[int]], sampling: SamplingParams) -> list[AnswerText]:
        """Returns an `AnswerText` for each row; an empty list for requests without stop strings."""
        if not sampling.stop_strings:
            return []
        tokenizer = self._require_tokenizer()
        return [AnswerText(tokenizer, sampling.stop_strings, prompt) for prompt in prompts]

    def _require_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise RuntimeError(
                "A request has stop strings or bad words, but the recipe had none when the engine was built."
            )
        return self._tokenizer

    def _prefill(self, prompts: list[list[int]]) -> _Batch:
        """Runs each distinct prompt once, left-padded, and copies its cache to every row that has it."""
        distinct = list(dict.fromkeys(map(tuple, prompts)))
        position = {prompt: index for index, prompt in enumerate(distinct)}
        width = max(map(len, distinct))
        lengths = torch.tensor([len(prompt) for prompt in distinct], device=self._device)
        input_ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in distinct])
        columns = torch.arange(width, device=self._device)
        attention_mask = (columns >= width - lengths[:, None]).long()
        cache = DynamicCache(config=self._model.config)
        logits = self._model(
            input_ids=input_ids.to(self._device),
            attention_mask=attention_mask,
            position_ids=(attention_mask.cumsum(dim=-1) - 1).clamp(min=0),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        batch = _Batch(torch.arange(len(distinct), device=self._device), logits, attention_mask, cache)
        if len(distinct) < len(prompts):
            batch.keep(torch.tensor([position[tuple(prompt)] for prompt in prompts], device=self._device))
            batch.rows = torch.arange(len(prompts), device=self._device)
        return batch

    def _prefill_again(self, batch: _Batch, prompts: list[list[int]], tokens: torch.Tensor) -> None:
        """Computes the keys and values of a batch's rows again, of their prompts and tokens (int64 [all rows, t])."""
        rows = batch.rows.tolist()
        texts = [prompts[row] + tokens[row].tolist() for row in rows]
        again = self._prefill(texts)
        batch.attention_mask, batch.cache, batch.logits = again.attention_mask, again.cache, again.logits

    def _decode(self, batch: _Batch, tokens: torch.Tensor) -> None:
        """Runs one token of each row (int64 [n]) and stores the next logits in the batch."""
        position_ids = batch.attention_mask.sum(dim=-1, keepdim=True)
        batch.attention_mask = torch.cat([batch.attention_mask, torch.ones_like(position_ids)], dim=-1)
        batch.logits = self._model(
            input_ids=tokens[:, None],
            attention_mask=batch.attention_mask,
            position_ids=position_ids,
            past_key_values=batch.cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]

    def _require_ready(self) -> None:
        if self._missing:
            raise RuntimeError(
                f"{len(self._missing)} weights of the generation model have not been loaded "
                f"({', '.join(sorted(self._missing)[:3])}); refit it before generating."
            )
        if self._model.device.type != self._device.type:
            raise RuntimeError("The generation model is not on its GPU; call prepare_for_generation first.")


def _with_stop_string(texts: Sequence[AnswerText], tokens: torch.Tensor, active: torch.Tensor) -> list[int]:
    """Returns the rows whose new token (int64 [rows]) completes a stop string, only among active ones (bool [rows])."""
    added = tokens.tolist()
    return [row for row in active.nonzero().squeeze(-1).tolist() if texts[row].add(added[row])]


def _require_fits(spec: TensorSpec, weights: dict[str, torch.Tensor]) -> None:
    if spec.name not in weights:
        raise ValueError(f"The policy sends a weight {spec.name!r}, which the generation model does not have.")
    expected = weights[spec.name]
    if spec != TensorSpec.of(spec.name, expected):
        raise ValueError(
            f"The policy sends {spec}, but the generation model has it as {expected.dtype} {list(expected.shape)}; "
            "both must have the same architecture and policy.precision."
        )
