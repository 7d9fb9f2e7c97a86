import math
import os
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from nemo_offload_rl.environments import Case, Judgements, Reward, RewardError, make_python_reward, make_reward
from nemo_offload_rl.environments.pooled_reward import import_reward
from nemo_offload_rl.environments.rewards import MAX_CHARS, MAX_EXPONENT, final_number, last_boxed


def judge_of(kind):
    """Returns the reward as a function of response and answer."""
    reward = make_reward(kind)
    return lambda response, answer: reward.judge("a prompt", response, answer)


LARGEST = "9" * MAX_CHARS


@pytest.mark.parametrize(
    ("kind", "response", "answer", "wanted"),
    [
        ("exact_match", " 092\n", "092", 1.0), ("exact_match", "92", "092", 0.0), ("exact_match", "092 ", "92", 0.0),
        ("numeric_match", "so the answer is 0.5", "1/2", 1.0), ("numeric_match", "1,000", "1000.0", 1.0),
        ("numeric_match", "0.333", "1/3", 0.0), ("numeric_match", "no number", "no number", 0.0),
        ("numeric_match", "", "5", 0.0), ("numeric_match", LARGEST, LARGEST, 1.0),
        ("numeric_match", f"1e{MAX_EXPONENT}", f"10e{MAX_EXPONENT - 1}", 1.0),
    ],
)  # fmt: skip
def test_answers_are_matched_as_text_or_as_numbers(kind, response, answer, wanted):
    assert judge_of(kind)(response, answer) == wanted


def test_an_answer_that_is_too_large_and_an_unknown_reward_are_refused():
    for answer in (LARGEST + "9", f"1e{MAX_EXPONENT + 1}", f"1e-{MAX_EXPONENT + 1}"):
        with pytest.raises(RewardError, match=r"NumberTooLargeError: .* has more than 640 characters or an exponent"):
            judge_of("numeric_match")("12", answer)
    with pytest.raises(RewardError, match="one of exact_match, numeric_match, python, found 'bleu'"):
        make_reward("bleu")


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        (r"a \boxed{\frac{1}{2}} b", r"\frac{1}{2}"), (r"\boxed{1} and \boxed{2", "1"), (r"\boxed{1 \boxed{2} 3}", "2"),
        (r"\boxed{\boxed{1} 2", "1"), ("nothing", None),
    ],
)  # fmt: skip
def test_boxed_text_keeps_its_inner_braces(text, boxed):
    assert last_boxed(text) == boxed


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("first 3, then -4.50", Fraction(-9, 2)), ("x = -3", Fraction(-3)), ("x = \u22123", Fraction(-3)),
        ("(2)-7", Fraction(7)), ("1/3", Fraction(1, 3)), (r"\frac{3}{4}", Fraction(3, 4)),
        (r"\frac{1{,}000}{3}", Fraction(1000, 3)), (r"\boxed{3\frac{1}{2}}", Fraction(7, 2)),
        (r"-2\frac{3}{4}", Fraction(-11, 4)), ("\u22120\\,\\tfrac{3}{4}", Fraction(-3, 4)), (r"1\frac{1}{0}", None),
        ("答案是42。", Fraction(42)), ("答えは-1,234.5です", Fraction(-2469, 2)), (r"\boxed{7} and not 8", Fraction(7)),
        (r"\boxed{1} no, \boxed{\frac{1}{2}} km 5", Fraction(1, 2)), ("2.5e3", Fraction(2500)), (".5", Fraction(1, 2)),
        ("1,2", Fraction(2)), ("#### 18", Fraction(18)), ("5/0", None), (r"\boxed{}", None), ("area51 then v2", None),
        ("β2 and ж3", None),
    ],
)  # fmt: skip
def test_final_number(text, number):
    assert final_number(text) == number


