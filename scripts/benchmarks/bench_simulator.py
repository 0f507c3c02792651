"""Compare the simulator with published steps on NVIDIA's GPUs.

    python scripts/benchmarks/bench_simulator.py [--rows TEXT …] [--workers 2]

The expected agreement is 15 % for seconds and 10 % for memory. Exits with 1 if a row is far from it. Published rows
were measured with Megatron's layers of Transformer Engine. `source` names where each was published. No efficiency of
simulation/hardware.yaml was fitted to a row.
"""

from __future__ import annotations

import functools
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench_results import Row, finish

from mcore_rl.cli.entry_point import Parser, count, exit_on_error
from mcore_rl.config import SFTConfig
from mcore_rl.simulation.hardware import Hardware
from mcore_rl.simulation.search import simulate
from mcore_rl.simulation.sequences import Sequences
from mcore_rl.simulation.step import Implementation, RankReport

TE = Implementation(transformer_engine=True)
SECONDS, MEMORY = (0.85, 1.15), (0.9, 1.1)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-8B": ("Qwen3Config", {
        "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936,
    }),
    "Qwen3-30B-A3B": ("Qwen3MoeConfig", {
        "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
        "num_experts_per_tok": 8, "norm_topk_prob": True, "vocab_size": 151_936,
    }),
    "Mixtral-8x22B": ("MixtralConfig", {
        "hidden_size": 6144, "intermediate_size": 16_384, "num_hidden_layers": 56, "num_attention_heads": 48,
        "num_key_value_heads": 8, "vocab_size": 32_768,
    }),
    "Mixtral-8x7B": ("MixtralConfig", {
        "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 32_000,
    }),
    "Moonlight-16B-A3B": ("DeepseekV3Config", {
        "hidden_size": 2048, "intermediate_size": 11_264, "moe_intermediate_size": 1408, "num_hidden_layers": 27,
        "num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 512, "q_lora_rank": None,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64,
        "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
        "vocab_size": 163_840,
    }),
    "Llama-3-8B": ("LlamaConfig", {
        "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128_256,
    }),
    "Llama-3-70B": ("LlamaConfig", {
        "hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128_256,
    }),
}  # fmt: skip
"""Sizes of config.json of Qwen/Qwen3-8B, Qwen/Qwen3-30B-A3B, mistralai/Mixtral-8x22B-v0.1, mistralai/Mixtral-8x7B-v0.1,
moonshotai/Moonlight-16B-A3B, meta-llama/Meta-Llama-3-8B and meta-llama/Meta-Llama-3-70B on the Hugging Face hub."""


