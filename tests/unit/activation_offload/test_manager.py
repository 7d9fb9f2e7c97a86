"""Tests activation offloading with the functions that megatron-core's layers call, and with late copies."""

import contextlib
import gc
import itertools
import random
from collections.abc import Callable, Sequence

import pytest
import torch
from megatron.core.pipeline_parallel import fine_grained_activation_offload
from megatron.core.pipeline_parallel.fine_grained_activation_offload import (
    FineGrainedActivationOffloadingInterface as Interface,
)
from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager
from megatron.core.tensor_parallel import random as checkpoints
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from support.late_copies import LateCopies, assert_empty
from support.marked_layers import LAYERS, MODULES, WIDTH, Model, assert_equal, batches, no_memory, offloader, suspended
from torch.multiprocessing.reductions import StorageWeakRef

from nemo_offload_rl.activation_offload.groups import Chunk, Group, GroupListener, PackedTensor
from nemo_offload_rl.activation_offload.manager import ActivationOffloader
from nemo_offload_rl.activation_offload.schedule import Profile, choose_in_first_pass
from nemo_offload_rl.activation_offload.storage import InPlaceError, OffloadPath, PinnedHostPool
from nemo_offload_rl.mcore.patches import activation_offload


def one_by_one(model: Model, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Runs each micro-batch forward and backward in turn; returns losses, input gradients and parameter gradients."""
    return one_forward_one_backward(model, inputs, 0)


def one_forward_one_backward(model: Model, inputs: Sequence[torch.Tensor], warm: int = 2) -> list[torch.Tensor]:
    """Runs the schedule of an earlier pipeline stage: `warm` micro-batches are ahead of their backward passes."""
    model.zero_grad(set_to_none=True)
    waiting, losses = [], []
    for x in inputs:
        waiting.append(model(x))
        losses.append(waiting[-1].detach())
        if len(waiting) > warm:
            waiting.pop(0).backward()
    for loss in waiting:
        loss.backward()
    Interface.reset()
    out = [*losses, *(x.grad for x in inputs), *(p.grad for p in model.parameters())]
    for x in inputs:
        x.grad = None
    return out


def begin_pass() -> None:
    Interface.init_chunk_handler(0, None, None, 0, 0, 1.0)


def in_group(compute: Callable, x: torch.Tensor, module: str = "mlp", *, is_on: bool = True, **options) -> torch.Tensor:
    group = Interface(is_on, x, module)
    with group as inside:
        y = compute(inside)
    return group.group_offload(y, **options)


def in_pass(compute: Callable, x: torch.Tensor, module: str = "mlp", **options) -> torch.Tensor:
    """Runs the first group of a pass."""
    begin_pass()
    return in_group(compute, x, module, **options)


def ones() -> torch.Tensor:
    return torch.ones(2, WIDTH, requires_grad=True)


def plain(model: Model, inputs: Sequence[torch.Tensor], schedule=one_by_one) -> list[torch.Tensor]:
    with suspended(offloader()):
        return schedule(model, inputs)


SETTINGS = [
    {}, {"fraction": 0.7}, {"fraction": 0.5}, {"fraction": 0.0}, {"max_inflight": 0}, {"max_inflight": 100},
    {"resident_bytes": 3000}, {"margin_stage": None}, {"nbytes": 20_000}, {"modules": ("core_attn",)},
    {"modules": ("qkv_linear", "mlp")},
]  # fmt: skip


@pytest.mark.parametrize("schedule", [one_by_one, one_forward_one_backward])
@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_numbers_are_those_of_a_plain_run_whatever_the_lengths(schedule, options):
    """Micro-batches change in number and length from step to step; copies are made late and out of order."""
    torch.manual_seed(0)
    model = Model(options.get("modules", MODULES))
    chance = random.Random(0)
    steps = [batches([chance.randint(1, 40) for _ in range(chance.randint(1, 6))], seed) for seed in range(6)]
    want = [plain(model, step, schedule) for step in steps]
    for seed in range(4):
        made = offloader(model, copies=LateCopies(seed, eager_share=0.3 * (seed % 2)), **options)
        for step, numbers in zip(steps, want, strict=True):
            assert_equal(schedule(model, step), numbers)
            assert made.report.num_micro_batches == len(step)
            total = made.report.total()
            assert total.distinct_bytes == total.moved_bytes + total.resident_bytes + total.refused_bytes
            assert made.report.host_peak_bytes <= made.report.host_bytes
        assert_empty(made.host_pool)


@pytest.mark.parametrize("direction", ["out", "back"])
def test_a_missing_wait_shows(model, direction):
    class Impatient(LateCopies):
        def __init__(self) -> None:
            super().__init__(eager_share=0.0)
            self.made: dict[str, list[object]] = {"out": [], "back": []}

        def request(self, asked, spans, after):
            self.made[asked].append(super().request(asked, spans, [] if asked != direction == "out" else after))
            return self.made[asked][-1]

        def wait(self, handle):
            if handle not in self.made[direction]:
                super().wait(handle)

    inputs = batches([8, 8, 8], 0)
    want = plain(model, inputs)
    offloader(model, copies=Impatient())
    assert not all(torch.equal(a, b) for a, b in zip(one_by_one(model, inputs), want, strict=True))


def test_a_storage_moves_once_and_its_memory_goes(model):
    made, inputs = offloader(model), batches([8] * 3, 0)
    one_by_one(model, inputs)  # records the groups of a pass
    out = made.copies.num_out
    one_by_one(model, inputs)
    per_batch = 8 * WIDTH * 4
    report = made.report.modules
    # The projection's input is the attention's output, which had been offloaded by then.
    assert report["attn_proj"].distinct_bytes == 0
    assert report["attn_proj"].duplicate_bytes == 3 * LAYERS * per_batch
    # q, k and v are three views of one storage.
    assert report["core_attn"].moved_bytes % per_batch == 0
    total = made.report.total()
    assert total.moved_bytes == total.distinct_bytes - total.resident_bytes
    # All but the batches themselves, to which the caller has references.
    assert total.freed_bytes == total.moved_bytes - 3 * per_batch
    assert total.prefetched_bytes == total.moved_bytes
    assert total.late_bytes == 0
    # The last layer's groups are needed at once, so they stay.
    assert report["qkv_linear"].moved_bytes == 3 * (LAYERS - 1) * per_batch
    assert made.copies.num_out > out


def test_a_layer_leaves_and_comes_back_by_one_request_except_where_each_group_is_waited_for(model):
    """The host pays for each request, and the link is idle until the first; the last layer stays."""
    inputs = batches([8], 1)
    want = plain(model, inputs)
    made = offloader(model)
    one_by_one(model, batches([8], 0))  # records the groups of a layer
    out, back = (len(sizes) for sizes in made.copies.sizes.values())
    assert_equal(one_by_one(model, inputs), want)
    sizes = {"out": made.copies.sizes["out"][out:], "back": made.copies.sizes["back"][back:]}
    report, total = made.report.modules, made.report.total()
    per_layer = [report[name].moved_bytes // (LAYERS - 1) for name in MODULES if report[name].moved_bytes]
    assert len(per_layer) > 1
    assert sizes["out"] == [*per_layer, *[sum(per_layer)] * (LAYERS - 2)]
    *urgent, second, first = sizes["back"]
    assert len(urgent) == len(MODULES)
    assert max(urgent) < first <= second == sum(urgent)  # nothing of the first layer's input is moved
    assert sum(sizes["back"]) == total.prefetched_bytes
    assert total.late_bytes == 0
    made = offloader(model, max_inflight=1)  # it counts groups: each is waited for by itself
    one_by_one(model, batches([8], 0))
    out = len(made.copies.sizes["out"])
    one_by_one(model, batches([8], 1))
    assert made.copies.sizes["out"][out:] == per_layer * (LAYERS - 1)


def test_a_pass_behind_one_too_short_to_leave_does_so_layer_by_layer(model):
    """The pass before decides which groups make requests, and it had nothing to request."""
    made, (short, long) = offloader(model, min_elements=8 * WIDTH), batches([1, 8], 0)
    model(short).backward()
    sizes = made.copies.sizes["out"]
    assert sizes == []
    loss = model(long)
    moved = sum(sizes)
    assert 0 < max(sizes) <= moved / (LAYERS - 1)
    loss.backward()
    made.reset()
    total = made.report.total()
    assert total.moved_bytes == moved and total.small_bytes > 0


def test_a_group_that_stays_as_a_whole_begins_the_next_pass_as_others_do():
    made = offloader(modules=("layer_input",), max_inflight=0, margin_stage=None)
    passes = []
    for _ in range(2):  # both forward, as on a pipeline's first stages
        made.init_model_chunk_offload_handler(0, None, None)
        chunk = made.cur_forward_chunk()
        passes.append([])
        for layer in range(3):
            tensor = torch.randn(64)
            if layer == 0:
                made.mark_not_offload(tensor)
            with made.group("layer_input") as group:
                passes[-1].append((group, made.save(tensor)))
    for groups in passes:
        for group, saved in reversed(groups):
            made.reach(group)
            made.unpack(saved)
    made.reset()
    report = made.report.modules["layer_input"]
    assert (report.moved_bytes, report.late_bytes) == (4 * 256, 256)  # late is what the first backward pass begins with
    assert Profile(chunk.groups, 1.0, has_margin=False).lead == 1


PAIR, TRIPLE = ["qkv_linear", "core_attn"], ["qkv_linear", "core_attn", "moe_act"]
ASKS = {("qkv_linear", 0), ("core_attn", 0), ("core_attn", 1), ("moe_act", 0)}


LEADS = [
    (PAIR * 4, 1.0, False, 1, None),
    (PAIR * 4, 1.0, True, 1, None),
    (PAIR * 4, 0.7, True, 2, None),
    (PAIR * 2 + TRIPLE * 2, 1.0, False, 2, ASKS | {("moe_act", 1)}),
    (PAIR * 2 + TRIPLE * 2, 1.0, True, 2, ASKS),
    (["qkv_linear"], 1.0, True, 1, None),  # nothing is offloaded
]


@pytest.mark.parametrize(("names", "fraction", "has_margin", "lead", "asks"), LEADS)
def test_copies_may_lag_two_layers_where_not_all_leave_alike(names, fraction, has_margin, lead, asks):
    profile = Profile(committed(names).groups, fraction, has_margin=has_margin)
    assert profile.lead == lead
    assert asks is None or profile.asks == asks


def test_what_leaves_is_decided_anew_where_groups_or_sizes_differ(model):
    made, profiles = offloader(model, fraction=0.5), []
    for inputs in batches([8, 8, 9], 0):
        one_by_one(model, [inputs])
        profiles.append(made._profiles[0])
    assert profiles[0] is profiles[1] is not profiles[2]
    profile = Profile(committed(PAIR * 3).groups, 1.0, has_margin=False)
    assert not profile.is_outdated_by(committed(PAIR * 3).groups)
    assert profile.is_outdated_by(committed(PAIR * 2).groups)


@pytest.mark.parametrize("fraction", [0.0, 0.01, 0.3, 0.5, 0.8, 1.0])
def test_the_first_pass_keeps_to_the_fraction_as_the_plan_says_and_others_to_one_of_bytes(model, fraction):
    made, (x,) = offloader(model, fraction=fraction), batches([8], 0)
    loss = model(x)
    sizes = [group.nbytes for group in made._chunks[0].groups]
    loss.backward()
    made.reset()
    total = made.report.total()
    assert total.moved_bytes == sum(itertools.compress(sizes, choose_in_first_pass([sizes], fraction)))
    assert total.moved_bytes + total.resident_bytes == total.distinct_bytes
    one_by_one(model, [x])
    whole = offloader(model)
    one_by_one(model, [x])
    one_by_one(model, [x])
    share = made.report.total().moved_bytes / whole.report.total().moved_bytes
    assert fraction - 0.2 < share <= fraction


@pytest.mark.parametrize("fraction", [0.0, 0.25, 1.0])
def test_a_short_pass_does_not_say_what_leaves_in_the_next_one(model, fraction):
    """Its storages were below the minimum size, so that it cannot tell a fraction of them."""
    inputs = batches([4, 40, 40, 4, 4, 40], 1)
    want = plain(model, inputs)
    made = offloader(model, fraction=fraction, min_elements=13 * WIDTH)
    one_by_one(model, inputs[:1])
    assert made.report.total().small_bytes > made.report.total().distinct_bytes == 0
    one_by_one(model, inputs[1:2])
    first = made.report.total()
    assert first.moved_bytes <= fraction * first.distinct_bytes and (first.moved_bytes > 0) == (fraction > 0)
    one_by_one(model, inputs[1:2])
    moved = made.report.total().moved_bytes
    assert_equal(one_by_one(model, inputs), want)
    assert made.report.total().moved_bytes == 3 * moved


def committed(names: Sequence[str]) -> Chunk:
    chunk = Chunk(_NoListener(), 0, OffloadPath(PinnedHostPool(torch.zeros(0, dtype=torch.uint8)), LateCopies()), 1.0)
    for name in names:
        chunk.start_group(name)
        chunk.end_group(name)
        chunk.groups[-1].nbytes = 8
    return chunk


class _NoListener(GroupListener):
    def commit(self, chunk: Chunk, group: Group) -> None:
        pass


@pytest.mark.parametrize("warm", [1, 2, 3])
def test_on_earlier_pipeline_stages_only_the_first_pass_of_a_step_is_late(model, warm):
    """A manager cannot know whose backward pass comes first; from then on each chunk requests the next one's."""
    made = offloader(model, margin_stage=None)
    one_by_one(model, batches([8], 0))
    one_by_one(model, batches([8], 0))
    late = made.report.total().late_bytes
    assert late == 3 * 8 * WIDTH * 4  # what the last layer's mlp saves
    one_forward_one_backward(model, batches([8] * 6, 0), warm)
    total = made.report.total()
    assert total.late_bytes == late and total.prefetched_bytes == total.moved_bytes - late


@pytest.mark.parametrize("fraction", [1.0, 0.3])
def test_nothing_is_asked_back_while_the_last_layers_groups_are_computed(model, fraction):
    """They are on the GPU, and so is most of what a step ever holds there."""
    made, (x,) = offloader(model, fraction=fraction), batches([8], 0)
    one_by_one(model, [x])
    loss = model(x)
    (chunk,), before, asked = made._chunks, made.copies.num_back, []
    for group in reversed(chunk.groups[-len(MODULES) :]):
        made.begin_backward(chunk, group)
        asked.append(made.copies.num_back > before)
    assert asked == [False] * (len(MODULES) - 1) + [True]  # the next groups are on the host
    loss.backward()
    made.reset()
    assert made.report.total().late_bytes == 0


def test_parameters_and_small_storages_stay(model):
    made = offloader(model, min_elements=10_000)
    one_by_one(model, batches([8], 0))
    total = made.report.total()
    assert total.small_bytes > total.distinct_bytes == made.copies.num_out == 0
    whole = torch.nn.Parameter(torch.ones(WIDTH, WIDTH))
    made = offloader(torch.nn.ParameterList([whole]))
    in_pass(lambda x: x @ whole.detach().t(), ones()).sum().backward()  # saves a view of `whole`
    assert made.copies.num_out == 0


def test_what_will_be_recomputed_stays_until_its_pass_is_over():
    made, tensor = offloader(), torch.ones(2, WIDTH)
    made.exclude_recomputed(tensor.untyped_storage())  # no pass is under way, as in log-probs
    for is_excluded in (False, True, False):
        begin_pass()
        if is_excluded:
            made.exclude_recomputed(tensor.untyped_storage())
        in_group(lambda x: x * tensor, ones()).sum().backward()
        Interface.reset()
        assert made.report.total().distinct_bytes == (0 if is_excluded else tensor.nbytes)


@pytest.mark.parametrize("is_alias", [True, False])
def test_a_leaf_that_autograd_keeps_is_emptied_if_no_other_code_knows_it(is_alias):
    """Selective recomputation starts from such a leaf; a leaf of the user's stays as it is."""
    made, leaf = offloader(), ones()
    saving = made.saving_to_recompute if is_alias else contextlib.nullcontext

    def save(y: torch.Tensor) -> torch.Tensor:
        with saving():
            return SavesALeaf.apply(y, [leaf, leaf])

    y = in_pass(save, ones())
    made.drain()
    assert leaf.untyped_storage().nbytes() == (0 if is_alias else 4 * 2 * WIDTH)
    y.sum().backward()
    Interface.reset()
    assert made.report.total().moved_bytes == 4 * 2 * WIDTH


class SavesALeaf(torch.autograd.Function):
    """Saves leaves that are not among its inputs, and reads them again."""

    @staticmethod
    def forward(ctx, x, leaves):
        ctx.save_for_backward(*leaves)
        return x + 0

    @staticmethod
    def backward(ctx, grad):
        for leaf in ctx.saved_tensors:
            assert leaf.requires_grad
            assert torch.equal(leaf.detach(), torch.ones(2, WIDTH))
        return grad, None


def test_a_storage_at_the_address_of_one_that_was_to_be_recomputed_is_none():
    made = offloader()
    begin_pass()
    for _ in range(100):
        made.exclude_recomputed(torch.ones(8, WIDTH).untyped_storage())
    others = [torch.ones(8, WIDTH) for _ in range(100)]
    assert not made._excluded.addresses & {other.untyped_storage()._cdata for other in others}


def test_leaves_saved_behind_what_is_to_be_recomputed_stay_as_they_are():
    made, leaves = offloader(), [ones(), ones()]

    def save(y: torch.Tensor) -> torch.Tensor:
        with made.saving_to_recompute():
            pass
        y = SavesALeaf.apply(y, leaves[:1])
        with pytest.raises(MemoryError), made.saving_to_recompute():
            raise MemoryError
        return SavesALeaf.apply(y, leaves[1:])

    y = in_pass(save, ones())
    made.drain()
    assert all(torch.equal(leaf.detach(), torch.ones(2, WIDTH)) for leaf in leaves)
    y.sum().backward()


def patched() -> tuple[object, object]:
    return CheckpointWithoutOutput.checkpoint, fine_grained_activation_offload.fine_grained_offloading_group_offload


def test_a_manager_that_has_lost_its_place_changes_nothing(monkeypatch):
    theirs = patched()
    made = offloader()
    PipelineOffloadManager.reset_instance()
    monkeypatch.setattr(checkpoints, "_get_all_rng_states", lambda: None)
    tensor = torch.ones(3, requires_grad=True)
    assert torch.equal(CheckpointWithoutOutput(fp8=None).checkpoint(torch.tanh, tensor), tensor.tanh())
    activation_offload.uninstall(made)
    assert patched() == theirs


def test_a_manager_leaves_the_place_that_another_has_taken_and_gives_back_its_own():
    theirs = patched()
    first, second = offloader(), offloader()
    ours = patched()
    activation_offload.uninstall(first)
    assert PipelineOffloadManager.OFFLOAD_MGR is second
    assert patched() == ours != theirs
    activation_offload.uninstall(second)
    assert PipelineOffloadManager.OFFLOAD_MGR is None
    assert patched() == theirs


class Refusing(LateCopies):
    """Queues half of one request and refuses the rest."""

    def __init__(self, direction: str, number: int) -> None:
        super().__init__(eager_share=0.0)
        self._direction, self._requests_left = direction, number

    def request(self, direction, spans, after):
        self._requests_left -= direction == self._direction
        if direction == self._direction and self._requests_left == 0:
            super().request(direction, spans[: len(spans) // 2 + 1], after)
            raise MemoryError
        return super().request(direction, spans, after)


@pytest.mark.parametrize("direction", ["out", "back"])
def test_a_request_that_is_refused_leaves_nothing_behind(model, direction):
    """Checks host memory, copies under way, and what autograd saved, whichever request is refused."""
    want = plain(model, batches([12, 7], 0))
    for number in itertools.count(1):
        copies = Refusing(direction, number)
        made = offloader(model, copies=copies)
        try:
            one_by_one(model, batches([12, 7], 0))
            break  # there are no more
        except MemoryError:
            assert not copies.has_pending()
        made.reset()
        gc.collect()
        assert_empty(made.host_pool)
        assert not any(type(one) is PackedTensor for one in gc.get_objects())
        assert_equal(one_by_one(model, batches([12, 7], 0)), want)
    assert number > LAYERS


def test_no_copy_uses_the_host_memory_of_one_that_is_closed(model):
    made = offloader(model, LateCopies(eager_share=0.0))
    one_by_one(model, batches([12], 0))
    loss = model(*batches([12], 1))
    model.layers[2].qkv.weight.register_hook(no_memory)
    with pytest.raises(MemoryError):
        loss.backward()
    made.reset()
    assert made.copies.has_pending()
    made.close()
    assert not made.copies.has_pending()


def test_a_change_in_place_is_refused():
    offloader()
    begin_pass()
    with pytest.raises(InPlaceError, match=r"shape \[2, 16\] that mlp saved .* remove mlp from .*offload_modules"):
        in_group(lambda x: (x * 2).exp().add_(1), ones())  # exp saves its output


def saved_by_a_group(is_on: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a tensor of ones [2, WIDTH] and its exponential, which a group's backward pass needs."""
    x = ones()
    return x, in_pass(torch.exp, x, is_on=is_on)


@pytest.mark.parametrize("options", [{"fraction": 0.0}, {"min_elements": 1 << 20}, {"nbytes": 0}], ids=str)
def test_a_change_of_what_stays_is_refused_as_in_plain_steps(options):
    """Autograd checks versions of saved tensors only where there are no hooks."""

    def changed_behind_its_group(is_on: bool) -> torch.Tensor:
        _, y = saved_by_a_group(is_on)
        with torch.no_grad():
            y.add_(1)
        return y

    made = offloader(**options)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        changed_behind_its_group(False).sum().backward()
    y = changed_behind_its_group(True)
    with pytest.raises(InPlaceError, match=r"shape \[2, 16\] that mlp saved .* \(version 1, saved at 0\), so grad"):
        y.sum().backward()
    assert made.host_pool.used_bytes == 0


def test_a_change_of_what_leaves_is_refused_until_its_copy_has_been_waited_for():
    made = offloader()
    _, y = saved_by_a_group()
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(InPlaceError, match="while it was being copied to the host; remove mlp from"):
        made.drain()


def test_what_has_left_comes_back_as_it_was_saved():
    """Checks this whatever has happened to the original, and whether or not it is saved again."""
    made = offloader(margin_stage=None)
    x, y = saved_by_a_group()
    made.drain()
    was = y.detach().clone()
    with torch.no_grad():
        y.add_(100)
    weight = ones()
    z = in_group(lambda inside: inside.detach() * weight, y, "attn_proj")
    made.drain()
    z.sum().backward()
    assert torch.equal(weight.grad, was + 100)
    y.sum().backward()
    assert torch.equal(x.grad, was)
    assert_empty(made.host_pool)


PASSES = [({}, False), ({}, True), ({"fraction": 0.0}, True), ({"min_elements": 1 << 20}, False)]


@pytest.mark.parametrize(("options", "is_interrupted"), PASSES, ids=str)
def test_a_pass_without_a_backward_pass_is_gone_with_its_output(options, is_interrupted):
    """exp saves its output: if it were kept as it is, its node would keep itself and all before it alive."""
    made = offloader(**options)
    begin_pass()
    before = torch.ones(2, WIDTH, requires_grad=True) * 1
    alive = StorageWeakRef(before.untyped_storage())
    x = before.square()
    group = Interface(True, x, "mlp")
    with contextlib.suppress(KeyboardInterrupt), group as x:
        x = x.exp()
        if is_interrupted:
            raise KeyboardInterrupt
    if not is_interrupted:
        x = group.group_offload(x)
    made.reset()
    del before, x, group
    assert alive.expired()


@pytest.mark.parametrize("fails_at", ["commit", "wait"])
def test_a_pass_that_a_change_in_place_has_ended_is_gone_with_its_output(fails_at):
    made = offloader()
    alive = []

    def forward() -> None:
        begin_pass()
        x = torch.ones(2, WIDTH, requires_grad=True) * 1
        alive.append(StorageWeakRef(x.untyped_storage()))
        x = x.square()
        for module in ("qkv_linear", "mlp"):
            group = Interface(True, x, module)
            with group as x:
                x = x.exp()
            if fails_at == "commit":
                x.detach().add_(1)
            group.group_offload(x)
            x.detach().add_(1)
        made.drain()

    with pytest.raises(InPlaceError, match="that qkv_linear saved"):
        forward()
    made.reset()  # the worker does this in its `finally`; mlp's has changed, too
    assert alive[0].expired()
    assert_empty(made.host_pool)


def square_with_delayed_commit() -> tuple[torch.Tensor, torch.Tensor, StorageWeakRef]:
    """Returns a tensor of ones, its square, which is a group of a graph's replay, and the storage that this saves."""
    begin_pass()
    Interface.enter_replay()
    x = ones()
    y = x * 1
    z = in_group(torch.square, y, "moe_act", delay_offload=True)
    Interface.exit_replay()
    return x, z, StorageWeakRef(y.untyped_storage())


@pytest.mark.parametrize("is_flushed_before", [True, False], ids=["in time", "too late"])
def test_delayed_commits_are_made_when_they_are_flushed_before_the_backward_pass(is_flushed_before):
    """On an earlier pipeline stage with one micro-batch, the last layer's commit comes after its backward pass."""
    made = offloader()
    gc.collect()
    gc.disable()
    try:
        x, z, saved = square_with_delayed_commit()
        assert made.copies.num_out == 0
        if is_flushed_before:
            Interface.flush_delayed_groups()
            assert made.copies.num_out > 0
        z.sum().backward()
        Interface.flush_delayed_groups()
        assert (made.copies.num_out > 0) == is_flushed_before
        del z
        made.reset()
        assert saved.expired()
    finally:
        gc.enable()
    assert torch.equal(x.grad, torch.full_like(x, 2.0))


def test_a_replay_that_fails_delays_no_commit_of_later_steps():
    made = offloader()
    Interface.enter_replay()  # its layer fails before it calls `exit_replay`
    made.reset()
    in_pass(torch.exp, ones(), "moe_act", delay_offload=True)
    assert made.copies.num_out > 0
    made.reset()


class Experts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.delays = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.delays:
            Interface.enter_replay()
            Interface.flush_delayed_groups()
        h = self.up(x)
        group = Interface(True, h, "moe_act")
        with group as h:
            y = h.exp()
        y = group.group_offload(self.down(y), delay_offload=self.delays)
        if self.delays:
            Interface.exit_replay()
        return y * 0.1 + x


@pytest.mark.parametrize(("schedule", "is_last_stage"), [(one_by_one, True), (one_forward_one_backward, False)])
def test_the_last_layers_delayed_commits_are_made_where_the_pass_ends(schedule, is_last_stage, monkeypatch):
    """No replay follows that would make them: they would not be counted, and the layer before would stay instead."""
    if not is_last_stage:
        monkeypatch.setattr(ActivationOffloader, "drain", lambda self: None)  # logits call it
    model = Model(())
    model.layers = torch.nn.ModuleList(Experts() for _ in range(LAYERS))
    inputs = batches([8] * 5, 0)
    want = plain(model, inputs, schedule)
    made = offloader(model, modules=("moe_act",), margin_stage=0 if is_last_stage else None)
    schedule(model, inputs)
    schedule(model, inputs)
    eager = made.report.total()
    assert eager.moved_bytes == len(inputs) * (LAYERS - is_last_stage) * 8 * WIDTH * 4
    for layer in model.layers:
        layer.delays = True
    for _ in range(2):
        assert_equal(schedule(model, inputs), want)
        total = made.report.total()
        assert (total.distinct_bytes, total.moved_bytes) == (eager.distinct_bytes, eager.moved_bytes)
        assert (total.resident_bytes, total.refused_bytes) == (eager.resident_bytes, 0)


@pytest.mark.parametrize("several", [None, tuple, list])
def test_the_end_of_a_group_adds_nothing_to_the_graph(several):
    made = offloader()
    begin_pass()
    x = ones()
    group = Interface(True, x, "mlp")
    with group as inside:
        y = inside * inside
    node = y.grad_fn
    output = y if several is None else several([y, torch.ones(1)])
    assert group.group_offload(output) is output
    assert y.grad_fn is node
    assert made.copies.num_out > 0
    made.drain()
    y.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2.0))


def test_an_output_that_needs_no_gradient_ends_its_group():
    made = offloader()
    in_pass(torch.square, torch.ones(2, WIDTH))
    assert made.cur_forward_chunk().open == []
