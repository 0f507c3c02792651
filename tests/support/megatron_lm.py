"""Megatron-Core's own GPTModel, as Megatron-LM's `pretrain_gpt.py` builds, saves and loads it.

The entries of the state are those of Megatron-LM's `generate_state_dict`. It has two specs of layers. Transformer
Engine, which the second one needs, has no build for the CPU. Here its modules are replaced by modules that have its
parameters' names and empty states, so that the names in the checkpoint are those of Megatron's spec.
"""

import inspect
from argparse import Namespace
from functools import partial
from pathlib import Path

import torch

from mcore_rl.models.megatron.parallel_state import initialize_parallel, process_groups, seed_everything

from megatron.core import dist_checkpointing
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import MLATransformerConfig, multi_latent_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

# Megatron 0.16 reads this name also without Transformer Engine, from which it is imported.
vars(moe_utils).setdefault("te_general_gemm", None)
if not isinstance(multi_latent_attention.TELinear, type):  # Megatron asks whether layers are of these classes
    for name in ("TELinear", "TEColumnParallelLinear", "Linear"):
        setattr(multi_latent_attention, name, type(name, (), {}))

CONTENT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}
"""What Megatron-LM writes as the metadata of a checkpoint's content."""


class EmptyStateMixin:
    """Has an empty state in checkpoints, as modules of Transformer Engine have without FP8."""

    def get_extra_state(self):
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state):
        assert state is None or not state.numel(), "Transformer Engine would unpickle it"


class Norm(EmptyStateMixin, torch.nn.RMSNorm):
    def __init__(self, config=None, hidden_size=None, eps=1e-5, **_):
        super().__init__(hidden_size, eps)


class NormedColumn(EmptyStateMixin, ColumnParallelLinear):
    """A norm and the linear layer after it, with the names of Transformer Engine's LayerNormLinear."""

    def __init__(self, input_size, output_size, *, config, **options):
        options.pop("skip_weight_param_allocation", None)
        super().__init__(input_size, output_size, config=config, **options)
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size))

    def forward(self, states, *args, **options):
        normed = torch.nn.functional.rms_norm(
            states, states.shape[-1:], self.layer_norm_weight, self.config.layernorm_epsilon
        )
        return super().forward(normed, *args, **options)


class Column(EmptyStateMixin, ColumnParallelLinear):
    pass


class Row(EmptyStateMixin, RowParallelLinear):
    pass


class FusedProvider:
    """Takes the place of Megatron's provider of Transformer Engine's modules."""

    def linear(self):
        return ColumnParallelLinear  # Megatron's latent attention accepts only its own classes

    column_parallel_linear = linear

    def row_parallel_linear(self):
        return Row

    def fuse_layernorm_and_linear(self):
        return True

    def column_parallel_layer_norm_linear(self):
        return NormedColumn

    def layer_norm(self, *_, **__):
        return Norm

    def core_attention(self):
        return DotProductAttention

    def grouped_mlp_modules(self, *_, **__):
        linears = MLPSubmodules(linear_fc1=Column, linear_fc2=Row)
        parameters = inspect.signature(LocalSpecProvider.grouped_mlp_modules).parameters
        is_pair = "moe_use_legacy_grouped_gemm" in parameters  # in Megatron 0.16
        return (SequentialMLP, linears) if is_pair else partial(SequentialMLP, submodules=linears)

    def activation_func(self):
        return None


class NoAttention(torch.nn.Module):
    """Takes the place of the core of Megatron's latent attention, which only Transformer Engine has."""

    def __init__(self, *_, **__):
        super().__init__()


def layer_spec(config, spec, experts):
    """Return Megatron's spec of a layer; "fused" has Transformer Engine's names, "local" those of local layers."""
    found = _layer_spec(config, spec, experts)
    if config.multi_latent_attention:
        found.submodules.self_attention.submodules.core_attention = NoAttention
    return found


def _layer_spec(config, spec, experts):
    norms = {"qk_layernorm": config.qk_layernorm, "multi_latent_attention": config.multi_latent_attention}
    if spec == "local":
        return gpt_layer_specs.get_gpt_layer_local_spec(experts, False, normalization="RMSNorm", **norms)
    gpt_layer_specs.TESpecProvider = FusedProvider
    multi_latent_attention.HAVE_TE = True  # since 0.18, Megatron builds fused norms only then
    return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(experts, False, **norms)


