"""Benchmark one GPU: log-probabilities, training steps of 1B and 8B shapes, generation, checkpoints.

    python scripts/benchmarks/bench_gpu.py PART [--output DIRECTORY] [--rehearse]
    python scripts/benchmarks/bench_gpu.py predict

Each part takes less than ten minutes. Models have random weights, in bfloat16. Steps are compared with the simulation
by `mcore-rl simulate`; `predict` prints only the simulation and needs no GPU. A part exits with 1 if a bound is
missed. With --rehearse everything runs with toy sizes in fp32 on the available device, without bounds.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from bench_results import Row, finish
from device_meter import DeviceMeter, device_name, median_seconds, product_rate
from gpu_steps import CASES, REHEARSED, SHAPES, Case, Measured, measure_case, simulate_case, write_weights

from mcore_rl import platform
from mcore_rl.cli.entry_point import Parser, exit_on_error
from mcore_rl.errors import UserError
from mcore_rl.simulation.hardware import Hardware
from mcore_rl.simulation.step import RankReport
from mcore_rl.utils.console import quiet_libraries

PEAK_MEMORY = (0.9, 1.1)
UTILIZATION = 0.5 if find_spec("transformer_engine") else 0.45
FUSED, FUSED_FLOOR, FUSED_GB, HALF_MASKED = 1.4, 1.7, 0.3, 0.6


def main() -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=[*PARTS, *CASES, "predict"])
    parser.add_argument("--hardware", default="h100", help="name of the GPU in simulation/hardware.yaml")
    parser.add_argument(
        "--output", type=Path, help="directory of the part's JSON and picture; docs/benchmarks if left out"
    )
    parser.add_argument("--rehearse", action="store_true", help="toy sizes on this device, which may be the CPU")
    arguments = parser.parse_args()
    quiet_libraries()
    with exit_on_error():
        part, rehearses = arguments.part, arguments.rehearse
        if part == "predict":
            rows = predictions(Hardware.load(arguments.hardware), arguments.hardware, rehearses)
            return end("predict", f"Predicted for one {arguments.hardware.upper()}", rows, arguments)
        if not (platform.has_gpu() or rehearses):
            raise UserError(
                f"{part}: torch {torch.__version__} sees no GPU; install a torch for CUDA, or add --rehearse"
            )
        if part in CASES:
            rows = steps(REHEARSED[part] if rehearses else CASES[part], Hardware.load(arguments.hardware), rehearses)
        else:
            platform.initialize_platform()
            rows = PARTS[part](rehearses)
        return end(part, f"{part}: {device_name()}, torch {torch.__version__}", rows, arguments)


def end(part: str, title: str, rows: list[Row], arguments: argparse.Namespace) -> int:
    if arguments.rehearse:
        rows = [replace(row, at_least=None, at_most=None, floor=None) for row in rows]
    keep = not arguments.rehearse or arguments.output is not None
    return finish(f"gpu_{part}", title, ("measured", "beside", "ratio, or figure"), rows, keep, arguments.output)


# ------------------------------------------------------------ log-probabilities


def logprobs(rehearses: bool) -> list[Row]:
    """Return the time of forward and backward with the LM head, relative to the three unavoidable products."""
    from mcore_rl.distributed import logprobs
    from mcore_rl.simulation.counters import replaced

    size = (256, 64, 5003) if rehearses else (8192, 4096, 151_936)
    head, kind = Head(*size), "cuda" if platform.has_gpu() else "cpu"
    chosen = logprobs.TILE_SHAPE[kind]

    def tiled(shape: tuple[int, int]) -> Callable[[], None]:
        def run() -> None:
            logprobs.TILE_SHAPE[kind] = shape
            head.fused()
            logprobs.TILE_SHAPE[kind] = chosen

        return run

    def by_torch() -> None:
        with replaced(logprobs, "tile_steps", lambda *_: logprobs.TORCH_STEPS):
            head.fused()

    others = [(1024, 16_384), (2048, 8192), (2048, 16_384), (4096, 8192), (8192, 4096)]
    seconds = median_seconds(
        {
            "products": head.products, "fused": head.fused, "by torch": by_torch, "logits": head.from_logits,
            "half": head.half_masked, "products in fp32": head.products_in_fp32,
            **{str(shape): tiled(shape) for shape in others},
        },
        repetitions=3 if rehearses else 10,
    )  # fmt: skip
    products = seconds["products"]

    def beside(
        name: str, key: str, other: str = "products", at_most: float | None = None, floor: float | None = None
    ) -> Row:
        ratio = seconds[key] / seconds[other]
        return Row(name, seconds[key], seconds[other], ratio, at_most=at_most, floor=floor)

    flops = 6 * size[0] * size[1] * size[2]
    rows = [
        Row.figure("three products", flops / products / 1e12, "TFLOP/s"),
        beside("fused / three products", "fused", at_most=FUSED, floor=FUSED_FLOOR),
        beside("fused by torch operations / three products", "by torch"),
        beside("logits and cross-entropy / three products", "logits"),
        beside("fused, half the tokens masked / none", "half", "fused", HALF_MASKED),
        beside("products in fp32 / in bfloat16", "products in fp32"),
        *(beside(f"fused in tiles of {rows} × {columns}", str((rows, columns))) for rows, columns in others),
    ]
    for name, run, bound in (("fused", head.fused, FUSED_GB), ("logits and cross-entropy", head.from_logits, None)):
        rows.append(Row.figure(f"{name}: memory beside", head.memory_beside(run) / 1e9, "GB", at_most=bound))
    return rows


class Head:
    """Hidden states, targets, and an LM head whose gradient Megatron accumulates in fp32."""

    def __init__(self, tokens: int, hidden: int, vocabulary: int) -> None:
        torch.manual_seed(0)
        device, dtype = ("cuda", torch.bfloat16) if platform.has_gpu() else ("cpu", torch.float32)
        self.hidden = (torch.randn(tokens, hidden, device=device) * 0.3).to(dtype).requires_grad_()
        self.weight: Any = (torch.randn(vocabulary, hidden, device=device) * 0.05).to(dtype).requires_grad_()
        self.weight.main_grad = torch.zeros(vocabulary, hidden, device=device)
        self.weight.grad_added_to_main_grad = False
        self.targets = torch.randint(0, vocabulary, (tokens,), device=device)

    @torch.no_grad()
    def products(self) -> None:
        logits = self.hidden @ self.weight.T
        logits @ self.weight
        logits.T @ self.hidden

    @torch.no_grad()
    def products_in_fp32(self) -> None:
        """Compute the products of an eighth of the tokens eight times: the fp32 logits of all tokens would not fit."""
        hidden, weight = self.hidden[: len(self.hidden) // 8].float(), self.weight.float()
        for _ in range(8):
            logits = hidden @ weight.T
            logits @ weight
            logits.T @ hidden

    def fused(self) -> None:
        self._learn(slice(None))

    def half_masked(self) -> None:
        self._learn(slice(None, None, 2))

    def _learn(self, rows: slice) -> None:
        from mcore_rl.distributed.logprobs import linear_logprobs

        self.hidden.grad = None
        linear_logprobs(self.hidden[rows], self.weight, self.targets[rows])[0].sum().backward()
        self.weight.grad = None

    def from_logits(self) -> None:
        self.hidden.grad = None
        F.cross_entropy(F.linear(self.hidden, self.weight).float(), self.targets, reduction="sum").backward()
        self.weight.grad = None

    def memory_beside(self, run: Callable[[], None]) -> int:
        """Return the peak bytes beyond inputs, weight and the gradient of the hidden states."""
        meter = DeviceMeter()
        self.hidden.grad = None
        meter.forget_peak()
        before = meter.live() + self.hidden.nbytes
        run()
        return meter.peak() - before


# ------------------------------------------------------------ steps


def steps(cases: list[Case], gpu: Hardware, rehearses: bool) -> list[Row]:
    """Return tokens per second and memory, compared with the simulation, and the fraction of the rate of plain
    products."""
    dtype = "float32" if rehearses else "bfloat16"
    rate = product_rate(getattr(torch, dtype))
    rows = [Row.figure("a product of large matrices", rate / 1e12, "TFLOP/s")]
    for case in cases:
        report, measured = in_turn(case, dtype)
        tokens, reached = case.tokens_of_step, measured.flops / measured.seconds / rate
        expected = gpu.step_seconds([report], dtype, 1, 1)
        counts = case.shape == "8b" and case.tokens == 8192 and not (case.recompute or case.lora)
        rows += [
            Row(f"{case.name}: tokens/s", tokens / measured.seconds, tokens / expected, expected / measured.seconds),
            Row.figure(f"{case.name}: MFU", reached, "of products", UTILIZATION if counts else None),
            Row(f"{case.name}: GB", measured.peak / 1e9, report.peak / 1e9, measured.peak / report.peak, *PEAK_MEMORY),
        ]
        print(f"{case.name}: {measured.seconds:.3g} s a step, MFU {reached:.1%}", flush=True)
    return rows


def in_turn(case: Case, dtype: str) -> tuple[RankReport, Measured]:
    """Simulate and measure a case, each in a separate process."""
    with tempfile.TemporaryDirectory() as name:
        report = simulate_case(case, Path(name), dtype)
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            return report, pool.submit(measure_case, case, Path(name), dtype).result()


def predictions(gpu: Hardware, hardware: str, rehearses: bool) -> list[Row]:
    """Return the simulation's figures of all cases."""
    rows = []
    for case in [case for cases in (REHEARSED if rehearses else CASES).values() for case in cases]:
        with tempfile.TemporaryDirectory() as name:
            report = simulate_case(case, Path(name), "bfloat16")
        seconds = gpu.step_seconds([report], "bfloat16", 1, 1)
        rows += [
            Row.figure(f"{case.name}: tokens", case.tokens_of_step / seconds, "/s"),
            Row.figure(f"{case.name}: memory", report.peak / 1e9, "GB", at_most=gpu.memory_bytes / 1e9),
        ]
        print(f"{case.name}: {seconds:.3g} s a step on {hardware}, {report.peak / 1e9:.1f} GB", flush=True)
    return rows


