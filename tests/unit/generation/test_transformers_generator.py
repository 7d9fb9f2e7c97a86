import contextlib
import copy
import dataclasses

import pytest
import torch
from support import engine_conformance
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GenerationConfig

from nemo_offload_rl.generation.hf_model import build_model, weights_by_name
from nemo_offload_rl.generation.interface import GenerationRequest, InFlightUpdates, SamplingParams
from nemo_offload_rl.generation.transformers_generator import TransformersGenerator
from nemo_offload_rl.refit.plan import ExportPlan

QWEN3 = engine_conformance.QWEN3 | {"vocab_size": 30, "hidden_size": 32, "head_dim": 8, "intermediate_size": 48}
QWEN3_MOE = engine_conformance.QWEN3_MOE | QWEN3 | {"model_type": "qwen3_moe", "moe_intermediate_size": 16}
QWEN3_MOE |= {"tie_word_embeddings": False}
STOP = 3
GREEDY = SamplingParams(max_new_tokens=12, temperature=0.0, top_p=1.0, top_k=None, stop_token_ids=(STOP,), seed=0)
SAMPLED = dataclasses.replace(GREEDY, temperature=1.0)
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12], [4, 4, 20], [12], [29, 28, 27, 26], [5, 6, 7, 8, 9, 10, 11], [1, 2]]


def _model_with_weights(config, seed=0):
    model = build_model("tiny", config, "float32")
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(1 + 0.1 * noise if parameter.dim() == 1 else 0.3 * noise)
    return model


@pytest.fixture(scope="module")
def model():
    return _model_with_weights(QWEN3)


def _generator(model, batch_size=64, max_length=128, device="cpu", **options):
    sizes = {"generation_batch_size": batch_size, "max_sequence_length": max_length}
    return TransformersGenerator(model, device=device, **sizes, **{"has_weights": True} | options)


def _request(sampling, prompts=PROMPTS):
    return engine_conformance.request(sampling, prompts)


def test_greedy_equals_transformers_own_generate(model):
    output = _generator(model).generate(_request(GREEDY))
    for prompt, tokens in zip(PROMPTS, output.output_ids, strict=True):
        config = GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=STOP, pad_token_id=0)
        ids, mask = torch.tensor([prompt]), torch.ones(1, len(prompt), dtype=torch.long)
        expected = model.generate(ids, attention_mask=mask, generation_config=config)
        assert tokens == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("batch_size", [1, 2, 3, 5])
def test_what_is_sampled_does_not_depend_on_the_batch(model, batch_size):
    whole = _generator(model).generate(_request(SAMPLED))
    assert _generator(model, batch_size).generate(_request(SAMPLED)).output_ids == whole.output_ids
    request = _request(SAMPLED)
    backwards = GenerationRequest(request.prompt_ids[::-1], request.sample_ids[::-1], request.step, SAMPLED)
    assert _generator(model, batch_size).generate(backwards).output_ids == whole.output_ids[::-1]


def test_compaction_changes_nothing(model):
    prompts = [[token] for token in range(4, 28)] * 2
    sampling = dataclasses.replace(SAMPLED, max_new_tokens=40, temperature=1.5)
    whole = _generator(model).generate(_request(sampling, prompts))
    lengths = sorted(map(len, whole.output_ids))
    assert lengths[0] < 5  # rows end at many different times
    assert lengths[-1] == 40
    assert _generator(model, 1).generate(_request(sampling, prompts)).output_ids == whole.output_ids


@pytest.mark.parametrize("config", [QWEN3, QWEN3_MOE])
def test_weights_arrive_by_their_checkpoint_names(config, tmp_path):
    source = _model_with_weights(config)
    source.save_pretrained(tmp_path)
    from safetensors.torch import load_file

    checkpoint = load_file(tmp_path / "model.safetensors")
    target = _generator(build_model(str(tmp_path), None, "float32"), has_weights=False)
    target.prepare_refit_info(ExportPlan.of(checkpoint.items()))
    with pytest.raises(RuntimeError, match="weights of the generation model have not been loaded"):
        target.generate(_request(GREEDY))
    for name, tensor in checkpoint.items():
        target.load_weights([(name, tensor)])
    assert target.generate(_request(GREEDY)) == _generator(source).generate(_request(GREEDY))
    assert target.weights_checksum() == _generator(source).weights_checksum(list(checkpoint))


