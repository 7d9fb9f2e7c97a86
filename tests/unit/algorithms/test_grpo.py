import math
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace

import pytest
import ray
import torch
from support.losses import PLAIN
from support.metrics_page import undocumented
from support.recorded_runs import SIX_STEPS, make_run
from support.toy_policy import EOS, PROBLEMS, TOKENIZER, LocalTransport, ToyGeneration, ToyPolicy, table_logprobs

from nemo_offload_rl.algorithms.advantages import GroupAdvantages, RewardScaling, unscaled
from nemo_offload_rl.algorithms.group_sampling import GroupSampler, GroupSettings
from nemo_offload_rl.algorithms.grpo import GRPO, BatchSizes, ValidationSampling, prepare
from nemo_offload_rl.algorithms.importance_sampling import sequence_prob_errors
from nemo_offload_rl.algorithms.reward_shaping import OverlongPenalty
from nemo_offload_rl.algorithms.rollout_queue import RolloutQueue
from nemo_offload_rl.algorithms.rollouts import RolloutMaker
from nemo_offload_rl.algorithms.saved_rollouts import NoEngine, ReplayedRollouts
from nemo_offload_rl.algorithms.validation import num_in_whole_batches
from nemo_offload_rl.config import load
from nemo_offload_rl.config.algorithms import ALGORITHMS
from nemo_offload_rl.data.batch import BatchedData
from nemo_offload_rl.data.loader import ProblemLoader
from nemo_offload_rl.data.problem import DataError
from nemo_offload_rl.data.prompts import PromptFormat
from nemo_offload_rl.environments import Judgements, Reward, RewardError, make_reward
from nemo_offload_rl.generation import ENGINES, make_generation
from nemo_offload_rl.generation.interface import Capabilities, GenerationError, GenerationRequest, SamplingParams
from nemo_offload_rl.metrics.timer import Timer
from nemo_offload_rl.refit import make_transport
from nemo_offload_rl.run.checkpoints import CheckpointFolder, NoCheckpoints, RunState
from nemo_offload_rl.run.train_loop import StopReason, StopTarget
from nemo_offload_rl.run.weight_sync import NoWeightSync, WeightSync

EXACT_MATCH = make_reward("exact_match")
SAMPLING = SamplingParams(max_new_tokens=3, temperature=1.0, top_p=1.0, top_k=None, stop_token_ids=(EOS,), seed=7)
SETTINGS = GroupSettings(
    num_prompts_per_step=5, num_generations_per_prompt=8, use_dynamic_sampling=False,
    dynamic_sampling_max_gen_batches=4, batch_multiplier=1,
)  # fmt: skip
SCHEDULE = replace(SIX_STEPS, val_period=3)


class Setting:
    """Holds a GRPO algorithm with everything around it; `limits` are its settings that are off unless given."""

    def __init__(
        self, *, loss=PLAIN, settings=SETTINGS, train_micro=40, train_global=40, reward=EXACT_MATCH, scale=unscaled,
        shape=None, generation=None, transport=None, val_generations=1, val_temperature=0.0, num_shown=0,
        problems=PROBLEMS, validation=PROBLEMS, save=None, replay=None, max_age=None, in_flight=False,
        last_step=SCHEDULE.max_num_steps, num_epochs=99, sampled_with=None, **limits,
    ):  # fmt: skip
        self.policy = ToyPolicy()
        self.generation = generation or ToyGeneration()
        self.generation.calls = self.policy.calls
        rollout = RolloutMaker(self.generation, PromptFormat(TOKENIZER, max_tokens=3), TOKENIZER, reward)
        prompts = ProblemLoader(problems, shuffle=True, seed=7)
        sampler = GroupSampler(prompts, rollout, SAMPLING, settings, scale, shape, self.generation.memory_stats)
        link = transport or LocalTransport([self.generation])
        engine, weights = self.generation, WeightSync(self.policy, self.generation, link, verify=transport is None)
        if save is not None:
            sampler = replace(sampler, save=save.save)
        if replay is not None:
            sampler = replace(sampler, rollout=ReplayedRollouts(replay, rollout.prompt_format))
            engine, weights, validation = NoEngine(), NoWeightSync(), ()
        if max_age is not None:
            ends = {"last_step": last_step, "num_epochs": num_epochs, "sampled_with": sampled_with or {}}
            sampler = RolloutQueue(sampler, max_age=max_age, in_flight=in_flight, **ends)
        sampling = replace(SAMPLING, temperature=val_temperature)
        asked = ValidationSampling(validation, val_generations, batch_size=4, sampling=sampling, num_shown=num_shown)
        self.grpo = GRPO(
            policy=self.policy,
            generation=engine,
            weights=weights,
            prompts=prompts,
            sample=sampler,
            validation=asked,
            advantages=GroupAdvantages(leave_one_out=False, normalize=True, clip_low=None, clip_high=None),
            loss_fn=loss,
            batch_sizes=BatchSizes(train_global=train_global, train_micro=train_micro, logprob=16),
            save_optimizer=True,
            **{"overlong_filtering": False, "sequence_error_limit": None, "prob_error_limit": None} | limits,
        )

    def run(self, schedule=SCHEDULE, checkpoints=None, state=None, **options):
        run, outputs = make_run(self.grpo, schedule, checkpoints, state, **options)
        return run.train(), outputs, run

    def resume(self, checkpoint):
        """Loads a checkpoint as a job does, and returns the state of its run."""
        state = RunState.read(checkpoint)
        self.grpo.position = state.position
        self.grpo.load(checkpoint, state.step, state.num_skipped)
        return state


