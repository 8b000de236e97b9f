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
from evernear.settings import Settings
from evernear.settings.triggers import Right

CSRF_HEADER = "x-evernear-csrf"
_TOKEN_COOKIE = "evernear-token"  # noqa: S105 - its name
_CSRF_COOKIE = "evernear-csrf"
_OPEN_PATHS = ("/health",)
"""Paths without authentication, for an orchestrator's probes."""
_SAFE_METHODS = ("GET", "HEAD")
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
        if response is None and request.method not in _SAFE_METHODS and (is_new or not _is_ours(request, csrf)):
            response = PlainTextResponse("The request does not come from this console; reload the page.", 403)
        if response is None:
            scope.setdefault("state", {}).update(user=user, csrf=csrf)
            response = self._app
        await response(scope, receive, send_headers)


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
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != request.headers.get("host", ""):
        return False
    return hmac.compare_digest(request.headers.get(CSRF_HEADER, "").encode(), csrf.encode())


def _set_cookie(response: Response, request: Request, name: str, value: str) -> None:
    forwarded = request.headers.get("x-forwarded-proto", "").partition(",")[0].strip()
    secure = "https" in (request.url.scheme, forwarded)
    response.set_cookie(name, value, httponly=True, samesite="strict", secure=secure, path="/")
