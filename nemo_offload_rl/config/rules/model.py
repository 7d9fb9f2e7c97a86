"""Rules for the model: its sizes fit each other, and Megatron-Bridge can build it."""

from collections.abc import Mapping
from typing import Any

from nemo_offload_rl.config.installed.bridges import bridged_architectures
from nemo_offload_rl.config.installed.transformers_source import HfFamily, causal_models, known_family
from nemo_offload_rl.config.model.hf_check import size_problems
from nemo_offload_rl.config.model.model_kind import model_fields
from nemo_offload_rl.config.problems import nearest, show, show_choices
from nemo_offload_rl.config.rules.base import MODEL_FIELDS, Verdict, rule

_HF_CONFIG, _OVERRIDES = "policy.hf_config", "policy.hf_config_overrides"
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
# Families with one of these fields have head sizes that are independent of the hidden size.
_OTHER_HEAD_SIZES = ("qk_nope_head_dim", "d_kv", "attention_head_dim", "attention_head_size", "kv_channels", "d_head")


class _Model:
    """Holds the fields of the model's config that the recipe or its folder gives, on top of the family's defaults.

    Attributes:
        family: the family of the config; None if it is unknown.
        given: the fields that are not defaults.
        fields: all fields, under the names that the family declares.
    """

    def __init__(
        self, model_name: str, hf_config: Mapping[str, Any] | None, overrides: Mapping[str, Any] | None
    ) -> None:
        self.given = model_fields(model_name, hf_config, overrides)
        self.family: HfFamily | None = known_family(self.given)
        self.fields = self.given if self.family is None else self.family.canonical_values(self.given)
        self._hf_config, self._overrides = hf_config or {}, overrides or {}

    def size(self, *names: str) -> int | None:
        """Returns the value of the first of these fields that has one, if it is a positive integer; otherwise None."""
        found = next((self._value(name) for name in names if self._value(name) is not None), None)
        return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else None

    def said(self, *names: str) -> str:
        """Returns the name of the field that `size` reads, its value, and whether it is a default."""
        name = next(name for name in names if self._value(name) is not None)
        default = "" if self._spelt(name) in self.given else f", {self.given['model_type']}'s default"
        return f"{self._spelt(name)} ({show(self._value(name))}{default})"

    def at(self, *names: str) -> str:
        """Returns the recipe's key at which a problem with the field is reported."""
        name = self._spelt(next((name for name in names if self._value(name) is not None), names[0]))
        if name in self._overrides:
            return f"{_OVERRIDES}.{name}"
        return f"{_HF_CONFIG}.{name}" if self._hf_config else "policy.model_name"

    def is_in_recipe(self, name: str) -> bool:
        """Returns whether the field comes from the recipe rather than from a folder."""
        return name in self._overrides or name in self._hf_config

    def _value(self, name: str) -> Any:
        canonical = name if self.family is None else self.family.canonical(name)
        return self.fields[canonical] if canonical in self.fields else None

    def _spelt(self, name: str) -> str:
        """Returns the field's name in the config, which may be an alias."""
        if name in self.given or self.family is None:
            return name
        canonical = self.family.canonical(name)
        return next((other for other in self.given if self.family.canonical(other) == canonical), name)


@rule(*MODEL_FIELDS)
def folders_have_sizes(*model: Any) -> Verdict:
    """Checks the sizes in a folder's config.json; keys of a recipe are checked one by one elsewhere."""
    name, hf_config, overrides = model
    if hf_config:
        return None
    given = {key: value for key, value in model_fields(name, None, None).items() if key not in (overrides or {})}
    found = next(iter(size_problems(given)), None)
    if found is None:
        return None
    key, message = found
    return f"the config.json in {name!r} has {key} {show(given[key])}, which {message}; give {_OVERRIDES}.{key}"


@rule(*MODEL_FIELDS)
def key_value_heads_divide_heads(*model: Any) -> Verdict:
    """Requires each key and value head to serve the same number of query heads."""
    config = _Model(*model)
    heads, kv_heads = config.size("num_attention_heads"), config.size("num_key_value_heads")
    if heads is None or kv_heads is None or heads % kv_heads == 0:
        return None
    return (
        config.at("num_key_value_heads"),
        f"{config.said('num_key_value_heads')} must divide {config.said('num_attention_heads')}; change one of them",
    )


@rule(*MODEL_FIELDS)
def heads_divide_hidden_size(*model: Any) -> Verdict:
    """Requires the heads to divide the hidden size, unless the config gives a head size."""
    config = _Model(*model)
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    if config.family is None or hidden is None or heads is None or hidden % heads == 0 or config.size("head_dim"):
        return None
    if any(config.family.field(name) is not None for name in _OTHER_HEAD_SIZES):
        return None
    remedy = "change one of them" + (", or give head_dim" if config.family.field("head_dim") is not None else "")
    return (
        config.at("num_attention_heads"),
        f"{config.said('num_attention_heads')} must divide {config.said('hidden_size')}; {remedy}",
    )


