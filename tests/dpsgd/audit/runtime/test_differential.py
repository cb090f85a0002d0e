"""Compiled steps equal the definition of DP-SGD; planted faults and couplings are caught."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpsgd import BandedToeplitz, Diagnostics, Mechanism, dpsgd
from dpsgd.audit.probe import Probe
from dpsgd.audit.report import AuditReport
from dpsgd.audit.runtime.blocks import block_checks
from dpsgd.audit.runtime.differential import step_checks
from dpsgd.audit.runtime.releases import loud, norm
from dpsgd.gradients.rules import AutomaticClipping, PerLayerClipping
from dpsgd.noise.keys import RootKey
from samplers import BallsAndBins, Deterministic, Poisson

pytestmark = [pytest.mark.audit, pytest.mark.usefixtures("unoptimised")]

N, B, D, CLIP = 400, 90, 20, 0.5
RNG = np.random.default_rng(0)
ROWS = {
    "x": RNG.normal(size=(32, D)).astype(np.float32),
    "y": RNG.integers(0, 2, 32).astype(np.float32),
}
SGD = optax.sgd(0.1)


def loss_fn(params, example):
    logit = jnp.dot(params["w"], example["x"].astype(params["w"].dtype)) + params["b"]
    return optax.sigmoid_binary_cross_entropy(logit, example["y"].astype(logit.dtype))


def audited(algorithm, sampler=None, *, dtype=jnp.float32, seed=0, rows=ROWS, params=None, **how):
    params = params or {"w": jnp.full(D, 0.1, dtype), "b": jnp.zeros((), dtype)}
    mechanism = Mechanism(
        sampler or Deterministic(N, B), **({"noise_multiplier": 1.0, "l2_clip_norm": CLIP} | how)
    )
    state = algorithm.init(params, mechanism, rows)
    root = RootKey.from_insecure_seed(seed)
    return AuditReport(tuple(step_checks(Probe(algorithm, mechanism, state, rows, root=root))))


class Batch:
    """Gradients of a batch, and what a sound rule makes of them."""

    def __init__(self, params, batch, weights, clip):
        grads = jax.vmap(jax.grad(loss_fn), (None, 0))(params, batch)
        self.g = jnp.concatenate([grads["b"][:, None], grads["w"]], axis=1)
        self.norm = jnp.linalg.norm(self.g, axis=1)
        self.weights, self.clip = weights, clip
        self.is_row_0 = jnp.all(batch["x"] == ROWS["x"][0], axis=1)
        self.real, self.count, self.size = weights > 0, weights.sum(), len(weights)
        self.place = jnp.arange(self.size)
        self.at_an_end = (self.place == 0) | (self.place == self.size - 1)

    def shortened(self, clip=None, norm=None):
        clip, norm = self.clip if clip is None else clip, self.norm if norm is None else norm
        return self.g * jnp.minimum(1, clip * (1 - 1e-6) / norm)[:, None]

    def rows(self, clip=None, norm=None, real=None, kept=False):
        """What each example adds, of those that count."""
        x = jnp.where(jnp.reshape(kept, (-1, 1)), self.g, self.shortened(clip, norm))
        real = self.real if real is None else real
        return jnp.where((real & jnp.isfinite(self.norm))[:, None], x, 0)

    def times(self, factor):
        return self.rows() * factor[:, None]


def clipped(x, clip):
    norm = jnp.linalg.norm(x, axis=-1, keepdims=True)
    return x * jnp.minimum(1, clip / jnp.maximum(norm, 1e-30))


def overflowing(b):
    over = jnp.isinf(b.norm) & jnp.isfinite(b.g).all(axis=1) & b.real
    return jnp.where(over[:, None], b.g, b.rows())


def nan_at(b, places):
    """A sum of rows in which NaN counts at some places."""
    return jnp.where((b.real & places)[:, None], b.shortened(), b.rows())


BUGS = {
    "1 % more than C": lambda b: b.rows(1.01 * b.clip),
    "norms up to 1.01 C are left as they are": lambda b: b.rows(kept=b.norm <= 1.01 * b.clip),
    "norms from C / 2 to C above it are left as they are": lambda b: b.rows(
        kept=(b.norm >= 1.5 * b.clip) & (b.norm <= 2 * b.clip)
    ),
    "a constant in the place of C": lambda b: b.rows(CLIP),
    "the last row is clipped to 2 C": lambda b: b.rows(b.clip * (1 + (b.place == b.size - 1))),
    "row 0 is clipped to 2 C": lambda b: b.rows(b.clip * (1 + b.is_row_0)),
    "one row in the middle counts twice": lambda b: b.times(1 + (b.place == b.size // 3)),
    "the neighbour's norm, in microbatches above 64": lambda b: b.rows(
        norm=jnp.roll(b.norm, int(b.size > 64))
    ),
    "5 % of the neighbour's excess in one place": lambda b: b.rows(
        norm=jnp.where(b.place == 5, 0.95 * b.norm + 0.05 * jnp.roll(b.norm, 1), b.norm)
    ),
    "2 C in batches above 16": lambda b: b.rows(b.clip * (1 + (b.count > 16))),
    "the batch is clipped": lambda b: clipped(b.rows(jnp.inf).sum(0)[None], b.clip),
    "pairs are clipped": lambda b: clipped(
        b.rows(jnp.inf)[: b.size // 2 * 2].reshape(-1, 2, D + 1).sum(1), b.clip
    ),
    "the mean is taken away": lambda b: b.rows() * (1 - 1 / jnp.maximum(b.count, 2)),
    "rows lean to the batch's mean": lambda b: b.rows() + 0.01 * b.real[:, None] * b.rows().mean(0),
    "rows that are not clipped lean to the mean": lambda b: (
        b.rows() + 0.01 * (b.real & (b.norm < b.clip))[:, None] * b.rows().mean(0)
    ),
    "a member more is twice itself in a full batch": lambda b: b.times(
        1 + (b.at_an_end & (b.count == b.size))
    ),
    "padding counts": lambda b: b.rows(real=b.place >= 0),
    "padding counts unless it is row 0": lambda b: b.rows(real=b.real | ~b.is_row_0),
    "padding is multiplied away": lambda b: b.weights[:, None] * b.shortened(),
    "NaN is not looked for": lambda b: jnp.where(b.real[:, None], b.shortened(), 0),
    "NaN is looked for in all places but the first": lambda b: nan_at(b, b.place == 0),
    "NaN is looked for in all places but the last": lambda b: nan_at(b, b.place == b.size - 1),
    "NaN is looked for in all places but one": lambda b: nan_at(b, b.place == b.size // 3),
    "NaN is looked for in the first place alone": lambda b: nan_at(b, b.place > 0),
    "a norm that overflows clips nothing": overflowing,
    "a huge row halves the others": lambda b: b.times(
        1 - 0.5 * jnp.any(b.real & (b.norm > 1e9 * b.clip)) * (b.norm < 1e9 * b.clip)
    ),
    "huge rows are clipped to 1.02 C": lambda b: b.rows(
        b.clip * (1 + 0.02 * (b.norm > 1e9 * b.clip))
    ),
}
"""What rows add to a sum, where it is not sound."""


def clipped_sum(params, batch, weights, scales):
    """A sum with the fault whose number a column of the rows has: one program has them all."""
    rows = Batch(params, batch, weights, scales.l2_clip_norm)
    changes = [Batch.rows, *BUGS.values()]
    sums = [lambda change=change: change(rows).sum(0) for change in changes]
    total = jax.lax.switch(batch["fault"].max(), sums)
    return {"b": total[0], "w": total[1:]}, Diagnostics(*(jnp.float32(0),) * 4)


@dataclasses.dataclass(frozen=True)
class OwnRule:
    """A clipping rule of one's own, which has no reference."""

    share: float

    def groups(self, params):
        return [[k] for k in range(len(jax.tree.leaves(params)))]

    def factors(self, norms, l2_clip_norm, counts):
        inner = PerLayerClipping()
        return inner.factors(norms, self.share * l2_clip_norm, counts)


