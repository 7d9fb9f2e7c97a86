"""Tests the output of `nemo-offload-rl plan` through the command line."""

import json
import re
import subprocess

import pytest
from support.forked_python import forked_python

from nemo_offload_rl.cli import main
from nemo_offload_rl.residency.table import DEFAULT_TABLE
from tests.unit.config.conftest import CONFIGS

BENCHMARK = str(CONFIGS.parents[1] / "benchmarks" / "recipes" / "grpo_1_5B_random.yaml")


def printed(capsys, *arguments):
    assert main(["plan", *arguments]) == 0
    return capsys.readouterr().out


def row(text, first):
    """Returns the cells of a table's first row that starts with this cell."""
    line = next(line for line in text.splitlines() if line.startswith(f"│ {first} "))
    return [cell.strip() for cell in line.strip("│").split("│")]


def test_the_tables_say_where_everything_is_and_what_it_costs(capsys):
    text = printed(capsys, BENCHMARK, "++policy.residency.table.generate.params=keep")
    residency, memory, traffic = text.split("┏")[1:4]
    assert row(residency, "params") == ["params", "gpu", "gpu", "gpu", "keep"]
    assert row(residency, "reference_weights") == ["reference_weights", "host", "swapped in", "host", "host"]
    assert "params in generate: set by policy.residency.table.generate.params (command line: ++policy.resi" in text
    assert "optimizer_state in logprob: set by policy.offload_optimizer_for_logprob (" in text
    assert "One rank in GiB: 1,543,714,304 parameters" in text
    assert row(memory, "optimizer_state") == ["optimizer_state", "14.38", "0", "14.38", "0", "0", "14.38"]
    assert row(memory, "params") == ["params", "2.88", "2.88", "2.88", "2.88", "2.88", "2.88"]
    assert row(traffic, "logprob to train") == ["logprob to train", "optimizer_state", "0", "14.38", "0.281"]
    assert "at 55 GB/s (page-locked)" in text
    assert "Host memory: 20.13 GiB for the one rank on a host." in text
    assert "This machine has " in text
    elsewhere = " ".join(printed(capsys, BENCHMARK, "--host-memory", "20").split())
    assert "A machine of 20 GiB has 19.00 GiB for offloading (all of its memory, minus a margin of 1.00" in elsewhere
    assert "the plan does not fit." in elsewhere
    values = json.loads(printed(capsys, BENCHMARK, "--host-memory", "22", "--json"))["host"]
    assert values == {"name": "a machine of 22 GiB", "usable_bytes": 22 * 2**30 - int(1.1 * 2**30), "fits": True}


def test_the_engines_weights_and_kv_cache_are_shown_beside_the_policys_targets(capsys):
    vllm = (BENCHMARK, "policy.generation.backend=vllm", "--gpu-memory", "100")
    text = printed(capsys, *vllm)
    residency, memory = text.split("┏")[1:3]
    assert row(residency, "generation_weights")[1:] == ["discarded", "discarded", "gpu", "gpu"]
    assert row(residency, "kv_cache")[1:] == ["discarded", "discarded", "gpu at its end", "gpu"]
    assert "policy.residency.generation_weights=host keeps them in host memory" in text
    names = [cell.strip() for cell in memory.splitlines()[1].strip("┃").split("┃")]
    assert row(memory, "vLLM's weights")[names.index("GPU in train")] == ""
    assert row(memory, "vLLM's weights")[names.index("GPU in refit")] == "2.88"
    generate = names.index("GPU in generate")
    cache = float(row(memory, "vLLM's KV cache")[generate])
    assert cache == pytest.approx(512 * (512 + 16) * 28672 / 2**30, abs=0.01)  # all sequences in flight
    graphs = row(memory, "refit's CUDA graphs")
    assert graphs[2:6] == ["0.0273"] * 4  # in every phase; 26 MiB in the policy's process, 2 in vLLM's
    params, state, everything = (float(row(memory, name)[generate]) for name in ("params", "optimizer_state", "all"))
    assert everything == pytest.approx(params + state + 2.88 + cache + 0.0273, abs=0.02)
    assert row(residency, "params")[-1] == "gpu"  # there is room
    assert "params in generate: set by policy.residency.table.generate.params (chosen by the plan for this GPU)" in text
    assert "2.88 GiB a rank, stay on the GPU during generation, since they fit" in text
    moved = printed(capsys, *vllm, "++policy.residency.table.generate.params=host")
    assert row(moved, "params")[-1] == "host"
    kept = printed(capsys, *vllm, "++policy.residency.generation_weights=host")
    assert row(kept, "generation_weights")[1:] == ["host", "host", "gpu", "gpu"]
    assert row(kept.split("┏")[2], "generation_weights")[-1] == "2.88"
    assert json.loads(printed(capsys, *vllm, "--json"))["engine_table"]["train"]["kv_cache"] == "discarded"
    transformers = printed(capsys, BENCHMARK)
    assert row(transformers, "generation_weights")[1:] == ["host", "host", "gpu", "gpu"]
    assert "vLLM" not in transformers
    assert "CUDA graphs" not in transformers


