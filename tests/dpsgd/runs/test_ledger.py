"""What was declared is what is counted; a ledger that cannot be believed is refused."""

import errno
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
from dpsgd import Mechanism, cost
from dpsgd.core.queries import FullSums
from dpsgd.runs.history import NO_HEAD, LedgerError, line_of
from dpsgd.runs.ledger import Ledger, read
from dpsgd.runs.terms import Terms
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


def terms(sampler=BINS, *, noise_multiplier=SIGMA, code="a", reproducible=False):
    mechanism = Mechanism(sampler, noise_multiplier, 2.0 if noise_multiplier else math.inf)
    return Terms(mechanism, DELTA, reproducible, {"code": code, "devices": ["cpu"]})


OTHER_CODE = terms(code="b")


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


@pytest.mark.short("Poisson*", "BallsAndBins*", "Multistage shop", "User*", "Units*")
@pytest.mark.parametrize(
    "sampler", [*SAMPLERS, *OF_UNITS], ids=lambda s: f"{type(s).__name__} {s.unit}"
)
def test_a_whole_run_is_priced_by_the_file_alone(path, sampler):
    with Ledger.create(path, terms(sampler)) as ledger:
        assert read(path).guarantee().epsilon.upper == 0.0  # nothing was declared
        for start in range(0, 40, 8):
            ledger.declare(range(start, start + 8))
        assert ledger.resume(terms(sampler), step=40, origin=ledger.history.head, repeatable=True)
        assert read(path) == ledger.history
    (attempt,) = read(path).attempts  # these are the terms that it was created with
    assert attempt.terms.record() == terms(sampler).record()
    assert attempt.terms.mechanism.sampler.padded_batch_size == sampler.padded_batch_size
    guarantee = read(path).guarantee()
    assert guarantee.epsilon == epsilon(sampler.privacy(SIGMA), DELTA)
    assert (guarantee.unit, guarantee.delta) == (sampler.unit, DELTA)
    assert f"unit: one {sampler.unit}" in guarantee.sentence()
    assert len(path.read_text()) < 4_000  # the shape of the tree, and not the tree


OTHERS = [terms(), terms(code="b"), terms(noise_multiplier=3.0), terms(SAMPLERS[1])]


@given(data=st.data())
def test_whatever_is_taken_anew_is_counted_again_under_keys_of_its_own(tmp_path_factory, data):
    """A run dies, resumes from any checkpoint, and changes, in any order."""
    path = tmp_path_factory.mktemp("run") / "ledger.jsonl"
    Ledger.create(path, OTHERS[0]).close()
    counted, keys = [(OTHERS[0], 0, 0)], [read(path).attempts[0].key]
    saved, begun = [(0, NO_HEAD, 0)], (0, NO_HEAD)  # checkpoints: step, head, attempt
    for _ in range(data.draw(st.integers(0, 8))):
        wanted = data.draw(st.sampled_from(OTHERS))
        step, origin, index = data.draw(st.sampled_from(saved))
        repeatable = data.draw(st.booleans())
        last, first, stop = counted[-1]
        on_path = index == len(counted) - 1 or (step, origin) == begun
        same = wanted == last and on_path and (repeatable or step >= stop)
        with Ledger.open(path) as ledger:
            how = {"step": step, "origin": origin, "repeatable": repeatable}
            attempt = ledger.resume(wanted, **how)
            if not same:
                counted.append((wanted, step, step))
                keys.append(attempt.key)
                begun, stop, first = (step, origin), step, step
            reached = min(40, step + data.draw(st.integers(1, 12)))
            if reached > step:
                ledger.declare(range(step, reached))
                counted[-1] = (wanted, first, max(stop, reached))
                saved.append((reached, ledger.history.head, len(counted) - 1))
    history = read(path)
    assert [attempt.key for attempt in history.attempts] == keys
    assert len(set(keys)) == len(keys)
    assert 0 not in keys
    found = [(attempt.terms.record(), attempt.steps) for attempt in history.attempts]
    assert found == [(one.record(), range(first, stop)) for one, first, stop in counted]


