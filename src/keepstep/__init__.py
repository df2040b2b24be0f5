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

_LAZY = {"init": "keepstep.trainer.api", "Keepstep": "keepstep.trainer.api"}

__all__ = ["Keepstep", "__version__", "init"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'keepstep' has no attribute {name!r}")