def test_the_tokens_of_packed_rows_that_a_gpu_has_room_for(capsys):
    text = printed(capsys, BENCHMARK, "--gpu-memory", "139.8")
    assert "packed rows of training have up to 32,768 tokens: they take an estimated " in text
    assert "and training state takes 20.13 GiB; " in text
    values = json.loads(printed(capsys, BENCHMARK, "--gpu-memory", "79.6", "--json"))
    assert 16384 <= values["sequence_packing"]["train_mb_tokens"] < 32768
    assert values["sequence_packing"]["logprob_mb_tokens"] == 32768
    text = printed(capsys, BENCHMARK)
    assert "packed rows of training have up to 2,048 tokens, max_total_sequence_length times the micro-batch" in text
    assert "--gpu-memory GIB shows the tokens for a GPU of that size" in text
    text = " ".join(printed(capsys, BENCHMARK, "--gpu-memory", "23", "--host-memory", "64").split())
    assert re.search(r"policy\.sequence_packing\.train_mb_tokens is auto\b.* 1\.78 GiB", text)  # room for none
    assert "For a GPU of 23.00 GiB use CPU optimizer, 0.5" in text


def test_streamed_optimizer_state_has_its_window_and_the_time_of_its_step(capsys):
    text = printed(capsys, BENCHMARK, "++policy.residency.table.train.optimizer_state=streamed")
    residency, memory, traffic = text.split("┏")[1:4]
    assert row(residency, "optimizer_state") == ["optimizer_state", "streamed", "keep", "host", "host"]
    assert row(memory, "optimizer_state") == ["optimizer_state", "14.38", "0", "0.5", "0", "0", "14.38"]
    assert row(traffic, "logprob to train") == ["logprob to train", "", "0", "0", "0.000"]
    assert row(traffic, "each optimizer step")[1:] == ["optimizer_state, streamed", "14.38", "14.38", "0.305"]
    values = json.loads(printed(capsys, BENCHMARK, "++policy.residency.table.train.optimizer_state=streamed", "--json"))
    [moved] = values["stages"][0]["step_traffic"]
    assert moved["d2h_bytes"] == moved["h2d_bytes"] == values["stages"][0]["host_bytes"]["optimizer_state"]


def test_pageable_memory_is_slower_and_the_page_says_what_is_faster(capsys):
    text = printed(capsys, BENCHMARK, "policy.use_pinned_optimizer_offload=false", "--link", "40")
    assert "Copies over the link in a step, at 40 GB/s (page-locked)," in text
    assert "optimizer_state at 10 GB/s (pageable)" in text
    assert "policy.use_pinned_optimizer_offload=true copies optimizer_state at the page-locked speed" in text
    assert row(text, "logprob to train")[-1] == "1.544"  # 15.4 GB
    assert row(text, "refit to generate")[-1] == "0.077"  # 3.1 GB of params


def test_a_faster_way_is_named_only_where_there_is_one(capsys):
    text = printed(capsys, BENCHMARK, "policy.use_pinned_optimizer_offload=false", "--link", "1")
    assert "optimizer_state at 1 GB/s (pageable)" in text
    assert "policy.use_pinned_optimizer_offload=true" not in text
    text = printed(capsys, str(CONFIGS / "sft_tiny_cpu.yaml"))
    assert "Host memory: 0 GiB for the one rank on a host." in text
    assert "policy.use_pinned_optimizer_offload=true" not in text


