"""Control access to the console by a token or a trusted proxy, and protect the console against
other sites by a CSRF token and response headers."""

import hmac
import re
import secrets
from collections.abc import Iterable
from ipaddress import ip_address, ip_network
from typing import get_args
from urllib.parse import urlencode, urlsplit

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from evernear.common.frozen import Frozen
from evernear.common.output import printable
from evernear.settings import Settings
from evernear.settings.triggers import Right

CSRF_HEADER = "x-evernear-csrf"
_TOKEN_COOKIE = "evernear-token"  # noqa: S105 - its name
_CSRF_COOKIE = "evernear-csrf"
_OPEN_PATHS = ("/health",)
"""Paths without authentication, for an orchestrator's probes."""
_SAFE_METHODS = ("GET", "HEAD")
_FOREIGN = "The request does not come from this console; reload the page."
_DEFAULT_PORTS = {"http": 80, "https": 443}
_NAME_MAX_CHARACTERS = 200
_SLACK_ID = re.compile(r"[UWSCG][A-Z0-9]{8,}")
"""An entry for Slack. A user of the proxy who has chosen this name does not get its rights."""
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self';"
    " form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class User(Frozen):
    name: str
    may: frozenset[Right]


class SignIn:
    """Identifies ``owner`` by the token, or each user by a header from a trusted proxy."""

    def __init__(self, settings: Settings, token: str, owner: str) -> None:
        self._settings = settings.console
        self._permissions = settings.permissions
        self._token = token
        self._owner = User(name=owner, may=frozenset(get_args(Right)))
        self._proxies = [ip_network(proxy) for proxy in settings.console.trusted_proxies]

    @property
    def by_token(self) -> bool:
        return not self._settings.identity_header

    def identify(self, request: Request) -> User | None:
        """The user, or None if the request is not authenticated."""
        if self.by_token:
            return self._owner if self._is_token(request.cookies.get(_TOKEN_COOKIE, "")) else None
        names = request.headers.getlist(self._settings.identity_header)
        if len(names) != 1 or not self._is_proxy(request) or not 0 < len(names[0]) <= _NAME_MAX_CHARACTERS:
            return None
        rights: tuple[Right, ...] = get_args(Right)
        return User(
            name=names[0],
            may=frozenset(right for right in rights if _is_in(names[0], getattr(self._permissions, right))),
        )

    def sign_in(self, request: Request) -> Response | None:
        """The response to the sign-in URL that `evernear console` printed: a cookie, and a redirect
        to the same URL without the token."""
        if not self.by_token or not self._is_token(request.query_params.get("token", "")):
            return None
        rest = urlencode([(key, value) for key, value in request.query_params.multi_items() if key != "token"])
        response = RedirectResponse(f"{request.url.path}{f'?{rest}' if rest else ''}", 303)
        _set_cookie(response, request, _TOKEN_COOKIE, self._token)
        return response

    def hosts(self, request: Request) -> list[str]:
        """Host names, with ports unless these are the default, under which the browser may know the
        console: as the request says, or also as a trusted proxy forwards it."""
        hosts = [request.headers.get("host", "")]
        if self._is_proxy(request) and (header := request.headers.get("x-forwarded-host")):
            forwarded, port = header.partition(",")[0].strip(), request.headers.get("x-forwarded-port", "")
            hosts += [forwarded, f"{forwarded}:{port}"] if port else [forwarded]
        return hosts

    def _is_token(self, presented: str) -> bool:
        return hmac.compare_digest(presented.encode(), self._token.encode())

    def _is_proxy(self, request: Request) -> bool:
        try:
            address = ip_address(request.client.host if request.client else "")
        except ValueError:
            return False
        mapped = getattr(address, "ipv4_mapped", None)
        return any((mapped or address) in network for network in self._proxies)


