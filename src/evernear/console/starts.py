"""What a run would do for the images that users see, before they start it."""

from itertools import islice

from evernear.common.output import quantity
from evernear.console.backend import Backend
from evernear.data.books import opened_books, source_uri
from evernear.data.snapshots import Snapshots
from evernear.data.sources import open_source
from evernear.errors import EvernearError

MAX_LISTED = 20_000
"""A larger source is not compared with the release, because the listing would take too long."""
_KNOWN = "SELECT name, etag FROM files WHERE source = $source AND NOT waiting LIMIT $most"


def nothing_to_reindex(backend: Backend) -> str:
    """Why a reindex would make a release with the images of the live one, as a sentence. Empty if
    it would add or remove images, or if that is not known."""
    live = backend.live()
    if live is None:
        return "No release is live; the first one needs a training."
    head = Snapshots(backend.store, live.dataset_name).head()
    if head is None or head.digest != live.dataset_digest or backend.renamed():
        return ""
    waiting = backend.waiting(backend.latest(), live)
    try:
        entries = list(islice(open_source(backend.settings.data.source, backend.settings.data).entries(), MAX_LISTED))
    except EvernearError:
        return ""
    files = {entry.name: entry.etag for entry in entries if entry.label not in waiting}
    with opened_books(backend.store, head, ("files",)) as books:
        known = dict(books.rows(_KNOWN, source=source_uri(head.source), most=MAX_LISTED + 1))
    has_changed = any(known.get(name) != etag for name, etag in files.items())
    if len(entries) == MAX_LISTED or has_changed or known.keys() - {entry.name for entry in entries}:
        return ""
    minimum = backend.settings.validation.min_class_images
    missing = [f"{label} waits for {quantity(minimum - count, 'more image')}" for label, count in waiting.items()]
    return f"{', '.join(missing)}." if missing else "The live release has every image of the source."
