"""Tests of layers that predict further tokens (MTP), against transformers' layers and float64 sums."""

import copy
import json
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import yaml
from layout_cases import as_saved, gradient_of, make_data, make_sft_config
from programs import run
from safetensors.torch import load_file, save_file
from small_models import and_long, make_model
from small_models import make_config as make_hf_config
from transformers import AutoModelForCausalLM

from mcore_rl.config import DPOConfig, LoRAConfig, ModelConfig, ParallelConfig
from mcore_rl.config.load import build_config
from mcore_rl.errors import UserError
from mcore_rl.models.megatron.families import family_of
from mcore_rl.models.megatron.model.hf_config import check_model_fits, hf_config_of, load_hf_config
from mcore_rl.models.megatron.model.hf_directory import write_hf_directory
from mcore_rl.models.megatron.model.token_prediction import TokenPrediction
from mcore_rl.testing.layout_check import ParallelLayout, compute_layout_result
from mcore_rl.testing.processes import run_cases

FACTOR = 0.3
KINDS = {  # what a configuration needs for one more layer of the kind that predicts tokens, and the names of its parts
    "deepseek_v3": ({}, "model.layers.{n}.", "enorm hnorm eh_proj shared_head.norm"),
    "glm4_moe": ({}, "model.layers.{n}.", "enorm hnorm eh_proj shared_head.norm"),
    "deepseek_v32": (
        {"mlp_layer_types": "sparse", "layer_types": "indexed_attention"},
        "model.layers.{n}.",
        "enorm hnorm eh_proj shared_head.norm",
    ),
    "mimo_v2_flash": (
        {"mlp_layer_types": "dense", "layer_types": "sliding_attention"},
        "model.mtp.layers.0.",
        "enorm hnorm eh_proj final_layernorm",
    ),
    "qwen3_5": ({"layer_types": "full_attention"}, "mtp.", "pre_fc_norm_embedding pre_fc_norm_hidden fc norm"),
    "qwen3_5_moe": ({"layer_types": "full_attention"}, "mtp.", "pre_fc_norm_embedding pre_fc_norm_hidden fc norm"),
}


class Predictor(torch.nn.Module):
    """The layer in plain PyTorch, with a block of transformers."""

    def __init__(self, family, path, **changes):
        super().__init__()
        more, prefix, parts = KINDS[family]
        base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        config = make_hf_config(family, **changes)
        self.number = config.num_hidden_layers
        config.num_hidden_layers += 1
        for name, kind in more.items():
            setattr(config, name, [*getattr(config, name), kind])
        torch.manual_seed(11)
        self.whole = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            biases = [buffer for name, buffer in self.whole.named_buffers() if "bias" in name]
            for parameter in (*self.whole.parameters(), *biases):
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
        missing, _ = self.whole.load_state_dict(base.state_dict(), strict=False)
        assert missing and all(f"layers.{self.number}." in name for name in missing)
        size = config.hidden_size
        norm = type(self.whole.model.norm)
        self.embedding_norm, self.hidden_norm, self.final_norm = (norm(size, config.rms_norm_eps) for _ in range(3))
        self.projection = torch.nn.Linear(2 * size, size, bias=False)
        for one in (self.embedding_norm, self.hidden_norm, self.final_norm):
            torch.nn.init.normal_(one.weight, 0.9, 0.1)
        self.prefix, names = prefix.format(n=self.number), parts.split()
        modules = self.embedding_norm, self.hidden_norm, self.projection, self.final_norm
        self.parts = {f"{self.prefix}{name}.weight": module.weight for name, module in zip(names, modules, strict=True)}

    def tensors(self, value_of):
        """Return values of the layer's parameters by the names of published directories."""
        theirs = f"model.layers.{self.number}."
        of_block = self.prefix if "layers" in self.prefix else f"{self.prefix}layers.0."
        saved = as_saved(self.whole, value_of)
        found = {of_block + n.removeprefix(theirs): t for n, t in saved.items() if n.startswith(theirs)}
        if "mtp.layers" in self.prefix:  # MiMo-V2-Flash
            found = {n.replace("post_attention_layernorm", "pre_mlp_layernorm"): t for n, t in found.items()}
        return found | {name: value_of(weight).detach().clone() for name, weight in self.parts.items()}

    def negative_logprobs(self, ids):
        """Return −log p of the tokens of a row [S] from the third on, [S − 2]."""
        model = self.whole.model
        model.layers, block = model.layers[: self.number], model.layers[self.number]
        with torch.no_grad():
            states, embedded = model(ids[None]).last_hidden_state[:, :-1], model.embed_tokens(ids[None, 1:])
        model.layers.append(block)
        places = torch.arange(len(ids) - 1)[None]
        x = self.projection(torch.cat((self.embedding_norm(embedded), self.hidden_norm(states)), -1))
        mask, kind = torch.full((len(ids) - 1,) * 2, -torch.inf).triu(1), ()
        if self.whole.config.model_type == "mimo_v2_flash":  # its predictors have windows
            kind = ("sliding_attention",)
            mask += torch.full_like(mask, -torch.inf).tril(-self.whole.config.sliding_window)
        angles = model.rotary_emb(x, places, *kind)
        x = block(x, position_embeddings=angles, position_ids=places, attention_mask=mask[None, None])
        logits = self.final_norm(x[0] if isinstance(x, tuple) else x)[0] @ self.whole.lm_head.weight.detach().T
        return -F.log_softmax(logits[:-1].double(), -1).gather(1, ids[2:, None])[:, 0]

    def loss(self, data):
        total = weights = 0.0
        for row, length in enumerate(data["input_lengths"].tolist()):
            weight = (data["token_mask"][row, 2:length] * data["sample_mask"][row]).double()
            if length > 2:
                total = total + (self.negative_logprobs(data["input_ids"][row, :length]) * weight).sum()
                weights += float(weight.sum())
        return total / weights


