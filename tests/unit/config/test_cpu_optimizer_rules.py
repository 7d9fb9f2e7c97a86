"""Keys of the CPU optimizer: what is refused, what is said, and what loads."""

from nemo_offload_rl.config import for_machine, load
from tests.unit.config.conftest import CONFIGS, each_of
from tests.unit.config.test_upstream import MEGATRON_RECIPE, OUR_SECTIONS

OPTIMIZER = "policy.megatron_cfg.optimizer"
ON = f"{OPTIMIZER}.optimizer_cpu_offload=true"
HALF = f"{ON} {OPTIMIZER}.optimizer_offload_fraction=0.5 {OPTIMIZER}.use_precision_aware_optimizer=true"
SGD = f"{OPTIMIZER}.optimizer=sgd {OPTIMIZER}.use_precision_aware_optimizer=false"
TINY = CONFIGS / "grpo_tiny_cpu.yaml"
BROKEN = {
    "cpu_optimizer": [
        ON,
        f"{ON} ~{OPTIMIZER}.optimizer_offload_fraction",
        f"{ON} {OPTIMIZER}.optimizer_offload_fraction=1.5",
        f"{HALF} {SGD} {OPTIMIZER}.use_distributed_optimizer=false",
        f"{HALF} +{OPTIMIZER}.decoupled_weight_decay=false",
        f"{OPTIMIZER}.overlap_cpu_optimizer_d2h_h2d=true",
        f"{HALF} +{OPTIMIZER}.exp_avg_sq_dtype=bfloat16",
        f"+{OPTIMIZER}.use_torch_optimizer_for_cpu_offload=true",
    ]
}


@each_of(BROKEN)
def test_what_cannot_be_is_refused_with_its_remedy(overrides, error_of):
    error_of(*overrides)


def test_it_takes_adam_and_sgd_and_nemo_rls_keys():
    notes = load(TINY, [*HALF.split(), f"{OPTIMIZER}.overlap_cpu_optimizer_d2h_h2d=true"]).notes
    assert not any(OPTIMIZER in note for note in notes)
    load(TINY, f"{HALF} {SGD}".split())
    keys = [ON, f"{OPTIMIZER}.optimizer_offload_fraction=1.0", f"++{OPTIMIZER}.overlap_cpu_optimizer_d2h_h2d=true"]
    optimizer = load(MEGATRON_RECIPE, [*OUR_SECTIONS, *keys]).config["policy"]["megatron_cfg"]["optimizer"]
    assert optimizer.items() >= {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}.items()


def test_without_a_gpu_it_is_off_and_said_in_one_line():
    adapted, lines = for_machine(load(TINY, HALF.split()).config, has_gpus=False)
    optimizer = adapted["policy"]["megatron_cfg"]["optimizer"]
    assert (optimizer["optimizer"], optimizer["optimizer_cpu_offload"]) == ("adam", False)
    (line,) = (line for line in lines if "cpu_offload" in line)
    assert line.endswith("is off on this machine: it needs a GPU; here the whole optimizer runs on the CPU")
    adapted, lines = for_machine(load(TINY, f"{HALF} {SGD}".split()).config, has_gpus=False)
    assert adapted["policy"]["megatron_cfg"]["optimizer"]["use_distributed_optimizer"] is False
    assert any("use_distributed_optimizer is off on this machine" in line for line in lines)
