"""Arrays of files of any format become parameters by rules on names, or are refused in one line."""

import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_task import Line, config_of, run_and_stop

from dpsgd import resume, run
from dpsgd.gradients.frozen import leaf_names, matching_leaves
from dpsgd.gradients.rules import PerLayerClipping
from dpsgd.runs.arrays import source
from dpsgd.runs.initial import Rule, initial_params, lines_of, matched

DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": jnp.bfloat16, "I64": "<i8"}
RNG = np.random.default_rng(0)
WEIGHTS = {
    "net.0.weight": RNG.normal(size=(3, 2)).astype("<f4"),
    "net.0.bias": RNG.normal(size=3).astype("<f2"),
    "rows": RNG.normal(size=(5, 2)).astype(jnp.bfloat16),
    "steps": np.int64(7).reshape(()),
}
LIKE = {
    "dense": {"kernel": np.zeros((2, 3), np.float32), "bias": np.zeros(3, np.float32)},
    "table": np.zeros((4, 2), np.float32),
    "head": np.ones(2, np.float32),
}
RULES = (
    r"net\.(0)\.weight=dense.kernel:T",
    r"net\.\d\.(bias)=dense.\1",
    "rows=table:first",
    "steps=",
    "=head",
)


def safetensors(path, arrays, change=lambda header: None):
    """Writes a file of safetensors by its definition, with a header that may be changed."""
    kinds = {np.dtype(kind): name for name, kind in DTYPES.items()}
    header, data = {"__metadata__": {"format": "np"}}, b""
    for name, array in arrays.items():
        span = [len(data), len(data) + array.nbytes]
        entry = {"dtype": kinds[array.dtype], "shape": list(array.shape), "data_offsets": span}
        header[name], data = entry, data + array.tobytes()
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def npz(path, arrays):
    np.savez(path, **arrays)
    return path


def orbax(path, arrays):
    ocp = pytest.importorskip("orbax.checkpoint")
    tree: dict = {"net": [{}]}
    for name, array in arrays.items():
        place = tree["net"][0] if name.startswith("net") else tree
        place[name.rpartition(".")[2]] = array
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path.absolute(), tree)
    return path


def test_a_parameter_has_one_name_for_training_clipping_and_mapping(tmp_path):
    tree = {"net": [{"kernel": np.zeros(2, np.float32)}, {"value": np.zeros(3, np.float32)}]}
    tree |= {"net.0": np.zeros(4, np.float32)}
    names = leaf_names(tree)
    exactly = [f"^{re.escape(name)}$" for name in names]
    assert [matching_leaves(tree, pattern) for pattern in exactly] == [{0}, {1}, {2}]
    assert PerLayerClipping(tuple(exactly)).groups(tree) == [[0], [1], [2]]
    arrays = {str(k): np.full(np.shape(x), k, "<f4") for k, x in enumerate(jax.tree.leaves(tree))}
    rules = [f"{k}={name}" for k, name in enumerate(names)]
    found, _ = matched(tree, source(npz(tmp_path / "a.npz", arrays)), rules, ())
    assert [float(x[0]) for x in jax.tree.leaves(found)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("write", "name"), [(safetensors, "m"), (npz, "m.npz"), (orbax, "checkpoint")]
)
def test_every_format_gives_its_arrays_by_their_names(write, name, tmp_path):
    arrays = {k: v for k, v in WEIGHTS.items() if write is not npz or k != "rows"}
    found = source(write(tmp_path / name, arrays))
    assert found.shapes.keys() == arrays.keys()
    for array, read in found.read(list(arrays)).items():
        assert (found.shapes[array].shape, found.shapes[array].dtype) == (read.shape, read.dtype)
        np.testing.assert_array_equal(read, arrays[array])


def test_rules_say_what_becomes_of_arrays(tmp_path):
    found = source(safetensors(tmp_path / "m.safetensors", WEIGHTS))
    params, record = matched(LIKE, found, RULES, ())
    np.testing.assert_array_equal(params["dense"]["kernel"], WEIGHTS["net.0.weight"].T)
    np.testing.assert_array_equal(params["dense"]["bias"], WEIGHTS["net.0.bias"].astype(np.float32))
    np.testing.assert_array_equal(params["table"], WEIGHTS["rows"][:4].astype(np.float32))
    np.testing.assert_array_equal(params["head"], LIKE["head"])
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(params))
    assert record == {
        "taken": {
            "dense.bias": ["net.0.bias (from float16)"],
            "dense.kernel": ["net.0.weight"],
            "table": ["rows (from bfloat16)"],
        },
        "fresh": ["head"],
        "left_out": ["steps"],
    }


