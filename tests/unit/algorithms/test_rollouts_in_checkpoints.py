"""Tests that a resumed run of asynchronous GRPO trains on what was sampled ahead before its checkpoint."""

import random
from dataclasses import replace

import pytest
import torch

from nemo_offload_rl.algorithms.rollout_queue import ROLLOUTS_FILE
from nemo_offload_rl.algorithms.saved_rollouts import sampled_with
from nemo_offload_rl.config import load
from nemo_offload_rl.run.checkpoints import CheckpointFolder
from nemo_offload_rl.run.job import _WriteBesideRun
from nemo_offload_rl.run.resume import damage_seen_by_driver
from nemo_offload_rl.run.setup import read_data, read_tokenizer
from nemo_offload_rl.run.train_loop import StopReason
from nemo_offload_rl.storage.manifest import read_manifest, write_manifest
from tests.unit.algorithms.test_grpo import SCHEDULE, Setting
from tests.unit.algorithms.test_rollout_queue import AGE, UNVALIDATED, Apart, InFlight, ahead, prompts_by_step
from tests.unit.algorithms.test_saved_rollouts import HARD


@pytest.fixture
def folder(tmp_path):
    return CheckpointFolder(tmp_path / "checkpoints", None, higher_is_better=True, keep_top_k=None)


@pytest.fixture
def settings():
    """Collects settings whose runs have been abandoned, as by a kill; their threads end with the test."""
    abandoned = []
    yield abandoned
    for setting in abandoned:
        setting.grpo.shutdown()


def resume(setting, folder, schedule, *, until_killed=False, **arguments):
    """Resumes as a job does; returns the outputs, or None for a run that is killed."""
    newest = folder.newest_first()[0]
    assert damage_seen_by_driver(newest) == []
    state = setting.resume(newest)
    assert setting.grpo.position == state.position
    if not until_killed:
        return setting.run(schedule, folder, state, **arguments)[1]
    with pytest.raises(Killed):
        setting.run(schedule, folder, state, **arguments)


def saved_steps(checkpoint):
    path = checkpoint / ROLLOUTS_FILE
    return [one["step"] for one in torch.load(path, weights_only=True)["steps"]] if path.exists() else []


def beside(setting):
    """Writes checkpoints while training goes on, sometimes for longer than a step."""
    return _WriteBesideRun(setting.grpo, lambda folder: None)


@pytest.mark.parametrize(
    ("stop", "arguments", "slower", "schedule", "writer"),
    [
        (3, {}, {"fills": True}, UNVALIDATED, None),
        (1, {}, {"slow_s": 0.05}, UNVALIDATED, None),  # the next step's answers are still being sampled
        (5, {}, {}, replace(SCHEDULE, val_period=1), None),
        (3, HARD, {"slow_s": 0.01}, SCHEDULE, beside),
    ],
    ids=["slow training", "slow engines", "validation", "hard, beside the run"],
)
def test_a_resumed_run_is_the_whole_one_bit_for_bit(stop, arguments, slower, schedule, writer, folder, settings):
    whole = ahead(1, **arguments)
    _, wanted, _ = whole.run(schedule)
    first, second = ahead(1, **arguments, **slower), ahead(1, **arguments)
    settings += [first]
    made = {} if writer is None else {"writer": writer(first)}
    short = replace(schedule, max_num_steps=stop, val_at_end=False)
    _, before, _ = first.run(replace(short, save_period=1), folder, **made)
    checkpoint = folder.newest_first()[0]
    assert saved_steps(checkpoint)[0] == stop + 1
    after = resume(second, folder, schedule)
    assert before.without_timings() | after.without_timings() == wanted.without_timings()
    assert torch.equal(second.policy.table, whole.policy.table)
    assert stop + 1 not in prompts_by_step(second)  # they were not sampled again


