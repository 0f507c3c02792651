"""The base class of model families.

`Family` itself describes a Llama-like decoder. Its subclasses override what is different in their models.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_rl.config import ModelConfig
from mcore_rl.data.choices import CHOSEN_KEYS, RecordedChoice, replayed_choices
from mcore_rl.errors import UserError
from mcore_rl.models.megatron.attention.attention import GroupedQueryAttention, TokenMixer
from mcore_rl.models.megatron.layers.hyper_connections import ResidualStreams, StreamLayer
from mcore_rl.models.megatron.layers.ngram_embedding import NGramEmbedding
from mcore_rl.models.megatron.layers.per_layer_inputs import PerLayerInputs
from mcore_rl.models.megatron.layers.transformer_layer import PackLayer, rope_frequencies, rope_parameters
from mcore_rl.models.megatron.weight_mapping import (
    Columns,
    GateUp,
    Mapping,
    Part,
    Replicated,
    Rows,
    Shape,
    Vocabulary,
    tensor_shapes,
)

LM_HEAD = "lm_head.weight"
MTP_DEPTH = "trained_mtp_layers"
"""Attribute of a configuration: how many layers that predict further tokens are trained (`load_hf_config`)."""
REWARD_ARCHITECTURE = "ForSequenceClassification"
GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")
"""Hugging Face names of the projections of an MLP with a gate."""
REWARD_HEAD = "score.weight"
"""Name of the reward head's weight, as in transformers' sequence classifiers; it replaces the LM head."""


def has_reward_head(hf: Any) -> bool:
    """Return whether the model has a reward head instead of an LM head. A reward head has one output."""
    return any(REWARD_ARCHITECTURE in name for name in hf.architectures or ())


def recorded_choices(family: Family, model: ModelConfig) -> list[RecordedChoice]:
    """Return descriptions of the choices that sampling records, because the policy makes them again in training."""
    return [family.choices()[name] for name in replayed_choices(model)]


@dataclass(frozen=True)
class PredictionNames:
    """Hugging Face names of the parts of a layer that predicts a further token (MTP).

    layer: prefix of the names of its block. embedding_norm, hidden_norm, projection, final_norm: modules.
    embedding, head: tensors in which a directory may repeat the embedding and the LM head; "" if it does not.
    """

    layer: str
    embedding_norm: str
    hidden_norm: str
    projection: str
    final_norm: str
    embedding: str = ""
    head: str = ""


class Family:
    """The architecture of a model: its dimensions, its fields in Megatron's configuration, and all its tensors.

    It is created from a Hugging Face configuration.

    whole: the Hugging Face configuration. hf: the text model's configuration inside `whole`; the same object for most
        families.
    model_type: name of the family in `config.json`.
    norms_before: whether a layer has norms before attention and MLP. norms_after: whether it has norms after them.
    num_ids: number of ids, from 0 on, over which log-probabilities and samples are normalized. It is `vocab_size`,
        unless a caller sets it because the tokenizer has fewer tokens.
    mtp_depth: number of layers that predict further tokens and are trained.
    norm_names: Hugging Face names of a layer's four norms: before and after attention, before and after the MLP; "" for
        a norm that the layer does not have. final_norm_name: Hugging Face name of the norm after the last layer.
    dense_mlp_name: Hugging Face name of the MLP of a layer without experts. mlp_projections: names of an MLP's gate, up
        and down projections; of its up and down projections if MLPs and experts have no gates.
    """

    model_type: ClassVar[str]
    norms_before: ClassVar[bool] = True
    norms_after: ClassVar[bool] = False
    norm_names: ClassVar[tuple[str, str, str, str]] = ("input_layernorm", "", "post_attention_layernorm", "")
    final_norm_name: ClassVar[str] = "norm"
    dense_mlp_name: ClassVar[str] = "mlp"
    mlp_projections: ClassVar[tuple[str, ...]] = GATE_UP_DOWN
    activations: ClassVar[dict[str, Callable[[Tensor], Tensor]]] = {"silu": F.silu, "swish": F.silu}
    embedding_scale = 1.0
    has_windows = True
    """Whether `sliding_window` of the configuration is used. It is False if transformers ignores it in this family."""
    gradient_tolerance: ClassVar[float] = 1e-4
    """Largest relative difference that rounding may cause between the gradients of two parallel layouts."""
    has_dropout = False
    """Whether attention dropout in the configuration is ignored. If it is not ignored, a value above 0 is an error."""
    has_layer_types = True
    """Whether `layer_types` determines which layers have windows. It is False if transformers ignores it."""
    rotates_neighbours = False
    """Whether the two elements of a rotated pair are neighbours; otherwise they are half a head apart."""
    unadapted: ClassVar[tuple[str, ...]] = ()
    """Projections that cannot have adapters: PEFT refuses them, or transformers has them in modules of other names than
    their tensors."""
    without_adapters: ClassVar[str] = ""
    """Regular expression of modules in transformers that never have adapters, but whose last name is that of one that
    may have."""
    experts_in: ClassVar[str] = "mlp"
    """Name of the module of a layer that contains the module `experts` in transformers; "" for the layer itself."""
    rotates_partly = False
    """Whether a configuration may restrict rotary embeddings to a part of each head."""

    auto_class: ClassVar[str] = "AutoModelForCausalLM"
    """Name of transformers' class that makes a model with LM head from a configuration."""
    streams: ResidualStreams | None = None
    """The streams of the residual, if the model has hyper-connections."""
    float32_head: ClassVar[bool] = False
    """Whether an LM head that is not the embedding is always float32, whatever the model's precision is."""

    float32_norms: ClassVar[bool] = False
    """Whether the weights of the layers' norms and of the last norm are always float32."""

    prefix: ClassVar[str] = "model."
    """Prefix of the Hugging Face names of the text model's tensors."""

    @property
    def vision_config(self) -> Any:
        """transformers' configuration of the vision tower; None if the model reads no images."""
        return None

    @property
    def streams_count(self) -> int:
        """Number of streams of the residual."""
        return 1 if self.streams is None else self.streams.count

    @cached_property
    def layers_with_indexer(self) -> tuple[int, ...]:
        """Numbers of the layers, from 0, that choose keys; without those that share another layer's choice."""
        indexers = [getattr(self.token_mixer(layer), "indexer", None) for layer in range(self.num_layers)]
        return tuple(n for n, indexer in enumerate(indexers) if indexer is not None and indexer.source == n)

    def choices(self) -> dict[str, RecordedChoice]:
        """Return descriptions of the choices that the model makes for each token, by name."""
        layers = self.layers_with_indexer
        if not layers:
            return {}
        size = max(self.token_mixer(layer).indexer.chosen_size for layer in layers)  # type: ignore[union-attr]
        return {CHOSEN_KEYS: RecordedChoice(CHOSEN_KEYS, len(layers), size)}

    @property
    def message_rows(self) -> int:
        """Number of rows [hidden] that a pipeline stage sends for each token: the streams, and the layers' inputs."""
        inputs = self.per_layer_inputs
        return self.streams_count + (0 if inputs is None else inputs.rows(self.num_layers, self.hidden_size))

    @property
    def deepstack(self) -> int:
        """Number of first layers to whose outputs the vision tower's features are added."""
        return 0

    def __init__(self, hf: Any) -> None:
        self.whole = hf
        hf = self.hf = self.text_config(hf)
        self.vocab_size = self.num_ids = int(hf.vocab_size)
        self.hidden_size = int(hf.hidden_size)
        self.num_layers = int(hf.num_hidden_layers)
        self.num_attention_heads = int(hf.num_attention_heads)
        sizes = self.layer_config(0)
        self.num_query_groups = int(sizes.num_key_value_heads)
        self.head_dim = int(getattr(sizes, "head_dim", None) or hf.hidden_size // hf.num_attention_heads)
        self.ties_embeddings = bool(self.whole.tie_word_embeddings)
        self.mtp_depth = int(getattr(self.whole, MTP_DEPTH, 0))
        self.has_reward_head = has_reward_head(self.whole)

    @classmethod
    def kind_for(cls, hf: Any) -> type[Family]:
        """Return the class for this configuration: this class, unless models of one type differ too much."""
        return cls

    @staticmethod
    def text_config(hf: Any) -> Any:
        """Return the configuration of the text model in the configuration `hf` of the whole model."""
        return hf

    def layer_config(self, layer: int) -> Any:
        """Return the configuration with the sizes of a layer's attention heads."""
        return self.hf

    # ------------------------------------------------------------ differences between families

    @property
    def has_qkv_bias(self) -> bool:
        """Whether the query, key and value projections have biases."""
        return False

    @property
    def has_qk_norm(self) -> bool:
        """Whether each query and key head has an RMS norm."""
        return False

    @property
    def has_wide_qk_norm(self) -> bool:
        """Whether one RMS norm spans all query heads together, and another one all key heads together."""
        return False

    @property
    def activation(self) -> str:
        """Transformers' name of the activation function in the MLP."""
        return str(self.hf.hidden_act)

    @property
    def intermediate_size(self) -> int:
        """Size of the hidden layer of a dense layer's MLP."""
        return int(self.hf.intermediate_size)

    def mlp_width(self, layer: int) -> int:
        """Return the size of the hidden layer of the MLP of a dense layer."""
        return self.intermediate_size

    @property
    def logit_softcap(self) -> float | None:
        """Bound c of the logits, which are c · tanh(x / c) for the LM head's outputs x; None if there is no bound."""
        return None

    @property
    def per_layer_inputs(self) -> PerLayerInputs | None:
        """Description of the embeddings that each layer has of its own; None if the layers have none."""
        return None

    @property
    def shares_tensors(self) -> bool:
        """Whether layers use tensors with gradients other than the hidden states. Then they recompute themselves
        (`ScaledLayer.recompute`)."""
        return False

    def layer_module(self, layer: int) -> tuple[type[PackLayer], dict[str, Any]]:
        """Return the class of a layer's module, and those of its arguments that are its own."""
        if self.streams is None:
            return PackLayer, {}
        ngrams = self.ngrams(layer)
        return StreamLayer, {"streams": self.streams, "ngrams": None if ngrams is None else ngrams.module}

    @property
    def padding_token(self) -> int | None:
        """Token whose input embedding gets no gradient: `padding_idx` of transformers' embedding."""
        token = getattr(self.hf, "pad_token_id", None)
        return None if token is None else int(token) % self.vocab_size

    @property
    def score_padding(self) -> int | None:
        """Token that a sequence's reward is not read at; None if a reward is read at any last token."""
        token = getattr(self.hf, "pad_token_id", None)
        return None if token is None else int(token)

    def set_score_padding(self, token: int) -> None:
        """Set `score_padding`, also for exports. The embedding's `padding_token` of a built model stays the same."""
        self.hf.pad_token_id = token

    @property
    def norm_eps(self) -> float:
        """Number that norms add to mean squares."""
        return float(self.hf.rms_norm_eps)

    @property
    def softmax_scale(self) -> float:
        """Factor by which query–key products are multiplied."""
        return float(self.head_dim**-0.5)

    def window(self, layer: int) -> int | None:
        """Return the maximum number of tokens that a token sees in this layer, including itself; None for all."""
        window = getattr(self.hf, "sliding_window", None) if self.has_windows else None
        if not window or not getattr(self.hf, "use_sliding_window", True):
            return None
        types = getattr(self.hf, "layer_types", None) if self.has_layer_types else None
        return int(window) if types is None or types[layer] == "sliding_attention" else None

    def ropes(self) -> list[Tensor]:
        """Return the inverse frequencies of the rotary embedding, for each kind of layer."""
        return [self._rope_frequencies()[0]]

    def rope_axes(self) -> Tensor | None:
        """Return which of a token's positions each frequency uses; None if a token has only one position."""
        return None

    def rope_factor(self, layer: int) -> float:
        """Return the factor by which the layer's cos and sin are multiplied; the factor is 1 except for YaRN."""
        return self._rope_frequencies()[1]

    def _rope_frequencies(self) -> tuple[Tensor, float]:
        part = rope_parameters(self.hf)["partial_rotary_factor"]
        if part != 1 and not self.rotates_partly:
            raise UserError(
                f"model.path: partial_rotary_factor={part} is not supported; for {self.model_type} it must be 1"
            )
        return rope_frequencies(self.hf)

    def rope_kind(self, layer: int) -> int:
        """Return which entry of `ropes` the layer uses."""
        return 0

    def token_mixer(self, layer: int) -> TokenMixer | None:
        """Return the token mixer of a layer, which describes the layer's attention; None if it has only an MLP."""
        return self._grouped_query_attention(layer)

    def ngrams(self, layer: int) -> NGramEmbedding | None:
        """Return the embeddings of n-grams that are added to the streams before a layer; None if there are none."""
        return None

    def constants(self) -> dict[str, Tensor]:
        """Return the tensors of a directory whose values the configuration determines, by name."""
        return {}

    def has_mlp(self, layer: int) -> bool:
        """Return whether the layer has an MLP or experts; if not, it has only a token mixer."""
        return True

    def module_of(self, name: str) -> str:
        """Return the name that transformers gives to the module called `name` in directories."""
        return name

    def _grouped_query_attention(
        self, layer: int, kind: type[GroupedQueryAttention] = GroupedQueryAttention, **fields: Any
    ) -> GroupedQueryAttention:
        """Return the layer's attention with this family's dimensions.

        Args:
            kind: class of the result.
            fields: further fields of the result. They take precedence over this family's values.
        """
        common: dict[str, Any] = {
            "hidden": self.hidden_size,
            "heads": self.num_attention_heads,
            "groups": self.num_query_groups,
            "head_dim": self.head_dim,
            "scale": self.softmax_scale,
            "window": self.window(layer),
            "qkv_bias": self.has_qkv_bias,
            "qk_norm": self.has_qk_norm,
            "wide_qk_norm": self.has_wide_qk_norm,
            "post_norm_name": self.norm_names[1] if self.norms_after else "",
            "rope_factor": self.rope_factor(layer),
            "neighbours": 2 * len(self.ropes()[0]) if self.rotates_neighbours else 0,
        }
        return kind(**{**common, **fields})

    def check(self, max_sequence_length: int) -> None:
        """Raise an error for options of the configuration that this family does not support.

        Raises:
            UserError: the message names the field of `config.json`.
        """
        hf = self.hf
        if self.activation not in self.activations:
            known = ", ".join(self.activations)
            raise UserError(f"model.path: activation {self.activation!r} is not supported; supported are {known}")
        if getattr(hf, "attention_bias", False) and not self.has_qkv_bias:
            raise UserError("model.path: attention_bias=true (a bias on the output projection) is not supported")
        if getattr(hf, "mlp_bias", False):
            raise UserError("model.path: mlp_bias=true is not supported")
        if getattr(hf, "attention_dropout", 0.0) and not self.has_dropout:
            raise UserError("model.path: attention_dropout other than 0 is not supported")
        self.ropes()
        for layer in range(self.num_layers):
            if (mixer := self.token_mixer(layer)) is not None:
                mixer.check()

    def megatron_fields(self) -> dict[str, Any]:
        """Return the fields of Megatron's TransformerConfig that describe the architecture."""
        return {
            "num_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "ffn_hidden_size": self.intermediate_size,
            "num_attention_heads": self.num_attention_heads,
            "num_query_groups": self.num_query_groups,
            "kv_channels": self.head_dim,
            "normalization": "RMSNorm",
            "layernorm_epsilon": self.norm_eps,
            "qk_layernorm": self.has_qk_norm or self.has_wide_qk_norm,
            "gated_linear_unit": len(self.mlp_projections) == 3,
            "activation_func": self.activations[self.activation],
            "softmax_scale": self.softmax_scale,
            "add_bias_linear": False,
            "add_qkv_bias": self.has_qkv_bias,
            "hetereogenous_dist_checkpoint": self.layers_differ,  # checkpoints cannot stack such layers
        }

    def shrink(self, layers: int, tensor_parallel: int, expert_parallel: int) -> None:
        """Change the configuration so that it describes a small model with the same architecture.

        The model has `layers` layers. Parallel layouts up to the given sizes divide it evenly.
        """
        hf = self.hf
        ratio = hf.num_attention_heads // hf.num_key_value_heads
        hf.num_key_value_heads = max(2, tensor_parallel)
        hf.num_attention_heads = hf.num_key_value_heads * min(ratio, 4)
        hf.head_dim = 16
        hf.hidden_size = hf.head_dim * hf.num_attention_heads
        hf.intermediate_size = 32 * max(2, tensor_parallel)
        hf.num_hidden_layers = layers
        if getattr(hf, "layer_types", None):
            kinds = list(dict.fromkeys(hf.layer_types))
            hf.layer_types = [kinds[layer % len(kinds)] for layer in range(layers)]

    def fill(self, model: Any) -> None:
        """Give values to tables that are empty in a new model of transformers with this configuration."""

    def divisible_by_tensor_parallel(self) -> dict[str, int]:
        """Return the sizes that must be multiples of the tensor-parallel size, by the name of the dimension."""
        return {"attention heads": self.num_attention_heads, "intermediate size": self.intermediate_size}

    def divisible_by_tensor_and_context_parallel(self) -> dict[str, int]:
        """Return the sizes that must be multiples of (tensor-parallel size × context-parallel size), by their names."""
        return {}

    # ------------------------------------------------------------ tensors

    @property
    def embedding_name(self) -> str:
        """Hugging Face name of the embedding."""
        return f"{self.prefix}embed_tokens.weight"

    @cached_property
    def table(self) -> dict[str, Mapping]:
        """Map from the Megatron name of each parameter to its `Mapping`, in the model's order."""
        return {mapping.megatron: mapping for mapping in self._mappings()}

    @property
    def layers_differ(self) -> bool:
        """Whether some layers have other parameters, or parameters of other shapes, than the first layer."""
        layers = defaultdict[str, dict[str, Any]](dict)
        for name, mapping in self.table.items():
            before, _, rest = name.partition("decoder.layers.")
            if rest and not before:
                layer, _, own = rest.partition(".")
                layers[layer][own] = [part.shape for part in mapping.parts]
        first, *others = layers.values()
        return any(other != first for other in others)

    def shapes(self) -> dict[str, Shape]:
        """Return the shapes of the Hugging Face tensors by name, in the model's order."""
        return tensor_shapes(self.table.values())

    def float32_tensors(self) -> set[str]:
        """Return the names of the Hugging Face tensors that are always float32, whatever the model's precision is."""
        return {name for mapping in self.table.values() if mapping.is_float32 for name in mapping.hf_names}

    def ignores(self, name: str) -> bool:
        """Return whether loading skips the tensor `name` of a model directory.

        It skips tensors that can be computed, an LM head that equals the embedding (`load_hf_config` unties them if
        they differ), and an LM head that a reward head replaces.
        """
        headless = self.ties_embeddings or self.has_reward_head
        return name.endswith("rotary_emb.inv_freq") or (headless and name == LM_HEAD)

    def passes_on(self, name: str) -> bool:
        """Return whether the directory's tensor `name` is no part of the text model, or of a layer that may be trained
        (`prediction_names`)."""
        return False

    def copies(self, name: str) -> bool:
        """Return whether the directory's tensor `name` is not trained. Exports contain it unchanged."""
        return self.passes_on(name) and name not in self._own_names

    @cached_property
    def _own_names(self) -> frozenset[str]:
        return frozenset(self.shapes())

    # ------------------------------------------------------------ layers that predict further tokens

    def prediction_names(self, k: int) -> PredictionNames | None:
        """Return the names of layer `k`, from 0, that predicts further tokens; None if such layers are not known."""
        return None

    def repeated(self, names: Collection[str]) -> dict[str, str]:
        """Return which of the tensors `names` of a directory may repeat the embedding or the LM head, and which one.

        A reward model has no LM head that could be repeated.
        """
        head, found = self.embedding_name if self.ties_embeddings else LM_HEAD, dict[str, str]()
        parts = itertools.takewhile(
            lambda part: part is not None and f"{part.projection}.weight" in names,
            map(self.prediction_names, itertools.count()),
        )
        for part in parts:
            assert part is not None
            found |= {part.embedding: self.embedding_name}
            found |= {} if self.has_reward_head else {part.head: head}
        return {name: own for name, own in found.items() if name in names}

    def as_prediction_layer(self, hf: Any) -> None:
        """Change the text model's configuration so that its only layer is of the kind that predicts further tokens."""
        hf.num_hidden_layers = 1

    @cached_property
    def predictor(self) -> Family:
        """Family of a model whose only layer is of the kind that predicts further tokens."""
        whole = copy.deepcopy(self.whole)
        setattr(whole, MTP_DEPTH, 0)
        self.as_prediction_layer(self.text_config(whole))
        return type(self)(whole)

    def _prediction_layer(self, k: int) -> Iterator[Mapping]:
        names, ours, hidden = self.prediction_names(k), f"mtp.layers.{k}.", self.hidden_size
        assert names is not None, "checked by load_hf_config"
        yield norm(f"{ours}enorm", names.embedding_norm, hidden)
        yield norm(f"{ours}hnorm", names.hidden_norm, hidden)
        projection = Part(f"{names.projection}.weight", (hidden, 2 * hidden))
        yield Mapping(f"{ours}eh_proj.weight", (projection,), Replicated())
        yield from self.predictor._layer(0, f"{ours}transformer_layer.", names.layer)
        yield norm(f"{ours}final_layernorm", names.final_norm, hidden)

    def num_parameters(self) -> int:
        """Return the number of parameters in the whole model, counted as Hugging Face counts them."""
        return sum(math.prod(shape) for shape in self.shapes().values())

    def active_parameters(self) -> int:
        """Return how many parameters one token is multiplied with, including the LM head: the input embedding does not
        count, unless it is the LM head too. Indexers do not count: their cost is part of `TokenMixer.flops`."""
        is_head = self.ties_embeddings and not self.has_reward_head
        frozen = (math.prod(part.shape) for m in self.table.values() if m.is_frozen for part in m.parts)
        return self.num_parameters() - (0 if is_head else self.vocab_size * self.hidden_size) - sum(frozen)

    def _mappings(self) -> Iterator[Mapping]:
        vocabulary, hidden = Vocabulary(self.vocab_size), self.hidden_size
        embedding = Part(self.embedding_name, (self.vocab_size, hidden))
        yield Mapping("embedding.word_embeddings.weight", (embedding,), vocabulary)
        for layer in range(self.num_layers):
            yield from self._layer(layer, f"decoder.layers.{layer}.", f"{self.prefix}layers.{layer}.")
        yield from self._last_norm("decoder.final_layernorm", f"{self.prefix}{self.final_norm_name}")
        if self.has_reward_head:
            yield Mapping("output_layer.weight", (Part(REWARD_HEAD, (1, hidden)),), Replicated())
        elif not self.ties_embeddings:
            head = (Part(LM_HEAD, (self.vocab_size, hidden)),)
            yield Mapping("output_layer.weight", head, vocabulary, is_float32=self.float32_head)
        for k in range(self.mtp_depth):
            yield from self._prediction_layer(k)

    def _last_norm(self, ours: str, theirs: str) -> Iterator[Mapping]:
        """Yield the mappings of the norm after the last layer, whose Megatron and Hugging Face names are given."""
        yield norm(ours, theirs, self.hidden_size, self.float32_norms)

    def _layer(self, layer: int, ours: str, theirs: str) -> Iterator[Mapping]:
        """Yield the mappings of one layer.

        Args:
            ours: prefix of the layer's names in Megatron.
            theirs: prefix of the layer's names in the Hugging Face model.
        """
        hidden, (before, after, before_mlp, after_mlp) = self.hidden_size, self.norm_names
        if (mixer := self.token_mixer(layer)) is not None:
            if self.norms_before:
                yield norm(f"{ours}input_layernorm", theirs + before, hidden, self.float32_norms)
            yield from mixer.mappings(f"{ours}self_attention.", theirs)
            if self.norms_after:
                yield norm(f"{ours}self_attention.linear_proj.post_norm", theirs + after, hidden)
        if self.has_mlp(layer):
            if self.norms_before:
                yield norm(f"{ours}pre_mlp_layernorm", theirs + before_mlp, hidden, self.float32_norms)
            yield from self._mlp(layer, f"{ours}mlp.", f"{theirs}{self.dense_mlp_name}.")
            if self.norms_after:
                yield norm(f"{ours}mlp.linear_fc2.post_norm", theirs + after_mlp, hidden)

    def _mlp(self, layer: int, ours: str, theirs: str) -> Iterator[Mapping]:
        yield from gated_mlp(ours, theirs, self.hidden_size, self.mlp_width(layer), self.mlp_projections)


class Unrotated(Family):
    """A family in which no layer has a rotary embedding."""

    def ropes(self) -> list[Tensor]:
        return [torch.zeros(0)]

    def rope_factor(self, layer: int) -> float:
        return 1.0


def norm(ours: str, theirs: str, size: int, is_float32: bool = False) -> Mapping:
    """Return the mapping of a norm's weight; `ours` and `theirs` are the norm's Megatron and Hugging Face names."""
    return Mapping(f"{ours}.weight", (Part(f"{theirs}.weight", (size,)),), Replicated(), is_float32=is_float32)


def gated_mlp(
    ours: str,
    theirs: str,
    hidden: int,
    width: int,
    names: tuple[str, ...] = GATE_UP_DOWN,
    is_expert: bool = False,
) -> Iterator[Mapping]:
    """Yield the mappings of an MLP's projections.

    Args:
        ours: prefix of the Megatron names.
        theirs: prefix of the Hugging Face names.
        names: Hugging Face names of gate (if there is one), up and down projection, without prefix.
    """
    *inputs, down = (f"{theirs}{name}.weight" for name in names)
    parts = tuple(Part(name, (width, hidden)) for name in inputs)
    yield Mapping(f"{ours}linear_fc1.weight", parts, GateUp() if len(parts) == 2 else Rows(), is_expert)
    yield Mapping(f"{ours}linear_fc2.weight", (Part(down, (hidden, width)),), Columns(), is_expert)
