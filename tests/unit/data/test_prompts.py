from dataclasses import replace

import datasets
import pytest
from support.everyday import make_tokenizer
from tokenizers.models import WordLevel

from nemo_offload_rl.algorithms.sft import example_batch
from nemo_offload_rl.data.datasets import ProblemForm, load_hf_folder
from nemo_offload_rl.data.errors import DataError
from nemo_offload_rl.data.problem import AnsweredContext, Message, Problem
from nemo_offload_rl.data.prompt_files import PromptedSamples, PromptTexts
from nemo_offload_rl.data.prompts import PromptFormat
from nemo_offload_rl.data.tokenizer import arithmetic_tokenizer
from nemo_offload_rl.run.setup import read_tokenizer

# A turn is its content between digits for its role: 1 system, 2 user, 3 assistant; `+` opens, `=` closes.
TEMPLATE = (
    "{% for m in messages %}{{ {'system': '1', 'user': '2', 'assistant': '3'}[m['role']] }}+{{ m['content'] }}="
    "{% endfor %}{% if add_generation_prompt %}3+{% endif %}"
)
EOS = 12


def text(ids: list[int]) -> str:
    return arithmetic_tokenizer().decode(ids)


def chat_tokenizer():
    tokenizer = arithmetic_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def test_plain_text_is_the_prompt_itself():
    (prompt,) = PromptFormat(arithmetic_tokenizer(), max_tokens=10).prompts([Problem("07+85=", "092")])
    assert prompt.prompt_ids == [0, 7, 10, 8, 5, 11]
    assert prompt.answer_ids == []
    assert prompt.fits


def test_an_example_ends_in_the_end_of_sequence():
    (example,) = PromptFormat(arithmetic_tokenizer(), max_tokens=11).examples([Problem("07+85=", "092")])
    assert example.prompt_ids == [0, 7, 10, 8, 5, 11]
    assert example.answer_ids == [0, 9, 2, EOS]
    assert example.fits
    (bare,) = PromptFormat(arithmetic_tokenizer(), 10, add_eos=False).examples([Problem("07+85=", "092")])
    assert bare.answer_ids == [0, 9, 2]


def test_a_chat_template_wraps_turns():
    problem_format = PromptFormat(chat_tokenizer(), 30)
    problem = AnsweredContext((Message("system", "99"), Message("user", "45")), "6")
    (prompt,) = problem_format.prompts([problem])
    assert text(prompt.prompt_ids) == "1+99=2+45=3+"
    (example,) = problem_format.examples([problem])
    assert example.prompt_ids == prompt.prompt_ids
    assert text(example.answer_ids) == "6=<eos>"


def test_without_a_generation_prompt_the_header_is_part_of_the_answer():
    (example,) = PromptFormat(chat_tokenizer(), 30, add_generation_prompt=False).examples([Problem("45", "6")])
    assert text(example.prompt_ids) == "2+45="
    assert text(example.answer_ids) == "3+6=<eos>"


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
    (last_alone,) = example_format.examples([AnsweredContext(context, "7")])
    assert (last_alone.prompt_ids, last_alone.trained_in_prompt) == (example.prompt_ids, ())
    (cut,) = PromptFormat(tokenizer, 8, add_generation_prompt=opened).examples([conversation])
    assert (cut.fits, cut.trained_in_prompt) == (False, ())


def test_an_answer_ends_once_and_keeps_the_newline_that_chatml_puts_behind(tmp_path):
    make_tokenizer(tmp_path)
    tokenizer = read_tokenizer({"name": str(tmp_path)})
    (example,) = PromptFormat(tokenizer, 100).examples([Problem("45", "6")])
    assert tokenizer.decode(example.answer_ids) == "6<|im_end|>\n"
    tokenizer.chat_template = None
    (plain,) = PromptFormat(tokenizer, 100).examples([Problem("45", "6\n")])
    assert tokenizer.decode(plain.answer_ids) == "6\n<|im_end|>"


def test_a_template_that_hides_the_answer_is_refused():
    tokenizer = arithmetic_tokenizer()
    tokenizer.chat_template = "{{ messages | length }}+{{ messages[0]['content'] }}"
    with pytest.raises(DataError, match="does not start with the same conversation"):
        PromptFormat(tokenizer, 30).examples([Problem("45", "6")])


def test_a_begin_of_sequence_is_put_first_once():
    tokenizer = arithmetic_tokenizer()
    tokenizer.bos_token = "="
    ids = [
        p.prompt_ids for p in PromptFormat(tokenizer, 9, add_bos=True).prompts([Problem("1", ""), Problem("=1", "")])
    ]
    assert ids == [[11, 1], [11, 1]]


def test_long_prompts_lose_their_beginning_and_say_so():
    """As in NeMo-RL, a prompt of exactly the limit is left out of the loss; in DPO, a text of the limit is not."""
    problems = [Problem("123", ""), Problem("1234", ""), Problem("12345", "")]
    short, exact, long = PromptFormat(arithmetic_tokenizer(), 4).prompts(problems)
    assert (short.prompt_ids, short.fits) == ([1, 2, 3], True)
    assert (exact.prompt_ids, exact.fits) == ([1, 2, 3, 4], False)
    assert (long.prompt_ids, long.fits) == ([2, 3, 4, 5], False)
    exact, long = PromptFormat(arithmetic_tokenizer(), 4, keeps_longest=True).prompts(problems[1:])
    assert (exact.fits, long.fits) == (True, False)


def test_long_examples_are_cut_and_say_so():
    (example,) = PromptFormat(arithmetic_tokenizer(), 4).examples([Problem("123", "45")])
    assert (example.prompt_ids, example.answer_ids, example.fits) == ([1, 2, 3], [4], False)


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
    """Returns a tokenizer with a token for unknown words."""
    tokenizer = arithmetic_tokenizer()
    vocabulary = tokenizer.get_vocab()
    tokenizer.backend_tokenizer.model = WordLevel({**vocabulary, "<unk>": len(vocabulary)}, unk_token="<unk>")
    return tokenizer


def test_a_tokenizer_with_a_token_for_unknown_words_takes_every_text():
    rows = [Problem("x", "y", "a.jsonl:1")]
    assert PromptFormat(open_tokenizer(), 30).check_rows(rows, with_answers=True) == 1


def test_every_row_is_read_and_rendered_before_a_run(tmp_path):
    rows = [{"q": f"{number}", "a": None if number == 1500 else "1"} for number in range(1501)]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "train.parquet")
    plain = PromptFormat(open_tokenizer(), 30)
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
