"""Tests of overlapped communication: gradients reduced in the backward pass, weights gathered in the next forward
pass."""

import pytest
import torch
from layout_cases import STEPS, make_config, make_data
from safetensors.torch import load_file
from small_models import and_long, make_tokenizer

from mcore_rl.config import LoRAConfig, ParallelConfig
from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.testing.layout_check import ParallelLayout, compare, compute_layout_result, table_row
from mcore_rl.testing.processes import run_processes

BUCKET_SIZE = 5_000  # parameters: the small models have several buckets


def overlapping(config, weights=True):
    overlaps = {"overlap_grad_reduce": True, "overlap_param_gather": weights}
    return config.model_copy(update={"parallel": config.parallel.model_copy(update=overlaps)})


def in_buckets():
    """Make buckets small from now on, and set weights that are not gathered yet to NaN, so that their use is
    visible."""
    from mcore_rl.models.megatron.training import optimizer
    from mcore_rl.models.megatron.training.optimizer import ParameterGather

    optimizer.BUCKET_SIZE = BUCKET_SIZE
    plain = ParameterGather.begin

    def begin(self):
        for chunk in self.wrapped:
            for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                replicas = group.intra_distributed_optimizer_instance_group
                for bucket in group.buckets:
                    parts = bucket.param_data.view(replicas.size(), -1)
                    own = parts[replicas.rank()].clone()
                    parts.fill_(torch.nan)
                    parts[replicas.rank()] = own
        plain(self)

    ParameterGather.begin = begin


def outcome_in_buckets(config, data, steps):
    in_buckets()
    return compute_layout_result(config, data, steps)


CASES = and_long(
    [("llama", ParallelLayout(dp=2, tokens_per_pack=128), None)],
    [
        ("qwen2", ParallelLayout(dp=2, pp=2, tokens_per_pack=128), None),  # tied embeddings on the pipeline's two ends
        ("qwen2", ParallelLayout(dp=2, cp=2), None),
        ("deep", ParallelLayout(dp=2, pp=2, vpp=2, stages="E|t*3|tt|tL", tokens_per_pack=128), None),
        ("mixtral", ParallelLayout(dp=2, ep=2), None),
        ("llama", ParallelLayout(dp=2, tp=2, sp=True), LoRAConfig(rank=4)),
        ("qwen3_moe", ParallelLayout(dp=2), "grouped"),
        ("mixtral", ParallelLayout(dp=4, ep=2), "grouped"),
    ],
    [("gemma4_e", ParallelLayout(dp=2), None)],
)


@pytest.mark.parametrize(("family", "layout", "lora"), CASES, ids=str)
def test_numbers_stay(family, layout, lora, model_of):
    config = layout.apply(make_config(model_of(family)))
    changed = {"moe_grouped_gemm": True} if lora == "grouped" else {"lora": lora}
    config = config.model_copy(update={"model": config.model.model_copy(update=changed)})
    arguments = (outcome_in_buckets, make_data(), STEPS)
    one, gradients, both = (
        run_processes(arguments[0], c, *arguments[1:], world_size=layout.world_size)[0]
        for c in (config, overlapping(config, weights=False), overlapping(config))
    )
    difference = compare(gradients, one)
    assert difference.within(), table_row(layout, difference)
    assert one.metrics["loss"] == gradients.metrics["loss"]
    if layout.world_size == 2 * layout.tp * layout.pp:  # the sum of two is the same in any order
        for name, gradient in one.gradients.items():
            assert torch.equal(gradient, gradients.gradients[name]), name
    for name, weight in gradients.weights.items():  # of the same buckets, so that norms are sums in the same order
        assert torch.equal(weight, both.weights[name]), name


