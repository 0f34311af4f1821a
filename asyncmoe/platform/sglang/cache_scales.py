"""Restores scales of the KV cache when an engine takes released memory again.

SGLang restores a model's buffers, but a float8 model holds these scales as parameters, which no update writes: every rank derives them when
it loads the model, and again from themselves at every update's end (sglang 0.5.23, layers/quantization/kv_cache.py and
managers/scheduler_components/weight_updater.py). Their values are also kept as Python's floats.
"""

from __future__ import annotations

from functools import wraps
from types import ModuleType
from typing import Any


def _mend(module: ModuleType) -> None:
    original = vars(module)["_import_static_state"]

    @wraps(original)
    def import_static_state(model: Any, state: Any) -> None:
        original(model, state)
        for layer in model.modules():
            for name in ("k_scale", "v_scale"):
                if (scale := layer._parameters.get(name)) is not None:
                    scale.data.fill_(getattr(layer, f"{name}_float"))

    vars(module)["_import_static_state"] = import_static_state


PATCHES = {"sglang.srt.managers.scheduler_components.weight_updater": _mend}