def test_checkpoints_beside_the_run_have_the_rollouts_of_their_own_step(folder, settings):
    setting = ahead(3, fills=True)
    settings.append(setting)
    setting.run(replace(UNVALIDATED, save_period=2, max_num_steps=4), folder, writer=beside(setting))
    saved = {path.name: saved_steps(path) for path in folder.newest_first()}
    assert saved == {"step_4": [5, 6], "step_2": [3, 4, 5]}
    for path in folder.newest_first():
        assert read_manifest(path).files[ROLLOUTS_FILE].rank is None
        (path / ROLLOUTS_FILE).write_bytes(b"PK")
        assert damage_seen_by_driver(path)[0].startswith(f"{ROLLOUTS_FILE} has 2 bytes")


def test_nothing_is_written_where_nothing_was_sampled_ahead(folder, tmp_path):
    ahead(3).run(SCHEDULE, folder)
    assert saved_steps(folder.newest_first()[0]) == []  # of the last step
    one_epoch = replace(folder, folder=tmp_path / "one_epoch")
    ahead(1, num_epochs=1).run(replace(UNVALIDATED, max_num_epochs=1), one_epoch)
    synchronous = replace(folder, folder=tmp_path / "synchronous")
    Setting().run(SCHEDULE, synchronous)
    for other in (one_epoch, synchronous):
        assert not any(saved_steps(path) for path in other.newest_first() if path.name != "step_1")


def stopped_after(step, folder, settings, max_age=3, **arguments):
    """Runs until all steps that may be sampled ahead of a checkpoint are in it."""
    setting = ahead(max_age, fills=True, **arguments)
    settings.append(setting)
    _, outputs, _ = setting.run(replace(UNVALIDATED, max_num_steps=step), folder)
    return setting, outputs


def test_of_more_steps_ahead_all_are_used(folder, settings):
    first, before = stopped_after(2, folder, settings)
    assert saved_steps(folder.newest_first()[0]) == [3, 4, 5]
    second = ahead(3, fills=True)
    after = resume(second, folder, UNVALIDATED)
    rows = before.rows | after.rows
    assert [rows[step][AGE] for step in range(1, 7)] == [0, 1, 2, 3, 3, 3]
    assert rows[3]["performance/steps_sampled_ahead"] in (2, 3)  # step 6 may be there already
    assert list(prompts_by_step(second)) == [6]
    whole = Setting()
    whole.run(UNVALIDATED)
    assert prompts_by_step(first) | prompts_by_step(second) == prompts_by_step(whole)


@pytest.mark.parametrize(
    ("max_age", "ages", "num_used"),
    [(2, [1, 2, 3], 2), (1, [1, 2, 3], 1), (0, [1, 2, 3], 0), (None, [1, 2, 3], 0), (2, [3, 2, 2], 0)],
    ids=["age 2", "age 1", "age 0", "synchronous", "the first is the oldest"],
)
def test_what_is_too_old_now_is_sampled_again_with_what_is_behind_it(max_age, ages, num_used, folder, settings, caplog):
    caplog.set_level("INFO")
    stopped_after(1, folder, settings)
    (checkpoint,) = folder.newest_first()
    saved = torch.load(checkpoint / ROLLOUTS_FILE, weights_only=True)
    assert [one["step"] - 1 - one["version"] for one in saved["steps"]] == [1, 2, 3]
    for one, age in zip(saved["steps"], ages, strict=True):
        one["version"] = one["step"] - 1 - age
    torch.save(saved, checkpoint / ROLLOUTS_FILE)
    write_manifest(checkpoint, {})
    second = Setting() if max_age is None else ahead(max_age)
    outputs = resume(second, folder, UNVALIDATED)
    assert max(row.get(AGE, 0) for row in outputs.rows.values()) <= (max_age or 0)
    whole = Setting()
    whole.run(UNVALIDATED)
    assert prompts_by_step(second) == {step: prompts_by_step(whole)[step] for step in range(2 + num_used, 7)}
    said = f"of 3 steps that were sampled ahead; {num_used} of them are not too old"
    assert (said in caplog.text) == (max_age is not None)


