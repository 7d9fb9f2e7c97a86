"""Provides a policy and a generation engine in one process: a table of logits over the last two tokens, really trained.

They keep the contracts of worker group, generation and refit, so that whole loops can be tested in a second.
"""

import io
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save

from nemo_offload_rl.data.batch import BatchedData, GlobalCounts
from nemo_offload_rl.data.problem import Problem
from nemo_offload_rl.data.tokenizer import arithmetic_tokenizer
from nemo_offload_rl.generation.interface import Capabilities, GenerationOutput, GenerationRequest
from nemo_offload_rl.generation.sampling import choose_tokens, row_uniforms
from nemo_offload_rl.metrics.names import MEASUREMENTS
from nemo_offload_rl.metrics.samples import JudgedAnswer
from nemo_offload_rl.refit.checksum import tensor_checksum
from nemo_offload_rl.refit.export import WeightExport
from nemo_offload_rl.refit.interface import RefitSender
from nemo_offload_rl.refit.plan import ExportPlan
from nemo_offload_rl.storage.manifest import FileSum, Manifest, file_sum, find_damage

VOCABULARY = 14
TOKENIZER = arithmetic_tokenizer()
EOS = TOKENIZER.eos_token_id
EQUALS = TOKENIZER.convert_tokens_to_ids("=")

# The task is to repeat the digit, which a table over the last two tokens can learn.
PROBLEMS = [Problem(f"{digit}=", str(digit)) for digit in range(10)]


