"""Training steps on layers of Transformer Engine's modules, and on the local layers."""

from collections import Counter

import pytest
from layout_cases import STEPS, make_config
from torch.nn.modules.module import register_module_forward_pre_hook

from mcore_rl.config.parallel import ParallelLayout
from mcore_rl.testing.layout_check import compute_layout_result, invent_adapter

TP2 = ParallelLayout(tp=2, sp=True)
EP2 = ParallelLayout(dp=2, ep=2)


def te_config(path, layout, model=None, parallel=None, lora=None, directory=None, local=False):
    """Return a DPO configuration; with `lora`, random adapters are written to `directory`."""
    values = make_config(path).model_dump()
    implementation = "local" if local else "transformer_engine"
    values["model"].update({"transformer_impl": implementation, "lora": lora, **(model or {})})
    values["parallel"].update(parallel or {})
    config = type(make_config(path)).model_validate(values)
    if lora is not None:
        config = config.model_copy(update={"model": invent_adapter(config.model, directory)})
    return layout.apply(config)


def counted_result(config, data):
    """Return the layout's result, and how often each module of Transformer Engine ran on this rank.

    `CoreAttention` counts all attention layers: those that did not run `DotProductAttention` ran the local attention.
    `deep_ep` counts the exchanges of DeepEP's buffer.
    """
    from deep_ep import Buffer

    calls = Counter()

    def count(module, inputs):
        kinds = (kind for kind in type(module).__mro__ if kind.__module__.startswith("transformer_engine"))
        calls.update([kind.__name__ for kind in kinds][:1])
        calls["CoreAttention"] += type(module).__name__ == "TEPackedCausalAttention"

    with register_module_forward_pre_hook(count):
        result = compute_layout_result(config, data, STEPS)
    calls["deep_ep"] = Buffer.calls
    return result, calls


def result_with_index(config, data):
    """Return `counted_result` with a local attention that does not read keys in place, as on a GPU."""
    from mcore_rl.models.megatron.kernels import packed_attention as attention_kernels

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(attention_kernels.KERNELS, "cpu", attention_kernels.Kernel(attention_kernels.sdpa_by_segment))
        return counted_result(config, data)
