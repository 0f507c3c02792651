"""Tests of routing losses, metrics, and biases without gradients, against formulas on transformers' routers."""

import copy
import json

import pytest
import torch
import yaml
from float32 import EPSILON, FORMULA, approx32
from layout_cases import change_each_row, make_config, make_data, plain_outcome, with_experts
from programs import run
from small_models import and_long, make_model, make_tokenizer
from transformers import AutoModelForCausalLM

from mcore_rl.algorithms.build_loss import build_loss
from mcore_rl.errors import UserError
from mcore_rl.testing.layout_check import ParallelLayout, compare, compute_layout_result, table_row
from mcore_rl.testing.processes import run_processes

COEFFICIENTS = {"moe_aux_loss_coeff": 0.7, "moe_z_loss_coeff": 0.013}
LAYOUTS = {
    "mixtral": [ParallelLayout(), ParallelLayout(tp=2, sp=True, tokens_per_pack=128)],
    "qwen3_moe": [ParallelLayout(cp=2, dp=2, ep=2), ParallelLayout(pp=2, dp=2, packing=False)],
}


@pytest.mark.parametrize("family", and_long([], ["mixtral", "qwen3_moe"]))
def test_router_losses(family, model_of):
    config = make_config(model_of(family))
    config = config.model_copy(update={"model": config.model.model_copy(update=COEFFICIENTS)})
    plain = plain_outcome(config, make_data())
    for layout in LAYOUTS[family]:
        outcome = run_processes(
            compute_layout_result, layout.apply(config), make_data(), 3, world_size=layout.world_size
        )[0]
        difference = compare(outcome, plain)
        assert difference.within(), table_row(layout, difference)


def test_recomputation_changes_nothing(model_of):
    config = make_config(model_of("mixtral"))
    model = config.model.model_copy(update=COEFFICIENTS)
    kept, again = (
        run_processes(
            compute_layout_result,
            config.model_copy(update={"model": model.model_copy(update={"recompute_activations": recompute})}),
            make_data(),
            1,
            world_size=1,
        )[0]
        for recompute in (False, True)
    )
    assert kept.metrics == again.metrics
    assert all(torch.equal(again.gradients[name], gradient) for name, gradient in kept.gradients.items())


RATE = 0.05


def train_with_biases(config):
    """Return the metrics of a step, the biases before and after it, and the biases of the reference weights."""
    from mcore_rl.models.megatron.weights.conversion import export_hf_weights
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    def biases():
        return {name: bias for name, bias in export_hf_weights(policy.model) if name.endswith("correction_bias")}

    policy = MegatronPolicy(config, total_steps=10, rows_per_unit=2, keep_reference=True)
    before = biases()
    metrics = policy.train(make_data(), build_loss(config))
    after = biases()
    with policy.reference_weights():
        reference = biases()
    policy.shutdown()
    return metrics, before, after, reference


def routed(path, data):
    """Return, by layer of transformers' routers, the tokens of each expert and the entropy of the scores, summed over
    the tokens of the rows that count, row by row."""
    model, seen = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), {}

    def count(name):
        def hook(module, inputs, outputs):
            logits, _, chosen = outputs
            scores = logits.double().sigmoid() if "glm" in model.config.model_type else logits.double().softmax(-1)
            entropy = torch.distributions.Categorical(scores).entropy().sum().detach()
            tokens, so_far = seen.get(name, (0, 0))
            seen[name] = tokens + torch.bincount(chosen.flatten(), minlength=module.num_experts), so_far + entropy

        return hook

    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(count(name))
    for ids, length, mask in zip(data["input_ids"], data["input_lengths"].tolist(), data["sample_mask"], strict=True):
        if mask:
            model(ids[None, :length])
    return seen


