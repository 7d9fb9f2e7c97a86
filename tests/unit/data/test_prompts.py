from dataclasses import replace
from itertools import chain
from pathlib import Path

import datasets
import numpy as np
import pytest
from tokenizers import ByteLevelBPETokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from nemo_offload_rl.algorithms.sft import example_batch
from nemo_offload_rl.data.datasets import ProblemForm, load_hf_folder
from nemo_offload_rl.data.pair_batch import pair_batch
from nemo_offload_rl.data.preferences import PreferencePair
from nemo_offload_rl.data.problem import AnsweredContext, DataError, Message, Problem
from nemo_offload_rl.data.prompts import PromptedSamples, PromptFormat, PromptTexts, read_prompt_file, read_text_file
from nemo_offload_rl.data.tokenizer import arithmetic_tokenizer
from tests.unit.data.test_preferences import EOS, TEMPLATE

# Qwen 2.5's template, without its tools.
CHATML = (
    "{% if messages[0]['role'] == 'system' %}{{ '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{% if m['role'] != 'system' %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def bpe_tokenizer(template: str = CHATML) -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE tokenizer whose tokens are the bytes, a few merges, and ChatML's special tokens."""
    backend = ByteLevelBPETokenizer()
    corpus = ["the user asks the assistant\n\nthe sum is 12\n\n"] * 4
    backend.train_from_iterator(corpus, vocab_size=290, show_progress=False)
    names = {"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend._tokenizer, **names)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.chat_template = template
    return tokenizer


def text(ids: list[int]) -> str:
    return arithmetic_tokenizer().decode(ids)


def chat_tokenizer():
    tokenizer = arithmetic_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def test_an_example_ends_in_the_end_of_sequence():
    (prompt,) = PromptFormat(arithmetic_tokenizer(), max_tokens=10).prompts([Problem("07+85=", "092")])
    assert (prompt.answer_ids, prompt.fits) == ([], True)
    (example,) = PromptFormat(arithmetic_tokenizer(), max_tokens=11).examples([Problem("07+85=", "092")])
    assert example.prompt_ids == prompt.prompt_ids == [0, 7, 10, 8, 5, 11]
    assert example.answer_ids == [0, 9, 2, EOS]
    assert example.fits
    (bare,) = PromptFormat(arithmetic_tokenizer(), 10, add_eos=False).examples([Problem("07+85=", "092")])
    assert bare.answer_ids == [0, 9, 2]


@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize("bos", [None, "0"])
def test_the_assistants_earlier_messages_are_trained_where_a_conversation_says_so(opened, bos):
    tokenizer = chat_tokenizer()
    tokenizer.bos_token = bos
    context = tuple(Message(*turn) for turn in (("user", "4"), ("assistant", "5"), ("user", "6")))
    conversation = AnsweredContext(context, "7", trains_all_answers=True)
    example_format = PromptFormat(tokenizer, 30, add_bos=True, add_generation_prompt=opened)
    (example,) = example_format.examples([conversation])
    trained = [text(example.prompt_ids[part.start : part.stop]) for part in example.trained_in_prompt]
    begin, header = bos or "", "3+"
    assert text(example.prompt_ids) == f"{begin}2+4=3+5=2+6=" + (header if opened else "")
    assert trained == ["5=" if opened else "3+5="]
    assert text(example.answer_ids) == ("" if opened else header) + "7=<eos>"
    batch = example_batch(example_format, [conversation, Problem("4", "5")])
    assert text(batch["input_ids"][0][batch["token_mask"][0] > 0].tolist()) == trained[0] + text(example.answer_ids)
    final = example_batch(example_format, [conversation, Problem("4", "5")], only_unmask_final=True)
    assert final["input_ids"].equal(batch["input_ids"])  # messages are still tokenized one by one
    assert text(final["input_ids"][0][final["token_mask"][0] > 0].tolist()) == text(example.answer_ids)
    assert final["token_mask"][1].equal(batch["token_mask"][1])
    (last_alone,) = example_format.examples([AnsweredContext(context, "7")])
    assert (last_alone.prompt_ids, last_alone.trained_in_prompt) == (example.prompt_ids, ())
    (cut,) = PromptFormat(tokenizer, 8, add_generation_prompt=opened).examples([conversation])
    assert (cut.fits, cut.trained_in_prompt) == (False, ())


@pytest.mark.parametrize("opened", [True, False])
def test_chatml_trains_the_newline_after_the_end_of_a_turn(opened):
    # The chunks that NeMo-RL tokenizes one by one: each message with what the template adds for it.
    header = "<|im_start|>assistant\n"
    in_prompt, in_answer = (header, "") if opened else ("", header)
    user = ["<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\n7+5?<|im_end|>\n" + in_prompt]
    first, second = (in_answer + f"the sum is {answer}<|im_end|>\n" for answer in ("12", "13\n"))
    then = "<|im_start|>user\nthe user asks<|im_end|>\n" + in_prompt
    tokenizer = bpe_tokenizer()
    newline = tokenizer("\n")["input_ids"]
    assert len(newline) == 1 and tokenizer("13\n\n")["input_ids"][-1:] != newline  # "\n\n" is one token

    def row(*chunks: tuple[str, int]) -> tuple[list[int], list[int]]:
        ids = [tokenizer(chunk)["input_ids"] for chunk, _ in chunks]
        trained = [[mask] * len(part) for part, (_, mask) in zip(ids, chunks, strict=True)]
        return list(chain(*ids)), list(chain(*trained))

    context = (Message("user", "7+5?"), Message("assistant", "the sum is 12"), Message("user", "the user asks"))
    whole = AnsweredContext(context, "the sum is 13\n", trains_all_answers=True)
    chat_format = PromptFormat(tokenizer, 400, add_generation_prompt=opened)
    batch = example_batch(chat_format, [Problem("7+5?", "the sum is 12"), whole])
    pairs = pair_batch(chat_format, [PreferencePair(context, "the sum is 12", "the sum is 13\n")])
    for found, number, (ids, trained) in [
        (batch, 0, row((*user, 0), (first, 1))),
        (batch, 1, row((*user, 0), (first, 1), (then, 0), (second, 1))),
        (pairs, 0, row((*user, 0), (first, 0), (then, 0), (first, 1))),  # only the last turn is trained
        (pairs, 1, row((*user, 0), (first, 0), (then, 0), (second, 1))),
    ]:
        length = int(found["input_lengths"][number])
        assert found["input_ids"][number, :length].tolist() == ids
        assert found["token_mask"][number].tolist() == trained + [0.0] * (found["token_mask"].shape[1] - length)
        assert ids[-2:] == [tokenizer.eos_token_id, *newline]


# A conversation, and the parts that NeMo-RL tokenizes one by one where data.add_generation_prompt is true: it opens the
# assistant's turn behind messages of the user and of tools alone. (2=user, 3=assistant, 1=system in the template.)
OTHER_ORDERS = {
    "user assistant assistant user": (["2+4=3+", "5=", "3+6=", "2+7=3+"], [False, True, True, False]),
    "system assistant user": (["1+4=", "3+5=", "2+6=3+"], [False, True, False]),
    "assistant user": (["3+4=", "2+5=3+"], [True, False]),
}


@pytest.mark.parametrize("roles", OTHER_ORDERS)
def test_turns_in_any_order_are_trained_as_in_nemo_rl(roles):
    pieces, trained = OTHER_ORDERS[roles]
    context = tuple(Message(role, str(number)) for number, role in enumerate(roles.split(), 4))
    chat_format = PromptFormat(chat_tokenizer(), 40, add_generation_prompt=True)
    conversation = AnsweredContext(context, "9", "a.jsonl:1", trains_all_answers=True)
    (example,) = chat_format.examples([conversation])
    assert text(example.prompt_ids) == "".join(pieces)
    found = [text(example.prompt_ids[part.start : part.stop]) for part in example.trained_in_prompt]
    assert found == [piece for piece, is_trained in zip(pieces, trained, strict=True) if is_trained]
    assert text(example.answer_ids) == "9=<eos>"
    (prompt,) = chat_format.prompts([conversation])
    assert prompt.prompt_ids == example.prompt_ids or roles == "user assistant assistant user"


def test_a_conversation_without_a_prompt_is_trained_but_not_answered():
    chat_format = PromptFormat(chat_tokenizer(), 40)
    alone = AnsweredContext((), "9", "a.jsonl:1", trains_all_answers=True)
    (example,) = chat_format.examples([alone])
    assert (example.prompt_ids, text(example.answer_ids)) == ([], "3+9=<eos>")
    with pytest.raises(DataError, match=r"a\.jsonl:1: the prompt is empty"):
        chat_format.prompts([alone])


@pytest.mark.parametrize(
    ("end", "add_eos", "rendered"),
    [
        ("", True, "13<|im_end|>"), ("\n", True, "13\n<|im_end|>"), ("<|im_end|>", True, "13<|im_end|>"),
        ("<|im_end|>\n\n", True, "13<|im_end|>\n\n"), ("<|im_end|> ", True, "13<|im_end|> <|im_end|>"),
        ("\n", False, "13\n"),
    ],
)  # fmt: skip
def test_an_end_of_sequence_is_added_unless_only_newlines_follow_one(end, add_eos, rendered):
    turns = "{% for m in messages %}{{ m['content'] + (END if m['role'] == 'assistant' else ':') }}{% endfor %}"
    tokenizer = bpe_tokenizer(turns.replace("END", repr(end)))
    answer_format = PromptFormat(tokenizer, 30, add_eos=add_eos, add_generation_prompt=False)
    (example,) = answer_format.examples([Problem("7+6", "13")])
    assert example.answer_ids == tokenizer(rendered)["input_ids"]
    tokenizer.chat_template = None
    (plain,) = answer_format.examples([Problem("7+6", f"13{end}")])
    assert plain.answer_ids == example.answer_ids


def test_a_template_that_hides_the_answer_is_refused():
    tokenizer = arithmetic_tokenizer()
    tokenizer.chat_template = "{{ messages | length }}+{{ messages[0]['content'] }}"
    with pytest.raises(DataError, match="does not start with the same conversation"):
        PromptFormat(tokenizer, 30).examples([Problem("45", "6")])


def test_a_begin_of_sequence_is_put_first_once():
    tokenizer = arithmetic_tokenizer()
    tokenizer.bos_token = "="
    prompts = PromptFormat(tokenizer, 9, add_bos=True).prompts([Problem("1", ""), Problem("=1", "")])
    assert [prompt.prompt_ids for prompt in prompts] == [[11, 1], [11, 1]]


def test_long_prompts_lose_their_beginning_and_say_so():
    short, full, long = PromptFormat(arithmetic_tokenizer(), 4).prompts([Problem("12345"[:n], "") for n in (3, 4, 5)])
    assert (short.prompt_ids, short.fits) == ([1, 2, 3], True)
    assert (full.prompt_ids, full.fits) == ([1, 2, 3, 4], False)  # NeMo-RL masks `length >= max_seq_length`
    assert (long.prompt_ids, long.fits) == ([2, 3, 4, 5], False)


def test_long_examples_are_cut_and_say_so():
    problem = Problem("123", "45")
    (example,) = PromptFormat(arithmetic_tokenizer(), 4).examples([problem])
    assert (example.prompt_ids, example.answer_ids, example.fits) == ([1, 2, 3], [4], False)
    for limit, may_reach_limit, fits in ((6, True, True), (6, False, False), (7, False, True)):
        (example,) = PromptFormat(arithmetic_tokenizer(), limit).examples([problem], may_reach_limit=may_reach_limit)
        assert example.fits is fits


def test_a_word_without_a_token_is_named_with_its_line():
    plain = PromptFormat(arithmetic_tokenizer(), 30)
    rows = [Problem("1+1=", "2<eos>", "a.jsonl:1"), Problem("1+1=", "2 apples", "a.jsonl:2")]
    plain.check_rows(rows, with_answers=False)
    with pytest.raises(DataError, match=r"^a\.jsonl:2: the answer '2 apples' has ' ', which the tokenizer has"):
        plain.check_rows(rows, with_answers=True)
    with pytest.raises(DataError, match=r"^a\.jsonl:3: the prompt 'x\+1=' has 'x'"):
        plain.check_rows([*rows, Problem("x+1=", "2", "a.jsonl:3")], with_answers=False)
    asked = PromptedSamples(rows, PromptTexts("What is {}"))
    with pytest.raises(DataError, match=r"^a\.jsonl:1: the prompt 'What is 1\+1=' has 'W'.*that of prompt files"):
        plain.check_rows(asked, with_answers=False)


def open_tokenizer():
    tokenizer = arithmetic_tokenizer()
    vocabulary = tokenizer.get_vocab()
    tokenizer.backend_tokenizer.model = WordLevel({**vocabulary, "<unk>": len(vocabulary)}, unk_token="<unk>")
    return tokenizer


def test_every_row_is_read_and_rendered_before_a_run(tmp_path):
    rows = [{"q": f"{number}", "a": None if number == 1500 else "1"} for number in range(1501)]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "train.parquet")
    plain = PromptFormat(open_tokenizer(), 30)
    assert plain.check_rows([Problem("x", "y", "a.jsonl:1")], with_answers=True) == 1  # it takes every text
    with pytest.raises(DataError, match=r"row 1500: the field 'a' must be a text or a number, found None"):
        plain.check_rows(load_hf_folder(tmp_path, "train", ProblemForm("q", "a")), with_answers=False)

    tokenizer = open_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
        "{{ m['content'] + ('!' if loop.last and m['content'] == '7' else '') }}{% endfor %}"
    )
    templated = PromptFormat(tokenizer, 30)
    user, tool = Message("user", "1"), Message("tool", "2")
    good, bad = AnsweredContext((user,), "1", "a.jsonl:1"), AnsweredContext((user, tool), "1", "a.jsonl:2")
    with pytest.raises(DataError, match=r"^a\.jsonl:2: policy\.tokenizer\.chat_template.*cannot be rendered.*no tools"):
        templated.check_rows([good, bad], with_answers=False)
    seven = (Message("user", "7"), Message("assistant", "2"), user)  # "7!" alone, "72..." with its answer
    earlier = AnsweredContext(seven, "3", "a.jsonl:3", trains_all_answers=True)
    assert templated.check_rows([good, replace(earlier, trains_all_answers=False)], with_answers=True) == 2
    with pytest.raises(DataError, match=r"^a\.jsonl:3: .*the answer cannot be told apart"):
        templated.check_rows([good, earlier], with_answers=True)


