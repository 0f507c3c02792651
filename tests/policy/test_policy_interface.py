"""Tests of the policy interface: calls of a controller written for NeMo RL, and losses of other packages."""

import pytest
import torch
import torch.nn.functional as F
from float32 import FORMULA, FORWARD, GRADIENT, approx32, assert_close32
from layout_cases import make_config, make_data
from small_models import and_long
from transformers import AutoModelForCausalLM

from mcore_rl.algorithms.interfaces import LossFunction, LossType
from mcore_rl.algorithms.loss_functions import DPOLossFn, NLLLoss
from mcore_rl.losses.options import DPOOptions
from mcore_rl.models.generation.sampling import SamplingParams
from mcore_rl.testing.layout_check import ParallelLayout, _main_grad
from mcore_rl.testing.processes import run_processes

DPO = DPOOptions(sft_loss_weight=0.3)


class TwiceDPO(DPOLossFn):
    def __call__(self, *args, **kwargs):
        loss, metrics = super().__call__(*args, **kwargs)
        return 2 * loss, metrics


class WholeMicrobatch(LossFunction):
    """A loss that is not a sum over rows and needs its whole microbatch; it has no metric `loss`."""

    loss_type = LossType.SEQUENCE_LEVEL
    metric_reductions = {"rows": "max", "length": "mean"}  # noqa: RUF012

    def __call__(self, next_token_logits, data, global_valid_seqs, global_valid_toks):
        assert next_token_logits.shape[:2] == data["input_ids"].shape
        counted = data["token_mask"][..., None] * data["sample_mask"][:, None, None]
        means = (next_token_logits[..., :9] * counted).sum((1, 2))
        return (means.sum() ** 2).sqrt() / global_valid_seqs, {
            "rows": len(means),
            "length": data["token_mask"].sum(1).mean(),
            "calls": 1,
        }


class SmoothedNLL:
    """A loss exactly after the protocol: a label-smoothed likelihood. It knows no groups and needs all columns."""

    loss_type = LossType.TOKEN_LEVEL

    def __call__(self, next_token_logits, data, global_valid_seqs, global_valid_toks):
        assert next_token_logits.shape[:2] == data["input_ids"].shape
        mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
        logprobs = F.log_softmax(next_token_logits[:, :-1].float(), dim=-1)
        chosen = logprobs.gather(-1, data["input_ids"][:, 1:, None])[..., 0]
        loss = -((0.9 * chosen + 0.1 * logprobs.mean(-1)) * mask).sum() / global_valid_toks
        return loss, {"loss": loss.detach()}


class EveryToken(NLLLoss):
    """Read values that the masks exclude: every real token of every row, including prompts and masked samples."""

    def from_logprobs(self, next_token_logprobs, data, global_valid_seqs, global_valid_toks, entropy=None):
        loss = -next_token_logprobs.sum() / global_valid_toks
        return loss, {"loss": loss.detach(), "num_valid_samples": data["sample_mask"].sum()}


class EveryTokenOfLogits(EveryToken):
    """The same, by way of logits."""

    def __call__(self, *args, **kwargs):
        return super().__call__(*args, **kwargs)


class Vector(WholeMicrobatch):
    def __call__(self, *args):
        loss, metrics = super().__call__(*args)
        return loss, {**metrics, "of_each_row": torch.ones(3)}


def policy_of(config, **options):
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    return MegatronPolicy(config, **{"total_steps": 10, "rows_per_unit": 2, **options})


def printed_and_gradients_of(config, loss_fn):
    """Return what two steps print, the second step's metrics, and its gradients."""
    from mcore_rl.utils.console import console

    with console.capture() as printed:
        metrics, gradients = gradients_of(config, loss_fn, calls=2)
    return printed.get(), metrics, gradients


def gradients_of(config, loss_fn, rows=12, calls=1):
    from mcore_rl.models.megatron.training.optimizer import gather_gradients
    from mcore_rl.models.megatron.weights.conversion import export_hf_weights

    policy = policy_of(config)
    for _ in range(calls):
        metrics = policy.compute_gradients(make_data().slice(0, rows), loss_fn)
    gather_gradients(policy.chunks)
    gradients = dict(export_hf_weights(policy.model, _main_grad))
    policy.shutdown()
    return metrics, gradients


