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
from accounting import attack_advantage
from dpsgd import Mechanism
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
SAMPLERS = [
    Deterministic(**SIZES),
    Shuffle(**SIZES),
    Poisson(**SIZES),
    BallsAndBins(**SIZES),
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


def terms(sampler, *, noise_multiplier=SIGMA, code="a", reproducible=False):
    mechanism = Mechanism(sampler, noise_multiplier, 2.0 if noise_multiplier else math.inf)
    return Terms(mechanism, DELTA, reproducible, {"code": code, "devices": ["cpu"]})


OTHER_CODE = terms(SAMPLERS[3], code="b")


def declared(path, sampler=SAMPLERS[3], blocks=((0, 8), (8, 16))):
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


def test_a_tree_of_the_same_shape_with_other_examples_is_another_tree(path):
    with Ledger.create(path, terms(OF_UNITS[0])) as ledger:
        ledger.declare(range(8))
        moved = UnitTree(TREE.starts, TREE.leaves[::-1].copy(), TREE.labels)
        other = terms(Multistage(moved, (3, 2, 2), steps=40))
        how = {"step": 8, "origin": ledger.history.head, "repeatable": True}
        assert ledger.resume(other, **how).index == 1


def test_a_sampler_read_from_the_file_does_not_draw(path):
    Ledger.create(path, terms(OF_UNITS[0])).close()
    sampler = read(path).attempts[0].terms.mechanism.sampler
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
        (replace(terms(SAMPLERS[0]), fingerprint={"at": object()}), "JSON has no object"),
    ],
    ids=["sampler", "fingerprint"],
)
def test_what_could_not_be_read_back_is_not_written(path, bad, why):
    with pytest.raises(ValueError, match=why):
        Ledger.create(path, bad)
    assert path.read_bytes() == b""


def test_numbers_of_numpy_are_numbers(path):
    plain, numpy = (replace(terms(SAMPLERS[3]), fingerprint={"n": n}) for n in (2, np.int64(2)))
    with Ledger.create(path, numpy) as ledger:
        again = ledger.resume(plain, step=0, origin=NO_HEAD, repeatable=True)
    assert again.index == 0


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_an_unfinished_run_names_the_price_of_stopping_by_looking(path, sampler):
    declared(path, sampler, [(0, 8)])
    (caveat,) = [note for note in read(path).guarantee().notes if "stop" in note]
    assert f"{epsilon(sampler.privacy(SIGMA), DELTA):.4f}" in caveat
    with Ledger.open(path) as ledger:
        ledger.declare(range(8, 40))
    assert not [note for note in read(path).guarantee().notes if "stop" in note]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_declared_steps_cost_as_much_as_the_epochs_they_enter(path, sampler):
    declared(path, sampler, [(0, 8), (8, 12)])
    counted = read(path).guarantee().epsilon
    assert counted.lower == 0.0
    assert counted.upper == epsilon(sampler.privacy_of(SIGMA, [range(12)]), DELTA).upper
    assert "steps 0 to 11 of 40" in counted.note


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
    assert f"{whole.epsilon:.4f}" in caveat
    for found, sums in ((whole, 3), (twice, 6)):
        assert 0 <= found.epsilon.upper - gaussian(4, sums).lower < 0.1
    assert twice.epsilon.upper > whole.epsilon.upper > before.epsilon.upper
    assert read(path).guarantee() == twice
    assert twice.mechanism.full_sums == SUMS
    assert twice.record()["full_sums"] == {
        "count": 3, "noise_multiplier": 6.0, "l2_clip_norm": 1.0
    }  # fmt: skip
    assert any(str(SUMS) in note for note in twice.notes)


def advantage(path):
    return read(path).guarantee().attack_advantage


