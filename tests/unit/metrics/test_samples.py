from nemo_offload_rl.metrics.samples import (
    JudgedAnswer,
    as_plain_text,
    best_and_worst,
    samples_markdown,
    samples_table,
)

BOXED = JudgedAnswer("What is\n1|2?", r"It is \boxed{<2>} [bold]", "2", 0.5)


def test_half_are_the_best_and_half_the_worst():
    assert best_and_worst([0.0, 1.0, 0.5, 1.0, 0.0, 0.25], 4) == [1, 3, 0, 4]
    assert best_and_worst([0.0, 1.0, 0.5, 1.0, 0.0, 0.25], 3) == [1, 3, 4]
    assert best_and_worst([0.0, 1.0], 1) == [1]
    assert best_and_worst([0.0, 1.0], 5) == [1, 0]
    assert best_and_worst([0.0, 1.0], 0) == []
    assert best_and_worst([], 2) == []


def test_the_table_has_the_texts_as_they_are():
    text = as_plain_text(samples_table(7, [BOXED]))
    assert "Answers of the validation after step 7" in text
    assert "1|2?" in text
    assert r"It is \boxed{<2>} [bold]" in text
    assert "0.5" in text
    assert max(map(len, text.splitlines())) <= 160


def test_tensorboards_table_has_one_line_an_answer():
    head, rule, row = samples_markdown([BOXED]).splitlines()
    assert head == "| prompt | answer | known answer | reward |"
    assert rule == "| --- | --- | --- | --- |"
    assert row == r"| What is<br>1\|2? | It is \\boxed{&lt;2&gt;} \[bold\] | 2 | 0.5 |"


def test_a_long_text_is_shortened_in_its_middle():
    answer = JudgedAnswer("p", "a" * 600 + "b" * 3000, "2", 1.0)
    shown = answer.cells[1]
    assert shown.startswith("a" * 500 + " [... 2,600 characters ...] ")
    assert shown.endswith("b" * 500)
    assert answer.cells[3] == "1"