@pytest.mark.parametrize(
    "layout", and_long([ParallelLayout(cp=2)], [ParallelLayout(), ParallelLayout(packing=False)]), ids=str
)
def test_a_subclasss_call_runs_in_the_policy(layout, model_of):
    """Twice the loss gives twice every gradient; the pairs of a pack stay together."""
    config = layout.apply(make_config(model_of("llama")))
    (once, gradients), (twice, doubled) = (
        run_processes(gradients_of, config, loss_fn, world_size=layout.world_size)[0]
        for loss_fn in (DPOLossFn(DPO), TwiceDPO(DPO))
    )
    assert twice["loss"] == approx32(2 * once["loss"], FORWARD)
    assert twice["num_valid_samples"] == once["num_valid_samples"] == 5
    for name, gradient in gradients.items():
        assert_close32(doubled[name], 2 * gradient, GRADIENT, what=name)


def plain_smoothed(path):
    """Return loss and gradients of `SmoothedNLL`, computed by transformers row by row."""
    model, data = AutoModelForCausalLM.from_pretrained(path), make_data()
    mask = (data["token_mask"] * data["sample_mask"][:, None])[:, 1:].double()
    loss = 0.0
    for ids, length, counted in zip(data["input_ids"], data["input_lengths"].tolist(), mask, strict=True):
        logprobs = F.log_softmax(model(ids[None, :length]).logits[0, :-1].double(), dim=-1)
        chosen = logprobs.gather(1, ids[1:length, None])[:, 0]
        loss = loss - ((0.9 * chosen + 0.1 * logprobs.mean(-1)) * counted[: length - 1]).sum() / mask.sum()
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    "layout",
    and_long(
        [ParallelLayout(tp=2, sp=True, cp=2)],
        [ParallelLayout(tp=2), ParallelLayout(cp=2, packing=False), ParallelLayout()],
    ),
    ids=str,
)
def test_a_loss_without_groups_has_the_gradients_of_transformers(layout, model_of):
    """The loss needs whole logits, so they are gathered, and one line tells the memory that this needs."""
    path = model_of("llama")
    loss, expected = plain_smoothed(path)
    config = layout.apply(make_config(path))
    results = run_processes(printed_and_gradients_of, config, SmoothedNLL(), world_size=layout.world_size)
    printed, metrics, gradients = results[0]
    assert metrics["loss"] == pytest.approx(loss, rel=1e-5)
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        assert_close32(gradients[name], gradient, GRADIENT, what=name)
    assert all(not other for other, _, _ in results[1:])
    if layout.world_size == 1:
        assert not printed
        return
    (line,) = printed.splitlines()
    assert line.startswith("SmoothedNLL has no parameter ") and "LogprobLoss" in line and " MiB" in line


@pytest.mark.parametrize("rows", and_long([], [2, 12]))
def test_a_subclass_may_read_every_token(rows, model_of):
    """Two ranks share a single pair, so one gets a filler, which trains nothing for any loss."""
    plain = make_config(model_of("llama"))
    expected, gradients = run_processes(gradients_of, plain, EveryTokenOfLogits(), rows, world_size=1)[0]
    for loss_fn in (EveryToken(), EveryTokenOfLogits()):
        found, same = run_processes(gradients_of, ParallelLayout(dp=2).apply(plain), loss_fn, rows, world_size=2)[0]
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        for name, gradient in gradients.items():
            torch.testing.assert_close(same[name], gradient, rtol=1e-4, atol=2e-5, msg=name)


def loss_of_pairs(config, rows_per_unit):
    policy = policy_of(config, rows_per_unit=rows_per_unit)
    metrics = policy.evaluate(make_data(), DPOLossFn(DPO))
    policy.shutdown()
    return metrics


@pytest.mark.parametrize("layout", and_long([ParallelLayout()], [ParallelLayout(packing=False)]), ids=str)
def test_a_policy_that_was_not_made_for_pairs_keeps_a_losss_pairs_together(layout, model_of):
    config = layout.apply(make_config(model_of("llama")))
    made_for_pairs, not_made = (run_processes(loss_of_pairs, config, unit, world_size=1)[0] for unit in (2, 1))
    assert not_made == pytest.approx(made_for_pairs, rel=1e-5)


def metrics_of_a_loss_of_ones_own(config):
    policy, data = policy_of(config), make_data()
    metrics = policy.evaluate(data, WholeMicrobatch())
    with pytest.raises(
        ValueError, match=r"Vector: metric 'of_each_row' is a tensor \[3\]; a metric must be one number"
    ):
        policy.evaluate(data, Vector())
    policy.shutdown()
    return metrics