@pytest.mark.parametrize("layout", and_long([ParallelLayout()], [ParallelLayout(pp=2, dp=2, ep=2)]), ids=str)
def test_biases_and_load(layout, model_of):
    config = make_config(model_of("glm4_moe"))
    config = layout.apply(
        config.model_copy(update={"model": config.model.model_copy(update={"moe_router_bias_update_rate": RATE})})
    )
    metrics, before, after, reference = run_processes(train_with_biases, config, world_size=layout.world_size)[0]
    seen = routed(config.model.path, make_data())
    assert len(seen) == len(before) == 2
    for name, (tokens, _) in seen.items():
        bias, layer = f"{name}.e_score_correction_bias", name.split(".")[2]
        moved = RATE * torch.sign(tokens.float().mean() - tokens)
        torch.testing.assert_close(after[bias], before[bias] + moved)
        assert torch.equal(reference[bias], before[bias])
        check_load(metrics, layer, *seen[name], topk=4)


def check_load(metrics, layer, tokens, entropy, topk):
    assert metrics[f"moe_load/layer_{layer}"] == approx32(float(tokens.max() / tokens.float().mean()), FORMULA)
    assert metrics[f"moe_dropped/layer_{layer}"] == 0
    assert metrics[f"moe_entropy/layer_{layer}"] == pytest.approx(float(entropy * topk / tokens.sum()), rel=1e-5)


def step_metrics(config, data):
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy = MegatronPolicy(config, total_steps=10, rows_per_unit=2)
    metrics = policy.train(data, build_loss(config))
    policy.shutdown()
    return metrics


LOADS = and_long(
    [],
    [
        ("qwen3_moe", ParallelLayout(tp=2, dp=2, ep=2, sp=True, tokens_per_pack=128), True),
        ("qwen3_moe", ParallelLayout(cp=2, ep=2), True),
        ("qwen3_moe", ParallelLayout(pp=2, vpp=2, packing=False), True),
        ("qwen3_moe", ParallelLayout(pp=2, dp=2, stages="E|t*4L"), False),
    ],
)


@pytest.mark.parametrize(("family", "layout", "recompute"), LOADS, ids=str)
def test_load_is_that_of_real_tokens_once(family, layout, recompute, model_of):
    config = make_config(model_of(family))
    model = config.model.model_copy(update={"recompute_activations": recompute})
    config = layout.apply(config.model_copy(update={"model": model}))
    metrics = run_processes(step_metrics, config, make_data(), world_size=layout.world_size)[0]
    seen = routed(config.model.path, make_data())
    assert {name for name in metrics if "moe_load" in name} == {f"moe_load/layer_{n.split('.')[2]}" for n in seen}
    for name, (tokens, entropy) in seen.items():
        check_load(metrics, name.split(".")[2], tokens, entropy, topk=3)


def permuted(config):
    """Return rows, weights and gradients of any choices, permuted by the layer's dispatcher and by Megatron's own."""
    from mcore_rl.models.megatron.moe.layer import Dispatcher, MoEAlltoAllTokenDispatcher, MoELayer
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy, results = MegatronPolicy(config), []
    layer = next(module for chunk in policy.model.chunks for module in chunk.modules() if isinstance(module, MoELayer))
    assert type(layer.token_dispatcher) is Dispatcher
    for kind in (Dispatcher, MoEAlltoAllTokenDispatcher):
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(37, 1, 64, generator=generator).requires_grad_()
        weights = torch.rand(37, 6, generator=generator).requires_grad_()
        chosen = torch.rand(37, 6, generator=generator) < 0.3
        permuted = kind.dispatch_preprocess(layer.token_dispatcher, hidden, chosen, weights)
        torch.autograd.backward(permuted, [torch.randn(x.shape, generator=generator) for x in permuted])
        place = layer.token_dispatcher.reversed_local_input_permutation_mapping
        results.append([*(x.detach() for x in permuted), place, hidden.grad, weights.grad])
    policy.shutdown()
    return results


