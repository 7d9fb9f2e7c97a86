"""Tests rewards for mathematics with the real packages in real processes."""

import logging
import signal

import pytest

from nemo_offload_rl.environments import Case, RewardError, make_math_reward
from nemo_offload_rl.environments.math_worker import dapo_math_verify, load_hf_math_verify, normalize_answer


@pytest.fixture(scope="module")
def judge_all():
    reward = make_math_reward("hf_math_verify", num_workers=2, time_limit_s=60.0)

    def judge(*pairs):
        return reward.judge_all([Case("a prompt", response, answer) for response, answer in pairs])

    yield judge
    reward.shutdown()


def test_equal_formulas_and_numbers_are_right_and_other_answers_wrong(judge_all):
    right = [
        (r"So it is \boxed{\frac{1}{2}}.", "0.5"), (r"So it is \boxed{0.5}.", r"\frac{1}{2}"), ("#### 18", "18"),
        ("The answer is 42", "42"), (r"\boxed{x^2+2x+1}", "(x+1)^2"), (r"\boxed{1,234}", "1234"),
        (r"$\{1, 2\}$", r"\{2, 1\}"),
    ]  # fmt: skip
    wrong = [(r"\boxed{2}", "3"), ("I do not know", "3"), ("", "3"), (r"\boxed{", "3")]
    judged = judge_all(*right, *wrong)
    assert judged.rewards == [1.0] * len(right) + [0.0] * len(wrong)
    assert judged.num_unjudged == 0


def test_what_cannot_be_judged_is_counted_and_said_once(judge_all, caplog):
    with caplog.at_level(logging.WARNING):
        judged = judge_all(("2", ""), (r"\boxed{2}", "2"), ("3", ""))
    assert judged.rewards == [0.0, 1.0, 0.0]
    assert judged.num_unjudged == 2
    (record,) = caplog.records
    assert record.message.startswith("2 of 3 answers could not be judged, and got the reward 0 (1: ValueError: No gold")


def test_a_formula_that_math_verify_gives_up_is_not_judged(monkeypatch):
    log = logging.getLogger("math_verify")
    monkeypatch.setattr(log, "propagate", True)
    monkeypatch.setattr(log, "handlers", [])
    load_hf_math_verify()(r"\boxed{1}", "2")  # the first formula of a process takes up to 1.3 s
    # Its time limit of 5 s, reached in less time.
    monkeypatch.setattr(signal, "alarm", lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds and 0.3))
    judge = load_hf_math_verify()
    for response, answer in [(r"\boxed{9^{9^{9^9}}}", "2"), (r"\boxed{\int_0^1 x^{x^{x}} dx}", "2")]:
        with pytest.raises(TimeoutError, match="math-verify gave up on a formula at its own time limit"):
            judge(response, answer)
    assert judge(r"\boxed{2}", "2") == 1.0
    assert judge(r"\boxed{3}", "2") == 0.0


def test_dapos_way_needs_no_package_and_gives_the_same_kind_of_reward():
    reward = make_math_reward("dapo_math_verify", num_workers=1, time_limit_s=10.0)
    judged = reward.judge_all([Case("p", "Answer: 42", "42"), Case("p", r"\boxed{42}", "42")])
    reward.shutdown()
    assert judged.rewards == [1.0, 0.0]
    with pytest.raises(RewardError, match="must be one of hf_math_verify, dapo_math_verify, found 'prime'"):
        make_math_reward("prime", 1, 1.0)


@pytest.mark.parametrize(
    ("written", "even"),
    [
        ("42", "42"), ("x = 42", "42"), ("a total of $42$", "42"), ("1,234", "1234"), ("1,2", "12"),
        ("(1, 2)", "(1,2)"), ("12 dollars", "12"), (r"12\text{ cm}", "12"), (r"90^{\circ}", "90"), (r"\$5.", "5."),
        (r"\frac12", r"\frac{1}{2}"), (r"\sqrt3", r"\sqrt{3}"), (r"the answer is $\frac{3}{4}$ of it", r"\frac{3}{4}"),
        (r"\textbf{7}", "7"), (r"\overline{AB}", "AB"), (r"12{,}345", "12345"), (r"\mbox{east}", "east"),
        (r"x\text{and}y", "x,y"), (r"3\text{m}^2", "3"), (r"5^\mathrm{th}", "5^"),
    ],
)  # fmt: skip
def test_answers_are_evened_out(written, even):
    assert normalize_answer(written) == even


STATED = [
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
]


@pytest.mark.parametrize(("response", "answer", "reward"), STATED)
def test_the_last_stated_answer_counts(response, answer, reward):
    assert dapo_math_verify(response, answer) == reward
