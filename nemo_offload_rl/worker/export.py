"""Exports a run's checkpoint to a Hugging Face folder, in one process."""

import shutil
from pathlib import Path

import torch

from nemo_offload_rl.config import for_machine
from nemo_offload_rl.config.megatron import on_one_rank
from nemo_offload_rl.hf_config import GENERATION_CONFIG_FILE, hf_config
from nemo_offload_rl.mcore.weights import HF_CONFIG_DIR
from nemo_offload_rl.plan.planner import worker_plan
from nemo_offload_rl.storage.disk import HF_FILES, replacing, translate_disk_full
from nemo_offload_rl.storage.manifest import require_whole
from nemo_offload_rl.worker.export_source import read_export_source
from nemo_offload_rl.worker.worker import MegatronPolicyWorker


def export_checkpoint(checkpoint: Path, folder: Path) -> None:
    """Write the policy of a run's checkpoint as a Hugging Face folder with its tokenizer; runs in this one process.

    Args:
        checkpoint: a `step_N` folder of a run.
        folder: the target folder; created if missing. An earlier export there is replaced once the new one is complete.

    Raises:
        DamagedCheckpointError: a file of `checkpoint` is not what was written.
        DiskFullError: there is no space for the export.
        ValueError: see `read_export_source`.
    """
    source = read_export_source(checkpoint, folder)
    require_whole(checkpoint)
    config, _ = for_machine(source.recipe, has_gpus=torch.cuda.is_available())
    policy = config["policy"]
    policy["hf_config"] = source.hf_config
    policy["hf_config_overrides"] = {}
    policy["megatron_cfg"] = on_one_rank(policy["megatron_cfg"])
    worker = MegatronPolicyWorker(
        policy,
        plan=worker_plan(policy, hf_config(policy).to_dict(), world_size=1, init_optimizer=False),
        rank=0,
        world_size=1,
        local_rank=0,
        master_addr="localhost",
        master_port=0,
        seed=0,
        init_reference_model=False,
        init_optimizer=False,
    )
    with translate_disk_full(folder), replacing(folder, HF_FILES) as new:
        try:
            worker.load_checkpoint(str(source.policy))
            worker.export_hf(str(new))
        finally:
            worker.shutdown()
        # with the modes of the user's umask, not of the checkpoint's files
        written_by_run = source.policy / HF_CONFIG_DIR / GENERATION_CONFIG_FILE
        if written_by_run.is_file():
            shutil.copyfile(written_by_run, new / GENERATION_CONFIG_FILE)
        shutil.copytree(source.tokenizer, new, copy_function=shutil.copyfile, dirs_exist_ok=True)
