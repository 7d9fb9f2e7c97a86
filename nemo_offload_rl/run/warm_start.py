"""Runs the SFT recipe that comes before a run and gives it its initial weights."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_offload_rl.config.megatron import on_one_rank
from nemo_offload_rl.run.checkpoints import NoCheckpoints
from nemo_offload_rl.run.folder import HF_FOLDER, changed_keys, read_recipe, tell, write_recipe
from nemo_offload_rl.run.job import Job, Session
from nemo_offload_rl.run.train_loop import StopReason
from nemo_offload_rl.storage.disk import replace_folder, unfinished


def run_warm_start(job: Job, folder: Path, session: Session) -> Path | None:
    """Runs an SFT recipe in a folder, unless the same resolved recipe has already finished there, on any cluster.

    It runs in a folder beside, which gets the recipe last and then replaces the folder: the model of another recipe
    stays until this one's is complete. No checkpoints are kept.

    Args:
        job: the SFT recipe, which exports its model.
        folder: the folder of the finished run.
        session: the command's cluster, interrupt, console and time limit.

    Returns:
        The exported Hugging Face folder, or None where the run was interrupted.
    """
    written = read_recipe(folder)
    if written is not None and _apart_from_ranks(written) == _apart_from_ranks(job.config):
        tell(session.console, f"The warm start in {folder} was made by the same recipe and is used again.")
        return folder / HF_FOLDER
    new = unfinished(folder)
    if new.exists():
        shutil.rmtree(new)
    if written is not None:
        changed = ", ".join(changed_keys(_apart_from_ranks(written), _apart_from_ranks(job.config)))
        tell(
            session.console,
            f"The warm start in {folder} was made by a recipe with other values of {changed}: the new one runs in "
            f"{new}, and replaces it once it is done.",
        )
    if job.run_in(new, session, NoCheckpoints(), None, "warm start").reason is StopReason.INTERRUPTED:
        return None
    write_recipe(new, job.config)
    replace_folder(folder, new)
    return folder / HF_FOLDER


def _apart_from_ranks(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config without what its ranks are and share: on others the model differs only by rounding."""
    policy = {**config["policy"], "train_micro_batch_size": None}
    policy["sequence_packing"] = {**policy["sequence_packing"], "train_mb_tokens": None, "logprob_mb_tokens": None}
    policy["megatron_cfg"] = on_one_rank(policy["megatron_cfg"])
    return {**config, "cluster": None, "policy": policy, "sft": {**config["sft"], "val_micro_batch_size": None}}
