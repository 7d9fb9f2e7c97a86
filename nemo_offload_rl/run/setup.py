"""Makes data, prompt formats and schedules from a recipe's sections, for the algorithms' `prepare` functions.

Preparation reads everything that a run depends on and starts no process, so that mistakes are reported first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nemo_offload_rl.config.keys.tree import datasets_of, splits_validation_data
from nemo_offload_rl.config.named_files import JOINED_CONTENTS, is_default_template, is_template_file
from nemo_offload_rl.config.schema.algorithm_sections import DPOConfig, GRPOConfig, SFTConfig
from nemo_offload_rl.config.schema.data import (
    BuiltInPairDataset,
    BuiltInSFTDataset,
    DataConfig,
    NamedConversations,
    NamedPairs,
    NamedProblems,
    PreferenceDataConfig,
    SFTDataConfig,
)
from nemo_offload_rl.config.schema.policy import PolicyConfig, TokenizerConfig
from nemo_offload_rl.config.schema.run import CheckpointingConfig
from nemo_offload_rl.config.schema.value_types import is_import_path
from nemo_offload_rl.config.upstream import duration_s
from nemo_offload_rl.data.arithmetic import Role, make_arithmetic, make_arithmetic_pairs
from nemo_offload_rl.data.datasets import ProblemForm, load_hf_folder, load_jsonl, split_validation
from nemo_offload_rl.data.fields import RowForm
from nemo_offload_rl.data.imported import load_imported
from nemo_offload_rl.data.loader import ProblemLoader
from nemo_offload_rl.data.named import MessagesForm, load_named
from nemo_offload_rl.data.preferences import BinaryForm, PreferencePair, RankedForm
from nemo_offload_rl.data.problem import CHECK_LIMIT_S, Conversation, DataError
from nemo_offload_rl.data.prompts import PromptedSamples, PromptFormat, PromptTexts, read_prompt_file, read_text_file
from nemo_offload_rl.data.tokenizer import NONE_OUTSIDE, OutsideTokens, load_tokenizer
from nemo_offload_rl.hf_config import hf_config
from nemo_offload_rl.metrics.names import logged_name, validation_name
from nemo_offload_rl.run.algorithm import Algorithm
from nemo_offload_rl.run.train_loop import Schedule, StopTarget

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from nemo_offload_rl.placement.cluster import Cluster

_Data = DataConfig | SFTDataConfig | PreferenceDataConfig
_PromptFile = Literal["prompt_file", "system_prompt_file"]


@dataclass(frozen=True)
class Preparation:
    """Describes a run that is ready to start.

    Attributes:
        build: starts the processes and returns the algorithm; takes the recipe's policy section, resolved for the
            ranks' machine, and the cluster.
        schedule: the steps at which the run validates, saves and ends.
        tokenizer: the policy's tokenizer, which is saved with every checkpoint.
        notes: lines about the data for the user.
    """

    build: Callable[[Any, Cluster], Algorithm]
    schedule: Schedule
    tokenizer: PreTrainedTokenizerFast
    notes: Sequence[str] = ()


def with_run_length(policy: PolicyConfig, num_steps: int) -> PolicyConfig:
    """Returns the policy section with the run's training steps, for the parts of its schedule that last as long."""
    megatron = policy["megatron_cfg"]
    scheduler: Any = megatron["scheduler"] | {"run_length": num_steps}
    if scheduler["lr_decay_iters"] is None:
        scheduler["lr_decay_iters"] = num_steps
    return {**policy, "megatron_cfg": {**megatron, "scheduler": scheduler}}


def read_data(
    data: DataConfig | SFTDataConfig, seed: int
) -> tuple[ProblemLoader[Conversation], Sequence[Conversation]]:
    """Reads the training and the validation data; the latter may be empty.

    Validation data that is split off the training data comes before that of ``data.validation``.

    Raises:
        DataError: a dataset cannot be used.
    """
    train, validation = _read_parts(data, _read_problems, MessagesForm(("messages",)))
    return ProblemLoader(train, data["shuffle"], seed), validation


