import pytest

from nemo_offload_rl.metrics.samples import JudgedAnswer, as_plain_text, best_and_worst, samples_markdown, samples_table

BOXED = JudgedAnswer("What is\n1|2?", r"It is \boxed{<2>} [bold]", "2", 0.5)


@pytest.mark.parametrize(
    ("rewards", "number", "chosen"),
    [
        ([0.0, 1.0, 0.5, 1.0, 0.0, 0.25], 4, [1, 3, 0, 4]), ([0.0, 1.0, 0.5, 1.0, 0.0, 0.25], 3, [1, 3, 4]),
        ([0.0, 1.0], 1, [1]), ([0.0, 1.0], 5, [1, 0]), ([0.0, 1.0], 0, []), ([], 2, []),
    ],
)  # fmt: skip
def test_half_are_the_best_and_half_the_worst(rewards, number, chosen):
    assert best_and_worst(rewards, number) == chosen


def test_the_tables_have_the_texts_as_they_are():
    text = as_plain_text(samples_table(7, [BOXED]))
    for part in ("Answers of the validation after step 7", "1|2?", r"It is \boxed{<2>} [bold]", "0.5"):
        assert part in text
    assert max(map(len, text.splitlines())) <= 160
    assert samples_markdown([BOXED]).splitlines() == [
        "| prompt | answer | known answer | reward |",
        "| --- | --- | --- | --- |",
        r"| What is<br>1\|2? | It is \\boxed{&lt;2&gt;} \[bold\] | 2 | 0.5 |",
    ]


def test_a_long_text_is_shortened_in_its_middle():
    answer = JudgedAnswer("p", "a" * 600 + "b" * 3000, "2", 1.0)
    shown = answer.cells[1]
    assert shown.startswith("a" * 500 + " [... 2,600 characters ...] ")
    assert shown.endswith("b" * 500)
    assert answer.cells[3] == "1"
