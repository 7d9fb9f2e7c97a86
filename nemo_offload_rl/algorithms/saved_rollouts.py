"""Saves the rollouts of each step in a folder, and replays them in a run without engines."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import pickle
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import torch

from nemo_offload_rl.algorithms.rollouts import Rollouts
from nemo_offload_rl.config.keys.schema_problems import ABSENT, value_at
from nemo_offload_rl.config.problems import show
from nemo_offload_rl.config.schema import GRPOMasterConfig
from nemo_offload_rl.data.batch import BatchedData
from nemo_offload_rl.data.problem import Conversation, DataError
from nemo_offload_rl.data.prompts import PromptFormat
from nemo_offload_rl.environments import Case
from nemo_offload_rl.generation.interface import SamplingParams
from nemo_offload_rl.metrics.timer import Timer
from nemo_offload_rl.storage.disk import DiskFullError, translate_disk_full, write_whole, writing_whole
from nemo_offload_rl.storage.manifest import HashingFile

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

VERSION = 1
HEADER_FILE = "rollouts.json"
SAVE_KEY, REPLAY_KEY = "grpo.debug.save_rollouts", "grpo.debug.replay_rollouts"

_NUM_SUMMED = 100  # each step's prompts are compared, too

# With another value of one of these keys, a run would train on other rollouts, or compute other log-probs of them.
_MUST_AGREE = (
    "grpo.num_prompts_per_step",
    "grpo.num_generations_per_prompt",
    "grpo.use_dynamic_sampling",
    "grpo.batch_multiplier",
    "grpo.seed",
    "data.shuffle",
    "policy.max_total_sequence_length",
    "policy.generation.temperature",
    "policy.generation.top_p",
    "policy.generation.top_k",
)

# With another value of one of these, answers or rewards would be others, too.
_MUST_ALSO_AGREE = (
    "data.train",
    "data.default",
    "data.max_input_seq_length",
    "env",
    "grpo.reward_scaling",
    "policy.tokenizer",
    "policy.generation.max_new_tokens",
    "policy.generation.stop_token_ids",
    "policy.generation.stop_strings",
    "policy.generation.ignore_eos",
    "policy.generation.bad_words",
)


def made_with(
    config: GRPOMasterConfig, problems: Sequence[Conversation], tokenizer: PreTrainedTokenizerFast
) -> dict[str, Any]:
    """Returns what must agree between the run that saves rollouts and one that replays them, by name."""
    first = [_texts(problems[row]) for row in range(min(_NUM_SUMMED, len(problems)))]
    return {
        **{key: value_at(config, key) for key in _MUST_AGREE},
        "data.train (number of problems)": len(problems),
        f"data.train (checksum of the first {_NUM_SUMMED})": _checksum(first),
        "policy.tokenizer (checksum of the vocabulary)": _checksum(sorted(tokenizer.get_vocab().items())),
    }


def sampled_with(
    config: GRPOMasterConfig, problems: Sequence[Conversation], tokenizer: PreTrainedTokenizerFast
) -> dict[str, Any]:
    """Returns what must agree so that rollouts are those which a run would sample for the same step, by name."""
    found = {key: value_at(config, key) for key in _MUST_ALSO_AGREE}
    # Of files, the recipe has only names: users change what is in them, such as a mistake in a reward, and resume.
    first = [problems[row].context for row in range(min(_NUM_SUMMED, len(problems)))]
    messages = [[(message.role, message.content) for message in context] for context in first]
    contents = {
        f"data.train (checksum of the first {_NUM_SUMMED}, with system prompts)": _checksum(messages),
        "policy.tokenizer (checksum of the chat template)": _checksum(tokenizer.chat_template),
        "env (checksum of the reward function's file)": _reward_checksum(config),
    }
    known = {key: value for key, value in found.items() if value is not ABSENT}
    return made_with(config, problems, tokenizer) | known | contents


def _reward_checksum(config: GRPOMasterConfig) -> str | None:
    """Returns the checksum of the file of the recipe's own reward function; None for a reward of this package."""
    default = config["data"]["default"]
    path = None if default is None else config["env"][default["env_name"]].get("reward_function")
    if path is None:
        return None
    spec = importlib.util.find_spec(path.partition(":")[0])  # it has been imported
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        return None
    return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()[:16]


