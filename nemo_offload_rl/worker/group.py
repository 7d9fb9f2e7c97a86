"""Drives a policy's ranks, one worker each, from the driver; its methods take and return global batches."""

import logging
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import ray
from ray import cloudpickle
from ray.exceptions import RayError

from nemo_offload_rl.config.schema.policy import PolicyConfig
from nemo_offload_rl.data.batch import LOGPROB_COLUMNS, LOSS_COLUMNS, BatchedData, LossFunction
from nemo_offload_rl.hf_config import hf_config
from nemo_offload_rl.metrics.memory import largest_of
from nemo_offload_rl.metrics.timer import ProfileOptions
from nemo_offload_rl.model_check.check import checked_model
from nemo_offload_rl.placement.cluster import WORKER_SHARE, Cluster
from nemo_offload_rl.placement.gather import cause_of, gather, is_disk_full
from nemo_offload_rl.placement.relay import Part, Relays, concat, each_alone
from nemo_offload_rl.plan.planner import WorkerPlan, worker_plan
from nemo_offload_rl.plan.step_time import FlopModel, flop_model_if_known
from nemo_offload_rl.refit.checksum import merge_checksums
from nemo_offload_rl.refit.interface import RefitTransport
from nemo_offload_rl.refit.plan import ExportPlan
from nemo_offload_rl.storage.manifest import FileSum, Manifest
from nemo_offload_rl.worker.actor import WorkerActor, verb_of
from nemo_offload_rl.worker.environment import worker_environment
from nemo_offload_rl.worker.errors import WorkerError, worker_error
from nemo_offload_rl.worker.rank_log import Record, fetch_records, log_records, take_records
from nemo_offload_rl.worker.rank_metrics import moves_and_records
from nemo_offload_rl.worker.sharding import (
    InferenceShards,
    require_parallel_sizes_fit,
    shard_for_inference,
    shard_for_training,
)
from nemo_offload_rl.worker.wire import WireBatch

if TYPE_CHECKING:  # it imports megatron-core, which the driver does not need
    from nemo_offload_rl.worker.worker import MegatronPolicyWorker

logger = logging.getLogger(__name__)

MEGATRON_POLICY_WORKER = "nemo_offload_rl.worker.worker:MegatronPolicyWorker"

_SHUTDOWN_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class _Layout:
    """Holds the parallel coordinates of each rank, known once every rank is built."""

    parallel_ranks: list[dict[str, int]]

    @property
    def dp_size(self) -> int:
        return self.parallel_ranks[0]["dp_size"]

    @property
    def reporting_ranks(self) -> list[int]:
        """Returns the lowest rank of each data-parallel rank, in data-parallel order; the driver uses their results."""
        lowest: dict[int, int] = {}
        for rank, coordinates in enumerate(self.parallel_ranks):
            lowest.setdefault(coordinates["dp_rank"], rank)
        return [lowest[dp_rank] for dp_rank in range(self.dp_size)]


Call = Callable[["MegatronPolicyWorker", Any], Any]
"""Calls one method of a worker, with the rank's shard of a batch, or None; sent to the ranks with all it refers to."""


def _gathered(shards: InferenceShards, results: Sequence[WireBatch]) -> BatchedData:
    return shards.gather([result.unpack() for result in results])


