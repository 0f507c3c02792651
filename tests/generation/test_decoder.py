"""Tests of decode steps: cache blocks, delayed checks for finished sequences, and memory that is released meanwhile."""

import gc
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from float32 import assert_as_accurate
from generation_cases import (
    BLOCK,
    LIMIT,
    NEW_TOKENS,
    config_of,
    generate,
    make_prompts,
    sequences,
    use_small_blocks,
)
from layout_cases import make_data
from small_models import and_long, make_tokenizer, models_below
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mcore_rl import platform
from mcore_rl.config import GRPOConfig
from mcore_rl.config.parallel import ParallelLayout
from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.models.generation.megatron.decoder import Blocks, Decoder, SequenceCache
from mcore_rl.models.generation.sampling import SamplingParams
from mcore_rl.testing.processes import run_processes


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return models_below(tmp_path_factory.mktemp, initializer_range=0.1)


def use_small_batches(lag=0):
    """Small blocks and chunks of logits; delayed checks for finished sequences, as on a GPU."""
    from mcore_rl.distributed import logprobs

    use_small_blocks()
    logprobs.CHUNK_BYTES["cpu"] = 2**16
    platform.is_asynchronous = lambda: bool(lag)


def groups_of(count, rows=5):
    prompts = {name: values[:rows].repeat_interleave(count, 0) for name, values in make_prompts().items()}
    return BatchedDataDict(prompts)


def in_small_blocks(config, params, lag, slots, prompts):
    use_small_batches(lag)
    return generate(config, params, slots=slots, prompts=prompts)


