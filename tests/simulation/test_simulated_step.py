"""Tests that a simulated rank has the costs of a real one: operations and transfers exactly, memory approximately."""

import json
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from ports import free_port
from safetensors.torch import load_file, save_file
from simulated_cases import (
    EQUAL,
    LENGTHS,
    MIXTURE,
    SEQUENCES,
    call,
    config_of,
    in_processes,
    prepare_real_process,
    real_rank,
)
from small_models import and_long, make_config, make_model

from mcore_rl.config import DistillationConfig, DPOConfig, GRPOConfig, KTOConfig, PPOConfig, SFTConfig
from mcore_rl.config.parallel import ParallelLayout
from mcore_rl.errors import UserError
from mcore_rl.simulation.counters import Transfer
from mcore_rl.simulation.rank import PHASES
from mcore_rl.simulation.search import chosen_ranks, simulate
from mcore_rl.simulation.sequences import Sequences
from mcore_rl.simulation.step import simulate_loading, simulate_rank


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Index tensors, which count on a CPU as well, and gloo's copies of reduced tensors are smaller than
    activations."""
    directory = tmp_path_factory.mktemp("simulated")
    return make_model(
        "llama", directory, hidden_size=256, intermediate_size=640, num_attention_heads=8, num_key_value_heads=8,
        num_hidden_layers=4, head_dim=32,
    )  # fmt: skip


def by_kind(report):
    """Bytes and calls of the step's transfers."""
    assert report.traffic.keys() == report.calls.keys()
    kinds = [kind for kind in report.traffic if kind.phase in PHASES]
    return {kind: (report.traffic[kind], report.calls[kind]) for kind in kinds}


def compare(config, layout, sequences):
    """Return the simulated first and last ranks, and those of a real run."""
    config, size, port = layout.apply(config), layout.world_size, free_port()
    ranks = [(config, rank, size, port, sequences) for rank in range(size)]
    real = in_processes(real_rank, *ranks, prepare=prepare_real_process)
    chosen = sorted({0, size - 1})
    simulated = in_processes(simulate_rank, *[(config, rank, size, sequences, "cpu") for rank in chosen])
    for one, other in zip([real[rank] for rank in chosen], simulated, strict=True):
        assert other.products["training"] > 0
        assert all(other.products[phase] == one.products[phase] for phase in set(PHASES) & set(one.products))
        assert other.parts == one.parts
        assert (other.packs, other.tokens, other.parameters) == (one.packs, one.tokens, one.parameters)
        assert (other.work, other.model_flops) == (one.work, one.model_flops)
        assert by_kind(other) == by_kind(one)
        for kind in ("weights", "gradients", "optimizer"):
            assert other.memory[kind] == one.memory[kind]
        assert other.peak == pytest.approx(one.peak, rel=0.02), (one.memory, other.memory)


LAYOUTS = and_long(
    [],
    [ParallelLayout(), ParallelLayout(pp=2), ParallelLayout(tp=2, cp=2, sp=True)],
    [
        ParallelLayout(tp=2, sp=True), ParallelLayout(cp=2),
        ParallelLayout(dp=2), ParallelLayout(tp=2), ParallelLayout(tp=2, pp=2),
        ParallelLayout(pp=2, vpp=2), ParallelLayout(packing=False), ParallelLayout(pp=2, vpp=2, stages="E|ttt|t|L"),
    ],
)  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_simulated_rank_equals_real_rank(layout, model):
    compare(config_of(model), layout, SEQUENCES)


@pytest.mark.parametrize(
    "layout", and_long([], [], [ParallelLayout(tp=2, cp=2, sp=True), ParallelLayout(), ParallelLayout(pp=2)]), ids=str
)
def test_simulated_rank_with_delta_nets_equals_real_rank(layout, tmp_path):
    sizes = {"hidden_size": 256, "intermediate_size": 640, "linear_key_head_dim": 32, "linear_value_head_dim": 32}
    compare(config_of(make_model("qwen3_5", tmp_path / "model", **sizes)), layout, SEQUENCES)