def test_rollouts_that_the_recipe_would_not_sample_are_sampled_again(folder, settings, caplog):
    caplog.set_level("INFO")
    stopped_after(3, folder, settings, sampled_with={"grpo.seed": 7, "env": {"math": {"reward": "a"}}})
    second = ahead(3, sampled_with={"grpo.seed": 7, "env": {"math": {"reward": "b"}}})
    resume(second, folder, UNVALIDATED)
    assert sorted(prompts_by_step(second)) == [4, 5, 6]
    assert "The checkpoint's rollouts are of other values of env: sampled again." in caplog.text
    same = ahead(3, sampled_with={"grpo.seed": 7, "env": {"math": {"reward": "a"}}})
    resume(same, replace(folder, folder=older(folder, 3)), UNVALIDATED)
    assert prompts_by_step(same) == {}


@pytest.mark.parametrize("in_flight", [True, False])
def test_a_run_whose_weights_are_in_flight_now_or_no_longer_uses_them(in_flight, folder, settings):
    """Only answers of engines whose weights are in flight come with the number of updates of each token."""
    first, second = (
        ahead(1, in_flight=value, engine=InFlight if value else Apart) for value in (not in_flight, in_flight)
    )
    settings += [first, second]
    first.run(replace(UNVALIDATED, max_num_steps=3), folder)
    assert saved_steps(folder.newest_first()[0]) == [4]
    outputs = resume(second, folder, UNVALIDATED)
    assert outputs.rows[4][AGE] == 1
    assert list(outputs.rows) == [4, 5, 6]
    assert 4 not in prompts_by_step(second)


def older(folder, step):
    """Returns a folder with only the checkpoints up to a step."""
    other = folder.folder.with_name("older")
    other.mkdir()
    for path in folder.newest_first():
        if int(path.name.removeprefix("step_")) <= step:
            path.rename(other / path.name)
    return other


def test_what_changes_rollouts_must_agree_and_nothing_else():
    def names(*overrides):
        config = load("examples/configs/grpo_tiny_cpu.yaml", ["~warm_start", *overrides]).config
        return sampled_with(config, problems, tokenizer)

    config = load("examples/configs/grpo_tiny_cpu.yaml", ["~warm_start"]).config
    problems, tokenizer = read_data(config["data"], 42)[0].problems, read_tokenizer(config["policy"]["tokenizer"])
    one = names()
    assert names("grpo.max_num_steps=9", "grpo.val_period=1", "policy.megatron_cfg.optimizer.lr=0.1") == one
    for override, name in (
        ("grpo.num_prompts_per_step=32", "grpo.num_prompts_per_step"),
        ("policy.generation.max_new_tokens=7", "policy.generation.max_new_tokens"),
        ("data.train.seed=5", "data.train"),
        ("env.arithmetic.reward=numeric_match", "env"),
        ("grpo.reward_scaling.enabled=true", "grpo.reward_scaling"),
        ("++policy.generation.bad_words=['7']", "policy.generation.bad_words"),
        ("++policy.generation.ignore_eos=true", "policy.generation.ignore_eos"),
        ("++data.max_input_seq_length=9", "data.max_input_seq_length"),
    ):
        other = names(override)
        assert [key for key in {*one, *other} if one.get(key) != other.get(key)] == [name]


def test_what_files_of_the_recipe_have_must_agree(tmp_path, monkeypatch):
    """A user corrects a reward, a system prompt or a chat template, whose file keeps its name, and resumes."""
    monkeypatch.syspath_prepend(tmp_path)
    reward, system, template = (tmp_path / name for name in ("my_reward.py", "system.txt", "template.jinja"))
    reward.write_text("def judge(response, answer):\n    return 0.0\n")
    system.write_text("Add.")
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    overrides = [
        "~warm_start", "env.arithmetic.reward=python", "++env.arithmetic.reward_function=my_reward:judge",
        f"++data.default.system_prompt_file={system}", f"++policy.tokenizer.chat_template={template}",
    ]  # fmt: skip

    def names():
        config = load("examples/configs/grpo_tiny_cpu.yaml", overrides).config
        problems, tokenizer = read_data(config["data"], 42)[0].problems, read_tokenizer(config["policy"]["tokenizer"])
        return sampled_with(config, problems, tokenizer)

    for file, kind in ((reward, "env"), (system, "data.train"), (template, "policy.tokenizer")):
        before = names()
        assert names() == before
        file.write_text(file.read_text().replace("0.0", "1.0") + " ")
        after = names()
        [differing] = [key for key in after if before[key] != after[key]]
        assert differing.startswith(f"{kind} (checksum")


