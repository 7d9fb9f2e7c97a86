"""Reads from the recipe and the model how answers are sampled and where they end; engines get the values."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from nemo_offload_rl.config.schema.generation import GenerationConfig
from nemo_offload_rl.config.schema.policy import sampling_of
from nemo_offload_rl.data.tokenizer import OutsideTokens, check_bad_words, check_stop_strings, check_token_ids
from nemo_offload_rl.generation.interface import SamplingParams
from nemo_offload_rl.hf_config import model_end_token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from nemo_offload_rl.config.schema.policy import GRPOPolicyConfig

logger = logging.getLogger(__name__)


def check_words(section: GenerationConfig, tokenizer: PreTrainedTokenizerFast, outside: OutsideTokens) -> None:
    """Checks the section's tokens and strings against the tokenizer, and its tokens that the model does not have.

    Raises:
        DataError: tokenizer or model lacks a stop token, or cannot encode a bad word; or the tokenizer cannot encode a
            stop string.
    """
    check_token_ids(tokenizer, section["stop_token_ids"] or [], "policy.generation.stop_token_ids")
    outside.refuse(section["stop_token_ids"] or [], "policy.generation.stop_token_ids has")
    check_stop_strings(tokenizer, section["stop_strings"] or [], "policy.generation.stop_strings")
    check_bad_words(tokenizer, section["bad_words"] or [], "policy.generation.bad_words", outside)


def make_sampling(
    policy: GRPOPolicyConfig, tokenizer: PreTrainedTokenizerFast, seed: int
) -> tuple[SamplingParams, SamplingParams]:
    """Returns the sampling parameters of training and of validation, and logs the tokens that end answers.

    Args:
        policy: the policy section with the model that the run starts from, whose files are read.
        tokenizer: the policy's tokenizer.
        seed: the run's seed.
    """
    section = sampling_of(policy)
    assert section is not None
    ends = end_token_ids(section, model_end_token_ids(policy), tokenizer.eos_token_id)
    named = ", ".join(f"{token} ({tokenizer.decode([token])!r})" for token in ends)
    logger.info("Answers end at these tokens: %s.", named or "none")
    training = SamplingParams(
        max_new_tokens=section["max_new_tokens"],
        temperature=section["temperature"],
        top_p=section["top_p"],
        top_k=section["top_k"],
        stop_token_ids=ends,
        seed=seed,
        stop_strings=tuple(section["stop_strings"] or ()),
        bad_words=tuple(section["bad_words"] or ()),
    )
    validation = replace(
        training, temperature=section["val_temperature"], top_p=section["val_top_p"], top_k=section["val_top_k"]
    )
    return training, validation


def end_token_ids(section: GenerationConfig, model_ends: Sequence[int], eos_token_id: int) -> tuple[int, ...]:
    """Returns the tokens that end an answer, sorted: those at which NeMo-RL's vLLM stops with the same keys.

    Args:
        section: the recipe's `policy.generation`.
        model_ends: the model's own ends, of `hf_config.model_end_token_ids`.
        eos_token_id: the tokenizer's end of sequence.
    """
    ends = {eos_token_id} if section["stop_token_ids"] is None else set(section["stop_token_ids"])
    if not section["ignore_eos"]:
        ends.update(model_ends)
        if section["stop_strings"] or section["bad_words"]:  # vLLM then has the tokenizer, and stops at its end, too
            ends.add(eos_token_id)
    return tuple(sorted(ends))
