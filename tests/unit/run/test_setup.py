import copy
import json
import re
from pathlib import Path

import datasets
import pytest

from nemo_offload_rl import config
from nemo_offload_rl.algorithms import sft
from nemo_offload_rl.algorithms.sft import example_batch
from nemo_offload_rl.config.named_files import PROMPT_FILES
from nemo_offload_rl.data.arithmetic import make_arithmetic
from nemo_offload_rl.data.loader import ProblemLoader
from nemo_offload_rl.data.preferences import PreferencePair
from nemo_offload_rl.data.problem import AnsweredContext, DataError, Message, Problem
from nemo_offload_rl.named_datasets import NAMED_DATASETS
from nemo_offload_rl.run import setup
from nemo_offload_rl.run.answer_sampling import check_words
from nemo_offload_rl.run.job import Job
from nemo_offload_rl.run.setup import check_rows, make_prompt_format, read_tokenizer
from nemo_offload_rl.run.train_loop import StopTarget


def resolved(data):
    """Returns a section `data` with the values of absent keys."""
    recipe = copy.deepcopy({"data": data})
    config.resolve_absent_keys(recipe)
    return recipe["data"]


def read_data(data, seed):
    return setup.read_data(resolved(data), seed)


def read_pairs(data, seed):
    return setup.read_pairs(resolved(data), seed)


CONFIGS = Path(__file__).parents[3] / "examples" / "configs"
POLICY = {"tokenizer": {"chat_template_kwargs": None}}


@pytest.mark.parametrize("name", ["grpo_tiny_cpu", "sft_tiny_cpu"])
def test_the_tiny_recipes_can_be_prepared(name):
    job = Job.prepare(config.load(CONFIGS / f"{name}.yaml"))
    assert len(job.preparation.tokenizer) == 14
    section = job.config[job.algorithm]
    assert job.preparation.schedule.max_num_steps == section["max_num_steps"]
    metric = section["stop_at_validation_metric"].replace("val:", "validation/")
    assert job.preparation.schedule.target == StopTarget(metric, section["stop_at_validation_threshold"])


def test_schedules_are_those_of_the_recipe():
    """As in NeMo-RL: min(max_num_steps, max_num_epochs x batches of an epoch), and metrics spelt as there."""

    def schedule(*overrides, recipe="grpo_tiny_cpu"):
        return Job.prepare(config.load(CONFIGS / f"{recipe}.yaml", overrides)).preparation.schedule

    epochs = ["grpo.max_num_steps=1000000", "grpo.batch_multiplier=1"]
    dynamic = ["grpo.use_dynamic_sampling=true", "grpo.batch_multiplier=2"]
    assert schedule(*epochs).num_steps == 5 * (9000 // 64)
    assert schedule(*epochs, "grpo.max_num_steps=40").num_steps == 40
    assert schedule(*epochs, "grpo.max_num_epochs=1").num_steps == 9000 // 64
    assert schedule(*epochs, *dynamic).num_steps == 5 * (9000 // 128)
    for metric in ("accuracy", "val:accuracy"):
        target = schedule(f"grpo.stop_at_validation_metric={metric}").target
        assert target == StopTarget("validation/accuracy", 0.9)
    long_rows = schedule(recipe="sft_long_rows_tiny_cpu")
    assert (long_rows.num_steps, long_rows.target) == (6, None)


def test_datasets_by_their_names(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"q": f"{n}", "a": n}) for n in range(3)))
    jsonl = {"dataset_name": "ResponseDataset", "data_path": str(path), "input_key": "q", "output_key": "a"}
    arithmetic = {"dataset_name": "arithmetic", "num_digits": 2, "num_problems": 5, "seed": 1}
    train, validation = read_data({"train": jsonl, "validation": arithmetic, "shuffle": False}, seed=0)
    assert train.next_batch(3) == [Problem(str(n), str(n)) for n in range(3)]
    assert len(validation) == 5
    assert read_data({"train": arithmetic, "validation": None, "shuffle": False}, seed=0)[1] == []
    assert read_data({"train": arithmetic, "shuffle": False}, seed=0)[1] == []


