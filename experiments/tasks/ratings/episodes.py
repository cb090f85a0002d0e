"""Ways to draw the batches of one model at equal noise, with what each costs and may claim.

Tasks are users. First-order MAML with the model of `experiments.tasks.ratings.factorization`: a
task fits the user's own part to its support ratings, and the items are trained by the loss of its
query ratings (Finn, Abbeel, Levine, "Model-Agnostic Meta-Learning", ICML 2017; only the head
adapts: Raghu et al., "Rapid Learning or Feature Reuse?", ICLR 2020). This loss couples a user's
ratings, so that a user's gradient is clipped as one. Where each rating is clipped by itself there
is no support to adapt to, and the items are trained for users without a part of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from accounting import Bound, epsilon
from accounting.estimates.episodic import Estimate, PublishedTheorem3
from experiments.tasks.ratings import factorization
from experiments.tasks.ratings.factorization import Params, rating_loss
from experiments.tasks.ratings.ratings import Ratings
from samplers import (
    BatchSampler,
    Multistage,
    Poisson,
    UnitsThenPoisson,
    UnitTree,
    cap_contributions,
)

RATINGS = 16
"""Drawn of each drawn user, half of them support."""
USERS_RATE = 0.1
"""Share of the users that a step draws."""
USER_CLIP, RATING_CLIP = 2.0, 0.7


def episode_loss(params: Params, user: Any) -> jax.Array:
    """Returns the query loss of one user, whose own part was fitted to the support: first order."""
    support, query = (
        {name: column[half] for name, column in user.items()}
        for half in (slice(0, RATINGS // 2), slice(RATINGS // 2, None))
    )
    own = factorization.own_part(jax.lax.stop_gradient(params), support)
    errors = factorization.errors(params, own, query)
    return 0.5 * jnp.sum(jnp.square(errors))


@dataclass(frozen=True)
class Scheme:
    """One way to draw batches, with the loss and the data that it allows."""

    name: str
    sampler: BatchSampler
    loss_fn: Callable[[Params, Any], jax.Array]
    l2_clip_norm: float
    data: Mapping[str, np.ndarray]
    unit: str = "example"
    """What is protected."""
    draws: tuple[int, ...] = ()
    """n_j down to what is protected, where draws are without replacement."""
    sizes: tuple[int, ...] = ()
    """The smallest N_j, which govern."""

    def price(self, noise_multiplier: float, delta: float) -> Bound:
        """Returns epsilon: proved from above, and attained or exceeded by concrete data."""
        return epsilon(self.sampler.privacy(noise_multiplier), delta)

    def published(self, noise_multiplier: float, delta: float) -> Estimate | None:
        """Returns what the published theorem says, which is not sound; None where it says nothing.

        Source: see `accounting.estimates.episodic.PublishedTheorem3`.
        """
        if not self.draws:
            return None
        theorem = PublishedTheorem3(
            noise_multiplier, self.sampler.num_steps, self.draws, self.sizes
        )
        return theorem.estimate_epsilon(delta)


def all_schemes(table: Ratings, steps: int) -> list[Scheme]:
    """Returns the schemes, with as many ratings in a batch in expectation, and about as many steps.

    Args:
      table: Ratings of the users that are tasks.
      steps: Length of a run; for Poisson sampling the nearest number of whole epochs.

    Raises:
      ValueError: If a user has fewer than `RATINGS` ratings: the tree is public, leave them out.
    """
    tree = UnitTree.from_columns({"user": table.user})
    users, rows = int(tree.sizes(0)[0]), table.user.size
    fewest = int(tree.sizes(1).min())
    drawn = round(USERS_RATE * users)
    each = {
        "item": table.item,
        "rating": table.rating,
        "weight": np.ones(rows, np.float32),
    }
    capped = cap_contributions(table.user, RATINGS)
    by_user = capped.data({"item": table.item, "rating": table.rating})
    stages, sizes = (drawn, RATINGS), (users, fewest)
    batch = drawn * RATINGS

    def epochs(num_examples: int, batch_size: int) -> int:
        return max(1, round(steps / math.ceil(num_examples / batch_size)))

    return [
        Scheme(
            "multistage, clip users",
            Multistage(tree, stages, steps=steps, clipped_level=1, protected_level=1),
            episode_loss, USER_CLIP, each, "user", stages[:1], sizes[:1],
        ),
        Scheme(
            "Poisson users, clip users",
            Poisson(users, drawn, epochs(users, drawn)),
            episode_loss, USER_CLIP, by_user, "user",
        ),
        Scheme(
            "multistage, clip ratings",
            Multistage(tree, stages, steps=steps),
            rating_loss, RATING_CLIP, each, "example", stages, sizes,
        ),
        Scheme(
            "users, Poisson ratings",
            UnitsThenPoisson(tree, (drawn,), batch / (drawn * rows / users), steps=steps),
            rating_loss, RATING_CLIP, each,
        ),
        Scheme(
            "Poisson ratings",
            Poisson(rows, batch, epochs(rows, batch)),
            rating_loss, RATING_CLIP, each,
        ),
    ]  # fmt: skip
