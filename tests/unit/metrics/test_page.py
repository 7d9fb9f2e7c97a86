"""Tests the page of a run: what it has, that nothing of a run's data is markup, and that it needs no other file."""

import base64

import pytest
from support.html_page import Page
from support.limits import files_of_at_most

from nemo_offload_rl.metrics import page as pages
from tests.unit.metrics.test_logger import write

STEP = {
    "train/reward": 0.5, "timing/train/sampling": 3.0, "timing/train/training": 1.0,
    "timing/train/total_step_time": 4.5, "residency/train/optimizer_state/gb": 6.25,
    "residency/train/optimizer_state/copy_s": 0.5, "residency/train/optimizer_state/exposed_s": 0.1,
    "performance/memory/policy/host_rss_gib": 9.25,
}  # fmt: skip
ON_GPUS = {
    "performance/memory/policy/gpu_peak_train_gib": 12.5,
    "performance/memory/policy/gpu_peak_refit_gib": 7.0,
    "performance/memory/generation/gpu_peak_allocated_gib": 30.0,
}
PNG = b"as good as a picture"
HOSTILE = "</td></table><script>alert('&amp;')</script><img src=http://x.example/a.png onerror='x'>"


@pytest.fixture
def run_dir(tmp_path):
    folder = tmp_path / "exp_007"
    write(folder, dict.fromkeys((1, 2), STEP))
    for name in ("grpo", "step_timeline"):
        (folder / f"{name}.png").write_bytes(PNG)
    return folder


FACTS = {
    "algorithm": "grpo", "recipe": "recipes/mine.yaml", "config": "grpo:\n  max_num_steps: 2\n",
    "settings": [["grpo.max_num_steps", 2, "command line: grpo.max_num_steps=2"]],
    "version": "0.1.0, commit 0123456789ab", "started": "2026-11-26 10:00:00+00:00",
    "ended": "2026-11-26 11:00:00+00:00", "ending": "all steps are done", "planned_peak_gib": {},
}  # fmt: skip


def page_with(run_dir, **facts):
    pages.update_facts(run_dir, **FACTS | facts)
    return Page(pages.write_page(run_dir))


def answers_after(step, text):
    return {"step": step, "judged": [{"prompt": "1+1=", "answer": text, "known_answer": "2", "reward": 0.25}]}


def test_the_page_has_what_the_run_was_did_and_took(run_dir):
    page = page_with(run_dir, answers=answers_after(2, "perhaps 2"))
    for part in (
        "GRPO run exp_007", "Ended after step 2: all steps are done.", "recipes/mine.yaml", "commit 0123456789ab",
        "2026-11-26 11:00:00", "Where the time went", "sampling", "6.250", "9.25", "perhaps 2", "0.25",
        "command line: grpo.max_num_steps=2", "max_num_steps: 2\n",
    ):  # fmt: skip
        assert part in page.text
    assert page.tags.count("img") == 2
    assert page.tags.count("details") == 1


def test_the_page_needs_no_other_file_and_runs_nothing(run_dir):
    page = page_with(run_dir)
    assert page.addresses == [f"data:image/png;base64,{base64.b64encode(PNG).decode()}"] * 2
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    assert "url(" not in (run_dir / pages.PAGE_FILE).read_text()
    assert [path.name for path in run_dir.glob("*.partial")] == []


def test_nothing_of_a_runs_data_is_markup(run_dir):
    settings = [[HOSTILE, HOSTILE, HOSTILE]]
    said = dict.fromkeys(("recipe", "version", "started", "ended", "ending", "config"), HOSTILE)
    page = page_with(run_dir, answers=answers_after(2, HOSTILE), settings=settings, **said)
    assert page.text.count(HOSTILE) == 1 + len(said) + 3
    assert page.tags.count("script") == 0
    assert page.tags.count("img") == 2


def test_measured_peaks_stand_beside_planned_ones_only_on_gpus(run_dir):
    assert "planned" not in page_with(run_dir).text
    write(run_dir, {3: STEP | ON_GPUS}, resumed_step=2)
    text = page_with(run_dir, planned_peak_gib={"train": 13.25}).text
    memory = text[text.index("Memory") : text.index("Settings")]
    for part in ("planned", "training12.5013.25", "refit7.00", "generation, by torch30.00", "9.25"):
        assert part in memory


@pytest.mark.parametrize("facts", [None, '{"algorithm": '])
def test_an_old_or_a_damaged_folder_has_a_page_of_what_there_is(run_dir, facts, caplog):
    if facts is not None:
        (run_dir / pages.FACTS_FILE).write_text(facts)
    before = (run_dir / "grpo.png").read_bytes()
    page = Page(pages.draw_and_write_page(run_dir))
    assert "the folder does not say how the run ended" in page.text
    assert "Where the time went" in page.text
    assert "Settings" not in page.text
    assert page.tags.count("img") == 2
    assert (run_dir / "grpo.png").read_bytes() != before  # drawn again
    assert ("run.json is left out" in caplog.text) is (facts is not None)


ENDINGS = [
    ({"ending": "interrupted"}, "Ended after step 2: interrupted.", "half"),
    ({"ending": None}, "After step 2 the run goes on, or it was killed.", "half"),
    ({"answers": answers_after(2, "half \ud83d a pair")}, "half ? a pair", "\ud83d"),
    ({"answers": answers_after(4, "half a step")}, "step 2", "half a step"),  # which is yet to be made again
]


@pytest.mark.parametrize(("facts", "shown", "hidden"), ENDINGS)
def test_the_page_says_how_a_run_ended_and_what_was_answered(run_dir, facts, shown, hidden):
    text = page_with(run_dir, **facts).text
    assert shown in text and hidden not in text


def test_facts_are_added_to_those_of_before_unless_there_is_no_space(run_dir, caplog):
    pages.update_facts(run_dir, **FACTS)
    pages.update_facts(run_dir, ending=None)
    assert pages.read_facts(run_dir) == FACTS | {"ending": None}
    with files_of_at_most(100):
        pages.update_facts(run_dir, ending="interrupted")
    assert pages.read_facts(run_dir)["ending"] is None
    assert "run.json cannot be written: File too large" in caplog.text
    (run_dir / pages.FACTS_FILE).write_text("[]")
    assert pages.read_facts(run_dir) == {}
