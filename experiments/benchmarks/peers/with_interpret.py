"""DP-EBM of interpret-core: histograms with Gaussian noise, over all rows, at its defaults."""

import numpy as np
from interpret.privacy import DPExplainableBoostingClassifier


def fit(work):
    count = work.numbers.shape[1]
    kinds = ["continuous"] * count + ["nominal"] * work.categories.shape[1]
    model = DPExplainableBoostingClassifier(
        feature_types=kinds,
        privacy_bounds={i: tuple(b) for i, b in enumerate(work.bounds)},
        epsilon=work.epsilon,
        delta=work.delta,
        random_state=work.seed,
        n_jobs=1,
    )
    columns = work.numbers.astype(object), work.categories.astype(object)
    x = np.concatenate(columns, axis=1)
    train = len(work.y)
    model.fit(x[:train], work.y.astype(int))
    return model.predict_proba(x[train:])[:, 1], {"printed": work.epsilon}
