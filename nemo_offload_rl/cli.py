"""The command-line interface `nemo-offload-rl`."""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nemo_offload_rl.config import ValidatedRecipe
    from nemo_offload_rl.config.schema import MasterConfig
    from nemo_offload_rl.metrics.logger import MetricRow
    from nemo_offload_rl.placement.rates import Rates
    from nemo_offload_rl.plan.optimizer_ways import CpuSpeed, Host
    from nemo_offload_rl.plan.planner import Planner

EXIT_OK, EXIT_DOES_NOT_FIT, EXIT_ERROR = 0, 1, 2
MAX_GIB, MAX_GB_PER_S = 1e5, 1e6  # far above any machine, and far below what the plan's arithmetic could not hold


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a subcommand.

    Args:
        arguments: the command-line arguments; None for those of the process.

    Returns:
        The exit status: 0; 1 if `plan --fit` finds nothing that fits; or 2 for a user error, which is printed to
        stderr without a traceback.
    """
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    # argparse does not accept positional arguments after an option: `validate RECIPE --deep a.b=1`.
    if rest and ("overrides" not in options or any(argument.startswith("-") for argument in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.overrides = [*options.overrides, *rest]
    run: Callable[[argparse.Namespace], int | None] = options.run
    try:
        return run(options) or EXIT_OK
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_ERROR


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="nemo-offload-rl", description="Recipes and checkpoints of nemo_offload_rl.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    validate = commands.add_parser(
        "validate",
        help="print the resolved recipe, or everything that is wrong with it",
        description="Print the resolved recipe as YAML, or everything that is wrong with it. Starts no run.",
    )
    validate.add_argument("recipe", type=Path, metavar="RECIPE", help="the YAML file")
    validate.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="OVERRIDE",
        help="section.key=value changes a key, +section.key=value adds one, ++ does either, ~section.key deletes one",
    )
    validate.add_argument(
        "--deep",
        action="store_true",
        help="also read data, tokenizer and reward, build the Megatron configs with Megatron's own checks, and compare "
        "a small copy of the model with transformers (up to 20 seconds; less when run again)",
    )
    validate.set_defaults(run=_validate)

    export = commands.add_parser(
        "export",
        help="write the policy of a checkpoint as a Hugging Face folder",
        description="Write the policy of a checkpoint as a Hugging Face folder: safetensors, config and tokenizer.",
    )
    export.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="a checkpoint folder, such as .../step_100")
    export.add_argument(
        "folder", type=Path, metavar="FOLDER", help="where to write: a new or empty folder, or a model to replace"
    )
    export.set_defaults(run=_export)

    plan = commands.add_parser(
        "plan",
        help="print where training state will live, its memory and the time of its copies; needs no GPU",
        description="Print where a recipe's training state lives in each phase, how many bytes that is on each rank "
        "and host, and how long the link is busy with it. Starts nothing and needs no GPU.",
    )
    plan.add_argument("recipe", type=Path, metavar="RECIPE", help="the YAML file")
    plan.add_argument("overrides", nargs="*", default=[], metavar="OVERRIDE", help="as for validate")
    plan.add_argument("--gpus", type=int, metavar="N", help="GPUs of each node, instead of cluster.gpus_per_node")
    plan.add_argument("--link", type=float, metavar="GB/S", help="speed of the link, instead of an assumed 55 GB/s")
    plan.add_argument(
        "--link-of",
        type=Path,
        metavar="RUN",
        help="the folder of an earlier run; uses the speeds of the link and CPU optimizer that it measured",
    )
    plan.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="the file of doctor --calibrate on the machine that the plan is for; default: this machine's, if any",
    )
    plan.add_argument(
        "--gpu-memory", type=float, metavar="GIB", help="memory of a GPU, to recommend an option for optimizer state"
    )
    plan.add_argument(
        "--host-memory",
        type=float,
        metavar="GIB",
        help="memory of the machine that the plan is for, with 16 CPU threads a rank; default: this machine",
    )
    plan.add_argument(
        "--fit",
        action="store_true",
        help="print the overrides with which the recipe fits a GPU of --gpu-memory at the fewest predicted seconds of "
        "a step, or the memory that is missing",
    )
    plan.add_argument("--json", action="store_true", help="print the plan as JSON; sizes in bytes")
    plan.set_defaults(run=_plan)

    report = commands.add_parser(
        "report",
        help="write the page of a run, report.html, again from the run's folder",
        description="Draw the pictures of a run again and write its page, report.html, from the files in its folder.",
    )
    report.add_argument("folder", type=Path, metavar="FOLDER", help="the folder of a run, such as logs/exp_001")
    report.set_defaults(run=_report)

    doctor = commands.add_parser(
        "doctor",
        help="check whether this machine is fit for offloading, and print a remedy for each problem",
        description="Check whether this machine is fit for offloading, property by property. Measures each GPU's link.",
    )
    doctor.add_argument("--json", action="store_true", help="print the facts and verdicts as JSON")
    doctor.add_argument(
        "--calibrate",
        action="store_true",
        help="instead measure, in a minute, the rates of the GPU and its host, and keep them for plan and runs here",
    )
    doctor.set_defaults(run=_doctor)
    return parser


def _validate(options: argparse.Namespace) -> None:
    from nemo_offload_rl.config import check_named_files, load
    from nemo_offload_rl.config.source.yaml_source import as_yaml

    validated = load(options.recipe, options.overrides)
    notes = [f"note: {note}" for note in validated.notes]
    if validated.warm_start is not None:
        notes += [f"note: warm start: {note}" for note in validated.warm_start.notes]
    if options.deep:
        from nemo_offload_rl.config.model.hf_check import check_model_folder

        for one in (validated.warm_start, validated):
            if one is not None:
                check_model_folder(one.config)
        check_named_files(validated)
        notes += [f"note: {note}" for note in _load_inputs(validated)]
        notes += _check_deeply(validated.config)
    sys.stderr.write("".join(f"{note}\n" for note in notes))
    sys.stdout.write(as_yaml(validated.recipe.config))


def _load_inputs(recipe: "ValidatedRecipe") -> list[str]:
    """Loads data, prompts, tokenizer and reward, as a run does before it starts anything; returns notes about them."""
    from nemo_offload_rl.run.job import Job

    jobs = [Job.prepare(one) for one in (recipe, recipe.warm_start) if one is not None]
    return [note for job in jobs for note in job.preparation.notes]


def _check_deeply(config: "MasterConfig") -> list[str]:
    """Runs the checks that need torch, Megatron and transformers, and returns their notes."""
    import torch

    from nemo_offload_rl.config import for_machine
    from nemo_offload_rl.hf_config import UnreachableModelError, hf_config
    from nemo_offload_rl.model_check.check import ModelCheck

    config, lines = for_machine(config, has_gpus=torch.cuda.is_available())
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    try:
        check = ModelCheck(config["policy"], hf_config(config["policy"]), device=device)
    except UnreachableModelError:  # build_configs reports it
        lines += _build_megatron_configs(config)
        return [f"not checked here: {line}" for line in lines]
    with check:
        lines += _build_megatron_configs(config)
        return [f"not checked here: {line}" for line in lines] + [f"note: {check.finish()}"]


def _build_megatron_configs(config: "MasterConfig") -> list[str]:
    from nemo_offload_rl.mcore.model.model_config import build_configs

    try:
        return build_configs(config["policy"])
    except (AssertionError, NotImplementedError, RuntimeError, ValueError) as error:  # raised by Megatron's configs
        if str(error).startswith("policy."):
            raise
        raise ValueError(f"policy.megatron_cfg: Megatron refuses this combination: {error}") from error


def _export(options: argparse.Namespace) -> None:
    from nemo_offload_rl.worker.export_source import read_export_source

    read_export_source(options.checkpoint, options.folder)  # before torch is imported, which takes seconds

    from nemo_offload_rl.worker.export import export_checkpoint

    export_checkpoint(options.checkpoint, options.folder)
    sys.stdout.write(f"wrote {options.folder}\n")


def _plan(options: argparse.Namespace) -> int:
    from nemo_offload_rl.config import load

    _check_plan_options(options)
    overrides = options.overrides + ([f"cluster.gpus_per_node={options.gpus}"] if options.gpus is not None else [])
    validated = load(options.recipe, overrides)
    sys.stderr.write("".join(f"note: {note}\n" for note in validated.notes))

    from nemo_offload_rl.config.keys.schema_problems import ABSENT, value_at
    from nemo_offload_rl.config.megatron import split_devices
    from nemo_offload_rl.config.model.hf_check import check_model_folder
    from nemo_offload_rl.hf_config import hf_config
    from nemo_offload_rl.memory.units import GIB
    from nemo_offload_rl.plan.activations import limit_where_unknown
    from nemo_offload_rl.plan.architecture import UnknownArchitectureError
    from nemo_offload_rl.plan.colocation import KV_CACHE_BYTES, with_resident_state
    from nemo_offload_rl.plan.decisions import Machine, without_replayed_engine
    from nemo_offload_rl.plan.optimizer_ways import plan_ways
    from nemo_offload_rl.plan.planner import PlannedRun, Planner, make_plan
    from nemo_offload_rl.plan.report import print_plan, print_residency
    from nemo_offload_rl.plan.resolve import resolve

    earlier = _earlier_steps(options)
    rates, link_source = _rates(options, earlier)
    gpu_bytes = None if options.gpu_memory is None else int(options.gpu_memory * GIB)
    check_model_folder(validated.config, needs_weights=False)
    model = hf_config(validated.config["policy"]).to_dict()

    host = _planned_host(options)
    if options.fit:
        ranks_of_a_host = split_devices(validated.config["cluster"], validated.config["policy"]).policy_per_node
        speed = _cpu_speed(options, earlier, rates, ranks_of_a_host).params_per_s
        of_each_node = (host.memory,) * validated.config["cluster"]["num_nodes"]
        rates = dataclasses.replace(rates, cpu_params_per_s=speed)
        planner = Planner(model, validated.algorithm, gpu_bytes, of_each_node, rates=rates)
        return _print_fit(options, overrides, planner, host)
    planner = Planner(model, validated.algorithm, gpu_bytes, rates=rates)
    hosts = () if options.host_memory is None else (host.memory,) * validated.config["cluster"]["num_nodes"]
    machine = Machine(has_gpus=True, gpu_bytes=gpu_bytes, hosts=hosts, rates=rates)
    resolved = resolve(validated.config, machine, model, algorithm=validated.algorithm)
    config = resolved.config
    # The plan's tables and alternatives show what would make room.
    notes = [*resolved.lines, *(str(problem) for problem in resolved.problems)]
    if notes and gpu_bytes is None:
        notes.append("--gpu-memory GIB shows the tokens for a GPU of that size")

    def written_at(key: str) -> str:
        if value_at(config, key) != value_at(validated.config, key):
            return "chosen by the plan for this GPU"
        return str(validated.recipe.origin(key))

    try:
        run = resolved.run or planner.run(config)  # which raises why the sizes are not known
    except UnknownArchitectureError as error:
        without_sizes = make_plan(config["policy"], link_bytes_per_s=rates.link_bytes_per_s)
        keeps = planner.spec.has_reference(config)
        print_residency(without_sizes, has_reference=keeps, written_at=written_at, as_json=options.json)
        if without_sizes.activations is not None:
            limit_where_unknown(without_sizes.activations, error)
        raise

    kv_cache = f"policy.generation.vllm_kwargs.{KV_CACHE_BYTES}"
    nbytes = value_at(config, kv_cache)
    decided = [*resolved.chosen, *([] if nbytes is ABSENT else [f"++{kv_cache}={nbytes}"])]

    def plan_with(more: Sequence[str]) -> PlannedRun:
        other, _ = without_replayed_engine(load(options.recipe, [*overrides, *decided, *more]).config)
        return planner.run(with_resident_state(other, planner)[0])

    cpu_speed = _cpu_speed(options, earlier, rates, run.ranks_of_a_host)
    written = load(options.recipe, [*overrides, *decided]).config  # what it leaves open is decided for each way anew
    print_plan(
        run,
        ways=plan_ways(written["policy"], plan_with, cpu_params_per_s=cpu_speed.params_per_s),
        gpu_bytes=gpu_bytes,
        packing=config["policy"]["sequence_packing"],
        row_lines=notes,
        link_source=link_source,
        cpu_speed=cpu_speed,
        written_at=written_at,
        host=host,
        as_json=options.json,
    )
    return EXIT_OK


def _print_fit(
    options: argparse.Namespace,
    overrides: list[str],
    planner: "Planner",
    host: "Host",
) -> int:
    from nemo_offload_rl.config import load
    from nemo_offload_rl.plan.fit import cheapest_fit

    def load_with(more: Sequence[str]) -> "MasterConfig":
        return load(options.recipe, [*overrides, *more]).config

    sys.stderr.write(f"note: the rates that seconds are predicted from are {planner.rates.source}\n")
    fit = cheapest_fit(load_with, planner)
    if options.json:
        sys.stdout.write(json.dumps(dataclasses.asdict(fit), indent=2) + "\n")
    else:
        assert planner.gpu_bytes is not None, "the options were checked"
        sys.stdout.write("\n".join(fit.lines(planner.gpu_bytes, host)) + "\n")
    return EXIT_OK if fit.fits else EXIT_DOES_NOT_FIT


def _check_plan_options(options: argparse.Namespace) -> None:
    """Refuses invalid sizes and speeds."""
    if options.link is not None and not 0 < options.link <= MAX_GB_PER_S:
        raise ValueError(f"--link is a speed in GB/s above 0 and at most {MAX_GB_PER_S:,.0f}; found {options.link:g}")
    if options.fit and options.gpu_memory is None:
        raise ValueError("--fit needs the memory of the GPU that the recipe is to fit; give it with --gpu-memory GIB")
    if options.gpus is not None and options.gpus < 1:
        raise ValueError(f"--gpus is a number of GPUs of each node, 1 or more; found {options.gpus}")
    for option, gib in (("--gpu-memory", options.gpu_memory), ("--host-memory", options.host_memory)):
        if gib is not None and not 0 < gib <= MAX_GIB:
            raise ValueError(f"{option} is a size in GiB above 0 and at most {MAX_GIB:,.0f}; found {gib:g}")
    if options.link is not None and options.link_of is not None:
        raise ValueError("--link and --link-of both name the link's speed; give one of them")


def _earlier_steps(options: argparse.Namespace) -> list["MetricRow"]:
    """Reads the metrics of the run in --link-of; returns an empty list if no run is given."""
    if options.link_of is None:
        return []
    from nemo_offload_rl.metrics.moves import measured_link_bytes_per_s
    from nemo_offload_rl.plan.optimizer_ways import measured_cpu_params_per_s

    path, steps = _read_steps(options.link_of, "--link-of")
    if measured_link_bytes_per_s(steps) is None and measured_cpu_params_per_s(steps) is None:
        raise ValueError(
            f"{path} has neither a share_of_link of a move in one direction, which gives the link's speed, nor a step "
            "of the CPU optimizer; give the folder of a run on GPUs with page-locked offload, or the speed with --link"
        )
    return steps


def _read_steps(folder: Path, argument: str) -> tuple[Path, list["MetricRow"]]:
    """Reads the metrics of the run in a folder, which an argument names; returns their file, too."""
    from nemo_offload_rl.metrics.logger import METRICS_FILE, read_metrics
    from nemo_offload_rl.storage.disk import UnreadableFileError, open_regular_file

    path = folder / METRICS_FILE
    try:
        open_regular_file(path).close()
    except UnreadableFileError as error:
        reason = f"there is no file {path}" if error.is_absent else f"{path} {error}"
        runs = [one for one in (folder.parent, *sorted(folder.glob("exp_*"))) if (one / METRICS_FILE).is_file()]
        such = f", such as {runs[-1]}" if runs else ""
        raise ValueError(f"{argument}: {reason}; give the folder of a run, which has this file{such}") from error
    return path, read_metrics(path)


def _rates(options: argparse.Namespace, earlier: Sequence["MetricRow"]) -> tuple["Rates", str]:
    """Returns the rates of the machine that a plan is for, and where the link's speed in them is from."""
    from nemo_offload_rl.metrics.moves import measured_link_bytes_per_s
    from nemo_offload_rl.placement.machine import rates_here
    from nemo_offload_rl.placement.rates import H200_RATES, read_rates

    if options.calibration is not None:
        rates = read_rates(options.calibration)
    else:
        rates = rates_here() if options.host_memory is None else H200_RATES
    link, source = measured_link_bytes_per_s(earlier), _run_source(options)
    if options.link is not None:
        link, source = options.link * 1e9, "given by --link"
    return (rates, rates.source) if link is None else (dataclasses.replace(rates, link_bytes_per_s=link), source)


