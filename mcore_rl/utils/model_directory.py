"""Model directories on disk and on the hub: their files, their architecture, and digests of their weights."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from mcore_rl.errors import UserError

_NAME = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
WEIGHTS = ["*.safetensors"]
"""Patterns of supported weight files; other formats are not downloaded."""
PATTERNS = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py", "LICENSE*", "NOTICE*"]
"""Patterns of the other files of a model, which are always downloaded. Downloaded code is not executed."""
SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
WHOLE_FILE_BYTES, WHOLE_TENSOR_BYTES = 64 << 20, 1 << 20
BLOCKS, BLOCK_BYTES = 16, 16 << 10
VISION_MODEL_TYPES = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""The `model_type` of all models that read images."""
MODEL_TYPES = (
    *("llama", "mistral", "ministral3", "qwen2", "qwen3", "phi3", "olmo2", "olmo3", "gemma3_text", "glm4", "seed_oss"),
    *("smollm3", "mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "deepseek_v3"),
    *("deepseek_v32", "kimi_k2", "mistral4", "mimo_v2_flash", "gpt_oss", "minimax_m2", "minimax_m3_vl_text", "hy_v4"),
    *("ernie4_5_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "kimi_linear", "nemotron_h", "glm5_next"),
    *("deepseek_v4", "gemma4_text", "gemma4", "qwen4_exp_text", "qwen4_exp", *VISION_MODEL_TYPES),
)
"""The `model_type` of all models in `models.megatron.families`; repeated here because that package needs PyTorch."""
SIZE = re.compile(
    r"(\w+_)?(num|n)_\w+|(?!mscale)(\w+_)?(size|dim|rank|lowrank|heads|kernel|groups?|blocks|count|mult|interval|ratio)"
    r"|(\w+_)?max_position_embeddings|(hidden|vocab)_size_per_layer_input|model_max_length|sliding_window|depth|expand"
    r"|first_k_dense_replace|moe_layer_start_index|max_window_layers|decoder_sparse_step|index_topk|index_kpool|moe_k"
    r"|indexer_budget|top_k_experts|(compressed_sparse|heavily_compressed)_attention|heads_per_ngram|split_ngram_parts"
    r"|make_ngram_vocab_size_divisible_by|in_channels|ngram_vocab_size_base|hc_sinkhorn_iters"
)
"""Keys of config.json whose values are sizes or numbers of things."""
MAY_BE_ZERO = {
    "num_nextn_predict_layers", "mtp_num_hidden_layers", "num_kv_shared_layers", "num_hash_layers",
    "n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "shared_intermediate_size",
    "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "hidden_size_per_layer_input",
    "qk_rope_head_dim", "sliding_window", "max_window_layers", "first_k_dense_replace", "moe_layer_start_index",
    "hc_sinkhorn_iters", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "num_logits_to_keep",
}  # fmt: skip
"""Sizes that are 0 in a model without this part, and positions of layers, which start at 0."""
PARTS_WITH_SIZES = {
    "text_config", "rope_parameters", "rope_scaling", "linear_attn_config", "compress_rates", "per_layer_config",
}  # fmt: skip
"""Objects in config.json that have sizes. `vision_config` has too, if the model reads images."""
PUSH = "checkpoint.push_to_hub"
"""Configuration key that names the repository; used in errors."""


def is_hub_name(path: Path) -> bool:
    """Return whether `path` is a name on the hub: OWNER/NAME or OWNER/NAME@REVISION, and no such path exists."""
    return not path.exists() and _NAME.fullmatch(str(path)) is not None


def download(name: str, key: str, with_weights: bool = True) -> Path:
    """Download a model into the hub's cache, if it is not there yet; return its directory.

    $HF_HUB_OFFLINE=1 disables downloads. All processes may call this at the same time: one process per node downloads,
    and the others wait for it.

    Args:
        key: configuration key that names the model, for errors.
        with_weights: also download the weights, in addition to configuration, tokenizer and code.

    Raises:
        UserError: the model does not exist, access is denied, or the hub cannot be reached.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    match = _NAME.fullmatch(name)
    assert match is not None, f"{name} is no name on the hub"
    patterns = PATTERNS + (WEIGHTS if with_weights else [])
    try:
        return Path(snapshot_download(match["name"], revision=match["revision"], allow_patterns=patterns))
    except GatedRepoError:
        reason = "its owner must grant access; ask for it on the hub, then log in with `hf auth login`"
    except RepositoryNotFoundError:
        reason = "the hub has no such model, or it is visible only after logging in (`hf auth login`)"
    except LocalEntryNotFoundError:
        reason = (
            "it is not in the hub's cache, and the hub cannot be reached; "
            f"download it with `hf download {match['name']}`"
        )
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
    raise UserError(f"{key}: {name} does not exist, and cannot be loaded as a model of the hub: {reason}")


def is_repository_name(name: str) -> bool:
    """Return whether `name` is OWNER/NAME, in a form that the hub accepts for a new repository."""
    return re.fullmatch(r"\b[\w.-]+\b/\b[\w.-]{1,96}\b", name) is not None and not re.search(r"--|\.\.", name)


def check_repository(name: str) -> None:
    """Check, without writing, that this user may write to the repository `name` on the hub, or create it.

    Raises:
        UserError: the hub cannot be reached, or denies access.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    api, owner = HfApi(), name.partition("/")[0]
    with_write: dict[str, Any] = {"write": True} if "write" in inspect.signature(api.auth_check).parameters else {}
    try:
        try:
            api.auth_check(name, **with_write)
        except GatedRepoError:
            raise
        except RepositoryNotFoundError:  # `make_repository` creates it
            user = api.whoami()
            owners = [user["name"], *(organization["name"] for organization in user.get("orgs", []))]
            if owner not in owners:
                told = f"the token is of {owners[0]}, who is not {owner} and not a member of it"
                raise PermissionError(told) from None
    except Exception as error:  # see `make_repository`
        raise _not_writable(name, error) from None


def make_repository(name: str) -> None:
    """Create the private repository `name` on the hub, if it does not exist; check that `push` may write to it.

    Raises:
        UserError: the hub cannot be reached, or denies write access.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        api.create_repo(name, private=True, exist_ok=True)  # also succeeds for another user's readable repository
        if "write" in inspect.signature(api.auth_check).parameters:  # in newer versions of the client
            api.auth_check(name, write=True)
    except Exception as error:  # the client's HTTP library and its exceptions change with its versions
        raise _not_writable(name, error) from None


def _not_writable(name: str, error: Exception) -> UserError:
    hint = "log in with `hf auth login` or $HF_TOKEN, or leave checkpoint.push_to_hub out and upload later"
    return UserError(f"{PUSH}: {name} cannot be written to ({_reason(error)}); {hint}")


def push(directory: Path, name: str) -> str:
    """Upload the exported model in `directory` to the repository `name` on the hub; return its address.

    Raises:
        UserError: the upload failed. The directory is unchanged.
    """
    from huggingface_hub import HfApi

    try:
        HfApi().upload_folder(repo_id=name, folder_path=directory, commit_message="Trained with mcore_rl")
    except Exception as error:  # see `make_repository`
        remedy = f"the model is complete in {directory}; upload it with `hf upload {name} {directory}`"
        raise UserError(f"{PUSH}: the upload to {name} failed ({_reason(error)}); {remedy}") from None
    return f"{HfApi().endpoint}/{name}"


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


# Keys of config.json about a model's origin and use that do not affect its computation.
NOT_ARCHITECTURE = {
    "_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures", "auto_map",
    "pad_token_id", "bos_token_id", "eos_token_id", "problem_type", "id2label", "label2id", "return_dict",
    "output_attentions", "output_hidden_states", "initializer_range", "_attn_implementation",
}  # fmt: skip


def architecture_of(hf_config: Any) -> dict[str, Any]:
    """Return the fields of a transformers configuration that determine a model's tensors and computations."""
    values: dict[str, Any] = json.loads(json.dumps(hf_config.to_dict(), default=str))
    return _architecture_in(values)


def _architecture_in(values: dict[str, Any]) -> dict[str, Any]:
    """Return the `values` that determine the architecture; nested parts such as `text_config` are searched too."""
    kept = ((key, value) for key, value in values.items() if key not in NOT_ARCHITECTURE)
    return {key: _architecture_in(value) if isinstance(value, dict) else value for key, value in kept}


def architecture_changes(earlier: dict[str, Any], now: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return (key, earlier value, value now) for each difference between two architectures, model_type first."""
    keys = sorted(set(earlier) & set(now), key=lambda key: (key != "model_type", key))
    return [(key, earlier[key], now[key]) for key in keys if earlier[key] != now[key]]


def digest_of_weights(path: Path) -> str:
    """Return a hash of the safetensors files in the directory of a model or adapter; names of files do not matter.

    It would take minutes to read all of a large model. If a file has more than 64 MiB, only three things are read: the
    header, tensors of up to 1 MiB, and 16 evenly spaced blocks of 16 KiB of each larger tensor (including its first and
    last block). A change elsewhere is not detected, for example a change of a few rows in the middle of an embedding.
    """
    files = [*path.glob("*.safetensors"), *path.glob("adapter_config.json")]  # the latter has an adapter's scale
    digests = [_digest_of_file(file) for file in files]
    return hashlib.sha256(b"".join(sorted(digests))).hexdigest()


def _digest_of_file(file: Path) -> bytes:
    with open(file, "rb") as stream:
        if file.stat().st_size <= WHOLE_FILE_BYTES:
            return hashlib.file_digest(stream, "sha256").digest()
        header = stream.read(int.from_bytes(stream.read(8), "little"))
        data, digest = stream.tell(), hashlib.sha256(header)
        tensors = [entry for name, entry in json.loads(header).items() if name != "__metadata__"]
        for begin, end in sorted(entry["data_offsets"] for entry in tensors):
            for offset, size in _blocks(begin, end - begin):
                stream.seek(data + offset)
                digest.update(stream.read(size))
    return digest.digest()


def _blocks(begin: int, size: int) -> list[tuple[int, int]]:
    """Return (offset, size) of each block to read of a tensor that begins at offset `begin` and has `size` bytes."""
    if size <= WHOLE_TENSOR_BYTES:
        return [(begin, size)]
    return [(begin + index * (size - BLOCK_BYTES) // (BLOCKS - 1), BLOCK_BYTES) for index in range(BLOCKS)]


def check_model_directory(path: Path, key: str = "model.path") -> dict[str, Any]:
    """Check that `path` is a Hugging Face model directory; return the content of its config.json.

    Raises:
        UserError: the path is something else (the message says what), or its model type is not supported.
    """
    if (path / "adapter_config.json").is_file() and not (path / "config.json").is_file():
        merged = "merge it into its base model"
        instead = "give its base model, and the adapter as model.lora.path" if key == "model.path" else merged
        raise UserError(f"{key}: {path} is an adapter (LoRA), not a model; {instead}")
    if not path.exists():
        raise UserError(f"{key}: {path} does not exist; give a Hugging Face model directory, or OWNER/NAME on the hub")
    if not (path / "config.json").is_file():
        raise UserError(f"{key}: {path} must be a Hugging Face model directory with a config.json")
    try:
        config = json.loads((path / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{key}: {path / 'config.json'} is not JSON ({error})") from None
    if not isinstance(config, dict) or "model_type" not in config:
        raise UserError(f"{key}: {path / 'config.json'} has no model_type")
    if (model_type := config["model_type"]) not in MODEL_TYPES:
        raise UserError(f"{key}: model type {model_type!r} is not supported; supported are {', '.join(MODEL_TYPES)}")
    for name, value, least in sizes_in(config):
        if value is not None and (type(value) is not int or value < least):
            raise UserError(
                f"{key}: {path / 'config.json'}: {name} must be a whole number of at least {least}, got "
                f"{json.dumps(value)[:80]}"
            )
    return config


def sizes_in(config: Mapping[str, Any]) -> Iterator[tuple[str, Any, int]]:
    """Yield the name of each size in a config.json, its value, and the least valid value.

    Args:
        config: the content of config.json; its model type is supported.
    """
    parts = PARTS_WITH_SIZES | ({"vision_config"} if config["model_type"] in VISION_MODEL_TYPES else set())

    def below(values: Mapping[str, Any], prefix: str, parts: Collection[str] | None) -> Iterator[tuple[str, Any, int]]:
        for name, value in values.items():
            if isinstance(value, dict):
                if parts is None or name in parts:
                    yield from below(value, f"{prefix}{name}.", parts if name == "text_config" else None)
            elif SIZE.fullmatch(name):
                # transformers writes head_dim = qk_rope_head_dim for latent attention
                may_be_zero = name in MAY_BE_ZERO or (name == "head_dim" and "qk_rope_head_dim" in values)
                yield f"{prefix}{name}", value, 0 if may_be_zero else 1

    return below(config, "", parts)


def vision_model_config(path: Path) -> dict[str, Any] | None:
    """Return the content of a model directory's config.json if the model reads images, otherwise None."""
    try:
        config: dict[str, Any] = json.loads((path / "config.json").read_bytes())
        return config if config["model_type"] in VISION_MODEL_TYPES else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def positions_of(values: Mapping[str, Any]) -> float:
    """Return the number of positions of a model; infinity if the model has no limit.

    Args:
        values: the content of the model's config.json.
    """
    text = values.get("text_config") or values
    own = text.get("max_position_embeddings") or text.get("model_max_length") or math.inf
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    return float(max(own, (rope.get("factor") or 1.0) * (rope.get("original_max_position_embeddings") or own)))


def count_layers(path: Path) -> int | None:
    """Return the number of layers in a model directory's config.json; None if it does not say it."""
    values = json.loads((path / "config.json").read_bytes())
    text = {**values, **values.get("text_config", {})}
    layers = text.get("num_hidden_layers", len(text.get("layers_block_type") or ()))  # Nemotron-H
    return layers if isinstance(layers, int) and layers else None


def check_positions(values: Mapping[str, Any], max_sequence_length: int) -> None:
    """Check that a model has enough positions for sequences of the maximum length.

    Args:
        values: the content of the model's config.json.

    Raises:
        UserError: the model has too few positions; the message names the key and its largest valid value.
    """
    positions = positions_of(values)
    if max_sequence_length > positions:
        raise UserError(
            f"data.max_sequence_length={max_sequence_length}: the model has {positions:.0f} positions "
            f"(max_position_embeddings); set data.max_sequence_length={positions:.0f} or less"
        )


def has_chat_template(path: Path) -> bool:
    """Return whether a model directory has a chat template, in a separate file or in the tokenizer's settings."""
    if any(path.glob("*chat_template*")) or (path / "tekken.json").is_file():
        return True
    try:
        return bool(json.loads((path / "tokenizer_config.json").read_bytes()).get("chat_template"))
    except (OSError, ValueError, AttributeError):
        return False


def has_only_config(path: Path) -> bool:
    """Return whether a model directory has a config.json, but neither weights nor a tokenizer."""
    others = ("*.safetensors", "*.bin", "*.index.json", "*token*", "*.model", "vocab*", "tekken.json")
    return (path / "config.json").is_file() and not any(file for pattern in others for file in path.glob(pattern))


TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def check_tokenizer(path: Path) -> None:
    """Raise UserError if a model directory has no file of a tokenizer."""
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        raise UserError(f"model.path: no tokenizer found in {path} (none of {', '.join(TOKENIZER_FILES)})")


TEMPLATES = "additional_chat_templates"
"""Subdirectory of a model's further chat templates, such as one for tools."""
LEFT_OUT = {
    "written anew": ("config.json", "manifest.json"),
    "weights": ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.onnx", "*.gguf", "*.npz"),
    "indexes of weights": ("*.index.json",),
    "the state of another training": ("trainer_state.json", "*.pkl"),
    "adapters": ("adapter_config.json",),
    "quantization, which the export does not have": ("*quant*config.json",),
    "the model card and Git's files, which describe the model before training": ("README*", ".*"),
}
"""Patterns of the files of a model directory that exports leave out, by their kind. Exports copy all other files."""


def missing_files(path: Path) -> list[str]:
    """Return the names of the weight files that a model directory lacks, for example after an interrupted download.

    Raises:
        UserError: the index of the weight files cannot be read.
    """
    index = path / INDEX_FILE
    files = sorted(set(read_index(index).values())) if index.is_file() else [SINGLE_FILE]
    return [name for name in files if not (path / name).is_file()]


def read_index(path: Path) -> dict[str, str]:
    """Read the index of a sharded model; return, for each tensor, the name of the file that contains it."""
    try:
        return dict(json.loads(path.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path}: must be JSON with a weight_map") from None


def companions(path: Path) -> Iterator[Path]:
    """Yield the files of a model directory that exports copy: all except those in `LEFT_OUT`.

    Of the subdirectories, only that of further chat templates is searched: transformers reads no other.
    """
    left_out = [pattern for patterns in LEFT_OUT.values() for pattern in patterns]
    for file in sorted((*path.glob("*"), *path.glob(f"{TEMPLATES}/*.jinja"))):
        if file.is_file() and not any(fnmatchcase(file.name, pattern) for pattern in left_out):
            yield file


def copy_companions(source: Path, destination: Path, chat_template: str | None = None) -> None:
    """Copy the files of the model directory `source` except those in `LEFT_OUT`.

    Args:
        chat_template: chat template to write in place of all templates of `source`.
    """
    for file in companions(source):
        is_further = file.parent != source
        if is_further and chat_template is not None:
            continue  # transformers would prefer one of these templates for conversations with tools
        copy = destination / file.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)
    if chat_template is not None:  # transformers prefers this file to any other source of a template
        (destination / "chat_template.jinja").write_text(chat_template)


def name_padding(path: Path, token: int) -> None:
    """Let the tokenizer in `path` pad with the token of this id, if it names no pad token and lists this token.

    Sequence classifiers get padded batches, in which the padding must be the configuration's `pad_token_id`.
    """

    def read(name: str) -> dict[str, Any]:
        return json.loads((path / name).read_bytes()) if (path / name).is_file() else {}

    settings = read("tokenizer_config.json")
    if settings.get("pad_token") or read("special_tokens_map.json").get("pad_token"):
        return
    listed = {entry["id"]: entry["content"] for entry in read("tokenizer.json").get("added_tokens", ())}
    listed |= {int(key): entry["content"] for key, entry in settings.get("added_tokens_decoder", {}).items()}
    if token in listed:
        text = json.dumps({**settings, "pad_token": listed[token]}, indent=2, ensure_ascii=False)
        (path / "tokenizer_config.json").write_text(text + "\n")
