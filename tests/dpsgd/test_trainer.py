"""`train` audits what it is about to run: what is not what its guarantee assumes never begins."""

import dataclasses
import functools
import inspect
import logging
from contextlib import closing
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checked_types import unchecked
from flax import nnx

from dpsgd import (
    Mechanism,
    Refinement,
    Segment,
    cost,
    dpsgd,
    split_module,
    train,
    train_blocks,
)
from dpsgd.audit.report import UNSEEN, AuditReport
from dpsgd.audit.synthetic import generated_rows
from dpsgd.core.mechanism import SCALES
from dpsgd.core.noise import Independent
from dpsgd.core.queries import FullSums
from dpsgd.engine import programs, queries
from dpsgd.engine.feed import Layout
from dpsgd.gradients.rules import FlatClipping
from dpsgd.noise.keys import RootKey
from samplers import Multistage, Shuffle, UnitTree
from samplers.population import UnitData
from tests.dpsgd.mixing import shared

N, D = 60, 64  # so many weights are audited by few releases
SHUFFLED = Mechanism(Shuffle(N, 12, 2), 1.0, 1.0)


def loss_fn(w, example):
    return jnp.square(jnp.dot(w, example["x"]) - example["y"])


ALGORITHM = dpsgd(loss_fn, optax.adam(0.1))


def data(seed=0):
    x = np.random.default_rng(seed).normal(size=(N, D))
    return {"x": x, "y": np.arange(N) % 7}  # in 64 bits, as NumPy has them


def trained(algorithm=ALGORITHM, mechanism=SHUFFLED, rows=None, **how):
    rows = data() if rows is None else rows
    return train(algorithm, mechanism, jnp.ones(D), rows, block_steps=4, **how)


def audited(found):
    (note,) = [note for note in found.guarantee.notes if note.startswith("audit ")]
    return note


@pytest.mark.filterwarnings("error::RuntimeWarning")  # as of huge rows that 32 bits do not hold
def test_the_training_program_is_audited_and_compiled_once(caplog):
    programs._executable.cache_clear()
    with jax.log_compiles(), caplog.at_level(logging.WARNING, "jax"):
        note = audited(trained())
    assert sum("Compiling jit(_run_block)" in message for message in caplog.messages) == 1
    assert note.startswith("audit before training: passed: the compiled program and the draws keep")
    assert note.endswith(UNSEEN)


def doubled(clipped_sum, *arguments):
    total, diagnostics = clipped_sum(*arguments)
    return jax.tree.map(lambda leaf: 2 * leaf, total), diagnostics


def test_a_run_that_fails_its_audit_never_begins():
    seen = []
    twice = functools.partial(doubled, ALGORITHM.clipped_sum)
    with pytest.raises(ValueError, match="a step releases what the definition") as failed:
        trained(ALGORITHM._replace(clipped_sum=twice), on_block=lambda *of: seen.append(of))
    assert "do not train it" in str(failed.value)
    assert "\n" not in str(failed.value)
    assert not seen


@pytest.mark.long
def test_a_run_that_is_odd_and_sound_passes():
    def loss(params, example):
        return loss_fn(params["w"], example) + params["empty"].sum()

    # An optimizer that holds keys, a leaf without entries, and a C that cannot be lowered.
    optimizer = optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1))
    params = {"w": jnp.ones(D), "empty": jnp.zeros((0, 2))}
    mechanism = Mechanism(SHUFFLED.sampler, 1.0, SCALES[0])
    note = audited(train(dpsgd(loss, optimizer), mechanism, params, data(), block_steps=4))
    assert note.startswith("audit before training: passed")


@pytest.fixture
def rows_of_audits(monkeypatch):
    """What audits are given, none of which is made."""
    given = []

    def audit(algorithm, mechanism, params, rows, **how):
        given.append(rows)
        return AuditReport(())

    monkeypatch.setattr("dpsgd.runs.job.audit_program", audit)
    return given


def test_without_an_audit_the_guarantee_says_so(rows_of_audits):
    assert "not made" in audited(trained(audit=False))
    silent = trained(mechanism=Mechanism(SHUFFLED.sampler, 0.0, 1.0))
    assert audited(silent) == "audit before training: not made: there is no noise"
    assert not rows_of_audits


