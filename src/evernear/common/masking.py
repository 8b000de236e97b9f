"""Strip whitespace from secrets in the environment, and mask them in printed or recorded text.

A secret is the value of a variable such as ``AWS_SESSION_TOKEN`` or ``KFP_COOKIES``, the password
of a URL in any variable, or a value that was read from a file and passed to `remember`. Others,
such as a presigned URL's signature or an Authorization header, are recognized by their form.

`evernear.common.output` masks printed, logged and recorded text, `mask_streams` tracebacks and
libraries' output, `copy_masked` a child process that writes directly to a file descriptor.
"""

import base64
import html
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import IO, Any, TextIO, cast
from urllib.parse import parse_qsl, quote, quote_plus, unquote, urlsplit

from evernear.errors import SettingsError

MASK = "***"
MIN_CHARACTERS = 8
"""Minimum length of a masked value.

A shorter one, such as "test", also occurs in ordinary words, so masking it would garble the output.
It cannot be a valid password: NIST SP 800-63B requires at least 8 characters.
"""
PART_CHARACTERS = 1024
"""Longer secrets are split, so that a part's quoted forms are below `HELD_CHARACTERS`."""
HELD_CHARACTERS = 8192
"""The end of a long line that `copy_masked` holds back, because a secret may begin there."""
OWN_NAMES = frozenset({"evernear"})
"""Never masked, because every line of output may contain them."""
CHUNK_BYTES = 2**16
LINE_MAX_BYTES = 2**16
"""Longer lines are written in parts, so that `copy_masked` needs little memory."""

# Also variables of programs that evernear does not know. Names that end in _FILE, _PATH and so on
# contain locations, and Kubernetes creates TOKEN_SERVICE_HOST for a Service.
_SECRET_NAME = re.compile(
    r"^(?!.*(_(FILE|PATH|DIR|NAME|SOCK|URL|URI|ENDPOINT|HOST|ADDR|PROTO)$|_SERVICE_|_PORT(_|$)))"
    r".*(TOKEN|SECRET|PASS(WORD|WD|PHRASE)?(_|$)|COOKIE|CREDENTIAL|AUTHORIZATION|CONNECTION_STRING|HEADERS"
    r"|API_?KEY|ACCESS_KEY|PRIVATE_KEY|_KEY$)",
    re.IGNORECASE,
)
_SETTING = re.compile(r"EVERNEAR_(?!(MILVUS_)?TOKEN$)", re.IGNORECASE)
"""Settings are not masked: ``EVERNEAR_KUBERNETES__TOKEN_SECRET`` is the name of a Secret."""
_STRIPPED = re.compile(
    r"(AWS|EVERNEAR|KFP|KF_PIPELINES|KUBECONFIG|SLACK|MLFLOW|MODEL_REGISTRY|HF|HUGGING|OTEL|MINIO)(_.*|$)"
    r"|(.*_)?(HTTPS?|ALL|NO)_PROXY|SSL_CERT_(FILE|DIR)|REQUESTS_CA_BUNDLE",
    re.IGNORECASE,
)
"""Variables that contain an address, a name or a path, which never end in a space."""
_URL = re.compile(r"[a-z][a-z0-9+.-]*://[^\s,]+", re.IGNORECASE)
_QUERY_NAMES = (
    r"x-amz-(?:signature|credential|security-token)|x-goog-(?:signature|credential)|awsaccesskeyid|signature|sig|"
    r"(?:access_|id_|refresh_)?token|(?:x-)?api[_-]?key|password|passwd|(?:client_)?secret"
)
_VALUE = r"[^\s\"'<>\\&,;]{4,4000}"
_PATTERNS = [
    (needles.split(), re.compile(pattern, re.IGNORECASE))
    for needles, pattern in (
        ("@", r"://(?P<secret>[^/?#\s@\"'<>\\]{1,4000})@"),
        # A password with a slash, such as an S3 secret key. Digits before the slash are a port.
        ("@", r"://(?P<secret>[^/?#\s:@\[]{0,200}:(?!\d{1,5}\b)[^\s@\"'<>\\]{1,4000})@"),
        ("token= sig= signature= credential= key= keyid= passwd= password= secret=",
         rf"(?:[?&;]|u0026|\bx-amz-)(?:{_QUERY_NAMES})=(?P<secret>{_VALUE})"),
        ("aws4-hmac", r"(?:credential|signature)=(?P<secret>[^\s\"'&,;]{4,4000})"),
        ("authorization", r"authorization\b[\"']?\s*[:=,]\s*b?[\"']?(?P<secret>(?:basic|bearer|digest|negotiate|token)"
         r"\s+[^\"'\r\n\\]{4,4000})"),
        ("cookie", r"cookie\b[\"']?\s*[:=,]\s*b?[\"']?(?P<secret>[^\s\"'=;]{1,200}=[^\"'\r\n\\]{1,3000})"),
        ("-token -key",
         rf"\bx-(?:amz-security-token|api-key|auth-token)\b[\"']?\s*[:,]\s*b?[\"']?(?P<secret>{_VALUE})"),
        ("bearer", r"\bbearer\s+(?P<secret>(?=[^\s\"']*\d)[\w.~+/=-]{16,4000})"),
        ("eyj", r"\b(?P<secret>eyJ[\w-]{8,2000}\.[\w-]{8,2000}\.[\w-]{0,1000})"),
        ("xox xapp- glpat-", r"\b(?P<secret>(?:xox[a-z]|xapp|glpat)-[\w-]{10,200})"),
        ("hf_ gh", r"\b(?P<secret>hf_[a-z0-9]{20,200}|gh[opsur]_[a-z0-9]{30,200}|github_pat_\w{30,200})"),
        ("akia asia", r"\b(?P<secret>(?-i:A[KS]IA[A-Z0-9]{16}))\b"),
    )
]  # fmt: skip
"""Patterns of secrets recognized by their form. Every match contains one of the pattern's
lower-case texts, ignoring case."""

