"""The start of a run: check the models, load the inputs, lock the output directory, and compare the processes."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import date, timedelta
from fnmatch import fnmatchcase
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, cast

from mcore_rl import platform
from mcore_rl.config import DistillationConfig, OptimizerConfig, RLConfig, TrainingConfig
from mcore_rl.config.algorithms import JUDGE, TEACHER, own_layout_key, second_model_configs
from mcore_rl.data.chat import Messages, chat_day, check_image_tokens, reads_images, render, set_chat_day
from mcore_rl.data.datasets import dataset_loader
from mcore_rl.data.images import ImageReader, image_directory
from mcore_rl.data.token_cache import TokenCache, default_directory
from mcore_rl.data.token_store import Order
from mcore_rl.data.tokenize import TokenizerSpec, load_tokenizer
from mcore_rl.data.turns import check_keeps_turns
from mcore_rl.distributed.collectives import broadcast_object, gather_objects_on_rank_zero
from mcore_rl.errors import ContractError, UserError
from mcore_rl.models.megatron.families import family_of
from mcore_rl.models.megatron.families.base import REWARD_HEAD
from mcore_rl.models.megatron.model.hf_config import check_model_fits, hf_config_of
from mcore_rl.models.megatron.model.hf_directory import SafetensorsDirectory
from mcore_rl.models.megatron.model.lora import PEFTDirectory
from mcore_rl.models.megatron.weights.conversion import check_hf_tensors
from mcore_rl.run.checkpoints import check_identity
from mcore_rl.run.directory import RunDirectory
from mcore_rl.run.identity import RunIdentity, flattened, identity_of, model_directories
from mcore_rl.run.preflight import check_layout, check_output, find_checkpoints
from mcore_rl.utils import shard_process, torchrun
from mcore_rl.utils.console import PrintLine, rank_zero_printer, silent
from mcore_rl.utils.files import MANIFEST_FILE, digest_of_file
from mcore_rl.utils.lock_file import own_lock
from mcore_rl.utils.model_directory import (
    NOT_ARCHITECTURE,
    PATTERNS,
    check_positions,
    check_repository,
    companions,
    digest_of_weights,
    missing_files,
)

POLICY = "model.path"
"""The key of the model that is trained."""


def check_models(config: TrainingConfig) -> dict[str, Any]:
    """Check all models; return transformers' configuration of each model, by the configuration key of its path.

    Raises:
        UserError: a model cannot be used for its purpose, or cannot be combined with the policy.
    """
    found = {POLICY: _checked(config)}
    for key, other in second_model_configs(config).items():
        layout = own_layout_key(config, key) or "parallel"
        with _named_by(key, other.model.path, layout):
            found[key] = _checked(other)
    if isinstance(config, DistillationConfig):
        _check_teacher(config, found)
    return found


def _checked(config: TrainingConfig) -> Any:
    model = config.model
    hf = hf_config_of(model)
    check_model_fits(hf, config.parallel, config.data.max_sequence_length, model)
    check_positions(hf.to_dict(), config.data.max_sequence_length)
    return hf


def check_weights(config: TrainingConfig, found: Mapping[str, Any], needed: bool = True) -> None:
    """Check that each model's weights have the names and shapes that the model's configuration requires.

    Args:
        found: the result of `check_models`.
        needed: whether the weights must be on disk. If not, only complete sets of weights are checked.

    Raises:
        UserError: names or shapes differ, or the judge's weights do not belong to a reward model.
    """
    for key, one in {POLICY: config, **second_model_configs(config)}.items():
        path = one.model.path
        with _named_by(key, path):
            if needed or not missing_files(path):
                source = SafetensorsDirectory(path)
                check_hf_tensors(found[key], source)
                if key == JUDGE and REWARD_HEAD not in source.names():
                    raise UserError(f"{POLICY}: {path} is not a reward model: it has no {REWARD_HEAD}")


def _check_teacher(config: DistillationConfig, found: Mapping[str, Any]) -> None:
    topk, own = config.distillation.topk, family_of(found[POLICY]).vocab_size
    for name, path in config.distillation.teachers.items():
        key = f"{TEACHER}.{name}" if name else TEACHER
        if topk is None or key not in found:
            continue
        rows = family_of(found[key]).vocab_size
        if rows > own and config.distillation.form == "divergence":
            raise UserError(
                f"{key}: the LM head of {path} has {rows} rows, but the student's has only {own}, so the "
                "student may lack a likely token of the teacher; set distillation.topk=null"
            )
        if topk > rows:
            raise UserError(
                f"distillation.topk={topk}: the teacher {name and name + ' '}has only {rows} tokens; choose at most "
                f"{rows}"
            )


def check_tokenizers(config: TrainingConfig, found: Mapping[str, Any], tokenizer: Any) -> date | None:
    """Check that the policy's tokenizer fits its model and the tokenizers of the other models.

    Args:
        found: the result of `check_models`.

    Returns:
        The date that the chat templates of the policy and of a judging reward model insert; None if neither uses a
        date.

    Raises:
        UserError: a token id exceeds a model's embeddings, or a model's vocabulary differs from the policy's.
    """
    size, day = family_of(found[POLICY]).vocab_size, chat_day(tokenizer)
    if len(tokenizer) > size:
        raise UserError(
            f"{POLICY}: the tokenizer has {len(tokenizer)} tokens, but the model has only {size}; use the "
            "tokenizer of this model"
        )
    for key, other in second_model_configs(config).items():
        model = other.model
        with _named_by(key, model.path):
            own = load_tokenizer(model.path, model.trust_remote_code)
        if key != JUDGE:
            _check_vocabulary(f"{key}: {model.path}", own.get_vocab(), tokenizer.get_vocab())
            if len(own) > (rows := family_of(found[key]).vocab_size):
                raise UserError(
                    f"{key}: the tokenizer of {model.path} has {len(own)} tokens, but the model has only {rows} rows "
                    "of embeddings; use the tokenizer of this model"
                )
        elif isinstance(config, RLConfig) and config.environment.format == "chat" and not own.chat_template:
            raise UserError(
                f"{key}: the tokenizer of {model.path} has no chat template; set environment.format=text if the model "
                "was trained on plain prompts and completions"
            )
        elif day is None and chat_day(own) is not None:
            day = _first_day(config) or date.today()
    return day


def _check_vocabulary(model: str, own: dict[str, int], policy: dict[str, int]) -> None:
    """Check that the vocabulary of another model equals the policy's vocabulary.

    Args:
        model: the model's key and path, for the error.
        own: token ids of the model, by token.
        policy: token ids of the policy, by token.

    Raises:
        UserError: a token has different ids, or is in one vocabulary only; the message names the first such token.
    """
    different = [token for token in own.keys() | policy.keys() if own.get(token) != policy.get(token)]
    if different:
        last = max(len(own), len(policy))
        token = min(different, key=lambda token: (min(own.get(token, last), policy.get(token, last)), token))
        ids = [f"id {ids[token]}" if token in ids else "no id" for ids in (own, policy)]
        raise UserError(
            f"{model} has another vocabulary than {POLICY} ({len(own)} tokens instead of {len(policy)}; {token!r} has "
            f"{ids[0]} instead of {ids[1]}); use a model with the policy's tokenizer"
        )


@contextmanager
def _named_by(key: str, path: Path, layout: str = "parallel") -> Iterator[None]:
    """Context in which a UserError about a model names the keys of this model and of its layout.

    The checks of models name the policy's keys, so the error's text is changed.
    """
    try:
        yield
    except UserError as error:
        if key == POLICY:
            raise
        told = str(error).replace("; set model.head=reward", ", where a language model is needed")
        told = told.replace("parallel.", f"{layout}.")
        if key == JUDGE:
            told = told.replace("data.max_sequence_length", "environment.max_sequence_length")
        # An error about a limit or a layout names the key that sets it. This key may apply to several models, so the
        # model's key is appended.
        raise UserError(told.replace(POLICY, key) if POLICY in told else f"{told}; the model is {key}={path}") from None


SHARED_FILE_SECONDS = 60.0
"""Maximum delay in seconds until a node sees a new file on a network file system (the option `acdirmax` of NFS)."""
VALIDATION = "data.validation"
OTHER_CODE = ": other code of "
PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True)
class ProcessInputs:
    """Describes what a process has read, for comparison with process 0.

    read: by key, fingerprints of training data, validation sets (in their order), chat template and options. On the
        first process of a node, also the digests that `files_of` returns.
    identity: identity of the run as JSON; only on the first process of a node.
    software: versions of the software; only on the first process of a node.
    sees_output: whether the first process of a node finds the output directory of process 0.
    """

    host: str
    read: dict[str, str]
    identity: str = ""
    software: dict[str, str] = field(default_factory=dict)
    sees_output: bool = True


def check_processes_agree(config: TrainingConfig, inputs: RunInputs[Any], options: Mapping[str, str]) -> None:
    """Check that every process has the same inputs as process 0, which has locked `output_dir`. Collective.

    Args:
        options: options of the command line to compare, each with its value or a digest of its value.

    Raises:
        UserError: a process has other inputs. Raised on every process; the message names the input and the process.
    """
    template = _digest(str(inputs.tokenizer.chat_template))
    sets = {f"{VALIDATION} {name}".strip(): dataset.fingerprint for name, dataset in inputs.validation.items()}
    read = {"data.train": inputs.train.fingerprint, **sets, "data.chat_template": template, **options}
    lock, resume_from = broadcast_object((own_lock(), inputs.checkpoints[0]))
    given = ProcessInputs(socket.gethostname(), read)
    if inputs.identity:
        patience = min(SHARED_FILE_SECONDS, config.parallel.timeout_seconds / 4)
        is_first = torchrun.rank() == 0
        sees = is_first or RunDirectory(config.output_dir).wait_for_lock(lock, patience)
        read |= files_of(config, resume_from)
        given = ProcessInputs(socket.gethostname(), read, inputs.identity, software(), sees)
    if told := broadcast_object(disagreement(gather_objects_on_rank_zero(given))):
        raise UserError(told)


def files_of(config: TrainingConfig, resume_from: Sequence[Path]) -> dict[str, str]:
    """Return digests, by key, of all inputs except weights and data.

    These are configurations and tokenizers of models, the checkpoints `resume_from`, and modules of judge functions.
    """
    manifests = [path / MANIFEST_FILE for path in resume_from]
    found = {"checkpoint.resume": _digest(str([digest_of_file(file) for file in manifests if file.is_file()]))}
    for key, path in model_directories(config).items():
        files = [file for file in companions(path) if any(fnmatchcase(file.name, pattern) for pattern in PATTERNS)]
        values = json.loads((path / "config.json").read_bytes()) if (path / "config.json").is_file() else {}
        kept = sorted((name, value) for name, value in values.items() if name not in NOT_ARCHITECTURE)
        found[f"{key}: other configuration or tokenizer"] = _digest(
            str((kept, [digest_of_file(file) for file in files]))
        )
    for key, value in flattened(config.model_dump(mode="json")).items():
        is_judge = fnmatchcase(key, "environment*.function") and value is not None
        if is_judge and (file := _file_of_module(value.partition(":")[0])):
            found[f"{key}{OTHER_CODE}{value}"] = digest_of_file(file)
    return found


def _file_of_module(name: str) -> Path | None:
    """Return the source file of the module `name`; None if this node has no such module, or the module has no file."""
    try:
        module = find_spec(name)
    except Exception:  # its parent package is missing, or cannot be imported
        return None
    origin = None if module is None or module.origin is None else Path(module.origin)
    return origin if origin is not None and origin.is_file() else None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def software() -> dict[str, str]:
    """Return the versions of this package and of the libraries on which results depend, by name.

    For this package, a digest of its files stands for the version, because its version number does not change with
    every commit.
    """
    files = sorted(path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".yaml"))
    digest = _digest(str([(str(path.relative_to(PACKAGE)), digest_of_file(path)) for path in files]))
    versions = {name: str(import_module(name).__version__) for name in ("torch", "megatron.core", "transformers")}
    return {"the files of mcore_rl": digest[:12], **versions}


def disagreement(everyone: Sequence[ProcessInputs]) -> str:
    """Compare all processes' inputs with process 0's; return an error message about the first difference, or ""."""
    for rank, given in enumerate(everyone):
        first = everyone[0]
        process = f"process {rank} (on {given.host})"
        if others := _differences(given, first):
            return (
                f"{others[0]}: {process} was given something else than process 0 (on {first.host}); every node needs "
                "the same packages, files, configuration and date"
            )
        if not given.sees_output:
            return (
                f"output_dir: {process} does not find what process 0 (on {first.host}) writes there; it must be the "
                "same directory on all nodes, on a file system that they share"
            )
    return ""


def _differences(given: ProcessInputs, first: ProcessInputs) -> list[str]:
    """Return the differences between a process's inputs and the inputs of process 0 (`first`), likely causes first."""
    differences = []
    if given.identity:
        theirs, own = first.software, given.software
        differences += [f"{name} {theirs[name]} → {own[name]}" for name in theirs if own[name] != theirs[name]]
    if given.identity and not differences:  # other software may have other configuration keys
        differences += RunIdentity.from_json(given.identity).differences(RunIdentity.from_json(first.identity))
    differences += [key for key in first.read if given.read.get(key, first.read[key]) != first.read[key]]
    if given.identity:  # only the first process of a node has these entries
        lacking = sorted(key for key in first.read.keys() ^ given.read.keys() if OTHER_CODE in key)
        differences += [f"{key} (only one of the two processes has it)" for key in lacking]
    sets, firsts = ([key for key in one.read if key.startswith(VALIDATION)] for one in (given, first))
    if sets != firsts:
        differences.append(f"{VALIDATION}: other sets, or another order of them")
    return differences