@dataclass(frozen=True)
class Published:
    """A measured step of supervised training.

    layout, context: sizes of TP, PP, virtual chunks and EP; size of CP.
    packs, tokens: number of packs of a step on all GPUs, and tokens of a pack.
    parts: the lengths of a pack's sequences, as divisors of `tokens`.
    source: where the figures were published.
    implementation: kernels and precisions of the measured run that differ from the package's own layers.
    floor: the smallest ratio, or its inverse, with which the benchmark succeeds.
    seconds, gigabytes: time of a step, and peak memory of the rank with the most, or of the last one if `is_last`;
        None if not published.
    """

    model: str
    gpus: int
    layout: tuple[int, int, int, int]
    packs: int
    tokens: int
    source: str
    seconds: float | None = None
    gigabytes: float | None = None
    is_last: bool = False
    hardware: str = "h100"
    context: int = 1
    parts: tuple[int, ...] = (1,)
    implementation: Implementation = TE
    floor: float = 0.85

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(self.tokens // part for part in self.parts) * self.packs

    @property
    def name(self) -> str:
        tp, pp, chunks, ep = self.layout
        sizes = {"TP": tp, "PP": pp, "VP": chunks, "CP": self.context, "EP": ep}
        layout = " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1)
        of = {"tensorwise": "FP8", "mxfp8": "MXFP8", "": ""}[self.implementation.products]
        return " ".join(filter(None, (f"{self.model}, {self.gpus} {self.hardware.upper()}", layout, of)))


def of_utilization(flops_per_token: float, tokens: int, gpus: int, rate: float) -> float:
    """Return the seconds of a step from the published operations per second of a GPU."""
    return flops_per_token * tokens / (gpus * rate)


CARDS = "Megatron-Bridge, model_verification_cards"
SUMMARY = "Megatron-Bridge, docs/performance-summary.md, 25.11"
FOLDING = "arXiv:2504.14960"
IN_BFLOAT16 = Implementation(True, gradients="bfloat16")
MXFP8 = Implementation(True, products="mxfp8", gradients="bfloat16")
ROWS = [
    Published("Qwen3-8B", 16, (1, 1, 1, 1), 1024, 4096, CARDS, 25.07, implementation=IN_BFLOAT16),
    Published(
        "Qwen3-30B-A3B", 16, (1, 1, 1, 16), 1024, 4096, CARDS, 45.65, 61.35, implementation=IN_BFLOAT16, floor=0.8
    ),
    Published(
        "Moonlight-16B-A3B", 8, (2, 1, 1, 8), 4, 4096, CARDS, 0.457, 36.6,
        implementation=Implementation(True, gradients="bfloat16", moments="bfloat16"),
    ),
    Published(
        "Mixtral-8x22B", 128, (2, 8, 1, 8), 256, 4096, FOLDING,
        seconds=of_utilization(243.7e9, 256 * 4096, 128, 487.7e12),
    ),
    Published(
        "Mixtral-8x22B", 512, (4, 8, 1, 8), 256, 65_536, FOLDING, context=8,
        seconds=of_utilization(370.6e9, 256 * 65_536, 512, 0.445 * 989e12),
    ),
    Published(
        "Mixtral-8x7B", 64, (2, 4, 8, 8), 256, 4096, "Megatron-LM, golden values of tests/functional_tests",
        gigabytes=35.506, is_last=True,
    ),
    Published(
        "Llama-3-70B", 64, (4, 8, 5, 1), 128, 8192, SUMMARY, seconds=128 * 8192 / (64 * 1602),
        implementation=Implementation(True, products="tensorwise", gradients="bfloat16"),
    ),
    *(
        Published(
            "Llama-3-8B", 8, (1, 1, 1, 1), 64, 16_384, SUMMARY, seconds=128 * 8192 / (8 * rate), hardware=hardware,
            parts=(2, 2), implementation=MXFP8, floor=0.7,
        )
        for hardware, rate in (("b200", 29_521), ("gb200", 29_789), ("gb300", 36_108))
    ),
    *(
        Published(
            "Qwen3-30B-A3B", 8, (1, 1, 1, 8), 128, 16_384, SUMMARY, seconds=512 * 4096 / (8 * rate), hardware=hardware,
            parts=(4, 4, 4, 4), implementation=MXFP8, floor=0.75,
        )
        for hardware, rate in (("gb200", 23_766), ("gb300", 28_934))
    ),
]  # fmt: skip


def main() -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("--rows", nargs="+", default=[""], help="only rows whose name contains one of these")
    parser.add_argument("--workers", type=count, default=2)
    arguments = parser.parse_args()
    rows = []
    with exit_on_error():
        chosen = [row for row in ROWS if any(text in row.name for text in arguments.rows)]
        for published in chosen:
            rows += compared(published, arguments.workers)
    columns = ("simulated", "published", "ratio")
    return finish("simulator", "Simulated and published steps", columns, rows, keep=len(chosen) == len(ROWS))


@functools.cache
def reports_of(published: Published, workers: int) -> list[RankReport]:
    """Return the reports of a rank of the first and one of the last stage, with the package's own layers.

    All packs are alike. From as many packs as pipeline stages on, all counts grow linearly with the number of packs. If
    there are many, two smaller numbers are simulated (stages, and 2 · stages), and the counts are extrapolated.
    """
    tp, stages, _, _ = published.layout
    replicas = published.gpus // (tp * stages * published.context)
    packs = published.packs // replicas
    if packs <= 2 * stages:
        return simulated(published, workers)
    sizes = (stages * replicas, 2 * stages * replicas)
    few, more = (simulated(replace(published, packs=size), workers) for size in sizes)
    return [with_packs(packs, one, two) for one, two in zip(few, more, strict=True)]


def simulated(published: Published, workers: int) -> list[RankReport]:
    stages, lengths = published.layout[1], published.lengths
    sequences = Sequences(lengths, lengths)
    of_stage = published.gpus // stages
    with tempfile.TemporaryDirectory() as name:
        config = config_of(published, write_model(published.model, Path(name)))
        return simulate(config, published.gpus, sorted({0, (stages - 1) * of_stage}), sequences, workers)


LINEAR_IN_PACKS = (
    "attention", "shapes", "kernel_bytes", "copied_weights", "gradient_elements", "operands", "launches", "traffic",
    "calls",
)  # fmt: skip


def with_packs(packs: int, few: RankReport, more: RankReport) -> RankReport:
    """Extrapolate a rank's reports with `few` and with `more` packs linearly to this number of packs."""
    part = (packs - few.packs) / (more.packs - few.packs)
    values = {}
    for name in LINEAR_IN_PACKS:
        one, two = getattr(few, name), getattr(more, name)
        values[name] = {kind: one.get(kind, 0) + round(part * (n - one.get(kind, 0))) for kind, n in two.items()}
    return replace(more, packs=packs, **values)


def compared(published: Published, workers: int) -> list[Row]:
    gpu = Hardware.load(published.hardware)
    _, pp, chunks, _ = published.layout
    # Rows that differ only in hardware and implementation share a simulation.
    same = replace(published, source="", seconds=None, gigabytes=None, hardware="", implementation=TE)
    reports = [published.implementation.of(report) for report in reports_of(same, workers)]
    found = []
    if published.seconds is not None:
        seconds = gpu.step_seconds(reports, "bfloat16", pp, chunks)
        found.append(("seconds", seconds, published.seconds, SECONDS))
    if published.gigabytes is not None:
        peaks = [report.peak for report in (reports[-1:] if published.is_last else reports)]
        found.append(("GB", max(peaks) / 1e9, published.gigabytes, MEMORY))
    for what, simulated, measured, _ in found:
        print(f"{published.name}: {simulated:.4g} {what}, published {measured:.4g}", flush=True)
    return [
        Row(f"{published.name}: {what}", one, two, one / two, *bounds, floor=published.floor)
        for what, one, two, bounds in found
    ]


def write_model(name: str, directory: Path) -> Path:
    """Write the configuration of a model, without weights."""
    import transformers

    kind, sizes = MODELS[name]
    config = getattr(transformers, kind)(**sizes, max_position_embeddings=131_072, tie_word_embeddings=False)
    config.save_pretrained(directory)
    return directory


def config_of(published: Published, model: Path) -> SFTConfig:
    tp, pp, chunks, ep = published.layout
    parallel: dict[str, Any] = {
        "tensor_model_parallel_size": tp, "sequence_parallel": tp > 1, "pipeline_model_parallel_size": pp,
        "context_parallel_size": published.context, "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": 1 if ep > 1 else None,
        "overlap_grad_reduce": True, "overlap_param_gather": True,
    }  # fmt: skip
    if chunks > 1:
        parallel["virtual_pipeline_model_parallel_size"] = chunks
    return SFTConfig.model_validate(
        {
            "output_dir": "unused",
            "model": {"path": model, "dtype": "bfloat16", "moe_grouped_gemm": ep > 1},
            "data": {"train": "unused", "max_sequence_length": published.tokens},
            "batch": {"global_batch_size": len(published.lengths), "tokens_per_pack": published.tokens},
            "optimizer": {"lr": 1e-5, "adam_beta2": 0.95},
            "trainer": {"max_steps": 1000},
            "parallel": parallel,
        }
    )


if __name__ == "__main__":
    sys.exit(main())
