"""Tests prompt files and system prompts, and the samples that they wrap."""

from pathlib import Path

import numpy as np
import pytest

from nemo_offload_rl.data.preferences import PreferencePair
from nemo_offload_rl.data.problem import AnsweredContext, DataError, Message, Problem
from nemo_offload_rl.data.prompts import PromptedSamples, PromptTexts, read_prompt_file, read_text_file

PROMPTS = Path(__file__).parents[3] / "examples" / "prompts"
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
    samples = PromptedSamples(
        [AnsweredContext((Message("system", "x"), Message("user", "y")), "z", "a.jsonl:7")], TEXTS
    )
    with pytest.raises(DataError, match=r"^a\.jsonl:7: the prompt has a system message, and system_prompt_file gives"):
        samples[0]


def test_our_prompts_ask_for_a_boxed_answer():
    for name in ("cot", "math"):
        prompt = read_prompt_file(str(PROMPTS / f"{name}.txt"), "k").format("1+1")
        assert prompt.count("1+1") == 1 and r"\boxed{}" in prompt
    assert r"\boxed{}" in read_text_file(str(PROMPTS / "gsm8k.txt"), "k")


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
