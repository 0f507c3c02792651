"""Tests that three steps of DPO, KTO and SFT equal TRL's own trainers, in one process and under TP2 × CP2."""

import copy
import json

import pytest
import torch
import torch.nn.functional as F
import yaml
from float32 import FORWARD, approx32
from programs import metrics_of, run
from safetensors.torch import load_file
from small_models import make_model, make_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl_steps import OPTIMIZER, STEPS, check_weights, trained

from mcore_rl.algorithms.build_loss import build_loss
from mcore_rl.config import DPOConfig
from mcore_rl.data.token_store import SampleOrder
from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.testing.layout_check import ParallelLayout
from mcore_rl.testing.processes import run_cases

BETA, EPSILON = 0.2, 0.1
LAYOUTS = [ParallelLayout(), ParallelLayout(tp=2, cp=2, sp=True)]
SMOOTH = {"label_smoothing": EPSILON}
SUM = ["aot", "bco_pair", "sigmoid_norm"]
DPO_CASES = {
    "sigmoid_norm": ({"preference_loss": "sigmoid_norm"}, {}),
    "exo_pair": ({"preference_loss": "exo_pair", **SMOOTH}, SMOOTH),
    "nca_pair": ({"preference_loss": "nca_pair"}, {}),
    "bco_pair": ({"preference_loss": "bco_pair"}, {}),
    "sppo_hard": ({"preference_loss": "sppo_hard"}, {}),
    "aot": ({"preference_loss": "aot"}, {}),
    "aot_unpaired": ({"preference_loss": "aot_unpaired", **SMOOTH}, SMOOTH),
    "discopop": ({"preference_loss": "discopop"}, {}),
    "forward_kl": ({"f_divergence_type": "forward_kl"}, {"f_divergence_type": "forward_kl"}),
    "js_divergence": ({"f_divergence_type": "js_divergence"}, {"f_divergence_type": "js_divergence"}),
    "alpha_divergence": (
        {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.7},
        {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.7},
    ),
    "ld_alpha": ({"ld_alpha": 0.4}, {"ld_alpha": 0.4}),
    "use_weighting": ({"use_weighting": True}, {"use_weighting": True}),
    "weighted nca_pair": (
        {"preference_loss": "nca_pair", "use_weighting": True, "ld_alpha": 0.4},
        {"loss_type": ["nca_pair"], "use_weighting": True, "ld_alpha": 0.4},
    ),
    "sum": (
        {"preference_loss": SUM, "preference_loss_weights": [0.5, 1.5, 0.25]},
        {"loss_type": SUM, "loss_weights": [0.5, 1.5, 0.25]},
    ),
}


def theirs_of(name):
    own, settings = DPO_CASES[name]
    return {"loss_type": [own.get("preference_loss", "sigmoid")], **settings}


def pairs():
    """Ragged pairs: responses of one token, one pair of equal responses, two equal pairs. Half of the pairs have
    responses of one length, so that their ranks under policy and reference differ."""
    texts = [("abc" * (i % 4), "yz" * ((i * 5) % 7)) for i in range(6)]
    texts += [("quick brown"[i : i + 5], "lazy dogs 19"[i : i + 5]) for i in range(6)]
    texts[3], texts[5] = ("", ""), ("bb", "bb")
    records = [{"prompt": f"say {i} ", "chosen": c, "rejected": r} for i, (c, r) in enumerate(texts)]
    records[9] = records[4]
    return records


def rows_of(tokenizer, records):
    """The pairs as rows; every response ends with the end token."""
    encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    rows = [
        (encode(record["prompt"]), [*encode(record[side]), tokenizer.eos_token_id])
        for record in records
        for side in ("chosen", "rejected")
    ]
    lengths = torch.tensor([len(p) + len(r) for p, r in rows])
    width = int(lengths.max())
    ids = torch.stack([F.pad(torch.tensor(p + r), (0, width - len(p + r))) for p, r in rows])
    places, starts = torch.arange(width), torch.tensor([len(p) for p, _ in rows])
    mask = ((places >= starts[:, None]) & (places < lengths[:, None])).float()
    return BatchedDataDict(input_ids=ids, token_mask=mask, input_lengths=lengths, sample_mask=torch.ones(len(rows)))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    root = tmp_path_factory.mktemp("steps")
    make_model("llama", root / "model", initializer_range=0.05)
    other = AutoModelForCausalLM.from_pretrained(root / "model", dtype=torch.float32)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.08 * torch.randn_like(parameter))  # enough for other ranks of pairs
    other.save_pretrained(root / "reference")
    make_tokenizer().save_pretrained(root / "reference")
    return root


@pytest.fixture(scope="module")
def data(files):
    """The rows, with log-probabilities of the reference by transformers."""
    rows = rows_of(AutoTokenizer.from_pretrained(files / "model"), pairs())
    model, logprobs = AutoModelForCausalLM.from_pretrained(files / "reference"), torch.zeros(rows["input_ids"].shape)
    for row, length in enumerate(rows["input_lengths"].tolist()):
        ids = rows["input_ids"][row, :length]
        with torch.no_grad():
            scores = model(ids[None]).logits[0, :-1].double().log_softmax(-1)
        logprobs[row, : length - 1] = scores.gather(1, ids[1:, None])[:, 0].float()
    rows["reference_policy_logprobs"] = logprobs  # column t scores token t + 1
    return rows