class Recording(TorchDispatchMode):
    """Records operations with their tensors."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        assert operation is not torch.ops.aten._local_scalar_dense.default, "the host reads a value"
        out = operation(*arguments, **(options or {}))
        if "empty" not in operation.name():  # allocates memory, which an assignment to `.data` may exchange
            self.operations.append((operation, arguments, options or {}, out))
        return out


class RecordedGraph:
    """A CUDA graph's counterpart on the CPU: the second call records operations, and later calls repeat them with the
    same tensors."""

    replays = 0

    def __init__(self, function):
        self.function, self.calls = function, 0

    def __call__(self):
        self.calls += 1
        if self.calls == 1:
            return self.function()
        if self.calls == 2:
            with Recording() as self.recording:
                self.result = self.function()
            return self.result
        for operation, arguments, options, out in self.recording.operations:
            for old, new in zip(tree_leaves(out), tree_leaves(operation(*arguments, **options)), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():  # neither a view nor changed in place
                    old.copy_(new)
        RecordedGraph.replays += 1
        return self.result


def in_recorded_graphs(config, params, slots, prompts, most=64):
    """Return what steps of fixed sizes generate, the distance to the trainer, how many of them were replayed, how many
    caches are left, and how many graphs each pool had."""
    from mcore_rl.models.generation.megatron import continuous_batch

    use_small_batches(lag=1)
    caches = []

    def cache_of(decoder):
        cache = SequenceCache(decoder)
        caches.append(weakref.ref(cache))
        return cache

    continuous_batch.SequenceCache = cache_of
    gc.disable()
    graphs = []

    def recorded(function):
        graphs[-1] += 1
        return RecordedGraph(function)

    def pool():
        graphs.append(0)
        return SimpleNamespace(recorded=recorded)

    platform.GraphPool, continuous_batch.MAX_GRAPHS = pool, most
    Decoder.can_replay = True
    out, apart = generate(config, params, slots=slots, prompts=prompts)
    return out, apart, RecordedGraph.replays, sum(cache() is not None for cache in caches), graphs


SAMPLED = SamplingParams(NEW_TOKENS, 0.9, top_p=0.95, seed=3, stop_token_ids=tuple(range(1, 8)))
CASES = and_long(
    [("llama", ParallelLayout(), 1, 64)],
    [
        ("gemma3", ParallelLayout(tp=2, sp=True), 1, 4),
        ("llama", ParallelLayout(pp=2), 1, 4),
        ("llama", ParallelLayout(), 0, 4),
        ("mistral", ParallelLayout(cp=2), 3, 64),
        ("mixtral", ParallelLayout(dp=2, ep=2), 1, 3),
        ("deep", ParallelLayout(pp=3, stages="E|t*6|L"), 1, 5),
    ],
)


@pytest.mark.parametrize(("family", "layout", "lag", "slots"), CASES, ids=str)
def test_small_blocks_and_late_looks_change_nothing(family, layout, lag, slots, model_path):
    config, prompts = config_of(model_path(family)), groups_of(3)
    (expected, _), *_ = run_processes(generate, config, SAMPLED, False, 64, prompts, world_size=1)
    (out, difference), *_ = run_processes(
        in_small_blocks, layout.apply(config), SAMPLED, lag, slots, prompts, world_size=layout.world_size
    )
    assert sequences(out) == sequences(expected)
    assert torch.equal(out["truncated"], expected["truncated"])
    assert 0 < out["truncated"].sum() < len(out["truncated"])
    assert difference < 1e-5


@pytest.mark.parametrize(
    ("family", "slots", "options"),
    and_long(
        [("llama", 64, {})],
        [("gemma3", 5, {"top_k": 5, "max_kept_tokens": 5})],
        [("llama", 9, {}), ("qwen3_5", 21, {}), ("mistral", 3, {}), ("nemotron_h", 21, {})],
    ),
    ids=str,
)
def test_replayed_steps_generate_the_same(family, slots, options, model_path):
    """Sequences of many lengths end and begin; unused rows, a growing cache, and recorded tensors change nothing."""
    config, params, prompts = config_of(model_path(family)), replace(SAMPLED, **options), groups_of(2, rows=13)
    (expected, _), *_ = run_processes(generate, config, params, False, slots, prompts, world_size=1)
    out, apart, replays, left, _ = run_processes(in_recorded_graphs, config, params, slots, prompts, world_size=1)[0]
    assert not left, "the cache's memory is free when generation ends"
    assert replays > 5, "steps are replayed"
    assert sequences(out) == sequences(expected)
    assert (out["logprobs"] - expected["logprobs"]).abs().max() < 1e-5
    assert apart < 1e-4


@pytest.mark.long
def test_graphs_are_freed_only_for_a_new_size(model_path):
    """Graphs are freed if the cache moved, or if there are as many as allowed and a step has another size."""
    config, prompts = config_of(model_path("llama")), groups_of(2, rows=13)

    def limited_to(most):
        return run_processes(in_recorded_graphs, config, SAMPLED, 9, prompts, most, world_size=1)[0]

    out, *_, graphs = limited_to(64)
    assert max(graphs) > 1, "steps have several sizes"
    assert limited_to(max(graphs))[-1] == graphs
    of_one, *_, graphs_of_one = limited_to(1)
    assert set(graphs_of_one) == {1}
    assert sequences(of_one) == sequences(out)


def stop_late(config, params, lag):
    use_small_batches(lag)
    return generate(config, params)[0]


def test_a_late_look_at_stop_strings_changes_nothing(model_path):
    config = config_of(model_path("llama"))
    (free, _), *_ = run_processes(generate, config, SamplingParams(NEW_TOKENS, seed=1), world_size=1)
    text = make_tokenizer().decode(sequences(free)[0][int(make_prompts()["input_lengths"][0]) :][3:5])
    params = SamplingParams(NEW_TOKENS, seed=1, stop_strings=(text,), stop_token_ids=(9,))
    at_once, late = (run_processes(stop_late, config, params, lag, world_size=1)[0] for lag in (0, 1))
    assert sequences(at_once) == sequences(late) != sequences(free)
    assert torch.equal(at_once["truncated"], late["truncated"])


# ------------------------------------------------------------------ memory


def tokens_held(config, prompts, limits, slots):
    """Tokens that the cache had room for at most, and that sequences had at most; blocks that are left in use."""
    from mcore_rl.models.generation.megatron import continuous_batch

    use_small_batches()
    caches, held, needed = [], [], []

    class Watched(continuous_batch.SequenceCache):
        def step(self, *tensors):
            if self not in caches:
                caches.append(self)
            one_layer = self.layers[0].storage[0].nbytes // BLOCK
            assert len({layer.storage.nbytes for layer in self.layers}) == 1
            held.append(self.layers[0].storage.nbytes // one_layer)
            needed.append(sum(self.lengths))
            return super().step(*tensors)

    continuous_batch.SequenceCache = Watched
    generate(config, SamplingParams(NEW_TOKENS, seed=1), slots=slots, prompts=prompts, limits=limits)
    return max(held), max(needed), [sum(cache.blocks.users) for cache in caches]


def test_the_cache_holds_what_lengths_need(model_path):
    config, rows = config_of(model_path("llama")), 24
    prompts = BatchedDataDict(
        input_ids=torch.randint(6, 80, (rows, 4), generator=torch.Generator().manual_seed(1)),
        input_lengths=torch.tensor([4, 3, 2, 1] * (rows // 4)),
    )
    limits = [90] + [6] * (rows - 1)
    held, needed, left = run_processes(tokens_held, config, prompts, limits, rows, world_size=1)[0]
    # Each sequence has at most a partial block and one in advance; the rest is the increment of the cache.
    assert held <= 1.25 * (needed + 2 * BLOCK * rows)
    assert held < rows * (4 + 90) / 5, "not as many rows of the longest"
    assert left == [0]


def test_the_samples_of_a_group_share_their_prompt(model_path):
    config, group = config_of(model_path("llama")), 16
    prompts = BatchedDataDict(
        input_ids=torch.randint(6, 80, (1, 70)).expand(group, -1), input_lengths=torch.tensor([70] * group)
    )
    held, needed, left = run_processes(tokens_held, config, prompts, [8] * group, 64, world_size=1)[0]
    assert needed == group * 77
    assert held <= 1.25 * (70 + group * (8 + 3 * BLOCK)) < needed / 2
    assert left == [0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_are_not_rounded_to_the_precision_of_the_weights(dtype):
    """The trainer's logits are in fp32, too."""
    torch.manual_seed(0)
    states, head = (torch.randn(rows, 64).to(dtype) for rows in (5, 9000))
    chunk, family = SimpleNamespace(lm_head_weight=lambda: head), SimpleNamespace(logit_softcap=None)
    model = SimpleNamespace(chunks=[chunk], family=family, num_ids=8990)
    topology = SimpleNamespace(tensor=SimpleNamespace(rank=0))
    logits = Decoder.logits(SimpleNamespace(model=model, topology=topology), states)
    exact = states.double() @ head.double().T
    assert_as_accurate(logits[:, :8990], (states.float() @ head.float().T)[:, :8990], exact[:, :8990])
    assert (logits[:, 8990:] == -torch.inf).all()


