"""Makes data, formats and schedules of a recipe's sections, for the algorithms' preparations.

Preparing reads everything that a run depends on and starts nothing, so that a mistake is answered first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, assert_never

from nemo_offload_rl.config.schema.checkpointing import CheckpointingConfig
from nemo_offload_rl.config.schema.data import DataConfig, Dataset, PairDataset, PreferenceDataConfig, SFTDataConfig
from nemo_offload_rl.config.schema.grpo import GRPOConfig
from nemo_offload_rl.config.schema.policy import TokenizerConfig
from nemo_offload_rl.config.schema.sft import SFTConfig
from nemo_offload_rl.data.arithmetic import Role, make_arithmetic, make_arithmetic_pairs
from nemo_offload_rl.data.datasets import ProblemForm, load_hf_folder, load_jsonl
from nemo_offload_rl.data.errors import DataError
from nemo_offload_rl.data.loader import ProblemLoader
from nemo_offload_rl.data.preferences import BinaryForm, PreferencePair, RankedForm
from nemo_offload_rl.data.problem import Problem
from nemo_offload_rl.data.prompts import PromptFormat, read_prompt_file, read_text_file
from nemo_offload_rl.data.split import split_validation
from nemo_offload_rl.data.tokenizer import load_tokenizer
from nemo_offload_rl.metrics.names import logged_name
from nemo_offload_rl.run.algorithm import Algorithm
from nemo_offload_rl.run.train_loop import Schedule, StopTarget

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from nemo_offload_rl.placement.cluster import Cluster


@dataclass(frozen=True)
class Preparation:
    """A run that is ready to start.

    Attributes:
        build: starts the processes and returns the algorithm; takes the recipe's policy section, in the form in which
            this machine can run it.
        schedule: when what is due.
        tokenizer: kept with every checkpoint.
    """

    build: Callable[[Any, Cluster], Algorithm]
    schedule: Schedule
    tokenizer: PreTrainedTokenizerFast


def with_run_length(policy: Mapping[str, Any], num_steps: int) -> dict[str, Any]:
    """The policy section with a null scheduler.lr_decay_iters, or none, replaced by the run's number of steps.

    A run that ends within its warm-up decays nothing; megatron-core wants the decay to end after the warm-up all the
    same.
    """
    megatron = policy["megatron_cfg"]
    scheduler = megatron["scheduler"]
    if scheduler.get("lr_decay_iters") is None:
        scheduler = scheduler | {"lr_decay_iters": max(num_steps, scheduler["lr_warmup_iters"] + 1)}
    return {**policy, "megatron_cfg": megatron | {"scheduler": scheduler}}


def read_data(data: DataConfig, seed: int) -> tuple[ProblemLoader[Problem], Sequence[Problem]]:
    """Reads the training and the validation data; where there is none of the latter, it is empty.

    Validation data that is split off the training data comes before that of ``data.validation``.

    Raises:
        DataError: one of them cannot be used.
    """
    train, validation = _split_off(data["train"], _read_problems("train", data["train"]))
    further = data.get("validation")
    if further is not None:
        validation = _joined(validation, _read_problems("validation", further))
    return ProblemLoader(train, data["shuffle"], seed), validation


def _split_off[Sample](
    dataset: Dataset | PairDataset, samples: Sequence[Sample]
) -> tuple[Sequence[Sample], Sequence[Sample]]:
    if not dataset.get("split_validation_size"):
        return samples, []
    return split_validation(samples, dataset["split_validation_size"], dataset["seed"])


def _joined[Sample](split_off: Sequence[Sample], validation: Sequence[Sample]) -> Sequence[Sample]:
    return [*split_off, *validation] if split_off else validation


def _read_problems(role: Role, dataset: Dataset) -> Sequence[Problem]:
    if dataset["dataset_name"] == "arithmetic":
        return make_arithmetic(role, dataset["num_digits"], dataset["num_problems"], dataset["seed"])
    path, form = Path(dataset["data_path"]), ProblemForm(dataset["input_key"], dataset["output_key"])
    if dataset["dataset_name"] == "ResponseDataset":
        return load_jsonl(path, form)
    if dataset["dataset_name"] == "HFDataset":
        return load_hf_folder(path, dataset.get("split"), form)
    assert_never(dataset)


def read_pairs(data: PreferenceDataConfig, seed: int) -> tuple[ProblemLoader[PreferencePair], Sequence[PreferencePair]]:
    """Reads the training and the validation pairs, as ``read_data``; where there are none of the latter, it is empty.

    Raises:
        DataError: one of them cannot be used.
    """
    train, validation = _split_off(data["train"], _read_pairs("train", data["train"]))
    further = data.get("validation")
    if further is not None:
        validation = _joined(validation, _read_pairs("validation", further))
    return ProblemLoader(train, data["shuffle"], seed, noun="pairs"), validation


def _read_pairs(role: Role, dataset: PairDataset) -> Sequence[PreferencePair]:
    if dataset["dataset_name"] == "arithmetic":
        return make_arithmetic_pairs(role, dataset["num_digits"], dataset["num_problems"], dataset["seed"])
    path, split = Path(dataset["data_path"]), dataset.get("split")
    form: BinaryForm | RankedForm
    if dataset["dataset_name"] == "BinaryPreferenceDataset":
        form = BinaryForm(dataset["prompt_key"], dataset["chosen_key"], dataset["rejected_key"])
    elif dataset["dataset_name"] == "PreferenceDataset":
        form = RankedForm()
    else:
        assert_never(dataset)
    if path.is_dir():
        return load_hf_folder(path, split, form)
    if split is not None:
        raise DataError(
            f"data.{role}.split is {split!r}, but {path} is no folder, and only a folder has splits: delete the key."
        )
    return load_jsonl(path, form)


def read_tokenizer(config: TokenizerConfig) -> PreTrainedTokenizerFast:
    """The recipe's tokenizer; an explicit null as its chat template leaves it without one."""
    tokenizer = load_tokenizer(config["name"])
    if "chat_template" in config:
        tokenizer.chat_template = config["chat_template"]
    return tokenizer


