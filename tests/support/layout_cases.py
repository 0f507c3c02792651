"""Configurations, data and plain PyTorch results for tests of training under several layouts."""

import copy
import re
import tempfile

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from mcore_rl.algorithms.build_loss import build_loss
from mcore_rl.config import DPOConfig, SFTConfig
from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.testing.layout_check import LayoutResult, compute_layout_result
from mcore_rl.testing.processes import run_processes

STEPS, LR = 3, 1e-3


def make_data() -> BatchedDataDict:
    """Return ragged pairs with random masks; one row has a single counted token, one pair does not count."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(3, 60, (12,), generator=generator)
    lengths[3] = 2
    input_ids, token_mask = torch.zeros(12, 60, dtype=torch.long), torch.zeros(12, 60)
    for row, length in enumerate(lengths.tolist()):
        input_ids[row, :length] = torch.randint(0, 250, (length,), generator=generator)
        token_mask[row, :length] = (torch.rand(length, generator=generator) < 0.6).float()
        token_mask[row, length - 1] = 1
    sample_mask = torch.ones(12)
    sample_mask[6:8] = 0
    reference = torch.randn(12, 60, generator=generator) - 5  # any numbers will do, and hide no zero margin
    return BatchedDataDict(
        input_ids=input_ids,
        token_mask=token_mask,
        input_lengths=lengths,
        sample_mask=sample_mask,
        reference_policy_logprobs=reference,
    )


def make_config(path, **optimizer) -> DPOConfig:
    return DPOConfig.model_validate(
        {
            "output_dir": "unused",
            "model": {"path": path, "dtype": "float32"},
            "data": {"train": "unused", "max_sequence_length": 60},
            "batch": {"global_batch_size": 6, "tokens_per_pack": 256},
            # A large epsilon: Adam would blow rounding in near-zero gradients up to a whole step.
            "optimizer": {"lr": LR, "schedule": "constant", "clip_grad": 1.0, "adam_eps": 1e-4, **optimizer},
            "trainer": {"max_steps": STEPS},
            "dpo": {"reference_policy_kl_penalty": 0.05, "sft_loss_weight": 0.5, "sft_average_log_probs": True},
        }
    )


def make_sft_config(path) -> SFTConfig:
    config = make_config(path)
    values = {name: x for name, x in config.model_dump().items() if name in SFTConfig.model_fields}
    values["batch"]["global_batch_size"] *= 2  # rows in place of pairs
    return SFTConfig.model_validate(values)


def plain_logprobs(model, data):
    """Compute log-probabilities [B, S] in float32 with transformers only, row by row."""
    rows = []
    for ids, length in zip(data["input_ids"], data["input_lengths"].tolist(), strict=True):
        logits = model(ids[None, :length]).logits[0, :-1].double()
        chosen = F.log_softmax(logits, dim=-1).gather(1, ids[1:length, None])[:, 0]
        rows.append(F.pad(chosen, (1, data["input_ids"].shape[1] - length)))
    return torch.stack(rows)


def plain_loss(logprobs, data, config):
    """Compute loss and metrics from the formulas."""
    if isinstance(config, SFTConfig):
        counted = (data["token_mask"].double() * data["sample_mask"].double()[:, None])[:, 1:]
        loss = -(logprobs[:, 1:] * counted).sum() / counted.sum()
        return loss, {"loss": loss.item(), "num_unmasked_tokens": counted.sum().item()}
    return plain_dpo(logprobs, data, config.dpo)


def plain_dpo(logprobs, data, dpo):
    mask, counts = data["token_mask"].double(), data["sample_mask"].double()
    reference = torch.zeros_like(logprobs)
    reference[:, 1:] = data["reference_policy_logprobs"][:, :-1]
    rewards = ((logprobs - reference) * mask)[:, 1:].sum(1)
    pairs, chosen, rejected = counts[::2], rewards[::2], rewards[1::2]
    total = pairs.sum()
    preference = -(F.logsigmoid(dpo.reference_policy_kl_penalty * (chosen - rejected)) * pairs).sum() / total
    means = (logprobs * mask)[::2, 1:].sum(1) / mask[::2, 1:].sum(1)
    sft = -(means * pairs).sum() / total
    loss = preference + dpo.sft_loss_weight * sft
    return loss, {
        "loss": loss.item(),
        "preference_loss": preference.item(),
        "sft_loss": sft.item(),
        "accuracy": (((chosen > rejected).double() * pairs).sum() / total).item(),
        "rewards_chosen_mean": ((chosen * pairs).sum() / total).item(),
        "rewards_rejected_mean": ((rejected * pairs).sum() / total).item(),
        "num_valid_samples": pairs.sum().item(),
    }


def plain_router_losses(model, data):
    """Compute DeepSeek-V3's balance loss of each sequence (its eq. 17 to 20) and ST-MoE's z-loss, summed over
    layers."""
    balance = z = 0.0
    rows = [row for row, mask in enumerate(data["sample_mask"].tolist()) if mask]
    tokens = sum(data["input_lengths"][rows].tolist())
    for row in rows:
        length = int(data["input_lengths"][row])
        for logits in model(data["input_ids"][row, :length][None], output_router_logits=True).router_logits:
            logits = logits.double()
            probabilities, (count, topk) = logits.softmax(-1), (logits.shape[1], model.config.num_experts_per_tok)
            chosen = torch.zeros_like(logits).scatter(1, probabilities.topk(topk).indices, 1.0)
            frequency = chosen.sum(0) * count / (topk * length)
            balance = balance + (frequency * probabilities.mean(0)).sum() / len(rows)
            z = z + logits.logsumexp(-1).square().sum() / tokens
    return balance, z


RENAMED = (
    (r"\.block_sparse_moe\.((gate|up|down)_proj)", r".mlp.\1"),  # Kimi Linear
    (r"\.hc_pre\.hc_(attn|mlp)_layer\.", r".hc_\1_layer.hc_pre."),  # HY-4
    (r"\.hc_pre\.hc_head\.", ".hc_head."),
    (r"\.mlp\.(shared_experts\.)?linear_gate\.", r".mlp.\1gate_proj."),
)
"""Names that transformers saves, and those of published directories."""


def as_saved(model, value_of):
    """Return values of a model's parameters and buffers, with the names and shapes of published directories.

    They are those in which transformers saves them, except for `RENAMED`.
    """
    if model.config.model_type == "deepseek_v4":  # neither transformers nor published directories have these names
        own = {name: value_of(tensor).detach().clone() for name, tensor in model.state_dict(keep_vars=True).items()}
        return of_single_experts({name: tensor for name, tensor in own.items() if not name.endswith("tid2eid")})
    copied = copy.deepcopy(model)
    with torch.no_grad(), tempfile.TemporaryDirectory() as directory:
        for tensor, own in zip(copied.state_dict().values(), model.state_dict(keep_vars=True).values(), strict=True):
            tensor.copy_(value_of(own))
        copied.save_pretrained(directory)
        saved = load_file(f"{directory}/model.safetensors")
    return of_single_experts(published_names(saved))


def published_names(tensors):
    """Return tensors that transformers has saved, with the names of published directories."""
    for pattern, published in RENAMED:
        tensors = {re.sub(pattern, published, name): tensor for name, tensor in tensors.items()}
    return tensors


def of_single_experts(tensors):
    """Return the tensors with separate weights of experts in place of tensors of all experts, except gpt-oss's."""
    separate = {}
    for name, tensor in tensors.items():
        layer, _, projection = name.rpartition(".experts.")
        if projection not in ("gate_up_proj", "down_proj") or f"{name}_bias" in tensors:
            separate[name] = tensor
            continue
        for number, expert in enumerate(tensor):
            names = ("gate_proj", "up_proj") if projection == "gate_up_proj" else (projection,)
            for own, part in zip(names, expert.chunk(len(names)), strict=True):
                separate[f"{layer}.experts.{number}.{own}.weight"] = part
    return separate