def test_steps_run_again_under_other_keys_cost_more_and_void_what_they_void(path):
    with Ledger.create(path, terms()) as ledger:
        ledger.declare(range(16))
        once, head = ledger.history.guarantee(), ledger.history.head
        ledger.resume(OTHER_CODE, step=0, origin=NO_HEAD, repeatable=True)
        ledger.declare(range(16))
        twice = ledger.history.guarantee()
        assert twice == cost(ledger.history.parts, DELTA)
        assert twice.epsilon.upper > once.epsilon.upper
        assert twice.attack_advantage.upper < 2 * once.attack_advantage.upper
        assert not any("mechanism was changed" in note for note in twice.notes)
        ledger.resume(terms(noise_multiplier=3.0), step=16, origin=head, repeatable=True)
        ledger.declare(range(16, 24))
        (note,) = [n for n in ledger.history.guarantee().notes if "mechanism was changed" in n]
        assert "only if no change was decided by looking at what was released" in note
        ledger.resume(terms(reproducible=True), step=16, origin=head, repeatable=True)
        assert ledger.history.guarantee().epsilon is not None  # it has released nothing yet
        ledger.declare(range(16, 17))
    assert "guesses the seed" in read(path).guarantee().sentence()


def test_a_tree_of_the_same_shape_with_other_examples_is_another_and_only_its_shape_is_kept(path):
    with Ledger.create(path, terms(OF_UNITS[0])) as ledger:
        ledger.declare(range(8))
        sampler = read(path).attempts[0].terms.mechanism.sampler
        moved = UnitTree(TREE.starts, TREE.leaves[::-1].copy(), TREE.labels)
        other = terms(Multistage(moved, (3, 2, 2), steps=40))
        how = {"step": 8, "origin": ledger.history.head, "repeatable": True}
        assert ledger.resume(other, **how).index == 1
    with pytest.raises(ValueError, match="only the shape of this sampler's tree is known"):
        BatchSource(sampler, seed=1).batch(0)


def nameless():
    """A sampler that nobody can read back by its name."""

    class Local(Deterministic):
        pass

    return Local(**SIZES)


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (terms(nameless()), "has no sampler 'nameless.<locals>.Local'"),
        (replace(terms(), fingerprint={"at": object()}), "JSON has no object"),
    ],
    ids=["sampler", "fingerprint"],
)
def test_what_could_not_be_read_back_is_not_written(path, bad, why):
    with pytest.raises(ValueError, match=why):
        Ledger.create(path, bad)
    assert path.read_bytes() == b""


def test_numbers_of_numpy_are_numbers(path):
    plain, numpy = (replace(terms(), fingerprint={"n": n}) for n in (2, np.int64(2)))
    with Ledger.create(path, numpy) as ledger:
        assert ledger.resume(plain, step=0, origin=NO_HEAD, repeatable=True).index == 0


SUMS = FullSums(3, 6.0)


@pytest.fixture
def with_sums():
    plain = terms(SAMPLERS[0])  # whose product with Gaussian releases is Gaussian
    return replace(plain, mechanism=replace(plain.mechanism, full_sums=SUMS))


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
        with pytest.raises(ValueError, match="beyond the run's last step"):
            ledger.declare(range(43, 44))
        again = replace(with_sums, fingerprint={"code": "b"})
        ledger.resume(again, step=40, origin=ledger.history.heads[1], repeatable=True)
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


# --- Which keys ----------------------------------------------------------------------------------


def resumed(path, **changes):
    """The attempt in which a run goes on at step 8, from a checkpoint of its own path."""
    how = {"terms": terms(), "step": 8, "repeatable": True} | changes
    with Ledger.open(path) as ledger:
        how.setdefault("origin", ledger.history.heads[1])
        return ledger.resume(how.pop("terms"), **how)


KEYS = {
    "bits that do not repeat": ({"repeatable": False}, 1),
    "nothing to repeat": ({"step": 16, "repeatable": False, "alone": True}, 0),
    "a copy": ({"step": 16, "alone": False}, 0),
    "a copy whose bits do not repeat": ({"step": 16, "repeatable": False, "alone": False}, 1),
}


@pytest.mark.parametrize(("changes", "index"), KEYS.values(), ids=KEYS)
def test_keys_are_kept_only_where_the_same_sums_come_again_or_none_did(path, changes, index):
    declared(path)
    if changes.get("step") == 16:
        changes = changes | {"origin": read(path).head}
    found = resumed(path, **changes)
    assert found.index == index
    assert 0 < found.key < 2**64
    assert (found.key == read(path).attempts[0].key) == (index == 0)


