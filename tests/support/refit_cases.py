"""Helpers of tests that send weights to an inference engine."""

import torch
from layout_cases import make_data
from transformers import AutoModelForCausalLM

from mcore_rl.algorithms.build_loss import build_loss
from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.models.refit.transfer import RefitReceiver

REFITS, ENGINES, BEST = 3, 2, 8
CLOSE = {"rtol": 0, "atol": 1e-5}
BUCKET_BYTES = 20_000  # smaller than some tensors, larger than others


def prompts():
    return torch.randint(1, 250, (4, 20), generator=torch.Generator().manual_seed(0))


def engine_of(path):
    """Return a transformers model with meaningless weights, and a function that sets them."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.fill_(0.5)

    @torch.no_grad()
    def load(tensors):
        for name, tensor in tensors:
            parameters[name].copy_(tensor)

    return model, load


@torch.no_grad()
def engine_outputs(model):
    """Return log-probabilities of the prompts' tokens, and the largest logits at each position."""
    logits = model(prompts()).logits
    logprobs = logits[:, :-1].log_softmax(-1).gather(2, prompts()[:, 1:, None])[..., 0]
    return logprobs, logits.topk(BEST).values


def policy_outputs(policy):
    data = BatchedDataDict(input_ids=prompts(), input_lengths=torch.tensor([20] * 4), sample_mask=torch.ones(4))
    return policy.get_logprobs(data)["logprobs"][:, 1:], policy.get_topk_logits(data, BEST)["topk_logits"]


def share_and_receive(config):
    """Run a policy whose first rank starts an engine process, which reads the weights from shared memory."""
    import multiprocessing

    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy = MegatronPolicy(config, total_steps=10, rows_per_unit=2)
    loss_fn = build_loss(config)
    policy.train(make_data(), loss_fn)
    expected = policy_outputs(policy)
    before = policy.offload_before_refit()
    connection = None
    if policy.is_writer:
        context = multiprocessing.get_context("spawn")
        connection, theirs = context.Pipe()
        engine = context.Process(target=ipc_engine, args=(theirs, config.model.path), daemon=True)
        engine.start()
    for keys in policy.prepare_weights_for_ipc(BUCKET_BYTES):
        handles = policy.get_weights_ipc_handles(keys)
        if connection is not None:
            connection.send(handles)
            assert connection.poll(60) and connection.recv() == "taken"
        torch.distributed.barrier()
    after = policy.offload_after_refit()
    errors = []
    for call in (lambda: policy_outputs(policy), lambda: policy.train(make_data(), loss_fn)):
        try:
            call()
        except RuntimeError as error:
            errors.append(str(error))
    policy.prepare_for_training()
    again = policy_outputs(policy)
    metrics = policy.train(make_data(), loss_fn)
    received = None
    if connection is not None:
        connection.send(None)
        received = tuple(map(torch.tensor, connection.recv()))
        engine.join(30)
    policy.shutdown()
    return expected, again, received, (before, after), errors, metrics


def ipc_engine(connection, path):
    torch.set_num_threads(1)
    model, load = engine_of(path)
    receiver = RefitReceiver(load, {})
    while (handles := connection.recv()) is not None:
        receiver.update_weights_from_ipc_handles(handles)
        connection.send("taken")
    connection.send([values.tolist() for values in engine_outputs(model)])
