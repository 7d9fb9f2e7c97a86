"""Counts the FLOPs of sequences, and predicts the seconds of steps and log-prob passes from a machine's rates.

Of each micro-batch the GPU's seconds count, or those of the host that starts its work, whichever are more; with experts
their sum. A constant that is not a machine's rate says how many bytes or operations something takes.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_offload_rl.activation_offload.schedule import ActivationOptions
from nemo_offload_rl.config.algorithms import AlgorithmSpec
from nemo_offload_rl.config.megatron import megatron_field, split_devices, tokens_of_tile
from nemo_offload_rl.config.model.families import family_of
from nemo_offload_rl.config.rules.modules import KEPT_ATTENTION, recomputed_modules, recomputes_layers
from nemo_offload_rl.config.schema import MasterConfig
from nemo_offload_rl.config.schema.megatron import MegatronConfig
from nemo_offload_rl.config.schema.policy import PolicyConfig, sequence_multiple
from nemo_offload_rl.memory.units import round_up
from nemo_offload_rl.placement.rates import Rates
from nemo_offload_rl.plan.activations import LOGPROB_TOKENS, micro_batch_tokens, module_bytes
from nemo_offload_rl.plan.architecture import Architecture, UnknownArchitectureError, read_architecture
from nemo_offload_rl.plan.plan import RankPlan
from nemo_offload_rl.plan.saved_tensors import ActivationFacts

# The forward pass, and for each matrix product of it two in the backward pass: gradients of the inputs and the weights.
TRAINING_PASSES = 3


@dataclass(frozen=True)
class FlopModel:
    """Counts the FLOPs of a model's forward passes.

    Attributes:
        architecture: sizes of the model.
        windows: for each layer, the most tokens that a token attends to, including itself; None for no limit.
        precision: `policy.precision`, in which matrix products are computed.
    """

    architecture: Architecture
    windows: tuple[int | None, ...]
    precision: str

    @property
    def per_token(self) -> int:
        """Returns the FLOPs of a forward pass over one token, without attention's scores.

        A product of a vector with an m x n matrix takes 2mn. With hidden size h, n heads and g query groups of head
        size d, MLP size f, vocabulary V, E experts and k of them active:

            attention's projections  2h(n + 2g)d + 2ndh       of each layer
            dense MLP, gated         6hf                      of each layer without experts
            experts                  6hfk + 2hE (the router)  of each layer with experts
            output layer             2hV                      once, tied embeddings or not; the lookup counts nothing

        Norms, activations, softmax and rotary embeddings are left out, as the sources do: Narayanan et al., "Efficient
        Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (2021), section 5.1 and appendix;
        Chowdhery et al., "PaLM" (2022), appendix B.
        """
        model = self.architecture
        hidden, heads = model.hidden_size, model.num_heads * model.head_dim
        attention = 2 * hidden * (heads + 2 * model.num_query_groups * model.head_dim) + 2 * heads * hidden
        return model.num_layers * attention + self.mlp_per_token + self.output_per_token

    @property
    def mlp_per_token(self) -> int:
        """Returns the part of `per_token` that MLPs, experts and routers take."""
        model, hidden = self.architecture, self.architecture.hidden_size
        dense = 6 * hidden * model.dense_ffn_hidden_size
        experts = 6 * hidden * model.ffn_hidden_size * (model.experts_per_token or 0)
        experts += 2 * hidden * (model.num_experts or 0)
        num_with_experts = sum(model.expert_layers)
        return num_with_experts * experts + (model.num_layers - num_with_experts) * dense

    @property
    def output_per_token(self) -> int:
        """Returns the part of `per_token` that the output layer takes."""
        return 2 * self.architecture.hidden_size * self.architecture.vocab_size

    def forward_flops(self, lengths: Iterable[int]) -> int:
        """Returns the FLOPs of a forward pass over sequences, including attention's scores.

        Args:
            lengths: tokens of each sequence, without padding, since padding is not useful work.
        """
        return sum(length * self.per_token + self.attention_flops(length) for length in lengths)

    def attention_flops(self, length: int) -> int:
        """Returns the FLOPs of attention's scores and values, in a forward pass over one sequence.

        A pair of tokens takes 4nd a layer: 2nd for its score and 2nd for its share of the values. A sequence of S
        tokens has S(S + 1)/2 pairs, since attention is causal; PaLM's appendix counts S x S.

        Args:
            length: tokens of the sequence.
        """
        per_pair = 4 * self.architecture.num_heads * self.architecture.head_dim
        return per_pair * sum(attention_pairs(length, window) for window in self.windows)


def attention_pairs(length: int, window: int | None = None) -> int:
    """Counts the pairs of a token and a token that it attends to; a token attends to itself, too.

    Args:
        length: tokens of the sequence.
        window: the most tokens that a token attends to, including itself; None for no limit.
    """
    reach = length if window is None else min(window, length)
    return reach * (reach + 1) // 2 + (length - reach) * reach


def read_flop_model(hf_config: Mapping[str, Any], policy: PolicyConfig) -> FlopModel:
    """Reads from a model's config the sizes that its FLOPs are computed from.

    Args:
        hf_config: the model's Hugging Face config with every field, as its `to_dict()` gives it.
        policy: the recipe's `policy` section, whose `megatron_cfg` overrides the fields of the model.

    Raises:
        UnknownArchitectureError: the model's family is not supported here, or a field has a value that is not.
        ValueError: the config lacks a field that the family needs, or the field is not a valid size.
    """
    model = read_architecture(hf_config, policy["megatron_cfg"])
    window = hf_config.get("sliding_window")
    windowed = [window is not None] * model.num_layers
    if window is not None and family_of(hf_config).windows_by_layer:
        windowed = [kind == "sliding_attention" for kind in hf_config["layer_types"][: model.num_layers]]
    return FlopModel(model, tuple(window if has else None for has in windowed), policy["precision"])


def flop_model_if_known(hf_config: Mapping[str, Any], policy: PolicyConfig) -> FlopModel | None:
    """Does the same as `read_flop_model`, but returns None instead of raising UnknownArchitectureError."""
    try:
        return read_flop_model(hf_config, policy)
    except UnknownArchitectureError:
        return None


MEMORY_SHARE = 0.5
"""Share of a copy's speed in GPU memory that norms, activations and the optimizer reach: a 1.5 B model's optimizer
takes 16 to 19 ms (docs/results/cpu_optimizer.md)."""

# Small operations of the host, from the cases of docs/results/plan_accuracy.md.
FORWARD_LAUNCHES, BACKWARD_LAUNCHES = 110, 265
"""Of a layer, its experts apart."""
QK_NORM_LAUNCHES = 105
"""Of a layer whose queries and keys are normalised, in each direction: two modules of Transformer Engine's more."""
EXPERT_FORWARD_LAUNCHES, EXPERT_BACKWARD_LAUNCHES = 0.5, 23
"""Of an expert of a layer."""
LOGPROB_LAUNCHES, STEP_LAUNCHES = 400, 5_750
"""Of a pass over all micro-batches: what is before the first one and behind the last one."""

