"""Optimizers of runs are those of optax, and may end in an average of the parameters."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_task import calibrated, config_of, few_rows_are_calibrated, line, watched, weights

from dpsgd import SGD, Adam, AdamW, averaged, run
from dpsgd.runs import job
from dpsgd.runs.optimizer import StepSizes, optimizer

STEPS = 7
GRADIENTS = np.random.default_rng(0).normal(size=(STEPS, 3)).astype(np.float32)
SIZES = {"cosine": optax.cosine_decay_schedule(0.5, STEPS), "constant": 0.5}
AVERAGES = {"tail": [1.0, 0.5, 0.1], "decay": [0.0, 0.9, 0.999]}
BOTH = [(name, number) for name, numbers in AVERAGES.items() for number in numbers]


def mean(name, number, iterates):
    """The average of iterates [N, ...] by its definition."""
    steps = len(iterates)
    if name == "tail":
        return np.mean(iterates[int(np.round((1 - number) * steps)) :], axis=0)
    weights = number ** np.arange(steps - 1, -1, -1.0)
    return np.tensordot(weights / weights.sum(), iterates, 1)


def iterates(made, **numbers):
    """The parameters after each step, of an optimizer that has these numbers in its state."""
    params, found = np.zeros(3, np.float32), []
    state = made.init(params)
    if numbers:
        arrays = {name: jnp.float32(x) for name, x in {"num_steps": STEPS, **numbers}.items()}
        state = state._replace(hyperparams=arrays)
    for gradient in GRADIENTS:
        updates, state = made.update(gradient, state, params)
        found.append(params := optax.apply_updates(params, updates))
    return np.array(found)


@pytest.mark.parametrize("schedule", SIZES)
@pytest.mark.parametrize(
    ("kind", "numbers"),
    [
        (Adam, {}),
        (AdamW, {"weight_decay": 0.0}),
        (AdamW, {"weight_decay": 0.3}),
        (SGD, {"momentum": 0.0}),
        (SGD, {"momentum": 0.9}),
    ],
)
def test_an_optimizer_is_that_of_optax_and_its_numbers_are_state(kind, numbers, schedule):
    expected = getattr(optax, kind.__name__.lower())(SIZES[schedule], **numbers)
    found = iterates(optimizer(kind(schedule=schedule)), learning_rate=0.5, **numbers)
    np.testing.assert_allclose(found, iterates(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("schedule", SIZES)
def test_step_sizes_of_lazy_tables_are_those_of_the_optimizer(schedule):
    host = StepSizes(0.5, STEPS if schedule == "cosine" else None)
    made = optimizer(SGD(schedule=schedule))
    moved = np.diff(iterates(made, learning_rate=0.5, momentum=0.0), axis=0)
    sizes = [host(step) for step in range(1, STEPS)]
    np.testing.assert_allclose(moved, -np.array(sizes)[:, None] * GRADIENTS[1:], atol=1e-6)


@pytest.mark.parametrize(("name", "number"), BOTH)
def test_only_the_last_step_returns_the_average(name, number):
    plain = iterates(optax.sgd(0.3))
    expected = mean(name, number, plain)
    ours = iterates(averaged(optax.sgd(0.3), STEPS, **{name: number}))
    np.testing.assert_array_equal(ours[:-1], plain[:-1])
    np.testing.assert_allclose(ours[-1], expected, rtol=1e-4, atol=1e-5)
    made = optimizer(SGD(schedule="constant"), name)
    run_of = iterates(made, learning_rate=0.3, momentum=0.0, **{name: number})
    np.testing.assert_allclose(run_of[-1], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "how", [{}, {"tail": 0.5, "decay": 0.5}, {"tail": 0.0}, {"tail": 1.1}, {"decay": 0.99999999}]
)
def test_an_average_of_no_steps_is_refused(how):
    with pytest.raises(ValueError, match=r"tail|decay"):
        averaged(optax.sgd(1.0), STEPS, **how)


@pytest.mark.short("average_decay")
@pytest.mark.parametrize("option", ["average_tail", "average_decay"])
def test_a_run_releases_the_average_of_its_iterates(option, tmp_path, monkeypatch):
    spec = config_of(optimizer="sgd", learning_rate=0.1, insecure_seed=3)
    run(line, spec.but(**{option: 0.5}), tmp_path / "mean")
    seen = []

    def look(number, block):
        seen.append(np.asarray(block.state.raw_params["w"]))

    monkeypatch.setattr(job, "BLOCK_STEPS", 1)
    monkeypatch.setattr(job, "train_blocks", watched(look))
    run(line, spec, tmp_path / "plain")
    expected = mean(option.removeprefix("average_"), 0.5, np.array(seen))
    np.testing.assert_allclose(weights(tmp_path / "mean"), expected, rtol=1e-4)


@pytest.mark.long
def test_a_calibration_is_of_the_average(tmp_path):
    with few_rows_are_calibrated():
        for out, more in {"mean": {"average_tail": 1.0}, "last": {}}.items():
            run(calibrated, config_of(insecure_seed=3, **more), tmp_path / out)
            plain = config_of(insecure_seed=3, calibration="none", **more)
            run(calibrated, plain, tmp_path / f"{out} alone")
        ratios = [
            weights(tmp_path / o) / weights(tmp_path / f"{o} alone") for o in ("mean", "last")
        ]
    for ratio in ratios:
        np.testing.assert_allclose(ratio, ratio[0], rtol=1e-5)
    assert abs(ratios[0][0] - ratios[1][0]) > 1e-4