def _texts(problem: Conversation) -> tuple[str, str]:
    return problem.context[-1].content, problem.answer


def _checksum(values: object) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class RolloutFolder:
    """Holds the rollouts of a run: one file for each step, and a header.

    Attributes:
        path: the folder.
        made_with: what must agree between the runs that write and read it.
    """

    path: Path
    made_with: Mapping[str, Any]

    @property
    def steps(self) -> list[int]:
        """The steps with saved rollouts, in ascending order."""
        numbers = (file.stem.removeprefix("step_") for file in self.path.glob("step_*.pt"))
        return sorted(int(number) for number in numbers if number.isdecimal())

    def check_to_save(self) -> list[str]:
        """Checks that the folder has no rollouts of another recipe; returns a line for the user if it has some.

        Raises:
            DataError: it has rollouts of a run with other prompts, or of another format.
        """
        if not (self.path / HEADER_FILE).exists():
            return []
        self._check_header(SAVE_KEY, "name another folder, or delete this one")
        return [f"{SAVE_KEY}: {self.path} has rollouts, which are replaced step by step"]

    def check_to_replay(self) -> list[str]:
        """Checks that the folder's rollouts are those of this recipe; returns a line for the user about its steps.

        Raises:
            DataError: they are not, or a step is missing.
        """
        steps = self.steps
        if not steps or not (self.path / HEADER_FILE).exists():
            raise DataError(
                f"{REPLAY_KEY} is {self.path}, which has no rollouts ({HEADER_FILE} and step_*.pt): name a folder that "
                f"a run with {SAVE_KEY} has filled."
            )
        self._check_header(REPLAY_KEY, "use the same value, or another folder")
        missing = sorted(set(range(steps[0], steps[-1])) - set(steps))
        if missing:
            raise DataError(
                f"{REPLAY_KEY} is {self.path}, which has rollouts of steps {steps[0]} to {steps[-1]}, but lacks those "
                f"of step {missing[0]}: bring its file back, or delete those of later steps."
            )
        return [f"{REPLAY_KEY}: the run ends after step {steps[-1]}, the last with rollouts"]

    def save(self, step: int, batches: Sequence[Rollouts]) -> None:
        """Writes the generation batches of a step; on a full disk it logs a warning, since training can go on."""
        try:
            with translate_disk_full(self.path):
                self.path.mkdir(parents=True, exist_ok=True)
                if not (self.path / HEADER_FILE).exists():
                    header = {"version": VERSION, "made_with": self.made_with}
                    write_whole(self.path / HEADER_FILE, json.dumps(header, indent=1) + "\n")
                save_tensors(self._file(step), {"version": VERSION, "batches": [as_plain(batch) for batch in batches]})
        except DiskFullError as error:
            logger.warning("The rollouts of step %d are not saved: %s.", step, error)

    def load(self, step: int) -> list[Rollouts]:
        """Returns the generation batches of a step.

        Raises:
            DataError: there are none, or their file cannot be read.
        """
        path, steps = self._file(step), self.steps
        if step not in steps:
            raise DataError(
                f"{REPLAY_KEY} is {self.path}, which has rollouts of steps {steps[0]} to {steps[-1]}, but the run is "
                f"at step {step}: resume from the checkpoint of step {steps[0] - 1}."
            )
        try:
            saved = torch.load(path, weights_only=True)
            version, batches = saved["version"], saved["batches"]
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, LookupError, TypeError) as error:
            reason = str(error).partition("\n")[0]
            raise DataError(f"{path} cannot be read as saved rollouts ({reason}): save them again.") from error
        _check_version(path, version)
        return [from_plain(batch) for batch in batches]

    def _file(self, step: int) -> Path:
        return self.path / f"step_{step}.pt"

    def _check_header(self, key: str, remedy: str) -> None:
        path = self.path / HEADER_FILE
        try:
            header = json.loads(path.read_text(encoding="utf-8"))
            version, saved = header["version"], header["made_with"]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path} is no header of saved rollouts: {remedy}.") from error
        _check_version(path, version)
        for name, value in self.made_with.items():
            if saved.get(name) != value:
                raise DataError(
                    f"{key} is {self.path}, whose rollouts were made with {name} {show(saved.get(name))}, but the "
                    f"recipe has {show(value)}: {remedy}."
                )


