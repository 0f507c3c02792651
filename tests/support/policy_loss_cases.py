"""The policy losses by the formulas of their papers, sequence by sequence; and rollouts of several turns."""

import math

import torch

from mcore_rl.rollouts.samples import Rollout, to_batch

CASES = {
    "dppo_tv": {"name": "dppo_tv", "divergence_clip_min": 0.004, "divergence_clip_max": 0.006, "ratio_clip_c": 1.2},
    "dppo_kl": {"name": "dppo_kl", "divergence_clip_min": 4e-4, "divergence_clip_max": 5e-4},
    "sapo": {"name": "sapo", "tau_pos": 1.3, "tau_neg": 2.1},
    "vespo": {"name": "vespo", "k_pos": 1.5, "lambda_pos": 2.5, "k_neg": 3.5, "lambda_neg": 2.2},
    "vespo, corrected": {
        "name": "vespo", "use_importance_sampling_correction": True, "truncated_importance_sampling_ratio": 1.05,
    },
    "luspo": {"name": "luspo", "ratio_clip_min": 0.08, "ratio_clip_max": 0.12},
    "gmpo": {"name": "gmpo", "log_ratio_clip_min": 0.03, "log_ratio_clip_max": 0.05},
    "dro": {"name": "dro", "dro_beta": 0.7},
    "off-policy mask": {"off_policy_mask_threshold": 0.01},
    "sum over tokens": {"aggregation": "token_sum", "ratio_clip_max": 0.1},
    "echo": {"observation_nll_weight": 0.3},
    "everything": {
        "name": "sapo", "aggregation": "seq_mean_token_sum", "off_policy_mask_threshold": 0.01,
        "use_importance_sampling_correction": True, "importance_sampling_level": "sequence",
        "truncated_importance_sampling_ratio": 1.2, "observation_nll_weight": 0.2,
    },
}  # fmt: skip
"""Options of each case; bounds are narrow enough for tokens on both sides."""


def loss_of(options, logprobs, data):
    """Return the loss of log-probabilities [B, S − 1] by definition; the mean over tokens or sequences counted here."""
    usual = {"sapo": "seq_mean_token_mean", "gmpo": "seq_mean_token_mean", "luspo": "seq_mean_token_sum"}
    aggregation = options.get("aggregation") or usual.get(options.get("name"), "token_mean")
    rows, observed = [], []
    for row in range(len(logprobs)):
        if not data["sample_mask"][row]:
            continue
        counted = [t for t in range(logprobs.shape[1]) if data["token_mask"][row, t + 1]]
        observed += [logprobs[row, t] for t in range(*((counted[0], counted[-1]) if counted else (0, 0)))
                     if t not in counted]  # fmt: skip
        columns = [data[key][row, 1:][counted].double() for key in
                   ("prev_logprobs", "generation_logprobs", "advantages")]  # fmt: skip
        rows.append(_values(options, logprobs[row, counted].double(), *columns))
    tokens = sum(len(values) for values in rows)
    loss = {
        "token_mean": lambda: sum(values.sum() for values in rows) / tokens,
        "token_sum": lambda: sum(values.sum() for values in rows),
        "seq_mean_token_mean": lambda: sum(values.sum() / max(len(values), 1) for values in rows) / len(rows),
        "seq_mean_token_sum": lambda: sum(values.sum() for values in rows) / len(rows),
    }[aggregation]()
    if weight := options.get("observation_nll_weight"):
        loss = loss - weight * torch.stack(observed).mean()
    return loss


def _values(options, logp, prev, generation, advantage):
    """Return the terms of one sequence's tokens."""
    if not len(logp):
        return logp
    name, ratio = options.get("name", "clipped_pg"), (logp - prev).exp()
    log_weight = prev - generation
    if options.get("importance_sampling_level") == "sequence":
        log_weight = log_weight.sum().expand_as(logp)
    weight = log_weight.exp().clamp(max=options.get("truncated_importance_sampling_ratio", math.inf))
    if not options.get("use_importance_sampling_correction"):
        weight = torch.ones_like(logp)
    if name == "vespo":
        terms = _vespo(options, logp, prev, weight, advantage)
        weight = torch.ones_like(logp)
    else:
        terms = {"clipped_pg": _clipped, "luspo": _clipped, "sapo": _sapo, "gmpo": _gmpo, "dro": _dro,
                 "dppo_tv": _dppo, "dppo_kl": _dppo}[name](options, logp, prev, ratio, advantage)  # fmt: skip
    if threshold := options.get("off_policy_mask_threshold"):
        drifted = (generation - logp.detach()).mean() > threshold
        terms = torch.stack([term * 0 if drifted and a < 0 else term for term, a in zip(terms, advantage, strict=True)])
    return terms * weight