@pytest.mark.parametrize(
    ("family", "sizes", "layout"),
    and_long(
        [],
        [],
        [
            ("kimi_linear", {"linear_head_dim": 32}, ParallelLayout(tp=2, cp=2, sp=True)),
            ("kimi_linear", {"linear_head_dim": 32}, ParallelLayout(pp=2)),
            ("mimo_v2_flash", {"head_dim": 48, "v_head_dim": 32}, ParallelLayout(tp=2, cp=2, sp=True)),
            ("mimo_v2_flash", {"head_dim": 48, "v_head_dim": 32}, ParallelLayout(pp=2)),
            ("mistral4", {}, ParallelLayout(tp=2, cp=2, sp=True)),
            (
                "minimax_m3",
                {"intermediate_size": 64, "dense_intermediate_size": 640, "index_head_dim": 16},
                ParallelLayout(tp=2, cp=2, sp=True),
            ),
            ("gemma4", {"global_head_dim": 32}, ParallelLayout(pp=2)),
            ("gemma4_e", {"hidden_size_per_layer_input": 32}, ParallelLayout(tp=2, cp=2, sp=True)),
        ],
    ),
    ids=str,
)
def test_simulated_rank_of_other_families_equals_real_rank(family, sizes, layout, tmp_path):
    path = make_model(family, tmp_path / "model", **{"hidden_size": 256, "intermediate_size": 640, **sizes})
    compare(config_of(path), layout, SEQUENCES)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", [ParallelLayout(tp=2, cp=2, sp=True), ParallelLayout(pp=2)], ids=str)
def test_simulated_rank_with_mamba_equals_real_rank(layout, tmp_path):
    """Layers have one block each: Mamba-2, attention or an MLP without gate."""
    sizes = {"hidden_size": 256, "intermediate_size": 640, "mamba_head_dim": 32, "ssm_state_size": 32}
    compare(config_of(make_model("nemotron_h", tmp_path / "model", **sizes)), layout, SEQUENCES)


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """A smaller model of another family, and a reward model; the vocabulary is the policy's."""
    root = tmp_path_factory.mktemp("others")
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 2}
    small = make_model("qwen2", root / "small", **sizes, intermediate_size=320)
    judge = shutil.copytree(small, root / "judge")
    config = json.loads((judge / "config.json").read_text())
    config |= {"architectures": ["Qwen2ForSequenceClassification"], "num_labels": 1, "tie_word_embeddings": False}
    (judge / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor for name, tensor in load_file(judge / "model.safetensors").items() if "lm_head" not in name}
    save_file({**tensors, "score.weight": torch.randn(1, 128)}, judge / "model.safetensors", {"format": "pt"})
    return SimpleNamespace(small=str(small), judge=str(judge))


ROLLOUTS = {"num_prompts_per_step": 4, "num_generations_per_prompt": 2, "max_new_tokens": 192}
PAIRS = {"global_batch_size": 4, "tokens_per_pack": 768}
BESIDE = {
    "reference": (DPOConfig, lambda o: {"dpo": {"reference_model": o.small, "reference": "swap"}, "batch": PAIRS}),
    "swapped": (DPOConfig, lambda o: {"dpo": {"reference": "swap"}, "batch": PAIRS}),
    "mismatched": (KTOConfig, lambda o: {}),
    "teacher": (DistillationConfig, lambda o: {"distillation": {"teacher": o.small, "topk": 4}}),
    "whole teacher": (DistillationConfig, lambda o: {"distillation": {"teacher": o.small, "topk": None}}),
    "judge": (GRPOConfig, lambda o: {"grpo": ROLLOUTS, "environment": {"name": "reward_model", "path": o.judge}}),
    "critic": (PPOConfig, lambda o: {"ppo": ROLLOUTS, "critic": {"path": o.judge}}),
    "own critic": (PPOConfig, lambda o: {"ppo": ROLLOUTS}),
}
MODELS = and_long(
    [],
    [
        ("critic", ParallelLayout(tp=2, sp=True)),
        ("whole teacher", ParallelLayout()),
    ],
    [
        (case, layout)
        for case in BESIDE
        for layout in (ParallelLayout(), ParallelLayout(tp=2, sp=True), ParallelLayout(pp=2, dp=2))
    ],
)