def test_parts_of_a_parameter_are_put_side_by_side_whatever_their_order(tmp_path):
    parts = {name: RNG.normal(size=(2, 3)).astype("<f4") for name in "vkq"}
    found = source(safetensors(tmp_path / "m", parts))
    rules = [f"{name}=qkv:T:{k}/3" for k, name in enumerate("qkv", 1)]
    params, _ = matched({"qkv": np.zeros((3, 6), np.float32)}, found, rules, ())
    np.testing.assert_array_equal(params["qkv"], np.hstack([parts[name].T for name in "qkv"]))
    with pytest.raises(ValueError, match="qkv has 3 parts, and 'v' is part 3"):
        matched({"qkv": np.zeros((3, 6), np.float32)}, found, ["q=", "k=", rules[2]], ())


def test_the_users_rules_come_before_equal_names_and_these_before_the_tasks(tmp_path):
    arrays = {name: np.full(2, k, "<f4") for k, name in enumerate(["a", "b", "x"], 1)}
    found, zero = source(safetensors(tmp_path / "m", arrays)), np.zeros(2, np.float32)
    like = {"a": zero, "b": zero}

    def values(rules, known=("=.*",)):
        return [float(leaf[0]) for leaf in matched(like, found, rules, known)[0].values()]

    assert values(["x="]) == [1, 2]
    assert values(["x="], ["a=b", "b=a"]) == [1, 2]
    assert values(["x=a", "a="]) == [3, 2]
    assert values(["=a"], ["x=a"]) == [0, 2]
    alike = {"a": {"b": np.zeros(1, np.float32)}, "a.b": np.zeros(2, np.float32)}
    names = {"a.b": np.ones(1, "<f4"), "other": np.ones(2, "<f4")}
    params, _ = matched(alike, source(safetensors(tmp_path / "n", names)), ["other=['a.b']"], ())
    assert [leaf.tolist() for leaf in jax.tree.leaves(params)] == [[1], [1, 1]]


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (RULES[1:], r"the parameter dense.kernel \(2, 3\) and holds arrays of .*: net.0.weight"),
        (RULES[:4], r"does not hold the parameter head \(2,\); init_map says"),
        ((*RULES[:3], RULES[4]), "holds arrays of no parameter: steps; init_map says"),
        (("rows=head", *RULES), "head is to start fresh, and to be 'rows'"),
        ((RULES[0][:-2], *RULES[1:]), r"\(2, 3\): 'net.0.weight' is \(3, 2\)"),
        (("rows=table", *RULES), r"table \(4, 2\): 'rows' is \(5, 2\)"),
        (("steps=dense.bias", *RULES), "dense.bias would be both 'net.0.bias' and 'steps'"),
        (("steps=dense.other", *RULES), "'steps' goes to 'dense.other', which is no parameter"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(rules, message, tmp_path):
    found = source(safetensors(tmp_path / "m.safetensors", WEIGHTS))
    with pytest.raises(ValueError, match=message):
        matched(LIKE, found, rules, ())


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros(3, "<i8"), "'w' is int64, and the parameter w float32"),
        (np.array([1, np.nan, 2], "<f4"), "not finite"),
        (np.array([1, 1e39, 2], "<f8"), "not finite"),
    ],
)
def test_numbers_that_are_no_parameters_are_refused(array, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        initial_params(Line().init(0), str(safetensors(tmp_path / "m", {"w": array})))


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("w", "it has no ="),
        ("(w=a", "unterminated"),
        (r"w=\1", "invalid group reference"),
        ("w=a:U", "after NAME come :T, :first and :K/N, got 'U'"),
        ("w=a:4/3", "no part 4 of 3"),
        ("@none.txt", "none.txt cannot be read"),
    ],
)
def test_what_is_no_rule_is_refused(rule, message):
    with pytest.raises(ValueError, match=f"init_map: .*{message}"):
        lines_of([rule])


def test_an_array_of_fields_is_no_array_of_numbers(tmp_path):
    npz(tmp_path / "m.npz", {"w": np.zeros(3, [("ω", "<f4")])})  # version 3 of the format
    with pytest.raises(ValueError, match=r"'w.npy' is no array of numbers"):
        source(tmp_path / "m.npz")


def test_a_file_of_rules_is_read_line_by_line(tmp_path):
    (tmp_path / "rules").write_text("# of a model\n\n(?=n)net=w \n=head\n")
    assert lines_of(["a=b", f"@{tmp_path / 'rules'}"]) == ("a=b", "(?=n)net=w", "=head")
    assert Rule.of("(?=n)net=w").pattern.fullmatch("net")
    (tmp_path / "rules").write_text("a=b\nw\n")
    with pytest.raises(ValueError, match=r"or =REGEX \(.*rules, line 2\): it has no ="):
        lines_of([f"@{tmp_path / 'rules'}"])


