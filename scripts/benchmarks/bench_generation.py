"""Compare the useful tokens per second of generation with transformers' batched generate, within one run.

    OMP_NUM_THREADS=2 python scripts/benchmarks/bench_generation.py [--hidden 256] [--layers 6] [--prompts 32] \
        [--new-tokens 128]

Prompts are ragged, and responses have skewed lengths (a few as long as the limit, most much shorter), the same for
both; then groups of responses to fewer, longer prompts. A token is useful if it belongs to a response; tokens that a
batch computes for finished sequences are not. Two threads. Exits with 1 if a ratio is below its bound.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from bench_results import Row, finish
from transformers import LlamaConfig, LlamaForCausalLM, StoppingCriteria, StoppingCriteriaList

from mcore_rl.config import SFTConfig
from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.platform import initialize_platform
from mcore_rl.utils.console import quiet_libraries

LONGEST_PROMPT = 512


class NoTokenizer:
    """A tokenizer that decodes nothing."""

    pad_token_id = 0


class LengthLimits(StoppingCriteria):
    """Stopping criterion with a separate length for each row."""

    def __init__(self, prompt_width, limits):
        self.ends = prompt_width + torch.tensor(limits)

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.shape[1] >= self.ends


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group", type=int, default=8, help="responses to each of the longer prompts")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=5)
    arguments = parser.parse_args()
    quiet_libraries()
    initialize_platform()
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as directory:
        ours, theirs = make_both(Path(directory), arguments)
        print(f"{sum(p.numel() for p in theirs.parameters()):,} parameters, {arguments.prompts} responses")
        ragged = make_prompts(arguments, (8, 64), 1)
        groups = make_prompts(arguments, (256, LONGEST_PROMPT), arguments.group)
        rows = [
            compare("prompts of 8–63 tokens", *ragged, ours, theirs, arguments.repetitions, 1.5, floor=1.2),
            compare(
                f"groups of {arguments.group}, longer prompts", *groups, ours, theirs, arguments.repetitions, 4, floor=3
            ),
        ]
    columns = ("ours", "transformers", "ours / transformers")
    is_whole = arguments == parser.parse_args([])
    return finish("generation", "Generation: useful tokens a second", columns, rows, keep=is_whole)


def compare(name, prompts, limits, ours, theirs, repetitions, bound, floor):
    speeds = [], []
    for _ in range(repetitions + 1):
        ours_seconds, ours_tokens = timed(lambda: run_ours(ours, prompts, limits))
        theirs_seconds, theirs_tokens = timed(lambda: run_theirs(theirs, prompts, limits))
        assert ours_tokens == theirs_tokens, "the two do not generate the same tokens"
        for side, seconds in zip(speeds, (ours_seconds, theirs_seconds), strict=True):
            side.append(sum(limits) / seconds)
    ratio = statistics.median(a / b for a, b in list(zip(*speeds, strict=True))[1:])  # the first is a warm-up
    print(f"{name}: {sum(limits)} useful tokens, ratio {ratio:.2f}", flush=True)
    return Row(name, *(statistics.median(side[1:]) for side in speeds), ratio, at_least=bound, floor=floor)


def make_prompts(arguments, lengths, group):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(*lengths, (arguments.prompts // group,), generator=generator).tolist()
    distinct = [torch.randint(3, arguments.vocabulary, (n,), generator=generator).tolist() for n in lengths]
    prompts = [prompt for prompt in distinct for _ in range(group)]
    skewed = torch.rand(len(prompts), generator=generator).pow(3)
    limits = (8 + skewed * (arguments.new_tokens - 8)).long().tolist()
    limits[0] = arguments.new_tokens
    return prompts, limits


def make_both(directory, arguments):
    from mcore_rl.models.generation.megatron.generation import MegatronGeneration
    from mcore_rl.models.generation.sampling import SamplingParams
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=arguments.vocabulary,
        hidden_size=arguments.hidden,
        intermediate_size=3 * arguments.hidden,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.hidden // 32,
        num_key_value_heads=arguments.hidden // 64,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    theirs = LlamaForCausalLM(config).eval()
    theirs.save_pretrained(directory)
    run = {
        "output_dir": directory,
        "model": {"path": directory},
        "data": {"train": "unused", "max_sequence_length": LONGEST_PROMPT + arguments.new_tokens},
        "batch": {"global_batch_size": 1},
        "optimizer": {"lr": 0},
        "trainer": {"max_steps": 1},
    }
    policy = MegatronPolicy(SFTConfig.model_validate(run))
    params = SamplingParams(arguments.new_tokens)
    length = LONGEST_PROMPT + arguments.new_tokens
    return MegatronGeneration(policy.model, params, length, NoTokenizer(), max_batch_size=arguments.prompts), theirs


def timed(function):
    started = time.perf_counter()
    result = function()
    return time.perf_counter() - started, result


def run_ours(generation, prompts, limits):
    lengths = [len(prompt) for prompt in prompts]
    rows = torch.tensor([prompt + [0] * (max(lengths) - len(prompt)) for prompt in prompts])
    data = BatchedDataDict(input_ids=rows, input_lengths=torch.tensor(lengths))
    out = generation.generate(data, greedy=True, max_new_tokens=limits)
    return [row[n : n + limit].tolist() for row, n, limit in zip(out["output_ids"], lengths, limits, strict=True)]


def run_theirs(model, prompts, limits):
    width = max(map(len, prompts))
    rows = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    out = model.generate(
        rows,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=max(limits),
        pad_token_id=0,
        stopping_criteria=StoppingCriteriaList([LengthLimits(width, limits)]),
    )
    return [row[width : width + limit].tolist() for row, limit in zip(out, limits, strict=True)]


if __name__ == "__main__":
    sys.exit(main())