def test_permutation_equals_that_of_megatron(model_of):
    """A token may have any number of experts."""
    ours, theirs = run_processes(permuted, make_config(model_of("mixtral")), world_size=1)[0]
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def lossy_step(config):
    """Metrics of a step whose dispatcher loses every other token at the first layer, and of how many choices."""
    from mcore_rl.distributed.collectives import all_reduce
    from mcore_rl.models.megatron.model.step_statistics import routers_of
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy, lost = MegatronPolicy(config, total_steps=10, rows_per_unit=2), torch.zeros(1)
    routers = routers_of(policy.model)
    dispatchers = [m.token_dispatcher for c in policy.chunks for m in c.modules() if hasattr(m, "token_dispatcher")]

    def losing(preprocess):
        def lossy(hidden, routing_map, probs):
            if torch.is_grad_enabled():
                lost.add_(routing_map[::2].sum())
            routing_map = routing_map.clone()
            routing_map[::2] = False
            return preprocess(hidden, routing_map, probs)

        return lossy

    for router, dispatcher in zip(routers, dispatchers, strict=True):
        if router.layer_number == 1:
            dispatcher.dispatch_preprocess = losing(dispatcher.dispatch_preprocess)
    metrics = policy.train(make_data(), build_loss(config))
    whole = all_reduce(lost, torch.distributed.group.WORLD)
    policy.shutdown()
    return metrics, int(whole)


LOSSES = and_long(
    [(ParallelLayout(), False, False)],
    [
        (ParallelLayout(pp=2, dp=2, ep=2), False, True),
        (ParallelLayout(tp=2, dp=2, ep=2, sp=True), True, True),
        (ParallelLayout(tp=2, dp=2, ep=2, etp=1, sp=True, tokens_per_pack=128), True, False),
        (ParallelLayout(tp=2, sp=True), False, True),
    ],
)


@pytest.mark.parametrize(("layout", "grouped", "recompute"), LOSSES, ids=str)
def test_choices_that_reach_no_expert_are_counted(layout, grouped, recompute, model_of):
    config = make_config(model_of("mixtral"))
    changes = {"moe_grouped_gemm": grouped, "recompute_activations": recompute}
    config = layout.apply(config.model_copy(update={"model": config.model.model_copy(update=changes)}))
    for metrics, lost in run_processes(lossy_step, config, world_size=layout.world_size):
        assert lost > 0
        assert [metrics[f"moe_dropped/layer_{layer}"] for layer in (0, 1)] == [lost, 0]


# ------------------------------------------------------------------ replay


def force_experts(data):
    """A function that makes transformers' routers send tokens to the experts of `data`, rows in their order."""

    def prepare(model):
        def change(layer, row, outputs):
            logits, _, own = outputs
            wanted = data["routed_experts"][row, : len(logits), layer].long()
            chosen = torch.where(wanted < 0, own, wanted)
            weights = logits.softmax(-1).gather(1, chosen)
            return logits, weights / weights.sum(-1, keepdim=True), chosen

        gates = [module for name, module in model.named_modules() if name.endswith(".gate")]
        change_each_row(gates, len(data["input_ids"]), change)

    return prepare


REPLAYS = and_long(
    [
        ("mixtral", ParallelLayout(tp=2, sp=True, tokens_per_pack=128), True),
    ],
    [
        ("qwen3_moe", ParallelLayout(pp=2, vpp=2, tokens_per_pack=128), True),
        ("mixtral", ParallelLayout(cp=2, ep=2), False),
        ("qwen3_moe", ParallelLayout(dp=2, ep=2, packing=False), False),
    ],
)


@pytest.fixture(scope="module")
def forced(model_of):
    """A family's batch with experts chosen elsewhere, and plain PyTorch's outcome with them."""
    made = {}

    def get(family):
        if family not in made:
            data = with_experts(make_data(), *{"mixtral": (2, 6, 2), "qwen3_moe": (3, 8, 3)}[family])
            made[family] = data, plain_outcome(make_config(model_of(family)), data, force_experts(data))
        return made[family]

    return get


