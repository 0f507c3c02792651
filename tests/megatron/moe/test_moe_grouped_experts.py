"""Tests of the grouped product of all experts of a layer: equal to separate products, also if experts have no
tokens."""

import itertools

import pytest
import torch
from float32 import EPSILON, FORMULA
from generation_cases import PARAMS, config_of, model_path, run, sequences  # noqa: F401
from layout_cases import make_config, make_data, outcomes  # noqa: F401
from small_models import and_long
from torch.utils._python_dispatch import TorchDispatchMode

from mcore_rl.config import LoRAConfig
from mcore_rl.models.megatron.moe.experts import stacked
from mcore_rl.testing.layout_check import ParallelLayout, compare, compute_layout_result, table_row
from mcore_rl.testing.processes import run_processes

LAYOUTS = [
    ("mixtral", ParallelLayout(tp=2, ep=2, etp=1, sp=True), False),
    ("mixtral", ParallelLayout(tp=2, sp=True), False),
    ("gpt_oss", ParallelLayout(tp=2, sp=True), False),
    ("glm4_moe", ParallelLayout(pp=2, dp=2, ep=2), False),
    ("qwen3_moe", ParallelLayout(tp=2, dp=2, ep=2, sp=True, tokens_per_pack=128), True),
]


def grouped(config, **changes):
    model = config.model.model_copy(update={"moe_grouped_gemm": True, **changes})
    return config.model_copy(update={"model": model})


@pytest.mark.long
@pytest.mark.parametrize(("family", "layout", "recompute"), LAYOUTS, ids=str)
def test_three_steps_equal_plain_pytorch_and_one_after_the_other(family, layout, recompute, outcomes, model_of):  # noqa: F811
    config = layout.apply(grouped(make_config(model_of(family)), recompute_activations=recompute))
    outcome = run_processes(compute_layout_result, config, make_data(), 3, world_size=layout.world_size)[0]
    for reference in outcomes(family):
        difference = compare(outcome, reference)
        assert difference.within(), table_row(layout, difference)


@pytest.mark.long
def test_samples_have_the_log_probabilities_of_training(model_path):  # noqa: F811
    out, difference = run(grouped(config_of(model_path("mixtral"))), ParallelLayout(), PARAMS)
    assert difference < 1e-5
    assert len(sequences(out)) == len(sequences(run(config_of(model_path("mixtral")), ParallelLayout(), PARAMS)[0]))


COUNTS = [[5, 0, 1, 9, 0, 2], [0, 0, 0, 0, 0, 7], [0] * 6, [3, 1, 1, 1, 1, 0]]


def both_ways(config):
    """For each of `COUNTS`, output and gradients of inputs, of the outputs' weights and of every parameter, grouped and
    one after the other."""
    from mcore_rl.models.megatron.moe.experts import GroupedExperts, SequentialMLP
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy = MegatronPolicy(config)
    experts = next(m for chunk in policy.model.chunks for m in chunk.modules() if isinstance(m, GroupedExperts))
    trained = [parameter for parameter in experts.parameters() if parameter.requires_grad]
    for parameter in trained:
        torch.nn.init.normal_(parameter, std=0.1)  # B of an adapter is zero
    results = []
    for counts, kind in itertools.product(COUNTS, (GroupedExperts, SequentialMLP)):
        tokens, generator = sum(counts), torch.Generator().manual_seed(0)
        hidden = torch.randn(tokens, 64, generator=generator).to(getattr(torch, config.model.dtype)).requires_grad_()
        probs = torch.rand(tokens, generator=generator).requires_grad_()
        output, bias = kind.forward(experts, hidden, torch.tensor(counts), probs)
        assert bias is None
        output.backward(torch.randn(output.shape, generator=generator).to(output.dtype))
        results.append([output, hidden.grad, probs.grad, *(p.grad for p in trained)])
        experts.zero_grad(set_to_none=True)
    policy.shutdown()
    results = [[tensor.detach() for tensor in result] for result in results]
    return list(zip(results[::2], results[1::2], strict=True))


ADAPTERS = LoRAConfig(rank=3, target_modules=("experts.gate_up_proj", "experts.down_proj"))


