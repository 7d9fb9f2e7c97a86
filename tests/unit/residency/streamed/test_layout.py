"""Tests where state lies in host memory and in the window, against numbers worked out by hand."""

import itertools

import pytest
import torch

from nemo_offload_rl.residency.streamed.window import ALIGNMENT, MASTER, Field, FlatLayout, Piece

FIELDS = [Field(MASTER, torch.int16), Field("exp_avg", torch.float32), Field("exp_avg_sq", torch.float32)]  # 10 bytes


def test_a_chunk_is_the_same_stretch_of_every_array():
    layout = FlatLayout(FIELDS, [300, 1000, 256], slot_bytes=10 * 1024 + 9)
    # 300, 1000 and 256 elements take 512, 1024 and 256: 1792 in all, in chunks of 1024.
    assert layout.nbytes == 17920
    assert [(chunk.begin, chunk.end) for chunk in layout.chunks] == [(0, 1024), (1024, 1792)]
    assert layout.chunks[0].pieces == (Piece(0, 0, 300, 0), Piece(1, 0, 512, 512))
    assert layout.chunks[1].pieces == (Piece(1, 512, 1000, 0), Piece(2, 0, 256, 512))
    assert layout.in_host(1, 1024, 768) == slice(2 * 1792 + 4 * 1024, 2 * 1792 + 4 * 1792)
    assert layout.of_parameter(2, 1) == slice(6 * 1792 + 4 * 512, 6 * 1792 + 4 * 1512)
    assert layout.in_slot(2, 100, 1) == slice(6 * 1024 + 400, 6 * 1024 + 404)


@pytest.mark.parametrize("slot_bytes", [10 * ALIGNMENT, 10 * 3 * ALIGNMENT, 10 * 50 * ALIGNMENT])
def test_pieces_cover_every_element_once_and_are_cut_at_multiples_of_the_alignment(slot_bytes):
    numels = [1, 255, 256, 257, 5000, 512, 7]
    layout = FlatLayout(FIELDS, numels, slot_bytes)
    pieces = [piece for chunk in layout.chunks for piece in chunk.pieces]
    for index, numel in enumerate(numels):
        spans = [(piece.start, piece.stop) for piece in pieces if piece.index == index]
        assert spans[0][0] == 0
        assert spans[-1][1] == numel
        assert all(one[1] == other[0] and one[1] % ALIGNMENT == 0 for one, other in itertools.pairwise(spans))
    for chunk in layout.chunks:
        assert all(piece.offset % ALIGNMENT == 0 for piece in chunk.pieces)
        assert layout.in_slot(2, 0, chunk.end - chunk.begin).stop <= slot_bytes


def test_a_window_that_holds_nothing_is_refused():
    with pytest.raises(ValueError, match="too small for 256 elements of 10 bytes"):
        FlatLayout(FIELDS, [1], slot_bytes=2559)
