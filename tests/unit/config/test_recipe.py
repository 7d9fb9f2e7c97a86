"""Reading recipes: inheritance, overrides, interpolation, and what is said where one cannot be read."""

import os
from pathlib import Path

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from nemo_offload_rl.config import load
from nemo_offload_rl.config.problems import MAX_PROBLEMS, RecipeError
from nemo_offload_rl.config.recipe import load_recipe, read_recipe
from nemo_offload_rl.config.source.yaml_source import as_yaml
from tests.unit.config.conftest import CONFIGS, GOLDEN


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
    return str(caught.value)


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
    text = 'a: {b: 3, c: "${.b}", d: "${mul:${a.b}, ${a.c}}", e: "${max:${a.b},${add:2,2}}", f: "${div:${a.b},2}"}'
    config = load_recipe(write("recipe.yaml", f"{text}\ng: ${{a}}\n"), ["a.b=5"]).config
    assert config["a"] == {"b": 5, "c": 5, "d": 25, "e": 5, "f": 2.5}
    assert config["g"] == config["a"]


def test_overrides_follow_hydras_grammar():
    text = "a: {b: 1, c: {d: 1}}\nlist: [1]\nnone: null\nunset: null\nnil: null\n"
    overrides = ["a.b=2", "+a.e='1'", "++a.b=3", "++a.f=1e-8", "~a.c.d", "a.c={g: [1, x]}", "list=[2,null]"]
    overrides += ["+none.x.y=1", "++none.x.z=2", "unset={w: 3}", "+nil={v: 4}"]
    config = load_recipe(write("recipe.yaml", text), overrides).config
    expected = OmegaConf.create(text)
    ConfigLoaderImpl._apply_overrides_to_config(OverridesParser.create().parse_overrides(overrides), expected)
    assert config == OmegaConf.to_container(expected)
    assert config["none"] == {"x": {"y": 1, "z": 2}}


def test_an_anchor_can_be_used_twice_and_overridden_apart():
    path = write("recipe.yaml", "a: &a {x: 1}\nb: *a\nc: {<<: *a, y: 2}\n")
    assert load_recipe(path, ["b.x=5"]).config == {"a": {"x": 1}, "b": {"x": 5}, "c": {"x": 1, "y": 2}}
    text = "a: &a {x: 1, y: 1}\nb: &b {<<: *a, x: 2}\nc: *b\n"
    assert load_recipe(write("recipe.yaml", text)).config["c"] == {"x": 2, "y": 1}


ANSWERED = [(group, case) for group in GOLDEN if group.startswith(("text: ", "override: ")) for case in GOLDEN[group]]


@pytest.mark.parametrize(("group", "case"), ANSWERED)
def test_what_cannot_be_read_or_does_not_apply_is_answered_with_where_and_why(group, case, golden):
    write("a.yaml", "a: 1\n")
    recipe = write("recipe.yaml", case if group.startswith("text: ") else "a: {b: 1, seed: 1, c: null}\nb: {seed: 1}\n")
    golden(group, case, error_of(recipe, *([case] if group.startswith("override: ") else [])))


FAR_TOO_LONG = [
    ("a: {b: 1}\n", f"a.b={'1' * 5000}", "...: has an integer of more than 4,300 digits"),
    (f"a:\n  b: {'1' * 5000}\n", None, "recipe.yaml:2: a.b: '1111111"),
    (f"a:\n  b: 0x{'f' * 5000}\n", None, "... cannot be read as int"),
    (f"a:\n  b: {':'.join(['1'] * 5000)}\n", None, "... cannot be read as int"),
    (f"a:\n  ? {'1' * 5000}\n  : 2\n", None, "recipe.yaml:2: a: '1111111"),
    (f"defaults: {'x' * 5000}\n", None, "cannot be read: file name too long"),
    ("a: 1 # " + "x" * 2**20, None, "recipe.yaml: has more than 1,048,576 bytes, the limit for this file"),
]


@pytest.mark.parametrize(
    ("text", "override", "message"),
    FAR_TOO_LONG,
    ids=["override", "decimal", "hexadecimal", "sexagesimal", "key", "file name", "file"],
)
def test_what_is_far_too_long_is_answered_in_a_line(text, override, message):
    error = error_of(write("recipe.yaml", text), *([] if override is None else [override]))
    assert message in error


def test_all_problems_are_reported_at_once_with_their_lines():
    path = write("recipe.yaml", "a:\n  x: 1\n  x: 2\nb: ${c.d}\n3: x\n")
    error = error_of(path, "nope=1")
    assert "recipe recipe.yaml: 4 problems" in error
    assert "recipe.yaml:3: a.x: appears twice in this section, first on line 2" in error
    assert "recipe.yaml:4: b: '${c.d}' cannot be resolved: Interpolation key 'c.d' not found" in error
    assert "recipe.yaml:5: 3: a key must be text, found 3; put it into quotes" in error
    assert "command line: nope=1: nope: the recipe has no such key" in error


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
    error = error_of("configs/grpo_tny.yaml")
    assert "configs/grpo_tny.yaml: there is no such recipe; did you mean configs/grpo_tiny.yaml?" in error
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