@pytest.mark.parametrize("lora", [None, ADAPTERS], ids=["", "adapters"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_with_few_tokens_or_none(dtype, lora, model_of):
    config = grouped(make_config(model_of("mixtral")), dtype=dtype, lora=lora)
    results = run_processes(both_ways, config, world_size=1)[0]
    rounding = FORMULA * EPSILON if dtype == "float32" else 0.01 if lora is None else 0.02
    for counts, (ours, theirs) in zip(COUNTS, results, strict=True):
        assert len(ours) == 3 + (2 if lora is None else 4) * 6
        for one, other in zip(ours, theirs, strict=True):
            assert one.dtype == other.dtype
            largest = float(other.abs().max()) if other.numel() else 0.0
            torch.testing.assert_close(one, other, rtol=rounding, atol=rounding * largest, msg=str(counts))


class Copies(TorchDispatchMode):
    """Counts the calls inside the context that concatenate or stack any of `tensors`."""

    def __init__(self, tensors):
        super().__init__()
        self.places, self.count = {tensor.data_ptr() for tensor in tensors}, 0

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        if function.overloadpacket in (torch.ops.aten.stack, torch.ops.aten.cat):
            self.count += any(tensor.data_ptr() in self.places for tensor in arguments[0])
        return function(*arguments, **(named or {}))


def copies_of_steps(config, data, output):
    """Return how often weights are stacked in each of several calls, and whether changes reach the grouped products.

    The calls are scoring, two training steps, and scoring by the reference. Each change is followed by a comparison of
    the grouped weights with the experts' own.
    """
    from mcore_rl.algorithms.build_loss import build_loss
    from mcore_rl.models.megatron.moe.experts import GroupedExperts, stacked
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy
    from mcore_rl.models.policy.reference import initial_reference

    policy = MegatronPolicy(config.model_copy(update={"output_dir": output}), total_steps=10, rows_per_unit=2)
    policy.reference = initial_reference(policy, adapters_are_trained=True)
    layers = [m for chunk in policy.chunks for m in chunk.modules() if isinstance(m, GroupedExperts)]
    of_linears = [[getattr(e, n).weight for e in x.local_experts] for x in layers for n in ("linear_fc1", "linear_fc2")]
    counts, current, own = [], [], policy.own_rows(data)

    def seen(call, *arguments):
        with Copies(itertools.chain(*of_linears)) as copies:
            result = call(*arguments)
        counts.append(copies.count)
        compare()
        return result

    def compare():
        policy.finish_param_gather()
        current.append(all(torch.equal(stacked(w), torch.stack([x.detach() for x in w])) for w in of_linears))

    seen(policy.get_logprobs, own)
    for _ in range(2):
        seen(policy.train, own, build_loss(config))
    seen(policy.get_reference_policy_logprobs, own)
    with policy.reference.in_place():
        compare()
    path = policy.save_checkpoint(output, 2, {"step": 2})
    policy.train(own, build_loss(config))
    policy.load_checkpoint(path)
    compare()
    policy.offload_after_refit()
    policy.prepare_for_training()
    compare()
    shared = all(stacked(w).untyped_storage()._cdata == w[0].untyped_storage()._cdata for w in of_linears)
    policy.shutdown()
    return counts, current, shared


COPYING = and_long(
    [(ParallelLayout(), {"recompute_activations": True}), (ParallelLayout(), {"lora": ADAPTERS})],
    [(ParallelLayout(dp=2, ep=2), {}), (ParallelLayout(tp=2, dp=2, ep=2, sp=True), {})],
)


@pytest.mark.parametrize(("layout", "changes"), COPYING, ids=str)
def test_no_pass_copies_the_weights_of_experts(layout, changes, model_of, tmp_path):
    """The products read the weights where they are, whatever has changed them: a step, a reference, a checkpoint."""
    config = layout.apply(grouped(make_config(model_of("mixtral")), **changes))
    for counts, current, shared in run_processes(
        copies_of_steps, config, make_data(), tmp_path, world_size=layout.world_size
    ):
        assert counts == [0] * 4
        assert current == [True] * 7
        assert shared


def test_weights_at_unequal_distances_are_copied():
    buffer = torch.arange(100.0)
    for places in ((0, 20, 41), (40, 20, 0), (0, 3, 6), (7, 7, 7)):
        weights = [buffer.as_strided((2, 3), (3, 1), place) for place in places]
        whole = stacked(weights)
        assert torch.equal(whole, torch.stack(weights))
        assert whole.data_ptr() not in [weight.data_ptr() for weight in weights]
    apart = [torch.arange(6.0).view(2, 3) for _ in range(3)]
    assert torch.equal(stacked(apart), torch.stack(apart))
    for places in ((5, 25, 45), (5,)):
        weights = [buffer.as_strided((2, 3), (3, 1), place) for place in places]
        whole = stacked(weights)
        assert torch.equal(whole, torch.stack(weights))
        assert whole.data_ptr() == weights[0].data_ptr()


def kept_bytes(config):
    """Return the bytes that a layer's experts and its router keep for the backward pass, beside parameters."""
    from torch.autograd.graph import saved_tensors_hooks

    from mcore_rl.models.megatron.moe.experts import GroupedExperts
    from mcore_rl.models.megatron.moe.router import Router
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy = MegatronPolicy(config)
    modules = [m for chunk in policy.model.chunks for m in chunk.modules()]
    experts, router = (next(m for m in modules if isinstance(m, kind)) for kind in (GroupedExperts, Router))
    parameters = {p.untyped_storage().data_ptr() for p in policy.model.chunks[0].parameters()}
    rows = torch.randn(64, experts.config.hidden_size, dtype=torch.bfloat16).requires_grad_()
    found = []
    for compute in (
        lambda: experts._compute(rows, torch.tensor([64, *[0] * 5]), torch.rand(64).requires_grad_()),
        lambda: router.gating(rows[:, None]),
    ):
        kept = {}
        with saved_tensors_hooks(lambda x, kept=kept: kept.setdefault(x.untyped_storage().data_ptr(), x), lambda x: x):
            compute()
        found.append(sum(x.untyped_storage().nbytes() for pointer, x in kept.items() if pointer not in parameters))
    policy.shutdown()
    return found


def test_experts_and_router_keep_no_more_than_their_products_need(model_of):
    """Experts: the rows, gate and up, their weighted product, the weights. Router: the rows, in their own precision."""
    config = grouped(make_config(model_of("mixtral")), dtype="bfloat16")
    ((of_experts, of_router),) = run_processes(kept_bytes, config, world_size=1)
    hidden, width = 64, 96
    assert of_experts <= 64 * (2 * (hidden + 3 * width) + 4) + 64
    assert of_router == 64 * 2 * hidden
