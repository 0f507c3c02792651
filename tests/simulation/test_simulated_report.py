"""Tests of the report of a simulated step: memory by kind, products by part, work by replica, time."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from bench_simulator import LINEAR_IN_PACKS, with_packs
from simulated_cases import MIXTURE, config_of, in_processes, memory_of_offloaded_critic, prepare_real_process
from simulated_report import HEAD, MLP, REPORT
from small_models import and_long, make_config, make_model

from mcore_rl.cli.dry_run import first_batch
from mcore_rl.config import DistillationConfig, DPOConfig, GRPOConfig, PPOConfig, SFTConfig
from mcore_rl.config.fp8 import FP8Config
from mcore_rl.config.parallel import ParallelLayout
from mcore_rl.data.batching import MicrobatchPlanner
from mcore_rl.data.datasets import PromptDataset
from mcore_rl.data.token_store import TokenSequence
from mcore_rl.errors import UserError
from mcore_rl.simulation import counters
from mcore_rl.simulation.counters import HostReads, Kernels, LiveBytes, Product, ProductCounter, Transfer
from mcore_rl.simulation.hardware import Hardware
from mcore_rl.simulation.search import describe
from mcore_rl.simulation.sequences import Sequences, sequences_of
from mcore_rl.simulation.step import Implementation, simulate_rank

ROWS, LENGTH, RESPONSE = 8, 384, 192
SEQUENCES = Sequences((LENGTH,) * ROWS, (RESPONSE,) * ROWS)
TOKENS, COUNTED = ROWS * LENGTH, ROWS * RESPONSE
HIDDEN, WIDTH, HEADS, GROUPS, HEAD_DIM, LAYERS, VOCABULARY = 64, 160, 4, 2, 16, 2, 4000
SIZES = {
    "hidden_size": HIDDEN, "intermediate_size": WIDTH, "num_attention_heads": HEADS, "num_key_value_heads": GROUPS,
    "head_dim": HEAD_DIM, "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY,
}  # fmt: skip


def one_pack(path, layout=None, family="llama", model=None, **changes):
    make_config(family, **{**SIZES, **changes}).save_pretrained(path)
    config = config_of(
        path, model={"path": str(path), **(model or {})}, batch={"global_batch_size": ROWS, "tokens_per_pack": TOKENS}
    )
    return (layout or ParallelLayout(tokens_per_pack=TOKENS)).apply(config)


@pytest.mark.long
def test_dense_model_memory_and_products_equal_formulas(tmp_path):
    """The peak is in the computation of logits: one tile, which has all logits, a few numbers per token and, in the
    last stage, the input from the previous stage."""
    staged = ParallelLayout(pp=2, tokens_per_pack=TOKENS)
    configs = [one_pack(tmp_path / "whole"), one_pack(tmp_path / "last", staged)]
    whole, last = in_processes(simulate_rank, (configs[0], 0, 1, SEQUENCES), (configs[1], 1, 2, SEQUENCES))
    for report in (whole, last):
        assert report.peak_phase == "training"
        assert 0 <= report.memory["logits"] - 4 * COUNTED * VOCABULARY < 4 * COUNTED * 16
    assert whole.memory["communication buffers"] == 0
    assert last.memory["communication buffers"] == 4 * TOKENS * HIDDEN
    projections = 2 * HIDDEN * (HEADS + 2 * GROUPS + HEADS) * HEAD_DIM
    of_step = {
        ("training", "projections"): 3 * TOKENS * LAYERS * projections,
        ("training", "MLP"): 3 * TOKENS * LAYERS * 3 * 2 * HIDDEN * WIDTH,
        ("training", "LM head"): 3 * COUNTED * 2 * HIDDEN * VOCABULARY,  # the logits are kept for two gradients
    }
    assert whole.parts == of_step
    head = "training", "LM head"
    assert last.parts == {**{part: operations // 2 for part, operations in of_step.items()}, head: of_step[head]}


MIXTURES = and_long(
    [],
    [({}, ()), ({"recompute_activations": True}, ("projections", "MLP", "router", "experts"))],
    [({"recompute_modules": ["moe"]}, ("router", "experts")), ({"recompute_modules": ["mlp"]}, ("MLP",))],
)


@pytest.mark.parametrize(("model", "twice"), MIXTURES, ids=str)
def test_mixture_products_equal_formulas(model, twice, tmp_path):
    """Every token is routed to all experts; recomputed parts have their forward products twice."""
    experts, width = MIXTURE["num_experts"], MIXTURE["moe_intermediate_size"]
    sizes = {"num_experts": experts, "num_experts_per_tok": experts, "moe_intermediate_size": width}
    config = one_pack(tmp_path, family="qwen3_moe", model=model, **sizes, mlp_only_layers=[0])
    (report,) = in_processes(simulate_rank, (config, 0, 1, SEQUENCES))
    of_token = {
        "projections": LAYERS * 2 * HIDDEN * 2 * (HEADS + GROUPS) * HEAD_DIM,
        "MLP": 3 * 2 * HIDDEN * WIDTH,
        "router": 2 * HIDDEN * experts,
        "experts": experts * 3 * 2 * HIDDEN * width,
    }
    layers = {part: (3 + (part in twice)) * TOKENS * operations for part, operations in of_token.items()}
    assert {part: n for (phase, part), n in report.parts.items() if phase == "training"} == {
        **layers,
        "LM head": 3 * COUNTED * 2 * HIDDEN * VOCABULARY,
    }
    assert {phase for phase, _ in report.parts} == {"training"}


def test_kinds_of_storages_at_a_peak():
    """Receive buffers count as communication from their allocation on, except storages of weights and gradients."""
    kind = "state"
    with LiveBytes("cpu", kind_now=lambda: kind) as live:
        weights = torch.empty(1000)
        kind = "logits"
        tile = torch.empty(500)
        kind = "activations, workspace"
        kept, received = torch.empty(300), torch.empty(200)
        live.receives(received.view(10, 20))
        live.receives(weights[:10])
        live.receives(received)
    of_kind = {"state": 4000, "logits": 2000, "activations, workspace": 1200, "communication buffers": 800}
    assert live.at_peak[""] == of_kind and live.peaks[""] == live.live == 8000
    assert live.is_state(weights) and not live.is_state(received) and not live.is_state(kept)
    del tile, received
    assert live.live == 5200 and live.at_peak[""] == of_kind


def test_work_of_replicas_counts_squares():
    """Two replicas, two packs each: 400 and 100 tokens, and 300 and 200, whose squares are work as well."""
    batching = MicrobatchPlanner(True, 400, 1, 1, dp_size=2, attention_length=100.0)
    lengths = [400, 300, 200, 100]
    units = batching.unit_sizes(lengths, None)
    work = [n + n * n / 100 for n in lengths]
    most, least = work[0] + work[3], work[1] + work[2]
    assert sorted(batching.relative_work(units)) == pytest.approx([2 * x / sum(work) for x in (least, most)])


GPU = Hardware(
    memory_bytes=1e9, memory_bytes_per_second=20.0, flops_per_second={"float32": 100.0}, gpus_per_node=2,
    node_bytes_per_second=10.0, network_bytes_per_second=1.0, host_bytes_per_second=4.0, launch_seconds=0.5,
    product_efficiency=0.5, shape_efficiency={64: {64: 1.0}}, attention_efficiency=0.25, memory_efficiency=0.5,
    transfer_efficiency=0.5,
)  # fmt: skip
BOTH = frozenset({"reduce_scatter", "all_gather"})


def test_hidden_communication():
    """Compute by hand: rings send halves, of 40 bytes in 4 s and of 20 in 2 s; the message over the network takes 6 s.
    A pack computes for 40 s, which hides three of four buckets of gradients and one of two of weights."""
    assert GPU.communication_seconds(REPORT) == GPU.exposed_seconds(REPORT, "float32") == pytest.approx(4 + 2 + 6)
    overlapping = dataclasses.replace(REPORT, overlapped=BOTH)
    assert GPU.exposed_seconds(overlapping, "float32") == pytest.approx(1 + 1 + 6)
    gradients = dataclasses.replace(REPORT, overlapped=frozenset({"reduce_scatter"}))
    assert GPU.exposed_seconds(gradients, "float32") == pytest.approx(1 + 2 + 6)
    of_one_bucket = dataclasses.replace(overlapping, calls={transfer: 1 for transfer in REPORT.calls})
    assert GPU.exposed_seconds(of_one_bucket, "float32") == pytest.approx(12)


def test_hidden_communication_is_no_longer_than_what_hides_it():
    """A pack of 1.5 s: 1 s of its backward pass hides gradients, 0.5 s of its forward pass weights."""
    quick = dataclasses.replace(REPORT, overlapped=BOTH, shapes={MLP: 150}, attention={})
    assert GPU.exposed_seconds(quick, "float32") == pytest.approx(12 - 1 - 0.5)


def test_the_replica_with_most_work_is_waited_for_and_so_is_the_host():
    """20 s of scoring, 80 s of training and 12 s of transfers; 8 bytes to and from the host take 4 s."""
    assert GPU.step_seconds([REPORT], "float32", 1, 1) == pytest.approx(112)
    late = dataclasses.replace(REPORT, work=(0.8, 1.2), host_bytes=8)
    assert GPU.step_seconds([late], "float32", 1, 1) == pytest.approx(150 + 12 + 4)


def test_the_bubble_is_of_what_is_done_with_packs():
    """With four stages and three packs, the bubble is as long as the 100 s of computation and the 6 s of the message;
    weights and gradients are sent once."""
    packs = dataclasses.replace(REPORT, packs=3)
    assert GPU.step_seconds([packs], "float32", 4, 1) == pytest.approx(2 * (100 + 6) + 4 + 2)


def test_messages_are_hidden_by_another_chunk():
    """The 6 s of the message are hidden in packs that take longer, but not in the bubble, here half of them."""
    packs = dataclasses.replace(REPORT, packs=3)
    assert GPU.exposed_seconds(packs, "float32", chunks=2) == pytest.approx(4 + 2)
    assert GPU.step_seconds([packs], "float32", 4, 2) == pytest.approx(100 + 0.5 * (100 + 6) + 4 + 2)
    quick = dataclasses.replace(packs, shapes={MLP: 100}, attention={})
    assert GPU.step_seconds([quick], "float32", 4, 2) == pytest.approx(2 + 4 + 0.5 * (2 + 6) + 4 + 2)


def test_kernels_take_the_time_of_memory():
    """Packs move 300 bytes at 10 bytes a second, also in the bubble; the update moves 50 bytes, once."""
    moved = {("training", "MLP"): 300, ("update", "other"): 50, ("building", "other"): 9999}
    report = dataclasses.replace(REPORT, kernel_bytes=moved, packs=3)
    assert GPU.device_seconds(report, "float32", "training") == pytest.approx(80 + 30)
    assert GPU.step_seconds([report], "float32", 4, 1) == pytest.approx(2 * (100 + 30 + 6) + 5 + 4 + 2)


def test_the_host_may_be_slower_than_the_device():
    """300 launches of 0.5 s take longer than the 106 s of the packs, 20 of the update longer than its 5 s."""
    moved = {("update", "other"): 50}
    report = dataclasses.replace(REPORT, launches={"training": 200, "update": 8, "building": 999}, kernel_bytes=moved)
    assert GPU.step_seconds([report], "float32", 1, 1) == pytest.approx(106 + 5 + 4 + 2)
    report = dataclasses.replace(report, launches={"training": 280, "scoring": 20, "update": 20})
    assert GPU.step_seconds([report], "float32", 1, 1) == pytest.approx(150 + 10 + 4 + 2)


def test_parts_of_an_all_to_all():
    """A rank of four, on nodes of two, has one peer in its node and two in another one; both links work at once. A rank
    of three that is alone in its node sends all across."""
    exchange = Transfer("all_to_all", (0, 1, 2, 3), "training")
    assert GPU.within_and_across(exchange, 80) == (20, 40)
    assert GPU.transfer_seconds(exchange, 80) == pytest.approx(40 / 0.5)
    assert GPU.within_and_across(exchange._replace(ranks=(0, 1, 2)), 90) == (0, 60)
    assert GPU.within_and_across(exchange._replace(ranks=(0, 1)), 80) == (40, 0)
    near = GPU.model_copy(update={"node_bytes_per_second": 0.1})
    assert near.transfer_seconds(exchange, 80) == pytest.approx(20 / 0.1 / 0.5)
    report = dataclasses.replace(REPORT, traffic={exchange: 80}, calls={exchange: 1}, memory={"weights": 8})
    lines = [line.split() for line in describe(config_of("unused"), 4, [report], GPU) if "all_to_all" in line]
    assert [line[1:-1] for line in lines] == [
        ["over", "4", "ranks,", "across", "nodes", "40"],
        ["over", "4", "ranks", "20"],
    ]


def test_rates_of_products_by_shape():
    """Half way between 256 and 1,024, by the logarithm, is 512."""
    table = {64: {256: 0.2, 1024: 0.4}, 256: {256: 0.6, 1024: 1.0}}
    gpu = GPU.model_copy(update={"shape_efficiency": table, "flops_per_second": {"float32": 100.0, "float8": 400.0}})
    for narrow, inner, rate in ((64, 256, 10), (1, 1, 10), (256, 512, 40), (128, 512, 27.5), (999, 9999, 50)):
        of_shape = Product("training", "MLP", "float32", narrow, inner)
        report = dataclasses.replace(
            REPORT, shapes={of_shape: 100, of_shape._replace(dtype="float8"): 400}, attention={}
        )
        assert gpu.device_seconds(report, "float32", "training") == pytest.approx(2 * 100 / rate)


def test_kernels_read_and_write():
    """Bytes of 4 × 8 numbers of 4 bytes: 128."""
    a, b, state = torch.ones(4, 8), torch.ones(4, 8), torch.ones(4, 8)
    rows, place = torch.tensor([2, 0]), ("training", "MLP")
    counter = Kernels("cpu", now=lambda: place, is_state=lambda x: x.data_ptr() == state.data_ptr())

    def chain(x):
        halves = x.exp().sin().chunk(2, dim=1)
        state.add_(x)
        return halves[0] * b[:, :4]

    for run, moved in (
        (lambda: a.view(32).unsqueeze(0), 0),
        (lambda: torch.empty(8), 0),
        (lambda: torch.zeros(4, 8), 128),
        (lambda: a + b, 384),
        (lambda: a + torch.ones(1).expand(4, 8), 4 + 256 + 4),
        (lambda: a.sum(), 128 + 4),
        (lambda: a.copy_(b), 256),
        (lambda: a.add_(b), 384),
        (lambda: a.index_select(0, rows), 16 + 128 // 2 * 2),
        (lambda: a.index_add_(0, rows, b[:2]), 16 + 3 * 64),
        (lambda: torch._foreach_mul_([a, b], 2.0), 512),
        (lambda: torch.add(a, 1, out=b), 256),
        (lambda: a @ b.T, 0),
        (lambda: state.clone(), 256),
        (lambda: counter.fused(chain)(a), 128 + 2 * 128 + 64 + 64),  # a; state, twice; a half of b; the result
    ):
        before = counter.bytes[place]
        with counter:
            run()
        assert counter.bytes[place] - before == moved, moved
    assert counter.of_weights == {place: 256}
    assert counter.of_gradients["training"] == 0  # inside of a marked function nothing is told apart
    with counter:
        state.add_(a)
    assert counter.of_gradients["training"] == 64
    assert counter.launches["training"] == 15  # without views and empty tensors; the expanded number is written first


def test_kinds_of_products():
    """Three experts share 12 rows, so each has 4; their weights' gradients sum over 4 rows."""
    a, ends = torch.ones(12, 16, dtype=torch.bfloat16), torch.tensor([4, 8, 12], dtype=torch.int32)
    weights = torch.ones(3, 16, 32, dtype=torch.bfloat16)
    counter = ProductCounter(lambda: ("training", "MLP"), lambda x: x.ndim == 3)
    with counter:
        torch.addmm(torch.ones(12, 8), torch.ones(12, 16), torch.ones(16, 8))
        if hasattr(torch.ops.aten, "_grouped_mm"):
            torch._grouped_mm(a, weights, offs=ends)
    expected = {("float32", 8, 16): 2 * 12 * 16 * 8}
    if hasattr(torch.ops.aten, "_grouped_mm"):
        expected["bfloat16", 4, 16] = 2 * 12 * 16 * 32
        assert Product.of("", "", a.T, torch.ones(12, 32), ends)[-2:] == (16, 4)
        assert counter.operands == {("training", "MLP"): 12 * 16 + 16 * 8 + 12 * 16}
    assert {kind[2:]: n for kind, n in counter.counts.items()} == expected