def test_pairs_by_the_names_of_their_datasets(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "1+1=", "good": "2", "bad": "3"}))
    keys = {"prompt_key": "prompt", "chosen_key": "good", "rejected_key": "bad"}
    binary = {"dataset_name": "BinaryPreferenceDataset", "data_path": str(path), "split": None} | keys
    expected = PreferencePair((Message("user", "1+1="),), "2", "3")
    arithmetic = {"dataset_name": "arithmetic", "num_digits": 2, "num_problems": 5, "seed": 1}
    train, validation = read_pairs({"train": binary, "validation": arithmetic, "shuffle": False}, seed=0)
    assert train.next_batch(1) == [expected]
    assert len(validation) == 5
    ranked = {"dataset_name": "PreferenceDataset", "data_path": str(tmp_path), "split": "train"}
    completions = [{"rank": rank, "completion": [{"role": "assistant", "content": f"{rank + 1}"}]} for rank in (2, 1)]
    rows = [{"context": [{"role": "user", "content": "1+1="}], "completions": completions}]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "train.parquet")
    train, validation = read_pairs({"train": ranked, "shuffle": False}, seed=0)
    assert train.next_batch(1) == [expected]
    assert validation == []
    with pytest.raises(DataError, match=r"data\.train\.split is 'train', but .*rows\.jsonl is not a folder"):
        read_pairs({"train": binary | {"split": "train"}, "shuffle": False}, seed=0)


@pytest.mark.parametrize(("name", "num_validation"), [("OpenMathInstruct-2", 2), ("gsm8k", 0)])
def test_named_datasets_of_a_folder_are_split_where_nemo_rl_does(name, num_validation, tmp_path):
    rows = [{"problem": f"{n}", "question": f"{n}", "expected_answer": "1", "answer": "#### 1"} for n in range(4)]
    (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    named = {"dataset_name": name, "split_validation_size": 0.5, "seed": 1} | NAMED_DATASETS[name].if_absent
    data = {"train": named, "validation": None, "shuffle": False, "dataset_root": str(tmp_path)}
    train, validation = read_data(data, seed=0)
    assert len(validation) == num_validation
    assert {problem.prompt for problem in [*train.problems, *validation]} == {"0", "1", "2", "3"}
    assert all(problem.answer == "1" for problem in train.problems)


def test_named_pairs_of_a_folder(tmp_path):
    context = [{"role": "user", "content": "1+1="}]
    row = {"context": context, "response1": "2", "response2": "3", "overall_preference": -1}
    (tmp_path / "HelpSteer3").mkdir()
    for split in ("train", "validation"):
        (tmp_path / "HelpSteer3" / f"{split}.jsonl").write_text(json.dumps(row))
    train, validation = ({"dataset_name": "HelpSteer3", "split": split} for split in ("train", "validation"))
    data = {"train": train, "validation": validation, "shuffle": False, "dataset_root": str(tmp_path)}
    loader, read = read_pairs(data, seed=0)
    assert [*loader.problems] == read == [PreferencePair((Message("user", "1+1="),), "2", "3")]


def test_chat_templates_mean_what_they_mean_in_nemo_rl(tmp_path):
    own = read_tokenizer({"name": "arithmetic", "chat_template": "{{ messages[0]['content'] }}="})
    own.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "mine.jinja").write_text("{{ messages[0]['content'] }}+")
    messages = [{"role": role, "content": text} for role, text in (("system", "1+"), ("user", "2"), ("assistant", "="))]

    def rendered(**template):
        tokenizer = read_tokenizer({"name": str(tmp_path / "tokenizer"), **template})
        return tokenizer.apply_chat_template(messages, tokenize=False)

    values = ("default", "Default", str(tmp_path / "mine.jinja"), "{{ messages | length }}", None)
    assert [rendered(chat_template=value) for value in values] == ["1+=", "1+=", "1++", "3", "1+2="]
    assert rendered() == "1+="
    assert read_tokenizer({"name": "arithmetic", "chat_template": "default"}).chat_template is None  # it has none
    (tmp_path / "bad.jinja").write_bytes(b"\xff{{ messages }}")
    with pytest.raises(DataError, match=r"^policy\.tokenizer\.chat_template: .*bad\.jinja cannot be read: 'utf-8' c"):
        read_tokenizer({"name": "arithmetic", "chat_template": str(tmp_path / "bad.jinja")})


