from fractions import Fraction

import pytest

from nemo_offload_rl.environments import RewardError, make_reward
from nemo_offload_rl.environments.numbers import final_number, last_boxed


def test_exact_match_looks_at_the_whole_text():
    reward = make_reward("exact_match")
    assert reward(" 092\n", "092") == 1.0
    assert reward("92", "092") == 0.0
    assert reward("092 ", "92") == 0.0


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("092", Fraction(92)),
        ("It is 1,234,567.", Fraction(1234567)),
        ("first 3, then -4.50", Fraction(-9, 2)),
        ("5-3", Fraction(3)),
        ("x = -3", Fraction(-3)),
        ("x = \u22123", Fraction(-3)),
        ("(2)-7", Fraction(7)),
        ("1/3", Fraction(1, 3)),
        ("3 / 4 of it", Fraction(3, 4)),
        (r"\frac{3}{4}", Fraction(3, 4)),
        (r"$-\dfrac{10}{4}$", Fraction(-5, 2)),
        (r"\boxed{7} and not 8", Fraction(7)),
        (r"\boxed{1} no, \boxed{\frac{1}{2}} km 5", Fraction(1, 2)),
        (r"\boxed{12{,}345}", Fraction(12345)),
        ("2.5e3", Fraction(2500)),
        (".5", Fraction(1, 2)),
        ("1,2", Fraction(2)),
        ("#### 18", Fraction(18)),
        ("none", None),
        ("", None),
        ("5/0", None),
        (r"\boxed{}", None),
        ("area51 then v2", None),
    ],
)
def test_final_number(text, number):
    assert final_number(text) == number


def test_boxed_text_keeps_its_inner_braces():
    assert last_boxed(r"a \boxed{\frac{1}{2}} b") == r"\frac{1}{2}"
    assert last_boxed(r"\boxed{1} and \boxed{2") == "1"
    assert last_boxed("nothing") is None


def test_numeric_match_compares_values():
    reward = make_reward("numeric_match")
    assert reward("so the answer is 0.5", "1/2") == 1.0
    assert reward("1,000", "1000.0") == 1.0
    assert reward("0.333", "1/3") == 0.0
    assert reward("no number", "no number") == 0.0
    assert reward("", "5") == 0.0


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(
        "def half(response, answer):\n    return 0.5 if response else 0\n\n\n"
        "def words(response, answer):\n    return 'good'\n\n\nNUMBER = 3\n"
    )
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("user_module")
def test_a_python_function_is_called_with_response_and_answer():
    reward = make_reward("python", "my_rewards:half")
    assert reward("text", "answer") == 0.5
    assert reward("", "answer") == 0.0


@pytest.mark.usefixtures("user_module")
@pytest.mark.parametrize(
    ("path", "message"),
    [
        (None, "must be 'package.module:function', found None"),
        ("my_rewards", "must be 'package.module:function'"),
        ("no_such_module_here:f", "'no_such_module_here' cannot be imported"),
        ("my_rewards:absent", "'my_rewards' has no function 'absent'"),
        ("my_rewards:NUMBER", "'my_rewards' has no function 'NUMBER'"),
    ],
)
def test_a_function_that_is_not_there_is_named(path, message):
    with pytest.raises(RewardError, match=message):
        make_reward("python", path)


@pytest.mark.usefixtures("user_module")
def test_a_function_must_return_a_number():
    with pytest.raises(RewardError, match="my_rewards:words must return a number, found 'good'"):
        make_reward("python", "my_rewards:words")("a", "b")


def test_unknown_rewards_are_refused():
    with pytest.raises(RewardError, match="one of exact_match, numeric_match, python, found 'bleu'"):
        make_reward("bleu")
    with pytest.raises(RewardError, match=r"needs env\.NAME\.reward: python"):
        make_reward("exact_match", "a:b")
