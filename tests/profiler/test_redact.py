"""Nothing that is shown holds a secret, however a URL or a library spells it; all else stays as it is."""

import re
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiler import RoutePackError
from profiler.redact import redacted

ODBC = quote_plus("DRIVER={ODBC};SERVER=h;UID=me;PWD=hunter2x;Encrypt=yes")


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("postgresql://me:hunter2x@host:1/db", "postgresql://me:***@host:1/db"),
        ("postgresql+psycopg://me:hunter2x@host/db", "postgresql+psycopg://me:***@host/db"),
        ("postgresql//me:hunter2x@host", "postgresql//me:***@host"),
        ("http://:hunter2x@host", "http://:***@host"),
        ("redis://me:hun/ter2x:hunter2x@hunter2x@host/0", "redis://me:***@host/0"),
        ("postgresql://host/db?user=me&password=hunter2x", "postgresql://host/db?user=me&password=***"),
        ("http://h/?token=hunter2x&page=2", "http://h/?token=***&page=2"),
        ("http://h/?key=hunter2x&sig=hunter2x;x", "http://h/?key=***&sig=***"),
        ("jdbc:x://h;user=me;password=hunter2x;a=1", "jdbc:x://h;user=me;password=***;a=1"),
        ("https://s3.x/b?X-Amz-Credential=AK/hunter2x&X-Amz-Date=1&X-Amz-Signature=hunter2x",
         "https://s3.x/b?X-Amz-Credential=***&X-Amz-Date=1&X-Amz-Signature=***"),
        (f"mssql+pyodbc:///?odbc_connect={ODBC}", "mssql+pyodbc:///?odbc_connect=DRIVER%3D%7BODBC%7D%3BSERVER%3Dh%3B"
         "UID%3Dme%3BPWD%3D***"),
        ("PWD={a;hunter2x};UID=me", "PWD=***;UID=me"),
        ("host=h password=hunter2x dbname=d", "host=h password=*** dbname=d"),
        (r"host=h password='hun\' hunter2x' dbname=d", "host=h password='***' dbname=d"),
        ("{'host': 'h', 'password': 'hunter2x', 'port': 1}", "{'host': 'h', 'password': '***', 'port': 1}"),
        (r'"{\"api_key\": \"hunter2x\", \"a\": 1}"', r'"{\"api_key\": \"***\", \"a\": 1}"'),
        ("Authorization: Bearer hunter2x", "Authorization: Bearer ***"),
        ("{'Authorization': 'Basic aHVudGVyMng='}", "{'Authorization': '***'}"),
        ("token is Bearer hunter2x.abc-def", "token is Bearer ***"),
        ("AWS_SECRET_ACCESS_KEY=hunter2x", "AWS_SECRET_ACCESS_KEY=***"),
        ("https://ghp_0123456789hunter2x@github.com/a", "https://***@github.com/a"),
        ("cut off: 'postgresql://me:hunter2x", "cut off: 'postgresql://me:***"),
        ("password: hunter2x was wrong", "password: *** was wrong"),
    ],
)  # fmt: skip
def test_a_secret_is_hidden_and_nothing_beside_it(text, safe):
    assert redacted(text) == safe
    assert redacted(safe) == safe
    for around in (f"could not open {text}", f"(a.b.Error) '{text}' [SQL: x]", f"first line\n{text}\nlast line"):
        assert not re.search("hunter2x|aHVudGVyMng", redacted(around))
        assert not re.search("hunter2x|aHVudGVyMng", str(RoutePackError(around)))


@pytest.mark.parametrize(
    "text",
    [
        "sqlite:////a/b.db is no file",
        "models:/j@champion cannot be had from http://127.0.0.1:5000.",
        "MLflow at http://host:5000: away; see http://[2001:db8::1]:80/, http://HOST/x",
        "Give postgresql://USER@HOST/DATABASE, or leave --storage out.",
        "{'num_experts_per_token': 8, 'max_tokens': 5} tokens=4 per_token=3",
        'FATAL: password authentication failed for user "me"',
        "journal:/a/b key=3 signature of step-01.npz",
        "the key `topology` is missing; unknown key `token_cap`",
    ],
)
def test_what_is_no_secret_stays(text):
    assert redacted(text) == text


@given(st.text(st.characters(codec="utf-8", exclude_categories=["C"]), min_size=3).filter(lambda s: s.strip("* ") == s))
def test_any_password_is_hidden_in_what_libraries_make_of_its_url(password):
    escaped = quote(password, safe="")
    for url in (f"postgresql://me:{escaped}@h/d", f"postgresql://me:{password}@h/d", f"http://h/x?password={escaped}"):
        marked = [f"<{word}>" for word in (password, escaped, repr(password)[1:-1])]
        told = redacted(f"{' '.join(marked)} and {url}", url)
        assert not any(word in told for word in marked)
        assert url not in redacted(url)
