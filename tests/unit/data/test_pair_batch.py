import pytest

from nemo_offload_rl.data.batch import GlobalCounts
from nemo_offload_rl.data.pair_batch import check_pairs, num_left_out, pair_batch
from nemo_offload_rl.data.preferences import PreferencePair
from nemo_offload_rl.data.problem import DataError, Message
from nemo_offload_rl.data.prompts import PromptedSamples, PromptFormat, PromptTexts
from nemo_offload_rl.data.tokenizer import arithmetic_tokenizer

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


@pytest.mark.parametrize(
    ("make", "pairs", "message"),
    [
        (plain, [pair("1+1=", "2", "two", "a.jsonl:2")], "the answer 'two' has 't', which the tokenizer has no token"),
        (plain, [pair("x=", "2", "3", "a.jsonl:2")], "the prompt 'x=' has 'x'"),
        (plain, [TURNS], "the prompt is a conversation of 3 messages, but the tokenizer"),
        (plain, [SYSTEM], r"the prompt '9\\n\\n1' has '\\n\\n', which"),
        (templated, PromptedSamples([SYSTEM], PromptTexts(system="9")), "a system message, and system_prompt_file"),
        (templated, [GOOD, TURNS, TOOL], r"policy\.tokenizer\.chat_template, .* cannot be rendered"),
    ],
)
def test_pairs_are_checked_for_words_without_a_token_and_for_the_template(make, pairs, message):
    check_pairs(plain(), [GOOD])
    check_pairs(templated(), [GOOD, TURNS])
    with pytest.raises(DataError, match=rf"^a\.jsonl:2: .*{message}"):
        check_pairs(make(), pairs)
