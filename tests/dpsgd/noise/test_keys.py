"""Root keys: secret, never written, and different keys for different purposes."""

import copy
import io
import itertools
import json
import logging
import os
import pickle
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from dpsgd.noise.keys import ROOT_BYTES, Keys, RootKey

SECRET = bytes(range(100, 100 + ROOT_BYTES))


def derived(root: RootKey, attempt: int) -> dict[str, bytes]:
    """Everything that can be derived from a root, as bytes."""
    return {
        "sampling": root.sampling_seed(attempt).to_bytes(32, "little"),
        "noise": root.noise_key(attempt).tobytes(),
        "loss": root.loss_key(attempt).tobytes(),
    }


def test_entropy_roots_differ_and_fill_all_key_bits():
    """Over 64 roots each of the 256 bits is seen as 0 and as 1: false alarm 512 * 2^-64."""
    roots = [RootKey.from_entropy()._secret for _ in range(64)]
    assert len(set(roots)) == 64
    bits = np.unpackbits(np.array([list(root) for root in roots], np.uint8), axis=1)
    assert bits.shape[1] == 256
    assert np.all((bits.sum(0) > 0) & (bits.sum(0) < 64))


@pytest.mark.parametrize(("stream", "words"), [("noise_key", 4), ("loss_key", 2)])
def test_all_bits_of_noise_keys_are_used(stream, words):
    keys = np.stack([getattr(RootKey.from_entropy(), stream)(0) for _ in range(64)])
    assert keys.shape == (64, words)
    assert keys.dtype == np.uint32
    bits = np.unpackbits(keys.view(np.uint8), axis=1)
    assert np.all((bits.sum(0) > 0) & (bits.sum(0) < 64))


def test_entropy_comes_from_the_operating_system(monkeypatch):
    asked = []
    monkeypatch.setattr(os, "urandom", lambda n: asked.append(n) or SECRET[:n])
    assert RootKey.from_entropy()._secret == SECRET
    assert asked == [ROOT_BYTES]


def test_streams_attempts_and_roots_share_no_output():
    flipped = bytes([*SECRET[:-1], SECRET[-1] ^ 0x80])  # one bit of the last byte
    outputs = [
        value[:4]
        for secret, attempt in itertools.product([SECRET, flipped], [0, 1, 2, 2**63])
        for value in derived(RootKey(secret, insecure=False), attempt).values()
    ]
    assert len(set(outputs)) == len(outputs) == 24


def test_derivations_are_these_very_functions():
    """A change of the derivation would change what an insecure seed repeats."""
    root = RootKey(SECRET, insecure=False)
    assert root.noise_key(7).tolist() == [1363612488, 397868843, 2388891801, 1190893576]
    assert root.loss_key(7).tolist() == [2397708977, 2830635754]
    assert hex(root.sampling_seed(7))[:18] == "0xfb785ccc950ad4fe"


def test_an_integer_seed_is_stamped_insecure_and_reproducible():
    first, second = RootKey.from_insecure_seed(5), RootKey.from_insecure_seed(5)
    assert derived(first, 0) == derived(second, 0)
    assert first.insecure
    assert not RootKey.from_entropy().insecure
    assert derived(first, 0) != derived(RootKey.from_insecure_seed(6), 0)


def test_numbers_that_no_root_has_are_refused():
    for seed in (-1, 2**64, True):
        with pytest.raises(ValueError, match="insecure_seed must be"):
            RootKey.from_insecure_seed(seed)
    for attempt in (-1, 2**64, False):
        with pytest.raises(ValueError, match="attempt must be"):
            RootKey(SECRET, insecure=False).noise_key(attempt)
    with pytest.raises(ValueError, match="32 bytes, got 16"):
        RootKey(bytes(16), insecure=False)


def test_the_secret_reaches_no_text_log_pickle_or_copy():
    root = RootKey(SECRET, insecure=False)
    stream = io.StringIO()
    logger = logging.Logger("test", logging.DEBUG)
    logger.addHandler(logging.StreamHandler(stream))
    logger.info("%s %r %s", root, root, [root])
    texts = [repr(root), str(root), f"{root}", stream.getvalue()]
    for text in texts:
        assert "<secret>" in text
        for form in (SECRET.hex(), repr(SECRET)[2:-1], str(list(SECRET))[1:20]):
            assert form not in text
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(TypeError, match="never pickled"):
            pickle.dumps(root, protocol)
    for attempt in (copy.copy, copy.deepcopy, json.dumps):
        with pytest.raises(TypeError):
            attempt(root)
    assert not hasattr(root, "__dict__")  # nothing for vars() or a configuration dump to show
    assert jax.tree.leaves(root) == [root]  # no pytree: a checkpoint of arrays cannot hold it


FORKED = """
import os
from dpsgd.noise.keys import RootKey

def derived(root):
    try:
        return str(root.noise_key(0).tolist())
    except ValueError as error:
        return str(error)

root, seed = RootKey.from_entropy(), RootKey.from_insecure_seed(1)
if os.fork() == 0:
    print(derived(root), derived(seed), derived(RootKey.from_entropy()), sep=";")
else:
    os.wait()
    print(derived(root), derived(seed), sep=";")
"""


def test_forked_process_is_refused_the_parents_root():
    ran = subprocess.run(
        [sys.executable, "-uc", FORKED], check=True, capture_output=True, text=True
    )
    child, parent = ran.stdout.splitlines()
    refused, seeded, fresh = child.split(";", 2)[0], *child.rsplit(";", 2)[1:]
    assert "was forked from" in refused
    assert parent.split(";")[1] == seeded
    assert json.loads(parent.split(";")[0]) != json.loads(fresh)


def test_keys_of_two_processes_differ_and_those_of_a_seed_do_not():
    def all_of(keys):
        return [keys.noise, keys.loss, keys.of_sums.noise, keys.sampling]

    fresh, again, *seeded = (all_of(Keys.of(seed)) for seed in (None, None, 1, 1))
    assert not any(np.array_equal(one, two) for one, two in zip(fresh, again, strict=True))
    assert all(np.array_equal(one, two) for one, two in zip(*seeded, strict=True))
    assert not np.array_equal(fresh[0], fresh[2])  # sums have a stream of their own
    assert "secret" not in repr(Keys.of(None)).replace("<secret>", "")
    with pytest.raises(TypeError, match="never pickled"):
        pickle.dumps(Keys.of(None))


def test_processes_of_one_run_have_the_keys_of_the_first(monkeypatch):
    sent = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(
        multihost_utils, "broadcast_one_to_all", lambda words: sent.append(words) or sent[0]
    )
    first, second = Keys.of(), Keys.of()
    assert not np.array_equal(*sent)  # each drew a root, and one of them counts
    assert np.array_equal(first.noise, second.noise)
    assert first.sampling == second.sampling


def test_processes_that_train_apart_have_other_keys(monkeypatch):
    """The difference of two models with equal noise shows their rows."""
    collective = RootKey(bytes(32), insecure=False)
    monkeypatch.setattr(RootKey, "shared", lambda: collective)
    alone = [Keys.of(None, {process}).noise.tolist() for process in (0, 1, 1)]
    together = [Keys.of(None, processes).noise.tolist() for processes in ({0, 1}, {2, 3})]
    assert len({tuple(key) for key in [*alone, *together, collective.noise_key().tolist()]}) == 6
    assert Keys.of(None, [1, 0]).noise.tolist() == together[0]
    assert Keys.of(1, {0}).noise.tolist() == Keys.of(1, {1}).noise.tolist()