@pytest.mark.parametrize(
    "response",
    [
        *("1" * 5000, "0." + "3" * 5000, "1/" + "1" * 5000, "1e5000000", "1e999999999", "1e-999999999"),
        *("1e" + "9" * 5000, "3\\frac{1}{" + "1" * 5000 + "}", "\\boxed{" * 100_000, "{" * 100_000),
    ],
    ids=lambda response: response[:12],
)
def test_a_degenerate_response_gets_no_reward_and_does_not_end_the_run(response):
    reward = judge_of("numeric_match")
    assert reward(response, "12") == 0.0
    assert reward(f"{response} 12", "12") == 1.0


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    half = "def half(response, answer):\n    return 0.5 if response else 'good'\n"
    (tmp_path / "my_rewards.py").write_text(f"{half}\nNUMBER = 3\n")
    (tmp_path / "broken_rewards.py").write_text("half = undefined\n")
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("user_module")
def test_a_python_function_is_called_with_response_and_answer_and_must_return_a_number():
    reward = import_reward("my_rewards:half")
    assert reward.judge("a prompt", "text", "answer") == 0.5
    with pytest.raises(RewardError, match="my_rewards:half must return a number, found 'good'"):
        reward.judge("a prompt", "", "answer")


ABSENT = [
    ("", "must be 'package.module:function', found ''"),
    ("no_such_module_here:f", "No module named 'no_such_module_here' .start the run in the m"),
    ("./rewards/my_rewards.py:half", "is './rewards/my_rewards.py:half', a file's path: write 'my_rewards:half'"),
    ("my_rewards:absent", "'my_rewards' has no function 'absent'"),
    ("my_rewards:NUMBER", "'my_rewards' has no function 'NUMBER'"),
    ("operator:neg", "must take the answer and the known answer, but its call raises: too many"),
    ("broken_rewards:half", "'broken_rewards' cannot be imported: NameError: name 'undefined' is not defined$"),
]


@pytest.mark.usefixtures("user_module")
@pytest.mark.parametrize(("path", "message"), ABSENT)
def test_a_function_that_is_not_there_is_named(path, message):
    with pytest.raises(RewardError, match=message):
        make_python_reward(path, 1, 1.0)


# 1e39 is infinite as a float32.
NOT_FINITE = [
    (math.nan, "a finite number", "nan"), (-math.inf, "a finite number", "-inf"),
    (1e39, "a finite number", r"1e\+39"), (10**400, "a finite number", "1000"),
    (np.float16(math.inf), "a finite number", r"np.float16\(inf\)"), (None, "a number", "None"),
    ([1.0, 0.0], "a number", r"\[1.0, 0.0\]"), (1j, "a number", "1j"),
    (np.complex64(1), "a number", r"np.complex64"), (np.ones(2), "a number", "array"),
]  # fmt: skip


@pytest.mark.parametrize(("returned", "wanted", "found"), NOT_FINITE)
def test_what_is_no_finite_number_is_an_error_with_everything_in_it(returned, wanted, found):
    message = f"The reward function f must return {wanted}.*, found {found}.* for the answer {CASE}"
    with pytest.raises(RewardError, match=message):
        Reward("f", lambda response, answer: returned).judge("7+8=", "It is 15", "15")


CASE = r"'It is 15' to the prompt '7\+8=' \(known answer: '15'\)"


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (ZeroDivisionError("no"), r"ZeroDivisionError: no \(.*test_rewards\.py, line \d+\)"),
        (AssertionError(), r"AssertionError \(.*test_rewards\.py, line \d+\)"),
    ],
)
def test_a_function_that_raises_is_an_error_with_its_cause(error, cause):
    def fail(response, answer):
        raise error

    with pytest.raises(RewardError, match=rf"^The reward function f failed for the answer {CASE}: {cause}\.$"):
        Reward("f", fail).judge("7+8=", "It is 15", "15")
    error.args = ("because " * 10_000 + "\nof this",)
    for function in (lambda response, answer: [math.nan] * 100_000, fail):
        with pytest.raises(RewardError) as raised:
            Reward("f", function).judge("first " * 10_000, "a" * 10_000 + " end", "known " * 10_000)
        message = str(raised.value)  # long texts are shortened in it
        assert len(message) < 700 and "'first first" in message and "a end'" in message and "\n" not in message