def _clipped(options, logp, prev, ratio, advantage):
    if options.get("name") == "luspo":
        ratio = (logp - prev).mean().exp().expand_as(logp)
    low, high = 1 - options.get("ratio_clip_min", 0.2), 1 + options.get("ratio_clip_max", 0.2)
    return -torch.minimum(advantage * ratio, advantage * ratio.clamp(low, high))


def _sapo(options, logp, prev, ratio, advantage):
    tau = [options.get("tau_pos", 1.0) if a > 0 else options.get("tau_neg", 1.05) for a in advantage]
    tau = torch.tensor(tau, dtype=torch.float64)
    return -advantage * 4 / tau / (1 + (-tau * (ratio - 1)).exp())


def _vespo(options, logp, prev, weight, advantage):
    w = ((logp - prev).detach().exp() * weight).prod()
    terms = []
    for token, a in zip(logp, advantage, strict=True):
        k, decay = ("k_pos", "lambda_pos") if a >= 0 else ("k_neg", "lambda_neg")
        defaults = {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0}
        k, decay = (options.get(key, defaults[key]) for key in (k, decay))
        terms.append(-a * w**k * ((1 - w) * decay).exp() * token)
    return torch.stack(terms)


def _gmpo(options, logp, prev, ratio, advantage):
    logs = []
    for log, a in zip(logp - prev, advantage, strict=True):
        bound = options["log_ratio_clip_max"] if a > 0 else -options["log_ratio_clip_min"]
        logs.append(log.clamp(max=bound) if a > 0 else log.clamp(min=bound))
    return -advantage * torch.stack(logs).mean().exp()


def _dro(options, logp, prev, ratio, advantage):
    return -(advantage * logp - options["dro_beta"] / 2 * (logp - prev) ** 2)


def _dppo(options, logp, prev, ratio, advantage):
    terms = []
    for token, old, r, a in zip(logp, prev, ratio.detach(), advantage, strict=True):
        p, q = old.exp().item(), token.exp().item()
        distance = abs(q - p)
        if options["name"] == "dppo_kl":
            distance = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
        outside = q > p and distance > options["divergence_clip_max"] if a > 0 else (
            q < p and distance > options["divergence_clip_min"])  # fmt: skip
        terms.append(0 * token if outside else -a * min(r, options.get("ratio_clip_c", 20.0)) * token)
    return torch.stack(terms)


def make_rollouts():
    """Ragged conversations of two turns, with tokens of the environment between the responses; 4 groups of 3.

    Without token 0, the pad token, whose embedding transformers gives no gradient.
    """
    generator = torch.Generator().manual_seed(4)

    def count(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    rollouts = []
    for sample in range(12):
        prompt, first, observed, second = count(1, 8), count(1, 20), count(0, 4), count(1, 20)
        mask = [False] * prompt + [True] * first + [False] * observed + [True] * second
        ids = torch.randint(1, 250, (len(mask),), generator=generator).tolist()
        logprobs = [float(-3 * torch.rand((), generator=generator)) if m else 0.0 for m in mask]
        rollouts.append(Rollout(sample // 3, sample, ids, mask, logprobs, reward=float(count(0, 3))))
    return rollouts


def make_batch():
    rollouts = make_rollouts()
    data, rewards = to_batch(rollouts, 0), torch.tensor([r.reward for r in rollouts]).view(4, 3)
    centred = rewards - rewards.mean(1, keepdim=True)
    advantages = (centred / (rewards.std(1, keepdim=True) + 1e-4)).view(-1, 1)
    data["advantages"] = advantages.expand(data["input_ids"].shape).contiguous()
    return data