def trace(rehearses: bool) -> list[Row]:
    """Return the number of kernel launches and copies of one step, and the time that the device is idle."""
    from torch.profiler import ProfilerActivity, profile

    from mcore_rl.simulation.rank import Models, run_step
    from mcore_rl.simulation.sequences import invented_batch

    case, dtype = (REHEARSED if rehearses else CASES)["sft_1b"][0], "float32" if rehearses else "bfloat16"
    with tempfile.TemporaryDirectory() as name:
        config = case.config(write_weights(case.write_config(Path(name)), dtype), dtype)
        models = Models.build(config)
    data = models.policy.own_rows(invented_batch(config, case.sequences(config)))
    meter = DeviceMeter()
    for _ in range(2):
        run_step(config, models, data, lambda phase: None)
    meter.wait()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if platform.has_gpu() else [])]
    with profile(activities=activities) as seen:
        run_step(config, models, data, lambda phase: None)
        meter.wait()
    models.policy.shutdown()
    print(
        seen.key_averages().table(sort_by=f"self_{'device' if platform.has_gpu() else 'cpu'}_time_total", row_limit=30)
    )
    on_device = torch.autograd.DeviceType.CUDA if platform.has_gpu() else torch.autograd.DeviceType.CPU
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in seen.events()
        if event.device_type == on_device
        and not event.is_user_annotation  # annotations also cover the gaps between kernels
    )
    busy, until = 0.0, spans[0][0]
    for start, stop, _ in spans:
        busy, until = busy + max(0.0, stop - max(start, until)), max(until, stop)
    copies = [name for *_, name in spans if "memcpy" in name.lower() and "dtod" not in name.lower()]
    return [
        Row.figure(f"{case.name}: kernels and copies of a step", len(spans), "launched"),
        Row.figure(f"{case.name}: copies to and from the host", len(copies), "copies"),
        Row.figure(f"{case.name}: the device is idle", 1 - busy / (until - spans[0][0]), "of the step"),
    ]