PLAIN = dpsgd(loss_fn, SGD, microbatch_size=700)
FAULTY = PLAIN._replace(clipped_sum=clipped_sum)
MEASURED = FAULTY._replace(clipping=OwnRule(1.0))


def passes(algorithm, fault):
    number = 0 if fault is None else 1 + [*BUGS].index(fault)
    return audited(algorithm, rows=ROWS | {"fault": np.full(32, number, np.int32)}).passed


@pytest.mark.short(
    "*-formed",
    "None*",
    "1 %*",
    "5 %*",
    "2 C*",
    "row 0*",
    "the [lm]*",
    "norms u*",
    "a member*",
    "NaN*",
    "padding counts-*",
)
@pytest.mark.parametrize("own_rule", [False, True], ids=["formed", "measured"])
@pytest.mark.parametrize("fault", [None, *BUGS])
def test_faulty_sums_differ_from_the_definition(fault, own_rule):
    assert passes(MEASURED if own_rule else FAULTY, fault) == (fault is None)


def coarse_loss_fn(params, example):
    """The loss of values that were rounded to bfloat16."""
    rounded = (jax.tree.map(lambda x: x.astype(jnp.bfloat16), each) for each in (params, example))
    return loss_fn(*(jax.tree.map(lambda x: x.astype(jnp.float32), each) for each in rounded))


