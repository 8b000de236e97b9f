"""The local page: live queries and suspect labels with a class picker, plain forms without scripts, on loopback."""

import base64
import hmac
import socket
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from html import escape
from itertools import islice
from typing import NamedTuple
from urllib.parse import parse_qs

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from evernear.common.output import printable
from evernear.common.store import Store
from evernear.errors import EvernearError, ServingError
from evernear.review.answers import Answer, Answers, LabelTarget
from evernear.review.queue import Item, Queue
from evernear.review.suspects import Suspect, picture

PAGE_ITEMS = 60
PAGE_SUSPECTS = 24
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
.pair{display:flex;gap:6px}.pair img{min-width:0;flex:1}small{overflow-wrap:anywhere;color:var(--dim)}
form{display:flex;flex-direction:column;gap:6px;margin:auto 0 0}
select,input,button{font:inherit;width:100%;padding:6px 8px;border:1px solid var(--line);border-radius:6px;
background:var(--bg);color:var(--text);min-height:36px}
button{cursor:pointer}button.main{background:var(--accent);border-color:var(--accent);color:light-dark(#fff,#10141a);
font-weight:600}.row{display:flex;gap:10px;align-items:center;border-bottom:1px solid var(--line);padding:6px 0}
.row span{flex:1;overflow-wrap:anywhere}.row form{width:90px}
@media(max-width:420px){.grid{grid-template-columns:1fr 1fr;gap:10px}}
"""


class SuspectItem(NamedTuple):
    """A suspect with its picture, and the picture of its near-duplicate if it has one."""

    suspect: Suspect
    image: bytes
    duplicate: bytes | None


def create_review_app(
    store: Store, answers: Answers, target: LabelTarget, token: str, who: str, suspects: Sequence[Suspect] = ()
) -> Starlette:
    """The application. Each request needs ``token`` in its query; answers are recorded as ``who``'s."""
    queue = Queue(store)
    by_image = {suspect.image: suspect for suspect in suspects}

    def render(error: str = "") -> Response:
        latest = answers.latest()
        items = queue.pending(latest.keys(), PAGE_ITEMS)
        unanswered = (suspect for suspect in suspects if suspect.image not in latest)
        shown = islice(filter(None, (_suspect_item(suspect, target) for suspect in unanswered)), PAGE_SUSPECTS)
        recent = list(latest.values())[: -RECENT_ANSWERS - 1 : -1]
        errors = [*([error] if error else []), *answers.set_aside.values()]
        page = _page(items, list(shown), recent, target.labels, token, errors)
        return HTMLResponse(page, headers=_HEADERS, status_code=409 if error else 200)

    def act(form: dict[str, str]) -> None:
        action = form.get("action", "")
        image = form.get("image", "")
        suspect = by_image.get(image)
        label = (form.get("new") or form.get("label") or "").strip() if action == "label" else ""
        try:
            answer = Answer.model_validate(
                {"image": image, "action": action, "label": label, "who": who, "at": datetime.now(UTC)}
                | {"files": suspect.files if suspect else ()}
            )
        except ValueError:
            raise ServingError("The form is invalid; reload the page.") from None
        if action == "undo":
            answers.undo(answer)
        elif suspect is not None:
            if label == suspect.label:
                raise ServingError(f"The image already has the label {label}; choose another, or keep it.")
            answers.label(b"", answer)
        else:
            item = queue.find(image)
            if item is None:
                raise ServingError("The image is no longer in the queue; its log file was removed.")
            answers.label(item.image, answer)

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
            presented = request.query_params.get("token", "")
            if not hmac.compare_digest(presented.encode(), token.encode()):
                return Response("Open the URL that `evernear review` printed; its token is missing or invalid.", 403)
            try:
                return await endpoint(request)
            except EvernearError as error:
                return Response(str(error), 503)

        return check

    return Starlette(routes=[Route("/", guarded(get)), Route("/", guarded(post), methods=["POST"])])


def serve_review(app: Starlette, port: int, on_bound: Callable[[int], None]) -> None:
    """Serve on 127.0.0.1 until Ctrl-C. ``port`` 0 chooses a free one; ``on_bound`` receives the port.

    Raises:
        ServingError: the port is in use.
    """
    try:
        listener = socket.create_server(("127.0.0.1", port))
    except OSError as error:
        raise ServingError(f"Port {port} cannot be bound: {error.strerror}; choose another with --port.") from None
    with listener:
        on_bound(listener.getsockname()[1])
        config = uvicorn.Config(app, ws="none", log_level="warning", access_log=False, server_header=False)
        uvicorn.Server(config).run(sockets=[listener])


def _suspect_item(suspect: Suspect, target: LabelTarget) -> SuspectItem | None:
    """The pictures of a suspect; None if its file was moved, removed or made unreadable since the check."""
    image = picture(target.read, suspect.files[0])
    duplicate = picture(target.read, suspect.duplicate) if suspect.duplicate else None
    return SuspectItem(suspect, image, duplicate) if image else None


def _page(
    items: list[Item],
    suspects: list[SuspectItem],
    recent: list[Answer],
    labels: list[str],
    token: str,
    errors: list[str],
) -> str:
    action = f"/?token={escape(token)}"
    cards = "".join(_card(item, labels, action) for item in items)
    suspect_cards = "".join(_suspect_card(item, labels, action) for item in suspects)
    empty = "<p>The queue is empty. Servers fill it with <code>serving.query_log=images</code>.</p>"
    none = "<p>No suspect labels. <code>evernear labels check</code> looks for them.</p>"
    rows = "".join(_row(answer, action) for answer in recent)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>evernear review</title>'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{_STYLE}</style>'
        "<h1>Review queue</h1><p>Live queries that were unknown or near a boundary. An answer writes the image into "
        "its class of the source; the watcher then proposes a reindex.</p>"
        + "".join(f'<p class="error" role="alert">{escape(printable(error))}</p>' for error in errors)
        + (f'<div class="grid">{cards}</div>' if items else empty)
        + "<h2>Suspect labels</h2><p>Images of the source whose label looks wrong, the most suspect first. Relabel "
        "moves the file to the class.</p>"
        + (f'<div class="grid">{suspect_cards}</div>' if suspects else none)
        + (f"<h2>Recent answers</h2>{rows}" if recent else "")
    )