def test_audit_rows_depend_on_shapes_and_dtypes_alone(rows_of_audits):
    trained(rows=data(1))
    trained(rows=jax.tree.map(np.zeros_like, data(2)))
    first, second = rows_of_audits
    jax.tree.map(np.testing.assert_array_equal, first, second)
    assert set(np.unique(first["y"])) == {0, 1}
    shapes = {
        "half": jax.ShapeDtypeStruct((9, 2), jnp.bfloat16),
        "flag": jax.ShapeDtypeStruct((9,), np.bool_),
        "id": jax.ShapeDtypeStruct((9, 4), np.uint8),
        "wave": jax.ShapeDtypeStruct((9,), np.complex64),
    }
    rows = generated_rows(shapes, 1000)
    assert {name: (leaf.shape[1:], leaf.dtype) for name, leaf in rows.items()} == {
        name: (leaf.shape[1:], leaf.dtype) for name, leaf in shapes.items()
    }
    assert rows["id"].max() == 1 == rows["flag"].max()
    half = rows["half"].astype(float)
    assert np.sqrt(np.mean(half**2)) == pytest.approx(1, rel=0.2)
    assert half[::2].min() < 0 < half[1::2].min()  # of which roots can be taken


def test_rows_of_an_audit_may_be_given(rows_of_audits):
    some = jax.tree.map(lambda column: column[:5], data(3))
    trained(generated=some)
    trained(generated=lambda count: jax.tree.map(lambda column: column[:count], data(3)))
    assert [len(rows["x"]) for rows in rows_of_audits] == [5, 60]
    jax.tree.map(np.testing.assert_array_equal, rows_of_audits[0], some)


@pytest.mark.parametrize(
    ("generated", "message"),
    [
        ({"x": np.zeros((5, D))}, "generated rows are PyTreeDef"),
        ({"x": np.zeros((5, 2)), "y": np.zeros(5, int)}, r"generated\['x'\] is float64\[5, 2\]"),
        ({"x": np.zeros((5, D)), "y": np.zeros(5)}, r"\['y'\] is float64\[5\].*int64\[rows\]"),
        ({"x": np.zeros((5, D)), "y": np.zeros(4, int)}, "different numbers of rows"),
        ({"x": np.zeros((0, D)), "y": np.zeros(0, int)}, r"generated\['x'\] is float64\[0, 64\]"),
        ({"x": np.zeros((5, D)), "y": 3}, r"generated\['y'\] is int64\[\]"),
    ],
)
def test_rows_that_are_not_like_the_data_are_refused_in_a_line(generated, message, rows_of_audits):
    with pytest.raises(ValueError, match=message) as refused:
        trained(generated=generated)
    assert "\n" not in str(refused.value)


