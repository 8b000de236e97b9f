"""Mask secrets in printed and recorded text.

A secret is the value of a variable such as ``AWS_SESSION_TOKEN``, or a value that was read from a
file and passed to `remember`. Passwords of URLs, presigned signatures, Authorization headers and
well-known tokens are also recognized in any text.

`evernear.common.output` masks what evernear prints, `mask_streams` what libraries print, and
`copy_masked` the output of a child process.
"""

import base64
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import IO, Any, TextIO, cast
from urllib.parse import quote, unquote

MASK = "***"
MIN_CHARACTERS = 8
"""A shorter value, such as "test", also occurs in ordinary words, so masking it would garble the
output. It cannot be a valid password: NIST SP 800-63B requires at least 8 characters."""
OWN_NAMES = frozenset({"evernear"})
"""Never masked, because every line of output may contain them."""
LINE_MAX_BYTES = 2**16
"""Longer lines are written in parts. The last `HELD_BYTES` of a part wait for the next, because a
secret may begin there."""
HELD_BYTES = 2**15

# Also variables of programs that evernear does not know. Names that end in _FILE, _PATH and so on
# contain locations, and Kubernetes creates TOKEN_SERVICE_HOST for a Service.
_SECRET_NAME = re.compile(
    r"^(?!.*(_(FILE|PATH|DIR|NAME|SOCK|URL|URI|ENDPOINT|HOST|ADDR|PROTO)$|_SERVICE_|_PORT(_|$)))"
    r".*(TOKEN|SECRET|PASS(WORD|WD|PHRASE)?(_|$)|COOKIE|CREDENTIAL|AUTHORIZATION|CONNECTION_STRING|HEADERS"
    r"|API_?KEY|ACCESS_KEY|PRIVATE_KEY|_KEY$|^AWS_ACCESS_KEY_ID$)",
    re.IGNORECASE,
)
_SETTING = re.compile(r"EVERNEAR_(?!(MILVUS_)?TOKEN$)", re.IGNORECASE)
"""Settings are not masked: ``EVERNEAR_KUBERNETES__TOKEN_SECRET`` is the name of a Secret."""
_QUERY_NAMES = (
    r"x-amz-(?:signature|credential|security-token)|x-goog-(?:signature|credential)|awsaccesskeyid|signature|sig|"
    r"(?:access_|id_|refresh_)?token|(?:x-)?api[_-]?key|password|passwd|(?:client_)?secret"
)
_ASSIGNED = r"[\"']?\s*[:=,]\s*b?[\"']?"
_FORMS = [
    re.compile(form, re.IGNORECASE)
    for form in (
        # A password may contain a slash, as S3 secret keys do. Digits before a slash are a port.
        r"(://)(?:[^/?#\s@\"'<>\\]{1,4000}|[^/?#\s:@\[]{0,200}:(?!\d{1,5}\b)[^\s@\"'<>\\]{1,400})(?=@)",
        rf"((?:[?&;]|u0026|\bx-amz-)(?:{_QUERY_NAMES})=|\bx-(?:amz-security-token|api-key|auth-token){_ASSIGNED})"
        r"[^\s\"'<>\\&,;]{4,4000}",
        rf"((?:authorization|cookie){_ASSIGNED})"
        r"(?:(?:aws4-hmac-sha256|basic|bearer|digest|negotiate|token)\s+|[^\s\"'=;]{1,200}=)[^\"'\r\n\\]{1,4000}",
        r"(\bbearer\s+)(?=[^\s\"']*\d)[\w.~+/=-]{16,4000}",
        r"(\b)(?:eyJ[\w-]{8,2000}\.[\w-]{8,2000}\.[\w-]{0,1000}|(?:xox[a-z]|xapp|glpat)-[\w-]{10,200}"
        r"|hf_[a-z0-9]{20,200}|gh[opsur]_[a-z0-9]{30,200}|github_pat_\w{30,200}|(?-i:A[KS]IA[A-Z0-9]{16})\b)",
    )
]
"""Secrets that are recognized in any text. The group before each is kept."""

_remembered: set[str] = set()
_forms: tuple[str, ...] = ()


def configure_masking(environment: MutableMapping[str, str] = os.environ) -> None:
    """Strip all variables, and remember their secrets. A secret made with ``echo`` ends in a line
    break, which is invalid in an HTTP header, so libraries would fail with an error that quotes it.
    A variable of only spaces is removed."""
    for name, value in list(environment.items()):
        if value != (stripped := value.strip()):
            environment[name] = stripped
            if not stripped:
                del environment[name]
    remember(*secrets_of(environment))