@pytest.mark.long
@pytest.mark.parametrize(("family", "layout", "recompute"), REPLAYS, ids=str)
def test_replayed_experts(family, layout, recompute, forced, model_of):
    """Log-probabilities, every gradient (the routers' too) and three steps with experts that were chosen elsewhere."""
    data, plain = forced(family)
    assert all(gradient.norm() > 0 for name, gradient in plain.gradients.items() if name.endswith("gate.weight"))
    config = make_config(model_of(family))
    model = config.model.model_copy(update={"recompute_activations": recompute})
    config = layout.apply(config.model_copy(update={"model": model}))
    outcome = run_processes(compute_layout_result, config, copy.deepcopy(data), 3, world_size=layout.world_size)[0]
    difference = compare(outcome, plain)
    assert difference.within(), table_row(layout, difference)


def sample_and_score(config):
    """Return the number of sampled tokens with other experts when scored without and with replay, and the mean
    differences."""
    from mcore_rl.distributed.batched_data_dict import BatchedDataDict
    from mcore_rl.models.generation.megatron.generation import MegatronGeneration
    from mcore_rl.models.generation.sampling import SamplingParams
    from mcore_rl.models.megatron.model.step_statistics import routers_of
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy = MegatronPolicy(config)
    prompts = torch.randint(6, 250, (16, 20), generator=torch.Generator().manual_seed(0))
    generation = MegatronGeneration(
        policy.model, SamplingParams(30, seed=1), 60, make_tokenizer(), recorded=["routed_experts"]
    )
    out = generation.generate(BatchedDataDict(input_ids=prompts, input_lengths=torch.full((16,), 20)))
    seen = {"tokens": 0, "anew": 0, "replayed": 0}

    def watch(router):
        choose, weigh = router._choose, router._weights

        def watched_choose(logits):
            router.live = choose(logits)
            return router.live

        def watched_weigh(logits, chosen):
            earlier = router.pack.routed.experts
            if earlier is not None:
                earlier = earlier[:, router.index]
                known = earlier[:, 0] >= 0
                for name, experts in (("anew", router.live), ("replayed", chosen)):
                    differs = (experts.sort(-1).values != earlier.sort(-1).values).any(-1)
                    seen[name] += int((differs & known).sum())
                seen["tokens"] += int(known.sum())
            return weigh(logits, chosen)

        router._choose, router._weights = watched_choose, watched_weigh

    data = BatchedDataDict(
        input_ids=out["output_ids"], input_lengths=out["unpadded_sequence_lengths"], sample_mask=torch.ones(16)
    )
    anew = policy.get_logprobs(data)["logprobs"]
    for router in routers_of(policy.model):
        watch(router)
    data["routed_experts"] = out["routed_experts"]
    replayed = policy.get_logprobs(data)["logprobs"]
    response = out["logprobs"] != 0
    gaps = [float((x - out["logprobs"])[response].abs().mean()) for x in (anew, replayed)]
    policy.shutdown()
    return seen, gaps


@pytest.mark.parametrize(
    ("dtype", "layout"),
    and_long([], [("bfloat16", ParallelLayout()), ("float32", ParallelLayout(tp=2, pp=2, ep=2, etp=1, sp=True))]),
)
def test_sampled_experts_replayed(dtype, layout, tmp_path):
    """In fp32 they are the same anyway, wherever they were recorded; in bf16 replay brings the differences to 0."""
    many = {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 32, "mlp_only_layers": []}
    path = make_model("qwen3_moe", tmp_path, initializer_range=0.1, **many)
    config = make_config(path)
    config = layout.apply(config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})}))
    results = run_processes(sample_and_score, config, world_size=layout.world_size)
    seen = {name: sum(result[0][name] for result in results) for name in results[0][0]}
    anew, replayed = results[0][1]
    print(dtype, seen, f"mean |difference of log-probabilities| anew {anew:.2e}, replayed {replayed:.2e}")
    assert seen["tokens"] >= 16 * 49 * 4
    assert seen["replayed"] == 0
    if dtype == "float32":
        assert seen["anew"] == 0
        assert max(anew, replayed) < FORMULA * EPSILON
    else:
        assert seen["anew"] > 0.01 * seen["tokens"]
        assert replayed < anew


