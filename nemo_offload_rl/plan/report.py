"""Prints an `OffloadPlan`: tables, or the same as JSON."""

import dataclasses
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from nemo_offload_rl.config.schema.policy import SequencePackingConfig
from nemo_offload_rl.memory.units import KIB, MIB, show_gib
from nemo_offload_rl.plan.activations import EXPERT_LOAD_FACTOR
from nemo_offload_rl.plan.generation import EngineMemory
from nemo_offload_rl.plan.host_budget import COPIED_SIZE, margin_bytes
from nemo_offload_rl.plan.optimizer_ways import (
    OVERLAPPED_FACTOR,
    CpuSpeed,
    Host,
    PlannedWay,
    fastest_that_fits,
    reason,
)
from nemo_offload_rl.plan.plan import EngineTarget, OffloadPlan, RankActivations, RankPlan
from nemo_offload_rl.plan.planner import PlannedRun
from nemo_offload_rl.residency.table import Phase, Target

GB = 1e9
# rich takes 80 columns where there is no terminal; the tables need more.
_WIDTH_WITHOUT_TERMINAL = 160


def print_plan(
    run: PlannedRun,
    *,
    ways: Sequence[PlannedWay],
    gpu_bytes: int | None,
    link_source: str,
    cpu_speed: CpuSpeed,
    written_at: Callable[[str], str],
    host: Host,
    packing: SequencePackingConfig,
    row_lines: Sequence[str],
    as_json: bool,
) -> None:
    """Prints a plan as tables or as JSON.

    Args:
        run: the plan, with its sizes.
        ways: the ways to keep optimizer state in this recipe.
        gpu_bytes: memory of the GPU for which to recommend one of the ways; None for no recommendation.
        link_source: how the speed of the link was obtained.
        cpu_speed: speed of the CPU optimizer's kernels.
        written_at: returns the place (file and line, or override) that sets a key of the recipe.
        host: the machine that the plan is for.
        packing: the recipe's policy.sequence_packing, with numbers where they are known.
        row_lines: lines for the user on the row lengths that the recipe left open.
        as_json: print JSON instead of tables.
    """
    if as_json:
        in_json = {
            "link_source": link_source,
            "sequence_packing": packing,
            "optimizer_state_ways": _ways_json(ways, gpu_bytes, host, cpu_speed=cpu_speed),
        }
        _print_json(_plan_json(run, host) | in_json)
    else:
        link = f"{run.plan.link_bytes_per_s / GB:g} GB/s, {link_source}"
        of_ways = _ways_tables(ways, gpu_bytes, host, link=link, cpu_speed=cpu_speed)
        rows = (Text(f"  {line}", style="dim") for line in row_lines)
        _print_tables(itertools.chain(_plan_tables(run, written_at, host, gpu_bytes), rows, of_ways))


def print_residency(plan: OffloadPlan, *, has_reference: bool, written_at: Callable[[str], str], as_json: bool) -> None:
    """Prints a plan without sizes: where each target lives, and which key of the recipe says so.

    Args:
        plan: the plan; its `ranks` are not read.
        has_reference: whether reference weights are swapped in.
        written_at: as in `print_plan`.
        as_json: as in `print_plan`.
    """
    if as_json:
        _print_json(_settings_json(plan))
    else:
        _print_tables(_residency_and_sources(plan, has_reference, written_at))


def _print_json(values: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(values, indent=2) + "\n")


def _print_tables(tables: Iterator[RenderableType]) -> None:
    console = Console() if sys.stdout.isatty() else Console(width=_WIDTH_WITHOUT_TERMINAL)
    console.print(Group(*tables))


