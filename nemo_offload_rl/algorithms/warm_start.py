"""An SFT run before GRPO, whose result is kept for the next time."""

from __future__ import annotations

import shutil
from pathlib import Path

from nemo_offload_rl.algorithms.checkpoints import NoCheckpoints
from nemo_offload_rl.algorithms.job import Job, Session
from nemo_offload_rl.algorithms.run_folder import HF_FOLDER, read_recipe, write_recipe
from nemo_offload_rl.algorithms.step_end import StopReason


def run_warm_start(job: Job, folder: Path, session: Session) -> Path | None:
    """Runs an SFT recipe in a folder, unless the same resolved recipe has been run there to its end.

    The recipe is written into the folder last and marks a complete run. No checkpoints are kept.

    Args:
        job: the SFT recipe, which exports its model.
        folder: for the run; what an unfinished or another run has left there is removed.
        session: what it runs on.

    Returns:
        The exported Hugging Face folder, or None where the run was interrupted.
    """
    if read_recipe(folder) == job.config:
        message = f"The warm start in {folder} is that of this recipe and is used again."
        session.console.print(message, markup=False, highlight=False, soft_wrap=True)
        return folder / HF_FOLDER
    if folder.exists():
        shutil.rmtree(folder)
    if job.run_in(folder, session, NoCheckpoints(), None, "warm start").reason is StopReason.INTERRUPTED:
        return None
    write_recipe(folder, job.config)
    return folder / HF_FOLDER