def test_a_recording_and_the_option_agree_on_experts(tmp_path):
    from mcore_rl.data.datasets import Prompt
    from mcore_rl.rollouts.recordings import read_recording, recorded_step
    from mcore_rl.rollouts.samples import Rollout

    rollout, failed = (Rollout.begin(0, n, Prompt((1, 2), "say a", {})) for n in range(2))  # `failed` has no response
    rollout.response_lengths = [1]
    entries = {}
    for name, experts in (("without", None), ("with", torch.tensor([[[0, 1]], [[2, 0]]]).short())):
        rollout.choices = {} if experts is None else {"routed_experts": experts}
        entries[name] = tmp_path / name
        entries[name].write_text(json.dumps({"step": 1, **recorded_step("", {}, [rollout, failed])}) + "\n")
    assert (
        len(read_recording(entries["without"], 1, {}))
        == len(read_recording(entries["with"], 1, {}, ["routed_experts"]))
        == 1
    )
    with pytest.raises(
        UserError, match=r"was recorded without the experts of each token, but model.moe_router_replay=True"
    ):
        read_recording(entries["without"], 1, {}, ["routed_experts"])
    with pytest.raises(
        UserError, match=r"was recorded with the experts of each token, but model.moe_router_replay=False"
    ):
        read_recording(entries["with"], 1, {})


@pytest.mark.long
def test_grpo_with_replay_under_expert_parallelism(tmp_path, monkeypatch):
    """The whole program: sampled in lockstep, experts and keys replayed, trained on two ranks, resumed, exported."""
    judge = "def count(log, record):\n    return sum(c in 'aeiou' for c in log[-1]['content']) / 4\n"
    (tmp_path / "judging.py").write_text(judge)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    make_model("deepseek_v32", tmp_path / "model", initializer_range=0.05)
    prompts = [{"prompt": f"say {letter}", "answer": letter} for letter in "abcdef"]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    config = {
        "output_dir": str(tmp_path / "out"),
        "model": {
            "path": str(tmp_path / "model"),
            "moe_router_replay": True,
            "indexer_replay": True,
            "moe_aux_loss_coeff": 0.01,
            "moe_router_bias_update_rate": 0.01,
        },
        "parallel": {"expert_model_parallel_size": 2},
        "data": {"train": str(tmp_path / "prompts.jsonl"), "max_sequence_length": 60},
        "optimizer": {"lr": 3e-3, "schedule": "constant"},
        "trainer": {"max_steps": 1},
        "grpo": {"num_prompts_per_step": 3, "num_generations_per_prompt": 4, "max_new_tokens": 30},
        "loss": {"reference_policy_kl_penalty": 0.01},
        "environment": {"name": "function", "function": "judging:count", "num_workers": 1},
    }
    (tmp_path / "grpo.yaml").write_text(yaml.safe_dump(config))
    run("train_grpo.py", tmp_path / "grpo.yaml", "--record", tmp_path / "rollouts.jsonl", processes=2)
    again = run("train_grpo.py", tmp_path / "grpo.yaml", "trainer.max_steps=2", processes=2)
    assert "resumed from" in again.stdout_text
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert line["token_mult_prob_error"] == pytest.approx(1, abs=1e-4)
        assert {"moe_load/layer_2", "moe_load/layer_3", "moe_entropy/layer_3", "moe_aux_loss"} <= set(line)
    AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "hf")
    recorded = [json.loads(line)["rollouts"] for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    keys = [layer for rollout in recorded[0] for token in rollout["choices"]["chosen_keys"] for layer in token]
    assert max(map(max, keys)) > 21, "rows are longer than index_topk"
    replayed = ["--replay", tmp_path / "rollouts.jsonl", f"output_dir={tmp_path / 'replayed'}"]
    run("train_grpo.py", tmp_path / "grpo.yaml", *replayed, processes=2)
    (line,) = [json.loads(line) for line in (tmp_path / "replayed" / "metrics.jsonl").read_text().splitlines()]
    assert line["loss"] == lines[0]["loss"] and line["grad_norm"] == lines[0]["grad_norm"]
