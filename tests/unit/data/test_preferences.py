import json

import datasets
import pytest

from nemo_offload_rl.data.batch import GlobalCounts
from nemo_offload_rl.data.datasets import load_hf_folder, load_jsonl
from nemo_offload_rl.data.pair_batch import check_pairs, num_left_out, pair_batch
from nemo_offload_rl.data.preferences import BinaryForm, PreferencePair, RankedForm
from nemo_offload_rl.data.problem import DataError, Message
from nemo_offload_rl.data.prompts import PromptedSamples, PromptFormat, PromptTexts
from nemo_offload_rl.data.tokenizer import arithmetic_tokenizer

BINARY = BinaryForm("prompt", "chosen", "rejected")
USER = {"role": "user", "content": "1+1"}
PAIR = PreferencePair((Message("user", "1+1"),), "2", "3")


def said(text):
    return {"role": "assistant", "content": text}


def binary(prompt="1+1", chosen="2", rejected="3"):
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def ranked(first=0, second=1, context=(USER,), answers=("2", "3")):
    ranks = zip((first, second), answers, strict=True)
    completions = [{"rank": rank, "completion": [said(answer)]} for rank, answer in ranks]
    return {"context": list(context), "completions": completions}


def write_rows(path, *rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


@pytest.mark.parametrize(
    "row",
    [
        binary(), binary(prompt=[USER]), binary(chosen=[said("2")], rejected=2 + 1),
        binary(chosen=[USER, said("2")], rejected=[USER, said("3")]),
        binary(prompt=[USER | {"name": None}], chosen=[USER, said("2")]), binary() | {"score": 0.5, "messages": None},
    ],
)  # fmt: skip
def test_a_prompt_and_two_answers_are_texts_or_messages(tmp_path, row):
    (pair,) = load_jsonl(write_rows(tmp_path / "a.jsonl", row), BINARY)
    assert pair == PAIR
    assert pair.where == f"{tmp_path}/a.jsonl:1"
    renamed = write_rows(tmp_path / "b.jsonl", {"q": "1+1", "good": "2", "bad": "3"})
    assert load_jsonl(renamed, BinaryForm("q", "good", "bad")) == [PAIR]


def test_a_prompt_may_be_a_conversation(tmp_path):
    context = [{"role": "system", "content": "Add."}, USER, said("2"), {"role": "user", "content": "And 2+2?"}]
    rows = [
        binary(context, "4", "5"),
        binary(context, [*context, said("4")], [said("5")]),
        ranked(context=context, answers=("4", "5")),
    ]
    messages = tuple(Message(**message) for message in context)
    expected = PreferencePair(messages, "4", "5")
    assert load_jsonl(write_rows(tmp_path / "a.jsonl", *rows[:2]), BINARY) == [expected] * 2
    assert load_jsonl(write_rows(tmp_path / "b.jsonl", rows[2]), RankedForm()) == [expected]


def test_of_two_completions_the_lower_rank_is_chosen(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", ranked(0, 1), ranked(7, -1, answers=("3", "2")), ranked(1, 2))
    assert load_jsonl(path, RankedForm()) == [PAIR] * 3


WRONG_LINES = [
    ({"prompt": "1+1", "chosen": "2"}, "a.jsonl:2 has no field 'rejected'; it has 'prompt', 'chosen'"),
    ('["1+1"]', "a.jsonl:2 is a list; each line must be one object with the fields 'prompt', 'chosen' and 'r"),
    (binary(chosen=None), "a.jsonl:2: the field 'chosen' must be a text or a list of messages, found None"),
    (binary(chosen=" \n"), "a.jsonl:2: the field 'chosen' is an empty answer"),
    (binary(rejected="2"), "a.jsonl:2: the chosen and the rejected answer are the same"),
    (binary(prompt=[]), "a.jsonl:2: the field 'prompt' is empty: its last message must be the user's"),
    (binary(prompt=[USER, said("2")]), "'prompt' ends with one of the role 'assistant'"),
    (binary(chosen=[said("2"), USER]), "'chosen' ends with one of the role 'user'"),
    (
        binary(chosen=[{"role": "user", "content": "1+2"}, said("2")]),
        "'chosen': message 1 is not that of the prompt: write the answer alone, or after exactly",
    ),
    (binary(prompt=["1+1"]), "'prompt', message 1, must be an object with 'role' and 'content', found '1.1'"),
    (binary(chosen=[USER, {"role": "asistant", "content": "2"}]), "message 2, has the role 'asistant': it must be"),
    (binary(chosen=[{"role": "assistant"}]), "message 1, has no field 'content'; it has 'role'"),
    (binary(chosen=[said("2") | {"tool_calls": [1]}]), "message 1, has 'tool_calls', but only 'role' and"),
    ('{"prompt": [{"role": "user", "role": "user", "content": "1"}]}', "a.jsonl:2 has the field 'role' twice"),
]


@pytest.mark.parametrize(("row", "message"), WRONG_LINES, ids=lambda value: str(value)[:60])
def test_a_wrong_line_is_named(tmp_path, row, message):
    path = write_rows(tmp_path / "a.jsonl", binary(), row)
    with pytest.raises(DataError, match=message) as error:
        load_jsonl(path, BINARY)
    assert len(str(error.value)) < 400


WRONG_RANKS = [
    (ranked(1, 1), "a.jsonl:2: both completions have the rank 1, but the lower rank tells which is chosen"),
    (ranked() | {"completions": ranked()["completions"][:1]}, "'completions' must be a list of two.* a list of 1"),
    (ranked() | {"completions": ["2", "3"]}, r"completions\[0\] must be an object with 'rank' and 'completion'"),
    (ranked(0, "1"), r"completions\[1\]: the field 'rank' must be an integer, found '1'"),
    (ranked(answers=("2", "")), r"a.jsonl:2: completions\[1\]: the field 'completion' is an empty answer"),
]


@pytest.mark.parametrize(("row", "message"), WRONG_RANKS, ids=lambda value: str(value)[:60])
def test_a_wrong_line_of_ranked_completions_is_named(tmp_path, row, message):
    path = write_rows(tmp_path / "a.jsonl", ranked(), row)
    with pytest.raises(DataError, match=message):
        load_jsonl(path, RankedForm())


def test_pairs_of_a_datasets_folder(tmp_path):
    datasets.Dataset.from_list([ranked(), ranked(1, 0, answers=("3", "2"))]).save_to_disk(tmp_path / "saved")
    pairs = load_hf_folder(tmp_path / "saved", None, RankedForm())
    assert list(pairs) == [PAIR] * 2
    rows = [binary([USER], [said("2")], [said("3")]), binary([USER], [said("2")], [said("2")])]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "train.parquet")
    pairs = load_hf_folder(tmp_path, "train", BINARY)
    assert pairs[0] == PAIR
    with pytest.raises(DataError, match=r"row 1: the chosen and the rejected answer are the same"):
        list(pairs)
    with pytest.raises(DataError, match="no column 'context'"):
        load_hf_folder(tmp_path, "train", RankedForm())


EOS, PAD = 12, 13
# A turn is its content between digits for its role: 1 system, 2 user, 3 assistant; `+` opens, `=` closes.
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ {'system': '1', 'user': '2', 'assistant': '3'}[m['role']] }}+{{ m['content'] }}="
    "{% endfor %}{% if add_generation_prompt %}3+{% endif %}"
)