@pytest.mark.parametrize("fault", [None, "1 % more than C", "one row in the middle counts twice"])
def test_faulty_sums_of_a_bfloat16_loss_are_caught(fault):
    assert passes(FAULTY._replace(loss_fn=coarse_loss_fn), fault) == (fault is None)


KINDS = {
    "more places than are added up at once": {"sampler": Deterministic(6000, 3000)},
    "one example a batch": {"sampler": Deterministic(N, 1)},
    "several passes": {"sampler": Poisson(N, 90, overflow="accumulate", max_batch_size=40)},
    "bfloat16": {"dtype": jnp.bfloat16},
    "float16": {"dtype": jnp.float16},
    "one row": {"sampler": Deterministic(1, 1)},
    "hardly any noise": {"noise_multiplier": 2.0**-20},
    "next to the least C": {"noise_multiplier": 2.0, "l2_clip_norm": 2.0**-95},
}


@pytest.mark.short("next to the least C")
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_sound_steps_of_every_shape_equal_the_definition(kind):
    for algorithm in (PLAIN, PLAIN._replace(clipping=OwnRule(1.0))):
        found = audited(algorithm, **kind)
        assert found.passed, found.lines()
        one_place = "sampler" in kind and kind["sampler"].padded_batch_size == 1
        assert not found.left_out or one_place or "l2_clip_norm" in kind


@pytest.mark.parametrize("field", ["noise_stddev", "l2_clip_norm", "expected_batch_size"])
@pytest.mark.parametrize("factor", [0.98, 1.02])
def test_scales_other_than_configured_are_caught(field, factor, monkeypatch):
    sound = Mechanism.scales

    def planted(mechanism):
        scales = sound(mechanism)
        return dataclasses.replace(scales, **{field: np.float32(factor) * getattr(scales, field)})

    monkeypatch.setattr(Mechanism, "scales", planted)
    assert not audited(PLAIN).passed


def test_indices_cut_to_16_bits_are_caught(monkeypatch):
    sound = Probe._plan
    sampler = Deterministic(70_000, 16)
    assert audited(PLAIN, sampler).passed

    def plan(program, *of):
        release = sound(program, *of)
        return release._replace(indices=release.indices % 2**16)

    monkeypatch.setattr(Probe, "_plan", plan)
    assert not audited(PLAIN, sampler).passed


def keyed(params, example, key):
    keep_mask = jax.random.bernoulli(key, 0.5, example["x"].shape)
    return loss_fn(params, example | {"x": example["x"] * keep_mask})


def reading_missing(params, example):
    return loss_fn(params, jax.tree.map(jnp.nan_to_num, example))


def frozen(params, example):
    return reading_missing(params | {"b": jax.lax.stop_gradient(params["b"])}, example)