def add_predictor(family, path, **changes):
    """Add a layer that predicts tokens to a model directory; return the layer in plain PyTorch."""
    predictor = Predictor(family, path, **changes)
    file = path / "model.safetensors"
    save_file({**load_file(file), **predictor.tensors(lambda tensor: tensor)}, file, {"format": "pt"})
    return predictor


LAYOUTS = and_long(
    [("deepseek_v3", ParallelLayout(tp=2, pp=2, ep=2, etp=1, sp=True, tokens_per_pack=128), {})],
    [
        ("qwen3_5", ParallelLayout(tp=2, cp=2, sp=True), {}),
        ("qwen3_5", ParallelLayout(pp=2), {"tie_word_embeddings": True}),
        ("deepseek_v3", ParallelLayout(), {"recompute": True}),
    ],
    [
        ("glm4_moe", ParallelLayout(cp=2, dp=2, ep=2), {}),
        ("qwen3_5_moe", ParallelLayout(pp=2, vpp=2, dp=2, ep=2), {}),
        ("deepseek_v32", ParallelLayout(pp=2, cp=2, packing=False), {}),
        ("mimo_v2_flash", ParallelLayout(tp=2, pp=2, sp=True), {}),
    ],
)


@pytest.mark.long
@pytest.mark.parametrize(("family", "layout", "changes"), LAYOUTS, ids=str)
def test_loss_and_every_gradient_equal_plain_pytorch(family, layout, changes, tmp_path):
    """The layer's loss and its gradients; the model's gradients and weights are those without it, but for the order in
    which replicas are summed."""
    changes = dict(changes)
    recompute = changes.pop("recompute", False)
    path = make_model(family, tmp_path / "model", **changes)
    predictor = add_predictor(family, path, **changes)
    config = make_sft_config(path)
    config = config.model_copy(
        update={"model": config.model.model_copy(update={"recompute_activations": recompute}),
                "optimizer": config.optimizer.model_copy(update={"clip_grad": 0.0})}
    )  # fmt: skip
    config, data = layout.apply(config), make_data()
    model = config.model.model_copy(update={"mtp_loss_scaling_factor": FACTOR})
    trains = config.model_copy(update={"model": model})
    cases = [(compute_layout_result, one, copy.deepcopy(data), 2) for one in (config, trains)]
    (frozen, *_), (trained, *_) = run_cases(cases, world_size=layout.world_size)
    loss, before = predictor.loss(data), load_file(path / "model.safetensors")
    (FACTOR * loss).backward()
    assert trained.steps[0]["mtp_loss"] == pytest.approx(loss.item(), rel=1e-5)
    for name, expected in predictor.tensors(gradient_of).items():
        if ".indexer." not in name:
            gradient, changed = trained.gradients[name], not torch.equal(trained.weights[name], before[name])
            assert (gradient - expected).norm() <= 1e-4 * max(float(expected.norm()), 1e-3), name
            assert name not in frozen.gradients and changed == (not name.endswith("e_score_correction_bias")), name
    assert torch.equal(trained.scores, frozen.scores)
    for name, gradient in frozen.gradients.items():
        for one, other in ((gradient, trained.gradients[name]), (frozen.weights[name], trained.weights[name])):
            assert (one - other).norm() <= 1e-5 * float(one.norm()) + 1e-9, name