def test_rows_are_checked_for_a_limited_time():
    read = []

    def rows():
        for number in range(5):
            read.append(number)
            yield Problem(f"{number}", "1")

    assert PromptFormat(open_tokenizer(), 30).check_rows(rows(), with_answers=True, limit_s=0) == 1
    assert read == [0]


@pytest.mark.parametrize("prompt", ["", " \n"])
def test_an_empty_prompt_is_refused_with_its_row_where_the_model_is_to_answer_it(prompt):
    chat_format = PromptFormat(bpe_tokenizer(), 30)
    rows = [Problem("7+5?", "12", "rows.jsonl:1"), Problem(prompt, "12", "rows.jsonl:2")]
    for refused in (lambda: chat_format.check_rows(rows, with_answers=False), lambda: chat_format.prompts(rows)):
        with pytest.raises(DataError, match=r"^rows\.jsonl:2: the prompt is empty.*delete the row\.$"):
            refused()
    assert chat_format.check_rows(rows, with_answers=True) == 2  # SFT learns from the answer


OUR_PROMPTS = Path(__file__).parents[3] / "examples" / "prompts"
TEXTS = PromptTexts("What is {}?", "Be brief.")
SYSTEM = Message("system", "Be brief.")


def test_texts_go_around_the_first_message_of_the_user():
    turns = (Message("user", "1+1"), Message("assistant", "2"), Message("user", "2+2"))
    asked = (SYSTEM, Message("user", "What is 1+1?"), *turns[1:])
    samples = PromptedSamples([AnsweredContext(turns, "4", "a:1", trains_all_answers=True)], TEXTS)
    assert samples[0] == AnsweredContext(asked, "4", trains_all_answers=True)
    assert samples[0].where == "a:1"
    pairs = PromptedSamples([PreferencePair(turns, "4", "5", "a:1")], TEXTS)
    assert list(pairs) == pairs[:1] == [PreferencePair(asked, "4", "5")]
    problems = PromptedSamples([Problem("1+1", "2"), Problem("0", "0")], PromptTexts("{0}, {0}"))
    assert len(problems) == 2
    assert [problem.context for problem in problems] == [(Message("user", f"{n}, {n}"),) for n in ("1+1", "0")]
    assert problems[int(np.int64(1))].answer == "0"