_FORWARD_PRODUCTS, _BACKWARD_PRODUCTS = 2, 5  # of attention, by pair of tokens: the backward pass computes scores again
# Elements that a layer reads and writes between its matrix products, by token and forward pass: two norms and two
# additions; queries, keys and values turned by their positions; gated activation; a token's copies sorted by expert and
# back. A backward pass has twice as many.
_HIDDEN_ELEMENTS, _HEAD_ELEMENTS, _FFN_ELEMENTS, _SORTED_ELEMENTS = 10, 4, 3, 4
_GRAD_BYTES = 12  # a weight's gradient is added up: one in bf16 or float32 read, its sum read and written


@dataclass(frozen=True)
class _Work:
    """Holds the GPU's seconds for a rank's part of a micro-batch, each for one forward pass, and what it consists of.

    Attributes:
        projections: attention's matrix products and what a layer computes beside its MLP.
        mlps: the MLPs' matrix products, and their activation.
        attention: scores and values.
        attention_backward: their backward pass.
        output: the output layer, and the pass over its logits.
        gradients: adding up gradients of weights once.
        layers: layers of the rank.
        experts: experts of these layers on the rank.
        qk_norm: whether queries and keys are normalised.
    """

    projections: float
    mlps: float
    attention: float
    attention_backward: float
    output: float
    gradients: float
    layers: float
    experts: float
    qk_norm: bool

    @property
    def forward(self) -> float:
        """The GPU's seconds of a forward pass."""
        return self.projections + self.mlps + self.attention + self.output

    @property
    def backward(self) -> float:
        """The GPU's seconds of a backward pass in which nothing is computed again."""
        return 2 * (self.projections + self.mlps + self.output) + self.attention_backward + self.gradients

    def forward_s(self, launch_s: float) -> float:
        """Returns the seconds of a forward pass.

        In each layer with experts the host waits for the number of tokens of each expert (megatron-core 0.19.2,
        token_dispatcher.py, `_maybe_dtoh_and_synchronize`), so that its seconds and the GPU's add up.
        """
        host = self.forward_launches * launch_s
        return self.forward + host if self.experts else max(self.forward, host)

    @property
    def forward_launches(self) -> float:
        """The host's operations of a forward pass."""
        return self.layers * (FORWARD_LAUNCHES + self._norm_launches) + self.experts * EXPERT_FORWARD_LAUNCHES

    @property
    def backward_launches(self) -> float:
        """The host's operations of a backward pass in which nothing is computed again."""
        return self.layers * (BACKWARD_LAUNCHES + self._norm_launches) + self.experts * EXPERT_BACKWARD_LAUNCHES

    @property
    def _norm_launches(self) -> float:
        return QK_NORM_LAUNCHES * self.qk_norm


