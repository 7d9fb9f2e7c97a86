"""Tests that log-probs from chunked logits equal those of whole logits, without ever holding all logits."""

import os
import subprocess
import sys

import pytest
import torch
import triton
from support.ranks import run_ranks
from support.tiny import TINY_QWEN3, random_batch, tiny_policy
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nemo_offload_rl.algorithms.losses import ClippedPGLoss, DPOLoss, NLLLoss
from nemo_offload_rl.generation.sampling import choose_tokens
from nemo_offload_rl.mcore.batches import packed_microbatches, padded_microbatches
from nemo_offload_rl.mcore.logprob import linear_logprob, logprob, logprob_kernels
from nemo_offload_rl.mcore.logprob.forward import LogprobOptions, _process_output
from nemo_offload_rl.mcore.logprob.linear_logprob import LinearLogprobs
from nemo_offload_rl.mcore.logprob.logprob import KEEP_ALL, SamplingFilter, next_token_logprobs, token_logprobs
from nemo_offload_rl.mcore.model.bridge_import import have_transformer_engine
from nemo_offload_rl.mcore.patches import cpu_device
from nemo_offload_rl.mcore.patches.layer_state import call_with, check_is_plain

VOCABULARY, PADDED, HIDDEN = 301, 304, 16
FILTERED = (SamplingFilter(top_k=40, top_p=0.9), KEEP_ALL)


@pytest.fixture(autouse=True)
def narrow_columns(monkeypatch):
    monkeypatch.setattr(linear_logprob, "_COLUMNS", 8)


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns hidden states [S, B, H], a weight, targets [S, B] and weights of a loss [S, B, 2]."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(14, 2, HIDDEN, generator=generator).to(dtype)
    weight = (0.5 * torch.randn(PADDED, HIDDEN, generator=generator)).to(dtype)
    targets = torch.randint(0, VOCABULARY, (14, 2), generator=generator)
    return hidden, weight, targets, torch.randn(14, 2, 2, generator=generator)


def run(compute, kept: tuple[SamplingFilter, ...], dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    hidden, weight, targets, factors = inputs(dtype)
    hidden.requires_grad_()
    weight.requires_grad_()
    values = compute(hidden, weight, targets)
    (values * factors[..., : len(kept)]).sum().backward()
    return values.detach(), hidden.grad, weight.grad


def of_whole_logits(logits, targets, kept: tuple[SamplingFilter, ...], temperature: float, group=None) -> torch.Tensor:
    options = {"vocab_size": VOCABULARY, "temperature": temperature, "tp_group": group}
    return torch.stack([token_logprobs(logits, targets, **options, kept=one) for one in kept], dim=-1)


def whole(kept: tuple[SamplingFilter, ...], temperature: float, dtype: torch.dtype = torch.float32):
    def compute(hidden, weight, targets):
        return of_whole_logits(hidden @ weight.t(), targets, kept, temperature)

    return run(compute, kept, dtype)


def chunked(kept: tuple[SamplingFilter, ...] = (KEEP_ALL,), temperature: float = 1.0, chunk: int = 5) -> LinearLogprobs:
    return LinearLogprobs(VOCABULARY, temperature, kept, chunk, None, False)


def assert_close(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...]) -> None:
    for one, other, tolerance in zip(got, want, (1e-6, 1e-5, 1e-5), strict=False):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kept", [(KEEP_ALL,), FILTERED], ids=["plain", "filtered"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [1, 5, 1000])
def test_chunks_are_equal_to_whole_logits(kept, temperature, chunk):
    got = run(chunked(kept, temperature, chunk), kept)
    assert_close(got, whole(kept, temperature))
    assert got[2][VOCABULARY:].abs().max() == 0


def test_chunks_in_bfloat16_differ_from_whole_logits_by_rounding():
    values, *gradients = run(chunked(), (KEEP_ALL,), torch.bfloat16)
    want, *want_gradients = whole((KEEP_ALL,), 1.0, torch.bfloat16)
    torch.testing.assert_close(values, want, rtol=1e-3, atol=1e-3)
    for got, expected in zip(gradients, want_gradients, strict=True):
        assert got.dtype == torch.bfloat16
        assert (got - expected).norm() < 5e-3 * expected.norm()


class LargestTensor(TorchDispatchMode):
    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize("is_chunked", [True, False])