class RunDataset(Protocol):
    """Interface of a dataset of a run, for records of any kind."""

    def __len__(self) -> int: ...

    def describe(self, name: str, limit: int) -> str: ...

    def order(self, seed: int) -> Order: ...

    @property
    def fingerprint(self) -> str: ...


DatasetT = TypeVar("DatasetT", bound=RunDataset)


@dataclass(frozen=True)
class RunInputs(Generic[DatasetT]):
    """The checked and loaded inputs of a run. Checking and loading need no process group."""

    tokenizer: Any
    hf_config: Any
    train: DatasetT
    validation: dict[str, DatasetT]
    """Validation sets by name; a single set has no name."""
    checkpoints: tuple[list[Path], list[str]] = ([], [])
    """Checkpoints to resume from, best first, and notes for the user."""
    identity: str = ""
    """Identity of the run (JSON), on the first process of each node."""
    cache: Path | None = None
    """Directory of the token cache, if this is a dry run that wrote to it; otherwise None."""
    day: date | None = None
    """Date that the chat templates insert, or None; see `check_tokenizers`."""


def load_inputs(config: TrainingConfig, world_size: int | None = None, needs_weights: bool = True) -> RunInputs[Any]:
    """Check the user's inputs and read the data; the result is the same on every rank.

    Data is tokenized, and the token cache written, only after all checks that do not need the tokens.

    Args:
        world_size: number of processes of the run; by default, the number that torchrun reports.
        needs_weights: whether the models' weights must be on disk.

    Returns:
        The inputs, with the algorithm's datasets.

    Raises:
        UserError: an input is invalid; the message names the key, or the file and line.
    """
    check_layout(config, world_size or torchrun.world_size())
    hf_configs = check_models(config)
    check_weights(config, hf_configs, needs_weights)
    say = rank_zero_printer(torchrun.rank() == 0)
    tokenizer, cache = tokenizer_and_cache(config, say)
    day = check_tokenizers(config, hf_configs, tokenizer)
    if needs_weights:
        _check_before_reading(config, hf_configs[POLICY], tokenizer)
    load_dataset = dataset_loader(config)
    before = _entries(cache.directory) if config.dry_run else None
    data, whole = config.data, config.data.model_copy(update={"max_samples": None})
    train = load_dataset(data.train, tokenizer, data, say=say, cache=cache)
    config.check_steps(config.total_steps(len(train)))
    sets = data.validation_sets.items()
    validation = {name: load_dataset(source, tokenizer, whole, say=say, cache=cache) for name, source in sets}
    _check_images(config, hf_configs, [train, *validation.values()], tokenizer)
    if isinstance(config, RLConfig) and config.environment.max_turns > 1 and train.has_messages:
        check_keeps_turns(tokenizer)
    wrote = before is not None and _entries(cache.directory) != before
    written = cache.directory if wrote else None
    return RunInputs(tokenizer, hf_configs[POLICY], train, validation, cache=written, day=day)