@pytest.mark.parametrize(("case", "layout"), MODELS, ids=str)
def test_simulated_rank_with_several_models_equals_real_rank(case, layout, model, others):
    algorithm, sections = BESIDE[case]
    compare(config_of(model, algorithm, **sections(others)), layout, SEQUENCES)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """Every token is routed to all experts: the only routing that is balanced for all weights."""
    return make_model("qwen3_moe", tmp_path_factory.mktemp("mixture"), **MIXTURE)


GROUPED = {"dtype": "bfloat16", "moe_grouped_gemm": True}
MIXTURES = and_long(
    [],
    [
        (ParallelLayout(dp=2, ep=2), GROUPED),
        (ParallelLayout(tp=2, sp=True, ep=2, etp=1), {}),
        (ParallelLayout(pp=2, dp=2, ep=2), {}),
    ],
    [
        (ParallelLayout(dp=2, ep=2), {}),
        (ParallelLayout(), {}),
        (ParallelLayout(), {"recompute_activations": True}),
        (ParallelLayout(cp=2, ep=2), {}),
        (ParallelLayout(tp=2, sp=True, dp=2, ep=2), {}),
        (ParallelLayout(dp=2), {}),
        (ParallelLayout(pp=2), {}),
        (ParallelLayout(cp=2), {}),
        (ParallelLayout(tp=2, sp=True), {}),
    ],
)


@pytest.mark.parametrize(("layout", "options"), MIXTURES, ids=lambda x: " ".join(x) if isinstance(x, dict) else str(x))
def test_simulated_rank_of_mixture_equals_real_rank(layout, options, mixture):
    config = config_of(mixture, model={"path": str(mixture), **options})
    compare(config, layout, EQUAL)


OTHER_MIXTURES = {
    "gpt_oss": {"hidden_size": 256, "intermediate_size": 128, "num_experts_per_tok": 8},
    "deepseek_v3": {"hidden_size": 256, "moe_intermediate_size": 128, "num_experts_per_tok": 8, "topk_group": 4},
}
OTHER_MIXTURES["deepseek_v4"] = {"hidden_size": 256, "moe_intermediate_size": 128, "num_experts_per_tok": 8}
OTHER_MIXTURES["qwen4"] = {
    **OTHER_MIXTURES["deepseek_v4"],
    "shared_expert_intermediate_size": 256,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "hc_lowrank": 64,
}
OTHER_MIXTURES["glm5_next"] = OTHER_MIXTURES["deepseek_v3"]
OTHER_MIXTURES["hy_v4"] = {**OTHER_MIXTURES["deepseek_v3"], "topk_group": 1}
OTHER_MIXTURES["nemotron_h_moe"] = {
    **OTHER_MIXTURES["deepseek_v3"],
    "intermediate_size": 640,
    "moe_shared_expert_intermediate_size": 256,
    "moe_latent_size": 128,
    "mamba_head_dim": 32,
    "ssm_state_size": 32,
}
OTHER_MIXTURES["deepseek_v32"] = OTHER_MIXTURES["glm_moe_dsa"] = OTHER_MIXTURES["deepseek_v3"]


