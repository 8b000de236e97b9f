"""The local page: a grid of queries with a class picker, plain forms without scripts. Binds the loopback address."""

import base64
import hmac
import socket
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from html import escape
from urllib.parse import parse_qs

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from evernear.errors import EvernearError, ServingError
from evernear.review.answers import Answer, Answers, LabelTarget
from evernear.review.queue import Item, pending
from evernear.store import Store

PAGE_ITEMS = 60
RECENT_ANSWERS = 12
MAX_FORM_BYTES = 4096
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; img-src data:; style-src 'unsafe-inline'; form-action 'self';"
    " frame-ancestors 'none'; base-uri 'none'",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
}
_STYLE = """
:root{color-scheme:light dark;--bg:light-dark(#f6f7f9,#14171c);--card:light-dark(#fff,#1e232b);
--line:light-dark(#d8dce3,#363d49);--text:light-dark(#1b2027,#e6e9ee);--dim:light-dark(#5b6573,#9aa4b3);
--accent:light-dark(#1a5fd0,#6ea8ff);--warn:light-dark(#a33a00,#ffb074)}
*{box-sizing:border-box}body{margin:0 auto;max-width:1200px;padding:20px 16px;background:var(--bg);color:var(--text);
font:15px/1.45 system-ui,sans-serif}h1{font-size:22px;margin:0}h2{font-size:17px;margin:32px 0 10px}
p{color:var(--dim);margin:4px 0 18px}.error{color:var(--warn);font-weight:600}
.grid{display:grid;gap:14px;grid-template-columns:repeat(auto-fill,minmax(165px,1fr))}
.card{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:10px;display:flex;
flex-direction:column;gap:8px}
img{width:100%;aspect-ratio:1;object-fit:contain;image-rendering:pixelated;background:#8883;border-radius:6px}
small{color:var(--dim)}form{display:flex;flex-direction:column;gap:6px;margin:auto 0 0}
select,input,button{font:inherit;width:100%;padding:6px 8px;border:1px solid var(--line);border-radius:6px;
background:var(--bg);color:var(--text);min-height:36px}
button{cursor:pointer}button.main{background:var(--accent);border-color:var(--accent);color:light-dark(#fff,#10141a);
font-weight:600}.row{display:flex;gap:10px;align-items:center;border-bottom:1px solid var(--line);padding:6px 0}
.row span{flex:1;overflow-wrap:anywhere}.row form{width:90px}
@media(max-width:420px){.grid{grid-template-columns:1fr 1fr;gap:10px}}
"""


