"""The policy worker that runs use: rank 0 checks its model against transformers while it is built."""

import copy
import logging
from contextlib import ExitStack
from typing import Any

import torch

from nemo_offload_rl.config.schema.policy import PolicyConfig
from nemo_offload_rl.hf_config import hf_config
from nemo_offload_rl.model_check.check import ModelCheck
from nemo_offload_rl.worker.worker import MegatronPolicyWorker

logger = logging.getLogger(__name__)


class CheckedPolicyWorker(MegatronPolicyWorker):
    """Refuses, while it is built, a model that Megatron computes differently from transformers.

    Raises:
        ValueError: the model is refused, or as `MegatronPolicyWorker`.
    """

    def __init__(self, config: PolicyConfig, *, rank: int, local_rank: int, **arguments: Any) -> None:
        if rank != 0:  # checking one rank suffices: all have the same layers
            super().__init__(config, rank=rank, local_rank=local_rank, **arguments)
            return
        device = torch.cuda.get_device_name(local_rank) if torch.cuda.is_available() else "cpu"
        model = hf_config(config)
        with ModelCheck(config, copy.deepcopy(model), device=device) as check, ExitStack() as undo:
            super().__init__(config, rank=rank, local_rank=local_rank, hf_config=model, **arguments)
            undo.callback(self.shutdown)
            message = check.finish()
            logger.log(check.level, "%s", message)
            undo.pop_all()