@pytest.mark.parametrize(
    "layout",
    and_long([ParallelLayout(packing=False, dp=2)], [ParallelLayout(packing=False), ParallelLayout(dp=2)]),
    ids=str,
)
def test_metrics_of_any_loss(layout, model_of):
    """Rows of a microbatch are passed together without packing, and one by one in a pack; reductions are as
    declared."""
    config = layout.apply(make_config(model_of("llama")))
    config = config.model_copy(update={"batch": config.batch.model_copy(update={"micro_batch_size": 3})})
    data = make_data()
    for metrics in run_processes(metrics_of_a_loss_of_ones_own, config, world_size=layout.world_size):
        assert set(metrics) == {"loss", "rows", "length", "calls"}
        assert metrics["rows"] == (1 if layout.packing else 6)
        assert metrics["calls"] == (12 if layout.packing else 2)
        if layout.packing:  # each call one row, weighted by whether it counts
            counted = data["token_mask"].sum(1)[data["sample_mask"] > 0]
            assert metrics["length"] == approx32(float(counted.mean()), FORMULA)


def ported_controller(config):
    """eval_mode, gbs, mbs, micro_batch_size, all_mb_metrics: as the reference's loops use them."""
    from mcore_rl.models.megatron.weights.conversion import export_hf_weights

    policy, data, loss_fn = policy_of(config, keep_reference=True), make_data(), DPOLossFn(DPO)
    policy.prepare_for_lp_inference()
    scores = policy.get_logprobs(data)["logprobs"]
    for size in (2, 4):
        again = policy.get_logprobs(data, micro_batch_size=size)["logprobs"]
        torch.testing.assert_close(again, scores, rtol=1e-5, atol=1e-5)
        reference = policy.get_reference_policy_logprobs(data, size)["reference_logprobs"]
        torch.testing.assert_close(reference, scores, rtol=1e-5, atol=1e-5)
    with pytest.raises(AssertionError, match="positive multiple of 2, got 3"):
        policy.get_logprobs(data, micro_batch_size=3)
    policy.prepare_for_training()
    before = {name: w.clone() for name, w in export_hf_weights(policy.model)}
    evaluated = policy.train(data, loss_fn, eval_mode=True, gbs=12, mbs=2)
    assert all(torch.equal(w, before[name]) for name, w in export_hf_weights(policy.model))
    assert "grad_norm" not in evaluated
    with pytest.raises(AssertionError, match="the number of rows \(12\) must be a multiple of gbs=5"):
        policy.train(data, loss_fn, gbs=5)
    with pytest.raises(AssertionError, match="must be a multiple of gbs=0"):
        policy.train(data, loss_fn, gbs=0)
    with pytest.raises(AssertionError, match="no rows"):
        policy.train(data.slice(0, 0), loss_fn)
    two = policy.train(data, loss_fn, False, 6, 2)
    policy.shutdown()
    return evaluated, two


def one_step_at_a_time(config):
    policy, data = policy_of(config), make_data()
    steps = [policy.train(data.slice(i, i + 6), DPOLossFn(DPO)) for i in (0, 6)]
    policy.shutdown()
    return steps


@pytest.mark.parametrize(
    "layout",
    and_long([ParallelLayout(packing=False, dp=2)], [ParallelLayout(packing=False), ParallelLayout(pp=2)]),
    ids=str,
)
def test_a_ported_controller(layout, model_of):
    config = layout.apply(make_config(model_of("llama")))
    results = run_processes(ported_controller, config, world_size=layout.world_size)
    assert all(result == results[0] for result in results), "the same on every rank"
    evaluated, two = results[0]
    one_by_one = run_processes(one_step_at_a_time, config, world_size=layout.world_size)[0]
    of_microbatches = evaluated["all_mb_metrics"]
    assert sum(of_microbatches["loss"]) == approx32(evaluated["loss"], FORWARD)
    assert len(of_microbatches["loss"]) == (6 if not layout.packing else len(of_microbatches["accuracy"]))
    assert sum(of_microbatches["num_valid_samples"]) == evaluated["num_valid_samples"] == 5
    for name in ("loss", "grad_norm", "accuracy", "rewards_chosen_mean"):
        expected = sum(step[name] for step in one_by_one) / 2
        assert two[name] == approx32(expected, FORWARD), name
    assert two["lr"] == pytest.approx(sum(step["lr"] for step in one_by_one) / 2, rel=1e-9)