def test_it_learns_and_stops_at_its_target():
    schedule = replace(SCHEDULE, max_num_steps=60, val_period=5, target=StopTarget("validation/accuracy", 0.9))
    reason, outputs, run = Setting().run(schedule)
    assert reason is StopReason.TARGET
    assert outputs.rows[0]["validation/accuracy"] <= 0.3
    assert outputs.rows[run.state.step]["validation/accuracy"] >= 0.9
    assert run.state.step < 60
    errors = [row["train/token_mult_prob_error"] for step, row in outputs.rows.items() if step > 0]
    assert errors == pytest.approx([1.0] * len(errors), abs=1e-5)


def test_validation_measures_what_recipes_may_name():
    named = {f"validation/{name}" for name in ALGORITHMS["grpo"].validation_metrics}
    assert set(Setting(val_generations=2).grpo.validate(0)) == named
    assert set(Setting().grpo.validate(0)) == named - {"validation/pass_k"}
    assert undocumented(named) == []


def test_validation_means_over_several_answers_to_a_problem():
    graded = Reward("graded", lambda response, answer: {answer: 1.0, "7": 0.5}.get(response, 0.0))
    setting = Setting(reward=graded, val_generations=6, val_temperature=1.0)
    metrics = setting.grpo.validate(0)
    assert [request.sample_ids for request in setting.generation.requests] == [[*range(6)] * n for n in (4, 4, 2)]
    setting.grpo._weights.refresh()
    rewards = setting.grpo._sample.rollout(PROBLEMS, 6, SAMPLING, 0, Timer(), Counter()).rewards
    assert metrics["validation/accuracy"] == pytest.approx(rewards.mean().item())  # as in NeMo-RL
    assert metrics["validation/full_reward"] == pytest.approx((rewards == 1).float().mean().item())
    solved = [any(reward > 0 for reward in row) for row in rewards.tolist()]
    assert metrics["validation/pass_k"] == pytest.approx(sum(solved) / 10)
    assert metrics["validation/full_reward"] < metrics["validation/accuracy"] < metrics["validation/pass_k"] < 1


def test_a_validation_is_a_whole_number_of_batches():
    # NeMo-RL validates max_val_samples // val_batch_size batches; fewer if the data ends before.
    for most, batch_size, num in ((8, 3, 6), (8, 4, 8), (9, 2, 8), (3, 4, 3), (90, 4, 10)):
        assert len(PROBLEMS[: num_in_whole_batches(most, batch_size)]) == num


