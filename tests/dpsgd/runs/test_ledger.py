"""What was declared is what is counted; a ledger that cannot be believed is refused."""

import errno
import fcntl
import functools
import json
import math
import os
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import accounting
from accounting import TrialCount
from dpsgd import Mechanism, Segment, cost
from dpsgd.core.queries import FullSums
from dpsgd.core.segments import Initial, check_together
from dpsgd.files import write_atomically
from dpsgd.runs.directory import Configuration
from dpsgd.runs.history import NO_HEAD, History, LedgerError, line_of, read
from dpsgd.runs.ledger import Ledger
from dpsgd.runs.result import FinishedRun, environment_mismatch
from dpsgd.runs.terms import Selection, Terms
from dpsgd.selection.vault import Vault, VaultSecret
from samplers import (
    BallsAndBins,
    BatchSource,
    Deterministic,
    Multistage,
    Poisson,
    Shuffle,
    UnitsThenPoisson,
    UnitTree,
    UserPoisson,
)

SIZES = {"num_examples": 640, "batch_size": 64, "epochs": 4}  # 10 steps an epoch
BINS = BallsAndBins(**SIZES)
SAMPLERS = [
    Deterministic(**SIZES),
    Shuffle(**SIZES),
    Poisson(**SIZES),
    BINS,
    BallsAndBins(**SIZES, assignment="fixed", overflow="accumulate", max_batch_size=80),
]
epsilon = functools.lru_cache(accounting.epsilon)
DELTA = 1e-4
SIGMA = 2.0  # of less noise the price takes seconds to compute

