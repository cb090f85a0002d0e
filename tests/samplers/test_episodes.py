"""What all samplers of episodes have in common: they are values, and rows make up the batch."""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np

from samplers import Multistage, UnitsThenPoisson, UnitTree
from samplers.plans import CHUNK

SHOP = {"shop": np.array(list("baccbacbc"))}
TREE = UnitTree.from_columns(SHOP)


def test_chunks_of_rows_make_up_the_batch(even_tree, monkeypatch):
    monkeypatch.setattr("samplers.plans.CHUNK", 7)
    for sampler in (
        Multistage(even_tree(5, 8), (2, 3)),
        UnitsThenPoisson(even_tree(5, 8), (2,), 0.4),
    ):
        rows = [sampler.participations(9, 0, chunk).examples for chunk in range(sampler.num_chunks)]
        np.testing.assert_array_equal(np.concatenate(rows), sampler.members(9, 0))


def test_a_sampler_of_episodes_is_a_value():
    for sampler in (
        Multistage(TREE, (2, 2), steps=3),
        UnitsThenPoisson(TREE, (2,), 0.5, steps=3),
    ):
        twin = dataclasses.replace(sampler)
        assert sampler == twin
        assert hash(sampler) == hash(twin)
        assert pickle.loads(pickle.dumps(sampler)) == sampler
        assert sampler.with_epochs(4) != sampler
        assert sampler.with_epochs(4).num_steps == 4
    other = UnitTree.from_columns({"shop": SHOP["shop"][::-1]})
    assert Multistage(TREE, (2, 2)) != Multistage(other, (2, 2))
    assert CHUNK == 65_536