def test_the_same_seed_gives_the_same_metrics_in_micro_batches_too_and_all_are_documented():
    loss = replace(PLAIN, reference_policy_kl_penalty=0.1)
    first, second, pieces = (Setting(loss=loss, train_micro=size).run()[1] for size in (40, 40, 7))
    assert first.without_timings() == second.without_timings()
    assert list(first.rows) == list(range(7)) == first.shown
    for step, row in first.without_timings().items():
        assert pieces.without_timings()[step] == pytest.approx(row, rel=1e-3, abs=1e-5)
    names = {name for row in first.rows.values() for name in row}
    assert len(names) > 30
    assert undocumented(names) == []


@pytest.mark.parametrize("stop", [2, 4])
def test_a_resumed_run_goes_on_bit_for_bit(tmp_path, stop):
    def checkpoints(name):
        return CheckpointFolder(tmp_path / name, "validation/accuracy", higher_is_better=True, keep_top_k=2)

    _, whole, _ = Setting().run(checkpoints=checkpoints("whole"))
    first = replace(SCHEDULE, max_num_steps=stop, val_at_end=False)
    reason, before, _ = Setting().run(first, checkpoints=checkpoints("parts"))
    assert reason is StopReason.STEPS
    newest = checkpoints("parts").newest_first()[0]
    assert newest.name == f"step_{stop}"

    setting = Setting()
    state = setting.resume(newest)
    _, after, _ = setting.run(checkpoints=checkpoints("parts"), state=state)
    assert {**before.without_timings(), **after.without_timings()} == whole.without_timings()
    assert list(after.rows) == list(range(stop + 1, 7))


def test_weights_are_sent_only_when_they_have_changed():
    setting = Setting()
    setting.run(replace(SCHEDULE, max_num_steps=2, val_period=1, val_at_start=True))
    # Before the start, after step 1 and after step 2: step 2 uses the weights that validation has sent.
    assert setting.policy.calls.count("send_weights") == 3
    setting = Setting()
    setting.run(replace(SCHEDULE, max_num_steps=2, val_period=0, val_at_start=False, val_at_end=False))
    assert setting.policy.calls.count("send_weights") == 2


def test_a_step_calls_the_verbs_in_order_and_times_them():
    setting, timer = Setting(loss=replace(PLAIN, reference_policy_kl_penalty=0.1)), Timer()
    setting.grpo.step(1, timer)
    # Each is a round trip to all ranks, so each is called only once.
    assert "; ".join(setting.policy.calls) == (
        "offload_before_refit; wake up weights; send_weights; offload_after_refit; wake up kv_cache; generate; "
        "begin to sleep; start_return, logprobs=True; sleep; get_logprobs; get_reference_policy_logprobs; train"
    )
    assert not setting.generation.awake
    phases = "refit sampling rewards finish_generation logprobs reference_logprobs training metrics"
    assert " ".join(timer.seconds()) == phases
    # An engine that has room does not wait until the policy has left.
    setting = Setting()
    setting.generation.has_room = True
    setting.grpo.step(1, Timer())
    assert setting.policy.calls[2:5] == ["send_weights", "offload_after_refit, without waiting", "wake up kv_cache"]


@pytest.fixture
def sharded(ray_cluster, monkeypatch):
    monkeypatch.setitem(ENGINES, "toy", "support.toy_engine:ENGINE")
    generation = make_generation({"generation": {"backend": "toy", "num_shards": 2}}, ray_cluster)
    yield generation
    generation.shutdown()


def test_a_registered_engine_over_several_bundles_samples_for_the_loop(sharded):
    transport = make_transport(sharded.capabilities.refit_transport, sharded.receivers, verify=False)
    assert [receiver.ranks for receiver in sharded.receivers] == [(0,), (1,)]
    resources = ray.get([shard.resources.remote() for shard in sharded.shards])
    for rank, named in enumerate(resources):
        assert any(name.startswith(f"CPU_group_{rank}_") for name in named)

    setting, alone = Setting(generation=sharded, transport=transport), Setting()
    _, outputs, _ = setting.run(replace(SCHEDULE, max_num_steps=2, val_period=0))
    _, expected, _ = alone.run(replace(SCHEDULE, max_num_steps=2, val_period=0))
    assert outputs.without_timings() == expected.without_timings()
    wake_up = ["wake up weights", "send_weights", "offload_after_refit", "wake up kv_cache"]
    of_refit = [call for call in setting.policy.calls if call in wake_up]
    assert of_refit == 4 * wake_up  # a sleep drops its weights: two validations and two steps
    assert alone.policy.calls.count("send_weights") == 3
    with pytest.raises(ValueError, match=r"policy\.verify_refit is true, but the engines .* give no checksums"):
        WeightSync(setting.policy, sharded, transport, verify=True)


