"""Benchmark bfloat16: the distances of training from float32, by layout and with TRL, and of sampler and trainer.

    python scripts/benchmarks/bench_bf16.py [--steps 30] [--seeds 3]

Trains SFT and DPO of a small Llama and of a small mixture of experts, with the same data: in float32 with one process,
in bfloat16 with one process and under several layouts. The distance of a run is the root mean square, over steps and
seeds, of its difference from the float32 run of the same seed. No layout may be farther than 1.3 times one process.
TRL's distances, with autocast and with bfloat16 weights, are from TRL's own float32 run of the first seed. TRL is taken
from this interpreter's environment, or from `.venv-trl`, which is created.

The sampler's log-probabilities of its tokens are compared with the trainer's. The models are the same, but their heads
are separate, and their logits are as large as those of trained models. The divergence is the mean over the tokens of
e^d − 1 − d, where d is the trainer's log-probability minus the sampler's (http://joschu.net/blog/kl-approx.html). It
and the largest |d| may be no larger than those between the trainer in bfloat16 and in float32. Exits with 1 if a bound
is missed.
"""

from __future__ import annotations

import json
import math
import random
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench_results import Row, finish
from bench_trl import LIMIT_SECONDS, VOCABULARY, make_model, parser_of, python_with_trl, run

AT_ONCE, LEARNING_RATE, LIMIT = 4, 3e-4, 1.3
ALGORITHMS = {"sft": "prompts", "dpo": "pairs"}
"""Each algorithm's file of records."""
LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {
        "TP 2, SP": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        "PP 2": {"pipeline_model_parallel_size": 2},
        "CP 2": {"context_parallel_size": 2},
        "DP 2": {},
    },
    "mixture": {
        "TP 2, SP": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        "EP 2": {"expert_model_parallel_size": 2},
    },
}
TP2 = {"tensor_model_parallel_size": 2}
SAMPLERS: dict[str, dict[str, tuple[dict[str, Any], int, bool]]] = {
    "llama": {"one process": ({}, 1, False), "TP 2": (TP2, 2, False)},
    "mixture": {
        "one process": ({}, 1, False),
        "TP 2": (TP2, 2, False),
        "one process, replayed experts": ({}, 1, True),
    },
}
"""For each case of each family: layout, number of processes, and whether the trainer uses the sampler's experts."""
PROMPTS, NEW_TOKENS, SAMPLER_LIMIT = 32, 64, 1.0
TRL_MODES = {"float32": "float32", "autocast": "float32", "bfloat16 weights": "bfloat16"}
"""Precision of the weights by mode of TRL."""
Curve = list[tuple[float, float]]
"""Loss and gradient norm of each step."""


def main() -> int:
    parser = parser_of(__doc__, steps=30, warm_up="none")
    parser.add_argument("--seeds", type=int, default=3, help="number of models and data sets, at most 4")
    arguments = parser.parse_args()
    if arguments.side == "trl":
        train_with_trl(arguments.directory)
        return 0
    rows: list[Row] = []
    for family in LAYOUTS:
        with tempfile.TemporaryDirectory() as name:
            inputs = [Path(name) / str(seed) for seed in range(arguments.seeds)]
            for seed, directory in enumerate(inputs):
                make_inputs(directory, family, seed, AT_ONCE * arguments.steps)
            rows += compared(family, inputs)
            rows += sampler_rows(family, inputs)
    columns = ("distance", "one process's", "ratio")
    is_whole = arguments.steps >= 30 and arguments.seeds >= 3
    return finish("bf16", "bfloat16: distances from float32, and of sampler and trainer", columns, rows, is_whole)


