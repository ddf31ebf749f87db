"""Which drafted tokens are kept. p is the target's law, q the drafter's (Leviathan et al. 2023, arXiv:2211.17192)."""

from .greedy import Greedy
from .rule import Acceptance, Guarantee, Verdict
from .sampling import Sampling

__all__ = ["Acceptance", "Greedy", "Guarantee", "Sampling", "Verdict"]