def test_a_refit_that_fails_or_ends_early_leaves_weights_missing(model):
    target, weights = _generator(copy.deepcopy(model)), weights_by_name(model)
    target.prepare_refit_info(ExportPlan.of(weights.items()))
    target.prepare_for_generation(["weights", "kv_cache"])  # no refit: the policy has not changed
    target.generate(_request(GREEDY))
    for broken in ([("model.norm.weight", weights["model.norm.weight"])], [("unknown", torch.ones(1))]):
        target.prepare_for_generation(["weights"])
        with contextlib.suppress(ValueError):
            target.load_weights(broken)
        with pytest.raises(RuntimeError, match=r"\d+ weights of the generation model have not been loaded .* refit it"):
            target.generate(_request(GREEDY))
    target.load_weights(weights.items())
    with pytest.raises(ValueError, match="'unknown'"):
        target.load_weights([*weights.items(), ("unknown", torch.ones(1))])
    with pytest.raises(RuntimeError, match="have not been loaded"):
        target.generate(_request(GREEDY))
    target.load_weights(weights.items())
    assert target.generate(_request(GREEDY)) == _generator(model).generate(_request(GREEDY))


def test_tied_embeddings_may_be_sent_under_both_names(model):
    target = _generator(copy.deepcopy(model))
    weight = torch.ones(30, 32)
    target.load_weights([("model.embed_tokens.weight", weight), ("lm_head.weight", weight)])
    sums = target.weights_checksum(["model.embed_tokens.weight", "lm_head.weight"])
    assert len(set(sums.values())) == 1
    assert "lm_head.weight" not in target.weights_checksum()


def test_weights_that_do_not_fit_are_refused(model):
    target = _generator(copy.deepcopy(model))
    for name, weight, message in [
        ("model.nrm.weight", torch.ones(32), r"'model\.nrm\.weight', which the generation model does not have"),
        ("model.norm.weight", torch.ones(31), r"'model.norm.weight' as torch.float32 \[31\]"),
        ("model.norm.weight", torch.ones(32).bfloat16(), r"torch.bfloat16 \[32\], but .* has it as torch.float32"),
    ]:
        with pytest.raises(ValueError, match=message):
            target.load_weights([(name, weight)])
    weights = weights_by_name(model)
    del weights["model.norm.weight"], weights["lm_head.weight"]
    with pytest.raises(ValueError, match=r"no weight for 1 .* \(model.norm.weight\)"):
        target.prepare_refit_info(ExportPlan.of(weights.items()))


def _greedy(**changes):
    return lambda: dataclasses.replace(GREEDY, **changes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_greedy(top_p=0), "top_p is 0"), (_greedy(temperature=-1), "temperature is -1"),
        (_greedy(top_k=0), "top_k is 0"), (_greedy(max_new_tokens=0), "max_new_tokens is 0"),
        (_greedy(bad_words=("a", " ")), "bad_words has an empty word"),
        (_greedy(stop_strings=("a", "")), "stop_strings has an empty string"),
        (lambda: GenerationRequest([[1], []], [0, 0], 0, GREEDY), "empty prompt"),
        (lambda: GenerationRequest([[1], [2]], [0], 0, GREEDY), "2 prompts and 1 sample ids"),
        (lambda: build_model("tiny", QWEN3, "fp8"), r"policy\.precision is 'fp8'"),
    ],
)  # fmt: skip
def test_bad_settings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


class CopiesBetweenDevices(TorchDispatchMode):
    """Counts the elements that are copied from one device to another."""

    num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            source = args[0] if func is torch.ops.aten._to_copy.default else args[1]
            self.num_elements += source.numel() * (source.device != out.device)
        return out