def compared(family: str, inputs: Sequence[Path]) -> list[Row]:
    """Return a model family's rows: the distances of each layout and of TRL, compared with those of one process."""
    exact, one = (train(inputs, dtype, {}, 1) for dtype in ("float32", "bfloat16"))
    found = {name: (train(inputs, "bfloat16", layout, 2), exact) for name, layout in LAYOUTS[family].items()}
    if family == "llama":
        of_trl = train_by_trl(inputs[0])
        of_mode = {mode: {name: [of_trl[name, mode]] for name in ALGORITHMS} for mode in TRL_MODES}
        right = of_mode.pop("float32")
        found |= {f"TRL, {mode}": (curves, right) for mode, curves in of_mode.items()}
    rows = []
    for algorithm in ALGORITHMS:
        expected = distance(one[algorithm], exact[algorithm])
        for name, (curves, own) in found.items():
            bound = None if name.startswith("TRL") else LIMIT
            for what, ours, peer in zip(KINDS, distance(curves[algorithm], own[algorithm]), expected, strict=True):
                title = f"{algorithm.upper()}, {family}, {name}: {what}"
                rows.append(Row(title, ours, peer, ours / peer, at_most=bound))
                print(f"{title}: {ours:.2e}, one process {peer:.2e}", flush=True)
    return rows


KINDS = ("loss", "gradient norm")


def distance(curves: Sequence[Curve], exact: Sequence[Curve]) -> tuple[float, float]:
    """Return root mean squares of the differences of losses, and of the relative differences of gradient norms."""
    pairs = [pair for one, other in zip(curves, exact, strict=True) for pair in zip(one, other, strict=True)]
    losses = [loss - right for (loss, _), (right, _) in pairs]
    norms = [norm / right - 1 for (_, norm), (_, right) in pairs]
    return root_mean_square(losses), root_mean_square(norms)


def root_mean_square(values: Iterable[float]) -> float:
    squares = [value**2 for value in values]
    return math.sqrt(sum(squares) / len(squares))


def make_inputs(directory: Path, family: str, seed: int, count: int) -> None:
    """Write a model in bfloat16, as published ones are, and pairs of texts with log-normal lengths."""
    import torch
    from transformers import AutoModelForCausalLM

    make_model(directory / "model")
    if family == "mixture":
        make_mixture(directory / "model", seed)
    AutoModelForCausalLM.from_pretrained(directory / "model", dtype=torch.bfloat16).save_pretrained(directory / "model")
    generator = random.Random(seed)

    def text(median: float) -> str:
        length = min(48, max(2, int(median * generator.lognormvariate(0, 0.7))))
        return " ".join(f"w{int(generator.paretovariate(0.5)) % (VOCABULARY - 2)}" for _ in range(length))

    records = [{"prompt": text(12) + " ", "chosen": text(24), "rejected": text(24)} for _ in range(count)]
    (directory / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    prompts = ({"prompt": record["prompt"], "completion": record["chosen"]} for record in records)
    (directory / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in prompts))