@pytest.mark.parametrize(
    ("returned", "reward"),
    [
        (True, 1.0), (3, 3.0), (3.4e38, 3.4e38), (np.float64(-2), -2.0), (np.float16(0.25), 0.25), (np.uint8(7), 7.0),
        (np.longdouble(2), 2.0), (np.True_, 1.0),
    ],
)  # fmt: skip
def test_finite_numbers_of_any_kind_are_rewards(returned, reward):
    judged = Reward("f", lambda response, answer: returned).judge("", "", "")
    assert (judged, type(judged)) == (reward, float)


HANGING = """
import re, subprocess, sys, time
calls = 0

def judge(response, answer):
    global calls
    calls += 1
    print("judging", response)
    if response == "regex":  # Python code in other threads does not run either
        re.match(r"(a|a)*b", "a" * 60)
    if response == "child":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        open("child_pid", "w").write(str(child.pid))
        child.wait()
    if response == "exit":
        sys.exit(3)
    if response == "read":
        return float(len(sys.stdin.read()))
    if response == "raise":
        return 1 / 0
    return calls
"""


JUDGES_UNREAD = """
import sys
from nemo_offload_rl.environments.pooled_reward import make_python_reward
from nemo_offload_rl.environments.rewards import Case
reward = make_python_reward("prints:one", 1, 60.0)
judged = reward.judge_all([Case("prompt", "response", "answer")] * 3)
reward.shutdown()
sys.exit(0 if (judged.rewards, judged.num_unjudged) == ([1.0, 1.0, 1.0], 0) else str(judged))
"""


def test_a_function_that_prints_is_judged_though_nobody_reads_it(tmp_path):
    prints = "import sys\n\n\ndef one(response, answer):\n    print(response)\n    print(answer, file=sys.stderr)\n"
    (tmp_path / "prints.py").write_text(f"{prints}    return 1.0\n")
    reader, writer = os.pipe()
    os.close(reader)
    path = {"PYTHONPATH": str(Path(__file__).parents[3])}
    words = [sys.executable, "-c", JUDGES_UNREAD]
    done = subprocess.run(
        words, cwd=tmp_path, env=os.environ | path, stderr=writer, stdout=subprocess.DEVNULL, timeout=120, check=False
    )
    os.close(writer)
    assert done.returncode == 0


@pytest.mark.usefixtures("user_module")
def test_a_python_function_that_hangs_costs_its_answers_alone(tmp_path, capfd):
    (tmp_path / "hanging_rewards.py").write_text(HANGING)
    reward = make_python_reward("hanging_rewards:judge", num_workers=1, time_limit_s=0.7)
    cases = [Case("7+8=", response, "15") for response in ("a", "b", "regex", "c", "child", "exit", "read")]
    start = time.monotonic()
    assert reward.judge_all(cases) == Judgements([1.0, 2.0, 0.0, 1.0, 0.0, 0.0, 0.0], 3)
    assert "judging a\n" in capfd.readouterr().err
    assert not Path(f"/proc/{(tmp_path / 'child_pid').read_text()}/exe").exists()
    with pytest.raises(RewardError, match=r"ZeroDivisionError: division by zero \(.*hanging_rewards\.py, line \d+\)"):
        reward.judge_all([Case("7+8=", "raise", "15")])
    reward.shutdown()
    assert time.monotonic() - start < 15


@pytest.mark.usefixtures("user_module")
def test_a_module_that_only_the_driver_can_import_is_an_error_with_its_cause(tmp_path, monkeypatch):
    check = "if os.environ['DRIVER'] != str(os.getpid()):\n    raise OSError('port taken')"
    (tmp_path / "exclusive_rewards.py").write_text(f"import os\n{check}\ndef judge(*_): ...\n")
    monkeypatch.setenv("DRIVER", str(os.getpid()))
    reward = make_python_reward("exclusive_rewards:judge", num_workers=1, time_limit_s=5.0)
    with pytest.raises(RewardError, match="'exclusive_rewards' cannot be imported: OSError: port taken"):
        reward.judge_all([Case("7+8=", "15", "15")])