def _run_source(options: argparse.Namespace) -> str:
    return f"measured by the run in {options.link_of}"


def _cpu_speed(
    options: argparse.Namespace, earlier: Sequence["MetricRow"], rates: "Rates", ranks_of_a_host: int
) -> "CpuSpeed":
    """Returns the CPU optimizer's speed: from a run, measured, or assumed for this machine or that of --host-memory."""
    from nemo_offload_rl.placement.rates import H200_RATES
    from nemo_offload_rl.plan.optimizer_ways import CpuSpeed, cpu_speed, measured_cpu_params_per_s

    measured = measured_cpu_params_per_s(earlier)
    if measured is not None:
        return CpuSpeed(measured, _run_source(options))
    if rates.source != H200_RATES.source:
        return CpuSpeed(rates.of_a_rank(ranks_of_a_host).cpu_params_per_s, rates.source)
    if options.host_memory is not None:
        return cpu_speed()
    return cpu_speed(max(1, len(os.sched_getaffinity(0)) // ranks_of_a_host))


def _planned_host(options: argparse.Namespace) -> "Host":
    """Returns the machine that a plan is for: this one, or one with the memory of --host-memory."""
    from nemo_offload_rl.memory.units import GIB
    from nemo_offload_rl.placement.host import host_facts
    from nemo_offload_rl.plan.optimizer_ways import Host

    here = host_facts()
    if options.host_memory is None:
        source = "the smaller of MemAvailable and what the cgroup's limit leaves"
        return Host("this machine", here, source, "--host-memory GIB plans for a machine with other memory.")
    nbytes = int(options.host_memory * GIB)
    memory = dataclasses.replace(here, total_bytes=nbytes, available_bytes=nbytes, cgroup_free_bytes=None)
    return Host(f"a machine of {options.host_memory:g} GiB", memory, "all of its memory")


def _report(options: argparse.Namespace) -> None:
    path, steps = _read_steps(options.folder, "FOLDER")
    if not steps:
        raise ValueError(f"{path} has no step; give the folder of a run that has done at least one")

    from nemo_offload_rl.metrics.page import draw_and_write_page

    try:
        page = draw_and_write_page(options.folder)
    except OSError as error:
        raise ValueError(
            f"{options.folder} cannot be written: {error.strerror}; copy it to where you may write, and give the copy"
        ) from error
    sys.stdout.write(f"wrote {page}\n")


def _doctor(options: argparse.Namespace) -> None:
    from nemo_offload_rl.placement.doctor import run_calibration, run_doctor

    report = run_calibration if options.calibrate else run_doctor
    report(as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
