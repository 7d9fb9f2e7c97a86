"""Provides what tests of workers on a GPU with Transformer Engine share."""

from typing import Any

import megatron.core.optimizer
import pytest
import torch
from support.tiny import TINY_QWEN3, TINY_QWEN3_MOE, tiny_policy

from nemo_offload_rl.mcore.model.bridge_import import have_transformer_engine
from nemo_offload_rl.memory.host_pages import CudaPageLocker, PageLockError

NEEDS_TE = [
    pytest.mark.gpu,
    pytest.mark.skipif(not have_transformer_engine(), reason="needs Transformer Engine (extra te)"),
]
EXACTLY = [*NEEDS_TE, pytest.mark.usefixtures("deterministic_kernels")]
"""For tests that compare numbers exactly."""

SHAPE = {"hidden_size": 512, "head_dim": 64, "num_attention_heads": 8, "intermediate_size": 2048}
"""Large enough for cuDNN's fused attention, and for freed memory to show."""
MIB = 2**20


def gpu_policy(kind: str, monkeypatch: pytest.MonkeyPatch | None = None, **cfg: Any) -> dict[str, Any]:
    """Returns a policy in bfloat16; its kind may name experts and the class of optimizer."""
    policy = tiny_policy((TINY_QWEN3_MOE if "moe" in kind else TINY_QWEN3) | SHAPE, "bfloat16", **cfg)
    policy["megatron_cfg"]["optimizer"] |= {
        "use_precision_aware_optimizer": "precision_aware" in kind,
        "use_distributed_optimizer": "undistributed" not in kind,
    }
    if "torch_adamw" in kind:
        assert monkeypatch is not None
        monkeypatch.setattr(megatron.core.optimizer, "Adam", torch.optim.AdamW)
        monkeypatch.setattr(megatron.core.optimizer, "USING_PYTORCH_OPTIMIZER", True)
    return policy


def refuse_page_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: CudaPageLocker, address: int, nbytes: int) -> None:
        raise PageLockError("refused on purpose")

    monkeypatch.setattr(CudaPageLocker, "lock", refuse)
