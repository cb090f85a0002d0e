"""Examples cannot mix: a loss that could see another example than its own is refused."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.experimental import pallas
from jax.extend import core
from jax.sharding import PartitionSpec

from dpsgd import LazyTables, Mechanism, Placement, clipped_grad, dpsgd, explain, train
from dpsgd.engine.placement import AXIS
from dpsgd.gradients.isolation import host_fault, inner_jaxprs
from dpsgd.gradients.losses import Loss
from samplers import Deterministic
from tests.dpsgd.methods import METHODS, loss_by
from tests.dpsgd.mixing import shared

B, D = 4, 3
W = np.linspace(-1.0, 1.0, D, dtype=np.float32)
X = np.random.default_rng(0).normal(size=(B, D)).astype(np.float32)
FAST_COMPILE = {"xla_backend_optimization_level": 0}


def only_in_its_derivative(rule):
    """The identity, whose derivative alone is by the rule."""

    @jax.custom_vjp
    def identity(x):
        return x

    identity.defvjp(lambda x: (x, x), lambda x, g: (g * rule(x),))
    return identity


def own_primitive():
    p = core.Primitive("sin")
    p.def_abstract_eval(lambda x: x)
    return p


def doubled_by_a_kernel(x):
    def kernel(x_ref, o_ref):
        o_ref[...] = 2 * x_ref[...]

    return pallas.pallas_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def called(x, **how):
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(np.asarray, like, lax.stop_gradient(x), **how)


def foreign(x, **how):
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.ffi.ffi_call("nowhere", like, **how)(lax.stop_gradient(x))


def noisy(x, impl):
    return x * jax.random.normal(jax.random.key(0, impl=impl), x.shape)


def printed(x):
    jax.debug.print("{}", x)
    return x


def passed_to_the_host(x, of):
    of(lambda x: None, x)
    return x


def bits(x):
    key = lax.bitcast_convert_type(jnp.resize(x, 4), jnp.uint32)
    return x * lax.rng_bit_generator(key, x.shape)[1].astype(x.dtype)


def remembered(x):
    kept = jax.new_ref(jnp.zeros(D))
    kept[...] = x
    return kept[...]


def on_devices(x):
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec()
    return jax.shard_map(lambda x: 2 * x, mesh=mesh, in_specs=spec, out_specs=spec)(x)


COULD_SEE_A_BATCH = {
    "custom_vmap": (shared, "custom_vmap_call"),
    "custom_vmap in jit": (jax.jit(shared), "custom_vmap_call"),
    "custom_vmap in checkpoint": (jax.checkpoint(shared), "custom_vmap_call"),
    "custom_vmap in a scan": (
        lambda x: lax.scan(lambda c, _: (shared(c), None), x, length=2)[0],
        "custom_vmap_call",
    ),
    "custom_vmap in a loop": (
        lambda x: lax.while_loop(lambda c: c.sum() < 9, shared, lax.stop_gradient(x)),
        "custom_vmap_call",
    ),
    "custom_vmap in a condition of a loop": (
        lambda x: lax.while_loop(
            lambda c: shared(c).sum() < 9, lambda c: c + 1, lax.stop_gradient(x)
        ),
        "custom_vmap_call",
    ),
    "custom_vmap in a branch": (
        lambda x: lax.cond(x[0] > 0, shared, jnp.sin, x),
        "custom_vmap_call",
    ),
    "custom_vmap in a linear solve": (
        lambda x: lax.custom_linear_solve(lambda y: 2 * y, x, lambda _, b: shared(b) / 2),
        "custom_vmap_call",
    ),
    "custom_vmap in a derivative": (only_in_its_derivative(shared), "custom_vmap_call"),
    **{
        f"{call.__name__}, {method}": (
            functools.partial(call, vmap_method=method),
            "from call to call",
        )
        for call in (called, foreign)
        for method in ("sequential", "sequential_unrolled", "broadcast_all", "expand_dims")
    },
    "pure_callback in a derivative": (
        only_in_its_derivative(functools.partial(called, vmap_method="sequential")),
        "from call to call",
    ),
    "io_callback": (
        functools.partial(
            passed_to_the_host, of=lambda f, x: jax.experimental.io_callback(f, None, x)
        ),
        "private rows",
    ),
    "debug callback": (
        functools.partial(passed_to_the_host, of=jax.debug.callback),
        "private rows",
    ),
    "debug print": (printed, "private rows"),
    "rbg": (functools.partial(noisy, impl="rbg"), "threefry2x32"),
    "unsafe_rbg": (functools.partial(noisy, impl="unsafe_rbg"), "threefry2x32"),
    "bits of a generator": (bits, "rng_bit_generator"),
    "a state": (remembered, "uses new_ref"),
    "a kernel": (doubled_by_a_kernel, "pallas_call"),
    "devices": (on_devices, "shard_map"),
    "a primitive that calls itself sin": (own_primitive().bind, "not defined in JAX"),
    # Its series ends for all rows at once, when it has converged for the last of them.
    "an incomplete beta function": (
        lambda x: jax.scipy.special.betainc(2.0, 3.0, x),
        "regularized_incomplete_beta",
    ),
    "memory that nobody has written": (lambda x: x + lax.empty(x.shape, x.dtype), "uses empty"),
}


def refuses(name, method="ghost"):
    function, words = COULD_SEE_A_BATCH[name]
    # So many at a time that their memory is not estimated, for which the loss is traced as well.
    loss_fn = loss_by(method, lambda w, x: jnp.dot(w, function(w * x)))
    run = clipped_grad(loss_fn, l2_clip_norm=1.0, microbatch_size=B)
    with pytest.raises(ValueError, match=words) as refused:
        jax.eval_shape(run, W, X, np.ones(B))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", COULD_SEE_A_BATCH)
def test_a_loss_that_could_see_a_batch_is_refused(name):
    refuses(name)


@pytest.mark.parametrize("name", ["custom_vmap", "custom_vmap in a derivative", "rbg"])
def test_every_way_of_clipping_refuses_it(name):
    refuses(name, method="vmap")


def test_a_refusal_says_what_where_and_what_to_do():
    def loss_fn(w, x):
        return jnp.dot(w, shared(x))

    line = loss_fn.__code__.co_firstlineno + 1
    with pytest.raises(ValueError, match="custom_vmap") as refused:
        explain(loss_fn, W, X[0])
    assert str(refused.value).startswith("examples could mix: the loss uses custom_vmap_call at ")
    assert f"test_isolation.py:{line}" in str(refused.value)
    assert str(refused.value).endswith("call the function without jax.custom_batching.custom_vmap")


@pytest.mark.parametrize("method", METHODS)
def test_a_loss_that_closes_over_a_traced_value_is_refused(method):
    @jax.jit
    def around(batch):
        mean = batch.mean(0)
        loss_fn = loss_by(method, lambda w, x: jnp.dot(w, x - mean))
        run = clipped_grad(loss_fn, l2_clip_norm=1.0)
        return run(W, batch, jnp.ones(B))

    with pytest.raises(ValueError, match=r"closes over a traced value, float32\[3\]"):
        around(X)


def test_a_sum_over_an_axis_around_the_loss_is_refused():
    def outer(w, x):
        return jnp.dot(w, lax.psum(x, "replicas"))

    run = clipped_grad(outer, l2_clip_norm=1.0)
    replicas = jax.vmap(lambda batch: run(W, batch, np.ones(B)), axis_name="replicas")
    with pytest.raises(ValueError, match="uses psum at"):
        jax.eval_shape(replicas, np.stack([X, X]))


@pytest.mark.parametrize("method", METHODS)
def test_python_of_loss_and_derivative_sees_one_example(method):
    met = []

    @jax.custom_vjp
    def watched(x):
        met.append(x)
        return x

    def forward(x):
        met.append(x)
        return x, x

    def backward(x, g):
        met.extend([x, g])
        return (g,)

    watched.defvjp(forward, backward)
    loss_fn = loss_by(method, lambda w, x: jnp.dot(w, watched(w * x)))
    run = clipped_grad(loss_fn, l2_clip_norm=1.0)
    jax.eval_shape(run, W, X, np.ones(B))
    assert len(met) >= 4
    assert not [x for x in met if type(x).__name__ == "BatchTracer"]


def spd(x):
    return jnp.outer(x, x) + jnp.eye(D)


def rounds(x):
    """Doublings until 100: other examples take other numbers of them."""
    last = lax.while_loop(
        lambda c: c < 100.0, lambda c: 2 * c, jnp.abs(lax.stop_gradient(x[0])) + 1
    )
    return x * last


def own_filter(x):
    """A convolution by a filter that is the example's own."""
    return lax.conv_general_dilated(x[None, None], jnp.cos(x)[None, None], (1,), "SAME")[0, 0]


