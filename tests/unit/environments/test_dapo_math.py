r"""Tests DAPO's judge; the expected texts are worked out by hand from its rules."""

import pytest

from nemo_offload_rl.environments.math_worker import dapo_math_verify, normalize_answer


@pytest.mark.parametrize(
    ("written", "even"),
    [
        ("42", "42"),
        ("x = 42", "42"),
        ("a total of $42$", "42"),
        ("1,234", "1234"),
        ("1,2", "12"),  # digits and commas are one number
        ("(1, 2)", "(1,2)"),
        ("12 dollars", "12"),
        (r"12\text{ cm}", "12"),
        (r"90^{\circ}", "90"),
        (r"\$5.", "5."),
        (r"\frac12", r"\frac{1}{2}"),
        (r"\sqrt3", r"\sqrt{3}"),
        (r"the answer is $\frac{3}{4}$ of it", r"\frac{3}{4}"),
        (r"\textbf{7}", "7"),
        (r"\overline{AB}", "AB"),
        (r"12{,}345", "12345"),
        (r"\mbox{east}", "east"),
        (r"x\text{and}y", "x,y"),
        (r"3\text{m}^2", "3"),
        (r"5^\mathrm{th}", "5^"),
    ],
)
def test_answers_are_evened_out(written, even):
    assert normalize_answer(written) == even


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("First 3.\nAnswer: 42", "42", 1.0),
        ("answer : $42$ dollars", "42", 1.0),
        ("Answer: 1 no.\nANSWER: 2\nand more", "2", 1.0),
        ("Answer: 1 no.\nAnswer: 2", "1", 0.0),
        (r"Answer: $\frac12$", r"\frac{1}{2}", 1.0),
        ("Answer: 0.5", r"\frac{1}{2}", 0.0),  # compared as text
        (r"It is \boxed{42}", "42", 0.0),
        ("Answer: 42" + "\n" * 300, "42", 0.0),
        ("Answer: 42" + "\n" * 290, "42", 1.0),
        ("", "42", 0.0),
    ],
)
def test_the_last_stated_answer_counts(response, answer, reward):
    assert dapo_math_verify(response, answer) == reward