def _plan_tables(
    run: PlannedRun, written_at: Callable[[str], str], host: Host, gpu_bytes: int | None
) -> Iterator[RenderableType]:
    """Yields the residency table, the largest rank's memory and its copies in a step, then the host's memory."""
    plan, rank = run.plan, run.plan.largest_rank
    yield from _residency_and_sources(plan, rank.facts.has_reference, written_at)
    yield ""
    yield _memory(rank, _engine_rows(run, gpu_bytes), of_several=len(plan.ranks) > 1)
    for other in plan.ranks:
        if other is not rank:
            size, on_host = show_gib(sum(other.target_bytes.values())), show_gib(other.total_host_bytes)
            holds = f"holds {size} GiB, {on_host} GiB on the host"
            yield Text(f"  a rank of pipeline stage {other.stage} {holds}", style="dim")
    if run.engine is not None:
        yield Text(f"  {_engine(run.engine, shares_gpu=bool(run.plan.engine_table))}", style="dim")
    yield ""
    yield _transitions(rank, plan)
    if rank.facts.num_cpu_optimizer_params:
        yield Text(f"  {_cpu_optimizer(rank, plan)}", style="dim")
    moves_state = any(traffic.target is Target.OPTIMIZER_STATE for traffic in rank.all_traffic)
    if moves_state and plan.bytes_per_s(Target.OPTIMIZER_STATE) < plan.link_bytes_per_s:
        remedy = "policy.use_pinned_optimizer_offload=true copies optimizer_state at the page-locked speed, too"
        yield Text(f"  {remedy}", style="dim")
    yield ""
    if rank.activations is not None:
        yield from _activations(rank.activations, plan)
        yield ""
    yield from _hosts(run, host)


def _plan_json(run: PlannedRun, host: Host) -> dict[str, Any]:
    """Returns the contents of `_plan_tables` as plain values; sizes in bytes, speeds in bytes a second."""
    return _settings_json(run.plan) | {
        "stages": [_stage_json(rank) for rank in run.plan.ranks],
        "host_bytes_per_host": run.bytes_by_host,
        "vllm_engine": None if run.engine is None else dataclasses.asdict(run.engine),
        "host": {
            "name": host.name,
            "usable_bytes": host.usable_bytes,
            "fits": run.most_host_bytes <= host.usable_bytes,
        },
    }


def _settings_json(plan: OffloadPlan) -> dict[str, Any]:
    values = _fields_but(plan, "ranks", "sources", "engine_remark")
    return values | {"written_by": plan.sources, "bytes_per_s": {target: plan.bytes_per_s(target) for target in Target}}


def _stage_json(rank: RankPlan) -> dict[str, Any]:
    transitions = [
        {
            "from": one.source,
            "to": one.phase,
            "seconds": one.seconds,
            "traffic": [vars(traffic) for traffic in one.traffic],
        }
        for one in rank.transitions
    ]
    values = _fields_but(rank, "stage", "least_activation_bytes")
    return values | {"pipeline_stage": rank.stage, "transitions": transitions}


def _fields_but(of: OffloadPlan | RankPlan, *others: str) -> dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(of).items() if name not in others}


def _residency_and_sources(
    plan: OffloadPlan, has_reference: bool, written_at: Callable[[str], str]
) -> Iterator[RenderableType]:
    table = _new_table("Where each target lives", "target", *Phase)
    for target in Target:
        table.add_row(target, *(_cell(plan, phase, target, has_reference) for phase in Phase))
    if plan.engine_table:
        table.add_section()
        for of_engine in EngineTarget:
            table.add_row(of_engine, *(plan.engine_table[phase][of_engine] for phase in Phase))
    yield table
    if plan.engine_table:
        yield Text(f"  {plan.engine_remark}", style="dim")
    for key, cells in _written_cells(plan).items():
        yield Text(f"  {', '.join(cells)}: set by {key} ({written_at(key)})", style="dim")


def _cell(plan: OffloadPlan, phase: Phase, target: Target, has_reference: bool) -> Text:
    swapped = target is Target.REFERENCE_WEIGHTS and phase is Phase.LOGPROB and has_reference
    word = "swapped in" if swapped else str(plan.table[phase][target])
    return Text(word, style="bold" if target in plan.sources[phase] else "")