def own_key(x):
    key = jax.random.key(0, impl="threefry2x32")
    return jax.random.fold_in(key, lax.bitcast_convert_type(x[0], jnp.uint32))


ALONE = {
    "loop": rounds,
    "branch": lambda x: lax.cond(x[0] > 0, jnp.sin, jnp.exp, x),
    "scan": lambda x: lax.scan(lambda c, y: (jnp.tanh(c * y + 1), None), x, x)[0],
    "order": lambda x: jnp.sort(x) + jnp.median(x) + lax.top_k(x, D)[0],
    "decomposition": lambda x: jnp.linalg.cholesky(spd(x)) @ jnp.linalg.solve(spd(x), x),
    "iteration": lambda x: jax.scipy.sparse.linalg.cg(lambda y: spd(x) @ y, x, maxiter=3)[0],
    "spectrum": lambda x: jnp.abs(jnp.fft.fft(x)) + jnp.cumsum(x),
    "filter": own_filter,
    "far away": lambda x: (
        x.at[(1e9 * x).astype(jnp.int32)].get(mode="promise_in_bounds")
        + jnp.zeros(D).at[(9 * x).astype(jnp.int32)].add(x, mode="promise_in_bounds")
    ),
    "randomness": lambda x: x * jax.random.normal(own_key(x), x.shape),
    "own axis": lambda x: jax.vmap(lambda y: lax.psum(jnp.sin(y), "own"), axis_name="own")(x),
}