@pytest.mark.long
def test_counts_are_linear_in_packs(tmp_path):
    """The benchmark of published steps relies on it, also with a pipeline."""
    make_config("llama", **SIZES).save_pretrained(tmp_path)
    calls = []
    for packs in (2, 4, 7):
        batch = {"global_batch_size": packs, "tokens_per_pack": LENGTH}
        config = ParallelLayout(pp=2, tokens_per_pack=LENGTH).apply(config_of(tmp_path, batch=batch))
        calls.append((config, 1, 2, Sequences((LENGTH,) * packs, (RESPONSE,) * packs)))
    few, more, most = in_processes(simulate_rank, *calls)
    expected = with_packs(7, few, more)
    for name in LINEAR_IN_PACKS:
        assert getattr(expected, name) == getattr(most, name), name
    assert expected.packs == most.packs == 7 and expected.peak == pytest.approx(most.peak, rel=0.01)


HALF = {"weights": 200, "gradients": 400, "optimizer": 1200}


def test_precisions_of_an_estimate():
    """AdamW's state has a copy of the weights and two moments of the same size; a moment in bfloat16 is half of it."""
    adam = dataclasses.replace(REPORT, memory=HALF, kernel_bytes={("update", "other"): 5000})
    report = Implementation(moments="bfloat16").of(adam)
    assert report.memory == {**HALF, "optimizer": 800}
    assert report.kernel_bytes == {("update", "other"): 5000 - 2 * 400}

    moved = {("training", "other"): 1000}
    summed = dataclasses.replace(adam, kernel_bytes=moved, gradient_elements={"training": 200})
    report = Implementation(gradients="bfloat16").of(summed)
    assert report.memory == {**HALF, "gradients": 200}
    assert report.kernel_bytes == {("training", "other"): 600}
    reduced = {kind: size for kind, size in REPORT.traffic.items() if kind.operation == "reduce_scatter"}
    assert report.traffic == {**REPORT.traffic, **{kind: size // 2 for kind, size in reduced.items()}}

    copies = {("training", "other"): 150}
    report = Implementation(transformer_engine=True).of(dataclasses.replace(summed, copied_weights=copies))
    assert report.kernel_bytes == {("training", "other"): 1000 - 150 - 200}


@pytest.mark.parametrize(
    ("recipe", "cast", "copies"),
    [("tensorwise", 6, 2), ("blockwise", 4 + 1 / 16, 2 + 1 / 16), ("mxfp8", 4 + 1 / 16, 2 + 1 / 16)],
)
def test_products_in_fp8(recipe, cast, copies):
    """Only linear layers are in FP8. Their factors are cast, in training once for two products, and their weights in
    each update. FP8 has Transformer Engine's layers."""
    operands = {("training", "MLP"): 3200, ("training", "LM head"): 999, ("scoring", "MLP"): 320}
    plain = dataclasses.replace(REPORT, memory=HALF, operands=operands, linear_weights=64, updates=2)
    implementation = Implementation().with_fp8(FP8Config(recipe=recipe))
    assert implementation == Implementation(transformer_engine=True, products=recipe)
    assert Implementation().with_fp8(None) == Implementation()
    report = implementation.of(plain)
    assert report.memory == {**HALF, "weights": 200 + 64 * copies}
    in_fp8 = MLP._replace(dtype="float8")
    assert report.shapes == {in_fp8: 2000, HEAD: 1000, in_fp8._replace(phase="scoring"): 1000}
    assert report.kernel_bytes == {
        ("training", "MLP"): 1600 * cast, ("scoring", "MLP"): 320 * cast, ("update", "other"): 2 * 64 * cast,
    }  # fmt: skip
    assert report.parts == REPORT.parts
    half = implementation.of(dataclasses.replace(plain, part_in_fp8=0.5))
    assert half.memory == {**HALF, "weights": 200 + 32 * copies} and half.parts == REPORT.parts
    assert half.shapes[in_fp8] == half.shapes[MLP] == 1000


def test_a_replica_without_rows_gives_no_estimate():
    idle, config = dataclasses.replace(REPORT, work=(0.0, 1.5)), config_of("unused")
    assert list(describe(config, 4, [idle], GPU))[-1].startswith("no estimate: ")
    assert list(describe(config, 4, [REPORT], GPU))[-1] == list(describe(config, 4, [REPORT, idle], GPU))[-1]


@pytest.mark.parametrize(
    ("gpu", "said"),
    [
        ({**GPU.model_dump(), "product_efficiency": 6}, "gpu: product_efficiency: .* less than or equal to 1"),
        (5, "gpu: must be a mapping, as in .*hardware.yaml, not 5"),
    ],
)
def test_hardware_that_is_none(gpu, said, tmp_path):
    (tmp_path / "gpus.yaml").write_text(json.dumps({"gpu": gpu}))
    with pytest.raises(UserError, match=said):
        Hardware.load(f"{tmp_path / 'gpus.yaml'}:gpu")


@pytest.mark.parametrize(
    ("text", "wanted", "said"),
    [
        ("{}", "gpu", "the file is empty; for a GPU that a file of yours describes, write FILE:NAME"),
        ("4090: {}\na: {}", "b", "must be one of 4090, a; for a GPU that a file of yours describes, write FILE:NAME"),
        ("4090: {}", "4090", "4090: memory_bytes: Field required"),
    ],
)
def test_kinds_of_hardware(text, wanted, said, tmp_path):
    """Names of kinds of hardware may be numbers."""
    (tmp_path / "gpus.yaml").write_text(text)
    with pytest.raises(UserError, match=said):
        Hardware.load(f"{tmp_path / 'gpus.yaml'}:{wanted}")


def test_where_the_host_waits(monkeypatch):
    """The places are in the package's files, whatever the names of the parent directories are, and not in functions
    that stand in for those of CUDA."""
    root, reads = counters.PACKAGE, HostReads("training")
    files = [
        root / "algorithms" / "grpo.py",
        root / "platform" / "cpu.py",
        root / "simulation" / "watch.py",
        root.parent / "megatron" / "optimizer.py",
    ]
    stack = [SimpleNamespace(filename=str(file), lineno=7) for file in files]
    monkeypatch.setattr(counters.traceback, "extract_stack", lambda: stack)
    reads.note()
    assert reads.places == {("training", "grpo.py:7"): 1}
    for above in ("/home/mcore_rl/simulation/mcore_rl", "/x"):
        monkeypatch.setattr(counters, "PACKAGE", Path(above))
        monkeypatch.setattr(counters, "SIMULATION", Path(above) / "simulation")
        stack[:] = [
            SimpleNamespace(filename=f"{above}/{name}", lineno=7) for name in ("simulation/a.py", "models/b.py")
        ]
        stack.append(SimpleNamespace(filename="/home/mcore_rl/.venv/megatron/c.py", lineno=7))
        reads.places.clear()
        reads.note()
        assert reads.places == {("training", "b.py:7"): 1}


ROLLOUTS = {"num_prompts_per_step": 1, "num_generations_per_prompt": 2, "max_new_tokens": 300}


@pytest.mark.long
@pytest.mark.parametrize(
    ("algorithm", "sections", "hidden"),
    [
        (SFTConfig, {}, True),
        (DPOConfig, {"dpo": {"reference": "swap"}}, False),
        (GRPOConfig, {}, False),  # answers before
    ],
)
def test_what_waits_for_weights(algorithm, sections, hidden, tmp_path):
    make_config("llama", **SIZES).save_pretrained(tmp_path)
    config = config_of(
        tmp_path, algorithm, parallel={"overlap_grad_reduce": True, "overlap_param_gather": True}, **sections
    )
    (report,) = in_processes(simulate_rank, (config, 0, 2, SEQUENCES))
    assert ("all_gather" in report.overlapped) == hidden and "reduce_scatter" in report.overlapped


@pytest.mark.parametrize(
    ("length", "turns", "given", "answers"),
    [
        (100, 1, None, 50),
        (384, 1, None, 300),  # a prompt has 84 tokens at most
        (384, 9, None, 192),
        (2, 1, None, 1),
        (100, 1, 0.99, 99),
        (100, 1, 1.0, "have 100 of 100 tokens; max_new_tokens, turns and data.max_sequence_length allow 16 to 99"),
        (384, 1, 0.5, "have 192 of 384 tokens; max_new_tokens, turns and data.max_sequence_length allow 300 to 300"),
        (384, 9, 0.9, 346),
        (300, 9, 0.1, 30),
    ],
)
def test_answers_are_such_as_a_run_can_have(length, turns, given, answers):
    config = config_of(
        "unused", GRPOConfig, grpo=ROLLOUTS, environment={"max_turns": turns, "name": "function", "function": "a:b"}
    )
    if isinstance(answers, str):
        with pytest.raises(UserError, match=answers):
            sequences_of(config, [length], given)
    else:
        assert sequences_of(config, [length], given) == Sequences((length,) * 2, (answers,) * 2)


@pytest.mark.parametrize(("turns", "length"), [(1, 310), (9, 384)])
def test_answers_to_prompts_are_as_long_as_they_may_be(turns, length, monkeypatch):
    environment = {"max_turns": turns, "name": "function", "function": "a:b"}
    config = config_of("unused", GRPOConfig, grpo=ROLLOUTS, environment=environment)
    prompts = PromptDataset([SimpleNamespace(input_ids=(1,) * 10, images=())])
    monkeypatch.setattr(PromptDataset, "order", lambda *_: SimpleNamespace(indices=lambda *_: [0]))
    assert first_batch(config, prompts)[0] == Sequences((length,) * 2, (length - 10,) * 2)


def test_a_student_that_answers_itself_learns_from_its_own_answers():
    """Lengths are the maximum, not those of the records' responses."""
    records = [
        TokenSequence((1,) * n, (False,) * prompt + (True,) * (n - prompt)) for n, prompt in ((9, 4), (370, 350))
    ]
    train = SimpleNamespace(units=[(r,) for r in records], order=lambda _: SimpleNamespace(indices=lambda *_: [0, 1]))
    distillation = {"teacher": "unused", "on_policy": True, "max_new_tokens": 100}
    config = config_of("unused", DistillationConfig, distillation=distillation)
    assert first_batch(config, train)[0] == Sequences((104, 384), (100, 34))


@pytest.mark.long
def test_weights_that_take_each_others_place(tmp_path):
    """To the host and back for a reference, twice; with adapters nothing is moved."""
    pack = one_pack(tmp_path, num_hidden_layers=8)  # whose activations need more than the scoring's logits
    dpo = pack.model_dump(exclude_unset=True, exclude={"sft"}) | {"dpo": {"reference": "swap"}}
    plain, adapters = (
        DPOConfig.model_validate(dpo),
        DPOConfig.model_validate(dpo | {"model": {"path": str(tmp_path), "lora": {"rank": 4}}}),
    )
    moved, alone = in_processes(simulate_rank, *[(config, 0, 1, SEQUENCES) for config in (plain, adapters)])
    assert moved.host_bytes == 4 * 4 * moved.parameters and alone.host_bytes == 0
    assert moved.peak_phase == "training"


@pytest.mark.long
def test_a_message_is_between_two_ranks(tmp_path):
    """The link between these two stages carries the message, whatever the other stages are."""
    config = one_pack(tmp_path, ParallelLayout(pp=4, tokens_per_pack=TOKENS), num_hidden_layers=4)
    reports = in_processes(simulate_rank, *[(config, rank, 4, SEQUENCES) for rank in (0, 1)])
    for report, pairs in zip(reports, ({(0, 1)}, {(0, 1), (1, 2)}), strict=True):
        for operation in ("send", "recv"):
            assert {kind.ranks for kind in report.traffic if kind.operation == operation} == pairs


@pytest.mark.long
def test_what_is_moved_to_the_host_and_back(tmp_path):
    """An fp32 model has two moments of 4 bytes per parameter (its weights are their own fp32 copy)."""
    config = one_pack(tmp_path)
    config = config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"offload": True})})
    (report,) = in_processes(simulate_rank, (config, 0, 1, SEQUENCES))
    assert report.host_bytes == pytest.approx(2 * 8 * report.parameters, rel=0.01)