def _check_version(path: Path, version: int) -> None:
    if version != VERSION:
        raise DataError(f"{path} has format {version}, but this version of the package reads {VERSION}: save it again.")


def save_tensors(path: Path, content: Any) -> None:
    """Writes what `torch.load` reads with `weights_only` to a file, atomically.

    Raises:
        OSError: the file cannot be written. On a full disk `torch.save` alone raises a RuntimeError.
    """
    with writing_whole(path) as file:
        hashing = HashingFile(file)
        torch.save(content, cast(BinaryIO, hashing))  # calls only `write` and `flush`
        if hashing.error is not None:
            raise hashing.error


def as_plain(rollouts: Rollouts) -> dict[str, Any]:
    """Returns rollouts as tensors, numbers and texts, which `torch.load` reads with `weights_only`."""
    return {
        "columns": dict(rollouts.batch),
        "rewards": rollouts.rewards,
        "truncated": rollouts.truncated,
        "num_unjudged": rollouts.num_unjudged,
        "cases": [(case.prompt, case.response, case.answer) for case in rollouts.cases],
    }


def from_plain(saved: Mapping[str, Any]) -> Rollouts:
    """Returns the rollouts of which `as_plain` has made tensors, numbers and texts."""
    return Rollouts(
        batch=BatchedData(saved["columns"]),
        rewards=saved["rewards"],
        truncated=saved["truncated"],
        num_unjudged=saved["num_unjudged"],
        cases=tuple(Case(*texts) for texts in saved["cases"]),
    )


class ReplayedRollouts:
    """Returns saved rollouts where `RolloutMaker` generates and judges answers.

    Args:
        folder: the saved rollouts.
        prompt_format: the recipe's format of prompts.
    """

    def __init__(self, folder: RolloutFolder, prompt_format: PromptFormat) -> None:
        self.prompt_format = prompt_format
        self._folder = folder
        self._step = 0
        self._left: list[Rollouts] = []

    def __call__(
        self,
        problems: Sequence[Conversation],
        num_generations: int,
        sampling: SamplingParams,
        step: int,
        timer: Timer,
        num_sampled: Counter[tuple[int, ...]],
        on_answers: Callable[[], None] = lambda: None,
    ) -> Rollouts:
        """Returns the step's next saved generation batch; the arguments are those of `RolloutMaker`.

        Raises:
            DataError: the step has no further batch, or its prompts are not those of `problems`.
        """
        with timer.phase("sampling"):
            if step != self._step:
                self._step, self._left = step, self._folder.load(step)
        on_answers()
        if not self._left:
            raise DataError(
                f"{REPLAY_KEY}: the saved generation batches of step {step} do not fill its batch: set "
                "grpo.reward_scaling to the saving run's, by which dynamic sampling chooses prompts."
            )
        rollouts = self._left.pop(0)
        saved = [(case.prompt, case.answer) for case in rollouts.cases[::num_generations]]
        drawn = [_texts(problem) for problem in problems]
        if saved != drawn:
            row = next(row for row, pair in enumerate(zip(saved, drawn, strict=True)) if pair[0] != pair[1])
            raise DataError(
                f"{REPLAY_KEY}: prompt {row} of step {step} is {show(saved[row][0])} in the saved rollouts, but "
                f"{show(drawn[row][0])} in data.train: use the data of the run that saved them."
            )
        return rollouts

    def shutdown(self) -> None:
        """Does nothing: rewards are saved, so there are no processes of theirs."""


class NoEngine:
    """Implements what a step asks of engines besides answers: there is nothing to do."""

    def start_finish_generation(self) -> Sequence[Any]:
        """Returns no references: there is nothing to wait for."""
        return ()

    def finish_generation(self) -> None:
        """Does nothing."""

    def memory_stats(self) -> dict[str, float]:
        """Returns no memory."""
        return {}

    def shutdown(self) -> None:
        """Does nothing."""
