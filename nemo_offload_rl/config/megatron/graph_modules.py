"""The parts of a transformer layer that CUDA graphs can capture."""

from collections.abc import Iterable, Mapping

from nemo_offload_rl.config.problems import show

GRAPH_MODULES_KEY = "policy.megatron_cfg.cuda_graph_modules"
GRAPH_IMPL_KEY = "policy.megatron_cfg.cuda_graph_impl"

# Name in policy.megatron_cfg.cuda_graph_modules: the part that it captures.
GRAPH_MODULES: Mapping[str, str] = {
    "attn": "the norm before attention, and attention",
    "mlp": "the norm before the MLP, and the MLP, of dense layers",
    "moe_router": "the norm before the experts, and the router, of mixture-of-experts layers",
    "moe_preprocess": "the preparation of the tokens' exchange; needs moe_router",
}

_ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def allocator_that_unmaps(environ: Mapping[str, str]) -> str | None:
    """Returns the environment variable that enables expandable segments while NCCL registers the buffers of graphs.

    Expandable segments map memory anew, and a replay then reads what NCCL registered: illegal memory accesses.

    Returns:
        The variable's name; None if the settings are safe.
    """
    if environ.get("NCCL_GRAPH_REGISTER") == "0":
        return None
    return next((name for name in _ALLOCATOR_SETTINGS if name in environ and _expands(environ[name])), None)


def check_graph_environment(environ: Mapping[str, str]) -> None:
    """Refuses settings with which a graph replay reads memory that NCCL registered and torch has since unmapped.

    Args:
        environ: the process's environment.

    Raises:
        ValueError: expandable segments without NCCL_GRAPH_REGISTER=0.
    """
    name = allocator_that_unmaps(environ)
    if name is None:
        return
    found = f"it is {environ['NCCL_GRAPH_REGISTER']}" if "NCCL_GRAPH_REGISTER" in environ else "it is not set"
    raise ValueError(
        f"{name} has expandable_segments:True, with which CUDA graphs ({GRAPH_IMPL_KEY}) need NCCL_GRAPH_REGISTER=0 in "
        f"the environment, but {found}; set it to 0, or remove expandable_segments from {name}."
    )


def _expands(settings: str) -> bool:
    return "expandable_segments:true" in settings.replace(" ", "").lower()


def graph_refusal(modules: Iterable[str], *, has_experts: bool | None, has_dense_mlps: bool | None) -> str | None:
    """Returns why a model's layers lack these modules; None if they have them, or if its kind is unknown (None)."""
    names = list(modules)
    of_experts = [name for name in names if name.startswith("moe_")]
    if of_experts and has_experts is False:
        found = " and ".join(show(name) for name in of_experts)
        return f"names {found}, which only mixture-of-experts layers have, and the model is dense; use attn and mlp"
    if "mlp" in names and has_dense_mlps is False:
        return (
            "names 'mlp', which is captured in dense layers, and every layer of the model is a mixture of experts; use "
            "moe_router"
        )
    return None


def check_graphs_fit_model(modules: Iterable[str], *, has_experts: bool, has_dense_mlps: bool) -> None:
    """Checks modules against the built model; the rules can do so only if the recipe tells the model's kind.

    Args:
        modules: `policy.megatron_cfg.cuda_graph_modules`.
        has_experts: whether some layer of the model is a mixture of experts.
        has_dense_mlps: whether some layer of the model has a dense MLP.

    Raises:
        ValueError: a module that no layer of the model has.
    """
    refusal = graph_refusal(modules, has_experts=has_experts, has_dense_mlps=has_dense_mlps)
    if refusal is not None:
        raise ValueError(f"{GRAPH_MODULES_KEY}: {refusal}")