@pytest.mark.parametrize("built_alone", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_the_policy_is_built_behind_an_engine_only_where_that_is_built_alone(monkeypatch, built_alone, fails):
    calls = []

    def wait_until_ready():
        calls.append("the engine is there")
        if fails:
            raise GenerationError("its construction", MemoryError("no room"), "")

    def start_ranks(*_, before_build, **__):
        if before_build is not None:
            before_build()
        calls.append("the ranks are built")
        return SimpleNamespace(prepare_refit_info=lambda transport: calls.append("the first export"))

    generation = SimpleNamespace(
        capabilities=Capabilities("object_store", True, True, built_alone),
        receivers=(),
        wait_until_ready=wait_until_ready,
        prepare_refit_info=lambda plan: None,
        memory_stats=dict,
    )
    monkeypatch.setattr("nemo_offload_rl.generation.make_generation", lambda *_: generation)
    monkeypatch.setattr("nemo_offload_rl.refit.make_transport", lambda *_, **__: None)
    monkeypatch.setattr("nemo_offload_rl.worker.group.PolicyWorkerGroup", start_ranks)
    config = load("examples/configs/grpo_tiny_cpu.yaml").config
    refused = pytest.raises(GenerationError, match="failed in its construction: MemoryError: no room")
    with refused if fails else nullcontext():
        prepare(config).build(config["policy"], None)
    in_order = ["the engine is there", "the ranks are built"]
    order = in_order[: 1 if fails else 2] if built_alone else in_order[::-1]
    assert list(dict.fromkeys(calls)) == [*order, *([] if fails else ["the first export"])]


def test_a_step_reports_what_moved_since_the_one_before():
    setting = Setting()
    metrics = setting.grpo.step(1, Timer())
    assert (metrics["residency/train/optimizer_state/gb"], metrics["residency/host_rss_gib"]) == (4.0, 1.0)
    assert all(metrics[f"residency/{phase}/enter_s"] > 0 for phase in ("refit", "generate", "logprob", "train"))
    setting.grpo.validate(1)  # refits, so the next step finds current weights and reports validation's moves as its own
    refit_of_validation = setting.policy.moves["refit/optimizer_state/copy_s"]
    setting.policy.calls.clear()
    metrics = setting.grpo.step(2, Timer())
    assert "offload_before_refit" not in setting.policy.calls
    assert metrics["residency/refit/optimizer_state/copy_s"] == refit_of_validation
    assert setting.policy.moves == {}


def test_passes_that_the_loss_does_not_need_are_left_out():
    setting = Setting(loss=replace(PLAIN, force_on_policy_ratio=True))
    metrics = setting.grpo.step(1, Timer())
    assert "get_logprobs" not in setting.policy.calls
    assert "get_reference_policy_logprobs" not in setting.policy.calls
    assert metrics["train/token_mult_prob_error"] == pytest.approx(1.0, abs=1e-5)


def test_a_sampler_with_other_probabilities_is_said(monkeypatch, caplog):
    for error, is_warned_of in ((1.05, False), (1.06, True)):
        setting = Setting(prob_error_limit=1.05)
        train = setting.policy.train

        def train_with_error(*args, train=train, error=error, **kwargs):
            result = train(*args, **kwargs)
            return result | {"metrics": result["metrics"] | {"token_mult_prob_error": error}}

        monkeypatch.setattr(setting.policy, "train", train_with_error)
        setting.grpo.step(3, Timer())
        said = "Step 3: train/token_mult_prob_error is 1.060, above grpo.token_mult_prob_error_limit (1.05)"
        assert (said in caplog.text) is is_warned_of


def test_answers_whose_probabilities_differ_too_much_are_left_out():
    """As in NeMo-RL by the mean of exp |log-prob of the sampler - of the policy| over an answer's tokens."""
    rows = {
        "token_mask": torch.tensor([[0.0, 1, 1], [0, 1, 0], [0, 1, 1], [0, 1, 1]]),
        "sample_mask": torch.tensor([1.0, 1, 1, 0]),
        "generation_logprobs": torch.tensor([[9.0, -1.0, -1.0], [0, -1.0, 9], [0, -3.0, -1.0], [0, 1, 1]]),
        "prev_logprobs": torch.tensor([[0.0, -1.5, -1.0], [0, -1.0, 0], [0, -1.0, -1.0], [0, 0, 0]]),
    }
    expected = [(math.exp(0.5) + 1) / 2, 1.0, (math.exp(2.0) + 1) / 2, 0.0]
    assert sequence_prob_errors(BatchedData(rows)).tolist() == pytest.approx(expected)

    class Imprecise(ToyGeneration):
        """Reports log-probs that are off by 1, a factor of e, in answers of more than one token."""

        def generate(self, request):
            output = super().generate(request)
            off = [[value - (len(row) > 2) for value in row] for row in output.logprobs]
            return replace(output, logprobs=off)

    on_policy = replace(PLAIN, force_on_policy_ratio=True)  # has no log-prob pass of its own
    plain = Setting(loss=on_policy, generation=Imprecise()).grpo.step(1, Timer())
    setting = Setting(loss=on_policy, generation=Imprecise(), sequence_error_limit=1.5)
    limited = setting.grpo.step(1, Timer())
    num_left_out = limited["train/num_masked_seqs_by_logprob_error"]
    assert 0 < num_left_out == plain["train/num_valid_samples"] - limited["train/num_valid_samples"]
    assert limited["train/max_seq_mult_prob_error"] == pytest.approx(math.e, rel=1e-4)
    assert limited["train/token_mult_prob_error"] == pytest.approx(1.0, abs=1e-4)
    assert plain["train/token_mult_prob_error"] > 1.1
    assert "get_logprobs" in setting.policy.calls
    assert "train/max_seq_mult_prob_error" not in plain


def test_overlong_filtering_leaves_cut_off_answers_out():
    filtered = Setting(overlong_filtering=True).grpo.step(1, Timer())
    everything = Setting().grpo.step(1, Timer())
    assert everything["train/num_valid_samples"] == 40
    assert 0 < everything["train/truncation_rate"] < 1
    assert filtered["train/num_valid_samples"] == round(40 * (1 - everything["train/truncation_rate"]))
    assert filtered["train/reward"] == everything["train/reward"]


def test_kl_pulls_towards_the_reference():
    def distance(penalty):
        setting = Setting(loss=replace(PLAIN, reference_policy_kl_penalty=penalty))
        setting.run(replace(SCHEDULE, max_num_steps=12, val_period=0))
        setting.grpo._weights.refresh()
        batch = setting.grpo._sample(13, Timer())[0].batch
        tables = setting.policy.table, setting.policy.reference
        of_policy, of_reference = (table_logprobs(table, batch["input_ids"]) for table in tables)
        gap = of_policy - of_reference
        return (gap * batch["token_mask"]).sum().item() / batch["token_mask"].sum().item()

    assert distance(2.0) < 0.5 * distance(0.0)


def rows_of(requests: Sequence[GenerationRequest]) -> list[tuple[tuple[int, ...], int]]:
    """Returns each row's prompt and sample id, which with seed and step determine its answer."""
    pairs = [zip(map(tuple, request.prompt_ids), request.sample_ids, strict=True) for request in requests]
    return list(chain.from_iterable(pairs))


def test_a_prompt_that_occurs_twice_in_a_step_gets_other_answers():
    setting = Setting(problems=[PROBLEMS[3], PROBLEMS[5], PROBLEMS[3], PROBLEMS[5], PROBLEMS[3]])
    setting.grpo._weights.refresh()
    for step in (1, 2):
        setting.grpo._sample(step, Timer())
        samples = rows_of(setting.generation.requests[-1:])
        threes = tuple(TOKENIZER.encode("3="))
        assert sorted(number for prompt, number in samples if prompt == threes) == [*range(24)]


def test_a_validation_problem_that_is_repeated_gets_other_answers():
    setting = Setting(validation=PROBLEMS[:2] * 8, val_temperature=1.0)
    setting.grpo.validate(0)
    samples = rows_of(setting.generation.requests)
    assert len(setting.generation.requests) == 4
    assert sorted(number for prompt, number in samples if prompt == samples[0][0]) == [*range(8)]
    setting.grpo.validate(0)
    assert rows_of(setting.generation.requests[4:]) == samples


def sampler(reward=EXACT_MATCH, scale=unscaled, **changes) -> tuple[GroupSampler, ToyGeneration]:
    setting = Setting(settings=replace(SETTINGS, **changes), reward=reward, scale=scale)
    setting.grpo._weights.refresh()
    return setting.grpo._sample, setting.generation


def test_without_dynamic_sampling_a_batch_is_one_request():
    sample, generation = sampler()
    rollouts, metrics = sample(1, Timer())
    [request] = generation.requests
    assert (request.sample_ids, request.step) == ([*range(8)] * 5, 1)
    assert (rollouts.rewards.shape, rollouts.batch.size) == ((5, 8), 40)
    assert metrics["train/num_generation_batches"] == 1
    assert metrics["train/reward"] == pytest.approx(rollouts.rewards.mean().item())


def test_rollouts_belong_together():
    sample, _ = sampler()
    rollouts, _ = sample(1, Timer())
    batch = rollouts.batch
    for row in range(batch.size):
        length = batch["input_lengths"][row].item()
        ids = batch["input_ids"][row, :length].tolist()
        response = TOKENIZER.decode(ids[2:], skip_special_tokens=True)
        assert batch["token_mask"][row].sum() == length - 2
        assert rollouts.truncated[row] == (ids[-1] != EOS)
        assert rollouts.rewards.flatten()[row] == float(response == str(ids[0]))
        assert (batch["generation_logprobs"][row] != 0).sum() == length - 2
        assert ids[:2] == batch["input_ids"][row // 8 * 8, :2].tolist()


def test_dynamic_sampling_keeps_prompts_whose_rewards_differ():
    sample, generation = sampler(use_dynamic_sampling=True, num_prompts_per_step=4, dynamic_sampling_max_gen_batches=40)
    rollouts, metrics = sample(1, Timer())
    assert rollouts.rewards.shape == (4, 8)
    assert (rollouts.rewards.amax(1) > rollouts.rewards.amin(1)).all()
    assert len(generation.requests) == metrics["train/num_generation_batches"] > 1
    samples = rows_of(generation.requests)
    assert len(set(samples)) == len(samples)
    assert max(number for _, number in samples) >= 8  # further batches have prompts again
    assert metrics["train/informative_prompts"] < 1
    assert metrics["train/reward"] < metrics["train/filtered_reward"] == pytest.approx(rollouts.rewards.mean().item())


@pytest.mark.parametrize("dynamic", [True, False], ids=["as rewards tell", "the only batch"])
def test_generation_is_told_once_that_nothing_more_comes(dynamic):
    judged = []

    def judge(response, answer):
        judged.append(response)
        return float(response == answer)

    settings = {"use_dynamic_sampling": dynamic, "dynamic_sampling_max_gen_batches": 40}
    sample, generation = sampler(reward=Reward("counted", judge), **settings)
    told = []
    sample(1, Timer(), lambda: told.append((len(generation.requests), len(judged))))
    rows = len(generation.requests[0].prompt_ids)
    assert told == [(len(generation.requests), len(generation.requests) * rows if dynamic else 0)]


def test_dynamic_sampling_may_sample_more_prompts_than_a_step_trains_on():
    settings = {"use_dynamic_sampling": True, "num_prompts_per_step": 3, "dynamic_sampling_max_gen_batches": 40}
    sample, generation = sampler(batch_multiplier=2.5, **settings)
    rollouts, metrics = sample(1, Timer())
    assert {len(request.prompt_ids) for request in generation.requests} == {7 * 8}
    assert rollouts.rewards.shape == (3, 8)
    assert (rollouts.rewards.amax(1) > rollouts.rewards.amin(1)).all()
    _, fewer = sampler(**settings)[0](1, Timer())
    assert metrics["train/num_generation_batches"] < fewer["train/num_generation_batches"]


def test_dynamic_sampling_compares_scaled_rewards():
    """Half a point for any digit equals zero points once rewards below a half are clamped."""
    graded = Reward("graded", lambda response, answer: 1.0 if response == answer else 0.5 * response.isdigit())
    dynamic = {"use_dynamic_sampling": True, "num_prompts_per_step": 4, "dynamic_sampling_max_gen_batches": 40}
    with_scaling, metrics = sampler(graded, RewardScaling(0.5, 1.0, 0.0, 1.0), **dynamic)[0](1, Timer())
    without, unscaled_metrics = sampler(graded, **dynamic)[0](1, Timer())
    assert ((with_scaling.rewards == 1).any(dim=1) & (with_scaling.rewards < 1).any(dim=1)).all()
    assert not (without.rewards == 1).any(dim=1).all()  # with half and zero points the rewards differed enough
    assert metrics["train/num_generation_batches"] > unscaled_metrics["train/num_generation_batches"]
    assert metrics["train/informative_prompts"] < unscaled_metrics["train/informative_prompts"]
    assert set(with_scaling.rewards.flatten().tolist()) == {0.0, 0.5, 1.0}  # the reported rewards are unscaled


def test_a_step_trains_on_scaled_rewards():
    digit = Reward("digit", lambda response, answer: float(response.isdigit()))
    scales = unscaled, RewardScaling(1.0, 2.0, 0.0, 1.0)
    raw, flat = (Setting(reward=digit, scale=scale).grpo.step(1, Timer()) for scale in scales)
    assert 0 < raw["train/reward"] == raw["train/environment_reward"] == flat["train/environment_reward"] < 1
    assert flat["train/reward"] == 0
    assert raw["train/informative_prompts"] > 0 == flat["train/informative_prompts"]
    assert raw["train/grad_norm"] > 0 == flat["train/grad_norm"]


def test_a_step_trains_on_shaped_rewards_and_samples_by_those_before():
    nothing = Reward("nothing", lambda response, answer: 0.0)
    shapes = None, OverlongPenalty(buffer_length=2, penalty=1.0, max_response_length=3)
    flat, shaped = (Setting(reward=nothing, shape=shape).grpo.step(1, Timer()) for shape in shapes)
    assert "train/reward_shaping" not in flat
    assert flat["train/grad_norm"] == 0 < shaped["train/grad_norm"]
    mean_penalty = (shaped["train/mean_gen_tokens_per_sample"] - 1) / 2  # every answer has 1, 2 or 3 tokens
    assert shaped["train/reward_shaping"] == pytest.approx(-mean_penalty)
    assert undocumented(set(shaped)) == []
    assert shaped["train/reward"] == shaped["train/reward_shaping"]  # NeMo-RL's reward is that after shaping
    assert shaped["train/environment_reward"] == shaped["train/informative_prompts"] == 0

    # Answers of different length have different shaped rewards, but that does not make their prompt informative.
    dynamic = replace(SETTINGS, use_dynamic_sampling=True)
    with pytest.raises(DataError, match="5 generation batches of step 1 did not give 5 prompts"):
        Setting(reward=nothing, settings=dynamic, shape=OverlongPenalty(2, 1.0, 3)).grpo.step(1, Timer())


@pytest.mark.parametrize("verb", ["step", "validate"])
@pytest.mark.parametrize(
    ("of_three", "message"),
    [
        (lambda: float("nan"), r"my_rewards:odd .* found nan for .* prompt '3=' \(known answer: '3'\)"),
        (lambda: float("inf"), r"my_rewards:odd .* found inf for .* prompt '3=' \(known answer: '3'\)"),
        (lambda: 1 / 0, r"my_rewards:odd failed .* prompt '3=' .*: ZeroDivisionError: division by"),
    ],
)
def test_a_reward_that_raises_or_is_no_number_ends_the_run_by_name(of_three, message, verb):
    odd = Reward("my_rewards:odd", lambda response, answer: of_three() if answer == "3" else 0.0)
    setting = Setting(reward=odd, settings=replace(SETTINGS, num_prompts_per_step=10, num_generations_per_prompt=4))
    with pytest.raises(RewardError, match=message):
        setting.grpo.step(1, Timer()) if verb == "step" else setting.grpo.validate(0)
    assert "train" not in setting.policy.calls


def test_a_run_goes_on_bit_for_bit_once_its_reward_is_mended(tmp_path):
    class Broken:
        """Raises at the 4th batch of rollouts, while the engines begin to sleep."""

        num_calls = 0

        def judge_all(self, cases):
            self.num_calls += 1
            if self.num_calls == 4:
                raise RewardError("the service is down")
            return EXACT_MATCH.judge_all(cases)

    schedule = replace(SCHEDULE, val_at_start=False, val_at_end=False, val_period=0, save_period=10)
    _, whole, _ = Setting().run(schedule)
    setting, checkpoints = Setting(reward=Broken()), CheckpointFolder(tmp_path, None, True, None)
    with pytest.raises(RewardError, match="the service is down"):
        setting.run(schedule, checkpoints)
    last = setting.policy.calls.index("start_checkpoint")
    assert setting.policy.calls[last - 2 : last] == ["start_return, logprobs=True", "sleep"]
    assert setting.generation.awake == set()
    [newest] = checkpoints.newest_first()
    again = Setting()
    state = again.resume(newest)
    assert state.step == 3
    _, rest, _ = again.run(schedule, NoCheckpoints(), state)
    for step in (4, 5, 6):
        assert rest.without_timings()[step] == whole.without_timings()[step]


def test_dynamic_sampling_gives_up_with_advice():
    sample, _ = sampler(use_dynamic_sampling=True, dynamic_sampling_max_gen_batches=1)
    with pytest.raises(DataError, match=r"2 generation batches of step 3 did not .*use_dynamic_sampling=false"):
        sample(3, Timer())


def test_refit_that_goes_wrong_is_seen():
    class Lossy(LocalTransport):
        def send(self, weights):
            checksums = super().send(weights)
            self.engines[0].table[0, 0] += 1
            return checksums

    policy, generation = ToyPolicy(), ToyGeneration()
    weights = WeightSync(policy, generation, Lossy([generation]), verify=True)
    with pytest.raises(RuntimeError, match=r"1 different \(table\)"):
        weights.refresh()


def test_prompts_that_do_not_fit_are_left_out_of_the_loss():
    setting = Setting()
    rollout = replace(setting.grpo._sample.rollout, prompt_format=PromptFormat(TOKENIZER, max_tokens=1))
    setting.grpo._weights.refresh()
    rollouts = rollout(PROBLEMS[:2], 2, SAMPLING, 1, Timer(), Counter())
    assert rollouts.batch["sample_mask"].tolist() == [0, 0, 0, 0]
    assert torch.isfinite(rollouts.batch["generation_logprobs"]).all()


def test_answers_that_cannot_be_judged_are_counted():
    class HalfJudge:
        """Judges the first of two answers and fails to judge the second."""

        def judge_all(self, cases):
            return Judgements([float(number % 2 == 0) for number in range(len(cases))], len(cases) // 2)

        def shutdown(self):
            self.is_shut_down = True

    judge = HalfJudge()
    setting = Setting(reward=judge)
    metrics, validation = setting.grpo.step(1, Timer()), setting.grpo.validate(1)
    assert metrics["train/num_unjudged_answers"] == 5 * 8 / 2
    assert metrics["train/reward"] == 0.5
    assert validation["validation/num_unjudged_answers"] > 0
    assert undocumented({"train/num_unjudged_answers", "validation/num_unjudged_answers"}) == []
    setting.grpo.shutdown()
    assert judge.is_shut_down


def test_the_best_and_the_worst_answers_of_a_validation_are_shown():
    setting = Setting(val_generations=4, val_temperature=1.0, num_shown=2)
    assert setting.grpo.validation_answers == ()
    metrics = setting.grpo.validate(0)
    best, worst = setting.grpo.validation_answers
    assert (best.reward, worst.reward) == (1.0, 0.0)
    assert best.answer == best.known_answer
    assert worst.answer != worst.known_answer
    assert best.prompt in {problem.prompt for problem in PROBLEMS}
    assert 0 < metrics["validation/accuracy"] < 1
    off = Setting()
    off.grpo.validate(0)
    assert off.grpo.validation_answers == []
