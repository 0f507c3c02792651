"""Adapters: PEFT's numbers and files, the same under every layout."""


import pytest
import torch
import torch.nn.functional as F
from models import and_long
from test_layouts import make_config, make_data, plain_logprobs
from transformers import AutoModelForCausalLM

from mcore_rl.distributed.processes import run_processes
from mcore_rl.layout_check import Layout, compute_outcome

peft = pytest.importorskip("peft")

RANK, ALPHA = 3, 5.0
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TARGETS = {
    "some": ["q_proj", "v_proj", "up_proj"],
    "all": ALL,
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
}


def make_adapter(path, directory, targets):
    """A PEFT directory whose B is not zero, so that A has gradients too."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    adapted.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def adapter_of(model_of, tmp_path_factory):
    made = {}

    def get(family, targets):
        if (family, targets) not in made:
            directory = tmp_path_factory.mktemp(f"{family}_{targets}")
            made[family, targets] = make_adapter(model_of(family), directory, TARGETS[targets])
        return made[family, targets]

    return get


def lora_config(model_path, **lora):
    config = make_config(model_path)
    values = config.model_dump()
    values["model"]["lora"] = lora
    return type(config).model_validate(values)


def plain_outcome(path, adapter):
    """Log-probabilities, loss and the gradients of A and B by PEFT and plain PyTorch."""
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, adapter, is_trainable=True)
    data = make_data()
    logprobs = plain_logprobs(model, data)
    mask = (data["token_mask"] * data["sample_mask"][:, None])[:, 1:]
    difference = ((logprobs[:, 1:] - data["reference_policy_logprobs"][:, :-1]) * mask).sum(1)
    pairs = data["sample_mask"][::2]
    nll = -(logprobs[:, 1:] * mask).sum(1) / mask.sum(1).clamp(min=1)
    per_pair = -F.logsigmoid(0.05 * (difference[::2] - difference[1::2])) + 0.5 * nll[::2]
    loss = (per_pair * pairs).sum() / pairs.sum()
    loss.backward()
    gradients = {name.replace(".default", ""): p.grad for name, p in model.named_parameters() if p.requires_grad}
    return logprobs.detach(), loss.item(), gradients


@pytest.fixture(scope="module")
def plain(model_of, adapter_of):
    made = {}

    def get(family, targets):
        if (family, targets) not in made:
            made[family, targets] = plain_outcome(model_of(family), adapter_of(family, targets))
        return made[family, targets]

    return get


CASES = and_long(
    [
        ("llama", "all", Layout()),
        ("llama", "some", Layout(tp=2, sp=True)),
        ("phi3", "phi3", Layout(tp=2)),
        ("deep", "all", Layout(pp=2, cp=2)),
    ],
    [
        ("llama", "all", Layout(tp=4)),  # more ranks than key-value heads
        ("llama", "some", Layout(tp=4, sp=True, dp=2)),
        ("gemma3", "all", Layout(tp=2, sp=True)),
        ("olmo2", "all", Layout(tp=2)),
        ("qwen3", "some", Layout(tp=2, pp=2, cp=2, sp=True)),
        ("deep", "some", Layout(pp=2, vpp=3, dp=2)),
        ("qwen2", "all", Layout(dp=4, packing=False)),
        ("qwen3_moe", "attention", Layout(tp=2, dp=2, ep=2, sp=True)),
    ],
)
TARGETS["attention"] = ALL[:4]


@pytest.mark.parametrize(("family", "targets", "layout"), CASES, ids=str)
@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
def test_gradients_are_pefts(family, targets, layout, recompute, model_of, adapter_of, plain):
    config = layout.apply(lora_config(model_of(family), path=adapter_of(family, targets)))
    model = config.model.model_copy(update={"recompute_activations": recompute})
    outcome = run_processes(
        compute_outcome, config.model_copy(update={"model": model}), make_data(), 1, world_size=layout.world_size
    )[0]
    logprobs, loss, gradients = plain(family, targets)
    assert outcome.metrics["loss"] == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(outcome.scores, logprobs.float(), rtol=1e-5, atol=1e-4)
    assert set(outcome.gradients) == set(gradients)
    whole = sum(float(g.square().sum()) for g in gradients.values()) ** 0.5
    for name, expected in gradients.items():
        error = (outcome.gradients[name] - expected).norm()
        assert error <= 2e-5 * max(expected.norm(), 1e-3 * whole), name
    assert outcome.metrics["grad_norm"] == pytest.approx(whole, rel=1e-5)
