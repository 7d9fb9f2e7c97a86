"""Recipes and overrides that stand for too much: each is refused at once, with what was found, where, and the limit."""

import os
from pathlib import Path

import pytest

from nemo_offload_rl.config import RecipeError, limits, load
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


def doubled(first: str, line: str, num_lines: int) -> str:
    """Lines of which each names the one before twice."""
    return first + "".join(line.format(this=number + 1, last=number) for number in range(num_lines))


TOO_LARGE = {
    "aliases of lists": (
        doubled("a0: &a0 [x, x]\n", "a{this}: &a{this} [*a{last}, *a{last}]\n", 40),
        "recipe.yaml:12: the file expands to more than 10,000 keys and values, each alias (*name) counted",
    ),
    "aliases of sections": (
        doubled("a0: &a0 {x: y}\n", "a{this}: &a{this} {{x: *a{last}, y: *a{last}}}\n", 40),
        "the file expands to more than 10,000 keys and values",
    ),
    "merged sections": (
        doubled("a0: &a0 {x: y}\n", "a{this}: &a{this} {{<<: [*a{last}, *a{last}]}}\n", 40),
        "the file expands to more than 10,000 keys and values",
    ),
    "aliases in a row": (
        "a0: &a0 [x]\n" + "".join(f"a{n + 1}: &a{n + 1} [*a{n}]\n" for n in range(3000)),
        "recipe.yaml:32: the file is nested more than 32 levels deep here, aliases (*name) included",
    ),
    "sections": ("{a: " * 3000 + "1" + "}" * 3000, "recipe.yaml:1: the file is nested more than 32 levels deep"),
    "sections by indentation": (
        "".join(f"{' ' * n}a:\n" for n in range(1000)),
        "recipe.yaml:33: the file is nested more than 32 levels deep",
    ),
    "open lists": ("a: " + "[" * 100_000, "recipe.yaml:1: the file is nested more than 32 levels deep"),
    "open keys": ("? " * 100_000, "recipe.yaml:1: the file is nested more than 32 levels deep"),
    "a long list": (f"a: [{'1, ' * 10_001}]", "the file expands to more than 10,000 keys and values"),
    "a long file": ("a: 1 # " + "x" * 2**20, "recipe.yaml: has more than 1,048,576 bytes, the limit for this file"),
    "a long number in base 60": ("a: 1" + ":1" * 10_000, "cannot be read as an integer of 64 bits"),
    "interpolations in one another": (
        f"a: {'${mul:' * 300}1{',2}' * 300}",
        "recipe.yaml:1: a: '${mul:${mul:",
    ),
    "a long interpolation": (
        f"a: '${{mul:{' ' * 1000}1,2}}'",
        "cannot be resolved: it has 1,010 characters, more than 1,000; write its value out",
    ),
    "deep interpolation": (
        f"a: {'${mul:' * 11}1{',2}' * 11}",
        "cannot be resolved: its brackets are nested more than 10 levels deep; write its value out",
    ),
    "long interpolations": (
        "".join(f"a{n}: '${{mul:{' ' * 900}1,2}}'\n" for n in range(22)) + "b: '${mul:1,2}'",
        "recipe.yaml:22: a21: '${mul:",
    ),
    "text of interpolations": (
        doubled("a0: xxxx\n", "a{this}: ${{a{last}}}${{a{last}}}\n", 19),
        "with it the recipe's interpolations expand to more than 1,048,576 characters",
    ),
    "copies of sections": (
        doubled("a0: {x: 1}\n", "a{this}: {{x: '${{a{last}}}', y: '${{a{last}}}'}}\n", 18),
        "with it the recipe's interpolations expand to more than 10,000 values; write some of the values out",
    ),
    "references in a row": (
        "a0: 1\n" + "".join(f"a{n + 1}: ${{a{n}}}\n" for n in reversed(range(500))),
        "more than 20 values refer to one another in a row; write one of them out",
    ),
    "a product": (
        "a0: 9\n" + "".join(f"a{n + 1}: ${{mul:${{a{n}}},${{a{n}}}}}\n" for n in range(15)),
        "recipe.yaml:6: a5: is an integer of more than 64 bits",
    ),
    "text that is multiplied": ("a: ${mul:x,1000000000}", "mul takes two numbers, found 'x'"),
}


