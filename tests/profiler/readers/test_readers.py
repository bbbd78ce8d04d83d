"""Readers: what is no such format, or beyond its limits, is one line; what was written is read."""

import io
import json
import zipfile

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from profiler import RoutePackError
from profiler.readers import parse_json, read_json, read_npz, read_parquet, read_yaml

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n"
JSON_REFUSED = {
    "nested": ("[" * 20_000, "levels"),
    "closed": ("[" * 20_000 + "]" * 20_000, "levels"),
    "digits": ("9" * 5_000, "beyond 64 bits"),
    "wide": ("[9223372036854775808]", "beyond 64 bits"),
    "nan": ('{"a": NaN}', "NaN"),
    "infinity": ('{"a": -Infinity}', "-Infinity"),
    "large": ("[1e999]", "not finite"),
    "twice": ('{"a": 1, "a": 2}', "'a' is given twice"),
    "surrogate": ('["\\ud800"]', "no UTF-8"),
    "bytes": (b"\xff\xfe", "no UTF-8"),
    "empty": ("", "Expecting value"),
    "many": ("[" + "{}," * (1 << 21) + "1]", "values, at most 2,097,152"),
    "open strings": ('"' + '\\"' * 100_000 + "\\", "Unterminated"),
    "exponent": ("[-1E+999]", "not finite"),
    "keys": ("{" + ",".join(f'"{i}":1' for i in [*range(50_000), 7]) + "}", "'7' is given twice"),
    "constant in text": ('["]]]]", NaN]', "NaN"),
}
YAML_REFUSED = {
    "alias": ("a: &x [1]\nb: *x\n", "aliases"),
    "itself": ("a: &x [*x]\n", "aliases"),
    "tag": ("a: !!int ''\n", "tag"),
    "object": ("a: !!python/object/apply:os.system [ls]\n", "tag"),
    "timestamp": ("a: !!timestamp x\n", "tag"),
    "digits": (f"a: {'9' * 5_000}\n", "digits"),
    "wide": ("a: 9223372036854775808\n", "64 bits"),
    "nested": ("[" * 5_000, "levels"),
    "deep": ("a: " + "{a: " * 100 + "}" * 100, "levels"),
    "twice": ("a: 1\na: 2\n", "given twice"),
    "key": ("? [a]\n: 1\n", "no text"),
    "bytes": (b"\xff\xfe\x00", "UTF-8"),
    "large": ("a: 1e999\n", "not finite"),
    "surrogate": ('a: "\\ud800"\n', "UTF-8"),
    "no character": ('a: "\\UFFFFFFFF"\n', "too large"),
}


@pytest.mark.parametrize("case", JSON_REFUSED)
def test_json_beyond_the_limits_is_refused(case):
    text, said = JSON_REFUSED[case]
    with pytest.raises(RoutePackError, match=said) as refused:
        parse_json(text, "Plan p.json")
    assert str(refused.value).startswith("Plan p.json cannot be read: ")
    assert "\n" not in str(refused.value)


@settings(max_examples=200, deadline=None)
@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**63 - 1)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(st.characters(exclude_categories=["Cs"])),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    )
)
def test_json_reads_what_was_written(value):
    assert parse_json(json.dumps(value), "x") == value


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_a_value_or_one_line(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "any"
    path.write_bytes(data)
    for read in (read_json, read_yaml, read_npz, read_parquet):
        said = ""
        try:
            read(path, "Anything")
        except RoutePackError as error:
            said = str(error)
        assert "\n" not in said


WRITTEN = {
    read_json: lambda: json.dumps({"a": [1, -2.5, "t", None, True], "b": {"c": [[]], "d": 9e99}}).encode(),
    read_yaml: lambda: b"a: [1, -2.5, t, null]\nb: {c: [[]], d: 9e99}\n'e': \"f\"\n",
    read_npz: lambda: npz(a=np.arange(9), b=np.array(["x", "y"]), c=np.ones((2, 3))),
    read_parquet: lambda: parquet_bytes(),
}


def parquet_bytes():
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"a": [1, 2], "b": ["x", None], "c": [[1.5], []]}), sink)
    return sink.getvalue().to_pybytes()


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(list(WRITTEN)), st.data())
def test_changed_bytes_are_a_value_or_one_line(tmp_path_factory, read, draw):
    data = bytearray(WRITTEN[read]())
    for _ in range(draw.draw(st.integers(1, 4))):
        place = draw.draw(st.integers(0, len(data)))
        data[place : place + draw.draw(st.integers(0, 6))] = draw.draw(
            st.binary(max_size=6) | st.sampled_from([b"\xff" * 8, b"9" * 30, b"[" * 99, b"\x7f\xff\xff\xff"])
        )
    path = tmp_path_factory.getbasetemp() / "changed"
    path.write_bytes(data)
    said = ""
    try:
        read(path, "Anything")
    except RoutePackError as error:
        said = str(error)
    assert "\n" not in said


def test_errors_are_one_line_whatever_they_quote():
    assert str(RoutePackError("a\nb\x1b[2J\ud800 \u2028é")) == "a\\nb\\x1b[2J\\ud800 \\u2028é"