def create_app(store: Store, answers: Answers, target: LabelTarget, token: str, who: str) -> Starlette:
    """The application. Each request needs ``token`` in its query; answers are recorded as ``who``'s."""

    def render(error: str = "") -> Response:
        latest = answers.latest()
        items = pending(store, set(latest), PAGE_ITEMS)
        page = _page(items, list(latest.values())[: -RECENT_ANSWERS - 1 : -1], target.labels, token, error)
        return HTMLResponse(page, headers=_HEADERS, status_code=409 if error else 200)

    def act(form: dict[str, str]) -> None:
        action = form.get("action", "")
        image = form.get("image", "")
        label = (form.get("new") or form.get("label") or "").strip() if action == "label" else ""
        try:
            answer = Answer.model_validate(
                {"image": image, "action": action, "label": label, "who": who, "at": datetime.now(UTC)}
            )
        except ValueError:
            raise ServingError("The form is invalid; reload the page.") from None
        if action == "undo":
            answers.undo(answer)
            return
        queued = {item.id: item for item in pending(store, set(answers.latest()), PAGE_ITEMS)}
        if image not in queued:
            raise ServingError("The image is not in the queue any more; it may have been answered.")
        answers.label(queued[image].image, answer)

    async def get(request: Request) -> Response:
        return await run_in_threadpool(render)

    async def post(request: Request) -> Response:
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_FORM_BYTES:
                return Response("The form is too large.", 413)
        fields = parse_qs(body.decode(errors="replace"))
        try:
            await run_in_threadpool(act, {name: values[-1] for name, values in fields.items()})
        except EvernearError as error:
            return await run_in_threadpool(render, str(error))
        return RedirectResponse(f"/?token={token}", 303)

    def guarded(endpoint: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def check(request: Request) -> Response:
            given = request.query_params.get("token", "")
            if not hmac.compare_digest(given.encode(), token.encode()):
                return Response("Open the URL that `evernear review` printed; its token is missing or invalid.", 403)
            try:
                return await endpoint(request)
            except EvernearError as error:
                return Response(str(error), 503)

        return check

    return Starlette(routes=[Route("/", guarded(get)), Route("/", guarded(post), methods=["POST"])])


def serve(app: Starlette, port: int, on_bound: Callable[[int], None]) -> None:
    """Serve on 127.0.0.1 until Ctrl-C. ``port`` 0 takes a free one; ``on_bound`` receives the port.

    Raises:
        ServingError: the port is in use.
    """
    try:
        listening = socket.create_server(("127.0.0.1", port))
    except OSError as error:
        raise ServingError(f"Port {port} cannot be bound: {error.strerror}; choose another with --port.") from None
    with listening:
        on_bound(listening.getsockname()[1])
        config = uvicorn.Config(app, ws="none", log_level="warning", access_log=False, server_header=False)
        uvicorn.Server(config).run(sockets=[listening])


def _page(items: list[Item], recent: list[Answer], labels: list[str], token: str, error: str) -> str:
    action = f"/?token={escape(token)}"
    cards = "".join(_card(item, labels, action) for item in items)
    empty = "<p>The queue is empty. Servers fill it with <code>serving.query_log=images</code>.</p>"
    rows = "".join(_row(answer, action) for answer in recent)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>evernear review</title>'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{_STYLE}</style>'
        "<h1>Review queue</h1><p>Live queries that were unknown or near a boundary. An answer writes the image into "
        "its class of the source; the watcher then proposes a reindex.</p>"
        + (f'<p class="error" role="alert">{escape(error)}</p>' if error else "")
        + (f'<div class="grid">{cards}</div>' if items else empty)
        + (f"<h2>Recent answers</h2>{rows}" if recent else "")
    )


def _card(item: Item, labels: list[str], action: str) -> str:
    suggested = [label for label in item.candidates if label in labels]
    ordered = [*suggested, *(label for label in labels if label not in suggested)]
    options = "".join(f'<option value="{escape(label)}">{escape(label)}</option>' for label in ordered)
    verdict = "unknown" if item.unknown else "near a boundary"
    near = escape(", ".join(item.candidates[:3]))
    return (
        f'<div class="card"><img alt="query" src="data:image/png;base64,{base64.b64encode(item.image).decode()}">'
        f"<small>{verdict}, distance {item.dist:.2f}<br>nearest: {near}</small>"
        f'<form method="post" action="{action}"><input type="hidden" name="image" value="{item.id}">'
        f'<select name="label" aria-label="Class">{options}</select>'
        '<input name="new" placeholder="or a new class" maxlength="100" aria-label="New class" autocomplete="off">'
        '<button class="main" name="action" value="label">Label</button>'
        '<button name="action" value="skip">Not valid, skip</button></form></div>'
    )


def _row(answer: Answer, action: str) -> str:
    what = f"labeled <b>{escape(answer.label)}</b>" if answer.action == "label" else "skipped"
    return (
        f'<div class="row"><span>{answer.image[:8]} {what} <small>by {escape(answer.who)}, '
        f"{answer.at:%Y-%m-%d %H:%M} UTC</small></span>"
        f'<form method="post" action="{action}"><input type="hidden" name="image" value="{answer.image}">'
        '<button name="action" value="undo">Undo</button></form></div>'
    )
