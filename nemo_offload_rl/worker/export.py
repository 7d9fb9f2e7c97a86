"""From a run's checkpoint to a Hugging Face folder, in one process."""

import json
import shutil
from pathlib import Path

import torch
import yaml

from nemo_offload_rl.config import adapt_to_cpu
from nemo_offload_rl.mcore.export import HF_CONFIG_DIR
from nemo_offload_rl.worker.worker import MegatronPolicyWorker


def export_checkpoint(checkpoint: Path, folder: Path) -> None:
    """Write the policy of a run's checkpoint as a Hugging Face folder with its tokenizer; runs in this one process.

    Args:
        checkpoint: a `step_N` folder of a run.
        folder: where to; made if missing.

    Raises:
        ValueError: `checkpoint` is not such a folder, or `folder` holds something else already.
    """
    recipe = checkpoint / "recipe.yaml"
    if not recipe.is_file():
        raise ValueError(f"{checkpoint} is no checkpoint of a run: it has no recipe.yaml; give a step_N folder.")
    if folder.exists() and any(folder.iterdir()) and not (folder / "config.json").is_file():
        raise ValueError(f"{folder} is not empty and holds no model; give an empty or new folder.")
    config = yaml.safe_load(recipe.read_text())
    if not torch.cuda.is_available():
        config, _ = adapt_to_cpu(config)
    policy = config["policy"]
    source = checkpoint / "policy" / HF_CONFIG_DIR / "config.json"
    policy["hf_config"] = json.loads(source.read_text())
    policy["hf_config_overrides"] = {}
    policy["megatron_cfg"] |= {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": 1,
        "num_layers_in_first_pipeline_stage": None,
        "num_layers_in_last_pipeline_stage": None,
        "sequence_parallel": False,
    }
    worker = MegatronPolicyWorker(
        policy,
        rank=0,
        world_size=1,
        local_rank=0,
        master_addr="localhost",
        master_port=0,
        seed=0,
        init_reference_model=False,
        init_optimizer=False,
    )
    try:
        worker.load_checkpoint(str(checkpoint / "policy"))
        worker.export_hf(str(folder))
    finally:
        worker.shutdown()
    shutil.copytree(checkpoint / "tokenizer", folder, dirs_exist_ok=True)
