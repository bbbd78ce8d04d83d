"""No secret in what is shown, logged or stored: texts of URLs and of libraries' errors pass through :func:`redacted`.

What a secret looks like is known by its surroundings (``user:SECRET@host``, ``password=SECRET``, ``Bearer SECRET``), in
plain and in percent-encoded text. What libraries make of a URL may have no such surroundings: who knows the URL
that a text is about gives it, and its secrets are hidden wherever they stand. When in doubt more is hidden.
"""

from __future__ import annotations

import re
from urllib.parse import quote, quote_plus, unquote, unquote_plus

HIDDEN = "***"
_NAMES = (
    r"(?:passw(?:or)?d|passphrase|pwd|secret|(?:api|access|account|private|shared|encryption)[_-]?key|credential|"
    r"signature|authorization|(?<!per_)(?<!per-)token(?![\w]))"
)
"""What names of secrets hold; a count per token is none."""
_IS = r"(?:=|%(?:25)*3D)"
_QUOTED = r"(?P<quote>\\*[\"'])(?:(?!(?P=quote))(?:\\.|[^\\]))*"
_RULES = tuple(
    re.compile(pattern, re.IGNORECASE | re.DOTALL)
    for pattern in (
        # scheme://user:SECRET@host up to the last @ of the word; long user names without a password are tokens
        r"(?P<before>//[^\s/@:\"'<>]{0,99}:)[^\s\"'<>]{1,2000}(?=@)",
        r"(?P<before>://)[^\s/@:\"'<>*]{16,2000}(?=@)",
        # what stands where a port would and is none: the rest of the URL was cut off, or holds no host
        r"(?P<before>://[^\s/@:\"'<>\[]*:)(?!\d*(?:\W|$))(?!\*{3}@)[^\s\"'<>]+",
        rf"(?P<before>[?&](?:[\w.-]{{0,60}}{_NAMES}[\w.-]{{0,40}}|key|pass|pw|sig|auth|code)=)[^&\s\"'<>]+",
        r"(?P<before>(?:[;\s](?:pass|pw)|;(?:key|sig))=)[^&;\s\"'<>]+",
        # inside a quoted URL the rest of the parameter goes with the secret
        rf"(?P<before>{_NAMES}[\w-]{{0,40}}%(?:25)*3D)[^&\s\"'<>]+",
        rf"(?P<before>{_NAMES}[\w-]{{0,40}}(?:\\*[\"']\s*[:=]|{_IS})\s*){_QUOTED}",
        rf"(?P<before>{_NAMES}[\w-]{{0,40}}{_IS}\s*)\{{[^}}]*\}}?",
        rf"(?P<before>{_NAMES}[\w-]{{0,40}}(?:\\*[\"']\s*:\s*|{_IS}))(?!\\*[\"'\{{])[^\s&;\"'<>]+",
        r"(?P<before>authorization\\*[\"']?\s*[:=]\s*(?:\w+\s+)?)(?!\\*[\"'])[^\s\"',}]+",
        r"(?P<before>\b(?:password|passwd|pwd|passphrase|secret|api[_-]?key):\s+)(?!\\*[\"'])[^\s&;\"'<>]+",
        r"(?P<before>\bbearer\s+)[\w.~+/=%-]{4,}",
        r"(?P<before>\bbasic\s+)(?=\S*(?-i:[A-Z0-9=]))[\w+/=-]{6,}",
    )
)
_LONG = 6
"""Characters from which on a known secret is hidden inside of words too."""


def redacted(text: object, *urls: str) -> str:
    """Return a text without the secrets that it shows, and without those that ``urls`` hold.

    ``urls`` are what the text is about. A text that is itself a URL needs none.
    """
    found = str(text)
    own = (found,) if re.match(r"[\w+.-]+:/*/", found) else ()
    for value in sorted({v for url in (*urls, *own) for v in _secrets(url)}, key=len, reverse=True):
        bounds = ("", "") if len(value) >= _LONG else (r"(?<!\w)", r"(?!\w)")
        found = re.sub(f"{bounds[0]}{re.escape(value)}{bounds[1]}", HIDDEN, found)
    for rule in _RULES:
        found = rule.sub(lambda match: match["before"] + match.groupdict().get("quote", "") + HIDDEN, found)
    return found


def _secrets(url: str) -> set[str]:
    """Return the secrets of a URL as it spells them, without its escapes, and the parts that a parser may take."""
    body, _, query = url.partition("?")
    found = {match[2] for match in re.finditer(rf"({_NAMES}[\w-]*|[?&;](?:key|pass|pw|sig))=([^&]*)", url, re.I)}
    for parameter in map(unquote_plus, query.split("&")):  # one may hold settings of its own: odbc_connect
        found.update(re.findall(rf"{_NAMES}[\w-]*=([^;]*)", parameter, re.I))
    for part in (url, body):  # the last @ may be one of the query
        if after := re.search(r"//[^/@:]*:(.*)@", part, re.DOTALL):
            found |= {after[1], *re.split(r"[@/?#:]", after[1])[1:]}
    found |= {unquote(value) for value in found} | {unquote_plus(value) for value in found}
    found |= {made for value in found for made in (repr(value)[1:-1], quote(value, safe=""), quote_plus(value))}
    return {value for value in found if value.strip("* ")}