@pytest.mark.parametrize(
    "changes",
    [{"repeatable": False}, {"terms": OTHER_CODE}],
    ids=["machine", "code"],
)
def test_copies_that_are_resumed_in_one_way_get_different_keys(path, changes):
    """Where bits do not repeat, two sums of equal code differ too: a difference without noise."""
    declared(path)
    copy = path.with_name("copy.jsonl")
    copy.write_bytes(path.read_bytes())
    attempts = [resumed(at, **changes) for at in (path, copy)]
    assert [attempt.index for attempt in attempts] == [1, 1]
    assert len({attempt.key for attempt in (*read(path).attempts, *attempts)}) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reproducible_noise": False}, "it has no nonce"),
        ({"data_release": {"noise_multiplier": 4.0}}, "data_release: removed in 0.3.0"),
    ],
)
def test_terms_that_cannot_be_priced_are_refused(path, changes, message):
    Ledger.create(path, terms(reproducible=True)).close()
    assert read(path).attempts[0].key == 0
    body = json.loads(path.read_text())
    del body["hash"]
    path.write_bytes(line_of(body | changes, NO_HEAD)[0])
    with pytest.raises(LedgerError, match=f"line 1: {message}"):
        read(path)


@pytest.mark.parametrize("place", [os.link, os.symlink])
def test_a_ledger_of_another_name_is_refused(path, place):
    place(declared(path.with_name("elsewhere")), path)
    with pytest.raises(LedgerError, match=r"names \(hard links\)|symbolic link to") as refused:
        Ledger.open(path)
    assert "\n" not in str(refused.value)


def test_audits_and_what_was_released_are_lines(path):
    with Ledger.open(declared(path, blocks=[(0, 30)])) as ledger:
        ledger.audited("passed")
        before = ledger.history.head
        ledger.audited("passed")
        assert ledger.history.head == before
        ledger.audited("passed otherwise")
        guarantee = ledger.history.guarantee()
        ledger.declare(range(30, BINS.num_steps))
        ledger.release("digest")
        ledger.release("digest")
    history = read(path)
    assert (history.audit, history.released) == ("passed otherwise", "digest")
    assert len(history.heads) == 6
    assert guarantee.epsilon.upper < history.guarantee().epsilon.upper


# --- What is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "origin"),
    [(8, NO_HEAD), (9, 1), (17, 2), (0, "ab" * 32), (8, "ab" * 32), (7, 3), (25, 4)],
)
@pytest.mark.parametrize("code", ["b", "c"])
def test_a_checkpoint_that_this_run_never_wrote_is_refused(path, step, origin, code):
    declared(path)
    with Ledger.open(path) as ledger:
        ledger.resume(OTHER_CODE, step=8, origin=ledger.history.heads[1],
                      repeatable=True)  # fmt: skip
        ledger.declare(range(8, 24))
    content = path.read_bytes()
    origin = read(path).heads[origin] if isinstance(origin, int) else origin
    with pytest.raises(LedgerError, match=f"the checkpoint of step {step} "):
        resumed(path, terms=terms(code=code), step=step, origin=origin)
    assert path.read_bytes() == content
    beginning = {"attempt": 2, "first_step": step, "origin": origin, "nonce": "00"}
    line = line_of(beginning | terms().record(), read(path).head)[0]
    path.write_bytes(content + line)  # nor is a ledger believed that says so
    with pytest.raises(LedgerError, match=rf"line 6: .*the checkpoint of step {step} "):
        read(path)


@pytest.mark.parametrize("steps", [16, 40])
def test_nothing_follows_the_release_which_follows_all_steps(path, steps):
    assert BINS.num_steps == 40
    with Ledger.open(declared(path, blocks=[(0, steps)])) as ledger:
        if steps < 40:
            with pytest.raises(ValueError, match="when all steps are declared"):
                ledger.release("digest")
            return
        ledger.release("digest")
        content = path.read_bytes()
        head = ledger.history.head
        for more in (
            lambda: ledger.audited("passed"),
            lambda: ledger.release("another"),
            lambda: ledger.resume(OTHER_CODE, step=40, origin=head,
                                  repeatable=True),
        ):  # fmt: skip
            with pytest.raises(LedgerError, match=r"is closed|other parameters were released"):
                more()
    assert path.read_bytes() == content
    path.write_bytes(content + line_of({"audit": "passed"}, head)[0])
    with pytest.raises(LedgerError, match="follows the line that closes"):
        read(path)