def _check_images(config: TrainingConfig, found: Mapping[str, Any], datasets: Sequence[Any], tokenizer: Any) -> None:
    """Raise UserError if records have images, but a part of the run cannot read images.

    Args:
        found: the result of `check_models`.
    """
    of_records = any(dataset.has_images for dataset in datasets)
    if not (of_records or (reads_images(tokenizer) and _takes_images(config))):
        return
    source, without = "records have images", ""
    if not of_records:
        source, without = "agents may send images", ", or set environment.agent.images.max_count=0"
    for key, hf in found.items():
        if family_of(hf).vision_config is None:
            raise UserError(f"{key}: {hf.model_type} reads no images, but {source}; use a model that does{without}")
    others = second_model_configs(config)
    own = ImageReader(config.model.path).sizes if of_records or others else None
    for key, other in others.items():
        sizes = ImageReader(other.model.path, key=key).sizes
        if key == JUDGE:
            _check_judge_sees_images(cast("RLConfig", config), other.model.path)
        elif sizes != own:
            raise UserError(
                f"{key}: the image processor of {other.model.path} makes other numbers of tokens than that of {POLICY} "
                f"(pixels of a token's side, at least, at most: {sizes} instead of {own}); use a model with the same "
                f"preprocessor_config.json{without}"
            )
    if of_records and isinstance(config, RLConfig) and config.environment.name == "agent" and not _takes_images(config):
        raise UserError("environment.agent.images.max_count=0 refuses images, but data.train has prompts with images")