@pytest.mark.parametrize(("text", "message"), TOO_LARGE.values(), ids=TOO_LARGE)
def test_a_recipe_that_stands_for_too_much_is_refused(text, message):
    assert message in error_of(text)


def test_what_names_a_value_twice_is_read_within_the_limits():
    text = doubled("a0: 1\n", "a{this}: ${{add:${{a{last}}},${{a{last}}}}}\n", 18)
    assert load_recipe(write("recipe.yaml", text)).config["a18"] == 2**18
    text = doubled("a0: &a0 [x, x]\n", "a{this}: &a{this} [*a{last}, *a{last}]\n", 6)
    assert len(str(load_recipe(write("recipe.yaml", text)).config["a6"])) > 2**7


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (f"a={'[' * 1000}", "has brackets nested more than 32 levels deep; no key takes such a value"),
        (f"a={'[' * 33}1{']' * 33}", "has brackets nested more than 32 levels deep"),
        (f"a={'{b: ' * 40}1{'}' * 40}", "has brackets nested more than 32 levels deep"),
        (f"a={'int(' * 40}1{')' * 40}", "has brackets nested more than 32 levels deep"),
        (f"a={'x' * 10_000}", "has 10,002 characters, more than 10,000; write its value into a recipe"),
    ],
)
def test_an_override_that_is_too_large_is_refused(override, message):
    error = error_of("a: 1\n", override)
    assert message in error
    assert len(error) < 500


def test_all_overrides_together_are_limited():
    overrides = [f"a={'x' * 9_000}"] * 6
    assert "with it the overrides have more than 40,000 characters; write some" in error_of("a: 1\n", *overrides)


def test_lists_and_sections_of_overrides_go_as_deep_as_the_limit():
    deep = f"a={'[' * limits.MAX_DEPTH}1{']' * limits.MAX_DEPTH}"
    assert load_recipe(write("recipe.yaml", "a: 1\n"), [deep]).config["a"] != 1


def test_a_diamond_of_defaults_reads_each_file_once():
    for number in range(20):
        write(f"r{number + 1}.yaml", f"defaults: [r{number}.yaml, r{number}.yaml]\nb{number}: 1\n")
    write("r0.yaml", "a: 1\n")
    recipe = load_recipe("r20.yaml")
    assert recipe.config == {"a": 1} | {f"b{number}": 1 for number in range(20)}
    assert str(recipe.origins["a"]) == "r0.yaml:1"


def test_the_number_of_inherited_files_is_limited():
    for number in range(1500):
        write(f"r{number}.yaml", f"defaults: r{number + 1}.yaml\n")
    with pytest.raises(RecipeError, match=r"r49\.yaml:1: defaults: with r50\.yaml the recipe consists of more than 50"):
        load_recipe("r0.yaml")


def test_the_number_of_names_in_defaults_is_limited():
    write("a.yaml", "a: 1\n")
    names = ", ".join(["a.yaml"] * 201)
    assert "recipe.yaml:2: defaults: names more than 200 files" in error_of(f"b: 1\ndefaults: [{names}]\n")


def test_values_of_all_files_together_are_limited():
    for number in range(4):
        write(f"r{number}.yaml", f"a{number}: [{'1, ' * 3000}]\n")
    error = error_of("defaults: [r0.yaml, r1.yaml, r2.yaml, r3.yaml]\n")
    assert "r3.yaml:1: with it the recipe's files have more than 10,000 keys and values; delete some" in error


def test_so_many_problems_are_listed_and_no_more():
    keys = "".join(f"  num_key_{number}: 1\n" for number in range(3000))
    with pytest.raises(RecipeError) as caught:
        load(write("recipe.yaml", f"grpo:\n{keys}"))
    assert len(str(caught.value).splitlines()) == limits.MAX_PROBLEMS + 1
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
        ("a: !!int 1.5\n", "a: '1.5' cannot be read as an integer of 64 bits"),
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


def test_an_override_names_no_key_deeper_than_the_limit():
    error = error_of("a: 1\n", "+a" + ".a" * 500 + "=1")
    assert "...: names a key more than 32 levels deep; no key lies that deep" in error


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
