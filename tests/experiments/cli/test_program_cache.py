"""Compiled programs are kept where their owner alone can write, or not at all."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from experiments.cli.program_cache import NOT_KEPT, keep_programs

NAMED = "JAX_COMPILATION_CACHE_DIR"


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "environ", {"XDG_CACHE_HOME": str(tmp_path)})
    return tmp_path / "dpsgd"


def test_programs_are_kept_in_a_folder_of_the_users_alone(home, capsys):
    before = os.umask(0o002)
    try:
        keep_programs()
        folder = Path(os.environ.pop(NAMED))
        keep_programs()
    finally:
        os.umask(before)
    assert os.environ[NAMED] == str(folder)
    assert folder.is_relative_to(home)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert capsys.readouterr().err == ""


def linked(part, elsewhere):
    part.rename(elsewhere)
    part.symlink_to(elsewhere)


DANGERS = {
    "written by the group": lambda part, _: part.chmod(0o770),
    "written by all": lambda part, _: part.chmod(0o707),
    "a link": linked,
}


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("danger", DANGERS)
def test_a_folder_that_others_could_write_is_not_used(home, danger, depth, capsys):
    keep_programs()
    folder = Path(os.environ.pop(NAMED))
    part = [folder, *folder.parents][depth]
    DANGERS[danger](part, home.parent / "elsewhere")
    keep_programs()
    assert NAMED not in os.environ
    assert str(part) in capsys.readouterr().err


def test_a_folder_or_a_program_of_another_user_is_not_used(home, capsys, monkeypatch):
    keep_programs()
    folder = Path(os.environ.pop(NAMED))
    planted = folder / "jit_step-cache"
    planted.write_bytes(b"")
    planted.chmod(0o666)
    keep_programs()
    assert str(planted) in capsys.readouterr().err
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    keep_programs()
    assert str(folder) in capsys.readouterr().err
    assert NAMED not in os.environ


@pytest.mark.parametrize(("mode", "kept"), [(0o777, False), (0o770, False), (0o1777, True)])
def test_a_folder_that_others_could_replace_is_not_used(home, mode, kept, capsys):
    home.parent.chmod(mode)
    keep_programs()
    assert (NAMED in os.environ) == kept
    assert (str(home.parent) in capsys.readouterr().err) != kept


def test_program_caching_honours_the_users_setting_and_folder(home, capsys):
    os.environ[NOT_KEPT] = "false"
    keep_programs()
    assert NAMED not in os.environ
    os.environ[NAMED] = "mine"
    keep_programs()
    assert os.environ.pop(NAMED) == "mine"
    del os.environ[NOT_KEPT]
    home.write_text("in the way")
    keep_programs()
    assert NAMED not in os.environ
    assert capsys.readouterr().err == ""


@pytest.mark.long
def test_a_program_that_was_kept_trains_the_same_bits(tmp_path):
    tasks = Path(__file__).parents[2] / "dpsgd" / "runs"  # of `tiny_task`
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(tasks)]))
    mine = {
        k: v for k, v in os.environ.items() if not k.startswith(("JAX_COMPILATION", "JAX_PERS"))
    }
    words = ["train", "--task", "tiny_task:Line", "--noise-multiplier", "1", "--insecure-seed", "1"]
    words += ["--l2-clip-norm", "1", "--learning-rate", "0.1", "--no-audit"]
    words += ["sampler:poisson", "--batch-size", "8", "--epochs", "2"]
    found = []
    for out, extra in [("first", {}), ("again", {}), ("anew", {NOT_KEPT: "false"})]:
        code = "from experiments.cli import main; raise SystemExit(main())"
        subprocess.run(
            [sys.executable, "-c", code, *words, "--out", out],
            cwd=tmp_path,
            env=mine | extra | {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": path},
            check=True,
        )
        kept = {f.name for f in (tmp_path / "cache").rglob("*-cache")}
        with np.load(tmp_path / out / "params.npz") as params:
            found.append((kept, {name: params[name].tobytes() for name in params.files}))
    (first, params), (again, same), (anew, compiled) = found
    assert first
    assert first <= again == anew  # one that took little time to compile may be kept later
    assert params == same == compiled