def test_the_advantage_of_an_attack_is_that_of_all_that_was_declared(path):
    sampler = SAMPLERS[3]
    declared(path, sampler, [(0, 40)])
    whole = advantage(path)
    assert whole == attack_advantage(sampler.privacy(SIGMA))
    with Ledger.open(path) as ledger:  # the last half once more, under fresh noise
        head = ledger.history.heads[1]
        ledger.resume(terms(sampler, code="b"), step=20, origin=head, repeatable=True)
        ledger.declare(range(20, 40))
    segments = [range(40), range(20, 40)]
    together = advantage(path)
    assert together.upper == attack_advantage(sampler.privacy_of(SIGMA, segments)).upper
    assert whole.upper < together.upper < 2 * whole.upper
    assert together.lower == 0.0
    with Ledger.open(path) as ledger:
        other = terms(sampler, noise_multiplier=3.0)
        ledger.resume(other, step=39, origin=ledger.history.head, repeatable=True)
        ledger.declare(range(39, 40))
    more = attack_advantage(sampler.privacy_of(3.0, [range(39, 40)]))
    assert advantage(path).upper == pytest.approx(together.upper + more.upper, rel=1e-12)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_steps_run_again_in_a_new_attempt_are_counted_again(path, sampler):
    declared(path, sampler, [(0, 8), (8, 16)])
    once = read(path).guarantee().epsilon.upper
    with Ledger.open(path) as ledger:
        head = ledger.history.heads[1]
        ledger.resume(terms(sampler, code="b"), step=8, origin=head, repeatable=True)
        ledger.declare(range(8, 16))
    twice = read(path).guarantee().epsilon.upper
    segments = [range(0, 16), range(8, 16)]
    assert twice == epsilon(sampler.privacy_of(SIGMA, segments), DELTA).upper
    assert twice > once


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_steps_run_again_in_the_same_attempt_are_counted_once(path, sampler):
    declared(path, sampler, [(0, 8), (8, 16)])
    before = path.read_bytes()
    with Ledger.open(path) as ledger:
        head = ledger.history.heads[1]
        attempt = ledger.resume(terms(sampler), step=8, origin=head, repeatable=True)
        assert attempt.index == 0
        ledger.declare(range(8, 16))
        assert path.read_bytes() == before
        ledger.declare(range(12, 20))
    assert read(path).attempts[0].steps == range(0, 20)


@pytest.mark.parametrize(
    ("changes", "changed"),
    [
        ({}, False),
        ({"code": "b"}, False),
        ({"noise_multiplier": 0.9}, True),
        ({"sampler": SAMPLERS[2]}, True),
    ],
    ids=str,
)
def test_a_price_of_changed_mechanisms_names_its_condition(path, changes, changed):
    """Who chooses the next mechanism by what the last one released has another price."""
    declared(path, SAMPLERS[3], [(0, 8)])
    changes = {"sampler": SAMPLERS[3]} | changes
    with Ledger.open(path) as ledger:
        sampler = changes.pop("sampler")
        ledger.resume(
            terms(sampler, **changes), step=8, origin=ledger.history.head, repeatable=True
        )
        for steps in (None, range(8, 16), range(16, 40)):  # from the first moment to the end
            if steps:
                ledger.declare(steps)
            guarantee = read(path).guarantee()
            conditions = [note for note in guarantee.notes if "mechanism was changed" in note]
            assert len(conditions) == changed
            assert guarantee.record()["notes"] == list(guarantee.notes)
            for condition in conditions:
                assert "only if no change was decided by looking at what was released" in condition


@pytest.mark.parametrize(
    ("noise_multiplier", "reproducible", "why"),
    [(0.0, False, "no noise"), (1.0, True, "guesses the seed")],
)
def test_one_unprotected_attempt_voids_the_guarantee(path, noise_multiplier, reproducible, why):
    declared(path)
    with Ledger.open(path) as ledger:
        bad = terms(SAMPLERS[3], noise_multiplier=noise_multiplier, reproducible=reproducible)
        ledger.resume(bad, step=16, origin=ledger.history.head, repeatable=True)
        assert ledger.history.guarantee().epsilon is not None  # it has released nothing yet
        ledger.declare(range(16, 17))
        ledger.resume(terms(SAMPLERS[3]), step=17, origin=ledger.history.head, repeatable=True)
    guarantee = read(path).guarantee()
    assert guarantee.epsilon is None
    assert why in guarantee.sentence()


# --- Which keys ----------------------------------------------------------------------------------


def resumed(path, **changes):
    """The attempt in which a run goes on at step 8, from a checkpoint of its own path."""
    how = {"terms": terms(SAMPLERS[3]), "step": 8, "repeatable": True} | changes
    with Ledger.open(path) as ledger:
        how.setdefault("origin", ledger.history.heads[1])
        return ledger.resume(how.pop("terms"), **how)