@pytest.mark.long
def test_ranks_of_pairs_differ_under_policy_and_reference(files, data):
    """Otherwise every pair would be its own partner."""
    loss_fn = build_loss(dpo_config(files / "model", {"preference_loss": ["aot", "aot_unpaired"]}))
    model = AutoModelForCausalLM.from_pretrained(files / "model")
    with torch.no_grad():
        scores = model(data["input_ids"]).logits[:, :-1].log_softmax(-1)
    logprobs = scores.gather(2, data["input_ids"][:, 1:, None])[..., 0]
    found = loss_fn.batch_columns(logprobs, data)
    halves = [loss_fn.batch_columns(logprobs[i : i + 12], data.slice(i, i + 12)) for i in (0, 12)]
    for kind in ("aot_partner", "aot_unpaired_partner"):
        of_halves = torch.cat([half[kind] for half in halves])
        assert ((found[kind] - of_halves).abs() > 0.1).sum() >= 2, kind


def steps_of_policy(config, data):
    """Return metrics of three steps on a batch, and the weights after them."""
    from mcore_rl.models.megatron.weights.conversion import export_hf_weights
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy, loss_fn = MegatronPolicy(config, total_steps=STEPS, rows_per_unit=2), build_loss(config)
    own, metrics = policy.own_rows(data), []
    for _ in range(STEPS):
        if loss_fn.needs_batch:
            own.update(loss_fn.batch_columns(policy.get_logprobs(own)["logprobs"][:, 1:], own))
        metrics.append(policy.train(own, loss_fn))
    weights = {name: weight.cpu() for name, weight in export_hf_weights(policy.model)}
    policy.shutdown()
    return metrics, weights


def dpo_config(path, options):
    return DPOConfig.model_validate(
        {
            "output_dir": "unused",
            "model": {"path": path, "dtype": "float32"},
            "data": {"train": "unused", "max_sequence_length": 60},
            "batch": {"global_batch_size": 12, "tokens_per_pack": 120},  # several microbatches
            "optimizer": OPTIMIZER,
            "trainer": {"max_steps": STEPS},
            "dpo": {"reference_policy_kl_penalty": BETA, **options},
        }
    )


CHUNKS = [list(DPO_CASES)[i : i + 5] for i in range(0, len(DPO_CASES), 5)]
OF_BATCH = ["aot", "aot_unpaired", "weighted nca_pair", "sum"]
STEPS_OF_DPO = [(names, layout) for layout in LAYOUTS for names in CHUNKS]
STEPS_OF_DPO += [(OF_BATCH, layout) for layout in (ParallelLayout(pp=2, dp=2), ParallelLayout(dp=2, packing=False))]


@pytest.mark.long
@pytest.mark.parametrize(("names", "layout"), STEPS_OF_DPO, ids=str)
def test_steps_of_dpo_equal_trls(names, layout, files, data):
    import trl

    initial = load_file(files / "model" / "model.safetensors")
    cases = [
        (steps_of_policy, layout.apply(dpo_config(files / "model", DPO_CASES[name][0])), copy.deepcopy(data))
        for name in names
    ]
    outcomes = [of_ranks[0] for of_ranks in run_cases(cases, world_size=layout.world_size, timeout=300)]
    for name, (metrics, weights) in zip(names, outcomes, strict=True):
        settings = {"beta": BETA, "per_device_train_batch_size": 12, **theirs_of(name)}
        losses, logs, expected = trained(
            trl.DPOTrainer, trl.DPOConfig, files, pairs() * STEPS, settings, files / "reference"
        )
        found = [m["loss"] for m in metrics]
        print(f"{name}: losses {losses}, off by {max(abs(a - b) for a, b in zip(found, losses, strict=True)):.1e}")
        assert found == approx32(losses, FORWARD), name
        for side in ("chosen", "rejected"):
            rewards = [BETA * m[f"rewards_{side}_mean"] for m in metrics]
            assert rewards == pytest.approx([log[f"rewards/{side}"] for log in logs], rel=1e-5, abs=1e-5), name
        check_weights(weights, expected, initial, name)


# ------------------------------------------------------------------ whole programs


PARALLEL = ["parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true",
            "parallel.context_parallel_size=2"]  # fmt: skip
SIZE = 6


def train(files, algorithm, name, processes, arguments):
    config = {
        "output_dir": str(files / name),
        "model": {"path": str(files / "model"), "dtype": "float32"},
        "data": {"train": str(files / f"{algorithm}.jsonl"), "max_sequence_length": 40},
        "batch": {"global_batch_size": SIZE, "tokens_per_pack": 80},
        "optimizer": OPTIMIZER,
        "trainer": {"max_steps": STEPS},
    }
    (files / f"{name}.yaml").write_text(yaml.safe_dump(config))
    more = PARALLEL if processes == 4 else []
    run(f"train_{algorithm}.py", files / f"{name}.yaml", *arguments, *more, processes=processes)
    return metrics_of(files / name), load_file(files / name / "hf" / "model.safetensors")


