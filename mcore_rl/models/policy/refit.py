"""Receiver of refitted weights, under the module path that inference engines import."""

from mcore_rl.models.generation.refit import RefitInfo, RefitReceiver, decode_refit_info, encode_refit_info

__all__ = ["RefitInfo", "RefitReceiver", "decode_refit_info", "encode_refit_info"]