def pair(prompt, chosen, rejected, where=""):
    return PreferencePair((Message("user", prompt),), chosen, rejected, where)


def plain(max_tokens=10, **settings):
    return PromptFormat(arithmetic_tokenizer(), max_tokens, **settings)


def templated(max_tokens=40, **settings):
    tokenizer = arithmetic_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return PromptFormat(tokenizer, max_tokens, **settings)


def test_rows_alternate_between_chosen_and_rejected():
    batch = pair_batch(plain(), [pair("1+1=", "2", "34"), pair("0=", "0", "9")])
    assert batch["input_ids"].tolist() == [
        [1, 10, 1, 11, 2, EOS, PAD],
        [1, 10, 1, 11, 3, 4, EOS],
        [0, 11, 0, EOS, PAD, PAD, PAD],
        [0, 11, 9, EOS, PAD, PAD, PAD],
    ]
    assert batch["input_lengths"].tolist() == [6, 7, 4, 4]
    assert batch["token_mask"].tolist() == [
        [0, 0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 1, 1, 1],
        [0, 0, 1, 1, 0, 0, 0],
        [0, 0, 1, 1, 0, 0, 0],
    ]
    assert batch["sample_mask"].tolist() == [1, 1, 1, 1]
    assert num_left_out(batch) == 0
    with pytest.raises(ValueError, match="no whole groups of 2 rows"):
        batch.slice(1, 3)


