"""The command `mcore-rl eval`: judge a model's responses to a file of records, and compare models."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mcore_rl.cli.entry_point import Parser, count, exit_on_error, with_local_models
from mcore_rl.cli.launch import run_launched
from mcore_rl.cli.serve import CHECKPOINT_HELP
from mcore_rl.config import GRPOConfig, build_config
from mcore_rl.config.load import LENGTH
from mcore_rl.errors import TrainingError, UserError
from mcore_rl.serving.model_source import UNREAD, ModelSource, find_model, overrides_for
from mcore_rl.utils import torchrun
from mcore_rl.utils.console import console, quiet_libraries, rank_zero_printer

DESCRIPTION = "Generate responses to the prompts of a file, judge them as GRPO does, and write rewards with intervals."
EPILOG = """\
MODEL is a model directory or a name on the hub, the output_dir of a run, a checkpoint, or a PEFT directory; with --url
it is the name of the model in requests. Options of torchrun, such as --nproc-per-node 2, come first. A judge is a value
of environment.name or module:function; several are added up. Without --judge, the judge of a run judges its model."""
OF_FUNCTION = "function"
MAX_NEW_TOKENS = 2048
"""Default of grpo.max_new_tokens, or half of a shorter context."""


def evaluate(arguments: Sequence[str], prog: str) -> None:
    """Run `mcore-rl eval` on this rank."""
    parser = Parser(prog=prog, description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("model", metavar="MODEL", help="what to evaluate")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes of the configuration")
    parser.add_argument("--data", required=True, metavar="FILE", help="records with prompts, as for GRPO")
    parser.add_argument("--judge", action="append", default=[], metavar="NAME", help="judge; may be repeated")
    parser.add_argument("--samples", type=count, default=1, metavar="N", help="responses to each prompt (1)")
    parser.add_argument(
        "--greedy", action=argparse.BooleanOptionalAction, help="take the likeliest tokens (if N is 1); or sample"
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="directory of the results (outputs/eval_MODEL)")
    parser.add_argument("--overwrite", action="store_true", help="replace results of other settings")
    parser.add_argument("--checkpoint", choices=("newest", "best", "hf"), help=CHECKPOINT_HELP)
    parser.add_argument("--baseline", metavar="OTHER", help="another model, or the directory of its results")
    parser.add_argument("--url", help="base URL (with /v1) of a server that speaks OpenAI's API; samples there")
    parser.add_argument("--concurrency", type=count, default=32, metavar="N", help="with --url: conversations at once")
    parsed = parser.parse_intermixed_args(run_launched(["eval"], arguments))
    with exit_on_error():
        _check(parsed)
        quiet_libraries()
        greedy = parsed.samples == 1 if parsed.greedy is None else parsed.greedy
        output = _output_of(parsed)
        if parsed.url is not None:
            _evaluate_url(parsed, output, greedy)
        else:
            _evaluate_models(parsed, output, greedy)


def _check(parsed: argparse.Namespace) -> None:
    """Raise UserError for options that do not go together."""
    if parsed.greedy and parsed.samples > 1:
        raise UserError("--greedy: all responses to a prompt would be equal; leave out --samples or --greedy")
    if parsed.url is not None and torchrun.world_size() > 1:
        raise UserError("--url: needs one process; leave out torchrun's options")
    if parsed.url is not None and not parsed.url.startswith(("http://", "https://")):
        raise UserError(f"--url {parsed.url}: must begin with http:// or https://")
    if parsed.baseline is not None and Path(parsed.baseline).resolve() == _output_of(parsed).resolve():
        raise UserError(f"--baseline {parsed.baseline}: is the directory of this evaluation's results (--output)")
    if parsed.url is not None and parsed.baseline is not None and not (Path(parsed.baseline) / "eval.json").is_file():
        raise UserError(f"--baseline {parsed.baseline}: with --url, it must be a directory of results (with eval.json)")


def _output_of(parsed: argparse.Namespace) -> Path:
    output: Path = parsed.output or Path("outputs") / f"eval_{Path(parsed.model).resolve().name}"
    return output


def _values(parsed: argparse.Namespace, output: Path) -> dict[str, Any]:
    """Return the values of the configuration that the options set."""
    train: Any = parsed.data
    values: dict[str, Any] = {"data": {"train": train}, "output_dir": str(output), "trainer": {"max_steps": 1}}
    judges = [_judge(name) for name in parsed.judge]
    if len(judges) == 1:
        values["environment"] = judges[0]
    elif judges:
        names = [name.rpartition(":")[2] for name in parsed.judge]
        if len(set(names)) < len(names):
            raise UserError(f"--judge: the same judge twice: {', '.join(names)}")
        values["environment"] = {"name": "weighted", "rewards": dict(zip(names, judges, strict=True))}
    return values


def _judge(name: str) -> dict[str, str]:
    return {"name": OF_FUNCTION, "function": name} if ":" in name else {"name": name}


def _settings(config: GRPOConfig, parsed: argparse.Namespace, greedy: bool, **more: Any) -> dict[str, Any]:
    """Return what the samples depend on, for eval.json."""
    options = config.rollouts
    judge = config.environment.model_dump(mode="json", exclude_defaults=True, exclude={"agent", "num_workers"})
    sampling = {"top_k": options.top_k, "top_p": options.top_p, "min_p": options.min_p}
    stops = {"stop_strings": list(options.stop_strings), "chat_template": config.data.chat_template}
    return {
        **more,
        "data": parsed.data,
        "judge": judge or {"name": config.environment.name},
        "samples": parsed.samples,
        "temperature": 0.0 if greedy else options.temperature,
        **{name: value for name, value in sampling.items() if not greedy},
        **stops,
        "max_new_tokens": options.max_new_tokens,
        "seed": config.seed,
    }


def _evaluate_models(parsed: argparse.Namespace, output: Path, greedy: bool) -> None:
    """Evaluate the model, then the baseline if it is a model, in these processes."""
    baseline = parsed.baseline
    is_result = baseline is not None and (Path(baseline) / "eval.json").is_file()
    sources = [_source(parsed.model, parsed, output, parsed.checkpoint)]
    if baseline is not None and not is_result:
        first = sources[0].config
        same = {"environment": first.environment.model_dump(mode="json", exclude_unset=True)}
        same["grpo"] = {"max_new_tokens": first.rollouts.max_new_tokens}
        sources.append(_source(baseline, parsed, output / "baseline", None, same))
    from mcore_rl.platform import initialize_platform, resolve

    initialize_platform()
    from mcore_rl.serving.evaluate_model import ModelEvaluation, weights_of
    from mcore_rl.serving.evaluation import EvaluationFiles

    say = rank_zero_printer(torchrun.rank() == 0)
    # All is checked before anything is sampled.
    evaluations = [ModelEvaluation(replace(source, config=resolve(source.config)), say) for source in sources]
    for evaluation in evaluations:
        source = evaluation.source
        settings = _settings(
            source.config, parsed, greedy, model=source.name, weights=weights_of(source),
            dtype=source.config.model.dtype, max_sequence_length=source.config.data.max_sequence_length,
            fingerprint=evaluation.fingerprint,
        )  # fmt: skip
        if torchrun.rank() > 0:
            evaluation.run(None, parsed.samples, greedy)
            continue
        if is_result:
            _check_baseline(settings, Path(baseline))
        with EvaluationFiles(source.config.output_dir, settings, parsed.overwrite) as files:
            evaluation.run(files, parsed.samples, greedy)
            files.finish(source.name, parsed.samples, evaluation.dropped)
    if torchrun.rank() == 0:
        others = [evaluation.config.output_dir for evaluation in evaluations[1:]]
        _report(output, *([Path(baseline)] if is_result else others))


def _evaluate_url(parsed: argparse.Namespace, output: Path, greedy: bool) -> None:
    """Evaluate the model behind a URL."""
    from mcore_rl.platform import initialize_platform

    initialize_platform()  # modules of rollouts import Megatron
    from mcore_rl.serving.evaluate_url import URLEvaluation
    from mcore_rl.serving.evaluation import EvaluationFiles

    values = _values(parsed, output)
    values |= {"model": {"path": UNREAD}, "checkpoint": {"export_hf": False}}
    values |= {"grpo": {"max_new_tokens": MAX_NEW_TOKENS}, "data": {**values["data"], LENGTH: 2 * MAX_NEW_TOKENS}}
    config = build_config(GRPOConfig, values, parsed.overrides, "command line")
    options = config.rollouts
    asked: dict[str, Any] = {
        "temperature": 0.0 if greedy else options.temperature,
        "max_tokens": options.max_new_tokens,
    }
    asked |= {} if greedy or options.top_p == 1 else {"top_p": options.top_p}
    asked |= {} if not options.stop_strings else {"stop": list(options.stop_strings)}
    # These are not in OpenAI's own API.
    asked |= {} if greedy or options.top_k is None else {"top_k": options.top_k}
    asked |= {} if greedy or not options.min_p else {"min_p": options.min_p}
    say = rank_zero_printer(True)
    evaluation = URLEvaluation(config, parsed.url, parsed.model, parsed.concurrency, asked, say)
    of_prompts = evaluation.fingerprint
    settings = _settings(config, parsed, greedy, model=parsed.model, url=parsed.url, fingerprint=of_prompts)
    if parsed.baseline is not None:
        _check_baseline(settings, Path(parsed.baseline))
    with EvaluationFiles(output, settings, parsed.overwrite) as files:
        evaluation.run(files, parsed.samples)
        files.finish(parsed.model, parsed.samples)
    _report(output, *([Path(parsed.baseline)] if parsed.baseline is not None else []))


def _check_baseline(settings: dict[str, Any], baseline: Path) -> None:
    """Check a baseline before anything is sampled; warn if it was sampled in another way."""
    from mcore_rl.serving.evaluation import check_baseline

    if changes := check_baseline(settings, baseline):
        print(f"warning: --baseline {baseline}: was sampled with other settings ({', '.join(changes)})")


def _report(output: Path, *baselines: Path) -> None:
    """Compare with the baseline, if there is one; print the results and where they are."""
    from mcore_rl.serving.evaluation import compare, described, first_error, read_result

    try:
        for baseline in baselines:
            compare(output, baseline)
    finally:
        for line in described(output):
            print(line)
    if read_result(output)["metrics"]["failed_fraction"] == 1:
        raise TrainingError(f"no sample could be judged; the first error: {first_error(output)}")


def _source(
    named: str, parsed: argparse.Namespace, output: Path, which: Any, same: dict[str, Any] | None = None
) -> ModelSource:
    """Return the model that a user names; `same` has values of another model, with which it is compared."""
    values = _values(parsed, output)
    values["checkpoint"] = {"export_hf": False}
    overrides = parsed.overrides if parsed.baseline is None else overrides_for(named, parsed.overrides)
    length = find_model(named, overrides, values, which).config.data.max_sequence_length
    values |= {"grpo": {"max_new_tokens": min(MAX_NEW_TOKENS, length // 2)}, **(same or {})}
    source = find_model(named, overrides, values, which)
    if torchrun.rank() == 0:
        console.print(f"evaluating {source.checkpoint or source.config.model.path}", markup=False)
    return replace(source, config=with_local_models(source.config))
