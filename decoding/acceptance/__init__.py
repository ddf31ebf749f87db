"""Which drafted tokens are kept. p is the target's law, q the drafter's (Leviathan et al. 2023, arXiv:2211.17192)."""

from .block import Block
from .ensemble import Ensemble
from .greedy import Greedy
from .rule import Acceptance, Guarantee, Verdict
from .sampling import Sampling
from .typical import Typical

__all__ = ["Acceptance", "Block", "Ensemble", "Greedy", "Guarantee", "Sampling", "Typical", "Verdict"]