def ppo_of(path, **critic):
    rollouts = {"num_prompts_per_step": 4, "num_generations_per_prompt": 2, "max_new_tokens": 192}
    return config_of(path, PPOConfig, ppo=rollouts, critic=critic, batch={"tokens_per_pack": TOKENS})


@pytest.mark.long
def test_a_critic_that_goes_to_the_host(tmp_path):
    """The memory that a real critic releases does not count while the policy is trained."""
    path = make_model("llama", tmp_path, **SIZES)
    at_hand, away = (ppo_of(path, offload=offload) for offload in (False, True))
    both = ppo_of(path, offload=True, optimizer={"offload": True})
    reports = in_processes(simulate_rank, *[(config, 0, 1, SEQUENCES) for config in (at_hand, away, both)])
    ((freed, zeros),) = in_processes(memory_of_offloaded_critic, (at_hand, SEQUENCES), prepare=prepare_real_process)
    assert [report.peak_phase for report in reports] == ["training"] * 3
    assert [reports[0].peak - report.peak for report in reports] == [0, freed, freed]
    for kind in ("weights", "gradients", "optimizer"):
        assert reports[1].memory[kind] == reports[2].memory[kind] < reports[0].memory[kind]
    # There and back for values, and again to be trained; an offloaded optimizer's state for its update alone.
    weights = reports[0].memory["weights"] - reports[1].memory["weights"]
    kept = freed - zeros
    assert [report.host_bytes for report in reports] == [0, 4 * kept, 4 * weights + 2 * (kept - weights)]


OVERLAPPING = {"overlap_grad_reduce": True, "overlap_param_gather": True}


@pytest.mark.long
def test_weights_and_gradients_are_told_from_activations(tmp_path):
    """At TP2 with sequence parallelism and DP2: gradients in fp32 once, weights once, whether they overlap or not."""
    layout = ParallelLayout(tp=2, sp=True, dp=2, tokens_per_pack=TOKENS)
    config = one_pack(tmp_path, layout)
    parallel = config.parallel.model_copy(update=OVERLAPPING)
    overlapping = config.model_copy(update={"parallel": parallel})
    for report in in_processes(simulate_rank, *[(c, 0, 4, SEQUENCES) for c in (config, overlapping)]):
        of_state = {t: size for t, size in report.traffic.items() if t.of_state}
        assert {transfer.ranks for transfer in of_state} == {(0, 2)}
        for operation in ("reduce_scatter", "all_gather"):
            moved = sum(size for transfer, size in of_state.items() if transfer.operation == operation)
            assert moved == pytest.approx(4 * report.parameters, rel=0.01)
    assert report.overlapped == BOTH