def test_a_second_system_message_is_refused_with_its_place():
    sample = AnsweredContext((Message("system", "x"), Message("user", "y")), "z", "a.jsonl:7")
    with pytest.raises(DataError, match=r"^a\.jsonl:7: the prompt has a system message, and system_prompt_file gives"):
        PromptedSamples([sample], TEXTS)[0]


def test_our_prompts_ask_for_a_boxed_answer():
    for name in ("cot", "math"):
        prompt = read_prompt_file(str(OUR_PROMPTS / f"{name}.txt"), "k").format("1+1")
        assert prompt.count("1+1") == 1 and r"\boxed{}" in prompt
    assert r"\boxed{}" in read_text_file(str(OUR_PROMPTS / "gsm8k.txt"), "k")


def test_prompt_files(tmp_path):
    path = tmp_path / "prompt.txt"
    for text, prompt in ((r"In \boxed{{}}: {}", r"In \boxed{}: 1+1"), ("{0}? Again: {0} {{}}", "1+1? Again: 1+1 {}")):
        path.write_text(text, encoding="utf-8-sig")
        assert read_prompt_file(str(path), "k").format("1+1") == prompt
    assert read_prompt_file(None, "k") == "{}"


PLACES = ["{} {}", "{ ", "{:>99999999999}", "{0.upper}", "{.upper}", "{0[0]}", "{!r}", "{prompt}", "{1}"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("no place", "every prompt would be the same"),
        ("{}" + "x" * 2**20, "cannot be read: it has more than 1,048,576 bytes"),
        *((f"Solve {place}.", "is not a prompt template") for place in PLACES),
    ],
)
def test_wrong_prompt_files_are_refused(tmp_path, content, message):
    path = tmp_path / "prompt.txt"
    path.write_text(content)
    with pytest.raises(DataError, match=message):
        read_prompt_file(str(path), "data.default.prompt_file")


def test_a_missing_file_is_named_with_its_key(tmp_path):
    with pytest.raises(DataError, match=r"data\.default\.system_prompt_file: .*absent\.txt cannot be read"):
        read_text_file(str(tmp_path / "absent.txt"), "data.default.system_prompt_file")