SLOW = {"decomposition", "iteration", "order", "spectrum", "scan"}


@pytest.mark.short("own axis-ghost", "branch-ghost", "randomness-ghost")
@pytest.mark.parametrize(
    ("name", "method"),
    [
        pytest.param(name, method, marks=[pytest.mark.long] * (method == "vmap" or name in SLOW))
        for name in ALONE
        for method in METHODS
    ],
)
def test_contribution_has_equal_bits_whatever_the_other_examples(name, method):
    function = ALONE[name]
    loss_fn = loss_by(method, lambda w, x: jnp.dot(w, function(x * (1 + w))))
    run = jax.jit(clipped_grad(loss_fn, l2_clip_norm=1.0), compiler_options=FAST_COMPILE)
    for i in (0, B - 1):
        alone = np.eye(B, dtype=np.float32)[i]
        expected = np.array(run(W, X, alone)[0])
        assert np.any(expected)
        for others in (0.0, 7.0, 1e30, np.inf, np.nan):
            batch = np.where(alone[:, None] > 0, X, np.float32(others))
            assert np.array(run(W, batch, alone)[0]).tobytes() == expected.tobytes(), others


def test_examples_stay_apart_in_layers_of_grouped_channels():
    """XLA multiplies all examples' batch groups with each other and masks: 0 * NaN is NaN."""

    def convolved(image, kernel):
        layouts = ("NWC", "WIO", "NWC")
        return lax.conv_general_dilated(
            image[None], kernel, (1,), "SAME", feature_group_count=2, dimension_numbers=layouts
        )

    def loss_fn(params, image):
        tapped = convolved(image, params["tapped"])
        return jnp.sum(tapped * convolved(image, jnp.sin(params["no rule"])))

    rng = np.random.default_rng(0)
    params = {name: rng.normal(size=(3, 2, 4)).astype(np.float32) for name in ("tapped", "no rule")}
    images = rng.normal(size=(B, 5, 4)).astype(np.float32)
    run = jax.jit(clipped_grad(loss_fn, l2_clip_norm=1.0), compiler_options=FAST_COMPILE)
    poisoned = np.where(np.arange(B)[:, None, None] > 0, images, np.float32(np.inf))
    expected, found = run(params, images, np.arange(B))[0], run(params, poisoned, np.ones(B))[0]
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert all(x.any() for x in jax.tree.leaves(expected))
    program = run.lower(params, images, np.ones(B)).as_text()
    assert {int(n) for n in re.findall(r"batch_group_count = (\d+)", program)} == {1, 2}