def _read_parts(
    data: _Data, read: Callable[[Role, str, Any, str | None], Sequence[Any]], form: RowForm[Any]
) -> tuple[Sequence[Any], Sequence[Any]]:
    """Reads the training and the validation data of a section, and applies each dataset's prompt files.

    Args:
        data: the recipe's section.
        read: reads a dataset that this package has.
        form: reads the rows of a class of the user's.
    """
    root = data["dataset_root"]

    def parts(role: Role, path: str, section: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        if is_import_path(section["dataset_name"]):
            arguments = {**(data["default"] or {}), **section}
            rows, split_off = load_imported(f"{path}.dataset_name", section["dataset_name"], arguments, form)
            if split_off is None and role == "train" and splits_validation_data(section):
                raise DataError(
                    f"{path}.split_validation_size is {section['split_validation_size']}, but "
                    f"{section['dataset_name']} has no val_dataset: let it split its rows, or delete the key."
                )
            return rows, split_off or []
        samples = read(role, path, section, root)
        if not splits_validation_data(section):
            return samples, []
        return split_validation(samples, section["split_validation_size"], section["seed"])

    [(path, section)] = datasets_of(data, "train").items()
    train, validation = (_in_texts(part, data, path) for part in parts("train", path, section))
    for path, section in datasets_of(data, "validation").items():
        further = _in_texts(parts("validation", path, section)[0], data, path)
        validation = [*validation, *further] if validation else further
    return train, validation


def _in_texts(samples: Sequence[Any], data: _Data, path: str) -> Sequence[Any]:
    """Returns a dataset's samples with its prompt file and system prompt applied, or those of ``data.default``."""
    prompt_file, prompt_key = _prompt_file(data, path, "prompt_file")
    system_file, system_key = _prompt_file(data, path, "system_prompt_file")
    if prompt_file is None and system_file is None:
        return samples
    system = None if system_file is None else read_text_file(system_file, system_key)
    return PromptedSamples(samples, PromptTexts(read_prompt_file(prompt_file, prompt_key), system))


def _prompt_file(data: _Data, path: str, name: _PromptFile) -> tuple[str | None, str]:
    """Returns the path of a dataset's prompt file, None for a null in the dataset's section, and the file's key."""
    for section, values in (
        (path, datasets_of(data, path.split(".")[1])[path]),
        ("data.default", data["default"] or {}),
    ):
        if name in values:
            return values[name], f"{section}.{name}"
    return None, f"{path}.{name}"


def _read_problems(role: Role, path: str, dataset: BuiltInSFTDataset, root: str | None) -> Sequence[Conversation]:
    if dataset["dataset_name"] == "arithmetic":
        return make_arithmetic(role, dataset["num_digits"], dataset["num_problems"], dataset["seed"])
    if dataset["dataset_name"] == "ResponseDataset":
        return load_jsonl(Path(dataset["data_path"]), ProblemForm(dataset["input_key"], dataset["output_key"]))
    if dataset["dataset_name"] == "HFDataset":
        form = ProblemForm(dataset["input_key"], dataset["output_key"])
        return load_hf_folder(Path(dataset["data_path"]), dataset.get("split"), form)
    return _read_named(dataset, root)


def _read_named(dataset: NamedProblems | NamedConversations | NamedPairs, root: str | None) -> Sequence[Any]:
    keys: Mapping[str, Any] = dataset
    return load_named(
        dataset["dataset_name"],
        split=dataset["split"],
        output_key=keys.get("output_key"),
        repeat=keys.get("repeat"),
        max_samples=keys.get("max_samples"),
        seed=keys["seed"] if keys.get("max_samples") else None,
        root=None if root is None else Path(root),
    )


def read_pairs(data: PreferenceDataConfig, seed: int) -> tuple[ProblemLoader[PreferencePair], Sequence[PreferencePair]]:
    """Reads the training and the validation pairs, like ``read_data``; the latter may be empty.

    Raises:
        DataError: a dataset cannot be used.
    """
    train, validation = _read_parts(data, _read_pairs, RankedForm())
    return ProblemLoader(train, data["shuffle"], seed, noun="pairs"), validation


def _read_pairs(role: Role, path: str, dataset: BuiltInPairDataset, root: str | None) -> Sequence[PreferencePair]:
    if dataset["dataset_name"] == "arithmetic":
        return make_arithmetic_pairs(role, dataset["num_digits"], dataset["num_problems"], dataset["seed"])
    form: BinaryForm | RankedForm
    if dataset["dataset_name"] == "BinaryPreferenceDataset":
        form = BinaryForm(dataset["prompt_key"], dataset["chosen_key"], dataset["rejected_key"])
    elif dataset["dataset_name"] == "PreferenceDataset":
        form = RankedForm()
    else:
        return _read_named(dataset, root)
    data_path, split = Path(dataset["data_path"]), dataset.get("split")
    if data_path.is_dir():
        return load_hf_folder(data_path, split, form)
    if split is not None:
        raise DataError(
            f"{path}.split is {split!r}, but {data_path} is not a folder, and only a folder has splits: delete the key."
        )
    return load_jsonl(data_path, form)


def check_rows[Sample](
    check: Callable[[Sequence[Sample]], int], train: Sequence[Sample], validation: Sequence[Sample]
) -> list[str]:
    """Checks the rows of the training and the validation data before a run starts anything.

    Args:
        check: checks rows for a limited time, and returns how many it has checked.
        train: the training data.
        validation: the validation data.

    Returns:
        A line for the user about each dataset that was too large to be checked whole.

    Raises:
        DataError: a row cannot be used; names it.
    """
    notes = []
    for key, rows in (("data.train", train), ("data.validation", validation)):
        num_checked = check(rows)
        if num_checked < len(rows):
            notes.append(
                f"{key}: the first {num_checked:,} of {len(rows):,} rows were checked, for {CHECK_LIMIT_S:g} s; if "
                "another row cannot be used, the run ends when it draws that row, with its finished steps saved"
            )
    return notes


def read_tokenizer(config: TokenizerConfig, *, trust_remote_code: bool = False) -> PreTrainedTokenizerFast:
    """Returns the recipe's tokenizer, with the recipe's chat template, if it has one.

    Values of the key mean the same as in NeMo-RL (nemo_rl/algorithms/utils.py, `get_tokenizer`).

    Args:
        config: the section `policy.tokenizer`.
        trust_remote_code: `policy.trust_remote_code`.

    Raises:
        DataError: the tokenizer cannot be loaded, or the template's file cannot be read.
    """
    tokenizer = load_tokenizer(config["name"], trust_remote_code=trust_remote_code)
    if "chat_template" not in config or is_default_template(config["chat_template"]):
        return tokenizer
    template = config["chat_template"]
    if template is None:
        tokenizer.chat_template = JOINED_CONTENTS
    elif is_template_file(template):
        tokenizer.chat_template = read_text_file(template, "policy.tokenizer.chat_template")
    else:
        tokenizer.chat_template = template
    return tokenizer


def make_prompt_format(
    data: _Data,
    tokenizer: PreTrainedTokenizerFast,
    policy: PolicyConfig,
    **special_tokens: bool,
) -> PromptFormat:
    """Makes the format that turns the recipe's problems or pairs into tokens of the model.

    Args:
        data: the recipe's `data` section.
        tokenizer: the policy's tokenizer.
        policy: the recipe's `policy` section.
        special_tokens: add_bos, add_eos and add_generation_prompt of ``PromptFormat``.

    Raises:
        DataError: the model does not have a token that the format adds to texts.
    """
    made = PromptFormat(
        tokenizer=tokenizer,
        max_tokens=data["max_input_seq_length"],
        chat_template_kwargs=policy["tokenizer"]["chat_template_kwargs"] or {},
        outside=_outside_model(tokenizer, policy),
        **special_tokens,
    )
    if made.add_eos:
        made.outside.refuse([tokenizer.eos_token_id], "policy.tokenizer.name has as its end of sequence")
    if made.add_bos and tokenizer.bos_token_id is not None:
        made.outside.refuse([tokenizer.bos_token_id], "policy.tokenizer.name has as its beginning of sequence")
    return made


def _outside_model(tokenizer: PreTrainedTokenizerFast, policy: PolicyConfig) -> OutsideTokens:
    """Returns the tokens that the model does not have; none if its config cannot be read, which preflight refuses."""
    try:
        vocab_size = hf_config(policy).get_text_config().vocab_size
    except ValueError:
        return NONE_OUTSIDE
    return OutsideTokens.of(tokenizer, vocab_size)


def padding_notes(prompt_format: PromptFormat) -> list[str]:
    """Returns a line for the user if batches are not padded with the tokenizer's own padding token; otherwise none."""
    own, used = prompt_format.tokenizer.pad_token_id, prompt_format.pad_token_id
    if own == used:
        return []
    return [
        f"policy.tokenizer.name: the padding token {prompt_format.tokenizer.pad_token!r} has id {own}, outside the "
        f"model's vocabulary (0 to {prompt_format.outside.vocab_size - 1}): batches are padded with id {used} instead; "
        "padding is masked"
    ]


def validation_notes(data: _Data, num_samples: int, num_measured: int, key: str) -> list[str]:
    """Returns a line for the user if a validation does not reach the end of several sets, which are read as one.

    Args:
        data: the recipe's `data` section.
        num_samples: samples of all validation sets.
        num_measured: how many of them a validation measures, or more where it measures all.
        key: the recipe's key that sets this.
    """
    num_sets = len(datasets_of(data, "validation")) + splits_validation_data(data["train"])
    if num_sets == 1 or num_samples <= num_measured:
        return []
    return [
        f"a validation measures the first {num_measured:,} of {num_samples:,} samples of {num_sets} sets, one after "
        f"another, so that the last may not be measured at all; {key} says how many"
    ]


def make_answer_format(
    data: SFTDataConfig | PreferenceDataConfig, tokenizer: PreTrainedTokenizerFast, policy: PolicyConfig
) -> PromptFormat:
    """Makes the format of a recipe that trains on given answers; see ``make_prompt_format``."""
    return make_prompt_format(
        data,
        tokenizer,
        policy,
        add_bos=data["add_bos"],
        add_eos=data["add_eos"],
        add_generation_prompt=data["add_generation_prompt"],
    )


def make_schedule(
    section: GRPOConfig | SFTConfig | DPOConfig,
    checkpointing: CheckpointingConfig,
    *,
    steps_per_epoch: int,
    num_validation: int,
) -> Schedule:
    """Reads from a recipe when its run validates, saves and ends.

    Raises:
        DataError: it validates, but has no validation data.
    """
    if not num_validation and (section["val_period"] or section["val_at_start"] or section["val_at_end"]):
        raise DataError(
            "There is no validation data, neither in data.validation nor as the val_dataset of data.train, but the "
            f"recipe validates (val_period {section['val_period']}, val_at_start {section['val_at_start']}, val_at_end "
            f"{section['val_at_end']}): name validation data, or set val_period to 0 and the others to false."
        )
    limit = checkpointing["checkpoint_must_save_by"]
    metric, threshold = section["stop_at_validation_metric"], section["stop_at_validation_threshold"]
    target = None
    if metric is not None and threshold is not None:
        target = StopTarget(logged_name(validation_name(metric)), threshold)
    return Schedule(
        **fields_from(Schedule, section, checkpointing),
        steps_per_epoch=steps_per_epoch,
        must_save_by_s=None if limit is None else duration_s(limit),
        target=target,
    )


def fields_from(cls: type, *sections: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of sections that are fields of the dataclass `cls`; absent keys leave the field's default."""
    names = [field.name for field in fields(cls)]
    return {name: section[name] for section in sections for name in names if name in section}