@pytest.mark.parametrize("writer", [None, beside], ids=["at once", "beside the run"])
def test_a_full_disk_costs_the_checkpoint_and_not_the_run(writer, folder, caplog, monkeypatch):
    def full_once(*_):
        monkeypatch.undo()
        raise OSError(28, "No space left on device")

    setting = ahead(1)
    made = {} if writer is None else {"writer": writer(setting)}
    monkeypatch.setattr("nemo_offload_rl.algorithms.rollout_queue.save_tensors", full_once)
    reason, _, _ = setting.run(replace(UNVALIDATED, save_period=2), folder, **made)
    assert reason is StopReason.STEPS
    assert f"Step 2 is not saved: {folder.folder}/tmp_step_2/{ROLLOUTS_FILE} cannot be written" in caplog.text
    assert {path.name: saved_steps(path) for path in folder.newest_first()} == {"step_6": [], "step_4": [5]}


class Killed(BaseException):
    """Ends a run where it is, as a kill does."""


def killed(setting, where, calls):
    """Has a method of the policy raise `Killed` when it has been called so many times."""
    method = getattr(setting.policy, where)

    def counted(*args, **kwargs):
        nonlocal calls
        calls -= 1
        if calls == 0:
            raise Killed
        return method(*args, **kwargs)

    setattr(setting.policy, where, counted)


def trained(setting):
    """Returns a dict that gets the prompts and the age of the rollouts of each step that trains."""
    found, batches = {}, []
    train, step = setting.policy.train, setting.grpo.step

    def keeping_train(batch, *args, **kwargs):
        batches.append(batch)
        return train(batch, *args, **kwargs)

    def recorded_step(number, timer):
        metrics = step(number, timer)
        ids, mask = batches[-1]["input_ids"][::8], batches[-1]["token_mask"][::8]
        prompts = [row[: int(own.argmax())].tolist() for row, own in zip(ids, mask, strict=True)]
        found[number] = prompts, metrics.get(AGE, 0)
        return metrics

    setting.policy.train, setting.grpo.step = keeping_train, recorded_step
    return found


def test_a_run_that_is_killed_again_and_again_trains_on_each_prompt_once_in_order(folder, settings):
    chance, num_steps = random.Random(5), 30
    schedule = replace(UNVALIDATED, max_num_steps=num_steps, save_period=1)
    synchronous = Setting()
    wanted = trained(synchronous)
    synchronous.run(schedule)
    steps, num_reused = {}, 0
    for kills_left in range(12, -1, -1):
        max_age = chance.choice([0, 1, 3, 3])
        slow_s, train_s = chance.choice([(0.01, 0.0), (0.0, 0.01), (0.0, 0.0)])
        setting = ahead(max_age, slow_s=slow_s, train_s=train_s, last_step=num_steps)
        settings.append(setting)
        found = trained(setting)
        if kills_left:
            killed(setting, chance.choice(["train", "start_checkpoint", "finish_checkpoint"]), chance.randint(1, 3))
        writer = chance.choice([None, beside(setting)])
        folder.remove_unfinished()
        if newest := folder.newest_first():
            num_reused += len(saved_steps(newest[0]))
            resume(setting, folder, schedule, writer=writer, until_killed=kills_left > 0)
        else:
            with pytest.raises(Killed):
                setting.run(schedule, folder, writer=writer)
        assert all(age <= max_age for _, age in found.values())
        again = {step: prompts for step, (prompts, _) in found.items()}
        assert again == {step: wanted[step][0] for step in again}
        steps |= again
    assert sorted(steps) == list(range(1, num_steps + 1))
    assert num_reused > 5