def _takes_images(config: TrainingConfig) -> bool:
    """Return whether agents' requests may contain images."""
    environment = config.environment if isinstance(config, RLConfig) else None
    return environment is not None and environment.name == "agent" and environment.agent.images.max_count > 0


def _check_judge_sees_images(config: RLConfig, path: Path) -> None:
    """Raise UserError if the judging reward model in `path` would judge conversations without their images."""
    if config.environment.format == "text":
        raise UserError(
            "environment.format=text: joins the texts of messages, but data.train has prompts with images; set "
            "environment.format=chat"
        )
    image = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}
    messages: Messages = [image, {"role": "assistant", "content": "."}]
    with _named_by(JUDGE, path):
        tokenizer = load_tokenizer(path, images=Path())
    try:
        check_image_tokens(tokenizer, messages, render(tokenizer, messages))
    except ValueError as error:
        raise UserError(f"{JUDGE}: {path} cannot judge images: {error}") from None


def _check_before_reading(config: TrainingConfig, hf_config: Any, tokenizer: Any) -> None:
    """On rank 0, run those checks of `check_output_dir` that do not depend on the data; write no file.

    Raises:
        UserError: a checkpoint belongs to another run, an adapter to another model, or the hub refuses access.
    """
    if torchrun.rank() > 0:
        return
    candidates, _ = find_checkpoints(config)
    lora = config.model.lora
    if candidates:
        check_identity(RunIdentity.of(config, hf_config, "", str(chat_day(tokenizer) or "")), candidates)
    if lora is not None and lora.path is not None:
        PEFTDirectory(lora.path).check_base(config.model.path, digest_of_weights(config.model.path))
    if config.checkpoint.push_to_hub is not None:
        check_repository(config.checkpoint.push_to_hub)


