"""Tests memory curves of benchmarks/activation_offload.py: a step's points on a CPU, and pictures of made-up points."""

import json

from activation_cases.memory_curve import Memory, Point, Sample, cells
from activation_cases.memory_picture import draw
from activation_cases.worker import MIB
from matplotlib.image import imread


def a_step(way, slower=1.0, top=8.0):
    """Returns rows of a step that takes 100 ms times `slower` and peaks at `top` GiB."""
    places = [
        ("forward", 1, 0, 1.0),
        ("forward", 1, 20, 4.0),
        ("forward", 1, 30, 6.0),
        ("backward", 1, 50, top),
        ("backward", 1, 90, 3.0),
        ("optimizer", None, 100, 2.0),
    ]
    samples = [
        Sample(Point(doing, number, "a layer"), at * slower, Memory(MIB, int(gib * 1024 * MIB)))
        for doing, number, at, gib in places
    ]
    rows = cells(samples, lambda begin, end: end - begin)
    return [{"part": "dense/attention", "way": way, **row} for row in rows]


def has_colour(picture, hexadecimal):
    wanted = [int(hexadecimal[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return bool((abs(picture[..., :3] - wanted).max(axis=-1) < 0.02).sum() > 100)


def test_both_steps_are_in_the_picture(tmp_path):
    file, picture = tmp_path / "memory.json", tmp_path / "pictures" / "memory.png"
    file.write_text(json.dumps({"rows": [*a_step("plain"), *a_step("offloaded", slower=1.1, top=6.5)]}))
    draw(file, picture)
    drawn = imread(picture)
    assert drawn.shape[1] == 1200
    assert has_colour(drawn, "#0072B2")
    assert has_colour(drawn, "#C0461B")