def test_no_operation_has_the_logits_of_all_tokens(is_chunked):
    hidden, weight, targets, _ = inputs()
    hidden, targets = hidden.repeat(8, 1, 1).requires_grad_(), targets.repeat(8, 1)
    weight.requires_grad_()
    with LargestTensor() as largest:
        if is_chunked:
            chunked(chunk=16)(hidden, weight, targets).sum().backward()
        else:
            logits = hidden @ weight.t()
            token_logprobs(logits, targets, vocab_size=VOCABULARY, temperature=1.0, tp_group=None).sum().backward()
    logits_of_all = targets.numel() * PADDED
    assert (largest.elements < logits_of_all / 6) == is_chunked


def test_a_frozen_weight_has_no_gradient():
    hidden, weight, targets, _ = inputs()
    chunked()(hidden.requires_grad_(), weight, targets).sum().backward()
    assert hidden.grad is not None and weight.grad is None


def in_tritons_interpreter() -> None:
    linear_logprob._COLUMNS = 8
    logprob_kernels._STATISTICS_BLOCK = logprob_kernels._GRADIENT_BLOCK = 32
    for temperature, chunk, dtype in ((1.0, 5, torch.float32), (0.7, 5, torch.float32), (0.7, 99, torch.bfloat16)):
        found = []
        for has_kernels in (True, False):
            linear_logprob._has_kernels = lambda hidden, of, has_kernels=has_kernels: has_kernels
            found.append(run(chunked(temperature=temperature, chunk=chunk), (KEEP_ALL,), dtype))
        tolerance = 0.03 if dtype is torch.bfloat16 else 1e-5  # gradients of logits are rounded
        torch.testing.assert_close(*found, rtol=tolerance, atol=tolerance)
    low, zeros = torch.zeros(2), torch.zeros(2)
    sums = {"maximum": low, "total": torch.zeros(2), "chosen": torch.zeros(2)}
    logprob_kernels.row_statistics(torch.ones(2, 8), zeros.long(), -3, 1.0, **sums)
    assert (low == torch.finfo(torch.float32).min).all()  # all of a rank's rows are padding
    print("all equal")  # noqa: T201


def test_the_kernels_compute_the_same():
    """Runs on a CPU, where Triton interprets the kernels."""
    environ = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    code = f"from {__name__} import in_tritons_interpreter; in_tritons_interpreter()"
    ran = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)
    assert ran.stdout.endswith("all equal\n"), ran.stderr


@pytest.mark.parametrize("kernel", ["_statistics_kernel", "_gradient_kernel"])
def test_a_kernel_compiles_for_a_gpu(kernel):
    """The interpreter accepts more than the compiler, which needs no GPU."""
    function = getattr(logprob_kernels, kernel)
    types = dict.fromkeys(function.arg_names, "*fp32")
    types |= {"logits": "*bf16", "temperature": "fp32", "block": "constexpr"}
    types |= {name: "*i64" for name in ("local", "own") if name in types} | {"num_columns": "i32", "limit": "i32"}
    source = ASTSource(function, types, constexprs={"block": 64})
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_chunks_on_a_gpu(temperature):
    generator = torch.Generator("cuda").manual_seed(1)
    hidden = torch.randn(500, 2, 256, generator=generator, device="cuda").bfloat16()
    weight = (0.1 * torch.randn(32_064, 256, generator=generator, device="cuda")).bfloat16()
    targets = torch.randint(0, 32_000, (500, 2), generator=generator, device="cuda")
    factors = torch.randn(500, 2, generator=generator, device="cuda")
    found = []
    for chunk in (None, 128):
        leaves = (hidden.clone().requires_grad_(), weight.clone().requires_grad_())
        if chunk is None:
            logits = leaves[0] @ leaves[1].t()
            values = token_logprobs(logits, targets, vocab_size=32_000, temperature=temperature, tp_group=None)
        else:
            values = LinearLogprobs(32_000, temperature, (KEEP_ALL,), chunk, None, False)(*leaves, targets)[..., 0]
        (values * factors).sum().backward()
        found.append((values.detach(), *(leaf.grad for leaf in leaves)))
    (want, *want_gradients), (values, *gradients) = found
    torch.testing.assert_close(values, want, rtol=1e-3, atol=1e-3)
    for gradient, expected in zip(gradients, want_gradients, strict=True):
        assert (gradient - expected).norm() < 1e-2 * expected.norm()