_remembered: set[str] = set()
_forms: tuple[str, ...] = ()


def configure_masking(environment: MutableMapping[str, str] = os.environ) -> None:
    """Strip whitespace from this process's credentials and addresses, and remember the secrets.

    A secret created with ``echo`` ends in a line break, which an HTTP header may not contain, so
    libraries would fail with an error that quotes it. A variable of only spaces is removed.
    """
    for name, value in list(environment.items()):
        stripped = value.strip()
        if stripped != value and (is_secret(name, stripped) or _STRIPPED.fullmatch(name) or "://" in value):
            environment[name] = stripped
            if not stripped:
                del environment[name]
    remember(*secrets_of(environment))


def secrets_of(environment: Mapping[str, str]) -> Iterator[str]:
    """Values of variables whose names suggest a secret, and passwords and keys in URLs."""
    for name, value in environment.items():
        if is_secret(name, value):
            yield value
            yield from _parts(value)
        if "://" in value:
            for url in _URL.findall(value):
                yield from _secrets_of_url(url)


def remember(*secrets: str) -> None:
    """Start masking ``secrets``, including their quoted and escaped forms."""
    global _forms
    if not _remembered.issuperset(secrets):
        _remembered.update(secrets)
        _forms = forms_of(_remembered)


def forms_of(secrets: Iterable[str]) -> tuple[str, ...]:
    """The texts to mask for ``secrets``, longest first."""
    chosen = {secret for secret in map(str.strip, secrets) if len(secret) >= MIN_CHARACTERS} - OWN_NAMES
    forms = {form for secret in chosen for form in _forms_of(secret) if len(form) >= MIN_CHARACTERS}
    return tuple(sorted(forms, key=len, reverse=True))


def usable(name: str, environment: Mapping[str, str] = os.environ) -> str:
    """The secret in the variable ``name``, or an empty string. A character that is invalid in HTTP
    headers, such as a line break, is a `SettingsError`."""
    value = environment.get(name, "").strip()
    if not all(" " <= character <= "~" for character in value):
        raise SettingsError(f"{name} contains a line break, or another character that is not ASCII; set it again.")
    return value


def mask(text: str) -> str:
    """Idempotent."""
    spans = sorted(_spans(text))
    if not spans:
        return text
    pieces: list[str] = []
    position = 0
    for start, end in spans:
        if start >= position:
            pieces += [text[position:start], MASK]
        position = max(position, end)
    return "".join([*pieces, text[position:]])


def has_form_of_secret(text: str) -> bool:
    """Such as a URL with a password."""
    return next(_spans_by_form(text), None) is not None


class MaskedStream:
    """Masks all text written to it, and otherwise behaves like ``stream``."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @property
    def unmasked(self) -> TextIO:
        """For a secret that the user wants to print."""
        return self._stream

    def write(self, text: str) -> int:
        """Returns the number of characters in ``text``, not in the masked text."""
        self._stream.write(mask(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def mask_streams() -> None:
    """Start masking all text that Python code prints, including tracebacks and libraries' log
    messages. Entry points call this. Importing evernear does not replace a program's streams."""
    configure_masking()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, MaskedStream):
            setattr(sys, name, cast(TextIO, MaskedStream(stream)))