def longer(record):
    """A record without empty texts, which are refused."""
    return {key: text or "q" for key, text in record.items()}


def in_order(records):
    """The records in the order in which a run of seed 0 uses them; TRL uses them as they are given."""
    return [records[i] for i in SampleOrder(len(records), 0).indices(0, len(records))]


@pytest.mark.long
@pytest.mark.parametrize("processes", [1, 4])
@pytest.mark.parametrize("kind", ["kto", "apo_zero_unpaired"])
def test_run_of_kto_equals_trls(kind, processes, files):
    import trl

    records = [
        {
            "prompt": f"say {i} ",
            "completion": ("ab" if i % 3 else "yz")[: 1 + i % 2] * (1 + i % 4),
            "label": bool(i % 3),
        }
        for i in range(STEPS * SIZE)
    ]
    (files / "kto.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    arguments = [f"kto.reference_policy_kl_penalty={BETA}", "kto.desirable_weight=1.3", f"kto.loss={kind}"]
    arguments += ["kto.mismatched=batch"] if kind == "kto" else []
    metrics, weights = train(files, "kto", f"{kind}{processes}", processes, arguments)
    settings = {
        "beta": BETA, "desirable_weight": 1.3, "loss_type": kind, "per_device_train_batch_size": SIZE,
    }  # fmt: skip
    losses, logs, expected = trained(trl.KTOTrainer, trl.KTOConfig, files, in_order(records), settings, files / "model")
    assert [m["loss"] for m in metrics] == approx32(losses, FORWARD)
    assert [BETA * m["rewards_desirable_sum"] / m["num_desirable_samples"] for m in metrics] == pytest.approx(
        [log["rewards/chosen"] for log in logs], rel=1e-5, abs=1e-5
    )
    if kind == "kto":
        points = [log["kl"] for log in logs]
        assert [m["kl_reference_point"] for m in metrics] == pytest.approx(points, rel=1e-4, abs=1e-5)
        assert max(points) > 1e-3
    check_weights(weights, expected, load_file(files / "model" / "model.safetensors"), kind)


@pytest.mark.long
@pytest.mark.parametrize("processes", [1, 4])
def test_run_of_dft_equals_trls(processes, files):
    import trl

    records = [{"prompt": f"say {i} ", "completion": "abba"[: 1 + i % 4]} for i in range(STEPS * SIZE)]
    (files / "sft.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    metrics, weights = train(files, "sft", f"dft{processes}", processes, ["sft.loss=dft"])
    settings = {"loss_type": "dft", "per_device_train_batch_size": SIZE}
    losses, _, expected = trained(trl.SFTTrainer, trl.SFTConfig, files, in_order(records), settings)
    assert [m["loss"] for m in metrics] == approx32(losses, FORWARD)
    assert all(m["nll_loss"] > m["loss"] for m in metrics)
    check_weights(weights, expected, load_file(files / "model" / "model.safetensors"), "dft")


@pytest.mark.long
@pytest.mark.parametrize("options", ["{preference_loss: aot_unpaired}", "{use_weighting: true}"])
def test_run_of_dpo_does_not_depend_on_layout(options, files):
    """The columns of sorted losses come from the objective, in training, validation and after a resume."""
    (files / "dpo.jsonl").write_text("".join(json.dumps(longer(record)) + "\n" for record in pairs()))
    validation = [f"data.validation={files / 'dpo.jsonl'}", "trainer.validation_interval=1"]
    arguments = [f"dpo={options}", f"dpo.reference_model={files / 'reference'}", *validation]
    name = options.strip("{}").replace(": ", "_")
    one, weights = train(files, "dpo", f"{name}1", 1, arguments)
    four, of_four = train(files, "dpo", f"{name}4", 4, arguments)
    train(files, "dpo", f"{name}resumed", 1, [*arguments, "trainer.max_steps=2"])
    resumed, of_resumed = train(files, "dpo", f"{name}resumed", 1, arguments)
    assert [m["loss"] for m in resumed] == [m["loss"] for m in one], "the losses have no state between steps"
    assert all(torch.equal(of_resumed[key], weight) for key, weight in weights.items())
    two, of_two = train(files, "dpo", f"{name}2", 2, [*arguments, "batch={global_batch_size: 6, packing: false}"])
    for other, of_other in ((four, of_four), (two, of_two)):
        for mine, theirs in zip(other, one, strict=True):
            for key in ("loss", "rewards_chosen_mean", "grad_norm", "validation_loss"):
                assert mine[key] == pytest.approx(theirs[key], rel=2e-5, abs=1e-5), key
        check_weights(of_other, weights, load_file(files / "model" / "model.safetensors"), name)