def gradient_of(tensor):
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def trained(model, tensors):
    """Return the tensors without those of indexers, whose choice of keys has no gradient, of vision towers, and the
    whole numbers of hashes."""
    parts = ".indexer.", ".visual.", ".vision_tower.", ".embed_vision."
    untrained = [n for n, t in tensors.items() if any(part in n for part in parts) or not t.is_floating_point()]
    gradients = [p.grad for name, p in model.named_parameters() if any(part in name for part in parts)]
    assert not any(gradient is not None and gradient.any() for gradient in gradients)
    return {name: tensor for name, tensor in tensors.items() if name not in untrained}


def plain_outcome(config, data, prepare=lambda model: None, steps=STEPS) -> LayoutResult:
    """Run the same steps with transformers and torch.optim, without this package."""
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    prepare(model)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.optimizer.lr, betas=(0.9, 0.999), eps=config.optimizer.adam_eps, weight_decay=0
    )
    first, all_metrics = None, []
    for _ in range(steps):
        optimizer.zero_grad()
        logprobs = plain_logprobs(model, data)
        loss, metrics = plain_loss(logprobs, data, config)
        if config.model.moe_aux_loss_coeff:
            balance, z = plain_router_losses(model, data)
            metrics |= {"moe_aux_loss": balance.item(), "moe_z_loss": z.item()}
            loss = loss + config.model.moe_aux_loss_coeff * balance + config.model.moe_z_loss_coeff * z
        loss.backward()
        gradients = trained(model, as_saved(model, gradient_of))
        metrics["grad_norm"] = torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_grad).item()
        optimizer.step()
        all_metrics.append(metrics)
        first = first or (logprobs.detach(), gradients)
    return LayoutResult(all_metrics, *first, trained(model, as_saved(model, lambda tensor: tensor)))