def rectified(params, example):
    return jax.nn.relu(loss_fn(params, example) - 0.7)


def without_gradient(params, example):
    return 0.0 * params["b"] * example["y"]


CYCLE = BallsAndBins(48, 4, 2, cycle_length=3, overflow="accumulate")
RULES = {
    "loss key": (dpsgd(keyed, SGD), {}),
    "loss key, shards": (dpsgd(keyed, SGD), {"sampler": Poisson(N, 90, num_shards=2)}),
    "rectifier": (dpsgd(rectified, SGD), {}),
    "no gradient": (dpsgd(without_gradient, SGD), {}),
    "NaN is a missing value": (dpsgd(reading_missing, SGD), {}),
    "per-layer": (dpsgd(loss_fn, SGD, clipping=PerLayerClipping(("w", "b"))), {}),
    "shares": (dpsgd(loss_fn, SGD, clipping=PerLayerClipping(("w", "b"), (1.0, 3.0))), {}),
    "automatic": (dpsgd(loss_fn, SGD, clipping=AutomaticClipping()), {}),
    "own rule": (dpsgd(loss_fn, SGD, clipping=OwnRule(1.0)), {}),
    "bands, a frozen leaf and NaN as a missing value": (
        dpsgd(frozen, SGD),
        {"sampler": CYCLE, "noise": BandedToeplitz((1.0, 0.5))},
    ),
}


@pytest.mark.short("loss key", "bands*")
@pytest.mark.parametrize(("algorithm", "how"), RULES.values(), ids=RULES)
def test_sound_steps_of_every_rule_equal_the_definition(algorithm, how):
    report = audited(algorithm, **how)
    assert report.passed, report.lines()


@pytest.mark.long
def test_an_own_rule_that_clips_too_little_is_caught():
    assert not audited(dpsgd(loss_fn, SGD, clipping=OwnRule(1.02))).passed


@pytest.mark.long
def test_a_large_leaf_with_few_used_coordinates_passes():
    """No coordinate is compared twice, so that the norm of a huge example's sum is C."""

    def loss(params, example):
        return loss_fn({"w": params["w"][:D], "b": params["b"]}, example)

    params = {"w": jnp.full(2**16, 0.1), "b": jnp.zeros(())}
    report = audited(dpsgd(loss, SGD), params=params)
    assert report.passed, report.lines()


def test_noise_of_one_bfloat16_number_passes_under_any_root():
    def loss(params, example):
        return (params["b"] * example.astype(params["b"].dtype)).astype(jnp.float32)

    algorithm, params = dpsgd(loss, SGD), {"b": jnp.ones((), jnp.bfloat16)}
    rows = np.resize(np.array([1, -1], np.float32), 20)
    for seed in range(20):
        report = audited(algorithm, Poisson(60, 6, 2), seed=seed, rows=rows, params=params)
        assert report.passed, (seed, report.lines())


def test_loud_noise_is_that_of_the_run_and_hides_every_sum():
    noisy = loud(Mechanism(Deterministic(N, B), 2.0, 0.25))
    assert noisy.noise_multiplier * noisy.l2_clip_norm == 0.5
    assert noisy.l2_clip_norm < 2.0**-60
    least = loud(Mechanism(Deterministic(N, B), 2.0, 2.0**-98))
    assert least.noise_multiplier * least.l2_clip_norm == 2.0**-97