def _written_cells(plan: OffloadPlan) -> Mapping[str, list[str]]:
    """Returns the cells of the residency table that each key of the recipe set."""
    found: dict[str, list[str]] = {}
    for phase, sources in plan.sources.items():
        for target, key in sources.items():
            found.setdefault(key, []).append(f"{target} in {phase}")
    return found


def _engine_rows(run: PlannedRun, gpu_bytes: int | None) -> dict[str, dict[Phase, int]]:
    return run.engine.gpu_rows(gpu_bytes) if run.engine is not None and run.plan.engine_table else {}


def _memory(rank: RankPlan, of_engine: Mapping[str, Mapping[Phase, int]], of_several: bool) -> RichTable:
    facts = rank.facts
    stage = f" of pipeline stage {rank.stage}, the largest," if of_several else ""
    title = f"One rank{stage} in GiB: {facts.num_params:,} parameters"
    title += f", {facts.num_frozen_params:,} frozen" if facts.num_frozen_params else ""
    table = _new_table(title, "target", "size", *(f"GPU in {phase}" for phase in rank.gpu_bytes), "host memory")
    for target in Target:
        on_gpu = [rank.gpu_bytes[phase][target] for phase in rank.gpu_bytes]
        table.add_row(target, *map(show_gib, (rank.target_bytes[target], *on_gpu, rank.host_bytes[target])))
    beside = {"fp32 gradients of a step": {Phase.TRAIN: rank.step_grad_bytes}, **of_engine}
    for name, cells in beside.items():
        if any(cells.values()):
            table.add_row(name, "", *(show_gib(cells[one]) if one in cells else "" for one in rank.gpu_bytes), "")
    for name, nbytes in rank.fixed_bytes.items():
        table.add_row(name, "", *("" for _ in rank.gpu_bytes), show_gib(nbytes))
    table.add_section()
    totals = [
        sum(cells.values()) + sum(others.get(phase, 0) for others in beside.values())
        for phase, cells in rank.gpu_bytes.items()
    ]
    table.add_row(
        "all", show_gib(sum(rank.target_bytes.values())), *map(show_gib, totals), show_gib(rank.total_host_bytes)
    )
    return table


def _transitions(rank: RankPlan, plan: OffloadPlan) -> RichTable:
    title = f"Copies over the link in a step, at {plan.link_bytes_per_s / GB:g} GB/s (page-locked)"
    if not plan.pinned:
        speed = plan.bytes_per_s(Target.OPTIMIZER_STATE)
        title += f",\n{Target.OPTIMIZER_STATE} at {speed / GB:g} GB/s (pageable)"
    table = _new_table(title, "change of phase", "target", "to host GiB", "to GPU GiB", "seconds")
    for transition in rank.transitions:
        label = f"{transition.source} to {transition.phase}"
        if not transition.traffic:
            table.add_row(label, "", show_gib(0), show_gib(0), _seconds(0))
        for traffic in transition.traffic:
            seconds = _seconds(traffic.seconds)
            table.add_row(label, traffic.target, show_gib(traffic.d2h_bytes), show_gib(traffic.h2d_bytes), seconds)
            label = ""
    for traffic in rank.step_traffic:
        sizes = show_gib(traffic.d2h_bytes), show_gib(traffic.h2d_bytes)
        table.add_row("each optimizer step", f"{traffic.target}, streamed", *sizes, _seconds(traffic.seconds))
    traffics = rank.all_traffic
    out, back = sum(traffic.d2h_bytes for traffic in traffics), sum(traffic.h2d_bytes for traffic in traffics)
    table.add_section()
    table.add_row(
        "whole step", "", show_gib(out), show_gib(back), _seconds(sum(traffic.seconds for traffic in traffics))
    )
    return table