def _entries(directory: Path) -> set[Path]:
    """Return the set of `directory` and all files and directories in it; an empty set if `directory` does not exist."""
    return {directory, *directory.rglob("*")} if directory.exists() else set()


def tokenizer_and_cache(config: TrainingConfig, say: PrintLine = silent) -> tuple[Any, TokenCache]:
    """Return the tokenizer and the token cache for it.

    If the chat template inserts a date, a resumed run uses the date on which it was first started.
    """
    path, trusted, template = config.model.path, config.model.trust_remote_code, config.data.read_chat_template()
    cache_dir = config.data.cache_dir or default_directory()
    images = image_directory(cache_dir)
    tokenizer = load_tokenizer(path, trusted, template, say, images=images)
    if chat_day(tokenizer) is not None and (first := _first_day(config)):
        set_chat_day(tokenizer, first)
    made_from = TokenizerSpec(path, trusted, template, chat_day(tokenizer), images)
    return tokenizer, TokenCache(cache_dir, made_from)


def _first_day(config: TrainingConfig) -> date | None:
    """Return the date that the resumed run's chat templates insert; None for a new run or templates without a date."""
    earlier = _earlier_identity(config)
    return date.fromisoformat(earlier.chat_day) if earlier is not None and earlier.chat_day else None


def _earlier_identity(config: TrainingConfig) -> RunIdentity | None:
    """Return the stored identity of the run that is resumed; None for a new run."""
    candidates, _ = find_checkpoints(config)
    found = next(filter(None, map(identity_of, candidates)), None)
    return RunDirectory(config.output_dir).identity if found is None and config.checkpoint.resume != "none" else found