@pytest.mark.parametrize("device", ["meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_wake_up_before_a_refit_copies_no_weights(device):
    model = _model_with_weights(QWEN3 if device == "cuda" else QWEN3_MOE)  # meta tensors do not stay tied
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    num_others = sum(buffer.numel() for buffer in model.buffers())
    buffers = [buffer.clone() for buffer in model.buffers()]
    generator = _generator(model, device=device)
    assert num_others > 0
    for tags, wanted in ((["weights"], num_others), (["weights", "kv_cache"], num_others + num_weights)):
        with CopiesBetweenDevices() as copies:
            generator.prepare_for_generation(tags)
        assert copies.num_elements == wanted
        assert {parameter.device.type for parameter in model.parameters()} == {device}
        if device == "cuda":
            assert all(torch.equal(one.cpu(), other) for one, other in zip(model.buffers(), buffers, strict=True))
            assert model.lm_head.weight is model.model.embed_tokens.weight
        model.to_empty(device="cpu")
        for buffer, values in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(values)


@pytest.mark.gpu
def test_on_a_gpu_the_memory_comes_back_and_the_tokens_are_those_of_the_cpu(model):
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    generator = _generator(copy.deepcopy(model), device="cuda")
    torch.ones(8, 8, device="cuda").mm(torch.ones(8, 8, device="cuda"))  # cuBLAS keeps the workspace it allocates now
    before = torch.cuda.memory_allocated()
    with pytest.raises(RuntimeError, match="prepare_for_generation"):
        generator.generate(_request(GREEDY))
    generator.prepare_for_generation()
    assert torch.cuda.memory_allocated() > before
    output = generator.generate(_request(GREEDY))
    checksum = generator.weights_checksum()
    generator.finish_generation()
    assert torch.cuda.memory_allocated() == before
    assert output.output_ids == _generator(model).generate(_request(GREEDY)).output_ids
    assert checksum == generator.weights_checksum()


class _UpdatesOnce:
    """A `StepGate` at which new weights come before the third token of the first batch."""

    def __init__(self, update):
        self.num_updates, self.held_s, self._calls, self._update = 0, 0.0, 0, update

    def generating(self):
        return contextlib.nullcontext()

    def between_steps(self):
        self._calls += 1
        if self._calls != 4:  # before the prefill, and before the passes behind the first and the second token
            return False
        self._update()
        self.num_updates += 1
        return True


@pytest.mark.parametrize("recomputes", [False, True])
def test_answers_go_on_with_weights_that_come_meanwhile(recomputes):
    model, newer = _model_with_weights(QWEN3), _model_with_weights(QWEN3, seed=1)
    older = copy.deepcopy(model)
    generator = _generator(model, batch_size=4, in_flight=InFlightUpdates(recomputes_kv_cache=recomputes))
    generator._gate = _UpdatesOnce(lambda: generator.load_weights(list(weights_by_name(newer).items())))
    prompts = [[5, 6, 7], [12], [4, 4, 20], [12], [29, 28, 27, 26]]
    sampling = dataclasses.replace(SAMPLED, stop_token_ids=(), max_new_tokens=6)
    output = generator.generate(GenerationRequest(prompts, [0, 0, 0, 1, 0], 1, sampling))
    by_length = sorted(range(5), key=lambda row: (len(prompts[row]), prompts[row]))
    first, second = by_length[:4], by_length[4:]
    assert [output.num_updates[row] for row in first] == [[0, 0, 0, 1, 1, 1]] * 4
    assert [output.num_updates[row] for row in second] == [[1] * 6]
    for row, prompt in enumerate(prompts):
        ids = prompt + output.output_ids[row]
        of_models = []
        for one in (older, newer):
            logits = one(input_ids=torch.tensor([ids])).logits[0, len(prompt) - 1 : -1].float()
            of_models.append(logits.log_softmax(-1).gather(1, torch.tensor(output.output_ids[row])[:, None])[:, 0])
        want = torch.where(torch.tensor(output.num_updates[row]) > 0, of_models[1], of_models[0])
        near = torch.isclose(torch.tensor(output.logprobs[row]), want, atol=1e-4)
        old_keys = row in first and not recomputes  # then newer passes see keys and values of the older weights
        assert near[:3].all() and near[3:].all() != old_keys