@rule(*MODEL_FIELDS)
def rotated_heads_are_even(*model: Any) -> Verdict:
    """Requires an even head size, since rotary embeddings rotate pairs of dimensions."""
    config = _Model(*model)
    if config.family is None or config.family.field("rope_parameters") is None:
        return None
    head_dim = config.size("head_dim")
    if head_dim is None or head_dim % 2 == 0:
        return None
    return (
        config.at("head_dim"),
        f"{config.said('head_dim')} must be even, since rotary embeddings rotate pairs of dimensions; change it",
    )


@rule(*MODEL_FIELDS)
def tokens_go_to_experts_that_are_there(*model: Any) -> Verdict:
    """Refuses more experts for each token than there are experts."""
    config = _Model(*model)
    per_token, experts = config.size("num_experts_per_tok"), config.size(*_EXPERTS)
    if per_token is None or experts is None or per_token <= experts:
        return None
    return (
        config.at("num_experts_per_tok"),
        f"{config.said('num_experts_per_tok')} must be at most {config.said(*_EXPERTS)}, the number of experts; lower "
        "it",
    )


@rule(*MODEL_FIELDS)
def groups_of_experts_are_equal(*model: Any) -> Verdict:
    """Requires group-limited routing to have groups of equal size."""
    config = _Model(*model)
    experts, groups, chosen = config.size(*_EXPERTS), config.size("n_group"), config.size("topk_group")
    if experts is None or groups is None:
        return None
    if experts % groups:
        return config.at("n_group"), f"{config.said('n_group')} must divide {config.said(*_EXPERTS)}"
    if chosen is not None and chosen > groups:
        return config.at("topk_group"), f"{config.said('topk_group')} must be at most {config.said('n_group')}"
    return None


@rule(*MODEL_FIELDS)
def layers_are_counted_from_0(*model: Any) -> Verdict:
    """Refuses per-layer settings for layers that the model does not have."""
    config = _Model(*model)
    layers = config.size("num_hidden_layers")
    if layers is None:
        return None
    for name in ("layer_types", "mlp_layer_types"):
        kinds = config.fields.get(name)
        if isinstance(kinds, list) and len(kinds) != layers:
            return config.at(name), f"{name} must have one entry for each of {layers} layers; found {len(kinds)}"
    dense = config.fields.get("mlp_only_layers")
    if isinstance(dense, list) and any(not 0 <= layer < layers for layer in dense if isinstance(layer, int)):
        return config.at(
            "mlp_only_layers"
        ), f"mlp_only_layers must hold layers from 0 to {layers - 1}; found {show(dense)}"
    first = config.size("first_k_dense_replace")
    if first is not None and first > layers:
        said = config.said("first_k_dense_replace")
        return config.at("first_k_dense_replace"), f"{said} must be at most {config.said('num_hidden_layers')}"
    return None


@rule(*MODEL_FIELDS)
def special_tokens_are_in_the_vocabulary(*model: Any) -> Verdict:
    """Refuses special tokens that the recipe sets outside the vocabulary; it accepts those of a model's own config."""
    config = _Model(*model)
    vocab_size = config.size("vocab_size")
    if vocab_size is None:
        return None
    for name, value in config.given.items():
        if isinstance(name, str) and name.endswith("_token_id") and config.is_in_recipe(name):
            outside = [
                token for token in (value if isinstance(value, list) else [value]) if _outside(token, vocab_size)
            ]
            if outside:
                said = config.said("vocab_size")
                return config.at(
                    name
                ), f"{name} {show(outside[0])} is outside the vocabulary, 0 to {vocab_size - 1}: {said}"
    return None


@rule("policy.generation.stop_token_ids", *MODEL_FIELDS)
def stop_tokens_are_in_the_vocabulary(stops: list[int] | None, *model: Any) -> Verdict:
    """Refuses stop tokens outside the vocabulary, which are never sampled and end no answer."""
    config = _Model(*model)
    vocab_size = config.size("vocab_size")
    outside = [] if vocab_size is None else [token for token in stops or [] if _outside(token, vocab_size)]
    if vocab_size is None or not outside:
        return None
    return (
        f"has {show(outside[0])}, which is outside the model's vocabulary (0 to {vocab_size - 1}) and so ends no "
        "answer; delete it"
    )


@rule(*MODEL_FIELDS)
def model_has_a_bridge(*model: Any) -> Verdict:
    """Refuses architectures that Megatron-Bridge does not translate."""
    config = _Model(*model)
    named = config.given.get("architectures")
    model_type = config.given.get("model_type")
    if isinstance(named, list) and named:
        architectures, at = [str(name) for name in named], config.at("architectures")
    elif isinstance(model_type, str) and model_type in causal_models():
        architectures, at = [causal_models()[model_type]], config.at("model_type")
    else:
        return None
    bridged = bridged_architectures()
    if any(name in bridged for name in architectures):
        return None
    families = sorted(name for name, architecture in causal_models().items() if architecture in bridged)
    close = nearest(architectures[0], bridged)
    hint = f"; did you mean {close}?" if close and isinstance(named, list) else ""
    return (
        at,
        f"the model is {show_choices(architectures)}, which the installed Megatron-Bridge cannot build{hint}; "
        f"families that it can: {', '.join(families)}",
    )


def _outside(token: Any, vocab_size: int) -> bool:
    return isinstance(token, int) and not isinstance(token, bool) and not 0 <= token < vocab_size