@given(data=st.data())
def test_any_changed_byte_is_refused_or_torn_off(tmp_path_factory, data):
    path = declared(tmp_path_factory.mktemp("run") / "ledger.jsonl")
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    head = read(declared(path.with_name("whole"))).head
    with pytest.raises(LedgerError):
        read(path).check_head(head, "the checkpoint")


@pytest.mark.parametrize("damage", ["gone", "empty"])
def test_a_ledger_that_is_gone_or_empty_is_refused(path, damage):
    if damage == "empty":
        declared(path).write_bytes(b"")
    for opened in (read, Ledger.open):
        with pytest.raises(LedgerError, match=r"is missing: .* cannot be counted|is empty"):
            opened(path)


def test_a_forged_line_with_a_right_hash_of_its_own_breaks_with_those_that_follow(path):
    lines = declared(path).read_bytes().splitlines(keepends=True)
    body = json.loads(lines[0])
    del body["hash"]
    forged, _ = line_of(body | {"noise_multiplier": 9.0}, NO_HEAD)
    path.write_bytes(forged + b"".join(lines[1:]))
    with pytest.raises(LedgerError, match="line 2: its hash does not fit"):
        read(path)


@pytest.mark.parametrize("cut", [1, 40, 90])
def test_a_line_that_a_crash_tore_counts_nothing_and_is_removed(path, cut):
    content = declared(path).read_bytes()
    path.write_bytes(content[:-cut])
    assert read(path).attempts[0].steps == range(0, 8)
    with Ledger.open(path) as ledger:
        ledger.declare(range(8, 16))
    assert path.read_bytes() == content


@pytest.mark.parametrize("steps", [(16, 24), (6, 12), (8, 41)], ids=["gap", "back", "beyond"])
def test_steps_that_do_not_join_or_go_beyond_the_run_are_refused(path, steps):
    declared(path, blocks=[(0, 8)])
    with Ledger.open(path) as ledger:
        ledger.resume(OTHER_CODE, step=8, origin=ledger.history.head, repeatable=True)
        with pytest.raises(ValueError, match=r"does not join|beyond the run's last"):
            ledger.declare(range(*steps))


def test_to_read_a_ledger_executes_no_code_that_it_names(path, tmp_path, monkeypatch):
    (tmp_path / "not_ours.py").write_text("raise SystemExit('executed')")
    monkeypatch.syspath_prepend(tmp_path)
    begun = json.loads(declared(path).read_text().splitlines()[0])
    del begun["hash"]
    for name in ("not_ours:Sampler", "roulette", "os:system", "samplers.base:BatchSampler", "os:"):
        begun["sampler"]["name"] = name
        path.write_bytes(line_of(begun, NO_HEAD)[0])  # its hash put right
        why = f"'{name}' is not of this package" if name == "not_ours:Sampler" else "line 1"
        with pytest.raises(LedgerError, match=why) as refusal:
            read(path)
        assert "\n" not in str(refusal.value)
    assert "not_ours" not in sys.modules


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


def test_a_declaration_is_on_the_disk_when_it_returns(path, monkeypatch):
    synced = []
    fsync = os.fsync

    def watched(descriptor):
        synced.append(os.fstat(descriptor).st_size)
        fsync(descriptor)

    declared(path)
    with Ledger.open(path) as ledger:
        monkeypatch.setattr(os, "fsync", watched)
        ledger.declare(range(16, 24))
    assert synced == [path.stat().st_size]


def test_reading_a_million_declared_steps_takes_no_time_that_anybody_notices(path):
    sampler = Deterministic(num_examples=64 * 1_000_000, batch_size=64)
    with Ledger.create(path, terms(sampler)) as ledger:
        lines = []
        for first in range(0, 1_000_000, 250):
            steps = {"steps": [first, first + 250]}
            line, head = line_of(steps, ledger.history.head)
            ledger.history.extend(steps, head)
            lines.append(line)
    with open(path, "ab") as file:
        file.write(b"".join(lines))
    before = time.process_time()
    assert len(read(path).attempts[0].steps) == 1_000_000
    assert time.process_time() - before < 1.5
    assert json.loads(lines[-1])["steps"][1] == 1_000_000
