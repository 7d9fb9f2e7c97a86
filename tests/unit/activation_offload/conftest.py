from collections.abc import Iterator

import pytest
import torch
from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager
from support.marked_layers import MODULES, Model

from nemo_offload_rl.mcore.patches import activation_offload


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model(MODULES)


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    yield
    activation_offload.uninstall(PipelineOffloadManager.OFFLOAD_MGR)