def test_blocks_are_free_when_nobody_has_them():
    blocks = Blocks()
    first = blocks.take(3)
    second = blocks.share(first[:2]) + blocks.take(1)
    assert len({*first, *second}) == 4
    blocks.give_back(first)
    assert set(blocks.take(1)) == {first[2]}
    assert not {*blocks.take(2)} & {*second}
    blocks.give_back(second)
    assert {*blocks.take(3)} >= {*second}


# ------------------------------------------------------------------ what is away meanwhile


def generate_beside_training(path, offload):
    """Return responses before and after a step, the step's metrics, and the device's memory during generation."""
    from mcore_rl.algorithms.grpo import build_generation
    from mcore_rl.algorithms.loss_functions import NLLLoss
    from mcore_rl.models.megatron.training.optimizer import gradient_buffers, optimizer_tensors
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    values = {
        "output_dir": "unused",
        "model": {"path": str(path)},
        "data": {"train": "unused.jsonl", "max_sequence_length": LIMIT},
        "optimizer": {"lr": 1e-3},
        "trainer": {"max_steps": 2},
        "grpo": {"max_new_tokens": 8, "num_prompts_per_step": 4, "num_generations_per_prompt": 2},
        "generation": {"offload": offload},
    }
    config = GRPOConfig.model_validate(values)
    policy = MegatronPolicy(config, total_steps=2)
    generation, results, held = build_generation(config, policy, make_tokenizer()), [], set()
    forward = generation.decoder.forward

    def watched(*arguments):
        held.add(tuple(sum(t.untyped_storage().nbytes() for t in kind) > 0 for kind in kinds))
        return forward(*arguments)

    generation.decoder.forward = watched
    for step in range(2):
        policy.train(make_data(), NLLLoss())
        weights = list(policy.parameters())
        kinds = weights, optimizer_tensors(policy.optimizer, weights), gradient_buffers(policy.chunks)
        generation.prepare_for_generation(weight_version=step)
        out = generation.generate(make_prompts())
        generation.finish_generation()
        metrics = policy.train(make_data(), NLLLoss())
        results.append((sequences(out), out["logprobs"].tolist(), metrics["loss"], metrics["grad_norm"]))
    policy.shutdown()
    return results, held


def test_gradients_and_optimizer_are_away_while_generating(model_path):
    (there, held_there), (away, held_away) = (
        run_processes(generate_beside_training, model_path("llama"), offload, world_size=1)[0]
        for offload in (False, True)
    )
    assert held_there == {(True, True, True)}
    assert held_away == {(True, False, False)}
    assert away == there