def claim_output_dir(
    config: TrainingConfig, inputs: RunInputs[DatasetT], options: Mapping[str, str] = {}
) -> RunInputs[DatasetT]:
    """Lock the output directory for this run; return `inputs` with the checkpoints to resume from. Collective.

    Rank 0 checks the directory, and then locks it. Then all processes compare their inputs.

    Args:
        options: options of the command line. The processes compare them too.

    Raises:
        UserError: the run would destroy or continue the files of another run, or a process has other inputs than
            rank 0.
    """
    if config.dry_run:
        raise ContractError(
            "claim_output_dir: was called with dry_run set, but a dry run must not lock the output directory; call "
            "mcore_rl.cli.dry_run.run_dry instead"
        )
    inputs = check_output_dir(config, inputs)
    if torchrun.rank() == 0 and (note := RunDirectory(config.output_dir).claim()):
        inputs = replace(inputs, checkpoints=(inputs.checkpoints[0], [note, *inputs.checkpoints[1]]))
    parallel = config.parallel
    platform.initialize_process_group(timedelta(seconds=parallel.timeout_seconds), parallel.backend)
    check_processes_agree(config, inputs, options)
    shard_process.start_early()
    return inputs


def check_output_dir(config: TrainingConfig, inputs: RunInputs[DatasetT]) -> RunInputs[DatasetT]:
    """Check the output directory; return `inputs` with the checkpoints to resume from and the run's identity.

    Nothing is written. Only rank 0 reads the directory, because other ranks may see other files.

    Raises:
        UserError: the run would destroy or continue the files of another run.
    """
    if torchrun.rank() > 0:
        identity = _identity(config, inputs).to_json() if torchrun.local_rank() == 0 else ""
        return replace(inputs, checkpoints=([], []), identity=identity)
    candidates, notes = find_checkpoints(config)
    check_output(config)
    run = _identity(config, inputs)
    notes = notes + check_identity(run, candidates)
    if config.model.lora is not None and config.model.lora.path is not None:
        notes += PEFTDirectory(config.model.lora.path).check_base(config.model.path, run.base_weights)
    return replace(inputs, checkpoints=(candidates, notes), identity=run.to_json())


def _identity(config: TrainingConfig, inputs: RunInputs[Any]) -> RunIdentity:
    return RunIdentity.of(config, inputs.hf_config, inputs.train.fingerprint, str(inputs.day or ""))


def warn_about_unreached_intervals(
    config: TrainingConfig, steps: int, say: PrintLine, updates_per_step: int = 1
) -> None:
    """Print a warning for each interval that is longer than the run, and for validation data that is never used.

    Args:
        steps: number of steps of the run.
    """
    intervals = {
        "checkpoint.save_interval": config.checkpoint.save_interval,
        "trainer.validation_interval": config.trainer.validation_interval,
    }  # fmt: skip
    for key, interval in intervals.items():
        if interval is not None and interval > steps:
            say(f"{key}={interval} is never reached: the run has {steps} steps")
    trainer = config.trainer
    if config.data.validation is not None and trainer.validation_interval is None and not trainer.validate_at_end:
        say("data.validation is not used during training: there is no trainer.validation_interval")
    warn_about_optimizer("optimizer", config.optimizer, steps * updates_per_step, say)


def warn_about_optimizer(key: str, optimizer: OptimizerConfig, updates: int, say: PrintLine) -> None:
    """Print a warning for each setting of an optimizer that does not fit a run of `updates` updates.

    Args:
        key: configuration key of the optimizer.
    """
    if optimizer.warmup_steps >= updates:
        shortened = optimizer.steps_of_warmup(updates)
        say(f"{key}.warmup_steps={optimizer.warmup_steps} is shortened to {shortened}: there are {updates} updates")
    if optimizer.lr == 0 and not optimizer.embedding_lr and not optimizer.vision_tower_lr:
        say(f"{key}.lr=0: the weights will not change")
