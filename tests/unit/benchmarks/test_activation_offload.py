"""Tests that validation accepts the cases of benchmarks/activation_offload.py."""

from activation_offload import CASES


def test_validation_accepts_what_is_run():
    for case in CASES.values():
        assert case.policy(max(case.sizes))["megatron_cfg"]["offload_modules"] == list(case.modules)