def make_prompt_format(
    data: DataConfig | PreferenceDataConfig,
    tokenizer: PreTrainedTokenizerFast,
    tokenizer_config: TokenizerConfig,
    **special_tokens: bool,
) -> PromptFormat:
    """Makes the format in which the recipe's problems or pairs become tokens.

    Args:
        data: the recipe's section.
        tokenizer: of the policy.
        tokenizer_config: its section.
        special_tokens: add_bos, add_eos and add_generation_prompt of ``PromptFormat``.

    Raises:
        DataError: a prompt file cannot be used.
    """
    shared = data.get("default") or {}
    system_file = shared.get("system_prompt_file")
    return PromptFormat(
        tokenizer=tokenizer,
        max_tokens=data["max_input_seq_length"],
        prompt_template=read_prompt_file(shared.get("prompt_file"), "data.default.prompt_file"),
        system_prompt=None if system_file is None else read_text_file(system_file, "data.default.system_prompt_file"),
        chat_template_kwargs=tokenizer_config.get("chat_template_kwargs") or {},
        **special_tokens,
    )


def make_answer_format(
    data: SFTDataConfig | PreferenceDataConfig, tokenizer: PreTrainedTokenizerFast, tokenizer_config: TokenizerConfig
) -> PromptFormat:
    """Makes the format of a recipe that trains on given answers; see ``make_prompt_format``."""
    return make_prompt_format(
        data,
        tokenizer,
        tokenizer_config,
        add_bos=data["add_bos"],
        add_eos=data["add_eos"],
        add_generation_prompt=data["add_generation_prompt"],
    )


def make_schedule(section: GRPOConfig | SFTConfig, checkpointing: CheckpointingConfig) -> Schedule:
    """Reads from a recipe when its run validates, saves and ends."""
    metric, threshold = section.get("stop_at_validation_metric"), section.get("stop_at_validation_threshold")
    return Schedule(
        max_num_steps=section["max_num_steps"],
        max_num_epochs=section["max_num_epochs"],
        val_period=section["val_period"],
        val_at_start=section["val_at_start"],
        val_at_end=section["val_at_end"],
        save_period=checkpointing["save_period"],
        target=None if metric is None or threshold is None else StopTarget(logged_name(metric), threshold),
    )


def fields_from(cls: type, *sections: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of recipe sections that are fields of a dataclass; an absent key is left to the field's default."""
    names = {field.name for field in fields(cls)}
    return {name: value for section in sections for name, value in section.items() if name in names}
