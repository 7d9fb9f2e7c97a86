"""Tests what of a recipe's text is refused: files and values that would be dropped, read otherwise, or never end."""

import os
from pathlib import Path

import pytest

from nemo_offload_rl.config import RecipeError, load
from nemo_offload_rl.config.problems import MAX_PROBLEMS
from nemo_offload_rl.config.recipe import load_recipe
from nemo_offload_rl.config.source.yaml_source import as_yaml

CONFIGS = Path(__file__).parents[3] / "examples" / "configs"


@pytest.fixture(autouse=True)
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write(name: str, text: str) -> Path:
    path = Path(name)
    path.write_text(text, encoding="utf-8")
    return path


def error_of(text: str, *overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load_recipe(write("recipe.yaml", text), overrides)
    return str(caught.value)


def test_a_file_that_is_too_large_is_refused():
    assert "recipe.yaml: has more than 1,048,576 bytes, the limit for this file" in error_of("a: 1 # " + "x" * 2**20)


def test_a_diamond_of_defaults_reads_each_file_once():
    for number in range(20):
        write(f"r{number + 1}.yaml", f"defaults: [r{number}.yaml, r{number}.yaml]\nb{number}: 1\n")
    write("r0.yaml", "a: 1\n")
    recipe = load_recipe("r20.yaml")
    assert recipe.config == {"a": 1} | {f"b{number}": 1 for number in range(20)}
    assert str(recipe.origins["a"]) == "r0.yaml:1"


def test_so_many_problems_are_listed_and_no_more():
    keys = "".join(f"  num_key_{number}: 1\n" for number in range(3000))
    with pytest.raises(RecipeError) as caught:
        load(write("recipe.yaml", f"grpo:\n{keys}"))
    assert len(str(caught.value).splitlines()) == MAX_PROBLEMS + 1
    assert "recipe.yaml: more than 100 problems; the others are listed once these are fixed" in str(caught.value)


NO_FILES = {
    "a FIFO": (lambda path: os.mkfifo(path), "is a FIFO, not a recipe"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "is a device, not a recipe"),
    "a link to itself": (lambda path: path.symlink_to(path), "cannot be read: too many levels of symbolic links"),
    "a folder": (lambda path: path.mkdir(), "is a folder, not a recipe"),
}


@pytest.mark.parametrize(("make", "message"), NO_FILES.values(), ids=NO_FILES)
def test_what_is_no_file_is_not_waited_for(make, message):
    make(Path("odd.yaml").absolute())
    with pytest.raises(RecipeError, match=f"odd.yaml: {message}"):
        load_recipe("odd.yaml")
    assert f"defaults: names odd.yaml, but {message}" in error_of("defaults: odd.yaml\n")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read():
    write("odd.yaml", "a: 1\n").chmod(0)
    with pytest.raises(RecipeError, match=r"odd\.yaml: cannot be read: permission denied"):
        load_recipe("odd.yaml")


def test_names_of_files_that_cannot_be():
    assert "cannot be read: file name too long" in error_of(f"defaults: {'x' * 5000}\n")
    assert "must be the name of a recipe, or a list of such names; found 'a\\x00b'" in error_of('defaults: "a\\0b"\n')


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: {_override_: 1, b: 2}\n", "a._override_: must be true, or absent; found 1"),
        ("a: !!set {b, c}\n", "recipe.yaml:1: a: has the tag tag:yaml.org,2002:set, which recipes do not support"),
        ("a: !mine {b: 1}\n", "a: has the tag !mine, which recipes do not support; delete it"),
        ("a: !!python/object:os.system {b: 1}\n", "python/object:os.system, which recipes do not support"),
        ("a: !!int 1.5\n", "a: '1.5' cannot be read as int"),
        ("a: !!null x\n", "a: 'x' cannot be read as null"),
        ("a: {'': 1}\n", "a.'': a key must not be empty"),
        ("a: {[1]: 2}\n", "a key must be text, found [1]"),
    ],
)
def test_what_would_be_dropped_is_refused(text, message):
    assert message in error_of(text)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("a={b: 1, b: 2}", "has the key 'b' twice; delete one"),
        ("a={b.c: 1}", "a: a key must not have a dot; write the part before it as a section"),
        ("a={1: 2}", "a: a key must be text, found 1; put it into quotes"),
        ("a={b: {_override_: 3}}", "a.b._override_: must be true, or absent; found 3"),
        ("+_override_=true", "cannot be set by itself; write section={_override_: true, ...}"),
        ("+c..d=1", "command line: +c..d=1"),
        ("a=[choice(1,2)]", "a: has a ChoiceSweep inside"),
        ("a=shuffle([1,2,3])", "cannot be read as an override"),
    ],
)
def test_what_an_override_would_drop_is_refused(override, message):
    assert message in error_of("a: 1\n", override)


def test_an_alias_of_a_section_with_a_merge_is_read_twice():
    text = "a: &a {x: 1, y: 1}\nb: &b {<<: *a, x: 2}\nc: *b\n"
    assert load_recipe(write("recipe.yaml", text)).config["c"] == {"x": 2, "y": 1}


def test_thousands_of_references_to_nothing_are_as_few_problems():
    text = "".join(f"a{number}: ${{b{number}}}\n" for number in range(4000))
    with pytest.raises(RecipeError, match=r"recipe\.yaml: more than 100 problems"):
        load(write("recipe.yaml", f"grpo: {{}}\n{text}"))


@pytest.mark.parametrize("value", ["1e5", "1e-8", ".5", "1:30", "2026-08-01", "null", "0x10", "~", "yes", 1e-8, 1e22])
def test_what_is_printed_is_read_as_the_same_value(value):
    printed = as_yaml({"a": {"b": value}})
    assert load_recipe(write("recipe.yaml", printed)).config == {"a": {"b": value}}


def test_a_warm_start_that_names_itself(tmp_path):
    text = (CONFIGS / "grpo_tiny_cpu.yaml").read_text().replace("common/", f"{CONFIGS}/common/")
    path = write("recipe.yaml", text.replace("sft_tiny_cpu.yaml", "recipe.yaml"))
    with pytest.raises(RecipeError, match=r"warm_start\.recipe: must be an sft recipe; found one of grpo"):
        load(path)