# Shops of 12 to 18 products of 2 to 7 examples, in three levels, the rows in no order.
_RNG = np.random.default_rng(0)
_PRODUCTS = np.repeat(np.arange(120), _RNG.integers(2, 8, 120))
_ROWS = _RNG.permutation(_PRODUCTS.size)
TREE = UnitTree.from_columns({"shop": _PRODUCTS[_ROWS] // 15, "product": _PRODUCTS[_ROWS]})
OF_UNITS = [
    Multistage(TREE, (3, 2, 2), steps=40),
    Multistage(TREE, (3, 2, 2), steps=40, clipped_level=2),
    Multistage(TREE, (3, 2, 2), steps=40, clipped_level=1, protected_level=1),
    UnitsThenPoisson(TREE, (3, 2), 0.25, steps=40),
    UserPoisson(**SIZES, max_contributions=3),
]
"""Samplers whose units are not the rows, 40 steps each."""


def terms(sampler=BINS, *, noise_multiplier=SIGMA, reproducible=False):
    mechanism = Mechanism(sampler, noise_multiplier, 2.0 if noise_multiplier else math.inf)
    return Terms(Segment(mechanism, reproducible_noise=reproducible), DELTA, "configuration")


def begin(ledger, step):
    """Begins another attempt."""
    return ledger.begin(ledger.history.attempts[0].terms, step=step, drawing="", environment={})


def declared(path, sampler=BINS, blocks=((0, 8), (8, 16))):
    """A closed ledger of one attempt with these blocks."""
    with Ledger.create(path, terms(sampler)) as ledger:
        for block in blocks:
            ledger.declare(range(*block))
    return path


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.jsonl"


@pytest.fixture(autouse=True)
def equal_profiles_are_priced_once(monkeypatch):
    """What is compared here is which profile is priced."""
    monkeypatch.setattr("dpsgd.core.cost.epsilon", epsilon)


# --- What is counted -----------------------------------------------------------------------------


@pytest.mark.short("Poisson*", "BallsAndBins*", "Multistage shop", "User*")
@pytest.mark.parametrize(
    "sampler", [*SAMPLERS, *OF_UNITS], ids=lambda s: f"{type(s).__name__} {s.unit}"
)
def test_a_whole_run_is_priced_by_the_file_alone(path, sampler):
    with Ledger.create(path, terms(sampler)) as ledger:
        assert read(path).guarantee().epsilon.upper == 0.0  # nothing was declared
        for start in range(0, 40, 8):
            ledger.declare(range(start, start + 8))
        assert read(path) == ledger.history
    (attempt,) = read(path).attempts  # these are the terms that it was created with
    assert attempt.terms.record() == terms(sampler).record()
    assert attempt.terms.mechanism.sampler.padded_batch_size == sampler.padded_batch_size
    guarantee = read(path).guarantee()
    assert guarantee.epsilon == epsilon(sampler.privacy(SIGMA), DELTA)
    assert (guarantee.unit, guarantee.delta) == (sampler.unit, DELTA)
    assert f"unit: one {sampler.unit}" in guarantee.sentence()
    assert len(path.read_text()) < 4_000  # the shape of the tree, and not the tree


def test_what_differs_between_environments_is_named(path):
    (attempt,), config = read(declared(path)).attempts, Configuration(path, {})
    one, other = (
        FinishedRun(path, config, {}, History([replace(attempt, environment=where)]))
        for where in ({"jax": "1", "code": "a"}, {"jax": "1", "code": "b"})
    )
    assert environment_mismatch([one, other]) == ["code"]
    assert environment_mismatch([one, one]) == []


def test_steps_of_another_attempt_cost_more(path):
    with Ledger.create(path, terms(Poisson(**SIZES))) as ledger:
        ledger.declare(range(16))
        once = ledger.history.guarantee()
        assert begin(ledger, 0).steps == range(0)
        ledger.declare(range(16))
        twice = ledger.history.guarantee()
        assert twice == cost(ledger.history.parts, DELTA)
        assert twice.epsilon.upper > once.epsilon.upper
        assert twice.attack_advantage.upper < 2 * once.attack_advantage.upper
        assert not any("mechanism was changed" in note for note in twice.notes)
    assert read(path).guarantee() == twice


@pytest.mark.parametrize("sampler", OF_UNITS[:4], ids=lambda s: f"{type(s).__name__} {s.unit}")
def test_runs_that_draw_units_from_a_tree_have_no_joint_cost(sampler):
    with pytest.raises(ValueError, match="from a tree"):
        check_together([terms(sampler).plan] * 2)


def test_of_a_tree_its_shape_alone_is_kept(path):
    Ledger.create(path, terms(OF_UNITS[0])).close()
    sampler = read(path).attempts[0].terms.mechanism.sampler
    with pytest.raises(ValueError, match="is a shape, for accounting alone"):
        BatchSource(sampler, seed=1).batch(0)


def nameless():
    """A sampler that nobody can read back by its name."""

    class Local(Deterministic):
        pass

    return Local(**SIZES)


@pytest.mark.parametrize(
    ("sampler", "environment", "why"),
    [
        (nameless(), {}, "has no sampler 'nameless.<locals>.Local'"),
        (BINS, {"at": object()}, "JSON has no object"),
    ],
    ids=["sampler", "environment"],
)
def test_what_could_not_be_read_back_is_not_written(path, sampler, environment, why):
    with pytest.raises(ValueError, match=why):
        Ledger.create(path, terms(sampler), "", environment)
    assert path.read_bytes() == b""


SUMS = FullSums(3, 6.0)


@pytest.fixture
def with_sums():
    plain = terms(SAMPLERS[0])  # whose product with Gaussian releases is Gaussian
    return replace(plain, plan=Segment(replace(plain.mechanism, full_sums=SUMS)))


def gaussian(epochs, sums):
    """The cost of so many epochs in the order of the file, and so many sums."""
    mu = math.sqrt(epochs / SIGMA**2 + sums / SUMS.noise_multiplier**2)
    return epsilon(accounting.GaussianProfile(1 / mu), DELTA)


def test_sums_over_all_rows_count_where_they_are_declared(path, with_sums):
    with Ledger.create(path, with_sums) as ledger:
        ledger.declare(range(40))
        before = ledger.history.guarantee()
        assert before.epsilon.upper == gaussian(4, 0).upper
        (caveat,) = [note for note in before.notes if "stop" in note]
        ledger.declare(range(40, 43))
        whole = ledger.history.guarantee()
        with pytest.raises(ValueError, match=r"must be in \[0, 43\]"):
            ledger.declare(range(43, 44))
        begin(ledger, 40)
        ledger.declare(range(40, 43))
        twice = ledger.history.guarantee()
    assert str(whole.epsilon) in caveat
    for found, sums in ((whole, 3), (twice, 6)):
        assert 0 <= found.epsilon.upper - gaussian(4, sums).lower < 0.1
    assert twice.epsilon.upper > whole.epsilon.upper > before.epsilon.upper
    assert read(path).guarantee() == twice
    assert twice.mechanism.full_sums == SUMS
    assert twice.record()["full_sums"] == {
        "count": 3, "noise_multiplier": 6.0, "l2_clip_norm": 1.0
    }  # fmt: skip
    assert any(str(SUMS) in note for note in twice.notes)


# --- What lines say ---------------------------------------------------------------------------


@pytest.mark.parametrize("place", [os.link, os.symlink])
def test_a_ledger_of_another_name_is_refused(path, place):
    place(declared(path.with_name("elsewhere")), path)
    with pytest.raises(LedgerError, match=r"names \(hard links\)|symbolic link to") as refused:
        Ledger.open(path)
    assert "\n" not in str(refused.value)


def test_a_ledger_that_is_being_written_is_opened_by_nobody_else(path):
    for writing in (lambda: Ledger.create(path, terms()), lambda: Ledger.open(path)):
        with writing(), pytest.raises(LedgerError, match="another process is training"):
            Ledger.open(path)


def test_audits_precede_the_release_as_the_ledgers_last_line(path):
    with Ledger.open(declared(path, blocks=[(0, 30)])) as ledger:
        ledger.audited("passed")
        before = ledger.history.head
        ledger.audited("passed")
        assert ledger.history.head == before
        ledger.audited("passed otherwise")
        guarantee = ledger.history.guarantee()
        with pytest.raises(ValueError, match="before the run's last step is declared"):
            ledger.release("digest")
        ledger.declare(range(30, BINS.num_steps))
        ledger.release("digest")
        ledger.release("digest")
        content = path.read_bytes()
        for more in (
            lambda: ledger.audited("passed"),
            lambda: ledger.release("another"),
            lambda: begin(ledger, 40),
        ):
            with pytest.raises(ValueError, match=r"that closes|other parameters were released"):
                more()
    assert path.read_bytes() == content
    history = read(path)
    assert (history.audit, history.released) == ("passed otherwise", "digest")
    assert len(history.lines) == 6
    assert guarantee.epsilon.upper < history.guarantee().epsilon.upper
    path.write_bytes(content + line_of({"audit": "passed"}, history.head)[0])
    with pytest.raises(LedgerError, match="follows the line that closes"):
        read(path)


# --- What is refused -----------------------------------------------------------------------------


BEGUN = {"attempt": 1, "first_step": 8, "drawing": "", "environment": {}}
LINES = {
    "attempt that follows none": (BEGUN | {"attempt": 2}, "attempt 2 does not follow"),
    "step that none reached": (BEGUN | {"first_step": 17}, "begins at step 17, which no earlier"),
    "steps of a gap": ({"declare": [17, 24]}, "do not follow the steps before them"),
    "steps again": ({"declare": [8, 24]}, "do not follow the steps before them"),
    "steps that the run has not": ({"declare": [16, 41]}, "must be in"),
    "selection": ({"selection": {}}, "declared in the first line"),
    "a field of another version": ({"audit": "passed", "sums": 9}, "sums is unknown"),
}


@pytest.mark.parametrize(("line", "why"), LINES.values(), ids=LINES)
def test_inconsistent_ledger_lines_are_refused_on_read_and_write(path, line, why):
    content = declared(path).read_bytes()
    if "declare" in line:
        with Ledger.open(path) as ledger, pytest.raises(ValueError, match=why):
            ledger.declare(range(*line["declare"]))
        assert path.read_bytes() == content
    path.write_bytes(content + line_of(line, read(path).head)[0])
    with pytest.raises(LedgerError, match=f"line 4: .*({why})"):
        read(path)


NESTED = [
    ("attempt", "initial"),
    ("attempt", "initial", "segments", 0),
    ("attempt", "initial", "segments", 0, "noise"),
    ("selection",),
    ("selection", "candidates", 0),
    ("selection", "candidates", 0, "initial"),
]


@pytest.mark.parametrize("place", NESTED, ids=str)
def test_a_nested_field_of_another_version_is_refused(path, place):
    plan = replace(terms().plan, initial=Initial("0", (terms().plan,), "a"))
    begun = Terms(plan, 1e-5)
    selection = Selection(TrialCount(4.0), (begun,), ({},), "score", "higher", {})
    first = {**BEGUN, "attempt": 0, "first_step": 0, "nonce": "n", **begun.record()}
    body = {"selection": selection.record()} if place[0] == "selection" else {"attempt": first}
    holder = functools.reduce(lambda fields, name: fields[name], place, body)
    line = body if place[0] == "selection" else first
    History.parse(line_of(line, NO_HEAD)[0], path)
    holder["sums"] = 9
    with pytest.raises(LedgerError, match="sums is unknown"):
        History.parse(line_of(line, NO_HEAD)[0], path)


OTHERS = ("not_ours:Sampler", "roulette", "os:system", "samplers.base:BatchSampler", "os:")
FIRST_LINES = {
    "no nonce": ({"nonce": ""}, "line 1: it lacks a nonce"),
    "a later first step": ({"first_step": 4000}, "must begin at step 0, not 4,000"),
    "a removed field": (
        {"data_release": {"sigma": 4.0}},
        "line 1: data_release is unknown: removed",
    ),
    "a field of another version": ({"releases": [9]}, "line 1: releases is unknown"),
    "other noise": ({"noise_multiplier": 9.0}, "line 2: its hash does not match"),
    "no word on its noise": ({"reproducible_noise": None}, "line 1: reproducible_noise is missing"),
    **{
        name: ({"sampler": {"name": name}}, f"'{name}' is not imported" * (name == OTHERS[0]))
        for name in OTHERS  # of which nothing is imported or executed
    },
}


@pytest.mark.parametrize(("changes", "why"), FIRST_LINES.values(), ids=FIRST_LINES)
def test_a_forged_first_line_is_refused_and_executes_nothing(
    path, tmp_path, monkeypatch, changes, why
):
    (tmp_path / "not_ours.py").write_text("raise SystemExit('executed')")
    monkeypatch.syspath_prepend(tmp_path)
    first, *lines = declared(path).read_bytes().splitlines(keepends=True)
    body = json.loads(first)
    del body["hash"]
    sampler = body["sampler"] | changes.get("sampler", {})
    body |= changes | {"sampler": sampler}
    body = {name: value for name, value in body.items() if value is not None}
    forged, _ = line_of(body, NO_HEAD)  # its own hash is right
    path.write_bytes(forged + b"".join(lines))
    with pytest.raises(LedgerError, match=why or "line 1") as refused:
        read(path)
    assert "\n" not in str(refused.value)
    assert "not_ours" not in sys.modules


def test_an_insecure_run_repeats_steps_in_its_one_attempt(path):
    with Ledger.create(path, terms(reproducible=True)) as ledger:
        ledger.declare(range(8))
        before = path.read_bytes()
        ledger.declare(range(4, 8))
        assert path.read_bytes() == before
        ledger.declare(range(4, 12))
        assert ledger.history.attempts[0].steps == range(12)
        with pytest.raises(ValueError, match="has one attempt"):
            begin(ledger, 8)


@given(data=st.data())
def test_any_changed_byte_is_refused_or_torn_off(tmp_path_factory, data):
    path = declared(tmp_path_factory.mktemp("run") / "ledger.jsonl")
    content, head = bytearray(path.read_bytes()), read(path).head
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    with pytest.raises(LedgerError):
        read(path).check_head(head, "the checkpoint")


@pytest.mark.parametrize("damage", ["gone", "empty"])
def test_a_ledger_that_is_gone_or_empty_is_refused(path, damage):
    if damage == "empty":
        declared(path).write_bytes(b"")
    for opened in (read, Ledger.open):
        with pytest.raises(LedgerError, match=r"is missing, .* cannot be computed|is empty"):
            opened(path)


@pytest.mark.parametrize("cut", [1, 40, 90])
def test_a_line_that_a_crash_tore_counts_nothing_and_is_removed(path, cut):
    content = declared(path).read_bytes()
    path.write_bytes(content[:-cut])
    assert read(path).attempts[0].steps == range(0, 8)
    with Ledger.open(path) as ledger:
        ledger.declare(range(8, 16))
    assert path.read_bytes() == content


# --- The disk ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", ["write", "fsync"])
def test_a_full_disk_leaves_the_ledger_as_it_was(path, monkeypatch, fails):
    declared(path)
    before = path.read_bytes()

    def half(descriptor, line, write=os.write):
        return write(descriptor, line[: len(line) // 2])

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Ledger.open(path) as ledger:
        with monkeypatch.context() as patch:
            patch.setattr(os, fails, half if fails == "write" else full)
            with pytest.raises(OSError, match=f"No space left.*{path}"):
                ledger.declare(range(16, 24))
        assert path.read_bytes() == before
        assert ledger.history.attempts[0].steps == range(0, 16)
        ledger.declare(range(16, 24))
    assert read(path).attempts[0].steps == range(0, 24)


LOCKED = {
    "ledger": lambda folder: Ledger.open(folder / "ledger.jsonl"),
    "vault": lambda folder: Vault(folder, VaultSecret(bytes(32)), TrialCount(4.0), "higher"),
    "file": lambda folder: write_atomically(folder / "file", lambda file: file.write(b"x")),
}


@pytest.mark.parametrize("opened", LOCKED.values(), ids=LOCKED)
def test_a_file_system_without_locks_is_told_with_the_file(path, monkeypatch, opened):
    declared(path)

    def flock(descriptor, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(OSError, match=rf"use a file system with locks .*{path.parent}/"):
        opened(path.parent)


@pytest.mark.parametrize("replaced", [True, False], ids=["replaced", "removed"])
def test_nothing_is_declared_in_a_ledger_that_lost_its_place(path, replaced):
    declared(path)
    content = path.read_bytes()
    with Ledger.open(path) as ledger:
        path.unlink()
        if replaced:
            path.write_bytes(content)
        with pytest.raises(LedgerError, match="was replaced or removed while the run had it open"):
            ledger.declare(range(16, 24))
        assert ledger.history.attempts[0].steps == range(0, 16)


def test_a_ledger_and_its_lines_are_on_the_disk_on_return(path, monkeypatch):
    synced, sizes, fsync = [], [0], os.fsync

    def watched(descriptor):
        synced.append((os.fstat(descriptor).st_ino, path.stat().st_size))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    with Ledger.create(path, terms()) as ledger:
        sizes.append(path.stat().st_size)
        ledger.declare(range(8))
        sizes.append(path.stat().st_size)
    files = path.parent, path, path  # the folder has the name of the empty file
    assert synced == [(file.stat().st_ino, size) for file, size in zip(files, sizes, strict=True)]


def test_a_million_declared_steps_are_read_quickly(path):
    sampler = Deterministic(num_examples=64 * 1_000_000, batch_size=64)
    with Ledger.create(path, terms(sampler)) as ledger:
        lines = []
        for first in range(0, 1_000_000, 250):
            steps = {"declare": [first, first + 250]}
            line, head = line_of(steps, ledger.history.head)
            ledger.history.extend(steps, head)
            lines.append(line)
    with open(path, "ab") as file:
        file.write(b"".join(lines))
    before = time.process_time()
    assert len(read(path).attempts[0].steps) == 1_000_000
    assert time.process_time() - before < 1.5
    assert json.loads(lines[-1])["declare"][1] == 1_000_000
