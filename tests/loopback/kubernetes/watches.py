"""Watches."""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

from tests.loopback.kubernetes import selectors, status
from tests.loopback.kubernetes.calls import Call
from tests.loopback.kubernetes.store import Change, Store

Object = dict[str, Any]
Event = tuple[str, Object]
_DEFAULT_TIMEOUT_S = 1800.0
_POLL_S = 0.5


def events(store: Store, call: Call, is_cut: Callable[[], bool]) -> Iterator[list[Event]]:
    """Yield events until the watch times out, ``is_cut`` returns true, or its resourceVersion
    expires.

    Yields an empty list from time to time so that the caller can check whether the client is still
    connected.
    """
    assert call.kind is not None
    chosen = _chosen_by(call)
    end_s = time.monotonic() + float(call.query.get("timeoutSeconds") or _DEFAULT_TIMEOUT_S)
    version = int(call.query["resourceVersion"])
    while not is_cut():
        with store.changed:
            if version < store.oldest:
                reason = f"too old resource version: {version} ({store.oldest})"
                yield [("ERROR", status.ApiError(410, reason).body())]
                return
            changes, version = store.changes(call.kind, version), store.version
            events_ = [event for change in changes if (event := _event(change, chosen))]
            left_s = end_s - time.monotonic()
            if not events_ and left_s > 0 and not is_cut():
                store.changed.wait(min(left_s, _POLL_S))
        yield events_
        if left_s <= 0:
            return


def _chosen_by(call: Call) -> Callable[[Object], bool]:
    assert call.kind is not None
    by_label = selectors.labels(call.query.get("labelSelector", ""))
    by_field = selectors.fields(call.kind, call.query.get("fieldSelector", ""))

    def chosen(subject: Object) -> bool:
        in_namespace = call.namespace in ("", subject["metadata"].get("namespace", ""))
        return in_namespace and by_label(subject) and by_field(subject)

    return chosen


def _event(change: Change, chosen: Callable[[Object], bool]) -> tuple[str, Object] | None:
    """Return the event of a change under a selector, which an object may start or stop matching."""
    before, after = (None if text is None else json.loads(text) for text in (change.before, change.after))
    was = before is not None and chosen(before)
    if after is not None and chosen(after):
        return ("MODIFIED" if was else "ADDED", after)
    if not was:
        return None
    before["metadata"]["resourceVersion"] = str(change.version)
    return ("DELETED", before)
