"""Clipping rules: under each an example has norm C at most, by every method of computing."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpsgd import (
    AutomaticClipping,
    LazyTables,
    PerLayerClipping,
    RunSpec,
    dpsgd,
    with_rows,
)
from dpsgd.audit.conformance import check_clipping
from dpsgd.gradients import norms
from dpsgd.gradients.clipping import clipped_grad
from dpsgd.gradients.rules import GAMMA, FlatClipping
from dpsgd.runs.support import check
from samplers.settings import SETTINGS
from tests.dpsgd.methods import METHODS, loss_by

pytestmark = pytest.mark.usefixtures("unoptimised")

C = 0.5
PATTERNS = ("kernel", "bias|scale")
RULES = {
    "flat": FlatClipping(),
    "per-layer": PerLayerClipping(),
    "groups": PerLayerClipping(PATTERNS, (1.0, 3.0)),
    "automatic": AutomaticClipping(),
}


def loss(params, example):
    hidden = jnp.tanh(example["x"] @ params["dense"]["kernel"] + params["dense"]["bias"])
    return params["scale"] * jnp.sum((hidden - example["y"]) ** 2)


RNG = np.random.default_rng(0)
PARAMS = {
    "dense": {
        "kernel": RNG.normal(size=(4, 3)).astype(np.float32),
        "bias": RNG.normal(size=3).astype(np.float32),
    },
    "scale": np.float32(1.5),
}
ROWS = {
    "x": RNG.normal(size=(8, 4)).astype(np.float32),
    "y": RNG.normal(size=(8, 3)).astype(np.float32),
}


def defined(rule, gradients):
    """The contributions by the definition, of gradients {leaf: float64[B, d]}."""
    names = sorted(gradients)  # dense.bias, dense.kernel, scale
    groups = {
        "per-layer": ([names[:2], names[2:]], (0.5, 0.5)),
        "groups": ([names[1:2], [names[0], names[2]]], (0.25, 0.75)),
    }.get(rule, ([names], (1.0,)))
    found = {}
    for group, share in zip(*groups, strict=True):
        norm = np.sqrt(sum((gradients[name] ** 2).sum(1) for name in group))
        budget = C * np.sqrt(share)
        factor = budget / (norm + 0.01) if rule == "automatic" else np.minimum(1, budget / norm)
        found |= {name: gradients[name] * factor[:, None] for name in group}
    return np.concatenate([found[name] for name in names], axis=1)


@functools.cache
def compiled(rule, method, size=None):
    options = {"microbatch_size": size, "clipping": RULES[rule]}
    return jax.jit(clipped_grad(loss_by(method, loss), l2_clip_norm=C, **options))


def flat(tree):
    return np.concatenate([np.ravel(x).astype(np.float64) for x in jax.tree.leaves(tree)])


@pytest.mark.short("ghost-per-layer", "ghost-automatic", "vmap-groups")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("method", METHODS)
def test_sums_are_the_definition_whatever_is_computed_together(rule, method):
    each = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(PARAMS, ROWS)
    leaves = {
        jax.tree_util.keystr(path): np.asarray(g, np.float64).reshape(8, -1)
        for path, g in jax.tree_util.tree_leaves_with_path(each)
    }
    expected, weights = defined(rule, leaves), np.ones(8, np.float32)
    tolerance = 1e-5
    for size in (None, 3):
        got = flat(compiled(rule, method, size)(PARAMS, ROWS, weights)[0])
        np.testing.assert_allclose(got, expected.sum(0), rtol=0, atol=tolerance * C)


@pytest.mark.short("ghost-per-layer", "ghost-automatic", "vmap-groups")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("method", METHODS)
def test_examples_stay_within_c_and_nonfinite_ones_add_nothing(rule, method):
    sums = compiled(rule, method)
    for size in (0.0, 1e-42, 1e-30, 1.0, 1e18, 1e30, np.nan, np.inf):
        rows = {"x": ROWS["x"], "y": ROWS["y"].copy()}
        rows["y"][0, 1] = size
        one = np.eye(8, dtype=np.float32)[0]
        got, diagnostics = sums(PARAMS, rows, one)
        assert np.linalg.norm(flat(got)) <= C
        if diagnostics.nonfinite_count:
            assert not flat(got).any()
        assert np.isfinite(flat(got)).all()
        assert not np.isnan(size) or diagnostics.nonfinite_count == 1


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_norm_that_is_not_finite_leaves_out_every_group(rule):
    ones, lengths = jnp.ones(3), jnp.array([1.0, jnp.nan, jnp.inf])
    sound, unsound = norms.Norm(ones, ones), norms.Norm(ones, lengths)
    group_norms = [sound, unsound][-len(rule.groups(PARAMS)) :]
    for factor in rule.factors(group_norms, C, ones > 0):
        assert factor.keep.tolist() == [True, False, False]


@pytest.mark.parametrize("gamma", [GAMMA[0], 0.01, GAMMA[1]])
def test_normalised_gradients_of_any_size_stay_below_c(gamma):
    @jax.jit
    def contributions(x, clip):
        norm, counts = norms.norm([norms.square_sums(x)]), jnp.ones(len(x), bool)
        return norms.contribution(norms.clip_factor(norm, clip, counts, gamma=gamma), x)

    powers = np.float32(2.0) ** np.arange(-148, 127, 11, dtype=np.float32)
    x = np.random.default_rng(1).normal(size=(len(powers), 40)).astype(np.float32)
    x = np.clip(x, -1.5, 1.5) * powers[:, None]
    x[0] = 0
    for clip in (2.0**-100, 0.7, 2.0**96):
        got = np.linalg.norm(np.asarray(contributions(x, np.float32(clip)), np.float64), axis=1)
        assert (got <= np.float32(clip) * (1 - 3 * 2.0**-24)).all()
    assert np.array_equal(contributions(x, np.float32(np.inf))[5:], x[5:])  # clips nothing


table_loss = with_rows(
    lambda example: {"table": example["ids"]},
    lambda params, rows, example: jnp.sum(rows["table"] ** 2) * example["x"] + params["bias"] ** 2,
)


TABLES = (
    {"table": jnp.ones((20, 3)), "bias": jnp.ones(())},
    {"ids": np.arange(128, dtype=np.int32).reshape(64, 2) % 20, "x": np.ones(64, np.float32)},
)


@pytest.mark.audit
@pytest.mark.long
@pytest.mark.parametrize("lazy", [False, True], ids=["dense", "lazy"])
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_conforms(rule, lazy):
    if rule == "groups" and lazy:
        clipping = PerLayerClipping(("table", ".*"), (2.0, 1.0))
    else:
        clipping = RULES[rule]
    tables = LazyTables(0.1) if lazy else None
    given = TABLES if lazy else (PARAMS, jax.tree.map(lambda x: np.tile(x, (8, 1)), ROWS))
    algorithm = dpsgd(
        table_loss if lazy else loss, optax.sgd(0.1), clipping=clipping, tables=tables
    )
    check_clipping(algorithm, *given, l2_clip_norm=C, batch_size=16)


@dataclass(frozen=True)
class EachC(PerLayerClipping):
    """Gives every group the whole of C, which adds up to more."""

    def factors(self, group_norms, l2_clip_norm, counts):
        return [norms.clip_factor(norm, l2_clip_norm, counts) for norm in group_norms]


@dataclass(frozen=True)
class OnlyItsOwn(FlatClipping):
    """Bounds the whole by the norm of the first half of the leaves."""

    def groups(self, params):
        return [[0, 1], [2]]

    def factors(self, group_norms, l2_clip_norm, counts):
        return [norms.clip_factor(group_norms[0], l2_clip_norm, counts)] * 2


@pytest.mark.short("each-c*")
@pytest.mark.mutants
@pytest.mark.parametrize("faulty", [EachC(), OnlyItsOwn()], ids=["each-c", "first-group"])
def test_a_rule_that_exceeds_c_is_caught(faulty):
    rows = jax.tree.map(lambda x: np.tile(x, (8, 1)), ROWS)
    algorithm = dpsgd(loss, optax.sgd(0.1), clipping=faulty)
    with pytest.raises(AssertionError, match="FAIL  a step releases what the definition"):
        check_clipping(algorithm, PARAMS, rows, l2_clip_norm=1e-3, batch_size=16)


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: PerLayerClipping(("(",)), "is no regex"),
        (lambda: PerLayerClipping(()), "must name a group"),
        (lambda: PerLayerClipping(("a", "b"), (1.0,)), "one for each of the"),
        (lambda: PerLayerClipping(None, (1.0,)), "one for each of the"),
        (lambda: PerLayerClipping(("a", "b"), (1.0, 0.0)), "finite and > 0"),
        (lambda: PerLayerClipping(("kernel",)).groups(PARAMS), "matches the parameter dense.bias"),
        (
            lambda: PerLayerClipping((".*", "dense")).groups(PARAMS),
            "'dense' is the first match of",
        ),
        (lambda: AutomaticClipping(0.0), "clip_gamma must be"),
        (lambda: AutomaticClipping(np.nan), "clip_gamma must be"),
    ],
)
def test_an_impossible_rule_is_refused_in_a_line(make, line):
    with pytest.raises(ValueError, match=line):
        make()


def test_a_spec_has_a_rule_by_its_options_and_in_its_record():
    asked = functools.partial(RunSpec.of, SETTINGS["poisson"](batch_size=8, epochs=1))
    spec = asked(noise_multiplier=1.0, clipping="per-layer", clip_groups=list(PATTERNS))
    assert spec.clipping == PerLayerClipping(PATTERNS)
    assert spec.record()["clip_groups"] == list(PATTERNS)
    assert spec.but(clip_shares=(1.0, 2.0)).clipping == PerLayerClipping(PATTERNS, (1.0, 2.0))
    with pytest.raises(ValueError, match="without privacy nothing is clipped"):
        check(asked(non_private=True, clipping="automatic"))
    with pytest.raises(ValueError, match="clip_gamma goes with clipping automatic"):
        asked(noise_multiplier=1.0, clip_gamma=1.0)