@pytest.fixture(scope="module")
def outcomes(model_of):
    """Return a function that computes a family's results by plain PyTorch and by one process, once."""
    made = {}

    def get(family):
        if family not in made:
            config, data = make_config(model_of(family)), make_data()
            one = run_processes(compute_layout_result, config, copy.deepcopy(data), STEPS, world_size=1)[0]
            made[family] = plain_outcome(config, data), one
        return made[family]

    return get


def run_steps(config, directory, load, steps):
    """Return metrics and whole weights after `steps` more steps, then write a checkpoint."""
    from mcore_rl.models.megatron.weights.conversion import export_hf_weights
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy = MegatronPolicy(config, total_steps=10, rows_per_unit=2)
    done = policy.load_checkpoint(load).state["step"] if load else 0
    loss_fn = build_loss(config)
    metrics = [policy.train(make_data(), loss_fn) for _ in range(steps)]
    saved = policy.save_checkpoint(directory, done + steps, {})
    weights = dict(export_hf_weights(policy.model))
    policy.shutdown()
    return metrics, weights, saved


def lora_config(model_path, **lora):
    config = make_config(model_path)
    values = config.model_dump()
    values["model"]["lora"] = lora
    return type(config).model_validate(values)


def with_experts(data, layers, count, topk):
    """Return the batch with random experts for every token; some are unknown."""
    generator = torch.Generator().manual_seed(8)
    shape = (*data["input_ids"].shape, layers, count)
    experts = torch.rand(shape, generator=generator).argsort(-1)[..., :topk].short()
    experts[torch.rand(shape[:2], generator=generator) < 0.2] = -1
    data["routed_experts"] = experts
    return data


def change_each_row(modules, rows, change):
    """Change what modules of transformers return, which is called with one row after the other, again and again.

    Args:
        change: function of a module's index, the row's number and the output; it returns the new output.
    """
    calls = [0] * len(modules)

    def hook_of(index):
        def hook(module, inputs, outputs):
            row, calls[index] = calls[index] % rows, calls[index] + 1
            return change(index, row, outputs)

        return hook

    for index, module in enumerate(modules):
        module.register_forward_hook(hook_of(index))
