import pytest

from nemo_offload_rl.data.arithmetic import make_arithmetic_pairs
from nemo_offload_rl.data.batch import GlobalCounts
from nemo_offload_rl.data.loader import DataPosition, ProblemLoader
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


@pytest.mark.parametrize("opened", [True, False])
def test_only_the_last_turn_is_trained_and_the_row_is_what_the_template_renders(opened):
    answer_format = templated(add_generation_prompt=opened)
    turns = [("user", "1"), ("assistant", "2"), ("user", "4")]
    context = tuple(Message(role, content) for role, content in turns)
    batch = pair_batch(
        answer_format, PromptedSamples([PreferencePair(context, "5", "67")], PromptTexts("{}0", "99"))[:]
    )
    tokenizer = answer_format.tokenizer
    for row, answer in enumerate(("5", "67")):
        whole = [("system", "99"), ("user", "10"), *turns[1:], ("assistant", answer)]
        rendered = tokenizer.apply_chat_template(
            [{"role": role, "content": content} for role, content in whole], tokenize=False
        )
        ids = batch["input_ids"][row][: batch["input_lengths"][row]]
        assert tokenizer.decode(ids) == f"{rendered}<eos>"
        trained = batch["token_mask"][row] > 0
        assert tokenizer.decode(batch["input_ids"][row][trained]) == f"{'' if opened else '3+'}{answer}=<eos>"


@pytest.mark.parametrize(("chosen", "rejected"), [("2", "12345"), ("12345", "2")])
def test_a_pair_with_an_answer_that_is_too_long_is_cut_and_left_out_whole(chosen, rejected):
    batch = pair_batch(plain(8), [pair("1+1=", "2", "3"), pair("1+1=", chosen, rejected)])
    assert batch["sample_mask"].tolist() == [1, 1, 0, 0]
    assert batch["input_lengths"].tolist() == [6, 6, 4 + min(4, len(chosen) + 1), 4 + min(4, len(rejected) + 1)]
    assert num_left_out(batch) == 1
    fits = pair_batch(plain(10), [pair("1+1=", chosen, rejected)])
    assert (fits["sample_mask"].tolist(), int(fits["input_lengths"].max())) == ([1, 1], 10)  # at the limit


@pytest.mark.parametrize(("chosen", "rejected"), [("2", ""), ("", "2"), ("", "")])
def test_a_pair_with_an_answer_without_tokens_is_left_out_whole(chosen, rejected):
    batch = pair_batch(plain(add_eos=False), [pair("1+1=", "2", "3"), pair("1+1=", chosen, rejected)])
    assert batch["sample_mask"].tolist() == [1, 1, 0, 0]
    assert GlobalCounts.of(batch).valid_seqs == 2
    assert num_left_out(batch) == 1
    assert pair_batch(plain(), [pair("1+1=", chosen, rejected)])["sample_mask"].tolist() == [1, 1]


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_no_row_is_longer_than_the_limit(max_tokens):
    batch = pair_batch(plain(max_tokens), [pair("1+1=1+1=", "22222", "3")])
    assert 1 <= int(batch["input_lengths"].max()) <= max_tokens
    assert num_left_out(batch) == 1


def test_pairs_are_checked_for_words_without_a_token_and_for_the_template():
    good = pair("1+1=", "2", "3", "a.jsonl:1")
    check_pairs(plain(), [good])
    with pytest.raises(DataError, match=r"^a\.jsonl:2: the answer 'two' has 't', which the tokenizer has no token"):
        check_pairs(plain(), [good, pair("1+1=", "2", "two", "a.jsonl:2")])
    with pytest.raises(DataError, match=r"^a\.jsonl:3: the prompt 'x=' has 'x'"):
        check_pairs(plain(), [good, pair("x=", "2", "3", "a.jsonl:3")])
    turns = (Message("user", "1"), Message("assistant", "2"), Message("user", "4"))
    conversation = PreferencePair(turns, "5", "6", "a.jsonl:2")
    check_pairs(templated(), [good, conversation])
    with pytest.raises(DataError, match=r"^a\.jsonl:2: the prompt is a conversation of 3 messages, but the tokenizer"):
        check_pairs(plain(), [good, conversation])
    system = PreferencePair((Message("system", "9"), Message("user", "1")), "5", "6", "a.jsonl:2")
    with pytest.raises(DataError, match=r"^a\.jsonl:2: the prompt '9\\n\\n1' has '\\n\\n', which"):
        check_pairs(plain(), [system])
    with pytest.raises(DataError, match=r"^a\.jsonl:2: the prompt has a system message, and system_prompt_file"):
        check_pairs(templated(), PromptedSamples([good, system], PromptTexts(system="9")))
    tool = PreferencePair((Message("user", "1"), Message("tool", "9")), "5", "6", "a.jsonl:4")
    with pytest.raises(DataError, match=r"^a\.jsonl:4: policy\.tokenizer\.chat_template, .* cannot be rendered"):
        check_pairs(templated(), [good, conversation, tool])


def test_the_loader_goes_on_with_pairs_where_it_was():
    pairs = make_arithmetic_pairs("train", 2, 10, seed=1)
    whole = ProblemLoader(pairs, shuffle=True, seed=5, noun="pairs")
    batches = [whole.next_batch(4) for _ in range(5)]
    resumed = ProblemLoader(pairs, shuffle=True, seed=5, noun="pairs")
    resumed.position = DataPosition(1, 4)
    assert [resumed.next_batch(4) for _ in range(2)] == batches[3:]
    with pytest.raises(
        DataError, match=r"policy\.train_global_batch_size is 11, but the training set .* only 10 pairs"
    ):
        whole.require(11, "policy.train_global_batch_size")