def _activations(activations: RankActivations, plan: OffloadPlan) -> Iterator[RenderableType]:
    """Yields a table of the offloaded activations.

    It does not say whether the link is fast enough: that depends on the time of a forward pass, which is not known
    here.
    """
    facts, modules = activations.facts, activations.modules
    speed = f"{plan.link_bytes_per_s / GB:g} GB/s"
    title = (
        f"Activations that one rank offloads: {facts.num_layers} layers, micro-batches of {facts.num_tokens:,} tokens,"
    )
    in_flight = f"{facts.num_chunks_in_flight / facts.num_model_chunks:g} of them in flight"
    table = _new_table(
        f"{title}\n{in_flight}",
        "module",
        "MiB a layer",
        "in flight GiB",
        "host memory GiB",
        f"seconds a micro-batch each way at {speed}",
    )
    for name, module in modules.items():
        seconds = _seconds(module.micro_batch / plan.link_bytes_per_s)
        table.add_row(name, f"{module.distinct / MIB:.1f}", show_gib(module.in_flight), "", seconds)
    table.add_section()
    total = {field: sum(getattr(module, field) for module in modules.values()) for field in ("distinct", "in_flight")}
    table.add_row(
        "all",
        f"{total['distinct'] / MIB:.1f}",
        show_gib(total["in_flight"]),
        show_gib(activations.slab_bytes),
        _seconds(sum(module.micro_batch for module in modules.values()) / plan.link_bytes_per_s),
    )
    yield table
    for line in _remarks(activations):
        yield Text(f"  {line}", style="dim")


def _remarks(activations: RankActivations) -> Iterator[str]:
    for name, module in activations.modules.items():
        if not module.saved:
            yield f"{name} saves no activations of its own in this model, or only below min_offloaded_tensor_size"
        if module.held:
            yield f"{module.held / MIB:.1f} MiB a layer of {name} also stay on the GPU unless attn_proj is offloaded"
    if activations.slab_bytes < activations.needed_bytes:
        needed = show_gib(activations.needed_bytes)
        yield (
            f"policy.activation_offload.host_memory_limit_gib is below the {needed} GiB that activations in flight may "
            "take: those that do not fit stay on the GPU"
        )
    elif activations.facts.is_moe:
        yield f"host memory is sized for {EXPERT_LOAD_FACTOR:g} times the average load of an expert"


def _engine(engine: EngineMemory, *, shares_gpu: bool) -> str:
    if engine.own_kv_cache_bytes is not None:
        cache = f"the KV cache has {show_gib(engine.own_kv_cache_bytes)} GiB"
    else:
        cache = (
            f"vLLM takes {engine.share:.0%} of the GPU (policy.generation.vllm_cfg.gpu_memory_utilization), and "
            "the KV cache gets what remains of that"
        )
        if shares_gpu:  # on GPUs of its own vLLM uses all free memory
            cache += f", at most {show_gib(engine.most_kv_cache_bytes)} GiB for {engine.max_num_seqs:,} sequences"
    return (
        f"each GPU of a vLLM engine holds {show_gib(engine.weights_bytes)} GiB of weights, an estimated "
        f"{show_gib(engine.reserve_bytes)} GiB for activations and graphs, and {engine.kv_bytes_per_token / KIB:g} KiB "
        f"of KV cache per token ({show_gib(engine.sequence_bytes)} GiB for {engine.max_model_len:,} tokens); {cache}"
    )


def _cpu_optimizer(rank: RankPlan, plan: OffloadPlan) -> str:
    nbytes = rank.facts.num_cpu_optimizer_params * COPIED_SIZE
    seconds = _seconds(nbytes / plan.link_bytes_per_s)
    return (
        f"the CPU optimizer steps {rank.facts.num_cpu_optimizer_params:,} parameters of the rank; each of its steps "
        f"copies {show_gib(nbytes)} GiB out and back, {seconds} s each way"
    )


