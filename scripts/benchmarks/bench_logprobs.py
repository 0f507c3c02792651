"""Measure the cost of log-probabilities, forward and backward with the LM head, as ratios within one run.

    OMP_NUM_THREADS=2 python scripts/benchmarks/bench_logprobs.py [--vocabulary 151936] [--hidden 512] [--tokens 1024]

The reference is the time of the three unavoidable matrix products: logits, and the gradients of hidden states and
weight. All cases take turns, and each ratio is that of the medians over the rounds. Memory is the peak beyond inputs,
weight and their gradients, measured in a separate process. Exits with 1 if a bound is missed.
"""

import argparse
import multiprocessing
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from bench_results import Row, finish
from device_meter import median_seconds
from peak_memory import PeakMemory

from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.distributed.logprobs import KEPT_TILE_SHAPE, linear_logprobs, vocab_parallel_logprobs
from mcore_rl.distributed.sampling_mask import KeptTokens, kept_tiles
from mcore_rl.losses.common import NLLLoss
from mcore_rl.losses.packing import SequencePackingLossWrapper
from mcore_rl.platform import initialize_platform

KEPT = (20, 256, 1024)
"""Numbers of tokens that a sampler keeps at each position."""
KEPT_FLOOR_MB = 60


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--repetitions", type=int, default=3)
    sizes = parser.parse_args()
    initialize_platform()
    torch.set_num_threads(2)
    case = Case(sizes.tokens, sizes.hidden, sizes.vocabulary)

    many, few = Packs(64, 16, sizes.vocabulary), Packs(4, 256, sizes.vocabulary)
    kept = {f"fused, {count} kept tokens": case.keeping(count) for count in KEPT}
    seconds = median_seconds(
        {
            "three products": case.products, "fused": case.fused, "from logits": case.from_logits,
            "fused, half the tokens masked": case.half_masked, **kept,
            "loss of 64 sequences of 16": many.run, "4 of 256": few.run,
        },
        sizes.repetitions,
    )  # fmt: skip
    rows = [
        compare(seconds, "fused", "three products", at_most=1.3),
        compare(seconds, "from logits", "three products", at_most=1.2, floor=1.5),
        compare(seconds, "fused, half the tokens masked", "fused", "none", at_most=0.6),
        *(compare(seconds, name, "fused", "whole vocabulary", at_most=1.0) for name in kept),
        compare(seconds, "loss of 64 sequences of 16", "4 of 256", at_most=1.15),
    ]
    for tokens in (sizes.tokens, 4 * sizes.tokens):
        rows.append(Row.figure(f"fused, peak at {tokens:,} tokens", peak_megabytes(tokens, sizes), "MB", at_most=200))
    of_whole = rows[-2].ratio
    for kept in KEPT:
        peak = peak_megabytes(sizes.tokens, sizes, kept)
        name = f"fused, {kept} kept tokens, peak at {sizes.tokens:,} tokens"
        rows.append(Row.figure(name, peak, "MB", at_most=of_whole, floor=KEPT_FLOOR_MB))
    sized = f"{sizes.tokens:,} tokens, hidden {sizes.hidden}, vocabulary {sizes.vocabulary:,}"
    columns = ("s", "beside, s", "ratio, or figure")
    is_whole = sizes == parser.parse_args([])
    return finish("logprobs", f"Log-probabilities: {sized}", columns, rows, keep=is_whole)


def compare(
    seconds: dict[str, float],
    name: str,
    peer: str,
    peer_label: str | None = None,
    at_most: float | None = None,
    floor: float | None = None,
) -> Row:
    """Return a row with the seconds of the functions `name` and `peer`, and with their ratio."""
    label, ratio = f"{name} / {peer_label or peer}", seconds[name] / seconds[peer]
    print(f"{label}: {ratio:.2f}", flush=True)
    return Row(label, seconds[name], seconds[peer], ratio, at_most=at_most, floor=floor)


