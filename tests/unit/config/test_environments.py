"""The section `env`: which rewards a recipe may name, and what absent keys stand for."""

import pytest

from nemo_offload_rl.config import load
from tests.unit.config.conftest import CONFIGS


def load_env(env, *overrides):
    return load(CONFIGS / "grpo_tiny_cpu.yaml", [f"env={{_override_: true, arithmetic: {{{env}}}}}", *overrides])


def test_math_verify_has_workers_and_a_time_limit():
    env = load_env("math_verify_impl: dapo_math_verify, num_workers: 16").config["env"]["arithmetic"]
    assert env == {"math_verify_impl": "dapo_math_verify", "num_workers": 16, "time_limit_s": 10.0}
    assert load_env("math_verify_impl: hf_math_verify").config["env"]["arithmetic"]["num_workers"] == 8


@pytest.mark.parametrize("name", ["math", "math_default"])
def test_nemo_rls_environment_for_math_has_its_verifier(name):
    def env(keys):
        own = [f"env={{_override_: true, {name}: {{{keys}}}}}", f"data.default.env_name={name}"]
        return load(CONFIGS / "grpo_tiny_cpu.yaml", own).config["env"][name]

    workers = {"num_workers": 8, "time_limit_s": 10.0}
    assert env("") == {"math_verify_impl": "hf_math_verify", **workers}
    assert env("num_workers: 2, verifier_type: math") == env("num_workers: 2")
    assert env("math_verify_impl: dapo_math_verify")["math_verify_impl"] == "dapo_math_verify"
    assert env("reward: exact_match") == {"reward": "exact_match", "math_verify_impl": None}


def test_nemo_gym_is_the_missing_feature(error_of):
    error_of("+env.should_use_nemo_gym=true")
    keys = ("should_use_nemo_gym=false", "should_log_nemo_gym_responses=true", "should_mask_flagged_samples=true")
    assert list(load_env("reward: exact_match", *(f"+env.{key}" for key in keys)).config["env"]) == ["arithmetic"]


def test_a_python_reward_has_a_worker_and_a_time_limit():
    function = {"reward": "python", "reward_function": "a:b"}
    env = load_env("reward: python, reward_function: 'a:b'").config["env"]["arithmetic"]
    assert env == function | {"num_workers": 1, "time_limit_s": 60.0, "math_verify_impl": None}
    validated = load_env("reward: python, reward_function: 'a:b', num_workers: 3, time_limit_s: 5")
    assert validated.config["env"]["arithmetic"].items() >= (function | {"num_workers": 3, "time_limit_s": 5.0}).items()
    assert not any("num_workers" in note for note in validated.notes)


def test_a_reward_of_ours_stays_as_it_is_and_one_that_is_not_in_use_may_say_nothing():
    env = {"reward": "exact_match", "math_verify_impl": None, "num_workers": 4}
    validated = load_env("reward: exact_match, math_verify_impl: null, num_workers: 4")
    assert validated.config["env"]["arithmetic"] == env
    assert load_env("reward: exact_match", "+env.dapo={num_workers: 64}").config["env"]["dapo"]["num_workers"] == 64


@pytest.mark.parametrize(
    "env",
    [
        "num_workers:8",
        "math_verify_impl:hf",
        "math_verify_impl:hf_math_verify,reward_function:'a:b'",
        "math_verify_impl:hf_math_verify,num_workers:0",
        "math_verify_impl:hf_math_verify,time_limit_s:0",
    ],
)
def test_a_mistake_is_named_with_its_remedy(env, error_of):
    error_of(f"env={{_override_:true,arithmetic:{{{env}}}}}")
