"""Reversible stacks for JAX and Flax: deep models in the memory of one block."""

from revjax._backward import on_backward as on_backward
from revjax._between import Permutation as Permutation
from revjax._between import Squeeze as Squeeze
from revjax._blocks import ReversibleCouplingBlock as ReversibleCouplingBlock
from revjax._blocks import ReversibleGroupBlock as ReversibleGroupBlock
from revjax._blocks import ReversibleHalfBlock as ReversibleHalfBlock
from revjax._couplings import Additive as Additive
from revjax._couplings import Affine as Affine
from revjax._couplings import Coupling as Coupling
from revjax._exact import ExactAdditive as ExactAdditive
from revjax._inputs import PerBlock as PerBlock
from revjax._integrators import Leapfrog as Leapfrog
from revjax._integrators import Momentum as Momentum
from revjax._integrators import Scaled as Scaled
from revjax._nnx import Drift as Drift
from revjax._nnx import ReversibleSequence as ReversibleSequence
from revjax._nnx import ReversibleSequential as ReversibleSequential
from revjax._scan import reversible_scan as reversible_scan

__all__ = [
    "Additive",
    "Affine",
    "Coupling",
    "Drift",
    "ExactAdditive",
    "Leapfrog",
    "Momentum",
    "PerBlock",
    "Permutation",
    "ReversibleCouplingBlock",
    "ReversibleGroupBlock",
    "ReversibleHalfBlock",
    "ReversibleSequence",
    "ReversibleSequential",
    "Scaled",
    "Squeeze",
    "on_backward",
    "reversible_scan",
]
__version__ = "0.1.0.dev0"