@pytest.mark.parametrize("case", YAML_REFUSED)
def test_yaml_that_stands_for_something_else_is_refused(tmp_path, case):
    text, said = YAML_REFUSED[case]
    (path := tmp_path / "r.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(RoutePackError, match=said):
        read_yaml(path, "Configuration")


def test_yaml_means_what_it_looks_like(tmp_path):
    text = "a: 1e-3\nb: -7\nc: 010\nd: 2024-13-45\ne: yes\nf: 1:30\ng: true\nh:\ni: [1_000, .5]\n"
    text += "j: {<<: {k: 1}}\nk: 0x10\n"
    (path := tmp_path / "r.yaml").write_text(text)
    found = read_yaml(path, "Configuration")
    assert list(found.values()) == [
        0.001, -7, "010", "2024-13-45", "yes", "1:30", True, None, [1000, 0.5], {"<<": {"k": 1}}, "0x10"
    ]  # fmt: skip
    path.write_text(yaml.safe_dump({"x": [1, 2.5, "t"], "y": {"z": False}}))
    assert read_yaml(path, "Configuration") == {"x": [1, 2.5, "t"], "y": {"z": False}}


@pytest.mark.parametrize("read", [read_json, read_yaml, read_npz, read_parquet])
def test_every_reader_names_lfs_pointers_folders_and_what_is_missing(tmp_path, read):
    (path := tmp_path / "pointer").write_bytes(LFS)
    with pytest.raises(RoutePackError, match=r"pointer is a Git LFS pointer.*git lfs pull"):
        read(path, "File")
    with pytest.raises(RoutePackError, match=r"File not found: .*/none"):
        read(tmp_path / "none", "File")
    with pytest.raises(RoutePackError):
        read(tmp_path, "File")


def npz(**arrays):
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


def member(header: bytes, data: bytes = b"") -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        text = header.ljust(117) + b"\n"
        archive.writestr("a.npy", b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + data)
    return buffer.getvalue()


def header(descr="<i8", shape="(3,)"):
    return f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}".encode()


def twice():
    buffer = io.BytesIO(npz(a=np.arange(3)))
    with zipfile.ZipFile(buffer, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("a.npy", archive.read("a.npy"))
    return buffer.getvalue()


def encrypted():
    data = bytearray(npz(a=np.arange(3)))
    data[6] |= 1
    data[data.rfind(b"PK\x01\x02") + 8] |= 1
    return bytes(data)


def packed(method):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        archive.writestr("a.npy", b"\x93NUMPY\x01\x00v\x00" + header().ljust(117) + b"\n" + bytes(24))
    return buffer.getvalue()


def long_directory():
    """A second end of the directory, for 64 bits, that states another size."""
    data = npz(a=np.arange(3))
    end = data.rfind(b"PK\x05\x06")
    fields = (44).to_bytes(8, "little") + bytes(12) + (1).to_bytes(8, "little") * 2 + (1 << 40).to_bytes(8, "little")
    wide = b"PK\x06\x06" + fields + bytes(8)
    locator = b"PK\x06\x07" + bytes(4) + end.to_bytes(8, "little") + (1).to_bytes(4, "little")
    return data[:end] + wide + locator + data[end:]


NPZ_REFUSED = {
    "bz2": lambda: packed(zipfile.ZIP_BZIP2),
    "lzma": lambda: packed(zipfile.ZIP_LZMA),
    "directory": long_directory,
    "no Unicode": lambda: npz(a=np.array([0xD800], np.uint32).view("U1")),
    "no character": lambda: npz(a=np.array([0x110000], np.uint32).view("U1")),
    "truncated": lambda: npz(a=np.arange(300))[:-40],
    "objects": lambda: npz(a=np.array([{}], dtype=object)),
    "huge shape": lambda: member(header(shape="(9223372036854775807, 9)")),
    "more than it holds": lambda: member(header(shape="(4,)"), bytes(24)),
    "less than it holds": lambda: member(header(shape="(2,)"), bytes(24)),
    "negative": lambda: member(header(shape="(-3,)"), bytes(24)),
    "an expression": lambda: member(b"{'descr': __import__('os').getcwd(), 'fortran_order': False, 'shape': (3,), }"),
    "parentheses": lambda: member(b"(" * 110),
    "times": lambda: member(header("<M8[s]"), bytes(24)),
    "records": lambda: npz(a=np.zeros(2, [("x", np.int32)])),
    "twice": twice,
    "encrypted": encrypted,
    "many": lambda: npz(**{f"a{i}": np.arange(2) for i in range(65)}),
    "damaged": lambda: npz(a=np.arange(3000)).replace(b"PK\x03\x04", b"PK\x03\x05"),
}


@pytest.mark.parametrize("case", NPZ_REFUSED)
def test_archives_that_lie_are_refused(tmp_path, case):
    (path := tmp_path / "a.npz").write_bytes(NPZ_REFUSED[case]())
    with pytest.raises(RoutePackError, match=r"File .* cannot be read: "):
        read_npz(path, "File")


def test_archives_are_judged_before_they_are_read(tmp_path):
    (path := tmp_path / "a.npz").write_bytes(npz(a=np.zeros(1 << 20), b=np.arange(3)))
    with pytest.raises(RoutePackError, match="8,388,632 bytes, at most 1,000 are read"):
        read_npz(path, "File", most=1000)
    assert read_npz(path, "File", {"b"}, most=1000)["b"].tolist() == [0, 1, 2]

    def refuse(headers):
        raise RoutePackError(f"{headers['a'].shape}")

    with pytest.raises(RoutePackError, match="1048576"):
        read_npz(path, "File", check=refuse)


def test_arrays_come_back_as_they_were(tmp_path):
    arrays = {
        "f": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "big": np.arange(3, dtype=">i4"),
        "text": np.array(["a", "öö"]),
        "none": np.zeros((0, 4), np.int16),
        "scalar": np.array(7.5),
        "nothing": np.array(["", ""]),
    }
    (path := tmp_path / "a.npz").write_bytes(npz(**arrays))
    found = read_npz(path, "File")
    for name, array in arrays.items():
        assert np.array_equal(found[name], array)
        assert found[name].shape == array.shape
        assert found[name].dtype.isnative
