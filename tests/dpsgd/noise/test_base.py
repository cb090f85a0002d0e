"""Noise is a law over steps: whatever it is, it is trained, resumed, audited and recorded alike."""

import contextlib
import json
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from accounting.profile import UpperEnd
from dpsgd import (
    BandedToeplitz,
    Independent,
    Mechanism,
    Noise,
    Segment,
    cost,
    dpsgd,
    train_blocks,
)
from dpsgd.runs.attempts import decide
from dpsgd.runs.history import LedgerError, read
from dpsgd.runs.ledger import Ledger
from dpsgd.runs.terms import Terms, mechanism_record
from samplers import Deterministic, Poisson

pytestmark = pytest.mark.usefixtures("optimised")  # bits are the claim

N, D = 48, 300


@dataclass(frozen=True)
class TwoBands(Noise):
    """Noise of one's own."""

    c: float = 0.5

    @property
    def bands(self):
        return 2

    def init(self, like):
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), like)

    def add(self, total, state, key, step, scales):
        raise NotImplementedError


class Undecorated(TwoBands):
    """A law with a setting that equality does not see."""


SAMPLER = Deterministic(N, 8, 2)
NOISES = [
    Independent(),
    TwoBands(),
    BandedToeplitz((1.0, 0.6, 0.3)),
]
EVERY_NOISE = pytest.mark.parametrize("noise", NOISES, ids=repr)


def loss_fn(params, example):
    return jnp.sum(jnp.square(params["w"] - example))


def rows():
    return np.random.default_rng(0).normal(size=(N, D)).astype(np.float32)


ALGORITHM = dpsgd(loss_fn, optax.adam(0.1))


def mechanism(noise, sampler=SAMPLER):
    return Mechanism(sampler, 1.0, 1.0, noise=noise)


def start(noise):
    return ALGORITHM.init({"w": jnp.zeros(D)}, mechanism(noise))


def test_a_state_without_what_the_noise_needs_is_refused():
    blocks = train_blocks(ALGORITHM, mechanism(TwoBands()), start(Independent()), rows())
    with pytest.raises(ValueError, match=r"not made for TwoBands\(c=0.5\): make it by algorithm"):
        next(blocks)


def test_noise_that_is_no_dataclass_of_its_own_is_refused():
    with pytest.raises(ValueError, match="Undecorated, not a frozen dataclass"):
        mechanism(Undecorated())


@EVERY_NOISE
def test_the_ledger_records_the_noise_and_goes_on_with_no_other(noise, tmp_path):
    terms = Terms(Segment(mechanism(noise)), 1e-5)
    Ledger.create(tmp_path / "ledger", terms).close()
    history = read(tmp_path / "ledger")
    assert history.attempts[0].terms.mechanism.noise == noise
    for other in NOISES:
        law = mechanism(other, terms.mechanism.sampler)
        changed = pytest.raises(LedgerError, match="began with another noise")
        with contextlib.nullcontext() if other == noise else changed:
            decide(history, None, None, Terms(Segment(law), 1e-5), "")
    record = json.loads((tmp_path / "ledger").read_text().splitlines()[0])
    assert record["noise"]["name"].split(":")[-1] in (
        "independent", "TwoBands", "banded toeplitz",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("noise", "message"),
    [
        ({"name": "secure"}, "removed in 0.3.0"),
        ({"name": "buffered toeplitz", "weights": [0.5]}, "removed in 0.3.0"),
        ({"name": "os:getcwd"}, "the module 'os' has no noise 'getcwd'"),
        ({"name": "nowhere:Noise"}, "--trust MODULE"),
        ({"name": "independent", "bands": 2}, "noise.bands is unknown"),
    ],
    ids=repr,
)
def test_unknown_noise_in_a_ledger_is_refused_in_one_line(noise, message):
    body = Terms(Segment(mechanism(Independent(), Poisson(N, 8))), 1e-5).record()
    with pytest.raises(ValueError, match=message) as error:
        Terms.from_record({**body, "noise": noise})
    assert "\n" not in str(error.value)


@dataclass(frozen=True)
class Borrowed(Independent):
    """Noise from outside the package, with the name of one from inside."""

    NAME = "independent"


def test_ledger_and_guarantee_name_own_noise_by_its_module():
    law = Mechanism(Deterministic(8, 4), 1.0, 1.0, noise=Borrowed())
    guarantee = cost([Segment(law)], 1e-5).record()
    assert guarantee["noise"] == mechanism_record(law)["noise"] == {"name": f"{__name__}:Borrowed"}


def test_own_noise_cannot_rename_itself_in_ledgers():
    for attribute in ("name", "record"):
        body = {"__annotations__": {attribute: str}, "__module__": __name__}
        with pytest.raises(TypeError, match=rf"^Hidden\.{attribute} .*choose another name"):
            type("Hidden", (Independent,), body)
        with pytest.raises(TypeError, match=rf"^Hidden\.{attribute} "):
            type("Hidden", (TwoBands,), {attribute: "independent", "__module__": __name__})


@dataclass(frozen=True)
class Titled(Poisson):
    """A sampler with a field that records use for its class."""

    name: str = "poisson"


def test_own_sampler_cannot_rename_itself_in_ledgers():
    with pytest.raises(ValueError, match=r"^the sampler .*Titled has a term .*another name"):
        mechanism_record(Mechanism(Titled(8, 4), 1.0, 1.0))


def test_correlated_noise_costs_as_independent_for_apart_steps():
    # That its columns' norm is not below 1 it does not say, so no lower end is proved.
    assert mechanism(TwoBands()).privacy() == UpperEnd(mechanism(Independent()).privacy())
    for steps in (3, 12):
        part, whole = (
            cost([Segment(mechanism(noise), range(steps))], 1e-5).epsilon
            for noise in (TwoBands(), Independent())
        )
        assert part == whole or (part.lower, part.upper) == (0.0, whole.upper)


def test_the_guarantee_names_the_noise_and_what_it_leaves_open():
    for noise in NOISES:
        record = cost([Segment(mechanism(noise))], 1e-5).record()
        assert record["noise"] == noise.record()
        assert any("floating point" in line for line in record["not_covered"])
