"""Reversible stacks for JAX and Flax: deep models in the memory of one block."""

from revjax._backward import on_backward as on_backward
from revjax._couplings import Additive as Additive
from revjax._couplings import Coupling as Coupling
from revjax._inputs import PerBlock as PerBlock
from revjax._nnx import ReversibleCouplingBlock as ReversibleCouplingBlock
from revjax._nnx import ReversibleSequence as ReversibleSequence
from revjax._nnx import ReversibleSequential as ReversibleSequential
from revjax._scan import reversible_scan as reversible_scan

__all__ = [
    "Additive",
    "Coupling",
    "PerBlock",
    "ReversibleCouplingBlock",
    "ReversibleSequence",
    "ReversibleSequential",
    "on_backward",
    "reversible_scan",
]
__version__ = "0.1.0.dev0"