TREE = UnitTree.from_columns({"who": np.arange(N) // 6})
UNITS = Multistage(TREE, (2, 3), steps=4, clipped_level=1)


@pytest.mark.parametrize("audit", [True, False])
@pytest.mark.parametrize(
    ("sampler", "rows"),
    [(SHUFFLED.sampler, data()), (UNITS, UnitData.of_tree(TREE, data()))],
    ids=["examples", "units"],
)
def test_a_cross_example_loss_is_refused_before_training(sampler, rows, audit):
    algorithm = dpsgd(lambda w, x: jnp.sum(jnp.dot(shared(x["x"]), w)), optax.sgd(0.1))
    mechanism = Mechanism(sampler, 1.0, 1.0)
    with pytest.raises(ValueError, match="custom_vmap"):
        trained(algorithm, mechanism, rows, audit=audit)
    declared = []
    state = algorithm.init(jnp.ones(D), mechanism)
    blocks = train_blocks(algorithm, mechanism, state, rows, declare=declared.append)
    with pytest.raises(ValueError, match="custom_vmap"):
        next(blocks)
    assert not declared


@dataclass(frozen=True)
class Shifted(Refinement):
    """Moves every weight by the mean of x, in two sums."""

    size: int = D

    def reads(self, params, example):
        return example["x"]

    def start(self):
        return jnp.zeros(self.size)

    def statistic(self, state, row):
        return row / 2

    def fold(self, state, mean):
        return state + mean

    def apply(self, params, state):
        return params + state


SUMS = dataclasses.replace(SHUFFLED, full_sums=FullSums(2, 2.0, 8.0))


@pytest.mark.long
def test_a_refined_run_adds_its_sums_and_their_cost():
    of, ends = dataclasses.replace(SUMS, full_sums=FullSums(2, 1e-5, 8.0)), []
    for how in ({}, {"mechanism": of, "refinement": Shifted()}):
        with pytest.warns(UserWarning, match="NO GUARANTEE"):
            ends.append(trained(insecure_seed=1, audit=False, **how).params)
    plain, found = ends
    np.testing.assert_allclose(found - plain, data()["x"].mean(0), atol=1e-4)
    guarantee = trained(mechanism=SUMS, refinement=Shifted(), audit=False).guarantee
    assert guarantee.epsilon == cost([Segment(SUMS)], 1e-5).epsilon
    assert guarantee.epsilon.upper > trained(audit=False).guarantee.epsilon.upper
    assert not guarantee.scope


def test_a_run_whose_sums_fail_their_audit_never_begins(monkeypatch):
    def twice(*parts):
        sound = dpsgd(*parts)
        return sound._replace(clipped_sum=functools.partial(doubled, sound.clipped_sum))

    monkeypatch.setattr(queries, "dpsgd", twice)
    seen = []
    wanted = "sums over all rows: a step releases what the definition"
    of = dataclasses.replace(SUMS, full_sums=FullSums(2, 2.0, 0.1))  # which clips
    with pytest.raises(ValueError, match=wanted):
        trained(mechanism=of, refinement=Shifted(), on_block=lambda *of: seen.append(of))
    assert not seen


def test_a_stopped_run_releases_no_sums(monkeypatch):
    monkeypatch.setattr(
        "dpsgd.runs.job.refine", lambda *of, **how: pytest.fail("sums were released")
    )
    for stop in (4, SHUFFLED.num_steps):
        found = trained(
            mechanism=SUMS,
            refinement=Shifted(),
            audit=False,
            on_block=lambda done, params, stop=stop: done == stop,
        )
        assert f"stopped after {stop} of {SUMS.num_steps} steps" in found.guarantee.scope
        assert found.guarantee.epsilon == cost([Segment(SUMS)], 1e-5).epsilon


def test_sums_and_a_refinement_come_together():
    with pytest.raises(ValueError, match="refinement needs"):
        trained(refinement=Shifted())
    with pytest.raises(ValueError, match="refinement="):
        trained(mechanism=SUMS)


@pytest.mark.parametrize("audit", [True, False])
def test_a_cross_example_refinement_is_refused_before_training(audit):
    class Mixing(Shifted):
        def reads(self, params, example):
            return shared(example["x"])

    with pytest.raises(ValueError, match="custom_vmap"):
        trained(mechanism=SUMS, refinement=Mixing(), audit=audit)


@dataclass(frozen=True)
class Scaled:
    """A loss, and a rule of what equality sees of it."""

    scale: object = dataclasses.field(compare=False)

    def __call__(self, w, example):
        return jnp.mean(self.scale["of"]) * loss_fn(w, example)


class Same:
    """The same as a class with an equality of its own."""

    def __init__(self, scale):
        self.scale = scale

    def __eq__(self, other):
        return type(other) is Same

    def __hash__(self):
        return 0

    __call__ = Scaled.__call__


@pytest.mark.long
@pytest.mark.parametrize("kind", [Scaled, Same])
def test_equal_losses_train_with_their_own_fields(kind):
    mechanism = Mechanism(SHUFFLED.sampler, 1e-3, 1e6)

    def reached(loss):
        algorithm = dpsgd(loss, optax.sgd(1e-3))
        with pytest.warns(UserWarning, match="seed"):
            return trained(algorithm, mechanism, insecure_seed=0, audit=False).params

    reached(kind({"of": np.array(1.0)}))
    found = reached(kind({"of": np.array(3.0)}))
    wanted = reached(lambda w, example: 3.0 * loss_fn(w, example))
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-5)


class Endless:
    """A data set whose rows never come to an end, as one that ignores its index."""

    read = 0

    def __getitem__(self, index):
        self.read += 1
        assert self.read < 10, "it is read without bound"
        return np.ones(D)


class EndlessOfLength(Endless):
    def __len__(self):
        return N


def over_batch(w, batch):
    return jnp.mean(jnp.square(jnp.einsum("bd,d->b", batch["x"], w) - batch["y"]))


def each_of_batch(w, batch):
    return jnp.square(jnp.dot(batch["x"], w[:, None])[:, 0] - batch["y"])


def module():
    return nnx.Linear(D, 1, rngs=nnx.Rngs(0))


MISTAKEN = {
    "modules": ({"params": lambda: {"a": [module()]}}, r"params\['a'\]\[0\] is the module Linear"),
    "text": ({"params": lambda: {"a": ["x"]}}, r"params\['a'\]\[0\] is str, not an array"),
    "loss of a batch": ({"loss": over_batch}, "loss_fn takes a batch.*the loss of one example"),
    "losses of a batch": ({"loss": each_of_batch}, "loss_fn takes a batch.*of one example"),
    "seed": ({"insecure_seed": -1}, r"insecure_seed must be in \[0, 2\*\*64\), got -1"),
    "endless data": ({"rows": Endless}, "data is Endless, not an array.*pass arrays"),
    "no data": ({"rows": dict}, "data holds no arrays"),
    "a number": ({"rows": lambda: {**data(), "y": 1.0}}, r"data\['y'\] is float, not an array"),
    "a list": ({"rows": lambda: {"x": [1.0] * N}}, r"data\['x'\]\[0\] is float, not an array"),
    "few rows": ({"rows": lambda: {"x": np.zeros((N - 1, D))}}, "has 59 rows.* num_examples=60"),
    "rows of text": ({"rows": lambda: {"x": np.array(["a"] * N)}}, r"data\['x'\] holds <U1"),
    "endless column": ({"rows": lambda: {"x": EndlessOfLength()}}, r"data\['x'\] is EndlessOf"),
}


class Dropping(nnx.Module):
    def __init__(self):
        self.out, self.dropout = module(), nnx.Dropout(0.5, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.out(self.dropout(x))


def residual(output, example):
    return jnp.square(output[0] - example["y"])


OF_MODULE = {
    "plain": (
        module,
        lambda net, example: residual(net(example["x"]), example),
        lambda apply: lambda params, example: residual(apply(params, example["x"]), example),
    ),
    "key": (
        Dropping,
        lambda net, example, key: residual(net(example["x"]), example),
        lambda apply: (
            lambda params, example, key: residual(apply(params, example["x"], key=key), example)
        ),
    ),
}


@pytest.mark.short("plain")
@pytest.mark.parametrize(("make", "loss", "split_loss"), OF_MODULE.values(), ids=OF_MODULE)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_module_is_trained_as_its_split_parameters_are(make, loss, split_loss, tmp_path):
    net, calls, log = make(), [], tmp_path / "log.csv"
    how = {"insecure_seed": 1, "block_steps": 4, "audit": False}
    result = train(
        dpsgd(loss, optax.sgd(0.1)),
        SHUFFLED,
        net,
        data(),
        on_block=lambda step, view: calls.append((step, type(view), view is net)),
        log=log,
        **how,
    )
    params, apply = split_module(make())
    expected = train(dpsgd(split_loss(apply), optax.sgd(0.1)), SHUFFLED, params, data(), **how)
    assert result.params is net
    jax.tree.map(np.testing.assert_array_equal, nnx.state(net, nnx.Param), expected.params)
    assert calls == [(step, make if make is Dropping else nnx.Linear, False) for step in (4, 8, 10)]
    assert log.read_text().splitlines()[1].startswith("10,,")  # an insecure run has no epsilon


def test_a_module_is_refused_where_the_loss_reads_no_module():
    own_sum = ALGORITHM._replace(clipped_sum=functools.partial(ALGORITHM.clipped_sum))
    with pytest.raises(ValueError, match="params is the module Linear, but the loss of an algor"):
        train(own_sum, SHUFFLED, module(), data())


def test_a_log_has_the_proved_epsilon_of_the_last_step(tmp_path):
    result = trained(log=tmp_path / "log.csv", audit=False)
    step, epsilon, rate = (tmp_path / "log.csv").read_text().splitlines()[-1].split(",")
    assert (int(step), float(epsilon)) == (10, result.guarantee.epsilon.upper)
    assert float(rate) > 0


LOGS = {"log.txt": "must end in .csv, tensorboard or wandb", "old.csv": "exists"}


@pytest.mark.parametrize("log", LOGS)
def test_a_log_that_cannot_be_written_is_refused_before_training(log, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.csv").touch()
    with pytest.raises((TypeError, ValueError, OSError), match=LOGS[log]):
        inspect.unwrap(train)(ALGORITHM, SHUFFLED, jnp.ones(D), data(), log=log)


class FullDisk:
    def write_scalars(self, step, scalars):
        raise OSError("disk is full")


def test_a_writer_that_fails_costs_no_model():
    with pytest.warns(UserWarning, match="log stops at step 10: disk is full"):
        result = trained(log=FullDisk(), audit=False)
    assert result.params.shape == (D,)


@pytest.mark.parametrize("problem", [ValueError("no bound"), KeyboardInterrupt()], ids=repr)
def test_a_failed_last_accounting_costs_no_model(problem, tmp_path, monkeypatch):
    def failing(*args):
        raise problem

    monkeypatch.setattr("dpsgd.trainer.cost", failing)
    whole = trained(log=tmp_path / "whole.csv", audit=False)
    last = (tmp_path / "whole.csv").read_text().splitlines()[-1]
    assert float(last.split(",")[1]) == whole.guarantee.epsilon.upper
    with pytest.warns(UserWarning, match="step 4: (no bound|interrupted)"):
        stopped = trained(
            log=tmp_path / "part.csv", audit=False, on_block=lambda step, params: True
        )
    assert stopped.params.shape == (D,)
    assert "stopped after 4 of 10" in stopped.guarantee.scope


def of_clipping(**how):
    return inspect.unwrap(dpsgd)(loss_fn, optax.sgd(0.1), **how)


def layout(**how):
    return inspect.unwrap(Layout.choose.__func__)(Layout, SHUFFLED.sampler, data(), **how)


def test_models_of_single_devices_have_keys_of_their_own(monkeypatch):
    """Connected processes that train apart would have the keys of the first."""

    def collective():
        raise AssertionError("the keys of all processes")

    monkeypatch.setattr(RootKey, "shared", collective)
    assert trained().guarantee.epsilon
    state = ALGORITHM.init(jnp.ones(D), SHUFFLED, data())
    with closing(train_blocks(ALGORITHM, SHUFFLED, state, data())) as blocks:
        next(blocks)


OF_ANOTHER_KIND = {
    "clipping": (lambda: of_clipping(clipping="flat"), "clipping must be a rule.*got 'flat'"),
    "a class": (lambda: of_clipping(clipping=FlatClipping), "clipping must be a rule.*FlatClip"),
    "examples": (lambda: of_clipping(microbatch_size=0), "microbatch_size must be an integer"),
    "sampler": (lambda: unchecked(SHUFFLED, sampler="shuffle"), "sampler must be a BatchSampler"),
    "noise": (lambda: unchecked(SHUFFLED, noise=Independent), "noise must be a Noise, got <class"),
    "sums": (lambda: unchecked(SHUFFLED, full_sums=3), "full_sums must be a FullSums, got 3"),
    "steps": (lambda: layout(block_steps=0), "block_steps must be an integer >= 1, got 0"),
    "memory": (lambda: layout(data_on="gpu"), "data_on must be 'device', 'host' or None"),
    "devices": (lambda: layout(placement=2), "placement must be a Placement.*got 2"),
}
"""Values of another type, as a program without checks of annotations passes them."""


@pytest.mark.parametrize(("begin", "message"), OF_ANOTHER_KIND.values(), ids=OF_ANOTHER_KIND)
def test_arguments_of_another_kind_are_refused_in_one_line(begin, message):
    with pytest.raises((TypeError, ValueError), match=message) as error:
        begin()
    assert "\n" not in str(error.value)


def test_errors_of_jax_do_not_show_rows(monkeypatch):
    rows = {"x": np.full((N, D), 12345.0), "y": np.zeros(N)}
    monkeypatch.setattr("dpsgd.trainer.check_parameters", lambda params: None)
    with pytest.raises(TypeError, match="Error interpreting argument to") as error:
        inspect.unwrap(train)(ALGORITHM, SHUFFLED, {"w": "x"}, rows)
    assert "12345" not in str(error.value)


def begun(wrong, *, blocks):
    """Begins a run with a mistaken argument, without the tests' checks of annotations."""
    algorithm = dpsgd(wrong.get("loss", loss_fn), optax.sgd(0.1))
    params, rows = wrong.get("params", lambda: jnp.ones(D))(), wrong.get("rows", data)()
    seed = wrong.get("insecure_seed")
    if not blocks:
        return inspect.unwrap(train)(algorithm, SHUFFLED, params, rows, insecure_seed=seed)
    state = ALGORITHM.init(jnp.ones(D), SHUFFLED, data())
    if "loss" in wrong:
        state = algorithm.init(params, SHUFFLED, rows)
    if "params" in wrong:
        state = state._replace(raw_params=params)
    return next(inspect.unwrap(train_blocks)(algorithm, SHUFFLED, state, rows, insecure_seed=seed))


@pytest.mark.parametrize("blocks", [False, True], ids=["train", "train_blocks"])
@pytest.mark.parametrize(("wrong", "message"), MISTAKEN.values(), ids=MISTAKEN)
def test_mistaken_arguments_are_refused_in_one_line(wrong, message, blocks):
    with pytest.raises((TypeError, ValueError), match=message) as error:
        begun(wrong, blocks=blocks)
    assert "\n" not in str(error.value)
