"""Root keys: secret, whole, never overwritten, and different keys for different purposes."""

import copy
import io
import itertools
import json
import logging
import os
import pickle
import shutil
import stat
import subprocess
import sys

import jax
import numpy as np
import pytest

from dpsgd.noise.keys import ROOT_BYTES, RootKey

SECRET = bytes(range(100, 100 + ROOT_BYTES))


@pytest.fixture
def path(tmp_path):
    """The file of a root that was saved."""
    RootKey(SECRET, insecure=False).save(tmp_path / "root.key")
    return tmp_path / "root.key"


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
    assert RootKey.from_entropy() == RootKey(SECRET, insecure=False)
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
    """A change of the derivation would make every earlier run impossible to resume."""
    root = RootKey(SECRET, insecure=False)
    assert root.noise_key(7).tolist() == [1363612488, 397868843, 2388891801, 1190893576]
    assert root.loss_key(7).tolist() == [2397708977, 2830635754]
    assert hex(root.sampling_seed(7))[:18] == "0xfb785ccc950ad4fe"


def test_an_integer_seed_is_stamped_insecure_and_reproducible():
    first, second = RootKey.from_insecure_seed(5), RootKey.from_insecure_seed(5)
    assert first == second
    assert first.insecure
    assert not RootKey.from_entropy().insecure
    assert first != RootKey.from_insecure_seed(6)
    assert first != RootKey(first._secret, insecure=False)


def test_numbers_that_no_root_has_are_refused():
    for seed in (-1, 2**64, True):
        with pytest.raises(ValueError, match="insecure seed must be"):
            RootKey.from_insecure_seed(seed)
    for attempt in (-1, 2**64, False):
        with pytest.raises(ValueError, match="attempt must be"):
            RootKey(SECRET, insecure=False).noise_key(attempt)
    with pytest.raises(ValueError, match="32 bytes, got 16"):
        RootKey(bytes(16), insecure=False)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
@pytest.mark.parametrize("insecure", [False, True])
def test_a_saved_root_loads_as_the_same_root_and_is_its_owners_alone(tmp_path, umask, insecure):
    root, before = RootKey(SECRET, insecure=insecure), os.umask(umask)
    try:
        root.save(tmp_path / "root.key")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "root.key").stat().st_mode) == 0o600
    loaded = RootKey.load(tmp_path / "root.key")
    assert loaded == root
    assert loaded.insecure is insecure


def test_file_and_folder_are_fsynced(tmp_path, monkeypatch):
    kinds = []
    fsync = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda fd: kinds.append(stat.S_IFMT(os.fstat(fd).st_mode)) or fsync(fd)
    )
    RootKey(SECRET, insecure=False).save(tmp_path / "root.key")
    assert kinds == [stat.S_IFREG, stat.S_IFDIR]


def test_a_root_is_never_overwritten_not_even_through_a_link(tmp_path):
    path, link = tmp_path / "root.key", tmp_path / "link.key"
    RootKey(SECRET, insecure=False).save(path)
    link.symlink_to(tmp_path / "elsewhere.key")
    for target in (path, link):
        with pytest.raises(FileExistsError, match="never overwritten"):
            RootKey.from_entropy().save(target)
    assert RootKey.load(path) == RootKey(SECRET, insecure=False)
    assert not (tmp_path / "elsewhere.key").exists()


def test_a_failed_save_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        RootKey(SECRET, insecure=False).save(tmp_path / "root.key")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o644, 0o666])
def test_a_file_that_others_can_use_is_refused(path, mode):
    path.chmod(mode)
    with pytest.raises(PermissionError, match=f"mode {mode:04o}.*chmod 600"):
        RootKey.load(path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"dpsgd-root-key-v2",
        f"dpsgd-root-key-v2 entropy {SECRET.hex()[:-2]}\n".encode(),
        f"dpsgd-root-key-v2 entropy {SECRET.hex()[:-1]}x\n".encode(),
        f"dpsgd-root-key-v2 unknown {SECRET.hex()}\n".encode(),
        f"dpsgd-root-key-v0 entropy {SECRET.hex()}\n".encode(),
        f"dpsgd-root-key-v2 entropy {SECRET.hex()} more\n".encode(),
        b"\xff\x00" * 5000,
    ],
)
def test_a_damaged_file_is_refused_without_quoting_it(tmp_path, content):
    path = tmp_path / "root.key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ValueError, match="damaged") as error:
        RootKey.load(path)
    assert SECRET.hex()[:8] not in str(error.value)


def test_a_missing_file_a_folder_and_a_pipe_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no root key here"):
        RootKey.load(tmp_path / "root.key")
    tmp_path.chmod(0o700)
    with pytest.raises((ValueError, OSError)):
        RootKey.load(tmp_path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ValueError, match="regular file"):
        RootKey.load(tmp_path / "pipe")


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
    try:
        root.begin_run()
    except ValueError as error:
        print(error)
else:
    os.wait()
    print(derived(root), derived(seed), sep=";")