class Case:
    """Hidden states, LM head and targets of one size."""

    def __init__(self, tokens: int, hidden: int, vocabulary: int) -> None:
        torch.manual_seed(0)
        self.hidden = (torch.randn(tokens, hidden) * 0.3).requires_grad_()
        self.weight = (torch.randn(vocabulary, hidden) * 0.05).requires_grad_()
        self.targets = torch.randint(0, vocabulary, (tokens,))

    def products(self) -> None:
        with torch.no_grad():
            logits = self.hidden @ self.weight.T
            logits @ self.weight
            logits.T @ self.hidden

    def fused(self) -> None:
        self.backward(linear_logprobs(self.hidden, self.weight, self.targets)[0])

    def half_masked(self) -> None:
        rows = torch.arange(0, len(self.targets), 2)
        self.backward(linear_logprobs(self.hidden[rows], self.weight, self.targets[rows])[0])

    def keeping(self, count: int) -> Callable[[], None]:
        """Return a function that runs forward and backward with a softmax over `count` kept tokens of each position."""
        ids, kept = self.kept(count)
        return lambda: self.backward(self.of_kept(ids, kept))

    def kept(self, count: int) -> tuple[torch.Tensor, KeptTokens]:
        """Return `count` tokens for each position, as a tensor and as a sampler returns them. The n-th token of the
        vocabulary has a frequency of 1/n."""
        frequencies = 1 / torch.arange(1, len(self.weight) + 1).double()
        ids = torch.multinomial(frequencies.expand(len(self.targets), -1), count)
        return ids, KeptTokens.of(ids.tolist())

    def of_kept(self, ids: torch.Tensor, kept: KeptTokens) -> torch.Tensor:
        """Return the log-probability of the first kept token of each position."""
        tiles = list(kept_tiles(kept, ids[:, 0], 0, len(self.weight), KEPT_TILE_SHAPE["cpu"]))
        return linear_logprobs(self.hidden, self.weight, ids[:, 0], kept=tiles)[0]

    def from_logits(self) -> None:
        self.backward(vocab_parallel_logprobs(F.linear(self.hidden, self.weight), self.targets)[0])

    def backward(self, logprobs: torch.Tensor) -> None:
        self.hidden.grad = self.weight.grad = None
        logprobs.sum().backward()


class Packs:
    """The logits of a pack, and a loss that `SequencePackingLossWrapper` computes from them."""

    def __init__(self, count: int, length: int, vocabulary: int) -> None:
        torch.manual_seed(0)
        self.logits = torch.randn(1, count * length, vocabulary // 8, requires_grad=True)
        self.wrapper = SequencePackingLossWrapper(NLLLoss(), torch.arange(count + 1, dtype=torch.int32) * length)
        ones = torch.ones(count, length)
        ids = torch.randint(0, vocabulary // 8, (count, length))
        self.data = BatchedDataDict(input_ids=ids, token_mask=ones, sample_mask=torch.ones(count))

    def run(self) -> None:
        self.logits.grad = None
        self.wrapper(self.logits, self.data, torch.tensor(1.0), torch.tensor(1024.0))[0].backward()


def peak_megabytes(tokens: int, sizes: argparse.Namespace, kept: int | None = None) -> float:
    """Return the peak memory of forward and backward, over `kept` tokens of each position or all tokens if None."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(_peak, (tokens, sizes.hidden, sizes.vocabulary, kept))


def _peak(tokens: int, hidden: int, vocabulary: int, kept: int | None) -> float:
    initialize_platform()
    torch.set_num_threads(2)
    Case(8, 8, 64).fused()
    case = Case(tokens, hidden, vocabulary)
    # The buffers of gradients exist already, as in training; Megatron's buffer receives the weight's gradient.
    case.hidden.grad, case.weight.main_grad = torch.ones_like(case.hidden), torch.ones_like(case.weight)
    case.weight.grad_added_to_main_grad = False
    sampled = None if kept is None else case.kept(kept)
    with PeakMemory() as peak:
        if sampled is None:
            logprobs, _ = linear_logprobs(case.hidden, case.weight, case.targets)
        else:
            logprobs = case.of_kept(*sampled)
        logprobs.sum().backward()
    gradient_before_it_is_added = case.hidden.numel() * 4
    return (peak.bytes - gradient_before_it_is_added) / 1e6


if __name__ == "__main__":
    sys.exit(main())
