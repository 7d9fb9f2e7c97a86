import pytest

from nemo_offload_rl.worker.rank_metrics import worst_of_ranks

MOVED = "refit/optimizer_state"
# Of each quantity the values of a fast and a slow rank.
QUANTITIES = {
    f"{MOVED}/gb": (6.0, 6.5), f"{MOVED}/copy_s": (0.12, 0.26), f"{MOVED}/exposed_s": (0.01, 0.2),
    f"{MOVED}/hidden_s": (0.11, 0.06), f"{MOVED}/gb_per_s": (50.0, 25.0), f"{MOVED}/share_of_link": (0.98, 0.5),
    "refit/enter_s": (0.02, 0.21), "refit/gpu_free_before_gib": (40.0, 38.0), "refit/gpu_free_after_gib": (46.0, 44.0),
    "refit/gpu_ranges_after_gib": (3.0, 4.0), "host_rss_gib": (9.0, 10.0), "host_pinned_gib": (7.0, 8.0),
}  # fmt: skip
FAST, SLOW = ({name: values[rank] for name, values in QUANTITIES.items()} for rank in range(2))


@pytest.mark.parametrize("ranks", [[FAST, SLOW], [SLOW, FAST], [FAST, SLOW, FAST], [SLOW]])
def test_the_worst_rank_counts_whatever_the_quantity(ranks):
    assert worst_of_ranks(ranks) == SLOW


def test_each_quantity_is_judged_alone():
    mixed = FAST | {"refit/optimizer_state/exposed_s": 0.5, "refit/gpu_free_after_gib": 1.0}
    worst = worst_of_ranks([SLOW, mixed])
    assert worst["refit/optimizer_state/exposed_s"] == 0.5
    assert worst["refit/gpu_free_after_gib"] == 1.0
    assert worst["refit/optimizer_state/copy_s"] == 0.26


def test_what_only_some_ranks_moved_is_kept():
    assert worst_of_ranks([{"host_rss_gib": 1.0}, {"generate/params/gb": 2.0, "host_rss_gib": 0.5}]) == {
        "host_rss_gib": 1.0,
        "generate/params/gb": 2.0,
    }
    assert worst_of_ranks([{}, {}]) == {}