LATENT_FIELDS = ("q_lora_rank", "kv_lora_rank", "v_head_dim")


def build(path, layout, spec, **changes):
    """Return the chunks of Megatron's own model for a Hugging Face configuration, in this rank's place.

    Args:
        layout: a `ParallelLayout`.
        changes: fields of Megatron's configuration to change.
    """
    from layout_cases import make_config

    from mcore_rl.models.megatron.families import family_of
    from mcore_rl.models.megatron.layers.transformer_layer import rope_parameters
    from mcore_rl.models.megatron.model.hf_config import load_hf_config, transformer_config

    ours = layout.apply(make_config(path))
    topology = initialize_parallel(ours.parallel)
    seed_everything(0)
    hf = load_hf_config(path)
    family = family_of(hf)
    config = transformer_config(family, ours.model, ours.parallel)
    experts = config.num_moe_experts
    sparse = [1] * family.num_layers
    if experts:
        sparse = [int(has_experts) for has_experts in family.experts.sparse_layers]
        config.moe_router_pre_softmax = False  # Qwen3's weights of the chosen experts sum to 1
        config.moe_layer_freq = sparse if 0 in sparse else 1
    config.hetereogenous_dist_checkpoint = False  # Megatron-LM stacks unless moe_layer_freq says that layers differ
    config.pipeline_model_parallel_layout = None
    config.perform_initialization = True
    config.sequence_parallel = False  # the local norms do not accept it; it does not change a checkpoint
    config.use_te_activation_func = False
    config.qk_layernorm = family.has_qk_norm
    if hasattr(hf, "kv_lora_rank"):
        latent = {name: getattr(hf, name) for name in LATENT_FIELDS}
        latent |= {"qk_head_dim": hf.qk_nope_head_dim, "qk_pos_emb_head_dim": hf.qk_rope_head_dim}
        known = {
            name: value for name, value in vars(config).items() if name in MLATransformerConfig.__dataclass_fields__
        }
        config.__class__ = MLATransformerConfig
        for name, field in MLATransformerConfig.__dataclass_fields__.items():
            if name not in known:
                setattr(config, name, field.default)
        vars(config).update(latent | {"multi_latent_attention": True, "qk_layernorm": True, "rope_type": "rope"})
    vars(config).update(changes)
    norm = Norm if spec == "fused" else None
    chunks, count = [], ours.parallel.chunks_per_stage
    for index in range(count):
        stage = index if count > 1 else None
        first = gpt_layer_specs.get_transformer_layer_offset(config, stage, topology.pipeline.rank)
        number = gpt_layer_specs.get_num_layers_to_build(config, stage, topology.pipeline.rank)
        layers = [layer_spec(config, spec, experts if sparse[n] else None) for n in range(first, first + number)]
        chunks.append(
            GPTModel(
                config,
                TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm or gpt_layer_specs.LNImpl),
                -(-hf.vocab_size // (128 * layout.tp)) * 128 * layout.tp,
                hf.max_position_embeddings,
                pre_process=topology.is_first_stage and index == 0,
                post_process=topology.is_last_stage and index == count - 1,
                share_embeddings_and_output_weights=family.ties_embeddings,
                position_embedding_type="rope",
                rotary_base=int(rope_parameters(hf)["rope_theta"]),
                pg_collection=process_groups(),
                vp_stage=stage,
            ).eval()
        )
    return chunks


def sharded(chunks, metadata):
    """Return the part of Megatron-LM's state that describes the model."""
    groups = {"dp_cp_group": process_groups().dp_cp}
    names = [f"model{index}" for index in range(len(chunks))] if len(chunks) > 1 else ["model"]
    return {
        name: chunk.sharded_state_dict(metadata=metadata | groups) for name, chunk in zip(names, chunks, strict=True)
    }


def load(iteration, path, layout, spec, ids=None, **changes):
    """Load a checkpoint into Megatron's own model as Megatron-LM does with `--finetune`.

    Returns:
        This rank's parameters by their keys in the checkpoint, each with its offsets; and the logits of `ids`, or None.
    """
    chunks = build(path, layout, spec, **changes)
    with torch.no_grad():
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.fill_(7)
    common = dist_checkpointing.load_common_state_dict(str(iteration))
    assert common["checkpoint_version"] == 3.0, "otherwise Megatron-LM reorders rows, which it cannot under VPP"
    metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
    loaded = dist_checkpointing.load(sharded(chunks, metadata), str(iteration))
    for index, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded["model" if len(chunks) == 1 else f"model{index}"])
    return weights_of(chunks), None if ids is None else logits_of(chunks, ids)