# ------------------------------------------------------------ generation, checkpoints


class NoTokenizer:
    """Nothing is decoded here."""

    pad_token_id = 0


def generation(rehearses: bool) -> list[Row]:
    """Return the tokens per second by number of sequences, and the difference of log-probabilities from the
    trainer's."""
    from mcore_rl.distributed.batched_data_dict import BatchedDataDict
    from mcore_rl.models.generation.megatron.generation import MegatronGeneration
    from mcore_rl.models.generation.sampling import SamplingParams
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    shape, prompt, new = ("toy", 16, 16) if rehearses else ("1b", 512, 256)
    dtype, rows = "float32" if rehearses else "bfloat16", []
    case = Case(shape, "sft", 2 * (prompt + new))
    with tempfile.TemporaryDirectory() as name:
        policy = MegatronPolicy(case.config(write_weights(case.write_config(Path(name)), dtype), dtype))
    generator = torch.Generator().manual_seed(0)
    for sequences in (4, 8) if rehearses else (64, 256):
        ids = torch.randint(3, SHAPES[shape]["vocab_size"], (sequences, prompt), generator=generator)
        asked = BatchedDataDict(input_ids=ids, input_lengths=torch.full((sequences,), prompt))
        answers = MegatronGeneration(policy.model, SamplingParams(new), prompt + new, NoTokenizer(), sequences)
        answers.prepare_for_generation()
        outs: list[Any] = []
        seconds = median_seconds({"generate": lambda: outs.append(answers.generate(asked))}, 3)["generate"]  # noqa: B023
        out = outs[-1]
        answers.finish_generation()
        lengths = out["unpadded_sequence_lengths"]
        scored = BatchedDataDict(input_ids=out["output_ids"], input_lengths=lengths, sample_mask=torch.ones(sequences))
        sampled = torch.arange(out["output_ids"].shape[1]) >= prompt
        difference = (policy.get_logprobs(scored)["logprobs"] - out["logprobs"])[:, sampled]
        kl = float((difference.exp() - difference - 1).mean())
        tokens = int((lengths - prompt).sum())
        rows += [
            Row.figure(f"{sequences} sequences", tokens / seconds, "tokens/s"),
            Row.figure(f"{sequences} sequences: KL to the trainer", kl, "nats a token"),
        ]
    policy.shutdown()
    return rows


def checkpoints(rehearses: bool) -> list[Row]:
    """Return the time that training stops for a save."""
    from bench_checkpoints import make_model, measure_stall

    size = (64, 2, 1000) if rehearses else (2048, 16, 128_256)
    sizes = argparse.Namespace(**dict(zip(("hidden", "layers", "vocabulary"), size, strict=True)))
    with tempfile.TemporaryDirectory() as name:
        make_model(Path(name) / "model", sizes)
        row, megabytes = measure_stall(Path(name), 2 if rehearses else 3)
    return [row, Row.figure("the checkpoint", megabytes / 1000, "GB")]


PARTS = {"logprobs": logprobs, "trace": trace, "generation": generation, "checkpoints": checkpoints}


if __name__ == "__main__":
    sys.exit(main())