class PolicyWorkerGroup:
    """Starts the ranks of a policy and calls all of them together; as a context manager, ends them on exit."""

    def __init__(
        self,
        config: PolicyConfig,
        cluster: Cluster,
        *,
        seed: int,
        init_reference_model: bool,
        init_optimizer: bool = True,
        group_size: int = 1,
        plan: WorkerPlan | None = None,
        worker_cls: str = MEGATRON_POLICY_WORKER,
        checks_model: bool = True,
        before_build: Callable[[], None] | None = None,
    ) -> None:
        """Start to build every rank and return at once; `wait_until_ready`, or the first verb, waits for them.

        Args:
            config: The recipe's `policy`.
            cluster: Where the ranks run; one rank per bundle.
            seed: Seed of random weights and of dropout.
            init_reference_model: Whether to keep the initial weights as the reference policy.
            init_optimizer: Whether the policy will be trained.
            group_size: Rows of a sample that belong together, such as a chosen and a rejected answer.
            plan: The ranks' plan; None to make it from the config.
            worker_cls: "package.module:Class" of the worker, imported only in the ranks' processes.
            checks_model: Whether rank 0 compares the model with transformers' while the ranks are built; one rank
                suffices, since all have the same layers. A model that differs ends the ranks.
            before_build: Called while the ranks' processes import the worker, before any of them takes GPU memory. If
                it raises, the ranks are ended.

        Raises:
            ValueError: If the world size does not fit the recipe's parallel sizes, or the host memory for activations
                cannot be computed and the recipe does not give it; nothing was started.
        """
        require_parallel_sizes_fit(config["megatron_cfg"], cluster.world_size)
        if plan is None:
            plan = worker_plan(
                config,
                hf_config(config).to_dict(),
                world_size=cluster.world_size,
                group_size=group_size,
                init_optimizer=init_optimizer,
            )
        actor_class = ray.remote(WorkerActor)
        self._actors = [
            actor_class.options(
                **cluster.actor_options(rank, WORKER_SHARE),
                runtime_env={
                    "env_vars": worker_environment(
                        config["megatron_cfg"],
                        rank=rank,
                        world_size=cluster.world_size,
                        threads=cluster.threads_per_rank,
                        refit_follows="generation" in config,
                    )
                },
            ).remote()
            for rank in range(cluster.world_size)
        ]
        self._config = config
        self._cluster = cluster
        self._layout: _Layout | None = None
        self._failure: WorkerError | None = None
        arguments = {
            "config": config,
            "plan": plan,
            "world_size": cluster.world_size,
            "local_rank": 0,
            "seed": seed,
            "init_reference_model": init_reference_model,
            "init_optimizer": init_optimizer,
        }
        self._started: dict[Any, Sequence[int]] = {}
        self._relays = Relays(dict(enumerate(self._actors)), cluster)
        self._process_refs = [actor.process.remote() for actor in [*self._actors, *self._relays.actors]]
        if before_build is not None:
            for actor in self._actors:
                actor.import_worker.remote(worker_cls)
            try:
                before_build()
            except BaseException:
                self._kill()
                raise
        rendezvous = self._actors[0].rendezvous.remote(cluster.master_port_range, on_one_node=cluster.num_nodes == 1)
        self._build_refs = [
            actor.build.remote(
                worker_cls,
                rendezvous,
                arguments | {"rank": rank},
                partial(checked_model, config) if checks_model and rank == 0 else nullcontext,
            )
            for rank, actor in enumerate(self._actors)
        ]

    # ---- verbs

    def train(self, data: BatchedData, loss_fn: LossFunction, gbs: int, mbs: int) -> dict[str, Any]:
        """Train on a global batch, one optimizer step for every `gbs` samples.

        Returns:
            Rank 0's report: loss, grad_norm, lr, num_steps, num_skipped, num_microbatches, tokens, metrics.

        Raises:
            ValueError: If the sizes do not divide, or a column is missing; nothing was sent.
            WorkerError: If a rank failed.
        """
        data.require_columns(LOSS_COLUMNS, "train")
        shards = shard_for_training(data, gbs=gbs, mbs=mbs, dp_size=self._built().dp_size)
        return self._run(lambda worker, shard: worker.train(shard, loss_fn, gbs, mbs), shards)[0]

    def evaluate(self, data: BatchedData, loss_fn: LossFunction, mbs: int) -> dict[str, Any]:
        """Return loss and metrics of a global batch of any size, forward only: {"loss":, "metrics": {}}.

        Raises:
            ValueError: If the batch is empty, or a column is missing.
        """
        data.require_columns(LOSS_COLUMNS, "evaluate")
        shards = shard_for_inference(data, mbs=mbs, dp_size=self._built().dp_size)
        size = shards.mbs  # not the shards, of which each rank gets its own
        return self._run(lambda worker, shard: worker.evaluate(shard, loss_fn, size), shards.shards)[0]

    def get_logprobs(self, data: BatchedData, mbs: int) -> BatchedData:
        """Return log-probs of a global batch of any size under the policy: {"logprobs": float32 [B, S]}."""
        shards = self._shard_for_logprobs(data, mbs)
        size = shards.mbs
        return _gathered(shards, self._run(lambda worker, shard: worker.get_logprobs(shard, size), shards.shards))

    def get_reference_policy_logprobs(self, data: BatchedData, mbs: int) -> BatchedData:
        """Return log-probs under the initial weights: {"reference_logprobs": float32 [B, S]}."""
        shards = self._shard_for_logprobs(data, mbs)
        size = shards.mbs
        results = self._run(lambda worker, shard: worker.get_reference_policy_logprobs(shard, size), shards.shards)
        return _gathered(shards, results)

    def start_return(self, after: Sequence[Any], *, logprobs: bool) -> None:
        """Start to bring state back to the GPU, and return at once; the next verb raises errors of these moves.

        Args:
            after: Ray references of calls that must end first: generation's release of the GPU.
            logprobs: Whether log-prob passes come before training.
        """
        self._built()
        self._collect_started()
        self._started = self._start(lambda worker, _: worker.start_return(logprobs), after=after)

    def offload_before_refit(self) -> None:
        """Move everything off the GPU that a refit does not need."""
        self._run(lambda worker, _: worker.offload_before_refit())

    def offload_after_refit(self, *, wait: bool = True) -> None:
        """Offload state for generation; without `wait` generation must have the memory that it needs already."""
        self._run(lambda worker, _: worker.offload_after_refit(wait))

    def prepare_refit_info(self, transport: RefitTransport) -> ExportPlan:
        """Connect each rank to a transport and return what each refit will send through it."""
        return self._run(lambda worker, _: worker.prepare_refit_info(transport))[0]

    def send_weights(self) -> dict[str, int]:
        """Export the weights on all ranks and send them, each rank the part that its transport asks for.

        Returns:
            The checksums of the sent weights, by name; empty if the transport does not verify.
        """
        return self._of_all(lambda worker, _: worker.send_weights(), merge_checksums)

    def save_checkpoint(self, folder: str, save_optimizer: bool) -> dict[str, FileSum]:
        """Write a checkpoint, each rank its part.

        Returns:
            Size and checksum of every file in the folder, by path relative to it.

        Raises:
            DiskFullError: There is no space; the ranks can go on.
            WorkerError: If a rank failed.
        """
        return self._run(lambda worker, _: worker.save_checkpoint(folder, save_optimizer))[0]

    def start_checkpoint(self, folder: str, save_optimizer: bool) -> None:
        """Snapshot the current state for a checkpoint, which each rank writes while other verbs run.

        Raises:
            DiskFullError: There is no space; no checkpoint is under way, and the ranks can go on.
            WorkerError: If a rank failed.
        """
        self._run(lambda worker, _: worker.start_checkpoint(folder, save_optimizer))

    def is_checkpoint_written(self) -> bool:
        """Returns whether all ranks have written their files of the checkpoint under way."""
        return self._of_all(lambda worker, _: worker.is_checkpoint_written(), all)

    def finish_checkpoint(self) -> dict[str, FileSum]:
        """Wait for the checkpoint under way and complete it, with the results and errors of `save_checkpoint`."""
        return self._run(lambda worker, _: worker.finish_checkpoint())[0]

    def find_damage(self, folder: str, files: Manifest) -> list[str]:
        """Returns what is wrong with a checkpoint's files, one line each; one rank reads each file."""
        return self._of_all(lambda worker, _: worker.find_damage(folder, files), concat)

    def load_checkpoint(self, folder: str, num_skipped: int = 0, num_train_calls: int | None = None) -> None:
        """Read a checkpoint, each rank its part; see `MegatronPolicyWorker.load_checkpoint`."""
        self._run(lambda worker, _: worker.load_checkpoint(folder, num_skipped, num_train_calls))

    def export_hf(self, folder: str) -> None:
        """Write the policy as a Hugging Face folder.

        Raises:
            DiskFullError: There is no space; the ranks can go on.
            WorkerError: If a rank failed.
        """
        self._run(lambda worker, _: worker.export_hf(folder))

    def memory_stats(self) -> dict[str, float]:
        """Returns memory in GiB, for each quantity the largest value of any rank."""
        return self._of_all(lambda worker, _: worker.memory_stats(), largest_of)

    def residency_metrics(self) -> dict[str, float]:
        """Returns metrics of the moves between GPU and host since the last call, each the worst rank's value.

        The names are those of `residency.metrics.Meter.take_metrics`.
        """
        found: tuple[dict[str, float], list[Record]] = self._of_all(
            lambda worker, _: (worker.residency_metrics(), take_records()), moves_and_records
        )
        log_records(found[1])
        return found[0]

    def start_profile(self, options: ProfileOptions, prefix: str) -> None:
        """Record the chosen ranks until `stop_profile`, to files whose names begin with `prefix`."""
        self._built()
        kinds = {"trace": options.trace, "memory": options.memory, "nvtx": options.nvtx}
        prefixes = [f"{prefix}_rank_{n}" if n in options.ranks else None for n in range(len(self._actors))]
        pairs = zip(self._actors, prefixes, strict=True)
        self._collect("start_profile", each_alone([actor.start_profile.remote(one, **kinds) for actor, one in pairs]))

    def stop_profile(self) -> None:
        """Write what the ranks have recorded."""
        self._built()
        self._collect("stop_profile", each_alone([actor.stop_profile.remote() for actor in self._actors]))

    def flop_model(self) -> FlopModel | None:
        """Returns the model's FLOP model; None for a model family, or a config field, that it does not cover."""
        return flop_model_if_known(hf_config(self._config).to_dict(), self._config)

    def gpu_names(self) -> list[str]:
        """Returns the name of each rank's GPU; "cpu" without one."""
        return self._of_all(lambda worker, _: [worker.gpu_name()], concat)

    # ---- lifecycle

    def wait_until_ready(self) -> None:
        """Wait until every rank is built.

        Raises:
            WorkerError: If a rank could not be built; all ranks have been ended.
        """
        self._built()

    @property
    def parallel_ranks(self) -> list[dict[str, int]]:
        """Returns each rank's `parallel_ranks()`."""
        return self._built().parallel_ranks

    def shutdown(self) -> None:
        """End every rank and wait until its process is gone; errors of ranks are logged."""
        if not self._actors:
            return
        if self._layout is not None:
            pickled = cloudpickle.dumps(lambda worker, _: worker.shutdown())
            refs = [actor.call.remote(pickled, None, Part(0, wants_result=False)) for actor in self._actors]
            done, late = ray.wait(refs, num_returns=len(refs), timeout=_SHUTDOWN_TIMEOUT_S)
            for ref in done:
                try:
                    ray.get(ref)
                except RayError as error:
                    logger.warning("A rank failed to shut down: %s", error)
            if late:
                logger.warning(
                    "%d ranks had not shut down after %.0f s and are killed.", len(late), _SHUTDOWN_TIMEOUT_S
                )
        self._kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    # ---- internals

    def _shard_for_logprobs(self, data: BatchedData, mbs: int) -> InferenceShards:
        data.require_columns(LOGPROB_COLUMNS, "A log-prob pass")
        read = BatchedData({name: data[name] for name in LOGPROB_COLUMNS}).in_groups(data.group_size)
        return shard_for_inference(read, mbs=mbs, dp_size=self._built().dp_size)

    def _run(self, call: Call, shards: Sequence[BatchedData] | None = None) -> list[Any]:
        """Calls a method of the workers on all ranks; ranks of one data-parallel rank get the same shard.

        Args:
            call: calls it with the worker and the rank's shard; what it refers to is sent to every rank.
            shards: a part of a batch for each data-parallel rank; None for a method without one.

        Returns:
            The results of one rank per data-parallel rank, in data-parallel order.
        """
        reporting = self._built().reporting_ranks
        calls = self._start(call, shards, wanted=set(reporting))
        of_rank = dict(zip(sorted(reporting), self._results(call, calls), strict=True))
        return [of_rank[rank] for rank in reporting]

    def _of_all[Value](self, call: Call, combine: Callable[[list[Value]], Value]) -> Value:
        """Calls a method on all ranks and combines their results, first those of each relay, there."""
        wanted = range(len(self._built().parallel_ranks))
        return combine(self._results(call, self._start(call, wanted=wanted, combine=combine)))

    def _start(
        self,
        call: Call,
        shards: Sequence[BatchedData] | None = None,
        *,
        wanted: Container[int] = (),
        combine: Callable[[list[Any]], Any] | None = None,
        after: Sequence[Any] = (),
    ) -> dict[Any, Sequence[int]]:
        """Calls a method on all ranks; see `Relays.call`."""
        packed = None if shards is None else [WireBatch.pack(shard) for shard in shards]
        dp_ranks = {rank: ranks["dp_rank"] for rank, ranks in enumerate(self._built().parallel_ranks)}
        return self._relays.call(call, shards=packed, shard_of=dp_ranks, wanted=wanted, combine=combine, after=after)

    def _results(self, call: Call, calls: Mapping[Any, Sequence[int]]) -> list[Any]:
        """Returns what `_start` asked for, in rank order."""
        self._collect_started()  # only after the ranks were sent this verb, so that they do not wait for the driver
        return concat(self._collect(verb_of(call), calls))

    def _collect_started(self) -> None:
        started, self._started = self._started, {}
        if started:
            self._collect("start_return", started)

    def _collect(self, verb: str, calls: Mapping[Any, Sequence[int]]) -> list[Any]:
        """Returns all calls' results; a failure is raised, and ends the group unless all ranks can go on after it."""
        results, failures = gather(calls, self._cluster)
        if len(failures) == len(self._actors) and all(map(is_disk_full, failures.values())):
            raise cause_of(failures[0])
        if failures:
            self._failure = worker_error(verb, failures, self._cluster.node_name)
            self._kill()
            raise self._failure
        return results

    def _built(self) -> _Layout:
        if self._failure is not None:
            raise self._failure
        if not self._actors:
            raise RuntimeError("This policy's workers have been shut down.")
        if self._layout is None:
            self._layout = _Layout(self._collect("its construction", each_alone(self._build_refs)))
            fetch_records(self._actors)
        return self._layout

    def _kill(self) -> None:
        actors, self._actors = self._actors, []
        fetch_records(actors)
        self._cluster.stop([*actors, *self._relays.actors], self._process_refs)