def answers(config):
    from mcore_rl.data.tokenize import load_tokenizer
    from mcore_rl.distributed.batched_data_dict import BatchedDataDict
    from mcore_rl.models.generation.megatron.generation import MegatronGeneration

    policy = policy_of(config)
    prompts = BatchedDataDict(input_ids=torch.tensor([[7, 8, 9], [11, 12, 0]]), input_lengths=torch.tensor([3, 2]))
    with pytest.raises(ValueError, match="pass SamplingParams; only configurations of GRPO and PPO"):
        policy.generate(prompts)
    params = SamplingParams(max_new_tokens=5, seed=3, stop_token_ids=(1,))
    assert policy.prepare_for_generation(params)
    ours = policy.generate(prompts, greedy=True)
    tokenizer = load_tokenizer(config.model.path, False)
    theirs = MegatronGeneration(policy.model, params, 60, tokenizer).generate(prompts, greedy=True)
    assert policy.finish_generation()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    policy.train(make_data(), NLLLoss())
    assert policy.prepare_for_generation()
    changed = policy.generate(prompts, greedy=True)["logprobs"]
    policy.shutdown()
    return not torch.equal(changed, ours["logprobs"])


def test_the_policy_generates_with_its_current_weights(model_of):
    layout = ParallelLayout(tp=2)
    assert run_processes(answers, layout.apply(make_config(model_of("llama"))), world_size=2) == [True, True]


def refuse_a_step(config):
    """Return what `check` got, and whether weights changed: by a refused step, and by the next one."""
    policy, seen = policy_of(config), []

    def weights():
        return torch.cat([p.detach().flatten().clone() for chunk in policy.chunks for p in chunk.parameters()])

    def refuse(metrics):
        seen.append(dict(metrics))
        raise ValueError("refused")

    before = weights()
    with pytest.raises(ValueError, match="refused"):
        policy.train_batch(make_data(), DPOLossFn(DPO), check=refuse)
    refused = weights()
    metrics = policy.train_batch(make_data(), DPOLossFn(DPO), check=seen.append)
    after = weights()
    policy.shutdown()
    return seen, metrics, torch.equal(before, refused), torch.equal(refused, after)


def test_a_step_is_checked_before_the_weights_change(model_of):
    for seen, metrics, is_unchanged, is_still in run_processes(
        refuse_a_step, ParallelLayout(tp=2, sp=True).apply(make_config(model_of("llama"))), world_size=2
    ):
        assert is_unchanged and not is_still
        assert seen[0] == seen[1] == {name: metrics[name] for name in seen[1]}
        assert set(metrics) - set(seen[1]) == {"grad_norm", "lr"}


def lives_of_inputs():
    """Run three microbatches through two chunks in an interleaved order; return which inputs live after each pass."""
    import gc
    import weakref
    from types import SimpleNamespace

    from mcore_rl.models.megatron.training import forward_step

    class Inputs(dict):
        """A dict that can be referred to weakly."""

    made, alive = {}, []

    def model_inputs(microbatch, model):
        inputs = Inputs(hidden=torch.ones(()))
        assert microbatch.name not in made, "computed once"
        made[microbatch.name] = weakref.ref(inputs)
        return inputs

    def schedule(forward_step_func, data_iterator, model, **_):
        for chunk in (0, 0, 1, 0, 1, 1):
            forward_step_func(data_iterator[chunk], model[chunk])
            gc.collect()
            alive.append([name for name, reference in made.items() if reference() is not None])
        return alive

    forward_step.model_inputs, forward_step.get_forward_backward_func = model_inputs, lambda *_: schedule

    class Named(SimpleNamespace):
        __hash__ = object.__hash__

    microbatches = [Named(name=name, layout=SimpleNamespace(total=1)) for name in "abc"]
    pipeline, family = SimpleNamespace(size=2), SimpleNamespace(message_rows=1)
    model = SimpleNamespace(topology=SimpleNamespace(pipeline=pipeline), family=family)
    chunks = [lambda hidden: hidden, lambda hidden: hidden]
    return forward_step.run_microbatches(model, chunks, microbatches, None, train=False)


def test_inputs_live_until_the_last_chunk_has_them():
    expected = [["a"], ["a", "b"], ["b"], ["b", "c"], ["c"], []]
    assert run_processes(lives_of_inputs, world_size=1)[0] == expected