SPLITS = ((False, 5), (True, 5), (False, None))
CASES = [(parallel, chunk, kept) for parallel, chunk in SPLITS for kept in ((KEEP_ALL,), FILTERED)]
"""Whether hidden states are split, and the size of chunks; None for whole logits."""


def of_a_rank(rank: int, world_size: int, ports: list[int]) -> list[tuple[torch.Tensor, ...]]:
    """Returns values and gradients, of hidden states and of this rank's weight, with the vocabulary split."""
    cpu_device.install()
    linear_logprob._COLUMNS = 8
    address = f"tcp://localhost:{ports[0]}"
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
    out, group = [], torch.distributed.group.WORLD
    for sequence_parallel, chunk, kept in CASES:
        hidden, weight, targets, factors = inputs()
        part = weight.chunk(world_size)[rank].clone().requires_grad_()
        own = (hidden.chunk(world_size)[rank] if sequence_parallel else hidden).clone().requires_grad_()
        if chunk is None:
            values = of_whole_logits(own @ part.t(), targets, kept, 0.7, group)
        else:
            values = LinearLogprobs(VOCABULARY, 0.7, kept, chunk, group, sequence_parallel)(own, part, targets)
        (values * factors[..., : len(kept)]).sum().backward()
        gradient = own.grad
        if chunk is None:  # the output layer would add the gradients of all ranks up
            torch.distributed.all_reduce(gradient)
        out.append((values.detach().numpy(), gradient.numpy(), part.grad.numpy()))
    torch.distributed.destroy_process_group()
    return out


def test_a_vocabulary_split_over_ranks():
    of_ranks = run_ranks(of_a_rank, 2, num_ports=1)
    for index, (sequence_parallel, _, kept) in enumerate(CASES):
        want, want_hidden, want_weight = whole(kept, 0.7)
        for rank, results in enumerate(of_ranks):
            own = want_hidden.chunk(2)[rank] if sequence_parallel else want_hidden
            assert_close(tuple(map(torch.as_tensor, results[index])), (want, own, want_weight.chunk(2)[rank]))


# --- in a worker -----------------------------------------------------------------------------------------------------


def policy_of(chunk: int | None, *, tied: bool = True, generation: dict | None = None) -> dict:
    chunks = {"use_fused_linear_logprobs": chunk is not None, "fused_linear_logprobs_chunk_size": chunk or 256}
    policy = tiny_policy(TINY_QWEN3 | {"tie_word_embeddings": tied, "vocab_size": 64}, **chunks)
    return policy if generation is None else policy | {"generation": generation}


def batch_for(loss) -> object:
    data = random_batch(8)
    generator = torch.Generator().manual_seed(5)
    shape = data["input_ids"].shape
    for name in ("generation_logprobs", "prev_logprobs", "reference_policy_logprobs"):
        data[name] = -4 + 0.2 * torch.randn(shape, generator=generator)
    data["advantages"] = torch.randn(shape, generator=generator)
    return data.in_groups(2) if isinstance(loss, DPOLoss) else data


def output_layer(worker):
    (layer,) = (module for name, module in worker.state.model[0].named_modules() if name.endswith("output_layer"))
    return layer


GRPO = ClippedPGLoss(0.2, 0.2, None, 0.1, True, "k3", 20.0, 10.0, True, None, None, None, *[False] * 5)
FILTER = {"backend": "vllm", "temperature": 0.7, "top_k": 20, "top_p": 0.9, "colocated": {"enabled": False}}