@pytest.mark.parametrize(
    ("family", "layout"),
    and_long(
        [],
        [
            ("gpt_oss", ParallelLayout(dp=2, ep=2)),
            ("deepseek_v32", ParallelLayout(cp=2, ep=2)),
        ],
        [
            ("deepseek_v3", ParallelLayout(tp=2, sp=True, ep=2, etp=1)),
            ("deepseek_v32", ParallelLayout(tp=2, sp=True, ep=2, etp=1)),
            ("glm_moe_dsa", ParallelLayout(pp=2)),
            ("hy_v4", ParallelLayout(pp=2)),
            ("glm5_next", ParallelLayout(cp=2, ep=2)),
            ("deepseek_v4", ParallelLayout(cp=2, ep=2)),
            ("qwen4", ParallelLayout(cp=2, ep=2)),
            ("qwen4", ParallelLayout(tp=2, pp=2, sp=True)),
            ("hy_v4", ParallelLayout(tp=2, sp=True, ep=2, etp=1)),
            ("nemotron_h_moe", ParallelLayout(cp=2, ep=2)),
            ("nemotron_h_moe", ParallelLayout(tp=2, sp=True, ep=2, etp=1)),
        ],
    ),
    ids=str,
)
def test_simulated_rank_of_other_mixture_equals_real_rank(family, layout, tmp_path):
    path = make_model(family, tmp_path / "model", **OTHER_MIXTURES[family])
    compare(config_of(path, model={"path": str(path)}), layout, EQUAL)


@pytest.mark.long
def test_balanced_routing(tmp_path):
    """By arithmetic, a rank with T tokens sends and receives T·topk rows in each direction, and its experts multiply as
    many."""
    layers, hidden, width, experts, ep, tokens = 4, 256, 128, 8, 4, 2 * 192
    configs = []
    for topk in (2, 3):
        sizes = {**MIXTURE, "num_experts": experts, "num_experts_per_tok": topk, "mlp_only_layers": []}
        make_config("qwen3_moe", **sizes).save_pretrained(tmp_path / str(topk))
        configs.append(ParallelLayout(dp=4, ep=ep).apply(config_of(tmp_path / str(topk))))
    two, three = in_processes(simulate_rank, *[(config, 1, 4, EQUAL) for config in configs])
    assert two.packs == 1 and two.tokens == (tokens, tokens)
    for topk, report in ((2, two), (3, three)):
        rows = tokens * topk
        sent = {
            kind: (report.traffic[kind], report.calls[kind]) for kind in report.traffic if kind.ranks == (0, 1, 2, 3)
        }
        exchange = Transfer("all_to_all", (0, 1, 2, 3), "training")
        # There and back, both again for the gradients; the weights go there, their gradients back.
        assert sent[exchange] == (layers * 4 * rows * (4 * hidden) + layers * 2 * rows * 4, layers * 6)
    multiplied = 3 * 2 * hidden * width  # gate, up and down of a row; the backward pass takes twice that
    assert three.products["training"] - two.products["training"] == 3 * multiplied * tokens * layers


@pytest.mark.long
def test_imbalanced_routing(tmp_path):
    """A rank whose experts get 1.5 times the mean exchanges and multiplies as much more, and keeps more."""
    sizes = {**MIXTURE, "num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": []}
    make_config("qwen3_moe", **sizes).save_pretrained(tmp_path)
    config = ParallelLayout(dp=4, ep=4).apply(config_of(tmp_path))
    even, full = in_processes(
        simulate_rank, (config, 1, 4, EQUAL, "cuda"), (config, 1, 4, EQUAL, "cuda", 1.5)
    )  # fmt: skip
    exchange = Transfer("all_to_all", (0, 1, 2, 3), "training")
    assert full.traffic[exchange] == 1.5 * even.traffic[exchange]
    assert full.parts["training", "experts"] == 1.5 * even.parts["training", "experts"]
    others = {place: n for place, n in even.parts.items() if place[1] != "experts"}
    assert others == {place: n for place, n in full.parts.items() if place[1] != "experts"}
    assert full.peak > even.peak
    assert full.kernel_bytes["training", "experts"] > 1.3 * even.kernel_bytes["training", "experts"]


@pytest.mark.long
def test_grouped_products_are_as_many_as_single_ones(tmp_path):
    """Which torch counts itself."""
    make_config("qwen3_moe", **{**MIXTURE, "num_experts_per_tok": 2}).save_pretrained(tmp_path)
    model = {"path": str(tmp_path), **GROUPED}
    configs = [config_of(tmp_path, model={**model, "moe_grouped_gemm": grouped}) for grouped in (False, True)]
    single, grouped = in_processes(
        simulate_rank, *[(ParallelLayout(ep=2, dp=2).apply(c), 0, 2, EQUAL) for c in configs]
    )
    assert grouped.products == single.products and grouped.traffic == single.traffic


