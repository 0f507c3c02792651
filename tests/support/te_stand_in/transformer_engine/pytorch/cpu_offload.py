from contextlib import nullcontext

from transformer_engine import since


def _without_effect(enabled):
    """Return a context without effect; Megatron calls the function below also if offloading is disabled."""
    if enabled:
        raise NotImplementedError("the stand-in has no offloading of activations")
    return nullcontext(), lambda tensor: tensor


def get_cpu_offload_context(
    enabled=False,
    num_layers=1,
    model_layers=1,
    offload_activations=True,
    offload_weights=False,
    double_buffering=False,
):
    return _without_effect(enabled)


if since(2, 10):

    def get_cpu_offload_context(
        enabled=False,
        num_layers=1,
        model_layers=1,
        offload_activations=True,
        offload_weights=False,
        double_buffering=False,
        manual_synchronization=False,
        retain_pinned_cpu_buffers=False,
        offload_stream=None,
    ):
        return _without_effect(enabled)