@dataclass(frozen=True)
class _Again:
    """Holds how many more forward passes recomputation and tiles make, by part of a layer."""

    projections: float = 0.0
    mlps: float = 0.0
    attention: float = 0.0


def training_seconds(
    flops: FlopModel,
    config: MasterConfig,
    spec: AlgorithmSpec,
    stages: Sequence[ActivationFacts],
    offloaded: ActivationOptions | None,
    rates: Rates,
) -> float:
    """Returns the predicted seconds of training on `train_global_batch_size` samples of the greatest length.

    The optimizer's part is left out: see `optimizer_seconds`. With P, M, A and O the seconds of a micro-batch's forward
    pass for attention's projections, MLPs, attention and the output layer, B those of attention's backward pass:

        forward                                             P + M + A + O
        backward                                            2 (P + M + O) + B, and adding up gradients
        logits in chunks (docs/logits.md)                   O more
        full recomputation                                  P + M + A more
        the same with core_attn kept                        P + M more
        layer_input in segments of n (docs/long-rows.md)    (n - 1)/n of the line above more
        MLPs in tiles (docs/activation-offload.md)          M more, except with layer_input; gradients of every tile
        selective recomputation                             A more for core_attn, M for mlp and moe

    The host's seconds are its operations in each. Copies of activations that do not hide behind forward and backward
    pass are added, and a pipeline has its bubble.

    Args:
        flops: counts the model's FLOPs.
        config: the recipe, with numbers for packed rows.
        spec: its algorithm.
        stages: the activation sizes of each pipeline stage.
        offloaded: the options of activation offloading; None where it is off.
        rates: those of the machine.
    """
    cfg = config["policy"]["megatron_cfg"]
    num_tokens = stages[0].num_tokens
    num_microbatches = _num_microbatches(config, spec, num_tokens)
    tile = tokens_of_tile(cfg["mlp_tile_tokens"], flops.architecture.hidden_size)
    num_tiles = 1 if tile is None else math.ceil(num_tokens / tile)
    work = _work(flops, config, spec, num_microbatches, rates, num_tiles=num_tiles)
    again = _computed_again(cfg, stages[0], offloaded)
    gpu_again = again.projections * work.projections + again.mlps * work.mlps + again.attention * work.attention
    gpu_again += work.output * cfg["use_fused_linear_logprobs"]
    host_again = (again.projections + again.mlps + again.attention) / 3 * work.forward_launches * rates.launch_s
    forward_s, backward_host_s = work.forward_s(rates.launch_s), work.backward_launches * rates.launch_s
    if work.experts:
        backward_s = max(work.backward, backward_host_s) + gpu_again + host_again
    else:
        backward_s = max(work.backward + gpu_again, backward_host_s + host_again)
    waited = 0.0
    if offloaded is not None:
        nbytes = max(_copied_bytes(facts, offloaded) for facts in stages)
        copy_s = nbytes / rates.link_bytes_per_s
        waited = max(0, copy_s - forward_s) + max(0, copy_s - backward_s)
        waited += 2 * nbytes / rates.memory_bytes_per_s  # hidden copies take the GPU's memory from kernels
    busy_s = (forward_s + backward_s) * _bubble(cfg, num_microbatches)
    micro_batches = num_microbatches * (busy_s + waited)
    return micro_batches + STEP_LAUNCHES * rates.launch_s


