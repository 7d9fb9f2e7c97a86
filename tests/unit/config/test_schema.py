"""The schema: every key is documented, and every section strict."""

import re
import runpy

from nemo_offload_rl.config.algorithms import ALGORITHMS
from nemo_offload_rl.config.keys.tree import key_comments, schema_keys
from nemo_offload_rl.config.schema import GRPOMasterConfig
from nemo_offload_rl.config.schema.megatron import MegatronConfig, MegatronDDPConfig, MegatronOptimizerConfig
from nemo_offload_rl.config.schema.policy import HfConfigFields
from tests.unit.config.conftest import CONFIGS

KEYS = [key for spec in ALGORITHMS.values() for key in schema_keys(spec.schema).values()]
ALL_KEYS = {key.path: key for key in KEYS if key.name != "*"}


def test_each_key_has_a_comment_that_says_what_it_is_for():
    for path, key in ALL_KEYS.items():
        assert len(key.comment.split()) >= 2, path
        assert key.comment.endswith((".", ")")), path
        assert key.required or "bsent: " in key.comment, f"{path} may be absent: its comment says what that means"


def test_a_comment_is_the_block_above_its_key():
    comments = key_comments(GRPOMasterConfig)
    assert comments["grpo"] == "The algorithm."
    assert comments["warm_start"].endswith("Absent: GRPO starts from policy.model_name itself.")


def test_sections_are_strict_and_only_those_of_other_libraries_are_open():
    owners = {key.owner for key in ALL_KEYS.values()}
    assert all(owner.__pydantic_config__["strict"] for owner in owners)
    open_ones = {owner for owner in owners if owner.__pydantic_config__["extra"] != "forbid"}
    assert open_ones == {MegatronConfig, MegatronOptimizerConfig, MegatronDDPConfig, HfConfigFields}


def test_the_page_of_keys_has_every_key():
    page = runpy.run_path(str(CONFIGS.parents[1] / "tools" / "keys_page.py"))["page"]()
    named = set(re.findall(r"`(\w+)`", page))
    assert [path for path, key in ALL_KEYS.items() if key.name not in named] == []
    for algorithm, spec in ALGORITHMS.items():
        section = page.partition(f"## `{algorithm}`\n")[2].partition("\n## ")[0]
        keys = [path.rpartition(".") for path in schema_keys(spec.schema)]
        assert [name for parent, _, name in keys if parent == algorithm and f"`{name}`" not in section] == []