def table_logits(table: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
    """Returns logits [B, S, V] of the token after each position."""
    before = torch.cat([torch.zeros_like(input_ids[:, :1]), input_ids[:, :-1]], dim=1)
    return table[before * VOCABULARY + input_ids]


def table_logprobs(table: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
    """Returns each token's log-prob given those before it, 0 at the first."""
    logprobs = table_logits(table, input_ids)[:, :-1].log_softmax(dim=-1)
    taken = logprobs.gather(-1, input_ids[:, 1:, None]).squeeze(-1)
    return torch.cat([torch.zeros_like(taken[:, :1]), taken], dim=1)


class ToyPolicy:
    def __init__(self, seed: int = 0, lr: float = 0.2) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.table = 0.1 * torch.randn(VOCABULARY**2, VOCABULARY, generator=generator)
        self.table[EQUALS * VOCABULARY : EQUALS * VOCABULARY + 10, EOS] += 3  # most answers end after one digit
        self.table.requires_grad_()
        self.reference = self.table.detach().clone()
        self.optimizer = torch.optim.Adam([self.table], lr=lr)
        self.calls: list[str] = []
        self.moves: dict[str, float] = {}
        self._weight_export = WeightExport(lambda: [("table", self.table.detach())], rank=0, bucket_bytes=1 << 20)

    def wait_until_ready(self) -> None:
        """Does nothing: this policy has no ranks."""

    def offload_before_refit(self) -> None:
        self.calls.append("offload_before_refit")
        self._enter("refit", moved_gb=4.0)

    def offload_after_refit(self, *, wait: bool = True) -> None:
        self.calls.append("offload_after_refit" if wait else "offload_after_refit, without waiting")
        self._enter("generate")

    def start_return(self, after, *, logprobs: bool) -> None:
        assert list(after) in (["asleep"], [])  # none without an engine
        self.calls.append(f"start_return, logprobs={logprobs}")

    def _enter(self, phase: str, moved_gb: float | None = None) -> None:
        """Reports moves of optimizer state that must be on the GPU only in training; each call takes longer."""
        seconds = 0.1 * len(self.calls)
        self.moves[f"{phase}/enter_s"] = seconds
        if moved_gb is not None:
            named = {"exposed_s": 0.25 * seconds, "copy_s": seconds, "hidden_s": 0.75 * seconds, "gb": moved_gb}
            named["gb_per_s"] = moved_gb / seconds
            self.moves |= {f"{phase}/optimizer_state/{name}": value for name, value in named.items()}

    def train(self, data: BatchedData, loss_fn, gbs: int, mbs: int) -> dict:
        self.calls.append("train")
        self._enter("train", moved_gb=4.0)
        assert data.size % (gbs * data.group_size) == 0
        for batch in data.chunks(gbs * data.group_size):
            counts = GlobalCounts.of(batch)
            self.optimizer.zero_grad()
            total, metrics = 0.0, {}
            for part in batch.chunks(mbs * data.group_size):
                loss, shares = loss_fn(table_logprobs(self.table, part["input_ids"]), part, counts)
                loss.backward()
                total += loss.item()
                metrics = {name: metrics.get(name, 0.0) + share.item() for name, share in shares.items()}
            norm = self.table.grad.norm().item()
            self.optimizer.step()
        return {"loss": total, "grad_norm": norm, "lr": 0.3, "num_skipped": 0, "metrics": metrics}

    @torch.no_grad()
    def evaluate(self, data: BatchedData, loss_fn, mbs: int) -> dict:
        self.calls.append("evaluate")
        self._enter("logprob")
        loss, metrics = loss_fn(table_logprobs(self.table, data["input_ids"]), data, GlobalCounts.of(data))
        return {"loss": loss.item(), "metrics": {name: value.item() for name, value in metrics.items()}}

    @torch.no_grad()
    def get_logprobs(self, data: BatchedData, mbs: int) -> BatchedData:
        self.calls.append("get_logprobs")
        self._enter("logprob")
        return BatchedData(logprobs=table_logprobs(self.table, data["input_ids"]))

    @torch.no_grad()
    def get_reference_policy_logprobs(self, data: BatchedData, mbs: int) -> BatchedData:
        self.calls.append("get_reference_policy_logprobs")
        self._enter("logprob")
        return BatchedData(reference_logprobs=table_logprobs(self.reference, data["input_ids"]))

    def prepare_refit_info(self, transport) -> ExportPlan:
        return self._weight_export.connect(transport)

    def send_weights(self) -> dict[str, int]:
        self.calls.append("send_weights")
        return self._weight_export.send()

    def save_checkpoint(self, folder: str, save_optimizer: bool) -> dict[str, FileSum]:
        self.start_checkpoint(folder, save_optimizer)
        return self.finish_checkpoint()

    def start_checkpoint(self, folder: str, save_optimizer: bool) -> None:
        self.calls.append("start_checkpoint")
        Path(folder).mkdir()
        optimizer = self.optimizer.state_dict() if save_optimizer else None
        content = io.BytesIO()
        torch.save({"table": self.table.detach(), "optimizer": optimizer}, content)
        self.under_way = Path(folder) / "state.pt", content.getvalue()

    def is_checkpoint_written(self) -> bool:
        return self.calls.count("train") % 3 == 0  # as a disk that is sometimes slower than a step

    def finish_checkpoint(self) -> dict[str, FileSum]:
        self.calls.append("finish_checkpoint")
        path, content = self.under_way
        path.write_bytes(content)  # raises OSError where there is no space
        return {path.name: file_sum(path, rank=0)}

    def find_damage(self, folder: str, files: Manifest) -> list[str]:
        return find_damage(Path(folder), files.of_rank(0, 1))

    def load_checkpoint(self, folder: str, num_skipped: int = 0, num_train_calls: int | None = None) -> None:
        self.num_skipped = num_skipped
        state = torch.load(Path(folder) / "state.pt", weights_only=True)
        self.table.data.copy_(state["table"])
        self.optimizer.load_state_dict(state["optimizer"])

    def export_hf(self, folder: str) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / "model.safetensors").write_bytes(save({"table": self.table.detach().contiguous()}))

    def flop_model(self):
        return None  # a table has no layers

    def gpu_names(self):
        return ["cpu"]

    def memory_stats(self) -> dict[str, float]:
        return {}

    def residency_metrics(self) -> dict[str, float]:
        moves, self.moves = self.moves, {}
        return moves | {"host_rss_gib": 1.0}

    def shutdown(self) -> None:
        self.calls.append("shutdown")


class TableSampler:
    """Samples from a table of logits; subclasses say where the table is."""

    def __init__(self, capabilities: Capabilities) -> None:
        self.capabilities = capabilities
        self.awake: set[str] = set()
        self.has_room = False
        self.requests: list[GenerationRequest] = []
        self.calls: list[str] = []

    def logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Returns logits [B, V] of the token after input_ids [B, 2]."""
        raise NotImplementedError

    def prepare_for_generation(self, tags) -> bool:
        self.calls += (f"wake up {tag}" for tag in tags)
        assert not self.awake & set(tags)
        self.awake |= set(tags)
        return self.has_room

    def start_finish_generation(self) -> list[str]:
        self.calls.append("begin to sleep")
        return ["asleep"]

    def finish_generation(self) -> None:
        self.calls.append("sleep")
        self.awake.clear()

    def generate(self, request: GenerationRequest) -> GenerationOutput:
        self.calls.append("generate")
        assert self.awake == {"weights", "kv_cache"}
        self.requests.append(request)
        sampling = request.sampling
        keys = (request.prompt_ids, request.sample_ids)
        uniforms = row_uniforms(sampling.seed, request.step, *keys, sampling.max_new_tokens)
        rows = [list(prompt) for prompt in request.prompt_ids]
        output = GenerationOutput([[] for _ in rows], [[] for _ in rows], ["length"] * len(rows))
        for draws in torch.from_numpy(uniforms).T:
            context = torch.tensor([[0, *row][-2:] for row in rows])
            tokens, logprobs = choose_tokens(
                self.logits(context), draws, temperature=sampling.temperature, top_k=sampling.top_k,
                top_p=sampling.top_p,
            )  # fmt: skip
            for index, (token, logprob) in enumerate(zip(tokens.tolist(), logprobs.tolist(), strict=True)):
                if output.finish_reasons[index] == "length":
                    rows[index].append(token)
                    output.output_ids[index].append(token)
                    output.logprobs[index].append(logprob)
                    if token in sampling.stop_token_ids:
                        output.finish_reasons[index] = "stop"
        return output

    def memory_stats(self) -> dict[str, float]:
        return {}

    def shutdown(self) -> None:
        self.awake.clear()


class ToyGeneration(TableSampler):
    def __init__(self) -> None:
        super().__init__(Capabilities("local", keeps_weights=True, batch_independent_sampling=True))
        self.table = torch.full((VOCABULARY**2, VOCABULARY), float("nan"))

    def logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        return table_logits(self.table, input_ids)[:, -1]

    def load_weights(self, named_tensors) -> None:
        assert self.awake == {"weights"}
        for _, tensor in named_tensors:
            self.table = tensor.clone()

    def prepare_refit_info(self, plan: ExportPlan) -> None:
        assert [spec.shape for spec in plan.tensors] == [tuple(self.table.shape)]

    def weights_checksum(self) -> dict[str, int]:
        return {"table": tensor_checksum(self.table)}


class LocalTransport(RefitSender):
    """Hands weights to engines in the same process; it is transport and sender in one."""

    def __init__(self, engines) -> None:
        self.engines = engines

    def connect(self, plan: ExportPlan, *, rank: int, bucket_bytes: int) -> "LocalTransport":
        return self

    def send(self, weights: Iterable) -> dict[str, int]:
        named = list(weights)
        for engine in self.engines:
            engine.load_weights(named)
        return {name: tensor_checksum(tensor) for name, tensor in named}


class Recorded:
    """Records the outputs of a run for tests: one row per step."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, float]] = {}
        self.shown: list[int] = []
        self.answers: list[tuple[int, list[JudgedAnswer]]] = []
        self.synced: list[int] = []

    def log(self, step, metrics) -> None:
        self.rows.setdefault(step, {}).update(metrics)

    def show(self, step, metrics) -> None:
        self.shown.append(step)
        assert metrics.items() <= self.rows[step].items()

    def show_answers(self, step, answers) -> None:
        self.answers.append((step, list(answers)))

    def sync(self) -> None:
        self.synced.append(max(self.rows))

    def without_timings(self) -> dict[int, dict[str, float]]:
        return {
            step: {name: value for name, value in row.items() if not name.startswith(MEASUREMENTS)}
            for step, row in self.rows.items()
        }
