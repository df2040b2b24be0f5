"""keepstep: training never stops.

The public face of the package is the trainer SDK: ``import keepstep; ks = keepstep.init()``. Attributes are
looked up lazily, so that ``import keepstep`` stays cheap on every rank and never pulls in torch by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from keepstep.trainer.api import Keepstep as Keepstep
    from keepstep.trainer.api import init as init
    from keepstep.trainer.data import StepData as StepData
    from keepstep.trainer.guard import Guard as Guard
    from keepstep.trainer.loader_torch import StepLoader as StepLoader
    from keepstep.trainer.options import Checkpoint as Checkpoint
    from keepstep.trainer.shards import StepShards as StepShards
    from keepstep.trainer.stream import StepStream as StepStream

_LAZY = {
    "init": "keepstep.trainer.api",
    "Keepstep": "keepstep.trainer.api",
    "Checkpoint": "keepstep.trainer.options",
    "Guard": "keepstep.trainer.guard",
    "StepData": "keepstep.trainer.data",
    "StepLoader": "keepstep.trainer.loader_torch",
    "StepShards": "keepstep.trainer.shards",
    "StepStream": "keepstep.trainer.stream",
}

__all__ = [
    "Checkpoint",
    "Guard",
    "Keepstep",
    "StepData",
    "StepLoader",
    "StepShards",
    "StepStream",
    "__version__",
    "init",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'keepstep' has no attribute {name!r}")
