"""Find source images whose label looks wrong, so that a user can change or confirm it. They are
listed in ``review/suspects.json``."""

from collections.abc import Callable

from pydantic import AwareDatetime, Field

from evernear.common.frozen import Document, Frozen
from evernear.common.store import Store
from evernear.data.books import file_names, opened_books
from evernear.data.list import dataset_name
from evernear.data.shards import Dataset
from evernear.data.snapshots import Snapshots
from evernear.data.sources import open_source
from evernear.embedding.clock import OnStep
from evernear.errors import DataError, StoreError
from evernear.review.queue import SIDE_PX, thumbnail
from evernear.settings import Settings

SUSPECTS = "review/suspects.json"
MAX_SUSPECTS = 500


class Suspect(Frozen):
    """An image whose label looks wrong.

    ``image`` is the sha256 of the image's pixels, and ``files`` are the names of its files in the
    source. ``margin`` is the share of neighbors with the image's label minus that with the label
    ``suggested``. ``duplicate`` is a file with nearly the same pixels and the label ``suggested``,
    or an empty string if only the neighbors contradict the label.
    """

    image: str = Field(pattern=r"^[0-9a-f]{64}$")
    files: tuple[str, ...]
    label: str
    suggested: str
    margin: float
    duplicate: str = ""


class Suspects(Document):
    """The result of a check, most suspect first. ``found`` also counts images beyond
    `MAX_SUSPECTS`."""

    remedy = "run `evernear labels check` again"

    source: str
    dataset_digest: str
    created: AwareDatetime
    found: int
    images: int
    suspects: tuple[Suspect, ...]


def load_suspects(store: Store, source: str) -> tuple[Suspect, ...]:
    """The suspects from the last check, or an empty tuple if it was of another source."""
    stored = store.find(SUSPECTS)
    checked = Suspects.from_json(stored[0], f"{store.uri}/{SUSPECTS}") if stored else None
    return checked.suspects if checked and checked.source == source else ()


def newest_dataset(store: Store, settings: Settings) -> Dataset:
    """The newest snapshot of the source."""
    name = dataset_name(settings.data, open_source(settings.data.source))
    manifest = Snapshots(store, name).head()
    if manifest is None or manifest.source != settings.data.source:
        raise DataError(f"{settings.data.source} has not been ingested into {store.uri}; run `evernear run` first.")
    return Dataset(manifest, store)


def check_labels(
    dataset: Dataset,
    settings: Settings,
    now: AwareDatetime,
    on_step: OnStep | None = None,
    on_network: Callable[[int, int], None] = lambda _done, _total: None,
) -> Suspects:
    """Look for wrong labels in the newest snapshot of the source, and save the result in its
    store. ``on_step`` and ``on_network`` follow the training of the networks."""
    from evernear.embedding.recipe import recipe_of_probe
    from evernear.evaluation.label_errors import embed_folds, find_label_errors

    store = dataset.store
    recipe = recipe_of_probe(settings.train, dataset, settings.evaluation.probe_epochs)
    if recipe.keeps_backbone:  # otherwise, each fold would compute the features of all views
        recipe = recipe.model_copy(update={"frozen": True})
    suspects: list[Suspect] = []
    found = images = 0
    with opened_books(store, dataset.manifest, ("files",)) as books:
        for embedded in embed_folds(dataset, recipe, on_step, on_network):
            errors = find_label_errors(embedded)
            found, images = found + len(errors), images + len(embedded.labels)
            for error in errors[:MAX_SUSPECTS]:
                digest, duplicate = (embedded.digests[row].tobytes() for row in (error.row, error.duplicate))
                names = file_names(books, dataset.manifest.source, [digest, duplicate])
                suspects.append(
                    Suspect(
                        image=digest.hex(),
                        files=names.get(digest, ()),
                        label=dataset.labels[int(embedded.labels[error.row])],
                        suggested=dataset.labels[error.suggested],
                        margin=error.margin,
                        duplicate=names[duplicate][0] if error.duplicate >= 0 and duplicate in names else "",
                    )
                )
    suspects.sort(key=lambda suspect: (not suspect.duplicate, suspect.margin))
    result = Suspects(
        source=settings.data.source,
        dataset_digest=dataset.digest,
        created=now,
        found=found,
        images=images,
        suspects=tuple(suspect for suspect in suspects if suspect.files)[:MAX_SUSPECTS],
    )
    store.put(SUSPECTS, result.to_json())
    return result


def picture(read: Callable[[str], bytes | None], name: str, side_px: int = SIDE_PX) -> bytes | None:
    """A PNG version of the image file ``name`` in the source, or None if it is missing,
    unreadable or broken. No side is longer than ``side_px``."""
    try:
        data = read(name)
        return None if data is None else thumbnail(data, side_px)
    except (DataError, StoreError):
        return None