"""


def test_of_two_processes_that_a_fork_leaves_with_one_root_one_draws_by_it():
    ran = subprocess.run(
        [sys.executable, "-uc", FORKED], check=True, capture_output=True, text=True
    )
    child, claim, parent = ran.stdout.splitlines()
    refused, seeded, fresh = child.split(";", 2)[0], *child.rsplit(";", 2)[1:]
    assert "was forked from" in refused
    assert "was forked from" in claim
    assert parent.split(";")[1] == seeded
    assert json.loads(parent.split(";")[0]) != json.loads(fresh)


# --- One root serves one run ---------------------------------------------------------------------


def refused(root, *run):
    with pytest.raises(ValueError, match=r"already begun under this root.*from_entropy") as error:
        root.begin_run(*run)
    assert "\n" not in str(error.value)


def test_a_root_is_claimed_in_its_file_whoever_loads_it(path):
    first, second = RootKey.load(path), RootKey.load(path)
    first.begin_run()
    refused(first)
    refused(second)  # which was loaded before
    refused(RootKey.load(path))
    assert RootKey.load(path) == first


def test_a_run_goes_on_by_its_name_and_no_other_does(path):
    assert RootKey.load(path).begin_run("this") == "this"
    again = RootKey.load(path)
    again.begin_run("this")
    again.begin_run("this")
    refused(again, "that")
    refused(again)
    assert path.read_text().count("\n") == 2  # claimed once


@pytest.mark.parametrize("first", ["used", "saved"])
def test_every_file_of_a_root_is_claimed(tmp_path, first):
    root, files = RootKey(SECRET, insecure=False), [tmp_path / name for name in ("one", "two")]
    run = root.begin_run() if first == "used" else None
    for file in files:
        root.save(file)
    root.begin_run(run)
    for file in files:
        refused(RootKey.load(file))


def test_a_seed_may_be_used_again(tmp_path):
    root = RootKey.from_insecure_seed(3)
    root.save(tmp_path / "root.key")
    for one in (root, root, RootKey.load(tmp_path / "root.key")):
        one.begin_run()


def test_files_that_are_gone_or_another_root_s_are_left_alone(tmp_path):
    root, path = RootKey(SECRET, insecure=False), tmp_path / "root.key"
    for name in ("root.key", "gone.key"):
        root.save(tmp_path / name)
        (tmp_path / name).unlink()
    RootKey.from_entropy().save(path)
    before = path.read_bytes()
    root.begin_run()
    assert path.read_bytes() == before


def test_a_torn_claim_is_none(path):
    with path.open("ab") as file:
        file.write(b"claim half")
    RootKey.load(path).begin_run("whole")
    refused(RootKey.load(path))
    RootKey.load(path).begin_run("whole")


def test_of_a_thousand_uses_none_is_forgotten(path):
    uses = {f"0:{step}:parameters": f"{step:064}" for step in range(1000)}
    RootKey.load(path).begin_run("run", uses)
    for one in ("later", "last"):
        RootKey.load(path).begin_run("run", {one: "0"})
    for use in ("0:0:parameters", "0:999:parameters", "later", "last"):
        with pytest.raises(ValueError, match=f"had other {use.rpartition(':')[2]}"):
            RootKey.load(path).begin_run("run", {use: "another"})


def test_a_full_disk_claims_nothing(path, monkeypatch):
    before, root, write = path.read_bytes(), RootKey.load(path), os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, line: write(fd, line[:9]))
        with pytest.raises(OSError, match="No space"):
            root.begin_run()
    assert path.read_bytes() == before
    root.begin_run()


def test_a_copy_is_known_until_its_run_has_keys_of_its_own(tmp_path):
    path, copy = tmp_path / "root.key", tmp_path / "copy.key"
    root = RootKey(SECRET, insecure=False)
    root.begin_run("run")
    root.save(path)
    shutil.copy2(path, copy)
    path.rename(tmp_path / "moved.key")
    assert not RootKey.load(tmp_path / "moved.key").is_copy
    loaded = RootKey.load(copy)
    loaded.begin_run("run")
    assert loaded.is_copy
    assert RootKey.load(copy).is_copy
    loaded.hold()
    assert not loaded.is_copy
    content = copy.read_bytes()
    loaded.hold()
    assert copy.read_bytes() == content  # it does not grow with the attempts of its run
    assert not RootKey.load(copy).is_copy


# --- What lies in the place of a file ------------------------------------------------------------


def link(path, elsewhere):
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def hard_link(path, elsewhere):
    os.link(path, elsewhere)


@pytest.mark.parametrize(
    ("place", "why"),
    [
        (link, r"symbolic link to .*elsewhere.*move the file"),
        (hard_link, "2 names .*remove the"),
    ],
)
def test_a_root_of_another_name_is_refused(tmp_path, path, place, why):
    root = RootKey.load(path)
    place(path, tmp_path / "elsewhere")
    for use in (lambda: RootKey.load(path), root.begin_run):
        with pytest.raises(ValueError, match=why) as error:
            use()
        assert "\n" not in str(error.value)


def test_a_root_of_another_owner_is_refused(path, monkeypatch):
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(ValueError, match=rf"belongs to user {owner}, .*`chown {owner + 1} "):
        RootKey.load(path)


def test_a_root_that_is_removed_is_overwritten_under_all_of_its_names(tmp_path):
    path, other = tmp_path / "root.key", tmp_path / "other.key"
    RootKey(SECRET, insecure=False).save(path)
    os.link(path, other)
    RootKey.remove(path)
    RootKey.remove(path)  # it is
    assert not path.exists()
    assert set(other.read_bytes()) == {0}


def test_a_link_is_not_removed_for_the_secret_that_it_leads_to(tmp_path):
    path, target = tmp_path / "root.key", tmp_path / "elsewhere"
    RootKey(SECRET, insecure=False).save(target)
    path.symlink_to(target)
    with pytest.raises(ValueError, match=r"secret was not removed: .*link to .*elsewhere"):
        RootKey.remove(path)
    assert path.is_symlink()
    assert target.read_text().count(SECRET.hex()) == 1  # it may be anybody's