@pytest.mark.short("*-ghost", "True-vmap")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("keyed", [False, True])
def test_allowed_host_call_gets_one_example_at_a_time(method, keyed):
    met = []

    def host(x):
        met.append(np.asarray(x))
        return np.sin(x)

    def loss_fn(w, x, vmap_method="sequential"):
        like = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jnp.dot(w, jax.pure_callback(host, like, x, vmap_method=vmap_method))

    keys = jax.random.split(jax.random.key(0), B) if keyed else None
    one_by_one = (lambda w, x, key: loss_fn(w, x)) if keyed else lambda w, x: loss_fn(w, x)
    allowed = Loss(loss_by(method, one_by_one), foreign_calls=True)
    run = jax.jit(clipped_grad(allowed, l2_clip_norm=100.0), compiler_options=FAST_COMPILE)
    total, _ = run(W, X, np.ones(B), keys)
    assert {x.shape for x in met} == {(D,)}
    np.testing.assert_allclose(total, np.sin(X).sum(0), rtol=1e-5)
    whole = Loss(loss_by(method, lambda w, x: loss_fn(w, x, "expand_dims")), foreign_calls=True)
    with pytest.raises(ValueError, match='give vmap_method="sequential"'):
        jax.eval_shape(clipped_grad(whole, l2_clip_norm=100.0), W, X, np.ones(B))


def test_stateful_host_call_is_named_as_not_covered():
    largest = [0.0]

    def host(x):
        largest[0] = max(largest[0], float(x.max()))
        return np.float32(largest[0])

    def loss_fn(w, x):
        shape = jax.ShapeDtypeStruct((), x.dtype)
        return jnp.dot(w, x) * jax.pure_callback(host, shape, x, vmap_method="sequential")

    mechanism = Mechanism(Deterministic(B, B, 1), 1.0, 1.0)
    with pytest.raises(ValueError, match=r"pure_callback .*from call to call.*foreign_calls=True"):
        train(dpsgd(loss_fn, optax.sgd(0.1)), mechanism, W, X, delta=1e-5)
    algorithm = dpsgd(loss_fn, optax.sgd(0.1), foreign_calls=True)
    _, guarantee = train(algorithm, mechanism, W, X, delta=1e-5, audit=False)
    assert "NOT COVERED: host calls and foreign functions of the loss" in guarantee.sentence()
    assert guarantee.sentence() == guarantee.record()["guarantee"]
    assert any("host calls" in line for line in guarantee.not_covered)
    with pytest.raises(ValueError, match="not for lazy tables"):
        dpsgd(loss_fn, optax.sgd(0.1), tables=LazyTables(0.1), foreign_calls=True)
    with pytest.raises(ValueError, match="foreign_calls=True"):  # of `dpsgd` itself
        train(dpsgd(Loss(loss_fn, foreign_calls=True), optax.sgd(0.1)), mechanism, W, X)


def test_loss_keys_are_threefry_under_any_default():
    def loss_fn(w, x, key):
        return jnp.dot(w, x * jax.random.normal(jax.random.split(key)[0], x.shape))

    keys = jax.random.split(jax.random.key(0, impl="threefry2x32"), B)
    run = clipped_grad(loss_fn, l2_clip_norm=1.0)
    expected, found = (jax.jit(run, compiler_options=FAST_COMPILE) for _ in range(2))
    expected, _ = expected(W, X, np.ones(B), keys)
    with jax.default_prng_impl("rbg"):
        found, _ = found(W, X, np.ones(B), keys)
    np.testing.assert_array_equal(found, expected)


def test_collectives_between_devices_are_no_host_calls():
    """Steps on several devices gather row indices and add sums: JAX marks both with an effect."""
    placement = Placement.default()

    def exchanged(x):
        return lax.all_gather(lax.psum(x, AXIS), AXIS)

    specs = {"in_specs": PartitionSpec(), "out_specs": PartitionSpec(), "check_vma": False}
    mapped = jax.shard_map(exchanged, mesh=placement.mesh, **specs)
    (outer,) = jax.make_jaxpr(mapped)(jnp.ones(2)).eqns
    (inner,) = inner_jaxprs(outer.params)
    assert any(equation.effects for equation in inner.eqns)
    assert not any(map(host_fault, [outer, *inner.eqns]))
