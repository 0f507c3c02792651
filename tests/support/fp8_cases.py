"""Models whose sizes are whole blocks of FP8 on two ranks, and training steps on them in FP8."""

import pickle

import torch
from layout_cases import make_config, make_data
from small_models import make_model

from mcore_rl.algorithms.build_loss import build_loss
from mcore_rl.testing.layout_check import compute_layout_result

# Two heads of size 128, and experts of two blocks: smaller tensors would fit into one block, however they are sharded.
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 2, "num_key_value_heads": 2}
WIDE |= {"head_dim": 128, "moe_intermediate_size": 256, "initializer_range": 0.05}
FEW_EXPERTS = {"num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2}
OF_FAMILY = {"qwen3_moe": FEW_EXPERTS, "qwen2_moe": {**FEW_EXPERTS, "shared_expert_intermediate_size": 256}}


def make_wide_model(family, directory):
    return make_model(family, directory, **WIDE, **OF_FAMILY.get(family, {}))


def fp8_config(path, layout, fp8, model=None, parallel=None, **batch):
    """Return a DPO configuration with Transformer Engine's layers.

    Args:
        fp8: the recipe or the whole section; None for no FP8.
        layout: has packs of 512 tokens unless it says otherwise.
    """
    values = make_config(path).model_dump()
    section = {"recipe": fp8} if isinstance(fp8, str) else fp8
    values["model"].update({"transformer_impl": "transformer_engine", "fp8": section, **(model or {})})
    values["parallel"].update(parallel or {})
    values["batch"].update({"tokens_per_pack": 512, **batch})
    return layout.apply(type(make_config(path)).model_validate(values))


def fp8_result(config, data, steps=1):
    return compute_layout_result(config, data, steps)


def whole_difference(tensors, expected):
    """Return the norm of the difference of all tensors together, relative to the norm of the expected ones."""
    difference = sum((tensors[name].double() - x.double()).square().sum() for name, x in expected.items())
    return float((difference / sum(x.double().square().sum() for x in expected.values())).sqrt())


def trained_policy(config, steps, data=None):
    """Return a policy after `steps` updates, and the losses."""
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy, data = MegatronPolicy(config, total_steps=100, rows_per_unit=2), data or make_data()
    losses = [policy.train(policy.own_rows(data), build_loss(config, None))["loss"] for _ in range(steps)]
    policy.finish_param_gather()
    return policy, losses


def te_modules(policy):
    """Return the modules of Transformer Engine that may compute in FP8, by name."""
    return {
        name: module
        for chunk in policy.model.chunks
        for name, module in chunk.named_modules()
        if hasattr(module, "fp8_meta")
    }


class Opened:
    """An object that notes when it is unpickled."""

    times = 0

    def __reduce__(self):
        return note_opened, ()


def note_opened():
    Opened.times += 1
    return {}


def pickled():
    """Return a tensor like Transformer Engine's state of a module, which contains a pickled object."""
    return torch.frombuffer(bytearray(pickle.dumps(Opened())), dtype=torch.uint8)
