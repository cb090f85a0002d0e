"""Clipping rules: from norms of groups of leaves to factors that bring each example to C.

Every method of computing clipped sums takes a rule. Proofs, in float32:
docs/explanation/norms-and-clipping-in-float32.md. JAX is imported inside functions: a spec names
its rule without it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Protocol, runtime_checkable

import numpy as np

from accounting.records import Named
from samplers.registry import Registry

if TYPE_CHECKING:
    from jax import Array
    from jax.typing import ArrayLike

    from dpsgd.gradients import norms

PyTree = Any

GAMMA = 2.0**-100, 2.0**96
"""Range of automatic clipping's stability constant, in units of the gradient's norm."""

_LEAST_SHARE = 2.0**-40  # of C^2: a group's budget is far above what float32 takes for zero


@runtime_checkable
class ClippingRule(Protocol):
    """Rule that brings an example's gradient to L2 norm at most C, a frozen dataclass."""

    def groups(self, params: PyTree) -> list[list[int]]:
        """Returns disjoint groups of all leaf indices, each scaled by one factor."""

    def factors(
        self, group_norms: Sequence[norms.Norm], l2_clip_norm: ArrayLike, counts: Array
    ) -> list[norms.ClipFactor]:
        """Returns each group's factor; together they bound the norm.

        Args:
          group_norms: Per-example norms of each group.
          l2_clip_norm: Clip norm C > 0; infinity clips nothing.
          counts: bool[B], True for examples that count. An example contributes nothing if False or
            if any group's norm is not finite: `keep` is the same for all groups.
        """


class _OneGroup:
    """Base of rules with one factor for the whole gradient."""

    def groups(self, params: PyTree) -> list[list[int]]:
        """Returns one group with all leaves."""
        import jax

        return [list(range(len(jax.tree.leaves(params))))]


@dataclass(frozen=True)
class FlatClipping(_OneGroup):
    """One factor ``min(1, C / |g|)`` for the whole gradient (Abadi et al. 2016)."""

    def factors(
        self, group_norms: Sequence[norms.Norm], l2_clip_norm: ArrayLike, counts: Array
    ) -> list[norms.ClipFactor]:
        """Returns the one factor, see `ClippingRule.factors`."""
        from dpsgd.gradients import norms

        return [norms.clip_factor(group_norms[0], l2_clip_norm, counts)]


@dataclass(frozen=True)
class PerLayerClipping:
    """Clipping of each group of leaves on its own, under squared budgets that total C^2.

    Source: McMahan, Andrew et al., "A General Approach to Adding Differential Privacy to Iterative
    Training Procedures", 2018, section 3.

    Raises:
      ValueError: For a pattern that is not a regular expression, or shares that are not one
        positive number per pattern; when called, for a leaf or a pattern without a match.

    Attributes:
      patterns: Regular expressions for per-layer clipping, one group of parameters each. A
        parameter belongs to the first that matches its name (such as dense.kernel). Default: one
        group per top-level name.
      shares: Relative shares of the groups in the square of l2_clip_norm. Default: equal.
    """

    patterns: Annotated[tuple[str, ...] | None, Named("clip_groups")] = None
    shares: Annotated[tuple[float, ...] | None, Named("clip_shares")] = None

    def __post_init__(self) -> None:
        for pattern in self.patterns or ():
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"clip_groups: {pattern!r} is no regex: {error}") from None
        if self.patterns == ():
            raise ValueError("clip_groups must name a group, or be left out")
        if self.shares is None:
            return
        if self.patterns is None or len(self.shares) != len(self.patterns):
            raise ValueError(
                f"clip_shares has {len(self.shares)} numbers; give one for each of the "
                f"{len(self.patterns or ())} clip_groups"
            )
        positive = all(0 < share < math.inf for share in self.shares)
        if not positive or min(self.shares) < _LEAST_SHARE * math.fsum(self.shares):
            raise ValueError(
                f"clip_shares must be finite and > 0, none below 1e-12 of all, got {self.shares}"
            )

    def groups(self, params: PyTree) -> list[list[int]]:
        """Returns the leaf indices of each group, in the order of `patterns`."""
        import jax

        from dpsgd.gradients.frozen import leaf_names

        groups: dict[str, list[int]] = {pattern: [] for pattern in self.patterns or ()}
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
        for k, (path, name) in enumerate(zip(paths, leaf_names(params), strict=True)):
            if self.patterns is None:
                groups.setdefault(jax.tree_util.keystr(path[:1]), []).append(k)
                continue
            group = next((p for p in self.patterns if re.search(p, name)), None)
            if group is None:
                raise ValueError(
                    f"clip_groups: no pattern matches the parameter {name}; add one, such as '.*' "
                    "at the end"
                )
            groups[group].append(k)
        if empty := [pattern for pattern, leaves in groups.items() if not leaves]:
            raise ValueError(
                f"clip_groups: {empty[0]!r} is the first match of no trained parameter; leave it "
                "out or move it forward"
            )
        return list(groups.values())

    def factors(
        self, group_norms: Sequence[norms.Norm], l2_clip_norm: ArrayLike, counts: Array
    ) -> list[norms.ClipFactor]:
        """Returns a factor for each group's share, see `ClippingRule.factors`."""
        import jax.numpy as jnp

        from dpsgd.gradients import norms

        for norm in group_norms:
            counts = counts & jnp.isfinite(norm.length)
        shares = self.shares or (1.0,) * len(group_norms)
        total = math.fsum(shares)
        return [
            norms.clip_factor(norm, l2_clip_norm, counts, share=_below(math.sqrt(share / total)))
            for norm, share in zip(group_norms, shares, strict=True)
        ]


@dataclass(frozen=True)
class AutomaticClipping(_OneGroup):
    """Normalisation of every gradient, ``g C / (|g| + gamma)``, so that C needs no tuning.

    Source: Bu, Wang, Zha, Karypis, "Automatic Clipping: Differentially Private Deep Learning Made
    Easier and Stronger", NeurIPS 2023, equation (4.1).

    Raises:
      ValueError: For a gamma outside `GAMMA`.

    Attributes:
      gamma: Stability constant of automatic clipping: much smaller gradients keep their
        proportions, all others are scaled to about l2_clip_norm.
    """

    gamma: Annotated[float, Named("clip_gamma")] = 0.01

    def __post_init__(self) -> None:
        if not GAMMA[0] <= self.gamma <= GAMMA[1]:
            low, high = GAMMA
            raise ValueError(f"clip_gamma must be in [{low:.1e}, {high:.1e}], got {self.gamma!r}")

    def factors(
        self, group_norms: Sequence[norms.Norm], l2_clip_norm: ArrayLike, counts: Array
    ) -> list[norms.ClipFactor]:
        """Returns the one normalising factor, see `ClippingRule.factors`."""
        from dpsgd.gradients import norms

        return [norms.clip_factor(group_norms[0], l2_clip_norm, counts, gamma=self.gamma)]


def _below(x: float) -> float:
    """Returns a float32 number at most (1 - 2^-24) x, so that rounding cannot raise a budget."""
    return float(np.nextafter(np.float32(x * (1 - 2.0**-24)), np.float32(0)))


FLAT = FlatClipping()

RULES = Registry(
    "clipping rule",
    ClippingRule,
    {"flat": FlatClipping, "per-layer": PerLayerClipping, "automatic": AutomaticClipping},
)
"""Clipping rules by name."""