def order_of_events(config, data):
    """Record the events of a rank's second step: ready gradients, reduced buckets, the end."""
    from mcore_rl.algorithms.build_loss import build_loss
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    in_buckets()
    policy, events = MegatronPolicy(config, total_steps=10, rows_per_unit=2), []
    (chunk,) = policy.chunks
    policy.train(data, build_loss(config))  # Megatron learns here which gradients to wait for
    for number, group in enumerate(chunk.bucket_groups):
        begin, wait = group.start_grad_sync, group.finish_grad_sync

        def begun(*arguments, number=number, begin=begin, **options):
            events.append(("begun", number))
            return begin(*arguments, **options)

        def waited(*arguments, number=number, wait=wait, **options):
            events.append(("waited", number))
            return wait(*arguments, **options)

        group.start_grad_sync, group.finish_grad_sync = begun, waited
    microbatches = len(policy._microbatches(data, rows_per_unit=2))
    policy.train(data, build_loss(config))
    policy.shutdown()
    return events, len(chunk.bucket_groups), microbatches


@pytest.mark.parametrize("overlaps", [True, False])
def test_buckets_are_reduced_before_the_end(model_of, overlaps):
    config = ParallelLayout(dp=2, tokens_per_pack=128).apply(make_config(model_of("llama")))
    config = overlapping(config, weights=False) if overlaps else config
    for events, groups, microbatches in run_processes(order_of_events, config, make_data(), world_size=2):
        assert microbatches > 1
        begun = [number for what, number in events if what == "begun"]
        assert sorted(begun) == list(range(groups)), "each once, in the last microbatch"
        first_wait = [what for what, _ in events].index("waited")
        assert first_wait == (groups if overlaps else 0)
        assert groups > 2 if overlaps else groups == 1


def gathers_in_training(config, data):
    """Record the events of a rank's third step: buckets that are requested and awaited, layers that compute."""
    from mcore_rl.algorithms.build_loss import build_loss
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    in_buckets()
    policy, events = MegatronPolicy(config, total_steps=10, rows_per_unit=2), []
    (chunk,) = policy.chunks
    for number, group in enumerate(chunk.bucket_groups):

        def started(*arguments, number=number, start=group.start_param_sync, **options):
            events.append(("asked", number))
            return start(*arguments, **options)

        group.start_param_sync = started
    for layer in chunk.module.decoder.layers:
        layer.register_forward_hook(lambda layer, *_: events.append(("computed", layer.layer_number)))
    for _ in range(3):
        events.append(("step", None))
        policy.train(data, build_loss(config))
    pending = policy.gather is not None and policy.gather.is_pending
    events = events[max(i for i, (what, _) in enumerate(events) if what == "step") + 1 :]
    groups, microbatches = len(chunk.bucket_groups), len(policy._microbatches(data, rows_per_unit=2))
    policy.shutdown()
    return events, groups, microbatches, pending


def test_weights_come_while_layers_compute(model_of):
    config = overlapping(ParallelLayout(dp=2, tokens_per_pack=128).apply(make_config(model_of("llama"))))
    for events, groups, microbatches, pending in run_processes(gathers_in_training, config, make_data(), world_size=2):
        assert groups > 3
        assert pending, "the step's own weights are on their way when it ends"
        *forward, last = events
        assert last == ("asked", groups - 1), "the next step's first bucket, at the end of this one"
        asked = [number for what, number in forward if what == "asked"]
        assert asked == list(reversed(range(groups - 1))), "each once, first layers first"
        computed = [place for place, (what, _) in enumerate(forward) if what == "computed"]
        assert len(computed) == 2 * microbatches
        places = [place for place, (what, _) in enumerate(forward) if what == "asked"]
        assert places[0] < computed[0] < places[-1] < computed[1], "the last while the second layer computes"


def weights_taken(config, data, take):
    """Weights after two steps, as each way of taking them gives them, without a step between."""
    from mcore_rl.algorithms.build_loss import build_loss
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    in_buckets()
    policy = MegatronPolicy(config, total_steps=10, rows_per_unit=2, keep_reference=True)
    for _ in range(2):
        policy.train(data, build_loss(config))
    taken = TAKEN[take](policy, data, build_loss(config), config.output_dir)
    policy.shutdown()
    return taken


def own_weights(policy):
    return {str(i): tensor.detach().clone() for i, tensor in enumerate(policy.parameters())}


