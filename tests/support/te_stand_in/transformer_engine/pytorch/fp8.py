"""FP8 is never enabled."""

from contextlib import contextmanager


class FP8GlobalStateManager:
    @classmethod
    def is_fp8_enabled(cls):
        return False

    @classmethod
    def set_skip_fp8_weight_update_tensor(cls, skip):
        raise NotImplementedError("FP8 is not implemented here")


@contextmanager
def fp8_autocast(enabled=True, calibrating=False, fp8_recipe=None, fp8_group=None, _graph=False):
    if enabled or calibrating:
        raise NotImplementedError("FP8 is not implemented here")
    yield


@contextmanager
def fp8_model_init(enabled=True, recipe=None, preserve_high_precision_init_val=False):
    if enabled:
        raise NotImplementedError("FP8 is not implemented here")
    yield