@pytest.mark.long
def test_a_run_is_resumed_elsewhere_converted_and_exported(tmp_path):
    """Copies of embedding and LM head in the layer are exported as they were trained; other copies stay as they are."""
    path = make_model("deepseek_v3", tmp_path / "model")
    add_predictor("deepseek_v3", path)
    file = path / "model.safetensors"
    tensors = load_file(file)
    head = "model.layers.4.shared_head.head.weight"
    tensors[head] = tensors["lm_head.weight"].clone()
    tensors["model.layers.4.embed_tokens.weight"] = torch.zeros(250, 8)  # of another kind: no copy
    save_file(tensors, file, {"format": "pt"})
    letters = [{"prompt": f"say {letter}", "completion": letter * 5} for letter in "abcdefgh"]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in letters))
    config = {
        "output_dir": str(tmp_path / "out"),
        "model": {"path": str(path), "mtp_loss_scaling_factor": 0.1},
        "parallel": {"pipeline_model_parallel_size": 2},
        "data": {"train": str(tmp_path / "train.jsonl"), "max_sequence_length": 40},
        "optimizer": {"lr": 3e-3, "schedule": "constant"},
        "batch": {"global_batch_size": 4},
        "trainer": {"max_steps": 2},
        "checkpoint": {"save_interval": 1},
    }
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(config))
    run("train_sft.py", tmp_path / "sft.yaml", processes=2)
    elsewhere = "parallel={tensor_model_parallel_size: 2, sequence_parallel: true}"
    told = run("train_sft.py", tmp_path / "sft.yaml", "trainer.max_steps=3", elsewhere, processes=2)
    assert "resumed from" in told.stdout_text
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["mtp_loss"] for line in lines if "mtp_loss" in line]
    assert len(losses) == 3 and losses[-1] < losses[0]
    exported = load_file(tmp_path / "out" / "hf" / "model.safetensors")
    assert set(exported) == set(tensors)
    assert torch.equal(exported[head], exported["lm_head.weight"])
    assert not torch.equal(exported[head], tensors[head]) and not exported["model.layers.4.embed_tokens.weight"].any()
    assert not torch.equal(exported["model.layers.4.eh_proj.weight"], tensors["model.layers.4.eh_proj.weight"])
    assert "trained_mtp_layers" not in (tmp_path / "out" / "hf" / "config.json").read_text()
    run("convert", "to-hf", tmp_path / "out" / "checkpoints", tmp_path / "converted")
    converted = load_file(tmp_path / "converted" / "model.safetensors")
    assert set(converted) == set(exported)
    assert all(torch.equal(tensor, converted[name]) for name, tensor in exported.items())


@pytest.mark.parametrize("keeps_head", [True, False])
def test_a_reward_model_keeps_the_repeated_lm_head(keeps_head, tmp_path):
    path = make_model("deepseek_v3", tmp_path / "model")
    add_predictor("deepseek_v3", path)
    tensors = load_file(path / "model.safetensors")
    names = head, embedding = "model.layers.4.shared_head.head.weight", "model.layers.4.embed_tokens.weight"
    for name, own in zip(names, ("lm_head.weight", "model.embed_tokens.weight"), strict=True):
        tensors[name] = tensors[own].clone()
    if not keeps_head:
        del tensors["lm_head.weight"]
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    hf = load_hf_config(path, head="reward")
    trained = ((name, torch.full(shape, 0.5)) for name, shape in family_of(hf).shapes().items())
    write_hf_directory(trained, tmp_path / "out", path, hf, is_writer=True)
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(exported[head], tensors[head]) and (exported[embedding] == 0.5).all()


def test_each_layer_chooses_keys_and_experts_of_its_own():
    seen = []

    def layer(states, embedded, rotary, pack):
        seen.append((dict(pack.chosen), pack.recorded, pack.routed))
        pack.chosen[0] = None
        return states

    layers = SimpleNamespace(
        layers=[layer, layer], depth=2, scaling_factor=1.0, total=torch.ones(2), losses=torch.zeros(2),
        _embedded=lambda ids, table: table, _negative_logprobs=lambda states, tokens, head: states.sum(),
    )  # fmt: skip
    later = [SimpleNamespace(embedded=None)] * 2
    pack = SimpleNamespace(chosen={0: "model's"}, recorded={0: "sampler's"}, routed=None, later=later)
    hidden = torch.ones(2, 1, 3)
    assert torch.equal(TokenPrediction.attach(layers, hidden, hidden, hidden, None, pack), hidden)
    assert seen == [({}, {}, None)] * 2 and pack.chosen == {0: "model's"}


def test_what_cannot_be_trained_is_told(tmp_path):
    path = make_model("deepseek_v3", tmp_path / "model")
    model = ModelConfig(path=path, mtp_loss_scaling_factor=0.1)
    with pytest.raises(
        UserError, match=r"has no layers that predict further tokens \(model\.layers\.4\.eh_proj\.weight"
    ):
        hf_config_of(model)
    add_predictor("deepseek_v3", path)
    hf, parallel = hf_config_of(model), ParallelConfig()
    check_model_fits(hf, parallel, 40, model)
    for changes, reason in (({"lora": LoRAConfig()}, "lora"), ({"head": "reward"}, "head")):
        with pytest.raises(UserError, match=rf"not trained with model\.{reason}; leave model\.mtp_loss_scaling_factor"):
            check_model_fits(hf, parallel, 40, model.model_copy(update=changes))
    values = {"output_dir": "out", "model": {"path": "model", "mtp_loss_scaling_factor": 0.1}, "data": {"train": "x"}}
    with pytest.raises(UserError, match=r"a token of a shared prefix has several next tokens; leave batch\.share"):
        build_config(DPOConfig, values, ["batch.share_prefixes=true"], "here")