def secrets_of(environment: Mapping[str, str]) -> Iterator[str]:
    """Values of variables whose names suggest a secret, and passwords and keys in URLs."""
    for name, value in environment.items():
        if is_secret(name, value):
            yield from _parts(value)
        for form in _FORMS:
            for match in form.finditer(value):
                yield from _parts(match[0].removeprefix(match[1]))


def _parts(secret: str) -> Iterator[str]:
    """The secret and, in a login or in a list of cookies or headers, its values."""
    yield secret
    for part in re.split(r"[;,\s]+", secret):
        if not part.startswith("-----"):  # the first or last line of a key
            yield from (part, part.partition("=")[2], part.partition(":")[2])


def is_secret(name: str, value: str) -> bool:
    # pathlib raises an error if a secret that begins like a path is not a valid one.
    is_path = value.startswith(("/", "./", "~/")) and os.path.exists(os.path.expanduser(value))  # noqa: PTH110, PTH111
    return bool(_SECRET_NAME.match(name)) and not _SETTING.match(name) and not is_path


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


def _forms_of(secret: str) -> Iterator[str]:
    """As it is, as URLs and JSON quote it, and in Basic authorization. One from a URL is quoted."""
    data = os.fsencode(secret)
    yield from (secret, unquote(secret), quote(data, safe=""), json.dumps(secret)[1:-1])
    for before in range(3):  # preceding bytes, such as "user:", shift the encoding
        encoded = base64.b64encode(bytes(before) + data).decode()
        last = len(encoded.rstrip("=")) - (1 if (before + len(data)) % 3 else 0)
        yield encoded[(0, 2, 3)[before] : last]


def mask(text: str) -> str:
    """Idempotent."""
    for form in _forms:
        text = text.replace(form, MASK)
    return _mask_forms(text)


def mask_values(value: Any) -> Any:
    """A JSON value with secrets masked in its strings. Keys are kept, because a document could not
    be read again if a password that is part of a key were masked there."""
    if isinstance(value, str):
        return mask(value)
    if isinstance(value, Mapping):
        return {name: mask_values(each) for name, each in cast("Mapping[str, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [mask_values(each) for each in cast("list[Any]", value)]
    return value


def has_form_of_secret(text: str) -> bool:
    """Such as a URL with a password."""
    return _mask_forms(text) != text


def _mask_forms(text: str) -> str:
    for form in _FORMS:
        text = form.sub(rf"\1{MASK}", text)
    return text


class MaskedStream:
    """Masks all text written to it, and otherwise behaves like ``unmasked``."""

    def __init__(self, unmasked: TextIO) -> None:
        self.unmasked = unmasked

    def write(self, text: str) -> int:
        self.unmasked.write(mask(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unmasked, name)


def mask_streams() -> None:
    """Start masking all text that Python code prints, including tracebacks and libraries' log
    messages. Entry points call this. Importing evernear does not replace a program's streams."""
    configure_masking()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, MaskedStream):
            setattr(sys, name, MaskedStream(stream))


def copy_masked(source: IO[bytes], path: Path) -> None:
    """Append a child process's masked output to ``path``, until every writer has closed ``source``.
    If the disk is full, the rest is discarded, because a full pipe would block the child."""
    with source:
        with path.open("ab", buffering=0) as log:
            for text in _masked_parts(source):
                try:
                    log.write(text)
                except OSError:
                    break
        while source.read(LINE_MAX_BYTES):
            pass


def _masked_parts(source: IO[bytes]) -> Iterator[bytes]:
    """Complete, masked lines from ``source``."""
    rest = b""
    while chunk := os.read(source.fileno(), LINE_MAX_BYTES):
        rest += chunk
        end = max(rest.rfind(b"\n"), rest.rfind(b"\r")) + 1
        if not end and len(rest) > LINE_MAX_BYTES:
            rest = _masked_bytes(rest)  # so that no secret is cut
            end = len(rest) - HELD_BYTES
        yield _masked_bytes(rest[:end])
        rest = rest[end:]
    yield _masked_bytes(rest)


def _masked_bytes(data: bytes) -> bytes:
    return os.fsencode(mask(os.fsdecode(data)))
