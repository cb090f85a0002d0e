"""Logistic regression of diffprivlib, whose objective is perturbed: delta is 0."""

import numpy as np
from diffprivlib.models import LogisticRegression


def fit(work):
    norm = float(np.sqrt(work.numbers.shape[1] + work.categories.shape[1]))
    model = LogisticRegression(
        epsilon=work.epsilon, data_norm=norm, max_iter=1000, random_state=work.seed
    )
    model.fit(work.x, work.y.astype(int))
    return model.predict_proba(work.test_x)[:, 1], {"printed": work.epsilon}
