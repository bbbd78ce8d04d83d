"""One reader per format: what is damaged, absurd or of another kind is refused in one line before it is allocated."""

from profiler.readers.json_text import parse_json, read_json
from profiler.readers.npz import Header, read_npz
from profiler.readers.parquet import read_parquet
from profiler.readers.raw import read_bytes
from profiler.readers.schema import build
from profiler.readers.yaml_text import read_yaml

__all__ = ["Header", "build", "parse_json", "read_bytes", "read_json", "read_npz", "read_parquet", "read_yaml"]
