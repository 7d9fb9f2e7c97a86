"""Creates verl's Megatron engine, its own or the adapter's, on an existing model and optimizer."""

import importlib
import types
from typing import Any

import torch


class _Given:
    """Overrides what an engine builds, as its first base class, with objects that exist already."""

    given: tuple[list[torch.nn.Module], Any]

    def _build_tf_config(self) -> None:
        self.is_value_model, self.vanilla_bridge, self.share_embeddings_and_output_weights = False, False, True
        self.tf_config, self.provider, self.peft_cls, self.bridge = None, None, None, object()
        self.param_dtype = torch.bfloat16

    def _build_megatron_module(self) -> list[torch.nn.Module]:
        return self.given[0]

    def _build_optimizer(self) -> Any:
        return self.given[1]

    def _build_lr_scheduler(self) -> None:
        return None


def engine(model: list[torch.nn.Module], optimizer: Any, *, adapter: bool) -> Any:
    """Returns an initialised engine that offloads everything; it has done so once, and everything is back.

    Raises:
        ImportError: verl is not installed.
    """
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import McoreEngineConfig

    if adapter:
        engine_module, engine_name = "nemo_offload_rl.adapters.verl", "RangeOffloadWithLMHead"
    else:
        engine_module, engine_name = "verl.workers.engine.megatron", "MegatronEngineWithLMHead"
    engine_class = getattr(importlib.import_module(engine_module), engine_name)
    model_config = types.SimpleNamespace(
        lora={},
        mtp=types.SimpleNamespace(enable=False),
        local_path="random",
        hf_config=None,
        architectures=["Random"],
        get_processor=lambda: None,
        model_type="language_model",
    )
    if not torch.cuda.is_available():
        torch.cuda.mem_get_info = lambda *_: (0, 0)  # for verl's log, which assumes a GPU on every machine
    made = type("Engine", (_Given, engine_class), {"given": (model, optimizer)})(
        model_config=model_config,
        engine_config=McoreEngineConfig(param_offload=True, optimizer_offload=True, use_dist_checkpointing=True),
        optimizer_config=types.SimpleNamespace(use_checkpoint_opt_param_scheduler=False),
        checkpoint_config=CheckpointConfig(save_contents=["model"], load_contents=["model"]),
    )
    made.initialize()
    made.to("cuda", model=True, optimizer=True, grad=True)
    return made