KINDS = {
    "sft, tied": (NLLLoss(), True, None),
    "dpo, untied": (DPOLoss(0.5, 1.0, 0.1, False, False), False, None),
    "grpo, filtered": (GRPO, True, FILTER),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_with_chunks_is_one_without(make_worker, kind):
    loss, tied, generation = KINDS[kind]
    data = batch_for(loss)
    found = []
    for chunk in (None, 5):
        worker = make_worker(policy_of(chunk, tied=tied, generation=generation))
        logprobs = worker.get_logprobs(data, mbs=2)["logprobs"]
        buffers = [buffer for chunk_of_model in worker.state.model for buffer in chunk_of_model.buffers]
        gradients = []  # read after the backward pass: if a refit follows training, gradients are dropped for it
        worker.state.before_update = lambda of=buffers, to=gradients: to.extend(one.grad_data.clone() for one in of)
        result = worker.train(data, loss, gbs=data.size // data.group_size, mbs=2)
        found.append((logprobs, torch.cat(gradients), result["loss"], result["metrics"]))
    (*tensors, value, metrics), (*chunked_tensors, chunked_value, chunked_metrics) = found
    assert_close(chunked_tensors, tensors)
    assert tensors[1].abs().max() > 0.01
    assert chunked_value == pytest.approx(value, rel=1e-6)
    assert chunked_metrics == pytest.approx(metrics, rel=1e-5)


@pytest.mark.parametrize("is_packed", [True, False])
def test_packed_rows_are_read_as_padded_ones(make_worker, is_packed):
    worker = make_worker(policy_of(None))
    layer, data = output_layer(worker), random_batch(5)
    batch = padded_microbatches(data, 5)[0]
    if is_packed:
        batch = packed_microbatches(data, [[0, 1, 2, 3, 4]], divisible_by=2, row_divisible_by=8)[0]
    length, rows = batch.tokens.t().shape
    weight = worker.state.model[0].module.shared_embedding_or_output_weight()
    found = []
    for chunk in (None, 5):
        hidden = torch.randn(length, rows, weight.shape[1], generator=torch.Generator().manual_seed(2)).requires_grad_()
        of_layer = {"hidden_states": hidden, "output_layer": layer, "output_weight": weight}
        context = (batch, LogprobOptions(64, chunk_tokens=chunk))
        values = _process_output(**of_layer, scale_logits=lambda logits: 0.5 * logits, context=context)
        (values[..., 0] * torch.linspace(-1, 1, values.numel()).view(values.shape[:2])).sum().backward()
        found.append((values.detach(), hidden.grad))
    (want, want_gradient), (values, gradient) = found
    assert values.shape == (*batch.data["input_ids"].shape, 1)
    assert_close((values, gradient), (want, want_gradient))


def test_log_prob_passes_have_chunks_of_their_own(make_worker, monkeypatch):
    sizes = []
    apply = LinearLogprobs.__call__
    monkeypatch.setattr(LinearLogprobs, "__call__", lambda self, *a: sizes.append(self.chunk_tokens) or apply(self, *a))
    worker = make_worker(policy_of(None) | {"logprob_chunk_size": 7}, init_reference_model=True)
    data = random_batch(2)
    worker.get_logprobs(data, mbs=2)
    worker.get_reference_policy_logprobs(data, mbs=2)
    assert sizes == [7, 7]
    worker.train(data, NLLLoss(), gbs=2, mbs=2)
    worker.evaluate(data, NLLLoss(), mbs=2)
    assert sizes == [7, 7]  # no chunks are set for these


def test_the_output_layers_hooks_run(make_worker):
    """The hooks gather parameters, and complete the offloading of activations before logits are computed."""
    worker, calls = make_worker(policy_of(5)), []
    layer = output_layer(worker)
    handle = layer.register_forward_pre_hook(lambda *_: calls.append("before"))
    worker.train(random_batch(4), NLLLoss(), gbs=4, mbs=2)
    handle.remove()
    assert calls == ["before", "before"]  # one for each micro-batch
    check_is_plain(worker.state.model)

    def fail(hidden_states: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        call_with(layer, fail, torch.zeros(1))
    assert "forward" not in vars(layer)  # the next call computes logits again


def test_an_output_layer_that_caps_logits_is_refused(make_worker):
    worker = make_worker()
    layer = output_layer(worker)
    layer.__class__ = type("CappedOutputLayer", (type(layer),), {})
    with pytest.raises(ValueError, match=r"\(CappedOutputLayer\) does more .*use_fused_linear_logprobs to false"):
        check_is_plain(worker.state.model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [3, 1024])
def test_values_and_gradients_are_those_of_log_softmax(monkeypatch, dtype, temperature, chunk):
    monkeypatch.setattr(logprob, "CHUNK_TOKENS", chunk)
    generator = torch.Generator().manual_seed(0)
    logits = (5 * torch.randn(2, 7, 20, generator=generator)).to(dtype).requires_grad_()
    targets = torch.randint(0, 17, (2, 7), generator=generator)
    weights = torch.randn(2, 7, generator=generator)

    got = token_logprobs(logits, targets, vocab_size=17, temperature=temperature, tp_group=None)
    (got * weights).sum().backward()
    gradient, logits.grad = logits.grad, None
    scaled = logits[..., :17].float() / temperature
    want = scaled.log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1)
    (want * weights).sum().backward()

    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient, logits.grad, rtol=1e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-5)
    assert gradient[..., 17:].abs().max() == 0  # the vocabulary's padding gets no probability and no gradient


def filtered(logits: torch.Tensor, kept: SamplingFilter, temperature: float) -> torch.Tensor:
    """Returns log-probs [V] of one row's filtered distribution, by plain loops."""
    scaled = logits.double() / temperature
    order = scaled.argsort(descending=True).tolist()[: kept.top_k]
    probs = scaled[order].softmax(0).tolist()
    keep, mass = [], 0.0
    for token, prob in zip(order, probs, strict=True):
        if mass >= kept.top_p:
            break
        keep.append(token)
        mass += prob
    out = torch.full_like(scaled, -torch.inf)
    out[keep] = scaled[keep]
    return out.log_softmax(0)


@pytest.mark.parametrize("limits", [{"top_k": 5}, {"top_p": 0.9}, {"top_k": 5, "top_p": 0.9}], ids=str)
@pytest.mark.parametrize("chunk", [2, 1024])
def test_filtered_log_probs_are_those_of_the_distribution_that_is_sampled(monkeypatch, limits, chunk):
    monkeypatch.setattr(logprob, "CHUNK_TOKENS", chunk)
    generator, rows, kept = torch.Generator().manual_seed(4), 200, SamplingFilter(**limits)
    logits = 2 * torch.randn(rows, 30, generator=generator)
    uniform = torch.rand(rows, generator=generator).double()
    sampled, _ = choose_tokens(logits, uniform, temperature=0.7, top_k=kept.top_k, top_p=kept.top_p)
    leaf = logits.clone().requires_grad_()
    got = token_logprobs(leaf[:, None], sampled[:, None], vocab_size=30, temperature=0.7, tp_group=None, kept=kept)
    weights = torch.randn(rows, generator=generator)
    (got[:, 0] * weights).sum().backward()
    for row in range(rows):
        distribution = filtered(logits[row], kept, 0.7)
        token = sampled[row]
        assert torch.isfinite(distribution[token])  # the sampler of the transformers engine keeps the same tokens
        torch.testing.assert_close(got[row, 0].double(), distribution[token], atol=1e-5, rtol=0)
        slope = -distribution.exp() / 0.7
        slope[token] += 1 / 0.7
        torch.testing.assert_close(leaf.grad[row].double(), slope * weights[row].item(), atol=1e-5, rtol=0)


def test_a_target_that_the_filter_would_drop_counts_as_kept():
    logits, kept = torch.tensor([[[3.0, 2.0, 1.0, 0.0]]]), SamplingFilter(top_k=2)
    got = token_logprobs(logits, torch.tensor([[3]]), vocab_size=4, temperature=1.0, tp_group=None, kept=kept)
    torch.testing.assert_close(got[0, 0], torch.tensor([3.0, 2.0, 0.0]).log_softmax(0)[2])


def test_log_probs_are_aligned_with_their_tokens():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(5, 2, 8, generator=generator)
    tokens = torch.randint(0, 8, (2, 5), generator=generator)

    options = {"vocab_size": 8, "temperature": 1.0, "tp_group": None}
    got = next_token_logprobs(lambda targets: token_logprobs(logits, targets, **options), tokens)

    assert got[:, 0].tolist() == [0.0, 0.0]
    for row in range(2):
        for t in range(1, 5):
            torch.testing.assert_close(got[row, t], logits[t - 1, row].log_softmax(-1)[tokens[row, t]])


@pytest.mark.gpu
@pytest.mark.skipif(not have_transformer_engine(), reason="needs a CUDA GPU and Transformer Engine")
def test_the_fused_kernel_computes_the_same():
    generator = torch.Generator("cuda").manual_seed(2)
    start = 3 * torch.randn(4, 64, 32000, generator=generator, device="cuda").bfloat16()
    tokens = torch.randint(0, 32000, (4, 64), generator=generator, device="cuda")
    weights = torch.randn(4, 64, generator=generator, device="cuda")

    def run(temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = start.clone().requires_grad_()
        values = token_logprobs(
            leaf * 1.0, tokens, vocab_size=32000, temperature=temperature, tp_group=None, may_overwrite=True
        )
        (values * weights).sum().backward()
        return values.detach(), leaf.grad

    values, gradient = run(1.0)
    want, want_gradient = run(1.0 + 1e-9)  # not 1, to take the unfused path
    torch.testing.assert_close(values, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient, want_gradient, rtol=2e-2, atol=1e-5)