def test_a_dataset_has_its_own_prompt_files_or_the_default_ones(tmp_path):
    for name, content in (("prompt", "1+{}="), ("system", "9"), ("own", "2+{}=")):
        (tmp_path / f"{name}.txt").write_text(content)
    arithmetic = {"dataset_name": "arithmetic", "num_digits": 1, "num_problems": 1, "seed": 0}
    default = dict(zip(PROMPT_FILES, (str(tmp_path / "prompt.txt"), str(tmp_path / "system.txt")), strict=True))
    own = {"prompt_file": str(tmp_path / "own.txt"), "system_prompt_file": None}
    validation = [arithmetic | own, arithmetic | {"prompt_file": None}, arithmetic]
    data = {"train": arithmetic | {"num_problems": 3}, "validation": validation, "shuffle": False, "default": default}
    train, read = read_data(data, seed=0)
    asked = make_arithmetic("validation", 1, 1, seed=0)[0].prompt
    whole = [Message("system", "9"), Message("user", f"1+{asked}=")]
    own_prompt, own_system = [Message("user", f"2+{asked}=")], [Message("system", "9"), Message("user", asked)]
    assert [list(problem.context) for problem in read] == [own_prompt, own_system, whole]
    problems = make_arithmetic("train", 1, 3, seed=0)
    assert [problem.context[1].content for problem in train.next_batch(3)] == [f"1+{p.prompt}=" for p in problems]
    [plain] = read_data(data | {"validation": validation[2:], "default": {}}, seed=0)[1]
    assert plain.prompt == asked
    tokenizer_config = {"name": "arithmetic", "chat_template_kwargs": {"opened": "3"}}
    tokenizer = read_tokenizer(tokenizer_config)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}+{% endfor %}{{ opened }}"
    policy = {"tokenizer": tokenizer_config, "hf_config": {"model_type": "qwen3", "vocab_size": 14}}
    prompts = make_prompt_format({"max_input_seq_length": 20}, tokenizer, policy)
    assert tokenizer.decode(prompts.prompts(read[2:])[0].prompt_ids) == f"9+1+{asked}=+3"
    with pytest.raises(DataError, match=r"^data\.validation\.0\.prompt_file: .*absent\.txt cannot be read"):
        read_data(data | {"validation": [arithmetic | {"prompt_file": str(tmp_path / "absent.txt")}]}, seed=0)


@pytest.mark.parametrize("recipe", ["grpo", "sft"])
def test_fewer_problems_than_a_batch_are_refused_before_anything_starts(recipe):
    key = "grpo.num_prompts_per_step" if recipe == "grpo" else "policy.train_global_batch_size"
    with pytest.raises(DataError, match=rf"{re.escape(key)} is 6, but the training set .* only 5"):
        _prepared(recipe, "data.train.num_problems=5", "policy.train_micro_batch_size=1", f"{key}=6")


def test_a_dataset_that_is_checked_in_part_is_named():
    assert check_rows(len, range(5), range(0)) == []
    [note] = check_rows(lambda rows: min(len(rows), 1000), range(20_000), range(1000))
    assert note.startswith("data.train: the first 1,000 of 20,000 rows were checked, for 10 s;")


