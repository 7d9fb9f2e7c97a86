"""Tests the benchmark of logits in chunks, on a tiny model without a GPU."""

import logits


def test_every_pass_is_measured_with_and_without_chunks():
    rows = logits.measure("tiny", [16], smallest=4, repeats=1, temperature=1.0)
    assert [(row["pass"], row["chunk_tokens"]) for row in rows] == [
        ("log-probs", None), ("log-probs", 16), ("training", None), ("training", 16),
    ]  # fmt: skip
    for row in rows:
        assert row["ms"] > 0
        assert (row["recomputation_percent"] > 0) == (row["pass"] == "training" and row["chunk_tokens"] is not None)