def copy_masked(source: IO[bytes], path: Path) -> None:
    """Append a child process's masked output to ``path``, until every writer has closed ``source``.

    Complete lines are written immediately, and at most `LINE_MAX_BYTES` of an incomplete one are
    kept. If the disk is full, the rest is discarded, because a full pipe would block the child.
    """
    with source:
        with path.open("ab", buffering=0) as log:
            for text in masked_parts(source):
                try:
                    log.write(text)
                except OSError:
                    break
        while source.read(CHUNK_BYTES):
            pass


def masked_parts(source: IO[bytes]) -> Iterator[bytes]:
    """Complete, masked lines from ``source``. A very long line is split."""
    rest = b""
    while chunk := os.read(source.fileno(), CHUNK_BYTES):
        rest += chunk
        end = max(rest.rfind(b"\n"), rest.rfind(b"\r")) + 1
        if not end and len(rest) > LINE_MAX_BYTES:
            end = _cut(rest)
        yield _masked_bytes(rest[:end])
        rest = rest[end:]
    yield _masked_bytes(rest)


def _cut(line: bytes) -> int:
    """A position in a long ``line`` outside every secret, even one whose end was not read yet."""
    text = _decode(line)
    cut = len(text) - HELD_CHARACTERS
    for start, end in sorted(_spans(text), reverse=True):
        if start < cut < end:
            cut = start
    return len(_encode(text[:cut]))


def _masked_bytes(data: bytes) -> bytes:
    return _encode(mask(_decode(data))) if data else data


def _decode(data: bytes) -> str:
    return data.decode(errors="surrogateescape")


def _encode(text: str) -> bytes:
    return text.encode(errors="surrogateescape")


def _spans(text: str) -> Iterator[tuple[int, int]]:
    """The start and end of each secret, which may overlap."""
    for form in _forms:
        start = text.find(form)
        while start >= 0:
            yield start, start + len(form)
            start = text.find(form, start + len(form))
    yield from _spans_by_form(text)


def _spans_by_form(text: str) -> Iterator[tuple[int, int]]:
    lowered = text.lower()
    for needles, pattern in _PATTERNS:
        if any(needle in lowered for needle in needles):
            for match in pattern.finditer(text):
                if match["secret"] != MASK:
                    yield match.span("secret")


def is_secret(name: str, value: str) -> bool:
    if name == "AWS_ACCESS_KEY_ID":
        return True
    return bool(_SECRET_NAME.match(name)) and not _SETTING.match(name) and not _is_path(value)


def _is_path(value: str) -> bool:
    try:
        return value.startswith(("/", "./", "~/")) and Path(value).expanduser().exists()
    except (OSError, ValueError, RuntimeError):
        return False


def _parts(secret: str) -> Iterator[str]:
    """The values in a list of cookies or headers, or the lines of a key."""
    for part in re.split(r"[;,\s]+", secret):
        if not part.startswith("-----"):
            yield part
            yield part.partition("=")[2]
            yield part.partition(":")[2]


def _secrets_of_url(url: str) -> Iterator[str]:
    try:
        parts = urlsplit(url)
        password = parts.password
    except ValueError:
        return
    if "@" in parts.netloc:
        login = parts.netloc.rpartition("@")[0]
        yield from (login, unquote(login))
        yield from (password, unquote(password)) if password else ()
    for name, value in parse_qsl(parts.query):
        if re.fullmatch(_QUERY_NAMES, name, re.IGNORECASE):
            yield value


def _forms_of(secret: str) -> Iterator[str]:
    """How programs quote ``secret``: in a URL, JSON, HTML, Python and Basic authorization."""
    for start in range(0, len(secret), PART_CHARACTERS):
        part = secret[start : start + PART_CHARACTERS]
        data = _encode(part)
        yield part
        for quoted in (quote(data), quote(data, safe=""), quote_plus(data)):
            yield from (quoted, re.sub("%..", lambda escape: escape[0].lower(), quoted))
        yield unquote(part)
        yield from (json.dumps(part)[1:-1], html.escape(part), repr(part)[1:-1], repr(data)[2:-1])
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            for before in range(3):  # preceding bytes, such as "user:", shift the encoding
                encoded = encode(bytes(before) + data).decode()
                last = len(encoded.rstrip("=")) - (1 if (before + len(data)) % 3 else 0)
                yield encoded[(0, 2, 3)[before] : last]