ALGORITHMS = [
    pytest.param(SFTConfig, {}, id="sft", marks=pytest.mark.long),
    pytest.param(DPOConfig, {"dpo": {"reference": "swap"}}, id="dpo", marks=pytest.mark.long),
    pytest.param(
        GRPOConfig,
        {
            "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 4, "max_new_tokens": 8},
            "loss": {"reference_policy_kl_penalty": 0.1, "force_on_policy_ratio": False},
            "batch": {"tokens_per_pack": 768},
        },
        id="grpo",
        marks=pytest.mark.long,
    ),
]


def waits_among_microbatches(report, phase="training"):
    """Before the first one ranks agree on numbers of packs and of tokens; after the last a critic's values are read."""
    of_phase = {place: count for (name, place), count in report.host_reads.items() if name == phase}
    agreed = [place for place in of_phase if place.startswith("batched_data_dict.py")]
    assert sum(of_phase.pop(place) for place in agreed) <= 2
    return {place: count for place, count in of_phase.items() if phase == "training" or "forward_step" in place}


@pytest.mark.parametrize(("algorithm", "sections"), ALGORITHMS)
def test_step_has_no_host_wait_between_microbatches(algorithm, sections, model):
    """Only before them, and where results of the whole batch are read: a score's rows, and the gradient's norm."""
    config = config_of(model, algorithm, **sections)
    layout = ParallelLayout(tp=2, cp=2, pp=2, dp=2, sp=True).apply(config)
    (report,) = in_processes(simulate_rank, (layout, 9, 16, Sequences(2 * LENGTHS, 2 * SEQUENCES.responses)))
    places = {(phase, place.partition(":")[0]) for phase, place in report.host_reads}
    assert not waits_among_microbatches(report)
    assert {place for phase, place in places if phase == "scoring"} <= {"scoring.py", "batched_data_dict.py"}
    assert report.parameters and report.packs > 1


@pytest.mark.long
def test_models_in_their_own_layout_hold_their_own_share_of_the_weights(model, others):
    """The teacher's weights are divided by its own tensor parallelism, the student's are whole."""
    held = []
    for layout in (None, {"tensor_model_parallel_size": 4}):
        distillation = {"teacher": others.small, "topk": 4, "teacher_parallel": layout}
        config = config_of(model, DistillationConfig, distillation=distillation)
        (report,) = in_processes(simulate_rank, (config, 0, 4, SEQUENCES))
        held.append(report.memory["weights"])
    small = sum(tensor.nbytes for tensor in load_file(f"{others.small}/model.safetensors").values())
    assert held[0] - held[1] == pytest.approx(0.75 * small, rel=0.02)


@pytest.mark.parametrize("case", and_long([], ["teacher"], ["whole teacher", "judge", "critic", "mismatched"]))
def test_step_of_several_models_has_no_host_wait_between_microbatches(case, model, others):
    algorithm, sections = BESIDE[case]
    layout = ParallelLayout(tp=2, cp=2, pp=2, dp=2, sp=True).apply(config_of(model, algorithm, **sections(others)))
    (report,) = in_processes(simulate_rank, (layout, 9, 16, SEQUENCES))
    assert not waits_among_microbatches(report) and not waits_among_microbatches(report, "critic")


def read_in_loss(config):
    from mcore_rl.algorithms.loss_functions import NLLLoss

    plain = NLLLoss.from_logprobs

    def curious(self, logprobs, *args, **kwargs):
        float(logprobs.sum())
        return plain(self, logprobs, *args, **kwargs)

    NLLLoss.from_logprobs = curious
    return simulate_rank(config, 0, 2, SEQUENCES)


@pytest.mark.long
def test_host_read_in_loss_is_counted(model):
    config = ParallelLayout(dp=2).apply(config_of(model))
    (report,) = in_processes(read_in_loss, (config,))
    assert sum(waits_among_microbatches(report).values()) == report.packs