def make_mixture(directory: Path, seed: int) -> None:
    """Replace the model by a mixture of eight experts, of which each token goes to two."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, moe_intermediate_size=96, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=8, num_experts_per_tok=2,
        norm_topk_prob=True, max_position_embeddings=2048, tie_word_embeddings=True, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(directory)


# ------------------------------------------------------------ ours


def train(inputs: Sequence[Path], dtype: str, layout: dict[str, Any], processes: int) -> dict[str, list[Curve]]:
    """Train on all inputs (directories of model and data); return a curve for each input, by algorithm."""
    from bench_bf16 import curve_of  # processes import it by this name

    from mcore_rl.testing.processes import run_cases

    cases = [(curve_of, name, directory, dtype, layout) for name in ALGORITHMS for directory in inputs]
    curves = [ranks[0] for ranks in run_cases(cases, world_size=processes, timeout=LIMIT_SECONDS)]
    return {name: curves[number * len(inputs) :][: len(inputs)] for number, name in enumerate(ALGORITHMS)}


def curve_of(algorithm: str, directory: Path, dtype: str, layout: dict[str, Any]) -> Curve:
    """Train in this process, which may be one of several ranks; return loss and gradient norm of each step."""
    import contextlib
    import os
    from importlib import import_module

    config = config_of(algorithm, directory, dtype, layout)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        getattr(import_module(f"mcore_rl.algorithms.{algorithm}"), f"train_{algorithm}")(config)
    lines = map(json.loads, (directory / "ours" / "metrics.jsonl").read_text().splitlines())
    return [(line["loss"], line["grad_norm"]) for line in lines]


def config_of(algorithm: str, directory: Path, dtype: str, layout: dict[str, Any]) -> Any:
    from mcore_rl.cli.train import PROGRAMS

    return PROGRAMS[algorithm].config.model_validate(
        {
            "output_dir": directory / "ours",
            "model": {"path": directory / "model", "dtype": dtype},
            "data": {"train": str(directory / f"{ALGORITHMS[algorithm]}.jsonl"), "max_sequence_length": 128},
            "batch": {"global_batch_size": AT_ONCE, "tokens_per_pack": 1024},
            "optimizer": {"lr": LEARNING_RATE, "warmup_steps": 0},
            "trainer": {"max_epochs": 1},
            "checkpoint": {"resume": "none", "overwrite": True, "export_hf": False},
            "parallel": layout,
        }
    )


# ------------------------------------------------------------ sampler and trainer

SAMPLER_KINDS = ("divergence", "largest difference")


def sampler_rows(family: str, inputs: Sequence[Path]) -> list[Row]:
    """Return a model family's rows: how far the sampler is from the trainer in each layout. They are compared with the
    distance of the trainer in bfloat16 from the trainer in float32, in one process."""
    from bench_bf16 import sampled, scored  # processes import them by these names

    from mcore_rl.testing.processes import run_cases

    def of_inputs(function: Any, arguments: Iterable[tuple[Any, ...]], processes: int) -> list[Any]:
        cases = [(function, directory, *more) for directory, more in zip(inputs, arguments, strict=True)]
        return [ranks[0] for ranks in run_cases(cases, world_size=processes, timeout=LIMIT_SECONDS)]

    for seed, directory in enumerate(inputs):
        give_large_logits(directory / "model", seed)
    found = {
        name: of_inputs(sampled, [(seed, layout, replays) for seed in range(len(inputs))], processes)
        for name, (layout, processes, replays) in SAMPLERS[family].items()
    }
    one = found["one process"]
    exact = of_inputs(scored, [(output, "float32", {}) for output, _, _ in one], 1)
    expected = differences((trainer for _, _, trainer in one), exact)
    rows = []
    for name, results in found.items():
        apart = differences(*zip(*((sampler, trainer) for _, sampler, trainer in results), strict=True))
        for what, ours, peer in zip(SAMPLER_KINDS, apart, expected, strict=True):
            title = f"Sampler and trainer, {family}, {name}: {what}"
            rows.append(Row(title, ours, peer, ours / peer, at_most=SAMPLER_LIMIT))
            print(f"{title}: {ours:.2e}, of the trainer from float32 {peer:.2e}", flush=True)
    return rows


def differences(ours: Iterable[Sequence[float]], theirs: Iterable[Sequence[float]]) -> tuple[float, float]:
    """Return the mean of e^d − 1 − d, and the largest |d|, of the differences d = theirs − ours."""
    pairs = zip(ours, theirs, strict=True)
    apart = [their - our for one, other in pairs for our, their in zip(one, other, strict=True)]
    return sum(math.expm1(d) - d for d in apart) / len(apart), max(map(abs, apart))


def give_large_logits(directory: Path, seed: int) -> None:
    """Give the model a separate LM head with large weights: the entropy of most tokens is then a few nats."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(directory, tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_pretrained(directory, config=config, dtype=torch.bfloat16)
    torch.manual_seed(seed)
    with torch.no_grad():
        model.lm_head.weight.normal_(std=3 / math.sqrt(config.hidden_size))
    model.save_pretrained(directory)