def logprob_seconds(flops: FlopModel, config: MasterConfig, spec: AlgorithmSpec, rates: Rates) -> float:
    """Returns the predicted seconds of a step's log-prob passes, of policy and reference; 0 where it has none.

    Takes the arguments of `training_seconds`.
    """
    if not spec.computes_logprobs:
        return 0.0
    cfg = config["policy"]["megatron_cfg"]
    # If rows are packed, validation has checked that the key is there.
    tokens = micro_batch_tokens(config["policy"], LOGPROB_TOKENS, spec.group_size)
    num_microbatches = _num_microbatches(config, spec, tokens // cfg["context_parallel_size"])
    work = _work(flops, config, spec, num_microbatches, rates)
    bubble = _bubble(cfg, num_microbatches)
    micro_batches = num_microbatches * work.forward_s(rates.launch_s) * bubble
    passes = spec.scores_policy(config) + spec.has_reference(config)
    return passes * (micro_batches + LOGPROB_LAUNCHES * rates.launch_s)


def optimizer_seconds(rank: RankPlan, wait_s: float, rates: Rates) -> float:
    """Returns the predicted seconds of a rank's optimizer step: its kernels on the GPU, or the wait if that is longer.

    Args:
        rank: the rank's plan.
        wait_s: seconds that the step takes for copies and the CPU optimizer.
        rates: those of the machine.
    """
    facts = rank.facts
    # State is read and written; a gradient is read for its norm and for the step, and zeroed.
    nbytes = 2 * (facts.num_optimizer_params - facts.num_cpu_optimizer_params) * facts.optimizer_size
    nbytes += facts.num_params * (3 * facts.grad_size + facts.param_size)
    return max(wait_s, nbytes / (MEMORY_SHARE * rates.memory_bytes_per_s))


def _work(
    flops: FlopModel,
    config: MasterConfig,
    spec: AlgorithmSpec,
    num_microbatches: int,
    rates: Rates,
    *,
    num_tiles: int = 1,
) -> _Work:
    """Returns a rank's part of a micro-batch; of ranks that share its work, each has an equal part."""
    model, policy = flops.architecture, config["policy"]
    cfg = policy["megatron_cfg"]
    tokens, samples = _num_tokens(config, spec), policy["train_global_batch_size"] * spec.group_size
    share = 1 / split_devices(config["cluster"], policy).policy_ranks / num_microbatches
    stages, tensor = cfg["pipeline_model_parallel_size"], cfg["tensor_model_parallel_size"]
    layers = model.num_layers / stages
    expert_layers = sum(model.expert_layers) / stages
    experts = expert_layers * (model.num_experts or 0) / cfg["expert_model_parallel_size"]
    memory = MEMORY_SHARE * rates.memory_bytes_per_s
    element_size = 2 if policy["precision"] == "bfloat16" else 4

    def products(num_flops: float, number: float) -> float:
        return num_flops * share / rates.matmul.at(num_flops * share / number)

    def elements(per_token: float) -> float:
        return tokens * share * stages * per_token * element_size / memory

    copies = expert_layers * (model.experts_per_token or 0)
    ffn = copies * model.ffn_hidden_size + (layers - expert_layers) * model.dense_ffn_hidden_size
    heads = (model.num_heads + 2 * model.num_query_groups) * model.head_dim
    projections = tokens * (flops.per_token - flops.output_per_token - flops.mlp_per_token)
    matrices = 2 * (layers - expert_layers + experts)
    length = tokens // samples
    attention, attention_rates = samples * flops.attention_flops(length) * share, rates.attention_of(model.head_dim)
    all_experts = (model.num_experts or 1) / (model.experts_per_token or 1) / cfg["expert_model_parallel_size"]
    weights = (projections / tokens + num_tiles * all_experts * flops.mlp_per_token) / 2 / stages / tensor
    return _Work(
        projections=products(projections, 2 * layers)
        + elements(layers * (_HIDDEN_ELEMENTS * model.hidden_size + _HEAD_ELEMENTS * heads)),
        mlps=products(tokens * flops.mlp_per_token, num_tiles * matrices)
        + elements(_FFN_ELEMENTS * ffn + _SORTED_ELEMENTS * copies * model.hidden_size),
        attention=attention / attention_rates.forward.at(length),
        attention_backward=attention * _BACKWARD_PRODUCTS / _FORWARD_PRODUCTS / attention_rates.backward.at(length),
        output=products(tokens * flops.output_per_token, 1) + elements(model.vocab_size / stages),
        gradients=weights * _GRAD_BYTES / rates.memory_bytes_per_s,
        layers=layers,
        experts=experts,
        qk_norm=model.qk_norm,
    )


def _bubble(cfg: MegatronConfig, num_microbatches: int) -> float:
    """Returns how many times as long a pipeline takes as its micro-batches, since stages wait for the first ones."""
    chunks = cfg["virtual_pipeline_model_parallel_size"] or 1
    return 1 + (cfg["pipeline_model_parallel_size"] - 1) / (num_microbatches * chunks)


def _num_microbatches(config: MasterConfig, spec: AlgorithmSpec, num_tokens: int) -> int:
    """Returns how many micro-batches of so many tokens on a rank a step has."""
    cfg = config["policy"]["megatron_cfg"]
    ranks = split_devices(config["cluster"], config["policy"]).policy_ranks
    # Ranks that share a layer, or have others of the same model, work on the same micro-batches.
    sharing = cfg["pipeline_model_parallel_size"] * cfg["tensor_model_parallel_size"]
    return max(1, math.ceil(_num_tokens(config, spec) * sharing / ranks / num_tokens))


def _num_tokens(config: MasterConfig, spec: AlgorithmSpec) -> int:
    policy = config["policy"]
    length = round_up(policy["max_total_sequence_length"], sequence_multiple(policy))
    return int(policy["train_global_batch_size"] * spec.group_size * length)


def _computed_again(cfg: MegatronConfig, facts: ActivationFacts, offloaded: ActivationOptions | None) -> _Again:
    tiled = 1.0 if cfg["mlp_tile_tokens"] is not None else 0.0
    if not recomputes_layers(cfg["activation_checkpointing"], cfg["recompute_granularity"]):
        again = recomputed_modules(
            cfg["activation_checkpointing"], cfg["recompute_granularity"], cfg["recompute_modules"]
        )
        return _Again(mlps=tiled + ("mlp" in again or "moe" in again), attention=float("core_attn" in again))
    if offloaded is not None:
        passes = 1 + (facts.num_layers_of_segment - 1) / facts.num_layers_of_segment
        return _Again(passes, passes, 0.0 if KEPT_ATTENTION in offloaded.modules else passes)
    share = 1.0
    if megatron_field(cfg, "recompute_method") == "block":  # of the first layers of each stage
        share = min(1.0, (megatron_field(cfg, "recompute_num_layers") or 1) / facts.num_layers)
    return _Again(share, share + tiled, share)


def _copied_bytes(facts: ActivationFacts, offloaded: ActivationOptions) -> int:
    """Returns the bytes of a micro-batch that are copied to the host."""
    moved = sum(module.micro_batch for module in module_bytes(facts, offloaded).values())
    limit = offloaded.host_memory_limit_bytes
    return moved if limit is None else min(moved, limit)