@pytest.mark.long
def test_simulate_loading_same_layout_reads_state_once(model):
    """One rank reads its own files: every element of weights, fp32 weights and moments once."""
    (report,) = in_processes(simulate_loading, (config_of(model), 0, 1, 1))
    assert report.read == report.state > 0


@pytest.fixture(scope="module")
def file(model, tmp_path_factory):
    import yaml

    path = tmp_path_factory.mktemp("config") / "dpo.yaml"
    values = config_of(model, DPOConfig, dpo={}).model_dump(mode="json", exclude_unset=True)
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.mark.long
def test_simulate_script_prints_estimate_and_loading(file):
    layout = "parallel.tensor_model_parallel_size=2"
    done = call(file, "--world-size", 8, "--lengths", "128,60", "--load-from", 4, layout)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("assumed: ")
    assert lines[1].startswith("dpo, 8 processes, float32, 16 sequences of 1,504 tokens a step")
    assert lines[2].startswith("rank 0 (pipeline stage 0): ")
    estimate, loading, loaded = lines[-3:]
    assert estimate.startswith("estimate: ") and "MFU" in estimate
    assert loading == "loading a checkpoint that 4 ranks wrote"
    assert loaded.startswith("  rank 0 (pipeline stage 0): ") and loaded.endswith("%)")
    assert any(line.startswith("  memory: ") and line.endswith("fits 80 GB") for line in lines)


@pytest.mark.long
def test_lengths_need_no_data(file):
    """The records may come from a variable that is not set, as in configs/large."""
    text = file.read_text()
    without = file.with_name("without_data.yaml")
    without.write_text(re.sub(r"(?m)^  train: .*", "  train: ${NO_SUCH_DATA}", text))
    assert "NO_SUCH_DATA" in without.read_text()
    assert call(without, "--world-size", 2, "--lengths", "128,60").returncode == 0
    done = call(without, "--world-size", 2)
    assert done.returncode == 2 and "data.train: the environment variable NO_SUCH_DATA is not set" in done.stderr