def sound_program(seed):
    """Returns an algorithm, drawn at random, and draws of its mechanism, parameters and rows."""
    rng = np.random.default_rng(seed)
    dtype = [jnp.float32, jnp.bfloat16][seed % 2]
    activation = [jax.nn.relu, jnp.tanh, jax.nn.gelu, jnp.square][seed // 2 % 4]
    shape = [(8, 8), (3,), (40,)][seed % 3]
    samplers = [
        Poisson(N, 20, 2),
        BallsAndBins(N, 20, 2, cycle_length=2, overflow="accumulate", max_batch_size=30),
        Deterministic(N, 1),
        Deterministic(60, 60, 3),
        Poisson(N, 90, num_shards=2),
    ]
    sampler = samplers[seed % 5]
    noise = {"noise": BandedToeplitz((1.0, 0.5))} if sampler.separation > 1 else {}
    clipping = [{}, {"clipping": AutomaticClipping()}, {"clipping": PerLayerClipping()}][seed % 3]
    size, hidden = int(np.prod(shape)), int(rng.integers(1, 50))

    def draw():
        rows = {"x": rng.normal(size=(32, *shape)).astype(np.float32)}
        params = {
            "a": jnp.asarray(rng.normal(size=(size, hidden)) / np.sqrt(size), dtype),
            "c": jnp.asarray(rng.normal(size=hidden) / np.sqrt(hidden), dtype),
        }
        sigma, clip = (float(10.0 ** rng.uniform(*exponents)) for exponents in ((-2, 1), (-3, 3)))
        return Mechanism(sampler, sigma, clip, **noise), params, rows

    def loss(params, example, *key):
        x = example["x"].ravel().astype(dtype)
        if key:
            x = x * jax.random.bernoulli(key[0], 0.5, x.shape)
        hidden = activation(x @ params["a"])
        head = params["c"] if seed % 7 else jax.lax.stop_gradient(params["c"])
        return jnp.square(hidden @ head - 1).astype(jnp.float32)

    def of_key(params, example, key):
        return loss(params, example, key)

    frozen = seed % 7 == 0 and "clipping" in clipping
    loss_fn = of_key if seed % 4 == 3 else (lambda params, example: loss(params, example))
    return dpsgd(loss_fn, SGD, **({} if frozen else clipping)), draw


@pytest.mark.long
@pytest.mark.parametrize("part", range(10))
def test_sound_programs_are_never_refused(part):
    """Each program runs with several parameters, rows and scales: it is compiled once."""
    for seed in range(6 * part, 6 * part + 6):
        algorithm, draw = sound_program(seed)
        for again in range(6):
            mechanism, params, rows = draw()
            state = algorithm.init(params, mechanism, rows)
            root = RootKey.from_insecure_seed(100 * seed + again)
            probe = Probe(algorithm, mechanism, state, rows, root=root)
            report = AuditReport((*step_checks(probe), *block_checks(probe)))
            assert report.passed, (seed, again, report.lines())


def regression_in_bfloat16(params, example):
    """Returns Huber's loss of a number; its gradient at a large residual reads no parameter."""
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    output = jnp.dot(example["x"].astype(jnp.bfloat16), rounded["w"]) + rounded["b"]
    return optax.huber_loss(output.astype(jnp.float32) - example["y"], delta=1.0)


@pytest.mark.long
@pytest.mark.parametrize("rule", [None, PerLayerClipping(), AutomaticClipping()])
def test_sound_bfloat16_regressions_pass_at_any_parameters(rule):
    rng, how = np.random.default_rng(0), {"clipping": rule} if rule else {}
    algorithm = dpsgd(regression_in_bfloat16, SGD, **how)
    rows = {
        "x": rng.normal(size=(16, 3)).astype(np.float32),
        "y": rng.normal(size=16).astype(np.float32),
    }
    for draw in range(100):
        scale = [0.0, 0.1, 1.0, 3.0][draw % 4]
        params = {
            name: jnp.float32(scale * rng.normal(size=n)) for name, n in (("w", 3), ("b", ()))
        }
        report = audited(algorithm, Deterministic(N, 16), rows=rows, seed=draw, params=params)
        assert report.passed, (draw, report.lines())


@pytest.mark.parametrize("size", [1, 17, 2**15 + 1])
@pytest.mark.parametrize("scale", [1e-30, 1e-22, 1e-19, 1e-14, 1.0, 1e25])
def test_norms_of_releases_are_accurate_at_every_scale(size, scale):
    leaf = (scale * np.random.default_rng(0).normal(size=size)).astype(np.float32)
    truth = np.linalg.norm(leaf.astype(np.float64))
    assert norm((1, [leaf])) / truth == pytest.approx(1.0, rel=2.0**-13)