@pytest.mark.parametrize(("chosen", "rejected"), [("2", "12345"), ("12345", "2")])
def test_a_pair_with_an_answer_that_is_too_long_is_cut_and_left_out_whole(chosen, rejected):
    batch = pair_batch(plain(8), [pair("1+1=", "2", "3"), pair("1+1=", chosen, rejected)])
    assert batch["sample_mask"].tolist() == [1, 1, 0, 0]
    assert batch["input_lengths"].tolist() == [6, 6, 4 + min(4, len(chosen) + 1), 4 + min(4, len(rejected) + 1)]
    assert num_left_out(batch) == 1
    fits = pair_batch(plain(10), [pair("1+1=", chosen, rejected)])
    assert (fits["sample_mask"].tolist(), int(fits["input_lengths"].max())) == ([1, 1], 10)  # at the limit
    for limit in (1, 2, 5):
        assert 1 <= int(pair_batch(plain(limit), [pair("1+1=1+1=", "22222", "3")])["input_lengths"].max()) <= limit


@pytest.mark.parametrize(("chosen", "rejected"), [("2", ""), ("", "2"), ("", "")])
def test_a_pair_with_an_answer_without_tokens_is_left_out_whole(chosen, rejected):
    batch = pair_batch(plain(add_eos=False), [pair("1+1=", "2", "3"), pair("1+1=", chosen, rejected)])
    assert batch["sample_mask"].tolist() == [1, 1, 0, 0]
    assert (GlobalCounts.of(batch).valid_seqs, num_left_out(batch)) == (2, 1)
    assert pair_batch(plain(), [pair("1+1=", chosen, rejected)])["sample_mask"].tolist() == [1, 1]


GOOD = pair("1+1=", "2", "3", "a.jsonl:1")
TURNS = PreferencePair((Message("user", "1"), Message("assistant", "2"), Message("user", "4")), "5", "6", "a.jsonl:2")
SYSTEM = PreferencePair((Message("system", "9"), Message("user", "1")), "5", "6", "a.jsonl:2")
TOOL = PreferencePair((Message("user", "1"), Message("tool", "9")), "5", "6", "a.jsonl:2")


WRONG_PAIRS = [
    (plain, [pair("1+1=", "2", "two", "a.jsonl:2")], "the answer 'two' has 't', which the tokenizer has no token"),
    (plain, [pair("x=", "2", "3", "a.jsonl:2")], "the prompt 'x=' has 'x'"),
    (plain, [TURNS], "the prompt is a conversation of 3 messages, but the tokenizer"),
    (plain, [SYSTEM], r"the prompt '9\\n\\n1' has '\\n\\n', which"),
    (templated, PromptedSamples([SYSTEM], PromptTexts(system="9")), "a system message, and system_prompt_file"),
    (templated, [GOOD, TURNS, TOOL], r"policy\.tokenizer\.chat_template, .* cannot be rendered"),
]


@pytest.mark.parametrize(("make", "pairs", "message"), WRONG_PAIRS)
def test_pairs_are_checked_for_words_without_a_token_and_for_the_template(make, pairs, message):
    check_pairs(plain(), [GOOD])
    check_pairs(templated(), [GOOD, TURNS])
    with pytest.raises(DataError, match=rf"^a\.jsonl:2: .*{message}"):
        check_pairs(make(), pairs)