def from_export(policy, data, loss_fn, directory):
    policy.export_hf(directory)
    return load_file(directory / "model.safetensors")


def from_checkpoint(policy, data, loss_fn, directory):
    """Saved, spoiled, loaded."""
    iteration = policy.save_checkpoint(directory, 2, {"step": 2})
    policy.train(data, loss_fn)
    policy.load_checkpoint(iteration)
    return own_weights(policy)


def from_host(policy, data, loss_fn, directory):
    policy.finish_training()
    policy.offload_after_refit()
    policy.prepare_for_training()
    return own_weights(policy)


def after_reference(policy, data, loss_fn, directory):
    reference = policy.get_reference_policy_logprobs(data)["reference_logprobs"]
    return {"reference": reference, **own_weights(policy)}


def from_generation(policy, data, loss_fn, directory):
    from mcore_rl.models.generation.sampling import SamplingParams

    prompts = BatchedDataDict(input_ids=data["input_ids"][:3, :5], input_lengths=torch.tensor([5, 5, 5]))
    policy.prepare_for_generation(SamplingParams(max_new_tokens=8), 64, make_tokenizer())
    out = policy.generate(prompts, greedy=True)
    return {name: out[name] for name in ("output_ids", "logprobs")}


def from_adapters(policy, data, loss_fn, directory):
    policy.export_adapters(directory)
    return load_file(directory / "adapter_model.safetensors")


def from_moved_reference(policy, data, loss_fn, directory):
    policy.move_reference(0.5)
    with policy.reference_weights():
        return own_weights(policy)


def from_loaded_weights(policy, data, loss_fn, directory):
    """Loaded while other weights are on their way."""
    iteration = policy.save_checkpoint(directory, 2, {"step": 2})
    policy.train(data, loss_fn)
    policy.checkpoint.load_weights(iteration)
    return own_weights(policy)


def from_shared_memory(policy, data, loss_fn, directory):
    from mcore_rl.models.refit.transfer import RefitReceiver

    found = {}
    info = policy.prepare_refit_info()
    receiver = RefitReceiver(lambda tensors: found.update((name, t.clone()) for name, t in tensors), info, "cpu")
    for keys in policy.prepare_weights_for_ipc():
        handles = policy.get_weights_ipc_handles(keys)
        if policy.rank == 0:
            receiver.update_weights_from_ipc_handles(handles)
        torch.distributed.barrier()
    policy.sender.release()
    return found


TAKEN = {
    "moved reference": from_moved_reference,
    "loaded weights": from_loaded_weights,
    "adapters": from_adapters,
    "shared memory": from_shared_memory,
    "export": from_export,
    "checkpoint": from_checkpoint,
    "host": from_host,
    "reference": after_reference,
    "generation": from_generation,
    "scores": lambda policy, data, *_: dict(policy.get_logprobs(data)),
    "evaluation": lambda policy, data, loss_fn, _: {
        name: torch.tensor(value) for name, value in policy.evaluate(data, loss_fn).items()
    },
}


@pytest.mark.parametrize("take", and_long(["export"], [take for take in TAKEN if take != "export"]))
def test_whoever_takes_weights_between_steps_has_them_whole(take, model_of, tmp_path):
    found = []
    for weights in (False, True):
        config = overlapping(ParallelLayout(dp=2, tokens_per_pack=128).apply(make_config(model_of("llama"))), weights)
        config = config.model_copy(update={"output_dir": tmp_path / str(weights)})
        if take == "adapters":
            model = config.model.model_copy(update={"lora": LoRAConfig(rank=4)})
            config = config.model_copy(update={"model": model})
        found += [run_processes(weights_taken, config, make_data(), take, world_size=2)]
    for one, other in zip(*found, strict=True):
        assert one.keys() == other.keys()
        for name, values in one.items():
            assert torch.equal(values, other[name]), name


def test_buckets_are_asked_for():
    with pytest.raises(ValueError, match="overlap_param_gather: needs overlap_grad_reduce=true"):
        ParallelConfig(overlap_param_gather=True, overlap_grad_reduce=False)