def sampled(directory: Path, seed: int, layout: dict[str, Any], replays: bool) -> tuple[Any, list[float], list[float]]:
    """Return the sampler's output, and the log-probabilities of its tokens by sampler and trainer, in bfloat16."""
    import torch
    from transformers import AutoTokenizer

    from mcore_rl.distributed.batched_data_dict import BatchedDataDict
    from mcore_rl.models.generation.megatron.generation import MegatronGeneration
    from mcore_rl.models.generation.sampling import SamplingParams
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    config = config_of("sft", directory, "bfloat16", layout)
    policy = MegatronPolicy(config)
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(2, VOCABULARY, (PROMPTS, 32), generator=generator)
    lengths = torch.randint(1, 33, (PROMPTS,), generator=generator)
    tokenizer = AutoTokenizer.from_pretrained(directory / "model")
    params = SamplingParams(NEW_TOKENS, seed=seed)
    longest = config.data.max_sequence_length
    generation = MegatronGeneration(policy.model, params, longest, tokenizer, record_experts=replays)
    output = dict(generation.generate(BatchedDataDict(input_ids=prompts, input_lengths=lengths)))
    by_trainer = scored(directory, output, "bfloat16", layout, policy)
    return output, output["logprobs"][of_response(output)].tolist(), by_trainer


def scored(directory: Path, output: Any, dtype: str, layout: dict[str, Any], policy: Any = None) -> list[float]:
    """Return the log-probabilities of the sampled tokens by the trainer, `policy` or a new one."""
    import torch

    from mcore_rl.distributed.batched_data_dict import BatchedDataDict
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy = policy or MegatronPolicy(config_of("sft", directory, dtype, layout))
    ids, lengths = output["output_ids"], output["unpadded_sequence_lengths"]
    data = BatchedDataDict(input_ids=ids, input_lengths=lengths, sample_mask=torch.ones(len(ids)))
    if "routed_experts" in output:
        data["routed_experts"] = output["routed_experts"]
    logprobs: list[float] = policy.get_logprobs(data)["logprobs"][of_response(output)].tolist()
    policy.shutdown()
    return logprobs


def of_response(output: Any) -> Any:
    """Return the mask of the sampled tokens."""
    import torch

    column, ends = torch.arange(output["output_ids"].shape[1]), output["unpadded_sequence_lengths"]
    return (column >= (ends - output["generation_lengths"])[:, None]) & (column < ends[:, None])


# ------------------------------------------------------------ TRL


def train_by_trl(directory: Path) -> dict[tuple[str, str], Curve]:
    """Return TRL's curves by algorithm and mode."""
    run([python_with_trl(), str(Path(__file__).resolve()), "--side", "trl", "--directory", str(directory)], threads=2)
    return {(algorithm, mode): curve for algorithm, mode, curve in json.loads((directory / "trl.json").read_text())}


def train_with_trl(directory: Path) -> None:
    """Train one epoch with TRL's trainers in all modes; write loss and gradient norm of each step to `trl.json`."""
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    curves = []
    tokenizer = AutoTokenizer.from_pretrained(directory / "model")
    for algorithm, config, trainer_class in (("sft", SFTConfig, SFTTrainer), ("dpo", DPOConfig, DPOTrainer)):
        files = str(directory / f"{ALGORITHMS[algorithm]}.jsonl")
        records = load_dataset("json", data_files=files, split="train", cache_dir=directory / "cache")
        for mode, dtype in TRL_MODES.items():
            settings = config(
                str(directory / "trl"), per_device_train_batch_size=AT_ONCE, num_train_epochs=1, max_length=128,
                learning_rate=LEARNING_RATE, use_cpu=True, bf16=mode == "autocast", gradient_checkpointing=False,
                save_strategy="no", report_to="none", disable_tqdm=True, logging_steps=1,
            )  # fmt: skip
            model = AutoModelForCausalLM.from_pretrained(directory / "model", dtype=dtype)
            trainer = trainer_class(model=model, args=settings, train_dataset=records, processing_class=tokenizer)
            trainer.train()
            lines = (line for line in trainer.state.log_history if "grad_norm" in line)
            curves.append((algorithm, mode, [(line["loss"], line["grad_norm"]) for line in lines]))
    (directory / "trl.json").write_text(json.dumps(curves))


if __name__ == "__main__":
    sys.exit(main())