def test_options_have_no_cells_that_the_plan_has_written_itself(capsys):
    unset = ["policy.offload_optimizer_for_refit=null", "policy.residency.table={}", "--json"]
    plan = json.loads(printed(capsys, str(CONFIGS / "sft_tiny_cpu.yaml"), *unset))
    overrides = {one["way"]["name"]: one["way"]["overrides"] for one in plan["optimizer_state_ways"]["ways"]}
    assert overrides["streamed"] == ["++policy.residency.table.train.optimizer_state=streamed"]
    assert not any(".table." in override for override in overrides["CPU optimizer, 0.5"])


def test_json_has_every_stage_and_host(capsys):
    sizes = ["policy.megatron_cfg.pipeline_model_parallel_size=2", "cluster.num_nodes=2"]
    plan = json.loads(printed(capsys, BENCHMARK, "--gpus", "4", "--json", *sizes))
    assert plan["table"] == DEFAULT_TABLE
    assert plan["written_by"]["logprob"] == {"optimizer_state": "policy.offload_optimizer_for_logprob"}
    first, last = plan["stages"]
    # Both have the embedding, which is also the output layer.
    assert first["facts"]["num_params"] + last["facts"]["num_params"] == 1_543_714_304 + 151936 * 1536
    assert last["facts"]["num_params"] - first["facts"]["num_params"] == 1536  # the last norm
    of_hosts = {"host 0": 4 * sum(first["host_bytes"].values()), "host 1": 4 * sum(last["host_bytes"].values())}
    assert plan["host_bytes_per_host"] == of_hosts
    [to_train] = [change for change in first["transitions"] if change["to"] == "train"]
    [optimizer] = to_train["traffic"]
    assert optimizer["h2d_bytes"] == first["target_bytes"]["optimizer_state"]
    assert to_train["seconds"] == pytest.approx(optimizer["h2d_bytes"] / plan["link_bytes_per_s"])


def test_the_largest_stage_is_shown_and_the_others_named(capsys):
    text = printed(capsys, BENCHMARK, "--gpus", "2", "policy.megatron_cfg.pipeline_model_parallel_size=2")
    assert "One rank of pipeline stage 1, the largest, in GiB: 888,544,768 parameters" in text
    assert "  a rank of pipeline stage 0 holds " in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "3", "policy.megatron_cfg.tensor_model_parallel_size=2"], "do not divide the 3 ranks of the clust"),
        (["policy.residency.host_memory_limit_gib=1"], "policy.residency.host_memory_limit_gib=21, or null"),
        (["policy.hf_config.model_type=olmoe"], "The model's model_type is 'olmoe', and the plan knows the sizes only"),
    ],
)
def test_what_cannot_be_planned_is_one_error(capsys, arguments, message):
    assert main(["plan", BENCHMARK, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_model_of_unknown_sizes_still_has_a_table(capsys):
    unknown = "policy.hf_config.model_type=olmoe"
    assert main(["plan", BENCHMARK, unknown]) == 2
    written = capsys.readouterr()
    assert row(written.out, "reference_weights") == ["reference_weights", "host", "swapped in", "host", "host"]
    assert "optimizer_state in logprob: set by policy.offload_optimizer_for_logprob (" in written.out
    assert "GiB" not in written.out
    assert written.err.endswith("before it page-locks anything.\n")
    assert main(["plan", BENCHMARK, unknown, "--json", "loss_fn.reference_policy_kl_penalty=0.0"]) == 2
    plan = json.loads(capsys.readouterr().out)
    assert plan["table"] == DEFAULT_TABLE
    assert "stages" not in plan


def test_a_model_folder_is_read(tmp_path, capsys):
    from transformers import AutoConfig

    config = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config |= {"intermediate_size": 128, "vocab_size": 100, "tie_word_embeddings": False}
    AutoConfig.for_model("llama", **config).save_pretrained(tmp_path)
    recipe = str(CONFIGS / "grpo_math_1B_megatron.yaml")
    plan = json.loads(printed(capsys, recipe, f"policy.model_name={tmp_path}", "--json"))
    layer = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 128 + 2 * 64
    assert plan["stages"][0]["facts"]["num_params"] == 2 * layer + 64 + 2 * 100 * 64


def test_it_runs_as_a_command_with_nothing_to_complain_of():
    command = [forked_python(), "-m", "nemo_offload_rl.cli", "plan", str(CONFIGS / "sft_tiny_cpu.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "logprob to train" in done.stdout