def weights_of(chunks):
    """Return {(key, offsets): values} of all tensors, of each stored part separately."""
    from mcore_rl.models.megatron.checkpoint.state import parts_of

    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    entries = [e for e in nested_values(sharded(chunks, CONTENT)) if not isinstance(e, ShardedObject)]
    parts = [part for entry in entries for part in parts_of(entry)]
    return {(part.key, tuple(part.global_offset)): part.data.detach().clone() for part in parts}


def logits_of(chunks, ids):
    """Return the logits [B, S, vocabulary] of a model that this rank has whole."""
    (model,) = chunks
    length = ids.shape[1]
    mask = torch.triu(torch.ones(1, 1, length, length), 1).bool()
    with torch.no_grad():
        return model(ids, torch.arange(length).expand_as(ids), mask)


def save(path, destination, layout, spec, **changes):
    """Write a checkpoint as Megatron-LM does; return this rank's parameters, as `load` does."""
    chunks = build(path, layout, spec, **changes)
    state = {
        "args": Namespace(tensor_model_parallel_size=layout.tp, pipeline_model_parallel_size=layout.pp),
        "checkpoint_version": 3.0,
        "iteration": 5,
        **sharded(chunks, CONTENT),
    }
    iteration = Path(destination) / "iter_0000005"
    iteration.mkdir(parents=True, exist_ok=True)
    dist_checkpointing.save(state, str(iteration), content_metadata=CONTENT)
    (Path(destination) / "latest_checkpointed_iteration.txt").write_text("5")
    return weights_of(chunks)


def resume(iteration, path, layout, spec):
    """Load a checkpoint as Megatron-LM does with the same arguments and without `--finetune`.

    Returns:
        Iteration, consumed samples, and samples that the schedule has counted; the numbers of updates in the
        optimizers; and the sums of this rank's moments (exp_avg, exp_avg_sq).
    """
    from layout_cases import make_config

    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, distrib_optimizer, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    # Transformer Engine's optimizer counts updates in its groups. With PyTorch's, Megatron cannot load a state
    # before the first update.
    ours = make_config(path).optimizer  # since 0.19, Megatron finds a parameter group by its rates too
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = True
    torch.optim.Adam.__setstate__ = torch.optim.Optimizer.__setstate__
    chunks = build(path, layout, spec)
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True)
    wrapped = [DistributedDataParallel(chunk.config, ddp, chunk) for chunk in chunks]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=ours.lr, min_lr=ours.min_lr, use_distributed_optimizer=True), wrapped
    )
    schedule = OptimizerParamScheduler(
        optimizer, 0.0, 1.0, 0.0, 0, 100, "constant", 0.0, 0.0, 0, "constant", False, True
    )
    common = dist_checkpointing.load_common_state_dict(str(iteration))
    assert not common["args"].no_save_optim
    for name in ("num_layers", "hidden_size", "num_attention_heads"):
        assert getattr(common["args"], name) == getattr(chunks[0].config, name)
    metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
    metadata |= {"dp_cp_group": process_groups().dp_cp}
    state = sharded(chunks, metadata)
    state["optimizer"] = optimizer.sharded_state_dict(state, is_loading=True, metadata=metadata)
    state["opt_param_scheduler"] = schedule.state_dict()
    loaded = dist_checkpointing.load(state, str(iteration))
    optimizer.load_state_dict(loaded["optimizer"])
    schedule.load_state_dict(loaded["opt_param_scheduler"])
    done = (loaded["iteration"], loaded["args"].consumed_train_samples, schedule.num_steps)
    inner = [one.optimizer for one in getattr(optimizer, "chained_optimizers", [optimizer])]
    steps = {int(group["step"]) for one in inner for group in one.param_groups}
    sums = [sum(float(s[name].double().sum()) for one in inner for s in one.state.values()) for name in MOMENTS]
    return done, steps, sums


MOMENTS = ("exp_avg", "exp_avg_sq")