def _card(item: Item, labels: list[str], action: str) -> str:
    suggested = [label for label in item.candidates if label in labels]
    verdict = "unknown" if item.unknown else "near a boundary"
    nearest = escape(", ".join(item.candidates[:3]))
    return (
        f'<div class="card">{_picture(item.image, "query")}'
        f"<small>{verdict}, distance {item.dist:.2f}<br>nearest: {nearest}</small>"
        f"{_picker(item.id, suggested, labels, action)}"
        '<input name="new" placeholder="or a new class" maxlength="100" aria-label="New class" autocomplete="off">'
        '<button class="main" name="action" value="label">Label</button>'
        '<button name="action" value="skip">Not valid, skip</button></form></div>'
    )


def _suspect_card(item: SuspectItem, labels: list[str], action: str) -> str:
    suspect = item.suspect
    suggested = escape(suspect.suggested)
    why = f"nearly the same image is labeled <b>{suggested}</b>" if suspect.duplicate else f"looks like {suggested}"
    duplicate = _picture(item.duplicate, f"labeled {suspect.suggested}") if item.duplicate else ""
    others = [label for label in labels if label != suspect.label]
    return (
        f'<div class="card"><div class="pair">{_picture(item.image, f"labeled {suspect.label}")}{duplicate}</div>'
        f"<small>labeled <b>{escape(suspect.label)}</b>, {why}<br>{escape(suspect.files[0])}"
        f"{f' and {len(suspect.files) - 1} more' if len(suspect.files) > 1 else ''}</small>"
        f"{_picker(suspect.image, [suspect.suggested], others, action)}"
        '<button class="main" name="action" value="label">Relabel</button>'
        f'<button name="action" value="keep">Keep {escape(suspect.label)}</button></form></div>'
    )


def _picture(png: bytes, alt: str) -> str:
    return f'<img alt="{escape(alt)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'


def _picker(image: str, suggested: list[str], labels: list[str], action: str) -> str:
    """The start of a form with the classes, ``suggested`` ones first."""
    ordered = [*suggested, *(label for label in labels if label not in suggested)]
    options = "".join(f'<option value="{escape(label)}">{escape(label)}</option>' for label in ordered)
    return (
        f'<form method="post" action="{action}"><input type="hidden" name="image" value="{image}">'
        f'<select name="label" aria-label="Class">{options}</select>'
    )


def _row(answer: Answer, action: str) -> str:
    label = f"{'relabeled' if answer.files else 'labeled'} <b>{escape(answer.label)}</b>"
    action_taken = {"label": label, "keep": "kept its label"}.get(answer.action, "skipped")
    name = escape(answer.files[0]) if answer.files else answer.image[:8]
    return (
        f'<div class="row"><span>{name} {action_taken} <small>by {escape(answer.who)}, '
        f"{answer.at:%Y-%m-%d %H:%M} UTC</small></span>"
        f'<form method="post" action="{action}"><input type="hidden" name="image" value="{answer.image}">'
        '<button name="action" value="undo">Undo</button></form></div>'
    )
