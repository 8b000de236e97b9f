"""The interface of deployment targets, the target that consists of only the registry, and the smoke
test of all targets."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from evernear.common.frozen import Frozen
from evernear.common.store import open_store
from evernear.errors import EvernearError, ServingError, TransientStoreError
from evernear.index.description import DISTANCE_TOLERANCE
from evernear.release.archive_reader import ARCHIVE_FILE, ReleaseParts, SmokeQuery
from evernear.release.promotions import CHAMPION_ALONE, Champion
from evernear.release.registry import Registry
from evernear.serving.responses import Prediction
from evernear.settings import RunSettings


@dataclass(frozen=True)
class VerifiedRollout:
    """The release's URL, and the number of stored queries that it answered.

    ``champion_fault`` says why the previous champion did not start, or is None if it did.
    """

    url: str | None = None
    smoke_queries: int = 0
    champion_fault: str | None = None


class Deployment(Frozen):
    """A release that became the champion. ``url`` is None without a server."""

    version: str
    previous: str | None
    url: str | None = None
    smoke_queries: int = 0
    champion_fault: str | None = None

    def state(self) -> str:
        """A phrase that says where the release is live, for the end of a sentence."""
        return f"is live at {self.url}" if self.url else CHAMPION_ALONE

    @classmethod
    def of(cls, champion: Champion, rollout: VerifiedRollout) -> "Deployment":
        return cls(version=champion.version, previous=champion.previous, **asdict(rollout))


class DeploymentTarget(Protocol):
    """A place where one release is live, through whose methods `evernear.deployment` deploys it."""

    def require_deployable(self) -> None:
        """Before hours of training, check that a deployment can succeed."""
        ...

    def exclusive(self) -> AbstractContextManager[object]:
        """Prevent concurrent deployments to the same target.

        Raises:
            BusyError: a different deployment does not finish in time.
        """
        ...

    def fetch(self, version: str, directory: Path) -> Path:
        """The archive of a published release, in ``directory`` or in the target's own storage."""
        ...

    def rollout(self, archive: Path, parts: ReleaseParts) -> AbstractContextManager[VerifiedRollout]:
        """Start a published release and verify it. The body then records it as the champion.

        If the rollout or the body fails, the previous release becomes live again. However, if the
        body raises a `TransientStoreError`, the new one stays live (see `unrecorded_error`).
        """
        ...

    def status(self) -> dict[str, Any]:
        """The live release and the champion, as a flat mapping."""
        ...


class RegistryTarget:
    """The registry without a server. Servers elsewhere pull the champion when they start."""

    def __init__(self, settings: RunSettings) -> None:
        self._registry = Registry(open_store(settings.store_uri))

    def require_deployable(self) -> None:
        """Do nothing, because the pipeline already writes to the store before training."""

    def exclusive(self) -> AbstractContextManager[object]:
        """Take no lock, because moving the champion pointer with compare-and-swap is sufficient."""
        return nullcontext()

    def fetch(self, version: str, directory: Path) -> Path:
        self._registry.fetch(version, directory / ARCHIVE_FILE)
        return directory / ARCHIVE_FILE

    def rollout(self, archive: Path, parts: ReleaseParts) -> AbstractContextManager[VerifiedRollout]:
        """Verify nothing, because the target has no server."""
        return nullcontext(VerifiedRollout())

    def status(self) -> dict[str, Any]:
        champion = self._registry.champion()
        return {"champion": champion.version if champion else None, "store": self._registry.uri}


def unrecorded_error(version: str, error: TransientStoreError) -> TransientStoreError:
    """The error for a verified release that stays live, but may not be recorded as the champion.

    Restoring the previous release could fail, because its archive comes from the same store. In
    addition, the champion pointer may already have moved.
    """
    return TransientStoreError(
        f"Release {version} answered its stored queries and stays in place, but it may not be recorded as the champion:"
        f" {error} When the store can be reached, `evernear registry list` shows what is recorded; if that is not "
        f"{version}, run `evernear registry promote {version}` or this step again."
    )


class PredictionClient(Protocol):
    """`evernear.serving.client.Client`, possibly with a different transport."""

    def predict(self, image: bytes, version: str | None = None) -> Prediction: ...


def smoke(client: PredictionClient, parts: ReleaseParts) -> int:
    """Send the stored queries to the release's own URL, and return the number of answered ones.

    The answers must equal the archived ones. Labels and unknown flags are compared only where
    rounding cannot change them. Distances must always agree within `DISTANCE_TOLERANCE`.

    Raises:
        ServingError: an answer is missing or differs from the stored one, or no query is stored.
    """
    version = parts.manifest.version
    queries = parts.smoke_queries()
    if not queries:
        raise ServingError(f"Release {version} has no stored queries for the smoke test.")
    for image, query in queries:
        try:
            answer = client.predict(image, version)
        except EvernearError as error:
            raise ServingError(f"Release {version} fails its smoke test with {query.file}: {error}") from None
        if not _agree(answer, query) or answer.version != version:
            raise ServingError(
                f"Release {version} fails its smoke test: {query.file} is {_words(answer)} by {answer.version}, and "
                f"was {_words(query)} when it was archived. The threshold is {parts.manifest.threshold:.4f}, and "
                f"distances may differ by {DISTANCE_TOLERANCE:g}."
            )
    return len(queries)


def _agree(answer: Prediction, query: SmokeQuery) -> bool:
    same = not query.settled or (answer.pred, answer.unknown) == (query.pred, query.unknown)
    return same and abs(answer.dist - query.dist) <= DISTANCE_TOLERANCE


def _words(prediction: Prediction | SmokeQuery) -> str:
    return f"{prediction.pred} ({'unknown' if prediction.unknown else 'known'}) at {prediction.dist:.4f}"
