"""Reading recipes: inheritance, overrides, interpolation, and what is said where one cannot be read."""

import os
from pathlib import Path

import pytest

from nemo_offload_rl.config import load
from nemo_offload_rl.config.problems import MAX_PROBLEMS, RecipeError
from nemo_offload_rl.config.recipe import load_recipe, read_recipe
from nemo_offload_rl.config.source.yaml_source import as_yaml
from tests.unit.config.conftest import CONFIGS


@pytest.fixture(autouse=True)
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write(name: str, text: str) -> Path:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def error_of(path: Path | str, *overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    return f"{caught.value}\n"


def test_later_defaults_and_the_file_itself_win():
    write("base/grandparent.yaml", "a: {x: 1, y: 1, z: 1}\nlist: [1, 2]\n")
    write("base/parent.yaml", "defaults: grandparent.yaml\na: {y: 2, z: 2}\n")
    write("other.yaml", "a: {z: 3, w: 3}\nlist: [3]\n")
    recipe = load_recipe(write("recipe.yaml", "defaults: [base/parent.yaml, other.yaml]\na: {w: 4}\n"))
    assert recipe.config == {"a": {"x": 1, "y": 2, "z": 3, "w": 4}, "list": [3]}


def test_origins_name_the_file_and_line_that_set_a_key():
    write("parent.yaml", "a:\n  x: 1\n  y: 1\n")
    recipe = load_recipe(write("recipe.yaml", "defaults: parent.yaml\n\na:\n  y: 2\n"), ["+a.z=3"])
    assert str(recipe.origins["a.x"]) == "parent.yaml:2"
    assert str(recipe.origins["a.y"]) == "recipe.yaml:4"
    assert str(recipe.origins["a.z"]) == "command line: +a.z=3"
    assert str(recipe.origin("a.y.deeper")) == "recipe.yaml:4"


def test_the_settings_of_a_recipes_own_are_those_of_its_file_and_of_overrides():
    write("parent.yaml", "a: {x: 1, y: 1}\nb: {c: {}}\nlist: [{z: 0}]\n")
    text = "defaults: parent.yaml\na:\n  y: 2\n  w: ${a.x}\nb:\n  empty: {}\nlist: [{z: 1}]\n"
    recipe = load_recipe(write("recipe.yaml", text), ["b.c={d: 3}", "a.x=4"])
    assert recipe.own_settings() == [
        ("a.x", 4, "command line: a.x=4"),
        ("b.c.d", 3, "command line: b.c={d: 3}"),
        ("a.y", 2, "recipe.yaml:3"),
        ("a.w", 4, "recipe.yaml:4"),
        ("b.empty", {}, "recipe.yaml:6"),
        ("list", [{"z": 1}], "recipe.yaml:7"),
    ]


def test_a_section_replaces_its_base_with_override_marker():
    write("parent.yaml", "a: {x: 1}\nb: {x: 1}\n")
    recipe = load_recipe(write("recipe.yaml", "defaults: parent.yaml\na: {_override_: true, y: 2}\nb: {y: 2}\n"))
    assert recipe.config == {"a": {"y": 2}, "b": {"x": 1, "y": 2}}


@pytest.mark.parametrize("base", ["{}", "{a: null}", "{a: {x: 1}}", "{a: 1}"])
def test_the_marker_of_an_override_is_no_key_whatever_it_replaces(base):
    recipe = load_recipe(write("recipe.yaml", f"{base}\n"), ["++a={_override_: true, b: {_override_: true, y: 2}}"])
    assert recipe.config == {"a": {"b": {"y": 2}}}


def test_null_replaces_a_section_and_a_section_replaces_null():
    write("parent.yaml", "a: {x: 1}\nb: null\n")
    recipe = load_recipe(write("recipe.yaml", "defaults: parent.yaml\na: null\nb: {x: 2}\n"))
    assert recipe.config == {"a": None, "b": {"x": 2}}


def test_numbers_are_those_of_yaml_1_2_off_is_false_and_dates_stay_text():
    numbers = {"1e-8": 1e-8, "1E5": 1e5, "5.0e-6": 5e-6, ".5": 0.5, "-3e2": -300.0, "3": 3}
    for text, value in (numbers | {"1e": "1e", "off": False, "2026-08-01": "2026-08-01"}).items():
        read = load_recipe(write("recipe.yaml", f"a: {text}\n")).config["a"]
        assert (read, type(read)) == (value, type(value))


def test_interpolation_sees_overrides_and_resolvers_compute():
    text = """
    a: {b: 3, c: "${.b}", d: "${mul:${a.b}, ${a.c}}", e: "${max:${a.b},${add:2,2}}", f: "${div:${a.b},2}"}
    g: ${a}
    """
    config = load_recipe(write("recipe.yaml", text), ["a.b=5"]).config
    assert config["a"] == {"b": 5, "c": 5, "d": 25, "e": 5, "f": 2.5}
    assert config["g"] == config["a"]


def test_overrides_follow_hydras_grammar():
    path = write("recipe.yaml", "a: {b: 1, c: {d: 1}}\nlist: [1]\n")
    overrides = ["a.b=2", "+a.e='1'", "++a.b=3", "++a.f=1e-8", "~a.c.d", "a.c={g: [1, x]}", "list=[2,null]"]
    config = load_recipe(path, overrides).config
    assert config == {"a": {"b": 3, "c": {"g": [1, "x"]}, "e": "1", "f": 1e-8}, "list": [2, None]}


def test_an_anchor_can_be_used_twice_and_overridden_apart():
    path = write("recipe.yaml", "a: &a {x: 1}\nb: *a\nc: {<<: *a, y: 2}\n")
    assert load_recipe(path, ["b.x=5"]).config == {"a": {"x": 1}, "b": {"x": 5}, "c": {"x": 1, "y": 2}}
    text = "a: &a {x: 1, y: 1}\nb: &b {<<: *a, x: 2}\nc: *b\n"
    assert load_recipe(write("recipe.yaml", text)).config["c"] == {"x": 2, "y": 1}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("a.sed=1", "command line: a.sed=1: a.sed: the recipe has no such key; nearest key: a.seed"),
        ("+a.b=1", "a.b: is already set; write a.b=... to change it, or ++a.b=..."),
        ("~b.seeds", "b.seeds: cannot be deleted: the recipe has no such key; nearest key: b.seed"),
        ("a.c=1", "command line: a.c=1: a.c: the recipe has no such key\n"),
        ("~a.b=7", "a.b: cannot be deleted: its value is 1, not 7"),
        ("a.b.c=1", "a.b.c: cannot be set: a.b is not a section"),
        ("a.b=1,2", "is a sweep over several values"),
        ("a/b=1", "names a config group"),
        ("a.b", "command line: a.b: cannot be read as an override; write section.key=value"),
        ("a.b=[1", "cannot be read as an override"),
        (f"a.b={'1' * 5000}", "...: has an integer of more than 4,300 digits"),
        ("grpo.seed=3", "grpo.seed: is a valid key that this recipe does not set; write +grpo.seed=... to add it"),
        # What would be dropped.
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
def test_an_override_that_does_not_apply_says_why(override, message):
    assert message in error_of(write("recipe.yaml", "a: {b: 1, seed: 1}\nb: {seed: 1}\n"), override)


def test_all_problems_are_reported_at_once_with_their_lines():
    path = write("recipe.yaml", "a:\n  x: 1\n  x: 2\nb: ${c.d}\n3: x\n")
    error = error_of(path, "nope=1")
    assert "recipe recipe.yaml: 4 problems" in error
    assert "recipe.yaml:3: a.x: appears twice in this section, first on line 2" in error
    assert "recipe.yaml:4: b: '${c.d}' cannot be resolved: Interpolation key 'c.d' not found" in error
    assert "recipe.yaml:5: 3: a key must be text, found 3; put it into quotes" in error
    assert "command line: nope=1: nope: the recipe has no such key" in error


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: ${a}\n", "recipe.yaml:1: a: '${a}' cannot be resolved"),
        ("a: ${mul:1}\n", "mul expected 2 arguments, got 1"),
        ("a: ${nope:1}\n", "Unsupported interpolation type nope"),
        ("a: ${div:1,0}\n", "div of 1 and 0: division by zero"),
        ("a: ${mul:true,2}\n", "mul takes two numbers, found true"),
        ("a: ${oc.env:NO_SUCH_VARIABLE}\n", "the environment has no variable NO_SUCH_VARIABLE"),
        ("a: ${oc.env:1}\n", "oc.env takes the name of a variable and, optionally, a default"),
        ("a: {b: '${...c}'}\nc: 1\n", "a.b: '${...c}' cannot be resolved: ...c lies outside of the recipe"),
        ("a: ${b\n", "recipe.yaml:1: a: '${b'"),
        ("a: ???\n", "recipe.yaml:1: a: must be given a value; it is ???"),
        ("a: 1\nb: [1\n", "broken YAML"),
        ("a: 1\n  b: 2\n", "recipe.yaml:2: broken YAML: mapping values are not allowed in this context"),
        ("a:\n    b: 1\n  c: 2\n", "recipe.yaml:3: broken YAML"),
        ("a:\n\tb: 1\n", "recipe.yaml:2: broken YAML: while scanning"),
        (f"a:\n  b: {'1' * 5000}\n", "recipe.yaml:2: a.b: '1111111"),
        (f"a:\n  b: 0x{'f' * 5000}\n", "... cannot be read as int"),
        (f"a:\n  b: {':'.join(['1'] * 5000)}\n", "... cannot be read as int"),
        (f"a:\n  ? {'1' * 5000}\n  : 2\n", "recipe.yaml:2: a: '1111111"),
        ("a: !!bool x\n", "recipe.yaml:1: a: 'x' cannot be read as bool"),
        ("a: !!int ''\n", "recipe.yaml:1: a: '' cannot be read as int"),
        ("a: {b: &x {c: *x}}\n", "an alias is inside the value that it refers to"),
        ("a: *x\n", "recipe.yaml:1: broken YAML: found undefined alias"),
        ("a.b: 1\n", "recipe.yaml:1: a.b: a key must not have a dot; write the part before it as a section"),
        ("a: !!binary aGk=\n", "recipe.yaml:1: a: 'aGk=' cannot be read as binary"),
        ("a: !!python/object:os.system x\n", "a: 'x' cannot be read as"),
        ("", "recipe.yaml: is empty; a recipe is a mapping of sections"),
        ("- a\n", "recipe.yaml:1: is a list; a recipe is a mapping of sections"),
        ("text\n", "recipe.yaml:1: is a single value"),
        ("defaults: nope.yaml\n", "recipe.yaml:1: defaults: names nope.yaml, but there is no such recipe"),
        ("defaults: [a.yaml, 3]\n", "defaults: must be the name of a recipe, or a list of such names; found 3"),
        ('defaults: "a\\0b"\n', "must be the name of a recipe, or a list of such names; found 'a\\x00b'"),
        (f"defaults: {'x' * 5000}\n", "cannot be read: file name too long"),
        ("defaults: recipe.yaml\n", "the recipe inherits from itself: recipe.yaml -> recipe.yaml"),
        ("a: 1 # " + "x" * 2**20, "recipe.yaml: has more than 1,048,576 bytes, the limit for this file"),
        # What would be dropped.
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
def test_a_recipe_that_cannot_be_read_says_where_and_why(text, message):
    write("a.yaml", "a: 1\n")
    assert message in error_of(write("recipe.yaml", text))


def test_an_environment_variable_is_text(monkeypatch):
    monkeypatch.setenv("NUM_ROWS", "8")
    given = "a: ${oc.env:NUM_ROWS}\nb: ${oc.env:NUM_ROWS,4}\n"
    text = f"{given}c: ${{oc.env:NO_SUCH_VARIABLE,4}}\nd: ${{oc.env:NO_SUCH_VARIABLE,null}}\n"
    assert read_recipe(write("recipe.yaml", text)).config == {"a": "8", "b": "8", "c": "4", "d": None}


def test_a_longer_cycle_is_shown_whole():
    write("b.yaml", "defaults: c.yaml\n")
    write("c.yaml", "defaults: [a.yaml]\n")
    error = error_of(write("a.yaml", "defaults: b.yaml\n"))
    assert "c.yaml:1: defaults: the recipe inherits from itself: a.yaml -> b.yaml -> c.yaml -> a.yaml" in error


def test_a_missing_recipe_suggests_one():
    write("configs/grpo_tiny.yaml", "a: 1\n")
    assert "configs/grpo_tny.yaml: there is no such recipe; did you mean configs/grpo_tiny.yaml?" in error_of(
        "configs/grpo_tny.yaml"
    )
    assert "configs: is a folder, not a recipe" in error_of("configs")


def test_bytes_that_are_no_text():
    Path("recipe.yaml").write_bytes(b"a: \xff\n")
    assert "recipe.yaml: is not UTF-8 text (byte 3)" in error_of("recipe.yaml")
    Path("recipe.yaml").write_bytes(b"a: 1\nb: \x07\n")
    assert "recipe.yaml:2: broken YAML" in error_of("recipe.yaml")


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
    assert f"defaults: names odd.yaml, but {message}" in error_of(write("recipe.yaml", "defaults: odd.yaml\n"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read():
    write("odd.yaml", "a: 1\n").chmod(0)
    with pytest.raises(RecipeError, match=r"odd\.yaml: cannot be read: permission denied"):
        load_recipe("odd.yaml")


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


def test_what_a_value_was_interpolated_from():
    recipe = read_recipe(write("recipe.yaml", "a: {b: 1, c: '${.b}', d: '${mul:${a.b}, ${..x}}'}\nx: 2\n"))
    assert recipe.sources("a.c") == ["a.b"]
    assert recipe.sources("a.d") == ["a.b", "x"]
    assert recipe.sources("x") == []