HOLE = [("w", 0), ("v", 8)]


def entry(name, value):
    return lambda header: header["w"].update({name: value})


@pytest.mark.parametrize(
    "change",
    [
        entry("data_offsets", [0, 8]),
        entry("data_offsets", [4, 16]),
        entry("data_offsets", [-12, 0]),
        entry("data_offsets", [0, 12, 24]),
        entry("data_offsets", [0, 1e400]),
        entry("shape", [-3, -1]),
        entry("shape", [True, 3]),
        entry("shape", [10**30, 3]),
        entry("shape", 3),
        entry("dtype", "F8_E4M3"),
        entry("dtype", ["F32"]),
        lambda header: header.update(w=None),
        lambda header: header.update(v=header["w"]),
        lambda header: header.pop("w"),
        lambda header: header.update(w={}),
        lambda header: header.update(  # four bytes between them are no array's
            {n: {"dtype": "F32", "shape": [1], "data_offsets": [k, k + 4]} for n, k in HOLE}
        ),
    ],
)
def test_a_header_that_lies_is_refused(change, tmp_path):
    path = safetensors(tmp_path / "m", {"w": np.ones(3, "<f4")}, change)
    with pytest.raises(ValueError, match=r"m is damaged, or of another format"):
        source(path)


def refused(model):
    """Whether a run would not start from a model; if so, in one line."""
    try:
        initial_params(Line().init(0), str(model))
    except (ValueError, FileNotFoundError) as error:
        return "\n" not in str(error)
    return False


@pytest.mark.parametrize(
    ("write", "name"), [(safetensors, "m"), (npz, "m.npz"), (orbax, "checkpoint")]
)
def test_a_file_that_was_cut_or_changed_never_ends_in_a_traceback(write, name, tmp_path):
    model = write(tmp_path / name, {"w": np.ones(3, "<f4")})
    files = [model] if model.is_file() else sorted(p for p in model.rglob("*") if p.is_file())
    found = []
    for file in files:
        content = file.read_bytes()
        for size in range(len(content)) if model.is_file() else [0, len(content) // 2]:
            file.write_bytes(content[:size])
            found.append(refused(model))
        for place in RNG.integers(0, len(content), 100 if model.is_file() else 2):
            file.write_bytes(content[:place] + bytes([content[place] ^ 85]) + content[place + 1 :])
            refused(model)
        file.write_bytes(content)
    assert all(found) if model.is_file() else any(found)
    assert not refused(model)


def config(**options):
    return config_of(learning_rate=1e-30, insecure_seed=3, **options)


@pytest.mark.parametrize("write", [safetensors, orbax])
def test_a_run_records_what_it_took_and_resumes_from_nothing_else(write, tmp_path):
    weights = {"net.0.bias": np.array([1, 2, 3], "<f2"), "rows": np.ones(2, "<f4")}
    model = write(tmp_path / "model", weights)
    (tmp_path / "rules").write_text("net.0.bias=w\nrows=\n")
    asked = config(init_from=str(model), init_map=(f"@{tmp_path / 'rules'}",))
    record = run(Line(), asked, tmp_path / "out")
    assert record["earlier"] == ["NO GUARANTEE (public rows need none)"]
    with np.load(tmp_path / "out" / "params.npz") as released:
        np.testing.assert_array_equal(released["['w']"], [1, 2, 3])
    kept = json.loads((tmp_path / "out" / "config.json").read_text())
    assert kept["initial"] == {
        "taken": {"w": ["net.0.bias (from float16)"]}, "fresh": [], "left_out": ["rows"],
    }  # fmt: skip
    assert kept["init_map"] == ["net.0.bias=w", "rows="]
    (tmp_path / "rules").unlink()  # resuming needs it no more
    cut = run_and_stop(Line(), asked.but(init_map=("net.0.bias=w", "rows=")), tmp_path / "cut")
    shutil.move(model, tmp_path / "kept")
    write(model, {**weights, "rows": np.zeros(2, "<f4")})
    with pytest.raises(ValueError, match="is not the model that the run is to start from"):
        resume(cut)
    shutil.rmtree(model) if model.is_dir() else model.unlink()
    shutil.move(tmp_path / "kept", model)
    resume(cut)


def test_a_model_of_another_digest_is_refused(tmp_path):
    model = npz(tmp_path / "m.npz", {"w": np.ones(3, np.float32)})
    with pytest.raises(ValueError, match=r"init_sha256: .* has the SHA-256"):
        run(Line(), config(init_from=str(model), init_sha256="0" * 64), tmp_path / "out")
