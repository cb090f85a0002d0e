"""A linear model of ratings needs users who rated."""

import numpy as np
import pytest

from experiments.tasks.ratings.linear import LinearRatings
from experiments.tasks.ratings.ratings import synthetic


def test_ratings_without_a_user_are_refused_in_one_line():
    table = synthetic(0)
    with pytest.raises(ValueError, match="no rating is left"):
        LinearRatings(table.where(np.zeros(0, int)))
    with pytest.raises(ValueError, match="no rating is left"):
        LinearRatings(table, is_test=np.ones(table.user.size, bool))