class Guard:
    """ASGI middleware in front of every page.

    The middleware identifies the user and stores the result in ``request.state.user``. A
    state-changing request must come from a console page. As proof, the request's `CSRF_HEADER`
    contains the random value of a cookie that other sites cannot read. Browsers add a custom header
    to a cross-site request only if the target site permits the header, which the console never
    does.
    """

    def __init__(self, app: ASGIApp, sign_in: SignIn) -> None:
        self._app = app
        self._sign_in = sign_in

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        csrf = request.cookies.get(_CSRF_COOKIE, "")
        is_new = not csrf
        csrf = csrf or secrets.token_urlsafe(24)

        async def send_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
                if is_new and request.method in _SAFE_METHODS:
                    cookie = Response()
                    _set_cookie(cookie, request, _CSRF_COOKIE, csrf)
                    headers.append("set-cookie", cookie.headers["set-cookie"])
            await send(message)

        if request.url.path in _OPEN_PATHS:
            await self._app(scope, receive, send_headers)
            return
        response = self._sign_in.sign_in(request) if request.method in _SAFE_METHODS else None
        user = self._sign_in.identify(request)
        if response is None and user is None:
            response = PlainTextResponse(
                "Open the URL that `evernear console` printed; its token is missing or invalid."
                if self._sign_in.by_token
                else "The proxy in front of the console sent no name; sign in there.",
                403,
            )
        if response is None and request.method not in _SAFE_METHODS:
            fault = self._another_host(request) or ("" if not is_new and _is_ours(request, csrf) else _FOREIGN)
            response = PlainTextResponse(fault, 403) if fault else None
        if response is None:
            scope.setdefault("state", {}).update(user=user, csrf=csrf)
            response = self._app
        await response(scope, receive, send_headers)

    def _another_host(self, request: Request) -> str:
        """The error message if a page of another host sent the request, otherwise an empty string.
        Browsers that send Sec-Fetch-Site have compared both addresses of the request themselves, so
        what a proxy did to the header Host does not matter."""
        origin = request.headers.get("origin")
        if origin is None or "sec-fetch-site" in request.headers:
            return ""
        hosts, shown = self._sign_in.hosts(request), _address(origin)
        if shown and any(shown == _address(f"{urlsplit(origin).scheme}://{host}") for host in hosts):
            return ""
        return (
            f"The browser shows {printable(origin, _NAME_MAX_CHARACTERS)}, but the console was called as "
            f"{printable(hosts[-1], _NAME_MAX_CHARACTERS)}. If that is a proxy's doing, let it send the header Host as "
            "it came (nginx: proxy_set_header Host $http_host;), or X-Forwarded-Host from an address in "
            "console.trusted_proxies."
        )


def require(request: Request, right: Right) -> User:
    """Return the user who made ``request`` after checking that the user has the permission
    ``right``."""
    user: User = request.state.user
    if right not in user.may:
        raise HTTPException(403, f"{user.name} may not do this; permissions.{right} lists who may.")
    return user


def _is_in(name: str, may: Iterable[str]) -> bool:
    return any(each == "*" or (each == name and not _SLACK_ID.fullmatch(name)) for each in may)


def _is_ours(request: Request, csrf: str) -> bool:
    if request.headers.get("sec-fetch-site", "same-origin") != "same-origin":
        return False
    return hmac.compare_digest(request.headers.get(CSRF_HEADER, "").encode(), csrf.encode())


def _address(url: str) -> tuple[str, int | None] | None:
    """Host and port of ``url``, or None if it has no valid ones."""
    try:
        parts = urlsplit(url)
        return (parts.hostname, parts.port or _DEFAULT_PORTS.get(parts.scheme)) if parts.hostname else None
    except ValueError:
        return None


def _set_cookie(response: Response, request: Request, name: str, value: str) -> None:
    forwarded = request.headers.get("x-forwarded-proto", "").partition(",")[0].strip()
    secure = "https" in (request.url.scheme, forwarded)
    response.set_cookie(name, value, httponly=True, samesite="strict", secure=secure, path="/")