def _hosts(run: PlannedRun, host: Host) -> Iterator[Text]:
    most, num_ranks = run.most_host_bytes, run.ranks_of_a_host
    ranks = "one rank" if num_ranks == 1 else f"{num_ranks} ranks"
    yield Text(f"Host memory: {show_gib(most)} GiB for the {ranks} on a host.")
    verdict = "the plan fits" if most <= host.usable_bytes else "the plan does not fit"
    yield Text(
        f"{host.name[0].upper()}{host.name[1:]} has {show_gib(host.usable_bytes)} GiB for offloading "
        f"({host.source}, minus a margin of {show_gib(margin_bytes(host.memory))} GiB): {verdict}."
    )


def _ways_tables(
    planned: Sequence[PlannedWay], gpu_bytes: int | None, host: Host, *, link: str, cpu_speed: CpuSpeed
) -> Iterator[RenderableType]:
    """Yields a table of the ways, and for a given GPU size the recommended way and the overrides that turn it on."""
    yield ""
    title = f"Options for optimizer state of one rank: sizes in GiB, times in s at {link}"
    columns = ["GPU in training", "GPU in generation", "host memory", "transfers per step, s", "wait per step, s"]
    table = _new_table(title, "option", *columns, *([] if gpu_bytes is None else ["fits"]))
    for one in planned:
        if one.refusal:
            continue
        sizes = map(show_gib, (one.training_bytes, one.generation_bytes, one.host_bytes))
        seconds = f"{one.transfer_s:.3f}", f"{one.wait_s:.3f}"
        table.add_row(one.way.name, *sizes, *seconds, *([] if gpu_bytes is None else [_verdict(one, gpu_bytes, host)]))
    yield table
    for one in planned:
        if one.refusal:
            yield Text(f"  not with this recipe: {one.way.name}: {one.refusal}", style="dim")
    yield Text(
        "  The GPU columns leave out activations, logits and the engine that generates; an option fits only with room\n"
        "  for the least that they take. Transfers are the seconds if nothing overlaps. For the CPU optimizer a step\n"
        f"  waits for its kernels times {OVERLAPPED_FACTOR:g}, or for its copies in both directions at once,\n"
        "  whichever takes longer;\n"
        f"  its kernels step {cpu_speed.params_per_s / 1e9:.3g} G parameters per s, {cpu_speed.source}.",
        style="dim",
    )
    if gpu_bytes is None:
        yield Text("  --gpu-memory GIB recommends an option for a GPU of that size", style="dim")
        return
    yield Text(reason(planned, gpu_bytes, host))
    chosen = fastest_that_fits(planned, gpu_bytes, host)
    if chosen is not None:
        yield Text("\n".join(f"    {line}" for line in chosen.way.overrides) or "    the recipe already sets this")


def _ways_json(
    planned: Sequence[PlannedWay], gpu_bytes: int | None, host: Host, *, cpu_speed: CpuSpeed
) -> dict[str, Any]:
    """Returns the contents of `_ways_tables` as plain values; sizes in bytes."""
    chosen = None if gpu_bytes is None else fastest_that_fits(planned, gpu_bytes, host)
    return {
        "ways": [dataclasses.asdict(one) for one in planned],
        "gpu_bytes": gpu_bytes,
        "cpu_optimizer_speed": dataclasses.asdict(cpu_speed),
        "chosen": None if chosen is None else chosen.way.name,
        "reason": None if gpu_bytes is None else reason(planned, gpu_bytes, host),
    }


def _verdict(one: PlannedWay, gpu_bytes: int, host: Host) -> str:
    if one.fits(gpu_bytes, host):
        return "yes"
    missing = one.missing_bytes(gpu_bytes)
    return f"lacks {show_gib(missing)}" if missing > 0 else f"host lacks {show_gib(one.missing_host_bytes(host))}"


def _new_table(title: str, first: str, *columns: str) -> RichTable:
    """Makes a table with a left-aligned first column of words and right-aligned columns of numbers."""
    table = RichTable(title=title, title_justify="left")
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f}"