@pytest.mark.parametrize(
    ("recipe", "role", "message"),
    [
        ("grpo", "train", r"rows\.jsonl:2: the prompt 'x\+3=' has 'x'"),
        ("grpo", "validation", r"rows\.jsonl:2: the prompt 'x\+3=' has 'x'"),
        ("sft", "train", r"rows\.jsonl:1: the answer 'two' has 't'"),
    ],
)
def test_words_without_a_token_are_refused_before_anything_starts(recipe, role, message, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"q": "1+1=", "a": "two"}\n{"q": "x+3=", "a": "6"}\n')
    dataset = f"{{_override_: true, dataset_name: ResponseDataset, data_path: '{path}', input_key: q, output_key: a}}"
    overrides = [f"data.{role}={dataset}", "policy.train_micro_batch_size=1"]
    if role == "train":
        overrides += ["grpo.num_prompts_per_step=2"] if recipe == "grpo" else ["policy.train_global_batch_size=2"]
    overrides += ["~warm_start"] if recipe == "grpo" else []
    validated = config.load(CONFIGS / f"{recipe}_tiny_cpu.yaml", overrides)
    with pytest.raises(DataError, match=message):
        Job.prepare(validated)


def _prepared(recipe, *overrides):
    few = ["data.train.num_problems=128", "data.validation.num_problems=8"]
    few += ["~warm_start"] if recipe != "sft" else []
    return Job.prepare(config.load(CONFIGS / f"{recipe}_tiny_cpu.yaml", [*few, *overrides])).preparation


@pytest.mark.parametrize(("recipe", "tp"), [("grpo", 1), ("grpo", 2), ("sft", 2), ("dpo", 1)])
def test_padding_outside_the_models_vocabulary_is_id_0(recipe, tp):
    """The arithmetic tokenizer's end has id 12, its padding 13; tensor parallelism would embed 13 as zeros."""
    parallel = [f"policy.megatron_cfg.tensor_model_parallel_size={tp}", f"cluster.gpus_per_node={tp}"]
    [note] = _prepared(recipe, "policy.hf_config.vocab_size=13", *parallel).notes
    assert "'<pad>' has id 13, outside the model's vocabulary (0 to 12)" in note
    assert _prepared(recipe, *parallel).notes == []
    with pytest.raises(DataError, match=r"end of sequence the token '<eos>', whose id 12 is outside .* \(0 to 11\)"):
        _prepared(recipe, "policy.hf_config.vocab_size=12", *parallel)


FIRST_SIX = ["grpo.max_val_samples=7", "grpo.val_batch_size=3"]
OF_BATCHES = ["val_batches=2", "val_global_batch_size=3", "val_micro_batch_size=3"]


@pytest.mark.parametrize(
    ("recipe", "key", "sizes"),
    [
        ("grpo", "grpo.max_val_samples", FIRST_SIX),
        ("sft", "sft.val_batches", [f"sft.{size}" for size in OF_BATCHES]),
        ("dpo", "dpo.val_batches", [f"dpo.{size}" for size in OF_BATCHES]),
    ],
)
def test_a_validation_that_does_not_reach_its_last_set_says_so(recipe, key, sizes):
    two_sets = ["data.train.num_problems=200", "data.train.split_validation_size=10"]  # and eight of data.validation
    [note] = _prepared(recipe, *sizes, *two_sets).notes
    assert note == (
        "a validation measures the first 6 of 18 samples of 2 sets, one after another, so that the last may not be "
        f"measured at all; {key} says how many"
    )
    assert _prepared(recipe, *two_sets).notes == _prepared(recipe, *sizes).notes == []


@pytest.mark.parametrize(("final", "number"), [("true", 3), ("false", 5)])
def test_sft_trains_and_validates_on_the_final_message_alone_if_the_recipe_says_so(final, number, monkeypatch):
    batches = []

    class Group:
        def __init__(self, *args, **kwargs):
            pass

        def wait_until_ready(self):
            pass

        def evaluate(self, batch, loss_fn, mbs):
            batches.append(batch)
            return {"loss": 0.0, "metrics": {"answer_probability": 0.0}}

    monkeypatch.setattr("nemo_offload_rl.worker.group.PolicyWorkerGroup", Group)
    context = (Message("user", "1"), Message("assistant", "12"), Message("user", "3"))
    conversation = AnsweredContext(context, "45", trains_all_answers=True)
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    monkeypatch.setattr(sft, "read_data", lambda *args: (ProblemLoader([conversation] * 128, True, 1), [conversation]))
    prepared = _prepared("sft", f"sft.only_unmask_final={final}", f'+policy.tokenizer.chat_template="{template}"')
    algorithm = prepared.build(config.load(CONFIGS / "sft_tiny_cpu.yaml").config["policy"], cluster=None)
    algorithm.validate(0)
    assert batches[0]["token_mask"].sum() == number  # the last answer's two tokens, and the end of sequence


