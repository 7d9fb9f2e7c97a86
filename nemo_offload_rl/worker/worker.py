"""Runs one rank of a Megatron policy: a plain class, which worker/actor.py wraps in a Ray actor."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch

from nemo_offload_rl.config.schema.policy import PolicyConfig
from nemo_offload_rl.data.batch import BatchedData, LossFunction
from nemo_offload_rl.hf_config import hf_config as read_hf_config
from nemo_offload_rl.mcore import distributed, step, weights
from nemo_offload_rl.mcore.aux_losses import AuxLosses
from nemo_offload_rl.mcore.build import build
from nemo_offload_rl.mcore.distributed import ParamGather
from nemo_offload_rl.mcore.logprob.forward import LogprobOptions
from nemo_offload_rl.mcore.model.bridge_import import auto_bridge
from nemo_offload_rl.mcore.model.model_config import parallel_sizes
from nemo_offload_rl.mcore.optimizer.cpu_optimizer import metrics
from nemo_offload_rl.mcore.patches.layer_state import wait_for_reductions
from nemo_offload_rl.mcore.step import ComputeStream
from nemo_offload_rl.mcore.weights import HfWeights
from nemo_offload_rl.memory.errors import preserve_first_error
from nemo_offload_rl.memory.units import GIB
from nemo_offload_rl.plan.host_budget import ACTIVATIONS
from nemo_offload_rl.plan.planner import WorkerPlan
from nemo_offload_rl.refit.export import WeightExport
from nemo_offload_rl.refit.interface import RefitTransport
from nemo_offload_rl.refit.plan import ExportPlan, NamedTensor
from nemo_offload_rl.residency.table import Phase
from nemo_offload_rl.storage.manifest import FileSum, Manifest, find_damage
from nemo_offload_rl.worker.activations import Activations
from nemo_offload_rl.worker.batching import MicroBatcher
from nemo_offload_rl.worker.checkpoints import PolicyCheckpoints
from nemo_offload_rl.worker.logprob_passes import logprob_passes
from nemo_offload_rl.worker.offloader import EarlyMoves, GpuPeaks, bind_to_gpu, make_graphs, make_offloader
from nemo_offload_rl.worker.rank_metrics import mean
from nemo_offload_rl.worker.skipped_steps import SkippedSteps


class MegatronPolicyWorker:
    """Trains one rank's part of a policy and computes its log-probs.

    Every method but the queries is collective: all ranks call it in the same order.

    Args:
        config: the recipe's policy section, validated.
        plan: the plan of all ranks, as `planner.worker_plan` makes it.
        rank: this process's rank.
        world_size: number of ranks.
        local_rank: index of this process's GPU as the process sees it.
        master_addr: host of rank 0.
        master_port: a free port there.
        seed: seed of random weights and of the model-parallel random states.
        init_reference_model: keep the initial weights for `get_reference_policy_logprobs`.
        init_optimizer: False for a policy that is only evaluated or exported.

    Attributes:
        state: the model and its optimizer, for inspection.
        offloader: moves them between GPU and host.
        batcher: cuts batches into micro-batches.

    Raises:
        ValueError: the recipe asks for something that is not supported; the message names the key.
    """

    def __init__(
        self,
        config: PolicyConfig,
        *,
        plan: WorkerPlan,
        rank: int,
        world_size: int,
        local_rank: int,
        master_addr: str,
        master_port: int,
        seed: int,
        init_reference_model: bool,
        init_optimizer: bool = True,
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        hf_config = read_hf_config(config)
        megatron = config["megatron_cfg"]
        self._empty_unused_memory_level = megatron["empty_unused_memory_level"]
        offload = plan.offload
        binding = bind_to_gpu(offload.numa, local_rank=local_rank)
        captures = megatron["cuda_graph_impl"] != "none"
        sizes = parallel_sizes(megatron)
        self.device = distributed.initialize(
            sizes,
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            master_addr=master_addr,
            master_port=master_port,
            seed=seed,
            te_rng_tracker=captures,
        )
        with contextlib.ExitStack() as undo:
            undo.callback(distributed.destroy)
            self._stream = ComputeStream(self.device, captures=captures)
            undo.callback(self._stream.close)
            streamed = offload.streams_optimizer_state
            self.state: Final = build(config, hf_config, seed=seed, init_optimizer=init_optimizer, streamed=streamed)
            undo.callback(self.state.close)
            nbytes = plan.activation_bytes[distributed.mpu.get_pipeline_model_parallel_rank()]
            self.offloader: Final = make_offloader(
                self.state,
                offload,
                node=binding.node,
                with_reference=init_reference_model,
                fixed_bytes={ACTIVATIONS: nbytes},
                generator_bytes=plan.generator_bytes,
            )
            undo.callback(self.offloader.close)
            self.activations = Activations(self.state, offload, self.offloader, nbytes)
            undo.callback(self.activations.close)
            self.graphs = make_graphs(self.state, self.offloader, self.activations.offloader)
            undo.pop_all()
        self.residency = self.offloader.residency
        reuses_plans = megatron["checkpoint"]["ckpt_assume_constant_structure"]
        self._checkpoints = PolicyCheckpoints(self.state, self.offloader, sizes, reuses_plans=reuses_plans)
        self._peaks = GpuPeaks(lambda: self.offloader.mapped_bytes)
        self._skipped = SkippedSteps(config["max_skipped_steps"])
        stage_group_size = self.state.config.microbatch_group_size_per_vp_stage
        self.batcher: Final = MicroBatcher(plan.rows, sizes, stage_group_size, self.device)
        self._early = EarlyMoves(
            self.residency,
            offload,
            most_tokens=plan.rows.most_logprob_tokens,
            refit_follows="generation" in config,
        )
        self._passes = logprob_passes(config, self.state)
        per_layer = megatron["moe_per_layer_logging"]
        self._aux_losses = AuxLosses(self.state.config, per_layer=per_layer, device=self.device)
        self._param_gather = ParamGather(self.state.model)
        size = int(config["refit_buffer_size_gb"] * GIB)
        self._hf_weights = HfWeights(self.state.bridge, self.state.model, self.state.vocab_size)
        self._weight_export = WeightExport(self.hf_weights, rank=rank, bucket_bytes=size, reads=self._hf_weights)

    @classmethod
    def import_packages(cls) -> None:
        """Import Megatron-Bridge ahead of a build, which would import it first; it takes seconds."""
        auto_bridge()

    def _catch_up(self) -> None:
        """Complete the collectives that a failed `train` has left under way; all ranks take part now."""
        wait_for_reductions(self.state.model)
        self._param_gather.complete()

    def parallel_ranks(self) -> dict[str, int]:
        """Returns this rank's coordinates: dp_rank, dp_size, tp_rank, tp_size, pp_rank, pp_size."""
        return distributed.coordinates()

    # --- training ---------------------------------------------------------------------------------------------------

    def train(self, data: BatchedData, loss_fn: LossFunction, gbs: int, mbs: int) -> dict[str, Any]:
        """Train on this data-parallel rank's rows, one optimizer step for each global batch of `gbs` samples.

        The schedule of learning rate and weight decay ticks once a call, as in NeMo-RL: all optimizer steps of a call
        have the same rate. A sample is a row, or a group of rows that belong together (`data.group_size`).

        Args:
            data: the training batch's fields (see data/batch.py); a multiple of gbs / dp samples.
            loss_fn: the loss contract's function.
            gbs: samples of a global batch, over all data-parallel ranks.
            mbs: samples of a micro-batch (padded batches).

        Returns:
            loss, grad_norm, lr (the rate of these optimizer steps), num_steps, num_skipped (steps whose loss or
            gradient was not finite), num_microbatches, tokens, and metrics by name: means over the optimizer steps,
            equal on every rank. Steps that were skipped for another `step.Skip` are counted in metrics, if there are
            any. Auxiliary losses of experts are means over all micro-batches.

        Raises:
            ValueError: the samples are no multiple of gbs / dp, or a sequence is too long.
            TooManySkippedStepsError: more than policy.max_skipped_steps steps of this run were not finite.
        """
        self.prepare_for_training()
        local = gbs // distributed.mpu.get_data_parallel_world_size() * data.group_size
        if data.size == 0 or data.size % local:
            raise ValueError(
                f"train got {data.size} rows on a rank, which is not a multiple of the {local} rows that a rank has "
                "of a global batch."
            )
        with self._peaks.of("train"):
            results, num_microbatches = self._train_steps(data, loss_fn, local, mbs)
        self._early.after_training()
        done = [result for result in results if result.skipped is None]
        skipped = Counter(result.skipped for result in results if result.skipped is not None)
        num_not_finite = skipped.pop(step.Skip.NOT_FINITE, 0)
        names = results[-1].metrics
        learning_rate = self._learning_rate()
        assert self.state.scheduler is not None
        self.state.scheduler.step(increment=1)
        return {
            "loss": mean(result.loss for result in done or results),
            "grad_norm": mean(result.grad_norm for result in done or results),
            "lr": learning_rate,
            "num_steps": len(done),
            "num_skipped": num_not_finite,
            "num_microbatches": num_microbatches,
            "tokens": int(data["input_lengths"].sum()),
            "metrics": {name: mean(result.metrics[name] for result in done or results) for name in names}
            | self._aux_losses.metrics()
            | {f"num_skipped_{reason.name.lower()}": float(number) for reason, number in skipped.items()},
        }

    def _train_steps(
        self, data: BatchedData, loss_fn: LossFunction, local: int, mbs: int
    ) -> tuple[list[step.StepResult], int]:
        """Runs one step for each `local` rows; also returns the number of micro-batches."""
        results, num_microbatches = [], 0
        self._aux_losses.start()
        with self._param_gather.by_forward_passes():
            for chunk in data.chunks(local):
                counts = step.global_counts(chunk, self.device)
                batches, _ = self.batcher.cut(chunk, mbs, "train_mb_tokens", fixed_shapes=self.graphs.fixed_shapes)
                with self.graphs.step(batches), self.activations.step(), self._aux_losses.step(len(batches)):
                    result = step.train_step(
                        self.state,
                        batches,
                        counts,
                        loss_fn,
                        of=self._passes.train,
                        device=self.device,
                        empty_unused_memory_level=self._empty_unused_memory_level,
                    )
                if self.graphs.fixed_shapes:
                    result.metrics["num_graph_replays"] = float(self.graphs.num_replays)
                self._skipped.count(result)
                results.append(result)
                num_microbatches += len(batches)
        return results, num_microbatches

    def _learning_rate(self) -> float:
        assert self.state.optimizer is not None
        return float(max(group["lr"] for group in self.state.optimizer.param_groups))

    def evaluate(self, data: BatchedData, loss_fn: LossFunction, mbs: int) -> dict[str, Any]:
        """Return loss and metrics of all data-parallel ranks' rows, forward only; equal on every rank."""
        self.prepare_for_lp_inference()
        counts = step.global_counts(data, self.device)
        batches, _ = self.batcher.cut(data, mbs, "train_mb_tokens", forward_only=True)
        with step.eval_mode(self.state.model):
            result = step.evaluate(self.state, batches, counts, loss_fn, of=self._passes.evaluate, device=self.device)
        return {"loss": result.loss, "metrics": result.metrics}

    # --- log-probs --------------------------------------------------------------------------------------------------

    def get_logprobs(self, data: BatchedData, mbs: int) -> BatchedData:
        """Return log-probs under the current policy: {"logprobs": float32 [B, S] on the CPU}, S as in the data."""
        self.prepare_for_lp_inference()
        return BatchedData(logprobs=self._logprobs(data, mbs, self._passes.logprob, prefetch=True))

    def get_reference_policy_logprobs(self, data: BatchedData, mbs: int) -> BatchedData:
        """Return log-probs under the initial weights: {"reference_logprobs": float32 [B, S] on the CPU}.

        Raises:
            ValueError: the worker was built without reference weights.
        """
        reference = self.offloader.reference
        if reference is None:
            raise ValueError("This policy has no reference weights; build it with init_reference_model=True.")
        self.prepare_for_lp_inference()
        with reference.swapped_in():
            return BatchedData(reference_logprobs=self._logprobs(data, mbs, self._passes.reference))

    def _logprobs(self, data: BatchedData, mbs: int, of: LogprobOptions, *, prefetch: bool = False) -> torch.Tensor:
        batches, bins = self.batcher.cut(data, mbs, "logprob_mb_tokens", forward_only=True)
        tokens = max(batch.tokens.numel() for batch in batches)
        if prefetch:
            self._early.beside_logprobs(tokens)
        with step.eval_mode(self.state.model), self._peaks.of("logprobs"):
            outputs = step.forward_logprobs(self.state, batches, of=of, device=self.device)
        if (taken_gib := self._peaks.taken_gib("logprobs")) is not None:
            self._early.note_logprobs(tokens, taken_gib)
        rows = range(data.size) if bins is None else [row for items in bins for row in items]
        out = torch.zeros(data["input_ids"].shape, dtype=torch.float32)
        values = [value for output in outputs for value in output]  # micro-batches may end in filler rows
        for row, value in zip(rows, values, strict=False):
            width = min(out.shape[1], value.shape[0])
            out[row, :width] = value[:width]
        return out

    # --- phases -----------------------------------------------------------------------------------------------------

    def _enter(self, phase: Phase, *, wait: bool = True) -> None:
        self._catch_up()  # before parameters and gradients move
        self.residency.enter(phase, wait=wait)

    def prepare_for_training(self) -> None:
        """Bring everything that training needs to the GPU."""
        self._enter(Phase.TRAIN)

    def prepare_for_lp_inference(self) -> None:
        """Bring what log-prob passes need to the GPU, and drop gradients."""
        self._enter(Phase.LOGPROB)

    def start_return(self, logprobs: bool) -> None:
        """Start to bring state back once generation has released the GPU, while other processes work; not collective.

        Args:
            logprobs: whether log-prob passes come before training.
        """
        self._early.after_generation(logprobs=logprobs)

    def offload_before_refit(self) -> None:
        """Free GPU memory for the export of weights."""
        self._enter(Phase.REFIT)

    def offload_after_refit(self, wait: bool = True) -> None:
        """Offload state for generation; without `wait` copies to the host may still run when this returns."""
        self._enter(Phase.GENERATE, wait=wait)

    # --- weight export ----------------------------------------------------------------------------------------------

    def hf_weights(self) -> Iterator[NamedTensor]:
        """Return an iterator over the weights under their Hugging Face names; collective."""
        return self._hf_weights()

    def prepare_refit_info(self, transport: RefitTransport) -> ExportPlan:
        """Connect this rank to a transport and return what each refit will send through it; collective."""
        self.offload_before_refit()
        return self._weight_export.connect(transport)

    def send_weights(self) -> dict[str, int]:
        """Export the weights under their Hugging Face names and send them; collective.

        Returns:
            The checksums of the weights that this rank has sent, by name; empty if the transport does not verify.
        """
        self.offload_before_refit()
        with self._peaks.of("refit"):
            return self._weight_export.send()

    def export_hf(self, folder: str) -> None:
        """Write the policy as a Hugging Face folder (safetensors shards, configs); collective."""
        self.offload_before_refit()
        state, write = self.state, self._rank == 0
        weights.write_hf_folder(self.hf_weights(), state.bridge, state.generation_config, Path(folder), write=write)

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def save_checkpoint(self, folder: str, save_optimizer: bool) -> dict[str, FileSum]:
        """Write the training state into `folder`, which must hold nothing yet; collective.

        Returns:
            Size and checksum of every file in it, by path relative to it.

        Raises:
            DiskFullError: on every rank, if there is no space; the worker can go on.
        """
        self._catch_up()
        return self._checkpoints.save(folder, save_optimizer)

    def start_checkpoint(self, folder: str, save_optimizer: bool) -> None:
        """Snapshot the training state, which a thread then writes to `folder`; collective. See `save_checkpoint`."""
        self._catch_up()
        self._checkpoints.start(folder, save_optimizer)

    def is_checkpoint_written(self) -> bool:
        """Returns whether this rank's files of the checkpoint under way are written; not collective."""
        return self._checkpoints.is_written

    def finish_checkpoint(self) -> dict[str, FileSum]:
        """Complete the checkpoint that `start_checkpoint` began; returns as `save_checkpoint`; collective."""
        return self._checkpoints.finish()

    def find_damage(self, folder: str, files: Manifest) -> list[str]:
        """Read this rank's share of a checkpoint's files and say what is wrong with them, one line each."""
        return find_damage(Path(folder), files.of_rank(self._rank, self._world_size))

    def load_checkpoint(self, folder: str, num_skipped: int = 0, num_train_calls: int | None = None) -> None:
        """Read what `save_checkpoint` wrote; collective.

        Args:
            folder: the folder of the checkpoint's policy.
            num_train_calls: calls of `train` up to the checkpoint, where the schedule goes on; None takes the
                checkpoint's count. Earlier versions counted optimizer steps, of which a call may have several.
            num_skipped: steps of the run up to the checkpoint that were skipped, which policy.max_skipped_steps limits.

        Raises:
            CheckpointError: it cannot be read, or is of another model.
            ValueError: it has another TP, PP or EP size, or no optimizer state although this policy trains.
        """
        self._catch_up()
        self.graphs.delete()
        self._checkpoints.load(folder)
        self._skipped.num_skipped = num_skipped
        if num_train_calls is not None and self.state.scheduler is not None:
            self.state.scheduler.num_steps = num_train_calls
            self.state.scheduler.step(increment=0)

    # --- queries and shutdown ---------------------------------------------------------------------------------------

    def gpu_name(self) -> str:
        """Returns the name of this rank's GPU; "cpu" without one."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"

    def memory_stats(self) -> dict[str, float]:
        """Returns this process's memory in GiB: now, and `gpu_peak_VERB_gib`, the peak of each verb's last call."""
        return self._peaks.memory_stats()

    def residency_metrics(self) -> dict[str, float]:
        """Returns the measurements of moves that have ended since the last call; see residency/metrics.py."""
        moves = self.offloader.meter.take_metrics() | self.activations.metrics() | metrics(self.state.optimizer)
        return moves | self._weight_export.take_metrics()

    def shutdown(self) -> None:
        """Release all memory and leave the process groups; the worker cannot be used afterwards."""
        with preserve_first_error(), contextlib.ExitStack() as stack:  # runs from last to first, even if some raise
            last = (distributed.destroy, self._stream.close, self.state.close, self.offloader.context.arena.close)
            for end in (
                *last,
                self.offloader.close,
                self.activations.close,
                self._checkpoints.close,
                self.graphs.delete,
                self._weight_export.close,
            ):
                stack.callback(end)