KEYS = {
    "unchanged": ({}, 0),
    "code": ({"terms": OTHER_CODE}, 1),
    "noise": ({"terms": terms(SAMPLERS[3], noise_multiplier=3.0)}, 1),
    "sampler": ({"terms": terms(SAMPLERS[1])}, 1),
    "bits that do not repeat": ({"repeatable": False}, 1),
    "nothing to repeat": ({"step": 16, "repeatable": False, "alone": True}, 0),
    "a copy": ({"step": 16, "alone": False}, 0),
    "a copy whose bits do not repeat": ({"step": 16, "repeatable": False, "alone": False}, 1),
    "no checkpoint": ({"step": 0, "origin": NO_HEAD}, 0),
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


def test_a_checkpoint_from_before_the_attempt_brings_new_keys(path):
    # The last attempt's steps were taken from another state: its noise must not be used again.
    declared(path)
    old = read(path).heads[1]
    resumed(path, terms=OTHER_CODE, step=16, origin=read(path).head)
    with Ledger.open(path) as ledger:
        ledger.declare(range(16, 24))
    attempt = resumed(path, terms=OTHER_CODE, step=8, origin=old)
    assert attempt.index == 2


def test_dying_at_once_in_a_new_attempt_does_not_begin_another(path):
    first = resumed(declared(path), terms=OTHER_CODE)
    again = resumed(path, terms=OTHER_CODE)
    assert first == again


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


def test_the_first_attempt_of_a_run_has_keys_that_no_other_run_has(path):
    keys = {read(declared(path.with_name(name), blocks=[])).attempts[0].key for name in ("a", "b")}
    assert len(keys) == 2
    assert 0 not in keys


def test_only_reproducible_noise_begins_without_a_nonce(path):
    Ledger.create(path, terms(SAMPLERS[3], reproducible=True)).close()
    assert read(path).attempts[0].key == 0
    body = json.loads(path.read_text())
    del body["hash"]
    path.write_bytes(line_of(body | {"reproducible_noise": False}, NO_HEAD)[0])
    with pytest.raises(LedgerError, match="line 1: it has no nonce"):
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
        ledger.declare(range(30, SAMPLERS[3].num_steps))
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
        resumed(path, terms=terms(SAMPLERS[3], code=code), step=step, origin=origin)
    assert path.read_bytes() == content
    beginning = {"attempt": 2, "first_step": step, "origin": origin, "nonce": "00"}
    line = line_of(beginning | terms(SAMPLERS[3]).record(), read(path).head)[0]
    path.write_bytes(content + line)  # nor is a ledger believed that says so
    with pytest.raises(LedgerError, match=rf"line 6: .*the checkpoint of step {step} "):
        read(path)


@pytest.mark.parametrize("steps", [16, 40])
def test_nothing_follows_the_release_which_follows_all_steps(path, steps):
    assert SAMPLERS[3].num_steps == 40
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


@pytest.mark.parametrize("order", [(1, 2), (0, 2), (0, 1), (2, 1, 0)])
def test_lines_that_are_removed_or_change_places_are_refused(path, order):
    lines = declared(path).read_bytes().splitlines(keepends=True)
    head = read(path).head
    path.write_bytes(b"".join(lines[at] for at in order))
    with pytest.raises(LedgerError):
        read(path).check_head(head, "the checkpoint")


def test_a_ledger_forged_as_a_whole_is_refused_by_the_checkpoint(path):
    # Whoever recomputes the hashes of the rest of the file still has the checkpoint's against him.
    head = read(declared(path)).head
    other = read(declared(path.with_name("other"), blocks=[(0, 8)]))
    with pytest.raises(LedgerError, match="rolled back or replaced"):
        other.check_head(head, "the checkpoint")


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


def renamed(path, name):
    """A ledger whose sampler is called by another name, its hashes put right by whoever did it."""
    content = declared(path).read_text()
    body = json.loads(content.splitlines()[0].replace("balls-and-bins", name))
    del body["hash"]
    path.write_bytes(line_of(body, NO_HEAD)[0])


def test_to_read_a_ledger_executes_no_code_that_it_names(path, tmp_path, monkeypatch):
    (tmp_path / "not_ours.py").write_text("raise SystemExit('executed')")
    monkeypatch.syspath_prepend(tmp_path)
    renamed(path, "not_ours:Sampler")
    with pytest.raises(LedgerError, match="'not_ours:Sampler' is not of this package") as refusal:
        read(path)
    assert "\n" not in str(refusal.value)
    assert "not_ours" not in sys.modules


@pytest.mark.parametrize(
    "name", ["roulette", "os:system", "samplers.base:BatchSampler", "builtins:dict", "os:"]
)
def test_a_name_of_something_else_is_no_sampler(path, name):
    renamed(path, name)
    with pytest.raises(LedgerError, match="line 1"):
        read(path)


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