def test_batches_have_no_token_outside_the_vocabulary():
    problems = [Problem("1+1=", "2"), Problem("1=", "1")]
    tokenizer = read_tokenizer({"name": "arithmetic"})
    rows = {}
    for vocab_size in (13, 14, 15):
        policy = POLICY | {"hf_config": {"model_type": "qwen3", "vocab_size": vocab_size}}
        examples = make_prompt_format({"max_input_seq_length": 20}, tokenizer, policy)
        rows[vocab_size] = example_batch(examples, problems)["input_ids"][1].tolist()
    assert rows == {13: [1, 11, 1, 12, 0, 0], 14: [1, 11, 1, 12, 13, 13], 15: [1, 11, 1, 12, 13, 13]}
    assert tokenizer.pad_token == "<pad>"  # it is saved with the model as it came


def test_added_tokens_outside_the_vocabulary_may_not_occur_in_texts(tmp_path):
    tokenizer = read_tokenizer({"name": "arithmetic"})
    tokenizer.add_tokens(["<think>", "<bos>"], special_tokens=True)  # ids 14 and 15
    tokenizer.bos_token = "<bos>"
    tokenizer.save_pretrained(tmp_path)
    own = [f"policy.tokenizer.name={tmp_path}", "policy.megatron_cfg.tensor_model_parallel_size=1"]
    assert _prepared("grpo", *own).notes == []  # nothing uses them
    outside = r"the token '<think>', whose id 14 is outside the model's vocabulary \(0 to 13\)"
    template = "++policy.tokenizer.chat_template='{{ messages[0].content }}<think>'"
    with pytest.raises(DataError, match=f"the text '[0-9+]+=<think>' has {outside}"):
        _prepared("grpo", *own, template)
    assert _prepared("grpo", *own, template, "policy.hf_config.vocab_size=15").notes == []
    with pytest.raises(DataError, match=f"^policy.generation.bad_words has '<think>' with {outside}"):
        _prepared("grpo", *own, "++policy.generation.bad_words=['<think>']")
    with pytest.raises(DataError, match=r"^policy.tokenizer.name has as its beginning of sequence the token '<bos>'"):
        _prepared("sft", *own, "data.add_bos=true")
    policy = POLICY | {"hf_config": {"model_type": "qwen3", "vocab_size": 14}}
    examples = make_prompt_format({"max_input_seq_length": 20}, tokenizer, policy)
    with pytest.raises(DataError, match=f"the text '<think>2<eos>' has {outside}"):
        examples.examples([Problem("1+1=", "2"), Problem("1+1=", "<think>2")])


def test_stop_tokens_are_of_the_models_folder(tmp_path):
    """As with models of the hub, the recipe does not say the vocabulary."""
    sizes = {"model_type": "qwen3", "vocab_size": 13, "num_attention_heads": 2, "hidden_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    own = POLICY | {"model_name": str(tmp_path), "hf_config_overrides": {}}
    prompts = make_prompt_format({"max_input_seq_length": 20}, read_tokenizer({"name": "arithmetic"}), own)
    with pytest.raises(DataError, match=r"^policy\.generation\.stop_token_ids has the token '<pad>', whose id 13 is"):
        check_words({"stop_token_ids": [12, 13]}, prompts.tokenizer, prompts.outside)
    unreadable = own | {"model_name": str(tmp_path / "absent")}
    assert make_prompt_format({"max_input_seq_length": 20}, prompts.tokenizer, unreadable).pad_token_id == 13