@pytest.mark.long
def test_the_script_takes_the_tokens_that_training_takes(file, model, tmp_path):
    """Made once, for both."""
    from mcore_rl.run.setup import load_inputs  # with Megatron, which simulating processes import later

    records = [{"prompt": "a b", "chosen": " c" * n, "rejected": " d" * n} for n in range(1, 9)]
    data, cache = tmp_path / "pairs.jsonl", tmp_path / "cache"
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    done = call(file, "--world-size", 2, f"data.train={data}", f"data.cache_dir={cache}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1].startswith("dpo, 2 processes, float32, 16 sequences of ")

    def stores():
        return {path: path.stat().st_mtime_ns for path in (cache / "tokens").iterdir() if path.is_dir()}

    made = stores()
    section = {"train": str(data), "max_sequence_length": 384, "cache_dir": str(cache)}
    load_inputs(config_of(model, DPOConfig, data=section), world_size=1)
    assert len(made) == 1 and stores() == made


@pytest.mark.long
def test_every_update_of_a_rollout_is_simulated(model):
    config = config_of(model, GRPOConfig)
    twice = config.model_copy(update={"grpo": config.grpo.model_copy(update={"num_updates_per_rollout": 2})})
    one, two = in_processes(simulate_rank, *[(c, 0, 2, SEQUENCES) for c in (config, twice)])
    assert two.model_flops == 2 * one.model_flops
    assert two.products["training"] == 2 * one.products["training"]
    assert two.products["scoring"] and "scoring" not in one.products, "by the weights before the updates"


@pytest.mark.long
def test_weights_that_come_in_the_next_forward_pass_count(model):
    """The model's bytes that are gathered are the same, whenever that is."""
    config = ParallelLayout(dp=2).apply(config_of(model))
    reports = []
    for gathers in (False, True):
        parallel = {"overlap_grad_reduce": True, "overlap_param_gather": gathers}
        overlapping = config.model_copy(update={"parallel": config.parallel.model_copy(update=parallel)})
        reports.append(in_processes(simulate_in_buckets, (overlapping, 0, 2, SEQUENCES))[0])
    gathered = [
        sum(size for transfer, size in report.traffic.items() if transfer.operation == "all_gather")
        for report in reports
    ]
    assert gathered[0] == gathered[1] > 0


def simulate_in_buckets(*arguments):
    from mcore_rl.simulation import step

    plain = step.measure_step

    def measure(*given):
        from mcore_rl.models.megatron.training import optimizer  # not before this process is a simulated one

        optimizer.BUCKET_SIZE = 5_000
        return plain(*given)

    step.measure_step = measure
    return simulate_rank(*arguments)


WRONG = and_long(
    [
        (["--lengths", "999"], "error: --lengths: the longest is 999, more than data.max_sequence_length=384"),
    ],
    [
        (
            ["--lengths", "99", "data.max_sequence_length=9999", "batch.tokens_per_pack=30000"],
            "error: data.max_sequence_length=9999: the model has 1024 positions",
        ),
        (
            ["--lengths", "99", "--expert-imbalance", "2"],
            "error: --expert-imbalance 2: must be at least 1 and at most parallel.expert_mod",
        ),
        (["--lengths", "99", "model.fp8.recipe=blockwise"], "error: model.fp8: is estimated for model.dtype=bfloat16"),
        (
            ["--lengths", "99", "--hardware", "h100", "model.fp8.recipe=mxfp8", "model.dtype=bfloat16"],
            "error: model.fp8.recipe=mxfp8: --hardware h100 computes blockwise, tensorwise",
        ),
        (["--lengths", "99", "--transformer-engine"], "error: --transformer-engine: is estimated for bfloat16 only"),
        (["--lengths", "99", "parallel.tensor_model_parallel_size=3"], "error: parallel: tensor 3 x pipeline 1 x cont"),
        (["--lengths", "99", "parallel.pipeline_model_parallel_size=8"], "error: parallel.pipeline_model_parallel_"),
    ],
)


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=lambda x: " ".join(x) if isinstance(x, list) else "")
def test_simulate_refuses_wrong_arguments_in_one_line(arguments, message, file):
    done = call(file, "--world-size", 8, *arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.startswith(message) and len(done.stderr.splitlines()) == 1, done.stderr


REFUSED = [
    (SFTConfig, {"model": {"moe_grouped_gemm": True}}, "model.moe_grouped_gemm: cannot be simulated in float32"),
    (
        GRPOConfig,
        {"grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 4}, "model": {"moe_router_replay": True}},
        "model.moe_router_replay: cannot be simulated, because the experts are chosen while sampling",
    ),
    (
        SFTConfig,
        {"model": {"mtp_loss_scaling_factor": 0.1}},
        "model.mtp_loss_scaling_factor: layers that predict further tokens cannot be simulated",
    ),
]


@pytest.mark.long
@pytest.mark.parametrize(("algorithm", "sections", "message"), REFUSED, ids=["grouped", "replay", "mtp"])
def test_what_is_refused_of_mixtures(algorithm, sections, message, tmp_path):
    make_config("qwen3_moe").save_pretrained(tmp_path)
    config = config_of(tmp_path, algorithm, **{**sections, "model": {"path": str(tmp_path), **sections["model"]}})
    with pytest.raises(UserError, match=message):
        in_processes(simulate_rank, (config, 0, 2, EQUAL))


@pytest.mark.exhaustive
def test_the_distinct_stages_have_the_largest_peak(tmp_path):
    path = make_model("llama", tmp_path, num_hidden_layers=8)
    config = ParallelLayout(pp=4, stages="Et|ttt|ttt|tL", tokens_per_pack=384).apply(config_of(path))
    reports = simulate(config, 4, chosen_ranks(config, 4, "stages"), SEQUENCES, workers=2)
    peaks = {report.rank: report.peak for report in reports}
    assert max(peaks[rank] for rank in chosen_ranks(config, 4, "distinct")) == max(peaks.values()) == peaks[1]
    assert peaks[1] > peaks[2]
